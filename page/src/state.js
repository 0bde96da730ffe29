// The selection, what it shows, its changes, and its address.

import { changedEdits, misreadEdits } from "./edits.js";
import { chosen, opened, pageData, screen, store } from "./store.js";
import { bare } from "./words.js";

/** @import { Snapshot, Trace } from "./data.js" */
/** @import { Place, View } from "./store.js" */

/** A query and a key, each if it changes. @typedef {{query?: number | null, key?: number | null}} Choice */
/** For each word of one text its position in the other, and the reverse. @typedef {{to: (number | null)[], back: (number | null)[]}} Words */
/** What is drawn of one head. What is laid out around the query follows `rest`, the selection without the pointer,
 * so that nothing moves below the pointer. It has its own query and key, because another text may have them elsewhere
 * or not at all. `back` converts a selection to positions of the current text; null if they do not exist.
 * @typedef {{
 *   name: string, trace: Trace, from: Snapshot, layer: number, head: number, colour: number,
 *   query: number | null, key: number | null, rest: {row: number[], query: number | null, key: number | null}, back: (changes: Choice) => Choice | null,
 * }} Side */

/** The views; Why is about a model, and not about one attention call. @type {View[]} */
export const VIEWS = ["text", "lines", "map", "numbers", "walk", ...(pageData.heads ? /** @type {const} */ (["why"]) : [])];

export const isAt = (layer, head) => ([l, h]) => l === layer && h === head;
export const isOff = (layer, head) => chosen.edits.off.some(isAt(layer, head));
// The heads without one of them, or with another one.
export const toggled = (places, layer, head) =>
  (places.some(isAt(layer, head)) ? without(places, layer, head) : [...places, [layer, head]]);
export const without = (places, layer, head) => places.filter((it) => !isAt(layer, head)(it));

export const state = () => (store.pointed ? { ...chosen, ...store.pointed } : chosen);

export const snapshot = () => store.edited ?? store.current;
export const shownTrace = () => snapshot().layer(state().layer);

// The query of the numbers and the walk: the selected one, else the last one that is stored.
export const queryOr = ({ query, head } = state()) => query ?? shownTrace().stored(head).at(-1);

// The key of the numbers: the selected one, else that of the largest weight.
export function keyOr(at = state()) {
  if (at.key !== null) return at.key;
  const row = shownTrace().row(shownTrace().used, at.head, queryOr(at)) ?? [0];
  return largestAt(row);
}

export const largestAt = (row) =>
  row.reduce((best, weight, i) => (weight > (row[best] ?? -1) ? i : best), 0);

// Whether norm-weighted attention is known, and whether it shades the text.
export const areNormsKnown = (/** @type {Trace} */ trace, head, query) => trace.normWeighted(head, query ?? trace.stored(head)[0]) !== null;
export const isByNorm = (/** @type {Trace} */ trace, head, query) =>
  chosen.by === "norm-weighted" && areNormsKnown(trace, head, query);

// The row that shades the text: weights, or norm-weighted attention if it is known.
export function shades(/** @type {Trace} */ trace, head, query) {
  const isByNorms = isByNorm(trace, head, query);
  if (query === null) return trace.received(head, isByNorms ? (it) => trace.normWeighted(head, it) : undefined);
  return (isByNorms ? trace.normWeighted(head, query) : trace.drawn(head, query)) ?? [];
}

/** The heads to draw side by side: the selected head and others, or the selected head before and after.
 * @returns {Side[]} */
export function sides() {
  const { layer, head, others, query, key } = state();
  /** @param {string} name @param {Snapshot} from @param {Place} place @param {number} colour
   * @param {Words | null} words @returns {Side} */
  const side = (name, from, [layer, head], colour, words = null) => ({
    name, trace: from.layer(layer), from, layer, head, colour,
    query: there(words, query), key: there(words, key), rest: atRest(from, layer, head, there(words, chosen.query), there(words, chosen.key)),
    back: (changes) => backFrom(words, changes),
  });
  const here = placeName(layer, head);
  const { current, edited, before, kept } = store;
  if (edited && before) {
    return [side(`${here} before`, before, [layer, head], 0), side(`${here} after`, edited, [layer, head], 1)];
  }
  if (kept && isBeside()) {
    const [then, now] = pageData.beside ? [besideName(), pageData.name] : ["kept", "now"];
    const words = kept.tokens.length === current.tokens.length ? null : wordsOf(kept, current);
    return [side(`${here} ${then}`, kept, [layer, head], 0, words), side(`${here} ${now}`, current, [layer, head], 1)];
  }
  return [/** @type {Place} */ ([layer, head]), ...without(others, layer, head)]
    .map((place, i) => side(placeName(...place), current, place, i));
}

