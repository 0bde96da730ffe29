// Parse a mask in the notation of Python's masks.parse, without masks that need tensors.

import { pageData } from "./store.js";

/** Whether a query may look at a key. @typedef {(query: number, key: number) => boolean} Mask */

// The masks by name; pageData.masks has their arguments.
/** @type {Record<string, (numbers: Record<string, number | null>) => Mask>} */
const MASKS = {
  causal: () => (q, k) => k <= q,
  everything: () => () => true,
  window: ({ before = null, after = null }) => (q, k) =>
    (before === null || k >= q - before) && (after === null || k <= q + after),
  prefix: ({ n }) => (_, k) => k < Number(n),
  lengths: ({ keys = null, queries = null }) => (q, k) =>
    (keys === null || k < keys) && (queries === null || q < queries),
};

/** @param {string} text @returns {Mask} */
export function readMask(text) {
  const parts = text.match(/\d+|\w+|\S/g) ?? [];
  let at = 0;
  const fail = (why) => {
    throw new Error(`The mask '${text}' cannot be read: ${why}. A mask here is made of ${notation()}, joined by &, | and ~.`);
  };
  const take = (wanted) => (parts[at] === wanted ? Boolean(++at) : false);
  const whole = () => (/^\d+$/.test(parts[at] ?? "") ? Number(parts[at++]) : take("None") ? null : fail(`'${parts[at] ?? "its end"}' is not a whole number`));
  const numbers = (mask, names) => {
    /** @type {Record<string, number | null>} */
    const given = {};
    if (!take("(")) fail(`'${parts[at - 1]}' needs its numbers`);
    let bare = 0;
    for (let i = 0; !take(")"); i++) {
      if (i && !take(",")) fail("a bracket is open");
      const isNamed = parts[at + 1] === "=";
      const name = isNamed ? parts[at] : names[i];
      if (!names.includes(name)) fail(isNamed ? `'${name}' is not an argument of this mask` : "there are too many numbers");
      if (isNamed) at += 2;
      else bare++;
      given[name] = whole();
    }
    if (mask === "window" && bare && !("after" in given)) {
      fail("a window needs two numbers, or a name: write window(3, 0) or window(before=3)");
    }
    return given;
  };
  const either = () => {
    let left = both();
    while (take("|")) { const [a, b] = [left, both()]; left = (q, k) => a(q, k) || b(q, k); }
    return left;
  };
  const both = () => {
    let left = one();
    while (take("&")) { const [a, b] = [left, one()]; left = (q, k) => a(q, k) && b(q, k); }
    return left;
  };
  const one = () => {
    if (take("~")) { const inner = one(); return (q, k) => !inner(q, k); }
    if (take("(")) { const inner = either(); return take(")") ? inner : fail("a bracket is open"); }
    const name = parts[at++];
    if (name === undefined) return fail("it ends too early");
    if (!Object.hasOwn(MASKS, name)) return fail(`no mask is called '${name}'`);
    const names = pageData.masks.arguments[name], given = names.length ? numbers(name, names) : {};
    if (name === "prefix" && typeof given.n !== "number") return fail("prefix needs a number");
    return MASKS[name](given);
  };
  const found = either();
  return at < parts.length ? fail(`'${parts[at]}' is too much`) : found;
}

// The notation of masks: causal, everything, window(before, after), prefix(n) and lengths(keys, queries).
function notation() {
  const all = Object.entries(pageData.masks.arguments)
    .map(([name, names]) => (names.length ? `${name}(${names.join(", ")})` : name));
  return `${all.slice(0, -1).join(", ")} and ${all.at(-1)}`;
}
