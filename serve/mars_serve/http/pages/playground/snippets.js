// Writes the request on screen for each API: as a command, a program, or a line of a batch. The key is never in it.

import { baseUrl, urlOf } from "../common/api.js";

const CHAT_FIELDS = ["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "response_format", "tools", "tool_choice", "stream"];

/** The APIs by their paths; `fields` are those that the official client has arguments for. */
const APIS = {
  "/v1/chat/completions": {
    name: "Chat Completions",
    create: "client.chat.completions.create",
    bodyOf: (body) => body,
    fields: CHAT_FIELDS,
    print: ["for choice in event.choices:", '    print(choice.delta.content or "", end="", flush=True)'],
  },
  "/v1/completions": {
    name: "Completions",
    create: "client.completions.create",
    bodyOf: (body) => body,
    fields: CHAT_FIELDS,
    print: ["for choice in event.choices:", '    print(choice.text, end="", flush=True)'],
  },
  "/v1/responses": {
    name: "Responses",
    create: "client.responses.create",
    bodyOf: asResponse,
    fields: ["model", "instructions", "input", "max_output_tokens", "temperature", "top_p", "text", "tools", "tool_choice", "stream"],
    print: ['if event.type == "response.output_text.delta":', '    print(event.delta, end="", flush=True)'],
  },
  "/v1/messages": {
    name: "Anthropic Messages",
    create: "client.messages.create",
    bodyOf: asMessages,
    fields: ["model", "system", "messages", "max_tokens", "stop_sequences", "output_config", "tools", "tool_choice", "stream"],
    print: ['if event.type == "content_block_delta" and event.delta.type == "text_delta":', '    print(event.delta.text, end="", flush=True)'],
  },
};

/** Returns paths and names of the APIs that take a model's requests. */
export function apisOf(about) {
  const isTaken = (path) => (path === "/v1/completions") !== about.chat;
  return Object.entries(APIS).filter(([path]) => isTaken(path)).map(([path, { name }]) => [path, name]);
}

/** Returns the page's request to a model as text: `form` is curl, python or line. */
export function requestText(about, body, path, form, hasKey) {
  const own = APIS[path].bodyOf(body, about);
  return { curl: asCurl, python: asPython, line: asLine }[form](path, own, hasKey);
}

function asCurl(path, body, hasKey) {
  const lines = [`curl -N ${urlOf(path)}`];
  if (hasKey) lines.push(`-H "Authorization: Bearer $MARSRAY_API_KEY"`);
  lines.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

function asPython(path, body, hasKey) {
  const { create, fields, print } = APIS[path];
  const [client, address] = path === "/v1/messages" ? ["anthropic", baseUrl().replace(/\/$/, "")] : ["openai", urlOf("/v1")];
  const name = client === "openai" ? "OpenAI" : "Anthropic";
  const rest = Object.entries(body).filter(([field]) => !fields.includes(field));
  return [
    ...(hasKey ? ["import os", ""] : []),
    `from ${client} import ${name}`,
    "",
    `client = ${name}(base_url=${literal(address)}, api_key=${hasKey ? 'os.environ["MARSRAY_API_KEY"]' : '"none"'})`,
    `stream = ${create}(`,
    ...fields.filter((field) => field in body).map((field) => `    ${field}=${literal(body[field])},`),
    ...(rest.length ? [`    extra_body=${literal(Object.fromEntries(rest))},`] : []),
    ")",
    "for event in stream:",
    ...print.map((line) => `    ${line}`),
    "",
  ].join("\n");
}

function asLine(path, { stream, return_passes: passes, ...body }) {
  return `${JSON.stringify({ custom_id: "1", method: "POST", url: path, body })}\n`;
}

function asResponse({ messages, max_tokens: most, response_format: form, tools, ...body }) {
  const [system, turns] = parted(messages);
  return {
    ...body,
    ...(system === null ? {} : { instructions: system }),
    input: turns.flatMap(itemsOf),
    ...(most ? { max_output_tokens: most } : {}),
    ...(form ? { text: { format: { type: "json_schema", ...form.json_schema } } } : {}),
    ...(tools ? { tools: tools.map((tool) => ({ type: "function", ...tool.function })) } : {}),
  };
}

function itemsOf({ role, content, tool_calls: calls = [], tool_call_id: id }) {
  if (role === "tool") return [{ type: "function_call_output", call_id: id, output: content }];
  const made = calls.map((call) => ({ type: "function_call", call_id: call.id, ...call.function }));
  return content || !made.length ? [{ role, content }, ...made] : made;
}

function asMessages({ messages, max_tokens: most, response_format: form, tools, tool_choice: choice, stop, ...body }, about) {
  const [system, turns] = parted(messages);
  return {
    ...body,
    ...(system === null ? {} : { system }),
    messages: turns.map(turnOf),
    max_tokens: most ?? about.max_output_tokens ?? about.max_model_len, // this API has no default
    ...(stop ? { stop_sequences: [stop] } : {}),
    ...(form ? { output_config: { format: { type: "json_schema", schema: form.json_schema.schema } } } : {}),
    ...(tools ? { tools: tools.map(({ function: { parameters, ...rest } }) => ({ ...rest, input_schema: parameters ?? { type: "object" } })) } : {}),
    ...(choice ? { tool_choice: { type: "any" } } : {}),
  };
}

function turnOf({ role, content, tool_calls: calls, tool_call_id: id }) {
  if (role === "tool") return { role: "user", content: [{ type: "tool_result", tool_use_id: id, content }] };
  if (!calls) return { role, content };
  const text = content ? [{ type: "text", text: content }] : [];
  return { role, content: [...text, ...calls.map((call) => ({ type: "tool_use", id: call.id, name: call.function.name, input: inputOf(call) }))] };
}

function inputOf(call) {
  try {
    return JSON.parse(call.function.arguments);
  } catch {
    return { INVALID_JSON: call.function.arguments }; // cut off by the largest output
  }
}

/** Returns the system prompt at the beginning, or null, and the other messages. */
function parted(messages) {
  return messages[0].role === "system" ? [messages[0].content, messages.slice(1)] : [null, messages];
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
