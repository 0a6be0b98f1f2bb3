// Where the time of a request went, or of two side by side on one scale.

import { get } from "./api.js";
import { count, element, time } from "./format.js";

// Each phase's label, and the kind that sets its bar's colour.
const PHASES = {
  parse: ["parse", "router"], template: ["template", "router"], tokenize: ["tokenize", "router"],
  queue: ["router queue", "wait"], prefill_wait: ["wait for prefill", "wait"], prefill: ["prefill", "prefill"],
  fetch: ["fetch cached pages", "transfer"], reserve: ["reserve pages", "transfer"], transfer: ["transfer", "transfer"], admit: ["wait for a batch", "wait"],
  first_decode: ["first decode step", "decode"], decode: ["decode", "decode"], detokenize: ["detokenize", "router"],
  write: ["write", "router"], retry: ["lost and retried", "lost"], network: ["network, other", "other"],
  response_cache: ["response cache", "router"], verify: ["verify a cached answer", "wait"],
};

export async function showTimings(ids) {
  const dialog = document.getElementById("waterfall");
  const body = document.getElementById("waterfall-body");
  const found = await Promise.all(ids.map((id) => get(`v1/requests/${encodeURIComponent(id)}/timing`).catch((error) => error)));
  const scale = Math.max(...found.flatMap((timing) => timing.answers ?? []).map((answer) => answer.end_to_end_seconds)) || 1;
  dialog.classList.toggle("pair", ids.length > 1);
  body.replaceChildren(...found.map((timing, number) => column(ids[number], timing, scale)));
  if (!dialog.open) dialog.showModal();
}

export function workersOf(answer) {
  const { kind, similarity } = answer.response_cache ?? {};
  if (kind) return similarity === undefined ? "response cache" : `response cache (similarity ${similarity.toFixed(4)})`;
  return [answer.prefill_worker, answer.decode_worker].filter(Boolean).join(" → ") || "–";
}

function column(id, timing, scale) {
  const shown = timing instanceof Error ? [element("p", "not-ok", timing.message)] : timing.answers.flatMap((answer) => fall(answer, timing, scale));
  return element("section", "", element("p", "id", id), ...shown);
}

function fall(answer, timing, scale) {
  const each = answer.completion_tokens > 1 ? (answer.end_to_end_seconds - answer.ttft_seconds) / (answer.completion_tokens - 1) : 0;
  const tiles = [
    ["outcome", timing.outcome || "in progress"], ["first token", time(answer.ttft_seconds)],
    ["total", time(answer.end_to_end_seconds)], ["per token", time(each)], ["longest gap", time(answer.longest_gap_seconds)],
    ["prompt", `${count(answer.prompt_tokens)} (${count(answer.cached_tokens)} cached)`], ["answer", count(answer.completion_tokens)],
    ["workers", workersOf(answer)], ["placement", `${answer.policy} (${answer.reason_code})`],
  ];
  if (answer.refused_hit) tiles.push(["refused hit", `similarity ${answer.refused_hit.similarity.toFixed(4)}`]);
  if (answer.attempts > 1) tiles.push(["attempts", answer.attempts]);
  if (answer.transferred_bytes) tiles.push(["transferred", `${(answer.transferred_bytes / 2 ** 20).toFixed(1)} MiB`]);
  if (answer.chunks.length > 1) tiles.push(["chunks", answer.chunks.length]);
  const title = timing.answers.length > 1 ? [element("h3", "", `Answer ${answer.index}`)] : [];
  return [
    ...title,
    element("div", "tiles", ...tiles.map(([name, value]) => element("div", "tile", element("small", "", name), value))),
    element("ul", "fall", ...answer.phases.map((phase) => bar(phase, answer, scale))),
  ];
}

function bar(phase, answer, scale) {
  const [name, kind] = PHASES[phase.kind] ?? [phase.kind, "other"];
  const drawn = element("span", `bar p-${kind}`);
  drawn.style.left = `${Math.min(99.7, (100 * phase.start_seconds) / scale)}%`;
  drawn.style.width = `${(100 * phase.seconds) / scale}%`;
  const mark = element("span", "mark");
  mark.style.left = `${(100 * answer.ttft_seconds) / scale}%`;
  return element(
    "li", phase.hidden ? "concealed" : "", element("span", "", phase.hidden ? `${name}, hidden` : name),
    element("span", "track", mark, drawn), element("span", "time", time(phase.seconds)),
    element("span", "where", phase.worker || (kind === "other" ? "" : "router")),
  );
}
