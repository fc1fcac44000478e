// The panel of settings: reads them into fields of a request, and says what a model cannot do.

import { $, $$, h, shortNumber } from "../common/dom.js";
import { Frontier } from "./frontier.js";

const MODE_HINTS = {
  ar: "One token a pass: plain decoding, which the others are compared with.",
  exact: "Several tokens a pass, and the same output as ar.",
  threshold: "Several tokens a pass as long as their confidence is at least τ. Faster, and it may differ from ar.",
};
const NUMBERS = { temperature: "temperature", "top-p": "top_p", "top-k": "top_k", seed: "seed", "max-tokens": "max_tokens" };
const DEFAULT_TAU = 0.9;

let about = null;

/** Shows what a model can do. */
export function showModel(told) {
  about = told;
  for (const input of $$("input[name=mode]")) {
    input.disabled = !told.modes.includes(input.value);
    input.checked = input.value === told.mode;
  }
  const { frontier } = told;
  const lowest = frontier?.rungs.at(-1).confidence_threshold ?? 1;
  $("#tau").min = Math.min(0.3, Math.max(0.05, lowest - 0.1));
  $("#tau").value = told.confidence_threshold < 1 ? told.confidence_threshold : DEFAULT_TAU;
  $("#batch").replaceChildren(...(frontier?.batches ?? []).map((batch) => h("option", { value: batch }, String(batch))));
  $("#batch-field").hidden = !frontier;
  const problem = told.tools ? "" : "The chat template of this model has no known place for tools, so the server refuses them.";
  $("#tools-hint").textContent = problem;
  $("#system").disabled = !told.chat;
  $("#system").placeholder = told.chat ? "Say how the model is to answer" : "This model has no chat template, so there is no system prompt";
  draw();
}

/** Returns the chosen mode and τ. */
export function decoding() {
  return { mode: $("input[name=mode]:checked").value, tau: Number($("#tau").value) };
}

/** Returns a short name of a mode and τ. */
export const nameOf = ({ mode, tau }) => (mode === "threshold" ? `τ ${shortNumber(tau)}` : mode);

function fieldsOf({ mode, tau }) {
  const fields = about.modes.length > 1 ? { mode } : {};
  if (mode === "threshold") fields.confidence_threshold = tau;
  if ($("#details").checked) fields.return_passes = true;
  return fields;
}

/**
 * Returns the body of a request, or null where a setting cannot be read, which the panel then says.
 */
export function requestOf(messages, way) {
  const own = {};
  for (const [id, name] of Object.entries(NUMBERS)) {
    const input = $(`#${id}`);
    if (input.value === "" && !input.validity.badInput) continue;
    if (!input.checkValidity()) {
      input.closest("details").open = true;
      input.reportValidity();
      return null;
    }
    own[name] = Number(input.value);
  }
  if ($("#stop-strings").value) own.stop = $("#stop-strings").value;
  const schema = json("schema", "object", (value) => !Array.isArray(value));
  const tools = json("tools", "list", Array.isArray);
  if (schema === undefined || tools === undefined) return null;
  if (schema) own.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools) own.tools = tools;
  if (tools && $("#tools-required").checked) own.tool_choice = "required";
  const prompt = about.chat ? { messages: withSystem(messages) } : { prompt: messages.map((each) => each.content).join("\n") };
  if (!about.chat) own.max_tokens ??= 128;
  return { model: about.model, ...prompt, ...own, ...fieldsOf(way), stream: true };
}

function withSystem(messages) {
  const system = $("#system").value.trim();
  if (!system || messages[0]?.role === "system") return messages;
  return [{ role: "system", content: system }, ...messages];
}

/** Returns the JSON of a text box, null if it is empty, undefined if it cannot be read. */
function json(id, kind, isRight) {
  const box = $(`#${id}`);
  const problem = $(`#${id}-problem`);
  problem.textContent = "";
  box.removeAttribute("aria-invalid");
  if (!box.value.trim()) return null;
  try {
    const value = JSON.parse(box.value);
    if (value && typeof value === "object" && isRight(value)) return value;
    problem.textContent = `This has to be a JSON ${kind}.`;
  } catch (error) {
    problem.textContent = `This is no JSON (${error.message}).`;
  }
  box.setAttribute("aria-invalid", "true");
  box.closest("details").open = true;
  box.focus();
  return undefined;
}

function draw() {
  if (!about) return;
  const { mode, tau } = decoding();
  const lack = "This model has no mars.json, so it proposes nothing by masks. Train it with marsray train to get all modes.";
  $("#mode-hint").textContent = about.modes.includes("threshold") ? MODE_HINTS[mode] : `${MODE_HINTS[mode]} ${lack}`;
  $("#tau").disabled = mode !== "threshold";
  $("#tau-value").textContent = tau.toFixed(2);
  const expected = $("#expected");
  if (!about.frontier) {
    $("#frontier").replaceChildren();
    const remedy = about.modes.length > 1 ? "What a τ costs and gains was not measured for this model. Run marsray calibrate on its checkpoint, and the measured frontier shows here." : "";
    expected.replaceChildren(h("p", {}, remedy), h("p", { class: "hint" }, `The server says: ${about.missing.frontier}.`));
  } else {
    const frontier = new Frontier(about.frontier, Number($("#batch").value));
    $("#frontier").replaceChildren(frontier.picture(mode, tau, Number($("#tau").min)));
    expected.replaceChildren(...frontier.inWords(mode, tau));
  }
  const floor = about.key.min_confidence_threshold;
  if (mode === "threshold" && tau < floor) expected.append(h("p", { class: "dead-note" }, `Your key has a floor: the server uses τ ${shortNumber(floor)} instead.`));
  const spoken = mode === "threshold" ? `τ ${tau.toFixed(2)}` : `mode ${mode}`;
  $("#tau").setAttribute("aria-valuetext", spoken);
}

for (const input of [...$$("input[name=mode]"), $("#tau"), $("#batch")]) input.addEventListener("input", draw);
for (const id of ["schema", "tools"]) {
  $(`#${id}`).addEventListener("input", () => {
    $(`#${id}-problem`).textContent = "";
    $(`#${id}`).removeAttribute("aria-invalid");
  });
}
