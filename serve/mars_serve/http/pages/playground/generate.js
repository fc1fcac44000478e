// Runs one request as a stream, and measures it as its passes come.

import { stream } from "../common/api.js";

const CHAT = "/v1/chat/completions";
const COMPLETIONS = "/v1/completions";

/** Returns the path of the API that answers a conversation of a model. */
export const pathFor = (about) => (about.chat ? CHAT : COMPLETIONS);

/**
 * Sends a request and yields each forward pass: its text, thinking, calls, number of tokens, and
 * what the server tells about it.
 */
export async function* passes(about, body, signal) {
  for await (const event of stream(pathFor(about), body, signal)) {
    const choice = event.choices?.[0];
    if (!choice) continue;
    const delta = choice.delta ?? {};
    yield {
      text: delta.content ?? choice.text ?? "",
      reasoning: delta.reasoning_content ?? delta.reasoning ?? "",
      calls: delta.tool_calls ?? [],
      tokens: event.mars?.tokens ?? 0,
      details: event.mars?.pass ?? null,
      finish: choice.finish_reason,
      summary: choice.finish_reason ? event.mars : null,
    };
  }
}

/** Counts of a request, in tokens, passes and seconds. */
export class Figures {
  constructor() {
    this.startMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.firstTokens = 0;
    this.tokens = 0;
    this.passes = 0;
  }

  /** Enters a pass. */
  note(pass) {
    this.lastMs = performance.now();
    if (this.firstMs === null) {
      this.firstMs = this.lastMs;
      this.firstTokens = pass.tokens;
    }
    this.tokens += pass.tokens;
    this.passes += 1;
  }

  /** Mean number of tokens of a pass. */
  get perPass() {
    return this.passes ? this.tokens / this.passes : null;
  }

  /** Tokens per second behind the first pass; null until there are any. */
  get perSecond() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
  }

  /** Milliseconds until the first pass. */
  get waitMs() {
    return this.firstMs === null ? null : this.firstMs - this.startMs;
  }

  /** Seconds from the start to the last pass. */
  get seconds() {
    return this.lastMs === null ? 0 : (this.lastMs - this.startMs) / 1000;
  }
}
