// Shows that the router does not answer, and marks what the page shows as stale.

import { router } from "./api.js";
import { clock } from "./format.js";

const banner = document.getElementById("offline");
let seen = Date.now();

export function watchRouter() {
  router.addEventListener("back", () => {
    seen = Date.now();
    banner.hidden = true;
    document.body.classList.remove("stale");
  });
  router.addEventListener("lost", () => {
    if (!banner.hidden) return;
    const since = clock(seen);
    document.getElementById("offline-since").textContent = since;
    for (const mark of document.querySelectorAll(".as-of")) mark.textContent = `as of ${since}`;
    banner.hidden = false;
    document.body.classList.add("stale");
  });
}
