// Builds elements. Text goes in as text nodes only, so that markup in it is shown and never run.

export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

/**
 * Makes an element: `h("button", { class: "quiet", onclick: act, "aria-label": "Copy" }, "Copy")`.
 * Names that begin with "on" are listeners; true and false set and leave out an attribute.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAttributes(element, attributes);
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

/** Makes an SVG element in the same way. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAttributes(element, attributes);
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
}

let spoken = null;

/** Lets screen readers say a sentence. */
export function announce(text) {
  if (!spoken) {
    spoken = h("div", { class: "sr-only", role: "status", "aria-live": "polite" });
    document.body.append(spoken);
  }
  spoken.textContent = text;
}

/** Returns a number with few digits, as people write it. */
export function shortNumber(value, digits = 2) {
  if (value == null || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits }).replace("-", "−");
}

/** Copies text, and says on the button for a moment that it did. */
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser did not let this page copy; select the text";
  }
  announce(button.textContent);
  setTimeout(() => (button.textContent = before), 2000);
}
