// The latest requests, and where the time of one went.

import { get } from "./api.js";
import { age, count, element, time } from "./format.js";

const GOOD = new Set(["stop", "length"]);

// What each phase is called, and who is at work.
const PHASES = {
  parse: ["parse", "router"], template: ["template", "router"], tokenize: ["tokenize", "router"],
  queue: ["router queue", "wait"], prefill_wait: ["wait for prefill", "wait"], prefill: ["prefill", "prefill"],
  fetch: ["fetch cached pages", "transfer"], reserve: ["reserve pages", "transfer"], transfer: ["transfer", "transfer"], admit: ["wait for a batch", "wait"],
  first_decode: ["first decode step", "decode"], decode: ["decode", "decode"], detokenize: ["detokenize", "router"],
  write: ["write", "router"], retry: ["lost and retried", "lost"], network: ["network, other", "other"],
};

export function showRequests(requests) {
  const rows = document.getElementById("rows");
  const focused = rows.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  const none = document.getElementById("no-requests");
  none.hidden = requests !== null && requests.length > 0;
  none.textContent = requests ? "No requests yet." : "Only an admin's API key shows requests.";
  rows.replaceChildren(...(requests ?? []).map(row));
  if (focused) rows.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

export async function showTiming(id) {
  const dialog = document.getElementById("waterfall");
  const body = document.getElementById("waterfall-body");
  try {
    const timing = await get(`v1/requests/${encodeURIComponent(id)}/timing`);
    body.replaceChildren(element("p", "id", timing.request_id), ...timing.answers.flatMap((answer) => fall(answer, timing)));
  } catch (error) {
    body.replaceChildren(element("p", "not-ok", error.message));
  }
  if (!dialog.open) dialog.showModal();
}

function row(request) {
  const first = request.answers[0];
  const open = element("button", "", request.request_id.length > 26 ? `${request.request_id.slice(0, 25)}…` : request.request_id);
  open.type = "button";
  open.dataset.id = request.request_id;
  open.title = "Where did the time go?";
  open.addEventListener("click", () => showTiming(request.request_id));
  const answered = request.answers.reduce((sum, answer) => sum + answer.completion_tokens, 0);
  const number = (text) => element("td", "number", text);
  return element(
    "tr", "", element("td", "", open), element("td", "", age(Date.now() / 1000 - request.arrived_at)),
    element("td", outcomeClass(request.outcome), request.outcome || "in progress"),
    element("td", "", workers(first)), number(count(first.prompt_tokens)), number(count(first.cached_tokens)),
    number(count(answered)), number(time(request.ttft_seconds)), number(time(request.end_to_end_seconds)),
  );
}

function outcomeClass(outcome) {
  return !outcome ? "running" : GOOD.has(outcome) ? "ok" : "not-ok";
}

function workers(answer) {
  if (answer.response_cache) return "response cache";
  return [answer.prefill_worker, answer.decode_worker].filter(Boolean).join(" → ") || "–";
}

function fall(answer, timing) {
  const each = answer.completion_tokens > 1 ? (answer.end_to_end_seconds - answer.ttft_seconds) / (answer.completion_tokens - 1) : 0;
  const tiles = [
    ["outcome", timing.outcome || "in progress"], ["first token", time(answer.ttft_seconds)],
    ["total", time(answer.end_to_end_seconds)], ["per token", time(each)], ["longest gap", time(answer.longest_gap_seconds)],
    ["prompt", `${count(answer.prompt_tokens)} (${count(answer.cached_tokens)} cached)`], ["answer", count(answer.completion_tokens)],
    ["workers", workers(answer)], ["placement", `${answer.policy} (${answer.reason_code})`],
  ];
  if (answer.attempts > 1) tiles.push(["attempts", answer.attempts]);
  if (answer.transferred_bytes) tiles.push(["transferred", `${(answer.transferred_bytes / 2 ** 20).toFixed(1)} MiB`]);
  if (answer.chunks.length > 1) tiles.push(["chunks", answer.chunks.length]);
  const title = timing.answers.length > 1 ? [element("h3", "", `Answer ${answer.index}`)] : [];
  return [
    ...title,
    element("div", "tiles", ...tiles.map(([name, value]) => element("div", "tile", element("small", "", name), value))),
    element("ul", "fall", ...answer.phases.map((phase) => bar(phase, answer))),
  ];
}

function bar(phase, answer) {
  const [name, kind] = PHASES[phase.kind] ?? [phase.kind, "other"];
  const total = answer.end_to_end_seconds || 1;
  const drawn = element("span", `bar p-${kind}`);
  drawn.style.left = `${Math.min(99.7, (100 * phase.start_seconds) / total)}%`;
  drawn.style.width = `${(100 * phase.seconds) / total}%`;
  const mark = element("span", "mark");
  mark.style.left = `${(100 * answer.ttft_seconds) / total}%`;
  return element(
    "li", phase.hidden ? "concealed" : "", element("span", "", phase.hidden ? `${name}, hidden` : name),
    element("span", "track", mark, drawn), element("span", "time", time(phase.seconds)), element("span", "where", phase.worker || (kind === "other" ? "" : "router")),
  );
}
