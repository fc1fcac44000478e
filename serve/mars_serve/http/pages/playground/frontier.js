// Draws the measured frontier above the slider of τ, and says what a setting costs and gives.

import { h, shortNumber, svg } from "../common/dom.js";

const WIDTH = 320;
const LOSS = { top: 16, height: 84 };
const GAIN = { top: 132, height: 64 };
const HEIGHT = 200;
/** Half of the slider's thumb in CSS pixels, which its track is shorter on both sides. */
const INSET = 8;

/** The frontier of a model at a number of requests at once. */
export class Frontier {
  constructor(report, batch) {
    this.report = report;
    this.index = Math.max(0, report.batches.indexOf(batch));
    const lossless = report.rungs.filter((rung) => rung.mode !== "threshold");
    this.exact = lossless.find((rung) => rung.mode === "exact") ?? null;
    this.ar = lossless.find((rung) => rung.mode === "ar");
    this.points = report.rungs.filter((rung) => rung.mode === "threshold");
    this.lowest = this.points.length ? this.points.at(-1).confidence_threshold : 1;
  }

  get batch() {
    return this.report.batches[this.index];
  }

  /** The fastest way to decode without loss, whose gain is 1. */
  get base() {
    const exact = this.exact?.gain[this.index] ?? 0;
    return exact >= this.ar.gain[this.index] ? this.exact : this.ar;
  }

  /** Whether a gain is too small to give up quality for. */
  isDead(gain) {
    return gain < this.report.min_gain;
  }

  /** Returns what is expected of a mode and τ; between measured τ it is interpolated. */
  at(mode, tau) {
    if (mode === "ar") return this.#of(this.ar, true);
    if (mode === "exact") return this.exact && this.#of(this.exact, true);
    if (tau >= 1) return this.#of(this.ar, true);
    const above = this.points.findLast((point) => point.confidence_threshold >= tau) ?? null;
    const below = this.points.find((point) => point.confidence_threshold <= tau) ?? null;
    if (!below) return null; // lower than anything measured
    if (above === below) return this.#of(below, true);
    if (!above) return { ...this.#of(below, false), bound: below.confidence_threshold }; // between 1 and the highest
    const share = (above.confidence_threshold - tau) / (above.confidence_threshold - below.confidence_threshold);
    const [a, b] = [this.#of(above, false), this.#of(below, false)];
    const mix = (name) => a[name] + share * (b[name] - a[name]);
    return { loss: mix("loss"), low: mix("low"), high: mix("high"), speed: mix("speed"), gain: mix("gain"), perPass: mix("perPass"), breakEven: below.break_even_batch, isMeasured: false };
  }

  #of(rung, isMeasured) {
    return {
      loss: rung.mode === "threshold" ? rung.loss.value : 0,
      low: rung.mode === "threshold" ? rung.loss.low : 0,
      high: rung.mode === "threshold" ? rung.loss.high : 0,
      speed: rung.tokens_per_s[this.index],
      gain: rung.gain[this.index],
      perPass: rung.tokens_per_forward,
      breakEven: rung.break_even_batch,
      isMeasured,
    };
  }

  /** Returns the picture, whose x axis is that of a slider from `min` to 1. */
  picture(mode, tau, min) {
    const x = (value) => INSET + ((value - min) / (1 - min)) * (WIDTH - 2 * INSET);
    const points = this.points.map((point) => ({ ...this.#of(point, true), tau: point.confidence_threshold }));
    const mostLoss = Math.max(1, ...points.map((point) => point.high));
    const gains = [...points.map((point) => point.gain), 1, this.report.min_gain, this.ar.gain[this.index]];
    const [low, high] = [Math.min(...gains, 0.9) * 0.95, Math.max(...gains) * 1.05];
    const yLoss = (value) => LOSS.top + (Math.min(Math.max(value, 0), mostLoss) / mostLoss) * LOSS.height;
    const yGain = (value) => GAIN.top + GAIN.height * (1 - (value - low) / (high - low));
    const line = (y, name) => points.map((point, index) => `${index ? "L" : "M"}${x(point.tau).toFixed(1)} ${y(point[name]).toFixed(1)}`).join("");
    const band = points.length ? `${line(yLoss, "low")}${[...points].reverse().map((point) => `L${x(point.tau).toFixed(1)} ${yLoss(point.high).toFixed(1)}`).join("")}Z` : "";
    const at = mode === "threshold" ? tau : 1;
    const found = this.at(mode, tau);
    const expected = found && (mode === "threshold" ? [svg("circle", { class: "here", cx: x(at), cy: yLoss(found.loss), r: 4 }), svg("circle", { class: "here", cx: x(at), cy: yGain(found.gain), r: 4 })] : []);
    const yDead = yGain(this.report.min_gain);
    return svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": this.#label() },
      svg("text", { class: "axis", x: INSET, y: 10 }, "points lost"),
      svg("text", { class: "axis end", x: WIDTH - INSET, y: 10 }, "0"),
      svg("text", { class: "axis end", x: WIDTH - INSET, y: yLoss(mostLoss) - 4 }, shortNumber(mostLoss, 0)),
      [0, mostLoss].map((value) => svg("line", { class: "zero", x1: INSET, x2: WIDTH - INSET, y1: yLoss(value), y2: yLoss(value) })),
      svg("path", { class: "band", d: band }),
      svg("path", { class: "curve", d: line(yLoss, "loss") }),
      points.map((point) => svg("g", {}, svg("line", { class: "whisker", x1: x(point.tau), x2: x(point.tau), y1: yLoss(point.low), y2: yLoss(point.high) }), svg("circle", { class: "point", cx: x(point.tau), cy: yLoss(point.loss), r: 2.5 }))),
      svg("text", { class: "axis", x: INSET, y: GAIN.top - 8 }, `speed, × ${this.base.mode}`),
      svg("rect", { class: "dead", x: INSET, width: WIDTH - 2 * INSET, y: yDead, height: GAIN.top + GAIN.height - yDead }),
      svg("line", { class: "even", x1: INSET, x2: WIDTH - INSET, y1: yGain(1), y2: yGain(1) }),
      svg("text", { class: "axis", x: INSET + 4, y: GAIN.top + GAIN.height - 5 }, "dead zone"),
      svg("text", { class: "axis end", x: WIDTH - INSET, y: yGain(1) - 4 }, "break-even, 1×"),
      svg("path", { class: "curve", d: line(yGain, "gain") }),
      points.map((point) => svg("circle", { class: this.isDead(point.gain) ? "point lost" : "point", cx: x(point.tau), cy: yGain(point.gain), r: 2.5 })),
      mode === "threshold" && svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: LOSS.top, y2: GAIN.top + GAIN.height }),
      expected,
    );
  }

  #label() {
    const parts = this.points.map((point) => `τ ${shortNumber(point.confidence_threshold)} loses ${shortNumber(point.loss.value, 1)} points at ${shortNumber(point.gain[this.index])} times the speed`);
    return `Measured frontier for ${this.batch} requests at once. ${parts.join("; ")}.`;
  }

