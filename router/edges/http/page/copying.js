// Buttons that copy text.

import { button, element } from "./format.js";

const SHOWN = 1500; // milliseconds

export function copyButton(text, kind = "") {
  const made = button("Copy", kind, async () => {
    made.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (made.textContent = "Copy"), SHOWN);
  });
  return made;
}

/** Without TLS, browsers have no clipboard API except on localhost. execCommand still works there. */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = element("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