function atRest(from, layer, head, query, key) {
  const at = layer === state().layer && head === state().head ? chosen : { layer, head };
  const isThere = at.layer < from.layers && query !== null && query < from.layer(at.layer).size.q;
  return { row: isThere ? shades(from.layer(at.layer), at.head, query) : [], query, key };
}

// Whether the kept snapshot is shown. Models are compared on the text of the page.
export function isBeside() {
  const { layer, head } = state();
  return store.kept !== null && !store.edited && isComparable(store.current) &&
    layer < store.kept.layers && head < store.kept.layer(layer).heads;
}

export const isComparable = (next) => !pageData.beside || next.text === opened.text;

// Whether two sides can be subtracted, because they have the same sizes.
export function canDiffer() {
  const [a, b, ...more] = sides();
  return b !== undefined && !more.length && a.trace.size.q === b.trace.size.q && a.trace.size.k === b.trace.size.k;
}

// ---- the words of two texts --------------------------------------------------------------------

const MOST_PAIRS = 4e6; // of words, when matching two texts

// The position of each word of the current text in the kept one, or null; and the reverse.
function wordsOf(kept, current) {
  if (store.aligned.kept !== kept || store.aligned.current !== current) {
    const words = alignment(current.tokens.map(bare), kept.tokens.map(bare));
    const back = kept.tokens.map(() => null);
    words.forEach((to, from) => { if (to !== null) back[to] = from; });
    store.aligned = { kept, current, words: { to: words, back } };
  }
  return store.aligned.words;
}

// For each word of `a` its position in `b`, or null: the longest common sequence, and between two of
// its words the others in order, if both sides have the same number ("he" for "she").
export function alignment(a, b) {
  if (a.length * b.length > MOST_PAIRS) return a.map((_, i) => (i < b.length ? i : null));
  const wide = b.length + 1, longest = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i * wide + j] = a[i] === b[j] ? longest[(i + 1) * wide + j + 1] + 1
        : Math.max(longest[(i + 1) * wide + j], longest[i * wide + j + 1]);
    }
  }
  const found = a.map(() => null);
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    const [from, to] = [i, j];
    while (i < a.length && j < b.length && a[i] !== b[j]) {
      if (longest[(i + 1) * wide + j] >= longest[i * wide + j + 1]) i++;
      else j++;
    }
    if (i === a.length || j === b.length) [i, j] = [a.length, b.length];
    if (i - from === j - to) for (let n = from; n < i; n++) found[n] = to + n - from;
    if (i < a.length && j < b.length) found[i++] = j++;
  }
  return found;
}

const there = (words, position) => (words && position !== null ? words.to[position] ?? null : position);

function backFrom(words, changes) {
  if (!words) return changes;
  const moved = Object.fromEntries(Object.entries(changes).map(([name, position]) =>
    [name, position === null ? null : words.back[position] ?? null]));
  return Object.entries(changes).some(([name, position]) => position !== null && moved[name] === null) ? null : moved;
}

export function besideName() {
  const { name, beside } = pageData;
  return beside?.name === name ? `${name} (2)` : String(beside?.name);
}

// Whether the page of one layer leaves out its number.
const isOnlyLayer = () => snapshot().layers === 1 && !snapshot().findings.size;
const headNumber = (layer, head) => snapshot().layer(layer).numbered("h", head);
export const placeName = (layer, head) => `${isOnlyLayer() ? "head " : `L${layer}H`}${headNumber(layer, head)}`;
export const placeInWords = (layer, head) => placeName(layer, head).replace(/^h/, "H");

// ---- changing it ---------------------------------------------------------------------------

// Changes the selection, and redraws everything that depends on it.
export function go(changes, misread = []) {
  Object.assign(chosen, changes);
  store.pointed = null;
  store.misread = misread;
  settle();
  writeAddress();
  screen.draw();
}

export function point(changes) {
  if (JSON.stringify(changes) === JSON.stringify(store.pointed)) return;
  store.pointed = changes;
  screen.draw();
}

// Limits the selection to the snapshot, because another text may be shorter.
export function settle() {
  chosen.layer = Math.min(chosen.layer, snapshot().layers - 1);
  const trace = shownTrace();
  chosen.head = Math.min(chosen.head, trace.heads - 1);
  if (chosen.query !== null) chosen.query = Math.min(chosen.query, trace.size.q - 1);
  if (chosen.key !== null) chosen.key = Math.min(chosen.key, trace.size.k - 1);
  chosen.stage = Math.min(chosen.stage, trace.steps.length - 1);
  if (!trace.maps(chosen.head).some((step) => step.name === chosen.step)) chosen.step = "weights";
  if (!canDiffer()) chosen.difference = false;
}

// Escape clears one thing at a time: the key, the query, the comparison.
export function letGo() {
  if (chosen.query !== null || chosen.key !== null) go({ query: null, key: null });
  else if (chosen.others.length) go({ others: [], difference: false });
}

// ---- the address ---------------------------------------------------------------------------

