// The topology: the router's queue, both pools with their workers, and transfers between them.

import { age, count, element, share } from "./format.js";
import { workersShown } from "./models.js";

const TONES = { none: "good", idle: "good", prefill: "warn", decode: "warn", transfer: "warn", workers: "bad" };

export function showCluster(status) {
  const workers = workersShown(status);
  document.getElementById("uptime").textContent = `${status.router_id}, up ${age(status.uptime_seconds)}`;
  const ofRole = (role) => workers.filter((worker) => worker.member.role === role);
  const [prefill, decode] = [ofRole("prefill"), ofRole("decode")];
  const others = workers.filter((worker) => !prefill.includes(worker) && !decode.includes(worker));
  const moving = decode.reduce((sum, worker) => sum + worker.load.transfers, 0);
  document.getElementById("topology").replaceChildren(
    router(status), pool("Prefill", prefill), flow(moving), pool("Decode", decode),
    ...(others.length ? [element("div", "others", element("h3", "", "Not attached"), ...others.map(card))] : []),
  );
}

export function showDiagnosis(diagnosis) {
  const verdict = document.getElementById("verdict");
  const open = verdict.querySelector("details")?.open ?? false;
  const evidence = element("details", "", element("summary", "", "evidence"), bullets(diagnosis.evidence));
  evidence.open = open;
  verdict.className = `verdict ${TONES[diagnosis.bound] ?? ""}`;
  const advice = diagnosis.advice.length ? [bullets(diagnosis.advice)] : [];
  verdict.replaceChildren(element("strong", "", sentence(diagnosis.sentence)), ...advice, evidence);
}

function sentence(words) {
  return `${words.charAt(0).toUpperCase()}${words.slice(1)}.`;
}

function bullets(lines) {
  return element("ul", "", ...lines.map((line) => element("li", "", line)));
}

function router(status) {
  const priorities = (status.queued_priorities ?? []).map((each) => `${count(each.requests)} of priority ${each.priority}`);
  const fact = (name, value) => element("span", "", element("b", "", value), ` ${name}`);
  return element(
    "div", "router", element("strong", "", "Router"), fact("in progress", count(status.active_requests)),
    fact(`of ${count(status.queue_limit)} queued${priorities.length > 1 ? ` (${priorities.join(", ")})` : ""}`, count(status.queued_requests)),
    fact("finished", count(status.finished_requests)),
    ...(status.draining ? [element("span", "not-ok", "draining")] : []),
  );
}

function pool(name, workers) {
  const waiting = workers.reduce((sum, worker) => sum + worker.load.waiting, 0);
  const title = element("h3", "", name, element("span", "dim", `${waiting} waiting`));
  const cards = workers.length ? workers.map(card) : [element("p", "dim", "no worker")];
  return element("div", "pool", title, ...cards);
}

function card(worker) {
  const { load, member } = worker;
  const usable = worker.attached && !worker.fault;
  const state = !worker.attached ? "not attached" : worker.fault ? "unusable" : worker.draining ? "draining" : `${count(load.running)} running`;
  const name = element("div", "name", element("span", "", member.worker_id), element("span", "", state));
  if (!worker.attached) return element("div", "worker down", name);
  const made = element(
    "div", usable ? "worker" : "worker down", name,
    meter("computing", worker.busy_share, 1, share(worker.busy_share)),
    meter("pages in use", worker.total_pages - load.free_pages, worker.total_pages),
    meter("pages cached", load.cached_pages, worker.total_pages),
    element("div", "tags", ...facts(worker).map((fact) => element("span", "", fact))),
  );
  if (worker.fault) made.append(element("div", "not-ok", worker.fault));
  for (const misfit of worker.misfits) made.append(element("div", "not-ok", `no pages to ${misfit.worker_id}: ${misfit.reason}`));
  return made;
}

/** A worker's tags. A router of an older version may not report all of them. */
function facts({ load, member, prompt_tokens: prompt, cached_tokens: cached, quantization, kv_dtype, adapters }) {
  return [
    member.role,
    quantization,
    kv_dtype && `${kv_dtype} pages`,
    load.guessed_tokens && `speculation: ${share(load.accepted_tokens / load.guessed_tokens)} of ${count(load.guessed_tokens)} guesses right${load.guessed_steps ? `, ${(1 + load.accepted_tokens / load.guessed_steps).toFixed(1)} tokens a step` : ""}`,
    ...(adapters ?? []).map((adapter) => `adapter ${adapter.name ?? adapter}`),
    prompt && `${share(cached / prompt)} of prompts cached`,
    load.waiting && `${count(load.waiting)} waiting`,
    load.quarantined_pages && `${count(load.quarantined_pages)} pages in quarantine`,
    load.kept_pages && `${count(load.kept_pages)} pages in the second tier`,
  ].filter(Boolean);
}

/** A bar with its value as text. */
function meter(name, value, total, words = `${count(value)} of ${count(total)}`) {
  const bar = element("i");
  bar.style.width = `${total ? (100 * value) / total : 0}%`;
  const made = element("div", "meter", element("span", "", name), element("span", "track", bar), element("span", "", words));
  made.dataset.of = name;
  return made;
}

function flow(moving) {
  return element("div", moving ? "flow moving" : "flow", element("b", "", moving), element("div", "line"), moving === 1 ? "transfer" : "transfers");
}
