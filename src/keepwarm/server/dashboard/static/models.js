// Which models are loaded and what they take, loading and unloading them, and which ones fit.

import { Failed, last, post } from "./api.js";
import { byId, h, hide, put, say, table } from "./dom.js";
import { bytes, count, modelName, plural, seconds } from "./format.js";
import { meter } from "./now.js";

const MODELS = [
  { name: "Model" }, { name: "State" }, { name: "Weights", number: true }, { name: "Context", number: true }, { name: "Actions" },
];
const FITTING = [
  { name: "Model" }, { name: "Weights", number: true }, { name: "Tokens", number: true }, { name: "Licence" }, { name: "" },
];
const state = { admin: false, manages: false, under: new Set(), data: null };
let changed = () => {};

export function start(onChange) {
  changed = onChange;
  byId("pull").addEventListener("submit", (event) => {
    event.preventDefault();
    const name = byId("pull-name").value.trim();
    if (name) run(name, () => pull(name));
    else say("Type the name of a model, as org/name.");
  });
}

// Without the key that it takes, buttons are shown but not enabled.
export function allow({ admin, keys }) {
  const before = [state.admin, state.manages];
  [state.admin, state.manages] = [admin, admin || !keys];
  if (state.data && (before[0] !== state.admin || before[1] !== state.manages)) show(state.data);
}

export const isBusy = () => state.under.size > 0 || Boolean(state.data?.pulling) || Boolean(state.data?.data.some(({ loading }) => loading));

export function show(data) {
  state.data = data;
  put("model-list", table("Models of this server", MODELS, data.data.map(row)));
  put("weights", data.weights ? meter(data.weights) : "");
  hide(byId("pin-why"), state.admin);
  hide(byId("manage-why"), state.manages);
  const { pulling, fitting, machine_bytes: memory, on_cpu: onCpu, n_choices: all } = data;
  put("pulling", pulling ? meter({ budget: pulling.status, n_bytes: pulling.completed, max_bytes: pulling.total }) : "");
  byId("fit-about").textContent = `${count(fitting.length)} of ${plural(all, "model")} fit into ${bytes(memory)} of memory, computed `
    + `${onCpu ? "in fp32, as on every CPU" : "on a GPU"}. Tokens: how much context fits beside the weights.`;
  byId("pull-send").disabled = !state.manages;
  hide(byId("pull-why"), fitting.some((one) => one.may_load));
  put("fitting", table("Models that fit", FITTING, fitting.map(choice)));
}

const named = (name) => h("span", { class: "agent" }, h("strong", { title: name }, modelName(name)),
  name.includes("/") ? h("span", { class: "quiet", title: name }, name) : "");

function row(model) {
  const { name, loaded, loading, offered, pinned, n_bytes: weights, file_bytes: files, n_context: context, idle_s: idle } = model;
  const until = loaded && idle !== null ? h("span", { class: "quiet" }, `unloaded in ${seconds(idle)} if idle`) : "";
  return [
    [named(name), pinned ? h("span", { class: "badge" }, "pinned") : ""],
    [h("span", { class: `state ${loading ? "prefilling" : ""}` }, loading ? `loading: ${loading}` : loaded ? "loaded" : "not loaded"), until],
    loaded ? bytes(weights) : h("span", { class: "quiet" }, files ? `${bytes(files)} on disk` : "–"),
    context === null ? "–" : count(context),
    h("div", { class: "actions" },
      loaded ? button("Unload", name, !state.manages, () => unload(name)) : button("Load", name, Boolean(loading) || !(offered || state.admin), () => load(name)),
      button(pinned ? "Unpin" : "Pin", name, !state.admin, () => post("/v1/admin/load", { model: name, pinned: !pinned }))),
  ];
}

function choice({ id, weights_bytes: weights, n_tokens: tokens, n_context: context, licence, here, may_load: may }) {
  return [named(id), bytes(weights), `${count(Math.floor(tokens / 1024))}k of ${count(Math.floor(context / 1024))}k`, licence,
    here ? h("span", { class: "quiet" }, "on this machine") : may ? button("Pull", id, !state.manages, () => pull(id)) : ""];
}

function button(verb, name, disabled, act) {
  const disabledNow = disabled || state.under.has(name);
  return h("button", { type: "button", "aria-label": `${verb} ${name}`, disabled: disabledNow, onclick: () => run(name, act) }, verb);
}

// One that the operator unloaded is loaded for no request.
function load(name) {
  const { offered } = state.data.data.find((model) => model.name === name);
  return post(offered ? "/api/generate" : "/v1/admin/load", { model: name });
}

async function unload(name) {
  await post("/api/generate", { model: name, keep_alive: 0 });
  say(`${name} is unloaded as soon as it is idle; its blocks stay.`);
}

// Its progress is in what the server tells everybody, so that it is seen after a reload too.
async function pull(name) {
  const { error } = await last("/api/pull", { model: name, stream: true });
  if (error) throw new Failed(error);
  say(`${name} is on this machine.`);
}

async function run(name, act) {
  state.under.add(name);
  redraw();
  try {
    await act();
  } catch (error) {
    say(error.message);
  }
  state.under.delete(name);
  redraw();
}

// At once: if the same data comes again, nothing is drawn, and the buttons would stay as they are.
function redraw() {
  if (state.data) show(state.data);
  changed();
}
