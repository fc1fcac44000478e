// The dashboard: connects the stream of figures to tiles, charts and lists.

import { key, onKey } from "../common/api.js";
import "../common/connection.js";
import { $, h } from "../common/dom.js";
import { askForKey, noteKeyTaken } from "../common/keybox.js";
import { LineChart } from "./chart.js";
import { Feed } from "./feed.js";
import { clock, count, percent, plain, rate, seconds } from "./format.js";
import { FrontierChart } from "./frontier.js";
import { batchWords, DecisionCard, EndsCard, EventsCard, ReplicasCard, UseCard, whyNotGoverned } from "./lists.js";

const SPANS = [
  [300, "5 min"],
  [900, "15 min"],
  [3600, "1 h"],
];
const PERCENTILES = (name) => [
  { name: "p50", key: `${name}_p50_s`, style: 0 },
  { name: "p95", key: `${name}_p95_s`, style: 1 },
  { name: "p99", key: `${name}_p99_s`, style: 2 },
];

const charts = [
  new LineChart({
    title: "τ",
    unit: "mean over ready replicas",
    format: plain,
    low: 0.9,
    high: 1,
    series: [
      { name: "default", key: "threshold", style: 0, step: true },
      { name: "flex", key: "flex_threshold", style: 1, step: true },
    ],
  }),
  new LineChart({
    title: "Replicas",
    unit: "number",
    format: plain,
    series: [
      { name: "ready", key: "num_ready", style: 0, step: true },
      { name: "starting", key: "num_starting", style: 1, step: true },
      { name: "draining", key: "num_draining", style: 2, step: true },
      { name: "ordered", key: "num_ordered", style: 3, step: true },
    ],
  }),
  new LineChart({
    title: "Requests",
    unit: "per second, mean of 5 s",
    format: rate,
    series: [
      { name: "arrive", key: "arrived_per_s", style: 0, rate: true },
      { name: "end", key: "ended_per_s", style: 1, rate: true },
      { name: "refused", key: "rejected_per_s", style: 2, rate: true },
      { name: "fail", key: "failed_per_s", style: 3, rate: true },
    ],
  }),
  new LineChart({
    title: "Queue",
    unit: "requests, by tier",
    format: plain,
    series: [
      { name: "wait, default", key: "waiting_default", style: 0 },
      { name: "wait, priority", key: "waiting_priority", style: 1 },
      { name: "wait, flex", key: "waiting_flex", style: 2 },
      { name: "run", key: "num_running", style: 3 },
    ],
  }),
  new LineChart({
    title: "Tokens",
    unit: "per second, mean of 5 s",
    format: rate,
    series: [
      { name: "output", key: "generated_per_s", style: 0, rate: true },
      { name: "prompt", key: "prompt_per_s", style: 1, rate: true },
    ],
  }),
  new LineChart({
    title: "Tokens a pass",
    unit: "for each request, mean of 5 s",
    format: plain,
    series: [{ name: "tokens", key: "tokens_per_pass", style: 0, rate: true }],
  }),
  new LineChart({ title: "Time to first token", unit: "over 10 s", format: seconds, series: PERCENTILES("ttft") }),
  new LineChart({ title: "Time between tokens", unit: "over 10 s", format: seconds, series: PERCENTILES("gap") }),
  new LineChart({
    title: "Cache",
    unit: "share",
    format: percent,
    high: 1,
    series: [
      { name: "KV in use", key: "kv_share", style: 0 },
      { name: "prompt tokens found", key: "prefix_hit_share", style: 1, rate: true },
    ],
  }),
];
const budget = new LineChart({
  title: "Budget and audit",
  unit: "share of the limit",
  format: percent,
  high: 1,
  series: [
    { name: "budget spent", key: "spent_share", style: 0 },
    { name: "evidence against frontier", key: "evidence", style: 1 },
  ],
});
const frontier = new FrontierChart();
const decision = new DecisionCard();
const ends = new EndsCard();
const use = new UseCard();
const cards = [new EventsCard(), new ReplicasCard()];
const why = h("p", { class: "card hint" });

const placed = [...charts.slice(0, -1), frontier, charts.at(-1), budget]; // the frontier takes two rows
$("#charts").append(...placed.map((each) => each.element), why);
$("#now").append(decision.element, ends.element, use.element);
$("#lists").append(...cards.map((each) => each.element));

const TILES = [
  ["τ", tauText, modeText],
  ["Replicas", (m) => count(m.at(m.latest, "num_ready")), replicaText],
  ["Requests", (m) => count(m.at(m.latest, "num_running")), (m) => `run, ${count(m.at(m.latest, "num_waiting"))} wait`],
  ["Output", (m) => rate(lately(m, "generated_per_s")), () => "tokens per second"],
  ["Tokens a pass", (m) => plain(lately(m, "tokens_per_pass")), () => "for each request"],
  ["First token", (m) => seconds(m.state?.minute?.ttft.p50_s), (m) => minuteText(m.state?.minute?.ttft)],
  ["Between tokens", (m) => seconds(m.state?.minute?.gap.p50_s), (m) => minuteText(m.state?.minute?.gap)],
  ["Budget", (m) => percent(m.state?.budget?.spent_share), (m) => (m.state?.budget ? `spent of ${plain(m.state.budget.points)} points an hour` : "no loss budget")],
].map(([name, value, detail]) => {
  const parts = { value: h("div", { class: "figure number" }), detail: h("div", { class: "hint number" }) };
  $("#tiles").append(h("div", { class: "card tile" }, h("h2", {}, name), parts.value, parts.detail));
  return () => {
    parts.value.textContent = value(chosen);
    parts.detail.textContent = detail(chosen);
  };
});

