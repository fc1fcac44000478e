// Asks for the key in a dialog, which opens from the button #key-button of the page's header.

import { key, onKey, setKey } from "./api.js";
import { $, h } from "./dom.js";

let dialog = null;
let isNeeded = null; // unknown until the server has answered

/** Opens the dialog; `reason` is a sentence that says why a key is needed. */
export function askForKey(reason = "") {
  isNeeded = true;
  dialog ??= make();
  $("p.reason", dialog).textContent = reason;
  $("input", dialog).value = key() ?? "";
  label();
  if (!dialog.open) dialog.showModal();
  $("input", dialog).select();
}

/** Notes that the server took a request, with a key or without. */
export function noteKeyTaken() {
  isNeeded = key() !== null;
  label();
}

function make() {
  const input = h("input", {
    type: "password",
    id: "key-input",
    autocomplete: "off",
    spellcheck: "false",
    maxlength: "512",
    pattern: "\\s*[!-~]+\\s*", // a header takes no other characters
    title: "A key has no spaces, and no letters beyond ASCII",
    required: true,
  });
  const form = h(
    "form",
    { method: "dialog", onsubmit: () => setKey(input.value.trim()) },
    h("h2", { id: "key-title" }, "Your key"),
    h("p", { class: "reason problem-text", role: "alert" }),
    h("label", { for: "key-input" }, "API key"),
    input,
    h("p", { class: "hint" }, "The key stays in this tab and is forgotten when the tab closes. The server's operator makes keys with ", h("code", {}, "marsray key"), "."),
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", class: "quiet", onclick: forget }, "Forget the key"),
      h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"),
      h("button", { type: "submit", class: "primary" }, "Use this key"),
    ),
  );
  const made = h("dialog", { id: "key-dialog", "aria-labelledby": "key-title" }, form);
  document.body.append(made);
  return made;
}

function forget() {
  setKey(null);
  dialog.close();
}

function label() {
  const button = $("#key-button");
  if (!button) return;
  button.hidden = isNeeded === false;
  button.textContent = key() ? "Key: set" : "Enter key";
}

onKey(label);
$("#key-button")?.addEventListener("click", () => askForKey());
label();
