// Formats numbers for people, and makes elements.

export function time(seconds) {
  if (!seconds) return "–";
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  return `${seconds.toFixed(2)} s`;
}

export function count(number) {
  return Math.round(number).toLocaleString("en");
}

export function share(part) {
  return `${Math.round(part * 100)}%`;
}

export function age(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds / 3600) % 24} h`;
}

/** The time of day, given milliseconds since 1970. */
export function clock(milliseconds, seconds = true) {
  return new Date(milliseconds).toTimeString().slice(0, seconds ? 8 : 5);
}

/** An element with a class, and text or children. Text is never read as HTML. */
export function element(tag, kind = "", ...children) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function button(text, kind, click) {
  const made = element("button", kind, text);
  made.type = "button";
  made.addEventListener("click", click);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
