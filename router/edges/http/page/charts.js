// The last minutes as three charts, with the values at the pointer.

import { clock, count, element, svg, time } from "./format.js";

const WINDOW = 300; // seconds
const MINUTE = 60_000;
const WIDTH = 300;
const HEIGHT = 100;

export function showTrends({ points, seconds_each: each }) {
  for (const chart of CHARTS) chart.show(points, each);
}

/** Values over time as lines. A 0 means no data and leaves a gap, unless the line has `always`. */
class Chart {
  #title;
  #lines;
  #format;
  #points = [];
  #each = 1;
  #end = 0; // when the last point ended, in milliseconds since 1970
  #at = null; // the share of the width at which values are shown
  #most = element("span");
  #drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  #values = element("div", "values");
  #times = element("div", "times");
  #pointer = element("div", "pointer");
  #tip = element("div", "tip");
  #key = element("div", "key");

  constructor(title, lines, format) {
    this.#title = title;
    this.#lines = lines;
    this.#format = format;
    this.plot = element("div", "plot", this.#drawing, this.#pointer, this.#tip);
    this.plot.tabIndex = 0;
    this.plot.role = "img";
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      this.#point((event.clientX - box.left) / box.width);
    });
    for (const kind of ["pointerleave", "blur"]) this.plot.addEventListener(kind, () => this.#point(null));
    this.plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.#point(Math.min(1, Math.max(0, (this.#at ?? 1) + (step * this.#each) / WINDOW)));
    });
    const caption = element("figcaption", "", element("b", "", title), this.#most);
    this.figure = element("figure", "", caption, element("div", "axes", this.#values, this.plot, this.#times), this.#key);
  }

  show(points, each) {
    this.#points = points.slice(-WINDOW / each);
    this.#each = each;
    this.#end = Date.now();
    const most = Math.max(0, ...this.#lines.flatMap((line) => this.#of(line)));
    const top = round(most);
    this.#most.textContent = `max ${this.#format(most)}`;
    this.#values.replaceChildren(...[top, top / 2, 0].map((value) => element("span", "", value ? this.#format(value) : "0")));
    this.#draw(top);
    this.#markTimes();
    const latest = this.#lines.map((line) => `${line.name} ${this.#format(last(this.#of(line), line.always))}`);
    this.#key.replaceChildren(...latest.map((text, number) => element("span", "", swatch(this.#lines[number]), text)));
    this.plot.ariaLabel = `${this.#title}: ${latest.join(", ")}, at most ${this.#format(most)}`;
    this.#point(this.#at);
  }

  #draw(top) {
    const grid = [2, HEIGHT / 2, HEIGHT - 2].map((y) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    const paths = this.#lines.flatMap((line) => {
      const values = this.#of(line);
      const spots = values.map((value, number) => [this.#x(number) * WIDTH, HEIGHT - 2 - (value / top) * (HEIGHT - 4), value || line.always]);
      const drawn = svg("path", { d: connect(spots) });
      const dots = svg("path", { class: "dots", d: isolated(spots) });
      for (const path of [drawn, dots]) path.style.stroke = `var(${line.colour})`;
      if (!line.always || !spots.length) return [drawn, dots];
      const area = svg("path", { class: "area", d: `${connect(spots)} L${WIDTH} ${HEIGHT} L${spots[0][0]} ${HEIGHT} Z` });
      area.style.fill = `var(${line.colour})`;
      return [area, drawn];
    });
    this.#drawing.replaceChildren(...grid, ...paths);
  }

  #markTimes() {
    const marks = [];
    for (let at = Math.floor(this.#end / MINUTE) * MINUTE; at > this.#end - WINDOW * 1000; at -= MINUTE) {
      const x = 1 - (this.#end - at) / (WINDOW * 1000);
      if (x < 0.05 || x > 0.95) continue; // its label would be cut off
      const mark = element("span", "", clock(at, false));
      mark.style.left = `${100 * x}%`;
      marks.push(mark);
    }
    this.#times.replaceChildren(...marks);
  }

  #of(line) {
    return this.#points.map((point) => line.of(point, this.#each));
  }

  /** The place of a point, as a share of the width. */
  #x(number) {
    return 1 - ((this.#points.length - 1 - number) * this.#each) / WINDOW;
  }

  #point(share) {
    this.#at = share;
    const back = share === null ? 0 : Math.round(((1 - share) * WINDOW) / this.#each);
    const number = this.#points.length - 1 - back;
    const point = share === null ? null : this.#points[number];
    this.#pointer.hidden = this.#tip.hidden = !point;
    if (!point) return;
    const values = this.#lines.map((line) => element("div", "", swatch(line), `${line.name} ${this.#format(line.of(point, this.#each))}`));
    this.#tip.replaceChildren(element("b", "", clock(this.#end - back * this.#each * 1000)), ...values);
    const x = this.#x(number);
    this.#pointer.style.left = `${100 * x}%`;
    this.#tip.style.left = x < 0.5 ? `${100 * x}%` : "auto";
    this.#tip.style.right = x < 0.5 ? "auto" : `${100 * (1 - x)}%`;
  }
}

const CHARTS = [
  new Chart("Time to first token", [
    { name: "p50", colour: "--prefill", of: (point) => point.ttft.p50 },
    { name: "p90", colour: "--wait", of: (point) => point.ttft.p90 },
  ], time),
  new Chart("Between tokens", [
    { name: "p50", colour: "--decode", of: (point) => point.itl.p50 },
    { name: "p99", colour: "--transfer", of: (point) => point.itl.p99 },
  ], time),
  new Chart("Tokens per second", [
    { name: "tokens/s", colour: "--decode", of: (point, each) => point.output_tokens / each, always: true },
  ], (value) => (value < 10 && value % 1 ? value.toFixed(1) : count(value))),
];
document.getElementById("charts").replaceChildren(...CHARTS.map((chart) => chart.figure));

function swatch(line) {
  const made = element("i");
  made.style.background = `var(${line.colour})`;
  return made;
}

/** Rounds up to 1, 2, 5, 10, …, for the end of an axis. */
function round(most) {
  if (!most) return 1;
  const unit = 10 ** Math.floor(Math.log10(most));
  return unit * [1, 2, 5, 10].find((step) => step * unit >= most * 0.999);
}

function last(values, always) {
  return (always ? values.at(-1) : values.findLast((value) => value > 0)) ?? 0;
}

function connect(spots) {
  const commands = spots.map(([x, y, there], number) => (there ? `${spots[number - 1]?.[2] ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}` : ""));
  return commands.join(" ").trim();
}

/** Draws points without neighbours as dots, since they make no line. */
function isolated(spots) {
  const single = spots.filter(([, , there], number) => there && !spots[number - 1]?.[2] && !spots[number + 1]?.[2]);
  return single.map(([x, y]) => `M${x.toFixed(1)} ${y.toFixed(1)} h0.01`).join(" ");
}
