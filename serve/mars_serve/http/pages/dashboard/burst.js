// The card that sends a bounded load to a paced model.

import { ask } from "../common/api.js";
import { announce, h } from "../common/dom.js";
import { plain } from "./format.js";

const DEFAULT_PER_S = 4;
const TOKENS = 96; // output tokens of a burst's request, at the most
const MOST_COMPUTE = 0.5; // share of the paced time above which a rehearsal is not valid
const OVERLOAD = 4; // times what the replicas of a quiet time serve

/** Sends bursts; `update` says whether the model takes one, and shows one that runs. */
export class BurstCard {
  constructor() {
    this.model = null;
    this.isTyped = false;
    this.perS = h("input", { id: "burst-rate", type: "number", min: "0.1", max: "100", step: "0.1", required: true, oninput: () => (this.isTyped = true) });
    this.seconds = h("input", { id: "burst-seconds", type: "number", min: "1", max: "60", step: "1", value: "45", required: true });
    this.button = h("button", { type: "submit", class: "primary" }, "Send a burst");
    this.told = h("p", { class: "hint", role: "status" });
    this.form = h(
      "form",
      { class: "burst", onsubmit: (event) => this.send(event) },
      h("div", {}, h("label", { for: "burst-rate" }, "Requests per second"), this.perS),
      h("div", {}, h("label", { for: "burst-seconds" }, "Seconds"), this.seconds),
      this.button,
    );
    this.element = h("div", { class: "card" }, h("h2", {}, "Burst"), this.form, this.told);
  }

  update(model, nowS) {
    if (this.model !== model.name) {
      this.model = model.name;
      this.isTyped = false;
      this.failure = null;
    }
    const { about, state } = model;
    this.form.hidden = !about.is_paced;
    if (!about.is_paced) {
      this.told.textContent =
        "This model serves at its own speed, and a burst would slow its users down, so only paced models take one: those with rehearsal in the server's settings. marsray bench load sends load to any model.";
      return;
    }
    if (!this.isTyped) this.perS.value = suggested(model);
    const burst = state?.burst;
    const isSlow = state?.replicas.some((each) => each.compute_share > MOST_COMPUTE);
    const isRunning = burst && nowS < burst.ends_s;
    this.button.disabled = Boolean(isRunning);
    if (isRunning) {
      this.failure = null;
      this.told.textContent = `${plain(burst.requests_per_s)} requests are sent each second, for ${Math.ceil(burst.ends_s - nowS)} s more. Watch τ fall and replicas come.`;
    } else if (isSlow) {
      this.told.textContent = "This machine computes for more than half of the paced time, so the rehearsal is not valid here: it is too slow or too busy.";
    } else {
      this.told.textContent =
        this.failure ?? "It sends short arithmetic tasks at an even rate, then stops by itself. They count like any other requests.";
    }
  }

  async send(event) {
    event.preventDefault();
    this.button.disabled = true;
    const body = {
      model: this.model,
      requests_per_s: Number(this.perS.value),
      seconds: Number(this.seconds.value),
      max_tokens: TOKENS,
    };
    try {
      await ask("/admin/burst", { method: "POST", body });
      announce("The burst has begun.");
    } catch (problem) {
      this.failure = problem.message;
      this.told.textContent = problem.message;
      this.button.disabled = false;
    }
  }
}

/** Returns a rate that the replicas of a quiet time cannot serve without a lower τ. */
function suggested({ about, state }) {
  const speed = state?.frontier?.tokens_per_s;
  if (!speed) return DEFAULT_PER_S;
  const perS = (OVERLOAD * speed * about.num_replicas) / TOKENS;
  return Math.min(Math.max(Number(perS.toPrecision(2)), 0.1), 100);
}
