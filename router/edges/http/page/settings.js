// Settings sent with every question: the system prompt and sampling, kept in this browser.

const KEY = "baton-settings";
const drawer = document.getElementById("settings");
const fields = [...drawer.querySelectorAll("[name]")];
const set = document.getElementById("settings-set");

export function startSettings() {
  const kept = JSON.parse(localStorage.getItem(KEY) ?? "{}");
  for (const field of fields) field.value = kept[field.name] ?? field.defaultValue;
  summarize();
  drawer.addEventListener("input", () => {
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(fields.map((field) => [field.name, field.value]))));
    summarize();
  });
  // A closed drawer would hide which field is wrong.
  drawer.addEventListener("invalid", () => (drawer.open = true), true);
  document.getElementById("defaults").addEventListener("click", () => {
    for (const field of fields) field.value = field.defaultValue;
    drawer.dispatchEvent(new Event("input"));
  });
}

/** A request's sampling fields. An empty one is left out: the router's default applies. */
export function sampling() {
  const { system, ...numbers } = values();
  return Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, Number(value)]));
}

export function systemPrompt() {
  return values().system ?? "";
}

function values() {
  const filled = fields.filter((field) => field.value.trim());
  return Object.fromEntries(filled.map((field) => [field.name, field.value.trim()]));
}

function summarize() {
  const shown = Object.entries(values()).map(([name, value]) => (name === "system" ? "system prompt" : `${name} ${value}`));
  set.textContent = shown.join(", ");
}
