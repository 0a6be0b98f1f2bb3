// The model that the page asks and shows, to be chosen if there are several.

const choice = document.getElementById("models");
const only = document.getElementById("model");

/** The chosen model's name; empty if there is only one. */
export function chosenModel() {
  return choice.hidden ? "" : choice.value;
}

/** The query string that names the chosen model. */
export function modelQuery() {
  return chosenModel() ? `?model=${encodeURIComponent(chosenModel())}` : "";
}

export function showModels(status) {
  const names = (status.models ?? []).map((model) => model.name);
  const several = names.length > 1;
  only.textContent = several ? "" : status.model;
  choice.hidden = !several;
  const shown = [...choice.options].map((option) => option.value);
  if (names.join("\n") === shown.join("\n")) return;
  const before = choice.value;
  choice.replaceChildren(...names.map((name) => new Option(name, name, false, name === before)));
}

/** The workers of the chosen model. */
export function workersShown(status) {
  const model = chosenModel();
  return status.workers.filter((worker) => !model || worker.member.model === model);
}