  /** Returns sentences on a mode and τ. */
  inWords(mode, tau) {
    const found = this.at(mode, tau);
    if (!found) {
      const what = mode === "exact" ? "Mode exact was not measured" : `No τ below ${shortNumber(this.lowest)} was measured`;
      return [h("p", {}, `${what}, so nothing is known of it.`)];
    }
    const { report } = this;
    const isLossy = mode === "threshold" && tau < 1;
    const loss = !isLossy
      ? "nothing"
      : found.bound
        ? `at most what τ ${shortNumber(found.bound)} loses: ${shortNumber(found.loss, 1)} (${shortNumber(found.low, 1)} to ${shortNumber(found.high, 1)})`
        : `${shortNumber(found.loss, 1)} ${shortNumber(found.loss, 1) === "1" ? "point" : "points"} (${shortNumber(found.low, 1)} to ${shortNumber(found.high, 1)})`;
    const rows = [
      ["Expected loss", loss],
      ["Expected speed", `${shortNumber(found.speed, 0)} tokens/s, ${shortNumber(found.gain)}× ${this.base.mode}`],
      ["Tokens a pass", shortNumber(found.perPass)],
    ];
    if (isLossy || mode === "exact") rows.push(["Break-even", found.breakEven ? `up to ${found.breakEven} requests at once` : `never faster than ${isLossy ? this.base.mode : "ar"}`]);
    const content = [h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", { class: "number" }, value)]))];
    if (isLossy && this.isDead(found.gain)) {
      content.push(h("p", { class: "dead-note" }, `Dead zone: here it costs quality and gains less than ${shortNumber((report.min_gain - 1) * 100, 0)} %. Mode ${this.base.mode} is the better choice.`));
    }
    const basis = found.isMeasured ? "Measured" : "Between measured τ";
    content.push(h("p", { class: "hint" }, `${basis}: ${report.measure} on ${report.num_items} held-out conversations, ${report.hardware}, ${report.dtype}.`));
    return content;
  }
}
