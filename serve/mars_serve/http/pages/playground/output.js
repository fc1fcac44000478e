// Shows an output, shaded by forward pass: one token plain, more tokens darker.

import { $, announce, h, shortNumber } from "../common/dom.js";

const MOST_SHADES = 5;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** Returns text in which characters that nobody sees, or that turn text around, are shown. */
export function visible(text) {
  return text.replace(CONTROLS, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

/** The text of one answer, which grows pass by pass. */
export class Output {
  constructor(label) {
    this.element = h("div", { class: "output", role: "group", tabindex: "0", "aria-label": `${label}. Arrow keys go from pass to pass.` });
    this.passes = [];
    this.text = "";
    this.thinking = "";
    this.active = -1;
    this.divergedAt = null;
    this.boxes = new Map();
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("blur", () => this.#leave());
  }

  /** Adds a pass. */
  add(pass) {
    const index = this.passes.length;
    const entry = { ...pass, index, start: this.text.length, spans: [] };
    this.passes.push(entry);
    this.text += pass.text;
    this.thinking += pass.reasoning;
    if (pass.reasoning) this.#append("thinking", pass.reasoning, entry);
    for (const call of pass.calls) this.#appendCall(call, entry);
    const hasOther = pass.reasoning || pass.calls.length;
    if (pass.text || !hasOther) this.#append("answer", pass.text, entry);
  }

  /** Marks the place from which on the text differs from that of mode ar. */
  markDivergence(offset) {
    if (this.divergedAt !== null) return;
    this.divergedAt = offset;
    const entry = this.passes.findLast((pass) => pass.start <= offset && pass.text) ?? this.passes.at(-1);
    const span = entry?.spans.at(-1);
    const marker = h("span", { class: "divergence" }, h("span", { class: "sr-only" }, "First difference from ar: "));
    if (!span) {
      this.#box("answer").append(marker);
      return;
    }
    const cut = offset - entry.start;
    span.replaceChildren(...inked(entry.text.slice(0, cut)), marker, ...inked(entry.text.slice(cut)));
  }

  #append(kind, text, entry) {
    this.#box(kind).append(this.#span(text, entry));
  }

  #appendCall(call, entry) {
    const box = this.#box(`call-${call.index}`, call.function?.name);
    box.append(this.#span(call.function?.arguments ?? "", entry));
  }

  #span(text, entry) {
    const shade = Math.min(Math.max(entry.tokens, 1), MOST_SHADES);
    const span = h("span", { class: "pass", "data-shade": shade, "data-tokens": entry.tokens }, inked(text));
    entry.spans.push(span);
    span.addEventListener("pointerenter", () => inspect(entry, span));
    span.addEventListener("pointerleave", hideInspector);
    span.addEventListener("click", () => inspect(entry, span));
    return span;
  }

  #box(kind, name = null) {
    let box = this.boxes.get(kind);
    if (box) return box;
    box = h("div", { class: `text ${kind.startsWith("call") ? "call" : kind}` });
    if (kind === "thinking") this.element.append(h("div", { class: "hint" }, "Thinking"));
    if (name) this.element.append(h("div", { class: "hint" }, "Calls ", h("code", {}, visible(name))));
    this.element.append(box);
    this.boxes.set(kind, box);
    return box;
  }

  #key(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Escape") return this.#leave();
    let next = this.active + (steps[event.key] ?? 0);
    if (event.key === "Home") next = 0;
    else if (event.key === "End") next = this.passes.length - 1;
    else if (!steps[event.key]) return undefined;
    event.preventDefault();
    next = Math.min(Math.max(next, 0), this.passes.length - 1);
    const entry = this.passes[next];
    if (!entry) return undefined;
    this.#activate(next);
    inspect(entry, entry.spans[0]);
    announce(inWords(entry));
    return undefined;
  }

  #activate(index) {
    for (const span of this.passes[this.active]?.spans ?? []) span.classList.remove("active");
    this.active = index;
    for (const span of this.passes[index]?.spans ?? []) span.classList.add("active");
  }

  #leave() {
    this.#activate(-1);
    hideInspector();
  }
}

/** Returns text whose shade leaves out the space around it, which would hang over a line's end. */
function inked(text) {
  const [, before, ink, after] = /^(\s*)(.*?)(\s*)$/s.exec(text);
  if (!ink) return text ? [h("span", { class: "ink" }, visible(text))] : [];
  return [visible(before), h("span", { class: "ink" }, visible(ink)), visible(after)];
}

function percent(value) {
  return value == null ? "–" : (Math.floor(value * 1000) / 1000).toFixed(3);
}

function inWords(entry) {
  const threshold = entry.details?.confidence_threshold;
  const tokens = entry.details?.accepted.map((each) => `${each.token.trim() || "space"} ${percent(each.confidence)}`).join(", ");
  const rejected = entry.details?.rejected.map((each) => each.token.trim() || "space").join(", ");
  return [
    `Pass ${entry.index + 1}, ${entry.tokens} ${entry.tokens === 1 ? "token" : "tokens"}: ${visible(entry.text)}.`,
    tokens ? `Confidence: ${tokens}${threshold < 1 ? ` against τ ${shortNumber(threshold)}` : ""}.` : "",
    rejected ? `Rejected: ${rejected}.` : "",
  ].join(" ");
}

/** Shows what is known about a pass beside it. */
function inspect(entry, span) {
  const box = $("#inspector");
  const { details } = entry;
  const threshold = details?.confidence_threshold ?? 1;
  const head = h("div", { class: "inspector-head" }, h("strong", {}, `Pass ${entry.index + 1}`), h("span", {}, `${entry.tokens} ${entry.tokens === 1 ? "token" : "tokens"}`));
  const content = details
    ? [
        h("p", { class: "hint" }, threshold < 1 ? `Accepted while confidence is at least τ = ${shortNumber(threshold)}` : "Checked against ar, so confidence does not decide"),
        ...details.accepted.map((each, place) => bar(each, threshold, place === 0 ? "first" : "")),
        ...details.rejected.map((each, place) => bar(each, threshold, place === 0 ? "rejected" : "rejected behind")),
      ]
    : [h("p", { class: "hint" }, "Turn on the details of each pass in the settings to see confidences and rejected proposals.")];
  box.replaceChildren(head, ...content);
  box.hidden = false;
  const place = (span.getClientRects()[0] ?? span.getBoundingClientRect());
  const width = box.offsetWidth;
  const height = box.offsetHeight;
  const left = Math.min(Math.max(8, place.left), window.innerWidth - width - 8);
  const below = place.bottom + 8;
  const top = below + height > window.innerHeight - 8 ? Math.max(8, place.top - height - 8) : below;
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}

function bar(proposal, threshold, kind) {
  const fill = h("span", { class: "fill" });
  fill.style.width = `${Math.min(Math.max(proposal.confidence, 0), 1) * 100}%`;
  const track = h("span", { class: "track" }, fill);
  if (threshold < 1 && kind !== "first") {
    const tick = h("span", { class: "tick" });
    tick.style.left = `${threshold * 100}%`;
    track.append(tick);
  }
  const notes = { first: "always taken", rejected: "rejected", "rejected behind": "behind it" };
  return h("div", { class: `proposal ${kind}` }, h("code", {}, visible(JSON.stringify(proposal.token).slice(1, -1)).replaceAll(" ", "␣")), track, h("span", { class: "number" }, percent(proposal.confidence)), h("span", { class: "hint" }, notes[kind] ?? ""));
}

function hideInspector() {
  $("#inspector").hidden = true;
}

window.addEventListener("scroll", hideInspector, { passive: true, capture: true });
