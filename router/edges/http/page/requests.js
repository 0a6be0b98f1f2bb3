// The latest requests: a table with a filter, in which two can be chosen for comparison.

import { age, count, element, time } from "./format.js";
import { showTimings, workersOf } from "./waterfall.js";

const SHOWN = 50;
const SEARCHED = 500; // while there is a filter
const GOOD = new Set(["stop", "length", "tool_calls"]);
const rows = document.getElementById("rows");
const none = document.getElementById("no-requests");
const words = document.getElementById("filter");
const outcome = document.getElementById("filter-outcome");
const compare = document.getElementById("compare");

let latest = [];
let chosen = []; // ids of at most two requests

export function startRequests() {
  words.addEventListener("input", draw);
  outcome.addEventListener("input", draw);
  compare.addEventListener("click", () => showTimings(chosen));
}

/** How many of the latest requests to ask for. */
export function requestsWanted() {
  return words.value || outcome.value ? SEARCHED : SHOWN;
}

/** `requests` is null if the caller may not see them. */
export function showRequests(requests) {
  latest = requests;
  draw();
}

function draw() {
  const found = (latest ?? []).filter(passes).slice(0, SHOWN);
  none.hidden = found.length > 0;
  none.textContent = !latest ? "Only an admin's API key shows requests." : latest.length ? "No request passes the filter." : "No requests yet.";
  const { id, kind } = rows.contains(document.activeElement) ? document.activeElement.dataset : {};
  rows.replaceChildren(...found.map(row));
  if (id) rows.querySelector(`[data-id="${CSS.escape(id)}"][data-kind="${kind}"]`)?.focus();
  compare.disabled = chosen.length < 2;
  compare.textContent = chosen.length === 1 ? "Choose one more to compare" : "Compare two";
}

function passes(request) {
  const text = `${request.request_id} ${request.model ?? ""} ${request.outcome || "in progress"} ${request.answers.map(workersOf).join(" ")}`.toLowerCase();
  const found = words.value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  return found && (!outcome.value || outcome.value === toneOf(request.outcome));
}

/** A request that the client cancelled has not failed. */
function toneOf(result) {
  if (!result) return "running";
  if (GOOD.has(result)) return "ok";
  return result === "cancelled" ? "cancelled" : "not-ok";
}

function row(request) {
  const id = request.request_id;
  const open = element("button", "", id.length > 26 ? `${id.slice(0, 25)}…` : id);
  open.type = "button";
  open.title = "Where did the time go?";
  open.addEventListener("click", () => showTimings([id]));
  const pick = element("input");
  pick.type = "checkbox";
  pick.checked = chosen.includes(id);
  pick.ariaLabel = `Compare ${id}`;
  pick.addEventListener("change", () => choose(id, pick.checked));
  for (const [kind, control] of Object.entries({ open, pick })) Object.assign(control.dataset, { id, kind });
  const first = request.answers[0];
  const answered = request.answers.reduce((sum, answer) => sum + answer.completion_tokens, 0);
  const number = (text) => element("td", "number", text);
  return element(
    "tr", "", element("td", "", pick), element("td", "", open), element("td", "", age(Date.now() / 1000 - request.arrived_at)),
    element("td", toneOf(request.outcome), request.outcome || "in progress"),
    element("td", "", workersOf(first)), number(count(first.prompt_tokens)), number(count(first.cached_tokens)),
    number(count(answered)), number(time(request.ttft_seconds)), number(time(request.end_to_end_seconds)),
  );
}

/** A third choice replaces the first. */
function choose(id, is) {
  chosen = chosen.filter((other) => other !== id);
  if (is) chosen = [...chosen.slice(-1), id];
  draw();
}
