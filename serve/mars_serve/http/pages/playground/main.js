// The playground: picks a model, sends what is typed in, and says what goes wrong.

import { ask, key, onKey } from "../common/api.js";
import { lookNow, onConnection } from "../common/connection.js";
import { $, $$, copyText, h, shortNumber } from "../common/dom.js";
import { askForKey, noteKeyTaken } from "../common/keybox.js";
import { showBatches } from "./batches.js";
import { answer, begin, clearConversation, conversation, say, takeBack } from "./chat.js";
import { followSlider, makeLanes, race } from "./race.js";
import { decoding, requestOf, showModel } from "./settings.js";
import { apisOf, requestText } from "./snippets.js";

const COUNTED = 2000; // characters from which on the length of the prompt is shown

let about = null;
let running = null;
let isLoading = false;
let wasAway = false; // whether the server may have come back as another one

const view = () => $("input[name=view]:checked").value;
const prompt = $("#prompt");

// Models

async function loadModels() {
  if (isLoading) return;
  isLoading = true;
  try {
    const { data } = await ask("/v1/models");
    noteKeyTaken();
    const wanted = new URL(location.href).searchParams.get("model") ?? about?.model;
    const chosen = data.find((each) => each.id === wanted) ?? data[0];
    $("#model").replaceChildren(...data.map((each) => h("option", { value: each.id, selected: each === chosen }, each.id)));
    $("#model").disabled = data.length < 2;
    await loadModel(chosen.id);
    tell(null);
  } catch (error) {
    fail(error);
  } finally {
    isLoading = false;
  }
}

async function loadModel(name) {
  const isOther = name !== about?.model;
  about = await ask(`/v1/about?model=${encodeURIComponent(name)}`);
  $("#batches-view").hidden = !about.file_bytes;
  if (view() === "batches") showView();
  if (!isOther) return;
  showModel(about);
  makeLanes(about);
  const facts = [
    about.block_size ? `up to ${about.block_size + 1} tokens a pass` : "one token a pass",
    `context of ${shortNumber(about.max_model_len, 0)} tokens`,
    about.chat ? null : "no chat template: it continues your text",
  ];
  $("#facts").textContent = facts.filter(Boolean).join(" · ");
  showExamples();
  $("#card-text").textContent = about.card ?? `There is no card: ${about.missing.card}.`;
  $("#send").disabled = false;
}

function showExamples() {
  const isEmpty = !conversation().length;
  const box = $("#examples");
  box.hidden = view() === "batches" || (!isEmpty && view() === "chat");
  $("#intro").hidden = box.hidden || view() !== "chat";
  $("#card").hidden = box.hidden || !about;
  if (!about) return;
  if (!about.examples.length) {
    box.replaceChildren(h("p", { class: "hint" }, `There are no example prompts: ${about.missing.examples}.`));
    return;
  }
  const shown = about.examples.slice(0, view() === "race" ? 3 : 6);
  box.replaceChildren(h("p", { class: "hint" }, "Prompts from the model's held-out set"), ...shown.map((example) => exampleButton(example)));
}

function exampleButton(example) {
  const last = example.messages.at(-1).content;
  const use = () => {
    if (running) return;
    if (view() === "chat") begin(example.messages.slice(0, -1));
    prompt.value = last;
    send();
  };
  return h("button", { type: "button", class: "example", onclick: use }, last.length > 140 ? `${last.slice(0, 140)}…` : last);
}

// Sending

async function send() {
  const text = prompt.value;
  if (running || !text.trim()) return;
  if (!about) {
    loadModels();
    return;
  }
  if (view() === "race") await sendRace(text);
  else await sendChat(text);
}

async function sendChat(text) {
  const way = decoding();
  const message = { role: "user", content: text };
  if (!requestOf([...conversation(), message], way)) return;
  say(message);
  prompt.value = "";
  showLength();
  showExamples();
  await follow(way, () => {
    prompt.value = takeBack();
    showLength();
    showExamples();
  });
}

/** Sends the conversation as it is; `undo` runs if the server takes nothing. */
async function follow(way, undo) {
  await whileRunning(undo, (signal) =>
    answer(about, requestOf(conversation(), way), way, signal, (results) => {
      for (const result of results) say(result);
      follow(decoding(), () => results.forEach(takeBack));
    }),
  );
}

