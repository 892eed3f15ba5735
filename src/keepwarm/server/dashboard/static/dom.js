// Builds elements; text is never parsed as markup.

import { isShort, middle } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function h(tag, properties = {}, ...children) {
  return build(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return build(document.createElementNS(SVG, tag), properties, children);
}

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// A bar as long as its share of the place it is in.
export function fill(kind, share) {
  const bar = h("span", { class: `fill ${kind}` });
  bar.style.width = `${(100 * share).toFixed(2)}%`;
  return bar;
}

// Replace the content of an element, unless it is the same. A table of the same name and columns is
// updated row by row, so that focus and scroll position stay.
export function put(target, ...children) {
  const element = typeof target === "string" ? byId(target) : target;
  const flat = children.flat();
  const [old, now] = [element.firstElementChild, flat[0]];
  const body = flat.length === 1 && now.querySelector?.("tbody");
  const columns = (table) => table.querySelector("thead").textContent;
  if (body && old?.ariaLabel === now.ariaLabel && columns(old) === columns(now)) renew(old.querySelector("tbody"), [...body.rows]);
  else if (!isSame(element, flat)) element.replaceChildren(...flat);
}

function isSame(element, children) {
  const old = element.childNodes;
  const same = (child, index) => (child.isEqualNode ? child.isEqualNode(old[index]) : old[index].data === child);
  return old.length === children.length && children.every(same);
}

// Rows are matched by their first cell; only cells that differ are replaced.
function renew(body, rows) {
  const name = (row) => row.cells[0].textContent;
  const known = new Map([...body.rows].map((row) => [name(row), row]));
  const take = (row) => {
    const old = known.get(name(row));
    known.delete(name(row));
    return old ? refill(old, row) : row;
  };
  const wanted = rows.map(take);
  for (const row of [...body.rows]) if (!wanted.includes(row)) row.remove();
  wanted.forEach((row, index) => row === body.rows[index] || body.insertBefore(row, body.rows[index] ?? null));
}

function refill(old, now) {
  [...now.cells].forEach((cell, index) => {
    if (!cell.isEqualNode(old.cells[index])) old.cells[index].replaceChildren(...cell.childNodes);
  });
  return old;
}

// A table; cells are text or elements, number columns are right-aligned.
export function table(caption, columns, rows) {
  const side = (index) => (columns[index].number ? { class: "number" } : {});
  const head = columns.map((column, index) => h("th", { scope: "col", ...side(index) }, column.name));
  const body = rows.map((cells) =>
    h("tr", {}, cells.map((cell, index) =>
      index === 0 ? h("th", { scope: "row" }, cell) : h("td", { ...side(index), "data-name": columns[index].name }, Array.isArray(cell) ? h("div", {}, cell) : cell))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

// An agent as people see it: its title over its short id, or a name that somebody gave it over its title.
export function agentName({ agent, title = "", key = null }, ...more) {
  const named = isShort(agent ?? "");
  const [first, second] = named ? [agent, title] : [title || middle(agent, 32), title && middle(agent)];
  const whole = [title, agent].filter(Boolean).join("\n");
  const small = [...more, second, key && `key ${key}`].filter(Boolean).join(" · ");
  return h("span", { class: "agent" }, h("strong", { title: whole }, first ?? "Unnamed"),
    small ? h("span", { class: "quiet", title: whole }, small) : "");
}

export function tile(name, value, note = "") {
  return h("div", { class: "tile card" },
    h("div", { class: "name" }, name), h("div", { class: "value" }, value),
    h("div", { class: "quiet" }, note));
}

// A group of buttons, one of them pressed.
export function choice(id, values, chosen, choose) {
  const buttons = byId(id);
  if (!buttons.children.length) {
    put(id, values.map(({ value, name }) =>
      h("button", { type: "button", "data-value": value, onclick: () => choose(value) }, name)));
  }
  for (const button of buttons.children) button.ariaPressed = String(button.dataset.value === String(chosen));
}

// Buttons that leave through a list; `turn` is given the new page.
export function pages(target, page, n, turn) {
  const element = byId(target);
  hide(element, n < 2);
  if (n < 2) return;
  const pressed = element.contains(document.activeElement) ? document.activeElement.textContent : null;
  put(target, h("div", { class: "row pages" },
    h("button", { type: "button", disabled: page === 0, onclick: () => turn(page - 1) }, "Previous"),
    h("span", { class: "quiet" }, `Page ${page + 1} of ${n}`),
    h("button", { type: "button", disabled: page === n - 1, onclick: () => turn(page + 1) }, "Next")));
  if (pressed === null) return;
  const able = [...element.querySelectorAll("button:enabled")];
  (able.find((button) => button.textContent === pressed) ?? able[0]).focus();
}

// The rows of a page, and what `pages` needs.
export function slice(list, page, size) {
  const n = Math.max(1, Math.ceil(list.length / size));
  const at = Math.min(page, n - 1);
  return { rows: list.slice(at * size, (at + 1) * size), page: at, n };
}

// Setting what is already set would count as a change of the page.
export function hide(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

export const empty = (...text) => h("p", { class: "empty" }, ...text);

// In a form the first submit button is what Enter presses, so a button that closes submits nothing.
export function closeButtons() {
  for (const button of document.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close(""));
  }
}

export function details(title, ...children) {
  byId("details-title").textContent = title;
  put("details", ...children);
  byId("details-dialog").showModal();
}

export function say(text) {
  const toast = byId("toast");
  toast.textContent = text;
  toast.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => toast.classList.remove("shown"), 6000);
}
