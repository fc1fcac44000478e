// Writes a request as a command or a program that sends it. The key is never in it.

import { baseUrl } from "../common/api.js";
import { pathFor } from "./generate.js";

/** Returns a curl command. */
export function asCurl(about, body, hasKey) {
  const lines = [`curl -N ${new URL(pathFor(about).slice(1), baseUrl())}`];
  if (hasKey) lines.push(`-H "Authorization: Bearer $MARSRAY_API_KEY"`);
  lines.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

/** Returns a program for the package openai. */
export function asPython(about, body, hasKey) {
  const own = ["mode", "confidence_threshold", "return_passes", "top_k"];
  const plain = Object.entries(body).filter(([name]) => !own.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => own.includes(name)));
  const method = about.chat ? "client.chat.completions" : "client.completions";
  const text = about.chat ? 'choice.delta.content or ""' : "choice.text";
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(new URL("v1", baseUrl()).href)}, api_key=${hasKey ? 'os.environ["MARSRAY_API_KEY"]' : '"none"'})`,
    `stream = ${method}.create(`,
    ...plain.map(([name, value]) => `    ${name}=${literal(value)},`),
    ...(Object.keys(extra).length ? [`    extra_body=${literal(extra)},`] : []),
    ")",
    "for event in stream:",
    "    for choice in event.choices:",
    `        print(${text}, end="", flush=True)`,
    "",
  ]
    .filter((line) => hasKey || line !== "import os")
    .join("\n")
    .replace(/^\n/, "");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Returns a value as Python writes it; its strings are those of JSON. */
function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, each]) => `${literal(name)}: ${literal(each)}`).join(", ")}}`;
  }
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
