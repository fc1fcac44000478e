// Watches whether the server answers, and says so in the element #connection of the page's header.

import { urlOf } from "./api.js";
import { $, announce } from "./dom.js";

const CALM_MS = 10_000;
const WORRIED_MS = 1_500;
const TIMEOUT_MS = 5_000;

const TEXTS = {
  ready: ["Connected", "The server answers"],
  starting: ["Models starting", "The server answers, and its models are starting; this page goes on by itself"],
  away: ["Server away: reconnecting", "The server does not answer; this page reconnects by itself"],
};

let state = null;
let timer = null;
let isAsking = false;
const listeners = new Set();

/** Calls a function with "ready", "starting" or "away" whenever that changes, and now. */
export function onConnection(listener) {
  listeners.add(listener);
  if (state) listener(state);
}

/** Looks at once, since a request has just failed. */
export function lookNow() {
  clearTimeout(timer);
  look();
}

async function look() {
  if (isAsking) return;
  isAsking = true;
  let found;
  try {
    const response = await fetch(urlOf("/ready"), {
      cache: "no-store",
      credentials: "omit",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    const body = await response.json().catch(() => ({}));
    const isOurs = body.status === "ready" || body.status === "not_ready";
    found = response.ok ? "ready" : isOurs ? "starting" : "away"; // a proxy without replicas is no server
  } catch {
    found = "away";
  }
  isAsking = false;
  tell(found);
  clearTimeout(timer);
  timer = setTimeout(look, found === "ready" ? CALM_MS : WORRIED_MS);
}

function tell(found) {
  if (found === state) return;
  const before = state;
  state = found;
  const element = $("#connection");
  if (element) {
    const [short, long] = TEXTS[found];
    element.dataset.state = found;
    element.textContent = short;
    element.title = long;
  }
  if (before) announce(found === "ready" ? "The server is back." : `${TEXTS[found][1]}.`);
  for (const listener of listeners) listener(found);
}

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") lookNow();
});
look();
