// The same prompt in several ways of decoding, side by side, with the first difference from ar.

import { $, $$, announce, h, shortNumber } from "../common/dom.js";
import { showFigures } from "./chat.js";
import { Figures, passes } from "./generate.js";
import { Output } from "./output.js";
import { nameOf } from "./settings.js";

const START = [{ mode: "ar", tau: 1 }, { mode: "exact", tau: 1 }, { mode: "threshold", tau: 0.8 }];
const PLACES = ["1st", "2nd", "3rd"];

let lanes = [];

/** Makes the lanes for a model. */
export function makeLanes(about) {
  lanes = START.filter((way) => about.modes.includes(way.mode)).map((way, index) => new Lane(about, way, index));
  $("#lanes").replaceChildren(...lanes.map((lane) => lane.element));
  showThird();
}

/** Runs a prompt in all lanes; `bodyOf` makes a lane's request. */
export async function race(about, bodyOf, signal) {
  const running = lanes.filter((lane) => !lane.element.hidden);
  const bodies = running.map((lane) => bodyOf(lane.way));
  if (bodies.some((body) => body === null)) return;
  for (const lane of running) lane.reset();
  const ar = running.find((lane) => lane.way.mode === "ar") ?? null;
  let ended = 0;
  const run = async (lane, index) => {
    await lane.run(about, bodies[index], signal, () => compare(ar, lane, running));
    if (lane.isWhole) lane.place(PLACES[ended++]);
    compare(ar, lane, running);
  };
  if ($("#race-apart").checked) {
    for (const [index, lane] of running.entries()) await run(lane, index);
    const sorted = running.filter((lane) => lane.isWhole).sort((one, other) => one.figures.seconds - other.figures.seconds);
    for (const [index, lane] of sorted.entries()) lane.place(PLACES[index]);
  } else {
    await Promise.all(running.map(run));
  }
  for (const lane of running) lane.sum(ar);
  announce(`The race has ended. ${running.map((lane) => `${nameOf(lane.way)}: ${lane.placed ?? "not whole"}, ${lane.verdict}`).join(". ")}`);
  const failed = running.find((lane) => lane.problem && lane.problem.name !== "AbortError");
  if (failed) throw failed.problem;
}

/** Marks where lanes differ from ar, as soon as both have come so far. */
function compare(ar, changed, running) {
  if (!ar) return;
  for (const lane of changed === ar ? running : [changed]) {
    if (lane !== ar) lane.compareWith(ar);
  }
}

class Lane {
  constructor(about, way, index) {
    this.way = { ...way };
    this.index = index;
    this.mode = h("select", { "aria-label": `Mode of lane ${index + 1}`, onchange: () => this.#read() }, about.modes.map((mode) => h("option", { value: mode, selected: mode === way.mode }, mode)));
    this.tau = h("input", { type: "number", min: "0.01", max: "1", step: "0.01", value: String(way.tau), "aria-label": `τ of lane ${index + 1}`, oninput: () => this.#read() });
    this.badge = h("span", { class: "badge" });
    this.fill = h("span", { class: "fill" });
    this.meta = h("div", { class: "meta number" });
    this.note = h("p", { class: "verdict" });
    this.slot = h("div", { class: "slot" });
    this.element = h("section", { class: "lane card", "aria-label": `Lane ${index + 1}` }, h("div", { class: "lane-head" }, this.mode, this.tau, this.badge), h("div", { class: "progress", "aria-hidden": "true" }, this.fill), this.slot, this.note, this.meta);
    this.#read();
    this.reset();
  }

  reset() {
    this.output = new Output(`Output of lane ${this.index + 1}`);
    this.slot.replaceChildren(this.output.element);
    this.figures = new Figures();
    this.isWhole = false;
    this.problem = null;
    this.placed = null;
    this.verdict = "";
    this.badge.textContent = "";
    this.note.textContent = "";
    this.meta.replaceChildren();
    this.fill.style.width = "0";
    delete this.element.dataset.place;
  }

  async run(about, body, signal, onPass) {
    this.figures = new Figures();
    let summary = null;
    try {
      for await (const pass of passes(about, body, signal)) {
        this.figures.note(pass);
        this.output.add(pass);
        summary = pass.summary ?? summary;
        this.isWhole ||= pass.finish !== null;
        showFigures(this.meta, this.figures, this.way, summary, pass.finish);
        for (const lane of lanes) lane.drawProgress();
        onPass();
      }
    } catch (error) {
      this.problem = error;
      this.note.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    }
  }

  /** Draws how far the lane is, of the longest lane so far. */
  drawProgress() {
    const longest = Math.max(1, ...lanes.map((lane) => lane.output.text.length)) * 1.02;
    this.fill.style.width = `${this.isWhole ? 100 : Math.min(98, (this.output.text.length / longest) * 100)}%`;
  }

  place(name) {
    this.placed = name;
    this.badge.textContent = name;
    this.element.dataset.place = name;
    this.drawProgress();
  }

  compareWith(ar) {
    const [own, other] = [this.output.text, ar.output.text];
    const most = Math.min(own.length, other.length);
    let offset = 0;
    while (offset < most && own[offset] === other[offset]) offset += 1;
    const differs = offset < most || (this.isWhole && ar.isWhole && own.length !== other.length);
    if (differs) this.output.markDivergence(offset);
  }

  /** Says how the lane's output compares with ar's. */
  sum(ar) {
    if (this.problem || !this.isWhole) return;
    const faster = ar && ar !== this && ar.isWhole ? `${shortNumber(ar.figures.passes / this.figures.passes)}× fewer passes than ar` : "";
    if (!ar) this.verdict = "no lane in mode ar to compare with";
    else if (ar === this) this.verdict = "the one to compare with";
    else if (this.output.divergedAt === null) this.verdict = `the same text as ar, ${faster}`;
    else this.verdict = `differs from ar from character ${this.output.divergedAt + 1} on, ${faster}`;
    this.note.textContent = this.verdict.charAt(0).toUpperCase() + this.verdict.slice(1);
    this.note.classList.toggle("differs", this.output.divergedAt !== null);
  }

  take(tau) {
    this.tau.value = String(tau);
    this.#read();
  }

  #read() {
    this.way.mode = this.mode.value;
    if (this.tau.value && this.tau.checkValidity()) this.way.tau = Number(this.tau.value);
    this.tau.hidden = this.way.mode !== "threshold";
  }
}

function showThird() {
  for (const lane of lanes.slice(2)) lane.element.hidden = !$("#race-third").checked;
  $("#lanes").dataset.lanes = $$(".lane:not([hidden])").length;
}

/** Gives τ of the panel's slider to the last lane that has one. */
export function followSlider(tau) {
  lanes.findLast((lane) => lane.way.mode === "threshold")?.take(tau);
}

$("#race-third").addEventListener("change", showThird);
