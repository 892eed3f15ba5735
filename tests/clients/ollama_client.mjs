// A conversation with a tool through the published client: a call, its result in a stream,
// another question, then models and an object. Prints one JSON object.
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.OLLAMA_HOST });
const properties = { tree: { type: "string" } };
const parameters = { type: "object", properties, required: ["tree"] };
const tools = [{ type: "function", function: { name: "count_leaves", description: "Counts leaves.", parameters } }];
const asked = { model: "tiny", tools };
const messages = [{ role: "user", content: "How many leaves has the oak?" }];

const first = await client.chat({ ...asked, messages });
const call = first.message.tool_calls[0].function;
messages.push(first.message);
messages.push({ role: "tool", tool_name: call.name, content: "The oak has four leaves." });

let streamed = "";
let last = null;
for await (const part of await client.chat({ ...asked, messages, stream: true })) {
  streamed += part.message.content;
  last = part;
}
messages.push({ role: "assistant", content: streamed });
messages.push({ role: "user", content: "And in winter?" });
const third = await client.chat({ ...asked, messages });

const schema = { type: "object", properties: { deciduous: { type: "boolean" } }, required: ["deciduous"] };
const object = await client.generate({ model: "tiny", prompt: "Is it?", format: schema });
const listed = await client.list();
const shown = await client.show({ model: "tiny:latest" });
const loaded = await client.ps();
const other = await client.show({ model: "gone" });

console.log(JSON.stringify({
  call, streamed, done: last.done, third: third.message.content, other: other.modelfile,
  object: JSON.parse(object.response), listed: listed.models[0].name, loaded: loaded.models[0].name,
  capabilities: shown.capabilities,
}));
