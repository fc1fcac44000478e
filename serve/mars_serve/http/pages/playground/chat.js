// The conversation: messages of the user, and answers that grow pass by pass.

import { $, announce, h, shortNumber } from "../common/dom.js";
import { Figures, passes } from "./generate.js";
import { Output, visible } from "./output.js";
import { nameOf } from "./settings.js";

let history = [];

/** The messages so far, as a request gives them. */
export const conversation = () => history;

/** Forgets the conversation. */
export function clearConversation() {
  history = [];
  $("#messages").replaceChildren();
}

/** Shows messages of an example as the beginning of the conversation. */
export function begin(messages) {
  clearConversation();
  for (const message of messages) say(message);
}

/** Adds a message of the user's, or the result of a tool. */
export function say(message) {
  history = [...history, message];
  const names = { user: "You", system: "System", assistant: "Model", tool: "Result of the tool" };
  const text = h("div", { class: "said", tabindex: message.content.length > 1500 ? "0" : null }, visible(message.content));
  $("#messages").append(h("li", { class: `message ${message.role}` }, h("div", { class: "who" }, names[message.role]), text));
  scrollDown();
}

/** Takes the last message back, since the server did not take it; returns its text. */
export function takeBack() {
  const last = history.at(-1);
  history = history.slice(0, -1);
  $("#messages").lastElementChild?.remove();
  return last?.content ?? "";
}

/**
 * Sends the conversation, and shows the answer as it comes.
 *
 * Throws a Problem if nothing came; what came before a problem stays, with the problem below it.
 */
export async function answer(about, body, way, signal, onResult) {
  const output = new Output("Answer");
  const figures = new Figures();
  const meta = h("div", { class: "meta number" }, "waiting for the first token");
  const item = h("li", { class: "message assistant" }, h("div", { class: "who" }, "Model", h("span", { class: "way" }, nameOf(way))), output.element, meta);
  $("#messages").append(item);
  const ticking = setInterval(() => waitInWords(meta, figures), 500);
  let summary = null;
  let finish = null;
  try {
    for await (const pass of passes(about, body, signal)) {
      figures.note(pass);
      output.add(pass);
      summary = pass.summary ?? summary;
      finish = pass.finish ?? finish;
      showFigures(meta, figures, way, summary, finish);
      scrollDown();
    }
  } catch (error) {
    if (!figures.passes) {
      item.remove();
      throw error;
    }
    const reason = error.name === "AbortError" ? "Stopped." : error.message;
    meta.append(h("span", { class: "problem-text" }, ` ${reason}`));
    announce(reason);
  } finally {
    clearInterval(ticking);
  }
  const calls = callsOf(output);
  const message = { role: "assistant", content: output.text };
  if (calls.length) message.tool_calls = calls;
  history = [...history, message];
  if (calls.length) item.append(resultForm(calls, onResult));
  announce(`Answer: ${output.text || "a tool call"}. ${meta.textContent}`);
  return output;
}

/** Writes tokens, passes and speed into an element. */
export function showFigures(element, figures, way, summary, finish) {
  const parts = [
    figures.tokens === 1 ? "1 token" : `${figures.tokens} tokens`,
    figures.passes === 1 ? "1 pass" : `${figures.passes} passes`,
    `${shortNumber(figures.perPass)} ${figures.perPass === 1 ? "token" : "tokens"} a pass`,
    figures.perSecond ? `${shortNumber(figures.perSecond, 0)} tokens/s` : null,
    figures.waitMs !== null ? `first after ${shortNumber(figures.waitMs, 0)} ms` : null,
  ];
  const used = summary?.confidence_threshold;
  if (summary?.mode === "threshold" && Math.abs(used - way.tau) > 1e-4) parts.push(`the server used τ ${shortNumber(used, 3)}`);
  if (finish === "length") parts.push("cut at the largest output");
  element.replaceChildren(...parts.filter(Boolean).map((part) => h("span", {}, part)));
}

function waitInWords(meta, figures) {
  if (figures.passes) return;
  const seconds = Math.round((performance.now() - figures.startMs) / 1000);
  if (seconds >= 1) meta.textContent = `waiting for the first token, ${seconds} s`;
}

function callsOf(output) {
  const calls = new Map();
  for (const part of output.passes.flatMap((pass) => pass.calls)) {
    const call = calls.get(part.index) ?? { id: "", type: "function", function: { name: "", arguments: "" } };
    call.id ||= part.id ?? "";
    call.function.name ||= part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
    calls.set(part.index, call);
  }
  return [...calls.values()];
}

function resultForm(calls, onResult) {
  const inputs = calls.map((call) => h("textarea", { rows: "2", "aria-label": `Result of ${call.function.name}`, placeholder: "what the tool returned" }));
  const send = (event) => {
    event.preventDefault();
    form.remove();
    onResult(calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: inputs[index].value })));
  };
  const form = h("form", { class: "results", onsubmit: send }, calls.map((call, index) => [h("div", { class: "hint" }, `Result of ${call.function.name}`), inputs[index]]), h("button", { type: "submit" }, "Send the results"));
  return form;
}

function scrollDown() {
  const root = document.scrollingElement;
  const isNearEnd = root.scrollHeight - root.scrollTop - root.clientHeight < 240;
  if (isNearEnd) root.scrollTop = root.scrollHeight;
}