// A word if it is unique in the text, else its position: #layer=0&head=7&query=she.
function wordAddress(position) {
  if (position === null) return "none";
  const word = snapshot().tokens[position]?.toLowerCase();
  const isOnly = snapshot().tokens.filter((it) => it.toLowerCase() === word).length === 1;
  return isOnly && word.length <= 24 && !/^\d+$/.test(word) ? word : String(position);
}

// The position that an address names: by a word, a number, or a number with its token.
function positionOf(address, tokens) {
  if (address === "none") return null;
  const found = tokens.findIndex((it) => it.toLowerCase() === address.toLowerCase());
  if (found >= 0 && !/^\d+$/.test(address)) return found;
  const [, number, token] = /^(\d{1,7})(?::(.*))?$/s.exec(address) ?? [];
  const isThere = token === undefined || tokens[Number(number)]?.trim() === token;
  return number !== undefined && isThere ? Number(number) : undefined;
}

function writeAddress() {
  const { view, layer, head, query, key, others, by, registers, difference, edits, step } = chosen;
  /** @type {Record<string, any>} */
  const parts = { layer, head, query: wordAddress(query) };
  if (key !== null) parts.key = wordAddress(key);
  parts.view = view;
  if (step !== "weights") parts.step = step;
  if (others.length) parts.with = others.map((place) => place.join(".")).join(",");
  if (by !== "weight") parts.by = by;
  if (registers !== "drawn") parts.registers = registers;
  if (difference) parts.difference = 1;
  if (store.kept) parts.kept = pageData.beside ? "model" : store.kept.text;
  if (store.current.text !== opened.text) parts.text = store.current.text;
  const changed = changedEdits(edits);
  if (changed.length) parts.edits = JSON.stringify(Object.fromEntries(changed));
  try {
    history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
  } catch { /* A page in a notebook's frame has no address. */ }
}

const ADDRESSED = ["layer", "head", "query", "key", "view", "step", "with", "by", "registers", "difference", "kept", "text", "edits"];

/** Parses an address: the changes that this page can make, and descriptions of the others, which a
 * note shows until the selection changes.
 * @param {string} hash @returns {{changes: Partial<typeof chosen>, misread: string[]}} */
export function readAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, "")), { current } = store;
  /** @type {Record<string, any>} */
  const changes = {};
  /** @type {string[]} */
  const misread = [];
  const asked = (name) => given.get(name) ?? "";
  const isUnknown = (name) => name && !ADDRESSED.includes(name) && !document.getElementById(name);
  misread.push(...[...given.keys()].filter(isUnknown).map((name) => `“${name}”`));
  if (location.search) misread.push(`“${location.search}” (write # for ?)`);
  const numbered = (name) => (given.has(name) ? (/^\d{1,6}$/.test(asked(name)) ? Number(asked(name)) : NaN) : chosen[name]);
  const layer = numbered("layer"), head = numbered("head");
  const isThere = layer < current.layers && (!given.has("head") || head < current.layer(layer).heads);
  if (isThere) Object.assign(changes, { layer, head: given.has("head") ? head : Math.min(head, current.layer(layer).heads - 1) });
  else misread.push(["layer", "head"].filter((name) => given.has(name)).map((name) => `${name} ${asked(name)}`).join(", "));
  const trace = current.layer(isThere ? layer : chosen.layer), { size } = trace;
  for (const [name, most] of /** @type {const} */ ([["query", size.q], ["key", size.k]])) {
    if (!given.has(name)) continue;
    const position = positionOf(asked(name), current.tokens);
    if (position === undefined || (position !== null && position >= most)) misread.push(`${name} “${asked(name)}”`);
    else changes[name] = position;
  }
  const offered = { view: VIEWS, step: trace.maps(changes.head ?? chosen.head).map((it) => it.name), by: ["weight", "norm-weighted"],
    registers: ["drawn", "left out"] };
  for (const [name, values] of Object.entries(offered)) {
    if (values.includes(asked(name))) changes[name] = asked(name);
    else if (given.has(name)) misread.push(`${name} “${asked(name)}”`);
  }
  if (given.has("difference")) changes.difference = true;
  if (given.has("with")) {
    const places = new Set([...current.places()].map((it) => `${it.layer}.${it.head}`));
    const others = asked("with").split(",").filter(Boolean), shown = others.filter((it) => places.has(it)).slice(0, MOST_OTHERS);
    changes.others = shown.map((it) => it.split(".").map(Number));
    if (shown.length < others.length) misread.push(`heads ${others.filter((it) => !shown.includes(it)).join(", ")} beside`);
  }
  if (given.has("text") && asked("text") !== current.text) misread.push("another text");
  const edits = misreadEdits(hash);
  if (edits.length) misread.push(`edits (${edits.join(", ")})`);
  return { changes, misread };
}

export const MOST_OTHERS = 4;