async function sendRace(text) {
  const messages = [{ role: "user", content: text }];
  await whileRunning(() => {}, (signal) => race(about, (way) => requestOf(messages, way), signal));
}

async function whileRunning(undo, act) {
  running = new AbortController();
  tell(null);
  showRunning();
  try {
    await act(running.signal);
  } catch (error) {
    undo();
    fail(error);
  } finally {
    running = null;
    showRunning();
  }
}

function showRunning() {
  $("#stop").hidden = !running;
  $("#send").hidden = Boolean(running);
  document.body.toggleAttribute("data-running", Boolean(running));
}

// Problems

function tell(text) {
  $("#notice").hidden = !text;
  $("#notice").textContent = text ?? "";
}

function fail(error) {
  if (error.name === "AbortError") return;
  if (error.needsKey) {
    tell(error.message);
    askForKey(error.message);
    return;
  }
  if (error.isAway) lookNow();
  const isOurs = error.name === "Problem";
  if (!isOurs) console.error(error);
  tell(isOurs ? error.message : "This page has met an error of its own; reload it. The browser's console has more.");
}

// Everything else

function showLength() {
  const count = prompt.value.length;
  $("#prompt-hint").textContent = count < COUNTED ? "Enter sends, Shift+Enter starts a line" : `${shortNumber(count, 0)} characters; the model's context is ${shortNumber(about?.max_model_len, 0)} tokens`;
}

function showView() {
  const isRace = view() === "race";
  $("#race").hidden = !isRace;
  $("#messages").hidden = view() !== "chat";
  const isBatches = view() === "batches";
  $("#batches").hidden = !isBatches;
  $(isBatches ? "#batches" : "#composer").prepend($("#notice"));
  showBatches(isBatches, about, (error) => (error ? fail(error) : tell(null)));
  $("#clear").hidden = isRace;
  document.body.dataset.view = view();
  $("#send").textContent = isRace ? "Start the race" : "Send";
  showExamples();
}

function showRequest() {
  if (!about) return;
  const text = prompt.value.trim();
  const last = text ? [{ role: "user", content: prompt.value }] : [];
  const sent = view() === "race" ? last : [...conversation(), ...last];
  // An answer at the end is not what was asked for.
  const messages = !text && sent.at(-1)?.role === "assistant" ? sent.slice(0, -1) : sent;
  const asked = messages.length ? messages : [{ role: "user", content: "Hello" }];
  const body = requestOf(asked, decoding());
  if (!body) return;
  const chosen = $("#request-api").value;
  $("#request-line").hidden = !about.file_bytes;
  $("#request-api").replaceChildren(...apisOf(about).map(([path, name]) => h("option", { value: path, selected: path === chosen }, name)));
  const write = () => {
    $("#request-text").textContent = requestText(about, body, $("#request-api").value, $("#request-form").value, key() !== null);
  };
  $("#request").onchange = write;
  write();
  $("#request").showModal();
}

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
prompt.addEventListener("input", showLength);
$("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("#tau").addEventListener("input", () => {
  if (!running) followSlider(decoding().tau);
});
$("#stop").addEventListener("click", () => running?.abort());
$("#clear").addEventListener("click", () => {
  running?.abort();
  clearConversation();
  tell(null);
  showExamples();
  prompt.focus();
});
$("#show-request").addEventListener("click", showRequest);
$("#request-copy").addEventListener("click", (event) => copyText($("#request-text").textContent, event.currentTarget));
$("#model").addEventListener("change", () => {
  clearConversation();
  loadModel($("#model").value).catch(fail);
});
for (const input of $$("input[name=view]")) input.addEventListener("change", showView);
onKey(() => {
  tell(null);
  loadModels();
});
onConnection((state) => {
  wasAway ||= state !== "ready";
  if (state === "away") tell("The server does not answer. This page reconnects by itself, and what you have typed stays.");
  else if (state === "starting") tell("The server's models are starting. This page goes on by itself.");
  else if (about) tell(null);
  if (state === "ready" && wasAway) loadModels();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
showView();
loadModels();
