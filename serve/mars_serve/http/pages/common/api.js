// Talks to the server this page comes from. The key is kept in this tab only and travels in a header.

const KEY = "marsray.key";
const listeners = new Set();
let remembered = null; // where the browser gives no storage, the key lasts as long as the page

/** Returns the key that was typed in, or null. */
export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? remembered;
  } catch {
    return remembered;
  }
}

/** Keeps a key in this tab, or forgets it for null. */
export function setKey(value) {
  remembered = value || null;
  try {
    if (remembered) sessionStorage.setItem(KEY, remembered);
    else sessionStorage.removeItem(KEY);
  } catch {
    // as above
  }
  for (const listener of listeners) listener(remembered);
}

/** Calls a function whenever the key changes. */
export function onKey(listener) {
  listeners.add(listener);
}

/** Returns the URL of a path of the API, wherever the server is mounted. */
export const urlOf = (path) => new URL(path.replace(/^\//, ""), baseUrl()).href;

/** Returns the URL below which the API lies, with a slash at its end. */
export function baseUrl() {
  return new URL(".", document.baseURI).href;
}

/** An answer that is no success, or none at all. */
export class Problem extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterS = null } = {}) {
    super(message);
    this.name = "Problem";
    this.status = status; // 0: no answer arrived
    this.code = code;
    this.param = param;
    this.retryAfterS = retryAfterS;
  }

  /** Whether the server could not be reached. */
  get isAway() {
    return this.status === 0;
  }

  /** Whether another key, or any key, is needed. */
  get needsKey() {
    return this.status === 401;
  }
}

/** Sends a request, with a form or JSON, and returns the body of its answer, which must be JSON. */
export async function ask(path, { method = "GET", body = null, signal = null } = {}) {
  const response = await send(path, method, body, signal);
  try {
    return await response.json();
  } catch (error) {
    throw away(error);
  }
}

/** Returns the content of a file that the server keeps. */
export async function blobOf(path) {
  const response = await send(path, "GET", null, null);
  return response.blob().catch((error) => {
    throw away(error);
  });
}

/** Sends a request and yields the events of its stream as objects. */
export async function* stream(path, body, signal) {
  const response = await send(path, "POST", body, signal);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let isDone = false;
  let isRead = false;
  try {
    while (!isRead) {
      const { value, done } = await reader.read().catch((error) => {
        throw away(error);
      });
      isRead = done;
      rest += decoder.decode(value, { stream: !done });
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") {
          isDone = true;
          continue;
        }
        const content = parsed(data);
        if (content.error) throw problemOf(200, content, null);
        yield content;
      }
    }
  } finally {
    if (!isRead) reader.cancel().catch(() => {}); // what is left is not wanted
  }
  if (!isDone) throw new Problem("The stream broke off before its end. Send the message again.");
}

async function send(path, method, body, signal) {
  const headers = { Accept: "application/json" };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  const isForm = body instanceof FormData;
  if (body && !isForm) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(urlOf(path), {
      method,
      headers,
      body: isForm ? body : body && JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    throw away(error);
  }
  if (response.ok) return response;
  const content = await response.json().catch(() => ({}));
  throw problemOf(response.status, content, response.headers.get("Retry-After"));
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Problem("The server sent something that is no JSON. Something between it and this page changes its answers.", { status: 502 });
  }
}

function away(error) {
  if (error.name === "AbortError" || error instanceof Problem) return error;
  return new Problem("The server does not answer. It may be restarting; this page tries again by itself.");
}

function problemOf(status, content, retryAfter) {
  const found = content.error ?? {};
  const retryAfterS = retryAfter == null ? null : Number(retryAfter);
  return new Problem(inWords(status, found, retryAfterS), { status, code: found.code, param: found.param, retryAfterS });
}

function inWords(status, found, retryAfterS) {
  const told = sentence(found.message ?? `The server answered with status ${status}`);
  if (status === 401) {
    return key()
      ? "The server does not know this key, or the key has expired. Type in another one."
      : "This server needs a key. Type in the one that its operator gave you.";
  }
  if (status === 429) return `${told} You can go on in ${retryAfterS ?? 1} s.`;
  if (status === 503) return `${told} It is worth another try in ${retryAfterS ?? 1} s.`;
  return told;
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
