// Follows the server's stream of figures, keeps an hour of them, and reconnects by itself.

import { key, Problem, urlOf } from "../common/api.js";

const PATH = "/admin/dashboard/events";
const HOUR_S = 3600;
const SILENT_MS = 10_000; // a server that sends nothing for so long is away
const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 8000;
const REFUSED_WAIT_MS = 60_000; // a key that is not accepted hardly becomes so; a new one is tried at once
const MAX_EVENTS = 200;

/** One model's figures: rows by time, events, the state now, and what hinders them if anything does. */
export class Model {
  constructor(name) {
    this.name = name;
    this.about = {};
    this.rows = [];
    this.events = [];
    this.state = null;
    this.problem = null;
    this.columns = new Map();
  }

  /** Takes an update in. Rows that are here already, as after a reconnection, are passed over. */
  take(update) {
    this.problem = update.problem ?? null;
    if (this.problem) return;
    if (update.columns) this.columns = new Map(update.columns.map((name, index) => [name, index]));
    const last = this.rows.at(-1)?.[0] ?? 0;
    const isReset = update.rows.length > 0 && update.rows.at(-1)[0] < last - HOUR_S; // the clock was put back
    if (isReset) this.rows = [];
    this.rows.push(...update.rows.filter((row) => isReset || row[0] > last));
    const old = (this.rows.at(-1)?.[0] ?? 0) - HOUR_S;
    while (this.rows.length && this.rows[0][0] < old) this.rows.shift();
    const known = new Set(this.events.map((each) => `${each.time_s} ${each.text}`));
    this.events.push(...update.events.filter((each) => !known.has(`${each.time_s} ${each.text}`)));
    this.events.splice(0, Math.max(this.events.length - MAX_EVENTS, 0));
    this.state = update.state;
  }

  /** Returns a figure of a row by its name. */
  at(row, name) {
    return row?.[this.columns.get(name)] ?? null;
  }

  /** Returns the latest row. */
  get latest() {
    return this.rows.at(-1);
  }
}

/** The figures of all models, which follow the server until the page closes. */
export class Feed {
  /** `onUpdate` is called after each event, `onProblem` with a `Problem`, or null once it is over. */
  constructor(onUpdate, onProblem) {
    this.models = new Map();
    this.nowS = 0;
    this.batches = null; // those that have not ended; null where the server keeps none
    this.onUpdate = onUpdate;
    this.onProblem = onProblem;
    this.abort = null;
    this.isRestarted = false;
    this.wake = () => {};
    this.follow();
  }

  /** Connects at once, as with a new key. */
  restart() {
    this.isRestarted = true;
    this.abort?.abort();
    this.wake();
  }

  async follow() {
    let waitMs = FIRST_WAIT_MS;
    for (;;) {
      try {
        await this.read(() => (waitMs = FIRST_WAIT_MS));
        continue; // the server ends each stream after a while
      } catch (error) {
        if (this.isRestarted) {
          this.isRestarted = false;
          continue;
        }
        const problem = error instanceof Problem ? error : new Problem("The server does not answer.");
        this.onProblem(problem);
        if (problem.status === 401 || problem.status === 403) waitMs = REFUSED_WAIT_MS;
        if (problem.retryAfterS) waitMs = Math.max(waitMs, 1000 * problem.retryAfterS);
      }
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, waitMs);
      });
      this.isRestarted = false;
      waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS);
    }
  }

  async read(onEvent) {
    const abort = (this.abort = new AbortController());
    let timer = setTimeout(() => abort.abort(), SILENT_MS);
    try {
      const response = await fetch(this.url(), {
        headers: key() ? { Authorization: `Bearer ${key()}` } : {},
        signal: abort.signal,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
      if (!response.ok) throw await refusal(response);
      const reader = response.body.getReader();
      const decoder = new TextDecoder();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENT_MS);
        rest += decoder.decode(value, { stream: true });
        const events = rest.split("\n\n");
        rest = events.pop();
        for (const event of events) {
          this.take(JSON.parse(event.replace(/^data: /, "")));
          onEvent();
        }
      }
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
  }

  take(event) {
    this.nowS = event.now_s;
    this.batches = event.batches;
    for (const [name, update] of Object.entries(event.models)) {
      if (!this.models.has(name)) this.models.set(name, new Model(name));
      this.models.get(name).take(update);
    }
    if (event.about) {
      for (const [name, about] of Object.entries(event.about.models)) this.models.get(name).about = about;
      for (const name of this.models.keys()) if (!(name in event.about.models)) this.models.delete(name);
    }
    this.onProblem(null);
    this.onUpdate();
  }

  url() {
    const times = [...this.models.values()].map((model) => model.latest?.[0] ?? null);
    const isKnown = times.length > 0 && times.every((time) => time != null);
    return urlOf(PATH) + (isKnown ? `?since_s=${Math.min(...times)}` : "");
  }
}

async function refusal(response) {
  const content = await response.json().catch(() => ({}));
  const { message, code } = content.error ?? {};
  const wait = response.headers.get("Retry-After");
  return new Problem(message ?? `The server answered with status ${response.status}.`, {
    status: response.status,
    code,
    retryAfterS: wait == null ? null : Number(wait),
  });
}
