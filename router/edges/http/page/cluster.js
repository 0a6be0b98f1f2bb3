// The topology: the router's queue, both pools, their pages, and transfers between them.

import { age, count, element, share } from "./format.js";

const TONES = { none: "good", idle: "good", prefill: "warn", decode: "warn", transfer: "warn", workers: "bad" };
const PAGES = ["leased", "quarantined", "cached", "empty"];

export function showCluster(status) {
  document.getElementById("model").textContent = status.model;
  document.getElementById("uptime").textContent = `${status.router_id}, up ${age(status.uptime_seconds)}`;
  const pools = { prefill: [], decode: [] };
  for (const worker of status.workers) pools[worker.member.role]?.push(worker);
  const moving = pools.decode.reduce((sum, worker) => sum + worker.load.transfers, 0);
  document.getElementById("topology").replaceChildren(
    router(status), pool("Prefill", pools.prefill), flow(moving), pool("Decode", pools.decode), legend(),
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
  const state = !worker.attached ? "not attached" : worker.fault ? "unusable" : worker.draining ? "draining" : share(worker.busy_share) + " busy";
  const counts = {
    leased: load.leased_pages, quarantined: load.quarantined_pages, cached: load.cached_pages,
    empty: load.free_pages - load.cached_pages,
  };
  const hits = worker.prompt_tokens ? `, ${share(worker.cached_tokens / worker.prompt_tokens)} hits` : "";
  const made = element(
    "div", usable ? "worker" : "worker down",
    element("div", "name", element("span", "", member.worker_id), element("span", "", state)),
    meter([[worker.busy_share, "busy"]], 1, `${member.worker_id} computes ${share(worker.busy_share)} of the time`),
    meter(PAGES.map((kind) => [counts[kind], kind]), worker.total_pages, `pages of ${member.worker_id}: ${PAGES.map((kind) => `${counts[kind]} ${kind}`).join(", ")}`),
    element("div", "figures", element("span", "", `${count(load.running)} running`), element("span", "", `${count(load.waiting)} waiting`),
      element("span", "", `${count(counts.leased)} of ${count(worker.total_pages)} pages${hits}`)),
  );
  if (worker.fault) made.append(element("div", "not-ok", worker.fault));
  return made;
}

function meter(parts, total, label) {
  const bars = parts.map(([value, kind]) => {
    const bar = element("i", `c-${kind}`);
    bar.style.width = `${total ? (100 * value) / total : 0}%`;
    return bar;
  });
  const made = element("div", "meter", ...bars);
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  made.title = label;
  return made;
}

function flow(moving) {
  return element("div", moving ? "flow moving" : "flow", element("b", "", moving), element("div", "line"), moving === 1 ? "transfer" : "transfers");
}

function legend() {
  const named = [["busy", "computing"], ...PAGES.map((kind) => [kind, kind])];
  return element("div", "legend", ...named.map(([kind, name]) => element("span", "", element("i", `c-${kind}`), name)));
}
