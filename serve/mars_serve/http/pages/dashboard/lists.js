// The cards of words and tables: the decision, what has changed, replicas, audit and refusals.

import { h } from "../common/dom.js";
import { clock, count, percent, plain, plural, seconds } from "./format.js";

const MAX_SHOWN = 40;

/** A card whose content is made anew when what it shows has changed. */
class Card {
  constructor(title, attributes = {}) {
    this.body = h("div", attributes);
    this.element = h("div", { class: "card" }, h("h2", {}, title), this.body);
    this.shown = null;
  }

  show(content, make) {
    const text = JSON.stringify(content);
    if (text === this.shown) return;
    this.shown = text;
    const top = this.body.scrollTop;
    this.body.replaceChildren(...make(content));
    this.body.scrollTop = top;
  }
}

/** Says why a part of the dashboard is empty, or returns null where it is not. */
export function whyNotGoverned({ about, state }) {
  if (!about.has_threshold) return "This checkpoint has no mars.json, so it is decoded one token at a time, and there is no τ to move.";
  if (!about.is_scaled) return "This model's replicas and τ are fixed: it has no autoscaling in the server's settings.";
  if (!state?.frontier) return "No replica has reported its figures yet; the first one is starting.";
  return null;
}

/** The autoscaler's latest decision, the loss budget and the audit, in words. */
export class DecisionCard extends Card {
  constructor() {
    super("Decision now");
  }

  update(model) {
    const why = whyNotGoverned(model);
    const { decision, budget, audit, is_pinned: isPinned } = model.state ?? {};
    const parts = why ? [why] : [decision?.text ?? "Nothing is decided yet.", budgetWords(budget), auditWords(audit, model.about)];
    if (isPinned) parts.unshift("τ is set by hand; the autoscaler leaves it alone.");
    this.show(parts, (texts) => texts.map((text) => h("p", {}, text)));
  }
}

function budgetWords(budget) {
  if (!budget) return "";
  if (budget.spent_share == null) return "The loss budget is 0 points: τ stays at the target.";
  const spent = percent(budget.spent_share);
  const end = budget.is_overspent ? ", so τ stays at the target until some has come back" : "";
  return `Within the last hour ${spent} of the loss budget is spent, which is ${plain(budget.points)} points of 100 on average${end}.`;
}

function auditWords(audit, about) {
  if (!about.audit_share) return "Nothing is audited: audit.share is 0.";
  if (!audit?.num_outputs) return `No output has been audited yet; ${percent(about.audit_share)} of those with a lower τ are, while an engine is idle.`;
  const rate = audit.num_tokens ? plain((1000 * audit.num_diverged) / audit.num_tokens) : "–";
  const found = `${plural(audit.num_outputs, "output")} audited: ${rate} of 1,000 tokens are the first to differ from lossless decoding.`;
  if (audit.refuted_s) return `${found} Audits have contradicted frontier.json since ${clock(audit.refuted_s)}.`;
  return `${found} The evidence against frontier.json is ${percent(audit.evidence)} of what raises the alarm.`;
}

/** A card that lists changes with their reasons, the latest first. */
export class EventsCard extends Card {
  constructor() {
    super("What has changed, and why", { class: "events", tabindex: "0", role: "region", "aria-label": "What has changed, and why" });
  }

  update(model) {
    this.show(model.events.slice(-MAX_SHOWN).reverse(), (events) => {
      if (!events.length) return [h("p", { class: "hint" }, "Nothing has changed since the governor started.")];
      const items = events.map((each) => h("li", { class: each.kind }, h("time", { class: "number" }, clock(each.time_s)), h("span", {}, each.text)));
      return [h("ol", {}, ...items)];
    });
  }
}

const HEADS = ["Replica", "State", "τ", "Mode", "Runs", "Waits", "KV", "Why τ is there"];
const NUMBERS = new Set(["τ", "Runs", "Waits", "KV"]);

