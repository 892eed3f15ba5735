// Elements from plain values; text is always text, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Show these elements there. A table that is there already keeps its place, so that whoever
// has the focus in it or has scrolled it is not thrown out.
export function put(place, ...children) {
  const element = typeof place === "string" ? byId(place) : place;
  const flat = children.flat();
  const [old, now] = [element.firstElementChild, flat[0]];
  const rows = flat.length === 1 && now.querySelector?.("tbody");
  if (rows && old?.ariaLabel === now.ariaLabel) old.querySelector("tbody").replaceWith(rows);
  else element.replaceChildren(...flat);
}

// A table whose head says what each column is; cells are text or elements. Numbers stand right.
export function table(caption, columns, rows) {
  const side = (index) => (columns[index].number ? { class: "number" } : {});
  const head = columns.map((column, index) => h("th", { scope: "col", ...side(index) }, column.name));
  const body = rows.map((cells) =>
    h("tr", {}, cells.map((cell, index) =>
      index === 0 ? h("th", { scope: "row" }, cell) : h("td", side(index), cell))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

export function tile(name, value, note = "") {
  return h("div", { class: "tile card" },
    h("div", { class: "name" }, name), h("div", { class: "value" }, value),
    h("div", { class: "quiet" }, note));
}

// A group of buttons of which one is pressed.
export function choice(place, values, chosen, choose) {
  const buttons = byId(place);
  if (!buttons.children.length) {
    put(place, values.map(({ value, name }) =>
      h("button", { type: "button", "data-value": value, onclick: () => choose(value) }, name)));
  }
  for (const button of buttons.children) button.ariaPressed = String(button.dataset.value === String(chosen));
}

export function say(text) {
  const toast = byId("toast");
  toast.textContent = text;
  toast.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => toast.classList.remove("shown"), 6000);
}
