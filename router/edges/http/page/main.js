// Starts the page, and keeps it up to date while it is visible.

import { get, router, useKey } from "./api.js";
import { showTrends } from "./charts.js";
import { startChat } from "./chat.js";
import { showCluster, showDiagnosis } from "./cluster.js";
import { modelQuery, showModels } from "./models.js";
import { watchRouter } from "./offline.js";
import { requestsWanted, showRequests, startRequests } from "./requests.js";
import { showTimings } from "./waterfall.js";

const SECONDS = 2;
const THEMES = ["", "light", "dark"];
const state = document.getElementById("state");

async function refresh() {
  const cluster = await get("v1/cluster");
  showModels(cluster); // first, since the chosen model may be gone
  const [diagnosis, trends, requests] = await Promise.all([
    get(`v1/diagnosis${modelQuery()}`), get(`v1/trends${modelQuery()}`), latest(),
  ]);
  showCluster(cluster);
  showDiagnosis(diagnosis);
  showTrends(trends);
  showRequests(requests);
  const ready = diagnosis.bound !== "workers";
  showState(ready ? (cluster.active_requests ? "busy" : "ready") : "not ready", ready ? "good" : "bad");
}

/** Null without an admin's key: others see the rest of the page. */
async function latest() {
  try {
    return (await get(`v1/requests?limit=${requestsWanted()}`)).data;
  } catch (error) {
    if (error.status === 403) return null;
    throw error;
  }
}

function showState(text, tone) {
  if (state.textContent !== text) state.textContent = text;
  state.className = `pill ${tone}`;
}

async function keepRefreshing() {
  for (;;) {
    if (!document.hidden) {
      try {
        await refresh();
      } catch (error) {
        showState(error.status ? error.message : "offline", "bad");
      }
    }
    await new Promise((resolve) => setTimeout(resolve, SECONDS * 1000));
  }
}

function themes() {
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  apply(localStorage.getItem("baton-theme") ?? "");
  document.getElementById("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(localStorage.getItem("baton-theme") ?? "") + 1) % THEMES.length];
    localStorage.setItem("baton-theme", next);
    apply(next);
  });
}

function keys() {
  const dialog = document.getElementById("key-dialog");
  const button = document.getElementById("key");
  let asked = false;
  router.addEventListener("locked", () => {
    button.hidden = false;
    if (!asked) dialog.showModal();
    asked = true;
  });
  button.addEventListener("click", () => dialog.showModal());
  document.getElementById("key-form").addEventListener("submit", () => {
    useKey(document.getElementById("key-value").value.trim());
  });
}

themes();
keys();
watchRouter();
startChat((id) => showTimings([id]));
startRequests();
keepRefreshing();
