// Building blocks: elements, tokens, numbers, bars and tables.
//
// Text is written as text nodes, never as markup, because a token may contain anything.

/** An element. An attribute that is a function listens to the event of its name.
 * @param {string} tag @param {Record<string, any>} [attributes] @returns {any} */
export const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

/** Copies a text, and shows on the button whether it is copied. @param {any} button @param {string} text */
export async function copy(button, text) {
  const words = button.textContent;
  button.textContent = await (navigator.clipboard?.writeText(text) ?? Promise.reject()).then(() => "Copied", () => "Not copied");
  setTimeout(() => { button.textContent = words; }, 2000);
}

/** An element of SVG. @param {string} tag @param {Record<string, any>} [attributes] @returns {any} */
export const makeSvg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

/** A button that calls `click`. @param {Record<string, any>} attributes @returns {any} */
export const button = (attributes, click, ...children) =>
  make("button", { type: "button", click, ...attributes }, ...children);

/** @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

export const sum = (/** @type {number[]} */ values) => values.reduce((total, value) => total + value, 0);

// Shortens a text by code points, so that no character is split.
export function clip(text, most) {
  const head = [...text.slice(0, 2 * most + 2)];
  return head.length > most ? head.slice(0, most).join("") + "…" : text;
}

// A token. Its direction does not affect the text around it (bdi), and pointing at it shows it in
// full.
export function token(text, most = 24, title = text.length > 12 ? text : undefined) {
  return make("bdi", { class: "token", title }, clip(text, most));
}

export const MINUS = "−";

// A number with at most `digits` digits after the point, and one digit more in all. float32 sums of the same
// numbers differ in the sixth digit, so all numbers of the page have at most five.
export function number(value, digits = 4) {
  if (Number.isNaN(value)) return "NaN";
  const sign = value < 0 ? MINUS : "";
  const size = Math.abs(value);
  if (size === Infinity) return sign + "∞";
  if (size === 0) return "0";
  if (size >= 1e6 || size < 0.5 * 10 ** -digits) {
    return sign + size.toExponential(digits - 2).replace("e+", "e").replace("e-", "e" + MINUS);
  }
  return sign + size.toFixed(Math.max(0, digits - Math.max(0, Math.floor(Math.log10(size)))));
}

// Five significant digits.
export function precise(value) {
  if (!Number.isFinite(value) || value === 0) return number(value);
  return String(Number(value.toPrecision(5))).replace("e+", "e").replaceAll("-", MINUS);
}

// A fraction in whole percent. A fraction slightly below 1 is not written as 100 %, nor a small one as 0 %.
export const percent = (share) => {
  if (share > 0 && share < 0.005) return "<1 %";
  const nearlyAll = share > 0.995 && share < 1;
  return `${nearlyAll ? Math.floor(1000 * share) / 10 : Math.round(100 * share)} %`;
};

export const count = (n, what, many = `${what}s`) => `${n.toLocaleString("en")} ${n === 1 ? what : many}`;

export function bar(share) {
  const fill = make("span", { class: "fill" });
  fill.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return make("span", { class: "gauge", "aria-hidden": "true" }, fill);
}

// The positions to show among `length`: all, or both ends and the neighbours of `centre`, with null
// for each gap.
export function elide(length, most, centre = 0) {
  const all = Array.from({ length }, (_, i) => i);
  if (length <= most) return all;
  const near = Math.max(1, Math.floor((most - 4) / 2));
  const middle = Math.max(near + 1, Math.min(length - near - 2, centre));
  return withGaps(
    all.filter((i) => i < 2 || i >= length - 2 || Math.abs(i - middle) <= near), length);
}

// The features to show among `length`: all, or the first ones, null, and the last.
export function ends(length, most) {
  const all = Array.from({ length }, (_, i) => i);
  return length <= most ? all : [...all.slice(0, most - 2), null, length - 1];
}

// The positions of the `most` largest values, and `always`, in order, with null for each gap.
// Undefined values are skipped.
export function largest(values, most, always) {
  const size = (i) => (Number.isNaN(values[i]) ? Infinity : values[i] ?? -Infinity);
  const order = Array.from(values, (_, i) => i)
    .filter((i) => values[i] !== undefined || i === always)
    .sort((a, b) => size(b) - size(a));
  if (order.length <= most) return withGaps(order.sort((a, b) => a - b), values.length);
  const picked = new Set([always, ...order.slice(0, most - 1)]);
  return withGaps([...picked].sort((a, b) => a - b), values.length);
}

function withGaps(positions, length) {
  const line = [];
  let expected = 0;
  for (const position of positions) {
    if (position === expected + 1) line.push(expected); // rather than a gap of one
    if (position > expected + 1) line.push(null);
    line.push(position);
    expected = position + 1;
  }
  if (expected === length - 1) line.push(expected);
  if (expected < length - 1) line.push(null);
  return line;
}

// A table of rows [{cells, kind}]; the first cell of each row is its heading.
export function table(caption, columns, rows, kind = "") {
  const head = columns.map((name) => make("th", { scope: "col" }, name));
  const body = rows.map(({ cells, kind }) =>
    make("tr", { class: kind },
      cells.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell))));
  const around = make("div", { class: "scroll", role: "group", "aria-label": caption },
    make("table", { class: kind },
      make("caption", {}, caption),
      make("thead", {}, make("tr", {}, head)),
      make("tbody", {}, body)));
  scrolls.observe(around);
  return around;
}

// An element that scrolls must be reachable by the Tab key.
const scrolls = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const target = /** @type {HTMLElement} */ (entry.target);
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});

export const gapRow = (columns) => ({ kind: "gap", cells: ["⋮", ...Array(columns - 1).fill("")] });
