// The last minutes as three small charts, drawn by hand.

import { count, element, svg, time } from "./format.js";

const WIDTH = 300;
const HEIGHT = 100;

export function showTrends(trends) {
  const { points, seconds_each: each } = trends;
  document.getElementById("charts").replaceChildren(
    chart("Time to first token", points, [
      { name: "p50", colour: "--prefill", of: (point) => point.ttft.p50 },
      { name: "p90", colour: "--wait", of: (point) => point.ttft.p90 },
    ], time),
    chart("Between tokens", points, [
      { name: "p50", colour: "--decode", of: (point) => point.itl.p50 },
      { name: "p99", colour: "--transfer", of: (point) => point.itl.p99 },
    ], time),
    chart("Tokens per second", points, [
      { name: "tokens/s", colour: "--decode", of: (point) => point.output_tokens / each, always: true },
    ], (value) => (value ? count(value) : "0"), true),
  );
}

/** Lines of figures over time; where a figure is 0 because nothing came, the line has a gap. */
function chart(title, points, lines, say, filled = false) {
  const values = lines.map((line) => points.map(line.of));
  const most = Math.max(...values.flat(), 0);
  const top = most || 1;
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  for (const share of [0, 0.5, 1]) {
    const y = HEIGHT - share * (HEIGHT - 4) - 2;
    drawing.append(svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
  }
  lines.forEach((line, number) => {
    const path = draw(values[number], top, line.always);
    if (filled && path) {
      const area = svg("path", { class: "area", d: `${path} L${WIDTH} ${HEIGHT} L${xOf(0, points.length)} ${HEIGHT} Z` });
      area.style.fill = `var(${line.colour})`;
      drawing.append(area);
    }
    const dots = svg("path", { class: "dots", d: lone(values[number], top) });
    const stroke = svg("path", { d: path });
    for (const each of [stroke, dots]) each.style.stroke = `var(${line.colour})`;
    drawing.append(stroke, dots);
  });
  const latest = lines.map((line, number) => `${line.name} ${say(last(values[number], line.always))}`).join(", ");
  drawing.setAttribute("aria-label", `${title}: ${latest}, at most ${say(most)}`);
  const keys = lines.map((line, number) => {
    const swatch = element("i");
    swatch.style.background = `var(${line.colour})`;
    return element("span", "", swatch, `${line.name} ${say(last(values[number], line.always))}`);
  });
  return element("figure", "", element("figcaption", "", element("b", "", title), element("span", "", `max ${say(most)}`)), drawing, element("div", "key", ...keys));
}

function last(values, always) {
  return (always ? values.at(-1) : values.findLast((value) => value > 0)) ?? 0;
}

function draw(values, top, always) {
  let path = "";
  let pen = false;
  values.forEach((value, number) => {
    if (!value && !always) {
      pen = false;
      return;
    }
    const x = xOf(number, values.length);
    path += `${pen ? "L" : "M"}${x} ${yOf(value, top)} `;
    pen = true;
  });
  return path.trim();
}

/** Points with nothing beside them, which make no line. */
function lone(values, top) {
  const alone = (value, number) => value && !values[number - 1] && !values[number + 1];
  return values.map((value, number) => (alone(value, number) ? `M${xOf(number, values.length)} ${yOf(value, top)} h0.01` : "")).join(" ");
}

function yOf(value, top) {
  return (HEIGHT - (value / top) * (HEIGHT - 4) - 2).toFixed(1);
}

function xOf(number, total) {
  return (total > 1 ? (number / (total - 1)) * WIDTH : 0).toFixed(1);
}
