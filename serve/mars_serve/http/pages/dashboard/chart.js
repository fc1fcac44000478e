// Draws figures over time as lines. They differ by dashes and width too, so that no colour is needed.

import { h, svg } from "../common/dom.js";
import { clock } from "./format.js";

const HEIGHT = 150;
const LEFT = 52;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 22;
const MAX_POINTS = 320;
const MAX_GAP_S = 15; // seconds without rows that a line does not cross
const MEAN_OF = 5; // rows over which rates are averaged

/**
 * A chart: `series` is a list of { name, key, style, rate, step }, where `key` names a column, `style`
 * is 0 to 3, and `rate` asks for a mean of a few seconds. `format` writes a value with its unit.
 */
export class LineChart {
  constructor({ title, unit, series, format, low = 0, high = null, note = "" }) {
    Object.assign(this, { title, unit, series, format, low, high });
    this.cursor = null; // share of the width at which values are read, or null for the latest
    this.values = series.map((each) => h("span", { class: "number value" }));
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img" });
    this.when = h("span", { class: "hint number" });
    this.element = h(
      "figure",
      { class: "card chart" },
      h("figcaption", {}, h("h3", {}, title, " ", h("span", { class: "unit" }, unit)), this.when),
      h("ul", { class: "legend" }, ...series.map((each, i) => h("li", {}, swatch(each.style), `${each.name} `, this.values[i]))),
      this.plot,
      note && h("p", { class: "hint" }, note),
    );
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.moveTo(null));
    this.plot.addEventListener("keydown", (event) => this.press(event));
    this.plot.addEventListener("blur", () => this.moveTo(null));
  }

  /** Draws the rows of a model between two times. */
  update(model, from, to) {
    this.data = { model, from, to };
    this.draw();
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    this.moveTo(Math.min(Math.max(share, 0), 1));
  }

  press(event) {
    const step = { ArrowLeft: -0.02, ArrowRight: 0.02, Home: -1, End: 1 }[event.key];
    if (event.key === "Escape") this.moveTo(null);
    if (!step) return;
    event.preventDefault();
    this.moveTo(Math.min(Math.max((this.cursor ?? 1) + step, 0), 1));
  }

  moveTo(share) {
    if (share === this.cursor) return;
    this.cursor = share;
    if (this.data) this.draw();
  }

  draw() {
    const { model, from, to } = this.data;
    const width = Math.max(this.plot.clientWidth, 240);
    const rows = model.rows.filter((row) => row[0] >= from && row[0] <= to);
    const lines = this.series.map((each) => points(model, rows, each));
    const [low, high, step] = scale(lines, this.low, this.high);
    const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const at = this.cursor == null ? null : from + this.cursor * (to - from);
    const found = lines.map((line) => nearest(line, at));
    this.when.textContent = at == null ? "" : clock(found.find((each) => each)?.[0] ?? at);
    found.forEach((each, index) => (this.values[index].textContent = this.format(each?.[1] ?? null)));
    this.plot.setAttribute("aria-label", this.described(lines, at, found));
    this.plot.replaceChildren(
      svg(
        "svg",
        { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" },
        ...this.rungs(low, high, step, y, width),
        ...hours(from, to, x),
        ...lines.map((line, index) => path(line, this.series[index], x, y)).reverse(),
        at == null ? null : svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }),
      ),
    );
  }

  rungs(low, high, step, y, width) {
    const made = [];
    for (let value = low; value <= high + step / 2; value += step) {
      made.push(
        svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, this.format(value)),
      );
    }
    return made;
  }

  described(lines, at, found) {
    const known = this.series.map((each, index) => {
      const values = lines[index].map(([, value]) => value);
      if (!values.length) return `${each.name}: nothing in this time`;
      const span = `from ${this.format(Math.min(...values))} to ${this.format(Math.max(...values))}`;
      return `${each.name} ${this.format(found[index]?.[1] ?? null)}, ${span}`;
    });
    return `${this.title}, ${this.unit}, ${at == null ? "now" : `at ${clock(at)}`}: ${known.join("; ")}.`;
  }
}

/** Returns a short line in a series' style. */
export function swatch(style) {
  return svg("svg", { class: "swatch", viewBox: "0 0 24 8", "aria-hidden": "true" }, svg("path", { class: `line s${style}`, d: "M0 4H24" }));
}

/** Returns [lowest, highest, step] of an axis that holds some lines' values at round numbers. */
export function scale(lines, low, high) {
  const values = lines.flat().map(([, value]) => value);
  const most = Math.max(...values, high ?? low);
  const least = Math.min(...values, low);
  const rough = (most - least || 1) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((each) => each * power >= rough * 0.999);
  const bottom = Math.floor(least / step + 1e-9) * step;
  const top = Math.max(Math.ceil(most / step - 1e-9) * step, bottom + step);
  return [bottom, top, step];
}

/** Returns [time, value] of the rows in which a series is known, at most some hundred. */
function points(model, rows, series) {
  let known = rows.map((row) => [row[0], model.at(row, series.key)]).filter(([, value]) => value != null);
  if (series.rate) known = known.map(([time], index) => [time, mean(known.slice(Math.max(index - MEAN_OF + 1, 0), index + 1))]);
  const size = Math.ceil(known.length / MAX_POINTS);
  if (size <= 1) return known;
  const merged = [];
  for (let i = 0; i < known.length; i += size) {
    const group = known.slice(i, i + size);
    merged.push([group.at(-1)[0], mean(group)]);
  }
  return merged;
}

const mean = (group) => group.reduce((sum, [, value]) => sum + value, 0) / group.length;

function nearest(line, at) {
  if (at == null) return line.at(-1);
  let best = null;
  for (const each of line) if (!best || Math.abs(each[0] - at) < Math.abs(best[0] - at)) best = each;
  return best;
}

function path(line, series, x, y) {
  let text = "";
  line.forEach(([time, value], index) => {
    const before = line[index - 1];
    const isNew = !before || time - before[0] > MAX_GAP_S;
    if (!isNew && series.step) text += `H${x(time).toFixed(1)}`;
    text += `${isNew ? "M" : "L"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  return svg("path", { class: `line s${series.style}`, d: text || "M0 0" });
}

function hours(from, to, x) {
  const step = [30, 60, 120, 300, 600, 900, 1200].find((each) => (to - from) / each <= 5) ?? 1200;
  const made = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
    if (x(time) > x(to) - 16 || x(time) < x(from) + 16) continue;
    made.push(svg("text", { class: "tick", x: x(time), y: HEIGHT - 6, "text-anchor": "middle" }, clock(time, step < 60)));
  }
  return made;
}
