// Batches of the key: files of requests that the server answers beside others.

import { ask, blobOf, Problem } from "../common/api.js";
import { $, $$, announce, h, shortNumber } from "../common/dom.js";
import { visible } from "./output.js";

const MOST = 20; // batches shown
const MOST_ERRORS = 5; // errors shown of each
const FIRST_BYTES = 8 * 2 ** 20; // the first line of a file is within them
const BUSY_MS = 2000;
const CALM_MS = 15_000;
const ENDED = ["completed", "failed", "expired", "cancelled"];

let timer = null;
let isOn = false;
let mostBytes = null; // size of the largest file that the server takes
let tell = null;
let shown = "";
let statuses = new Map();

/** Shows the key's batches and follows them, or stops; `told` takes errors, and null once they are over. */
export function showBatches(isWanted, about, told) {
  isOn = isWanted;
  mostBytes = about?.file_bytes;
  tell = told;
  clearTimeout(timer);
  if (isOn) look();
}

async function look() {
  clearTimeout(timer);
  let waitMs = CALM_MS;
  try {
    const { data, has_more: hasMore } = await ask(`/v1/batches?limit=${MOST}`);
    if (data.some((batch) => !ENDED.includes(batch.status))) waitMs = BUSY_MS;
    show(data);
    $("#batches-told").textContent = hasMore ? `These are the latest ${MOST} batches.` : data.length ? "" : "There are no batches yet.";
  } catch (error) {
    tell(error);
    if (error.needsKey) return;
  }
  clearTimeout(timer);
  if (isOn) timer = setTimeout(look, waitMs);
}

function show(data) {
  for (const batch of data) {
    if (statuses.has(batch.id) && statuses.get(batch.id) !== batch.status) announce(`${nameOf(batch)}: ${batch.status}.`);
  }
  statuses = new Map(data.map((batch) => [batch.id, batch.status]));
  const text = JSON.stringify(data);
  if (text === shown) return;
  shown = text;
  const focused = document.activeElement?.dataset.key;
  $("#batches-list").replaceChildren(...data.map(item));
  $$("#batches-list button").find((button) => button.dataset.key === focused)?.focus();
}

const nameOf = (batch) => visible(batch.metadata?.filename ?? batch.input_file_id);

function item(batch) {
  const { total, completed, failed } = batch.request_counts;
  const name = nameOf(batch);
  const errors = batch.errors?.data ?? [];
  const hasEnded = ENDED.includes(batch.status);
  const at = new Date(1000 * (hasEnded ? batch[`${batch.status}_at`] : batch.expires_at)).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  const facts = [
    total ? `${shortNumber(completed + failed)} of ${shortNumber(total)} lines answered${failed ? `, ${shortNumber(failed)} with an error` : ""}` : hasEnded ? null : "lines are being checked",
    batch.endpoint,
    hasEnded ? `ended ${at}` : `ends by ${at}`,
  ];
  const button = (label, act) => h("button", { type: "button", "data-key": `${batch.id} ${label}`, "aria-label": `${label}: ${name}`, onclick: (event) => run(event.currentTarget, act) }, label);
  return h(
    "li",
    { class: "card" },
    h("div", { class: "batch-head" }, h("strong", {}, name), h("span", { class: "badge" }, batch.status.replace("_", " "))),
    h("progress", { max: total || 1, value: completed + failed, "aria-label": `Answered lines of ${name}` }),
    h("p", { class: "hint number" }, facts.filter(Boolean).join(" · ")),
    errors.slice(0, MOST_ERRORS).map((error) => h("p", { class: "hint problem-text" }, visible(error.line ? `Line ${error.line}: ${error.message}` : error.message))),
    errors.length > MOST_ERRORS && h("p", { class: "hint" }, `There are ${errors.length} errors.`),
    h(
      "div",
      { class: "actions" },
      batch.output_file_id && button("Save the answers", () => save(batch.output_file_id, `${batch.id}_output.jsonl`)),
      batch.error_file_id && button("Save the errors", () => save(batch.error_file_id, `${batch.id}_error.jsonl`)),
      !hasEnded && batch.status !== "cancelling" && button("Cancel", () => ask(`/v1/batches/${batch.id}/cancel`, { method: "POST" })),
    ),
  );
}

/** Does what a button is for, and looks what has come of it. */
async function run(button, act) {
  button.disabled = true;
  clearTimeout(timer);
  tell(null);
  try {
    await act();
  } catch (error) {
    tell(error);
  }
  button.disabled = false;
  look();
}

async function save(id, name) {
  const link = h("a", { href: URL.createObjectURL(await blobOf(`/v1/files/${id}/content`)), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser has begun to read it by then
}

async function start() {
  const file = $("#batch-file").files[0];
  if (file.size > mostBytes) throw new Problem(`The file is larger than the ${shortNumber(mostBytes / 2 ** 20)} MiB that this server takes. Divide it.`, { status: 413 });
  const endpoint = await endpointOf(file);
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file);
  $("#batches-told").textContent = "The file is on its way.";
  const { id } = await ask("/v1/files", { method: "POST", body: form });
  const body = { input_file_id: id, endpoint, completion_window: $("#batch-window").value, metadata: { filename: file.name } };
  try {
    await ask("/v1/batches", { method: "POST", body });
  } catch (error) {
    await ask(`/v1/files/${id}`, { method: "DELETE" }).catch(() => {}); // nobody needs it then
    throw error;
  }
  if ($("#batch-file").files[0] === file) $("#batch-file").value = ""; // not one that was chosen meanwhile
}

/** Returns the endpoint that the first line of a file names; the server checks all others. */
async function endpointOf(file) {
  const [first] = (await file.slice(0, FIRST_BYTES).text()).trimStart().split("\n", 1);
  try {
    const { url } = JSON.parse(first);
    if (typeof url === "string") return url;
  } catch {
    // as below
  }
  throw new Problem(`The first line of ${visible(file.name)} is no request. Each line is a JSON object with custom_id, method, url and body.`, { status: 400 });
}

$("#batch-form").addEventListener("submit", (event) => {
  event.preventDefault();
  run($("#batch-start"), start);
});
