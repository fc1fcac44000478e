// Draws what each way to decode gains and loses, and where the replicas are now.

import { h, svg } from "../common/dom.js";
import { scale } from "./chart.js";
import { plain } from "./format.js";

const HEIGHT = 330;
const LEFT = 52;
const RIGHT = 24;
const TOP = 14;
const BOTTOM = 40;

/** The frontier as a figure. */
export class FrontierChart {
  constructor() {
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img" });
    this.note = h("p", { class: "hint" });
    this.element = h(
      "figure",
      { class: "card chart tall" },
      h("figcaption", {}, h("h3", {}, "Frontier ", h("span", { class: "unit" }, "gain over the base, by points lost"))),
      this.plot,
      this.note,
    );
  }

  /** Shows a model's frontier. */
  update(frontier) {
    this.note.textContent = noteOf(frontier);
    this.draw(frontier);
  }

  draw({ points, now, floor_threshold: floor }) {
    const width = Math.max(this.plot.clientWidth, 240);
    const shown = now ? [...points, now] : points;
    const [x0, x1, xStep] = scale([shown.map((each) => [0, each.loss])], 0, null);
    const [y0, y1, yStep] = scale([shown.map((each) => [0, each.gain])], 0, null);
    const x = (value) => LEFT + ((value - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
    const ladder = points.filter((each) => each.mode === "threshold");
    const grid = [];
    for (let value = y0; value <= y1 + yStep / 2; value += yStep) {
      grid.push(
        svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, `${plain(value)}×`),
      );
    }
    for (let value = x0; value <= x1 + xStep / 2; value += xStep) {
      grid.push(svg("text", { class: "tick", x: x(value), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, plain(value)));
    }
    grid.push(svg("text", { class: "tick", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "points of quality lost, of 100"));
    const line = ladder.map((each, index) => `${index ? "L" : "M"}${x(each.loss).toFixed(1)} ${y(each.gain).toFixed(1)}`).join("");
    this.plot.setAttribute("aria-label", described(points, now));
    this.plot.replaceChildren(
      svg(
        "svg",
        { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" },
        ...grid,
        line && svg("path", { class: "line s2", d: line }),
        ...points.map((each) => dot(each, x, y, floor)),
        ...labels(points, x, y),
        now && svg("path", { class: "present", d: diamond(x(now.loss), y(now.gain), 8) }),
      ),
    );
  }
}

const nameOf = (point) => (point.mode === "threshold" ? `τ ${point.threshold}` : point.mode);

function described(points, now) {
  const known = points.map((each) => `${nameOf(each)} gains ${plain(each.gain)} times and loses ${plain(each.loss)} points`);
  const present = now ? ` The replicas now gain ${plain(now.gain)} times and lose ${plain(now.loss)} points.` : "";
  return `Frontier with full batches: ${known.join("; ")}.${present}`;
}

function noteOf({ now, refused, mismatch, floor_threshold: floor }) {
  if (refused) return `frontier.json is not used, so τ stays at 1: ${refused}`;
  const parts = [now ? "The diamond is where the replicas are now, at their present number of rows; points hold for full batches." : "No replica runs."];
  parts.push(`Hollow points lie below the floor, τ ${floor}.`);
  if (mismatch) parts.push(`Speeds are another machine's: ${mismatch}.`);
  return parts.join(" ");
}

function dot(point, x, y, floor) {
  const isAllowed = point.threshold >= floor;
  return svg("circle", { class: isAllowed ? "dot" : "dot hollow", cx: x(point.loss), cy: y(point.gain), r: 4 });
}

/** Returns the points' names, above or below them where there is room. */
function labels(points, x, y) {
  const taken = [];
  const made = [];
  for (const point of points) {
    for (const shift of [-9, 17]) {
      const at = [x(point.loss), y(point.gain) + shift];
      if (taken.some(([left, top]) => Math.abs(left - at[0]) < 38 && Math.abs(top - at[1]) < 12)) continue;
      taken.push(at);
      made.push(svg("text", { class: "tick", x: at[0], y: at[1], "text-anchor": at[0] < LEFT + 20 ? "start" : "middle" }, nameOf(point)));
      break;
    }
  }
  return made;
}

const diamond = (x, y, r) => `M${x} ${y - r}L${x + r} ${y}L${x} ${y + r}L${x - r} ${y}Z`;