let chosen = null;
let spanS = SPANS[0][0];
let isBroken = false;
let askedWith; // the key with which the dialog was opened last; it opens once for each

for (const [value, name] of SPANS) {
  const input = h("input", { type: "radio", name: "span", value: String(value), checked: value === spanS, onchange: () => show((spanS = value)) });
  $("#span").append(h("label", {}, input, name));
}
$("#model").addEventListener("change", (event) => {
  chosen = feed.models.get(event.target.value);
  show();
});
window.addEventListener("resize", () => show());
document.addEventListener("visibilitychange", () => show());
onKey(() => feed.restart());
const feed = new Feed(update, tellProblem);

function update() {
  noteKeyTaken();
  const names = [...feed.models.keys()];
  chosen = feed.models.get(chosen?.name) ?? feed.models.get(names[0]);
  const select = $("#model");
  if (select.dataset.names !== JSON.stringify(names)) {
    select.dataset.names = JSON.stringify(names);
    select.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === chosen.name }, name)));
    $("#model-field").hidden = names.length < 2;
  }
  $("#model-name").textContent = names.length < 2 ? chosen.name : "";
  show();
}

function tellProblem(problem) {
  const element = $("#problem");
  if (!problem) {
    if (isBroken) element.hidden = true;
    isBroken = false;
    return;
  }
  isBroken = true;
  const text = problemText(problem);
  if (element.textContent !== text || element.hidden) {
    element.textContent = text;
    element.hidden = false;
  }
  $("#waiting").hidden = true;
  if (problem.needsKey && askedWith !== key()) {
    askedWith = key();
    askForKey(text);
  }
}

function problemText(problem) {
  const since = chosen?.latest ? ` What is shown ended at ${clock(chosen.latest[0])}.` : "";
  if (problem.status === 401) return `This dashboard needs the key of an administrator, and the one given is missing, wrong or expired.${since}`;
  if (problem.status === 403) return `${problem.message}.${since}`;
  if (problem.status === 429) return `${problem.message}; this page tries again by itself.${since}`;
  return `The server does not answer; it may be restarting. This page reconnects by itself.${since}`;
}

function show() {
  if (!chosen || document.visibilityState === "hidden") return;
  $("#waiting").hidden = true;
  $("#board").hidden = false;
  $("#told").textContent = chosen.problem ?? (chosen.latest ? `As of ${clock(chosen.latest[0])}` : "No figures yet.");
  $("#told").classList.toggle("problem-text", Boolean(chosen.problem));
  if (!chosen.state) return;
  TILES.forEach((draw) => draw());
  const to = Math.floor(feed.nowS);
  const reason = whyNotGoverned(chosen);
  for (const chart of charts) chart.update(chosen, to - spanS, to);
  charts[0].element.hidden = !chosen.about.has_threshold; // a plain AR model has no τ
  for (const each of [budget, frontier]) each.element.hidden = Boolean(reason);
  if (!reason) {
    budget.update(chosen, to - spanS, to);
    frontier.update(chosen.state.frontier);
  }
  why.hidden = !reason;
  why.textContent = `There is no loss budget, audit or frontier to show. ${reason}`;
  decision.update(chosen);
  use.update(chosen, batchWords(feed.batches, feed.nowS, lately(chosen, "batch_lines_per_s")));
  for (const card of [ends, ...cards]) card.update(chosen);
}

/** Returns the mean of a figure over the latest ten seconds. */
function lately(model, name) {
  const known = model.rows.slice(-10).map((row) => model.at(row, name)).filter((value) => value != null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function tauText(model) {
  return model.about.has_threshold ? plain(model.at(model.latest, "threshold")) : "none";
}

function modeText(model) {
  if (!model.about.has_threshold) return "mode ar: one token a pass";
  const modes = [...new Set((model.state.replicas ?? []).map((each) => each.mode).filter(Boolean))];
  const flex = model.at(model.latest, "flex_threshold");
  const text = modes.length ? `mode ${modes.join(" and ")}` : "no replica runs";
  return flex != null && flex !== model.at(model.latest, "threshold") ? `${text}, flex ${plain(flex)}` : text;
}

function replicaText(model) {
  const parts = [["num_starting", "starting"], ["num_draining", "draining"]]
    .filter(([name]) => model.at(model.latest, name))
    .map(([name, word]) => `${count(model.at(model.latest, name))} ${word}`);
  return parts.length ? `ready, ${parts.join(", ")}` : `ready, at most ${count(model.about.max_replicas)}`;
}

function minuteText(found) {
  if (!found?.number) return "none in the last minute";
  return `median of 1 min; p95 ${seconds(found.p95_s)}, p99 ${seconds(found.p99_s)}`;
}