/** The replicas by node. */
export class ReplicasCard extends Card {
  constructor() {
    super("Replicas by node", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Replicas by node" });
  }

  update(model) {
    const { replicas = [], nodes = {}, num_not_listed: more = 0 } = model.state ?? {};
    const content = { rows: replicas.map(cells), nodes, more };
    this.show(content, () => {
      if (!replicas.length) return [h("p", { class: "hint" }, "No replica has reported yet.")];
      const head = h("thead", {}, h("tr", {}, ...HEADS.map((each) => h("th", { scope: "col", class: NUMBERS.has(each) && "number" }, each))));
      return [
        h("table", {}, head, ...Object.entries(nodes).map(([node, states]) => group(node, states, replicas))),
        more > 0 && h("p", { class: "hint" }, `${plural(more, "replica")} more are not listed.`),
      ].filter(Boolean);
    });
  }
}

function group(node, states, replicas) {
  const numbers = Object.entries(states).map(([state, number]) => `${number} ${state}`).join(", ");
  return h(
    "tbody",
    {},
    h("tr", {}, h("th", { scope: "rowgroup", colspan: String(HEADS.length) }, `${node}: ${numbers}`)),
    ...replicas
      .filter((each) => each.node === node)
      .map((each) => h("tr", {}, ...cells(each).map((text, index) => h("td", { class: NUMBERS.has(HEADS[index]) && "number" }, text)))),
  );
}

function cells(each) {
  const name = each.name.split("#").at(-1);
  if (each.threshold == null) return [name, `${each.state} for ${seconds(Math.floor(each.state_s))}`, "", "", "", "", "", ""];
  const taus = each.flex_threshold === each.threshold ? plain(each.threshold) : `${plain(each.threshold)} (flex ${plain(each.flex_threshold)})`;
  return [name, each.state, taus, each.mode, count(each.num_running), count(each.num_waiting), percent(each.kv_share), each.cause];
}

/** The endpoints in use, and the batches that have not ended. */
export class UseCard extends Card {
  constructor() {
    super("Endpoints and batches");
  }

  update({ state }, words) {
    const rows = byNumber(Object.entries(state?.endpoints ?? {}));
    this.show({ rows, words }, () => [countTable("Endpoint", rows), h("p", {}, words)]);
  }
}

/** Says how many batches of all keys there are; `linesPerS` is how fast the lines for one model are answered. */
export function batchWords(batches, nowS, linesPerS) {
  if (!batches) return "This server keeps no batches: storage.path is not set.";
  const { num_running: running, num_waiting: waiting, oldest_s: oldestS } = batches;
  if (!running && !waiting) return "No batch runs or waits.";
  const age = plural(Math.max(Math.floor((nowS - oldestS) / 60), 0), "minute");
  return `Batches: ${count(running)} running, ${count(waiting)} waiting, the oldest for ${age}. Lines for this model: ${plain(linesPerS)} a second.`;
}

function byNumber(rows) {
  return rows.sort((a, b) => b[1] - a[1]);
}

function countTable(title, rows) {
  if (!rows.length) return h("p", { class: "hint" }, "No request has ended since the governor started.");
  const head = h("tr", {}, h("th", { scope: "col" }, title), h("th", { scope: "col", class: "number" }, "Requests"));
  return h("table", {}, h("thead", {}, head), h("tbody", {}, rows.map(([name, number]) => h("tr", {}, h("td", {}, name), h("td", { class: "number" }, count(number))))));
}

/** How requests ended and why some were refused, since the governor's start. */
export class EndsCard extends Card {
  constructor() {
    super("How requests ended");
  }

  update(model) {
    const { ended = {}, rejected = {} } = model.state ?? {};
    const rows = byNumber([
      ...Object.entries(ended).filter(([name]) => !name.startsWith("rejected")),
      ...Object.entries(rejected).map(([name, number]) => [`refused: ${name}`, number]),
    ]);
    this.show(rows, () => [countTable("Outcome", rows)]);
  }
}
