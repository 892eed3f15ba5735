// The API's documentation: every endpoint and object of /openapi.json.

import { get } from "./api.js";
import { byId, h, put, table } from "./dom.js";

const FIELDS = [{ name: "Field" }, { name: "Type" }, { name: "Meaning" }];
const ANSWERS = [{ name: "Status" }, { name: "Body" }, { name: "Meaning" }];
const OBJECTS = "Objects";

const anchor = (name) => name.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-");
const objectId = (name) => `object-${name}`;

// Words in `backquotes` are code.
const prose = (text = "") =>
  text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));

const joined = (parts, between) => parts.flatMap((part, index) => (index ? [between, part] : [part]));

// The type of a value, as text and links to objects.
function type(schema = {}) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return [h("a", { href: `#${objectId(name)}` }, name)];
  }
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) return joined(several.map(type), " or ").flat();
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  if (schema.type === "array") return ["list of ", ...type(schema.items)];
  if (schema.additionalProperties?.$ref) return ["object of ", ...type(schema.additionalProperties)];
  return [schema.type ?? "any"];
}

function meaning(schema, required) {
  const notes = [];
  if (schema.deprecated) notes.push("deprecated");
  if (required) notes.push("required");
  if (schema.default !== undefined && schema.default !== null) {
    notes.push(`default ${JSON.stringify(schema.default)}`);
  }
  const range = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]];
  for (const [name, sign] of range) if (name in schema) notes.push(`${sign} ${schema[name]}`);
  const noted = notes.length ? h("span", { class: "quiet" }, notes.join(", ")) : null;
  return h("div", {}, prose(schema.description), schema.description && noted ? h("br") : null, noted);
}

const field = (name, schema, required) => [h("code", {}, name), h("span", {}, type(schema)), meaning(schema, required)];

function fields(caption, schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, each]) =>
    field(name, each, schema.required?.includes(name)));
  return rows.length ? table(caption, FIELDS, rows) : h("p", { class: "quiet" }, type(schema));
}

function parameters(caption, list = []) {
  const rows = list.map(({ name, in: where, required, schema, description }) =>
    field(name, { ...schema, description: description ?? schema.description ?? `in the ${where}` }, required));
  return rows.length ? [h("h3", {}, "Parameters"), table(caption, FIELDS, rows)] : [];
}

const contents = (content = {}) =>
  joined(Object.entries(content).map(([media, { schema }]) =>
    h("span", {}, type(schema), media === "application/json" ? "" : ` as ${media}`)), ", ");

function body(content, objects) {
  if (!content) return [];
  const name = Object.values(content)[0].schema.$ref?.split("/").pop();
  const shown = name ? fields(`Fields of ${name}`, objects[name]) : h("p", {}, contents(content));
  return [h("h3", {}, "Body"), shown];
}

function answers(caption, responses) {
  const rows = Object.entries(responses).map(([status, { content, description }]) =>
    [status, h("span", {}, contents(content)), h("span", {}, prose(description))]);
  return [h("h3", {}, "Answers"), table(caption, ANSWERS, rows)];
}

function endpoint(path, method, operation, objects) {
  const name = `${method.toUpperCase()} ${path}`;
  const summary = h("summary", {}, h("span", { class: "method" }, method.toUpperCase()), h("code", {}, path),
    operation.deprecated ? h("span", { class: "badge" }, "deprecated") : null);
  const about = h("p", {}, prose(operation.description));
  return h("details", { class: "card endpoint", id: anchor(name) }, summary, about,
    parameters(`Parameters of ${name}`, operation.parameters), body(operation.requestBody?.content, objects),
    answers(`Answers of ${name}`, operation.responses));
}

function object(name, schema) {
  return h("details", { class: "card endpoint", id: objectId(name) }, h("summary", {}, h("code", {}, name)),
    h("p", {}, prose(schema.description)), fields(`Fields of ${name}`, schema));
}

function section(name, children) {
  return h("section", { id: anchor(name), "aria-labelledby": `${anchor(name)}-title`, tabindex: "-1" },
    h("h2", { id: `${anchor(name)}-title` }, name), children);
}

function show({ info, paths, components }) {
  const objects = components.schemas;
  const tags = new Map();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] ?? "Other";
      if (!tags.has(tag)) tags.set(tag, []);
      tags.get(tag).push(endpoint(path, method, operation, objects));
    }
  }
  tags.set(OBJECTS, Object.keys(objects).sort().map((name) => object(name, objects[name])));
  put("version", info.version);
  put("about", prose(info.description), h("br"), "The same as one document: ", h("a", { href: "/openapi.json" }, "/openapi.json"));
  put("sections", [...tags.keys()].map((name) => h("a", { href: `#${anchor(name)}` }, name)));
  put("endpoints", [...tags].map(([name, children]) => section(name, children)));
  open();
}

// Opens what the address names, so that links to objects and endpoints show them.
function open() {
  const target = location.hash && byId(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target instanceof HTMLDetailsElement) target.open = true;
  target.scrollIntoView();
}

addEventListener("hashchange", open);
try {
  show(await get("/openapi.json"));
} catch (error) {
  put("about", error.message);
}
