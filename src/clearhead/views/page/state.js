// 2. What is chosen. Pointing shows something for a moment, clicking keeps it, Escape lets go.
//
// Everything reacts to the same four choices: layer, head, query, key. A query of null means none:
// pictures then show all of them alike.

const VIEWS = ["text", "lines", "map", "numbers", "walk"];

const NO_EDITS = { off: [], temperature: 1, scale: null, mask: null, softcap: null, dropout: 0,
  seed: 0 };

const chosen = {
  view: "text", layer: 0, head: 0, query: null, key: null,
  step: "weights",       // which matrix the map shows
  stage: 0,              // which step the numbers and the walk are at
  others: [],            // heads shown beside the chosen one, [[layer, head]]
  difference: false,     // of two sides, the difference instead of both
  threshold: 0.05,       // a smaller weight gets no line
  edits: NO_EDITS,
};

let pointed = null;      // what the pointer is on; it overrides what is chosen
let current;             // the snapshot of the text
let edited = null;       // the snapshot of the text with the edits, if there are any
let before = null;       // what the edited one is compared with: the same text, without them
let kept = null;         // another snapshot to compare with: of a text before, or of another model

const state = () => (pointed ? { ...chosen, ...pointed } : chosen);

const snapshot = () => edited ?? current;
const shownTrace = () => snapshot().layer(state().layer);

// The query that numbers and walk are about: the chosen one, else the last one that is held.
const queryOr = ({ query } = state()) => query ?? shownTrace().kept.at(-1);

// The key that numbers are about: the chosen one, else that of the largest weight.
function keyOr(at = state()) {
  if (at.key !== null) return at.key;
  const row = shownTrace().row(shownTrace().used, at.head, queryOr(at)) ?? [0];
  return largestAt(row);
}

const largestAt = (row) =>
  row.reduce((best, weight, i) => (weight > (row[best] ?? -1) ? i : best), 0);

// What is drawn side by side: the chosen head and others, or the chosen head before and after. A side
// has its own query and key, since another text may have them elsewhere or not at all, and `back`
// says a choice there in positions of the current text; null if it has no such word.
function sides() {
  const { layer, head, others, query, key } = state();
  const side = (name, from, [layer, head], colour, words = null) => ({
    name, trace: from.layer(layer), from, layer, head, colour,
    query: there(words, query), key: there(words, key),
    back: (changes) => backFrom(words, changes),
  });
  const here = placeName(layer, head);
  if (edited) {
    return [side(`${here} before`, before, [layer, head], 0),
      side(`${here} after`, edited, [layer, head], 1)];
  }
  if (isBeside()) {
    const [then, now] = pageData.beside ? [besideName(), pageData.name] : ["kept", "now"];
    const words = sameLength() ? null : wordsOf(kept, current);
    return [side(`${here} ${then}`, kept, [layer, head], 0, words), side(`${here} ${now}`, current, [layer, head], 1)];
  }
  return [[layer, head], ...others.filter(([l, h]) => l !== layer || h !== head)]
    .map((place, i) => side(placeName(...place), current, place, i));
}

// Is the kept snapshot shown? Models are compared on the text of the page.
function isBeside() {
  const { layer, head } = state();
  return kept !== null && !edited && isComparable(current) &&
    layer < kept.layers && head < kept.layer(layer).heads;
}

const isComparable = (next) => !pageData.beside || next.text === opened.text;
const sameLength = () => kept.tokens.length === current.tokens.length;

// Can two sides be subtracted? Then they have as many queries and keys.
function canDiffer() {
  const [a, b, ...more] = sides();
  return b !== undefined && !more.length && a.trace.size.q === b.trace.size.q && a.trace.size.k === b.trace.size.k;
}

// ---- the words of two texts --------------------------------------------------------------------

const MOST_PAIRS = 4e6; // of words that are compared to find the same ones
let aligned = { kept: null, current: null, words: null };

// Where each word of the current text stands in the kept one, or null; and the other way round.
function wordsOf(kept, current) {
  if (aligned.kept !== kept || aligned.current !== current) {
    const words = alignment(current.tokens.map(bare), kept.tokens.map(bare));
    const back = kept.tokens.map(() => null);
    words.forEach((to, from) => { if (to !== null) back[to] = from; });
    aligned = { kept, current, words: { to: words, back } };
  }
  return aligned.words;
}

// For each of `a` the position in `b`: the longest common sequence, and between two of its words
// others in order if there are as many on both sides ("he" for "she"); null for what has no partner.
function alignment(a, b) {
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

const besideName = () => (pageData.beside.name === pageData.name ? `${pageData.name} (2)` : pageData.beside.name);

const placeName = (layer, head) => {
  const first = snapshot().layer(layer).numbered("h", head);
  return snapshot().layers > 1 || snapshot().findings.size ? `${layer}·${first}` : `head ${first}`;
};

// ---- changing it ---------------------------------------------------------------------------

// Every change of what is chosen goes through here; everything that depends on it is drawn again.
function go(changes) {
  Object.assign(chosen, changes);
  pointed = null;
  settle();
  writeAddress();
  draw();
}

function point(changes) {
  if (JSON.stringify(changes) === JSON.stringify(pointed)) return;
  pointed = changes;
  draw();
}

// Keeps what is chosen within the snapshot: another text may be shorter.
function settle() {
  chosen.layer = Math.min(chosen.layer, snapshot().layers - 1);
  const trace = shownTrace();
  chosen.head = Math.min(chosen.head, trace.heads - 1);
  if (chosen.query !== null) chosen.query = trace.nearest(Math.min(chosen.query, trace.size.q - 1));
  if (chosen.key !== null) chosen.key = Math.min(chosen.key, trace.size.k - 1);
  chosen.stage = Math.min(chosen.stage, trace.steps.length - 1);
  if (!trace.maps.some((step) => step.name === chosen.step)) chosen.step = "weights";
  if (!canDiffer()) chosen.difference = false;
}

// Escape lets go of one thing at a time: the key, the query, what is compared.
function letGo() {
  if (chosen.query !== null || chosen.key !== null) go({ query: null, key: null });
  else if (chosen.others.length) go({ others: [], difference: false });
}

// ---- the address ---------------------------------------------------------------------------

// A word if it stands once in the text, else its position: #layer=0&head=7&query=she.
function wordAddress(position) {
  if (position === null) return "none";
  const word = snapshot().tokens[position]?.toLowerCase();
  const isOnly = snapshot().tokens.filter((it) => it.toLowerCase() === word).length === 1;
  return isOnly && word.length <= 24 && !/^\d+$/.test(word) ? word : String(position);
}

function positionOf(address, tokens) {
  if (address === "none") return null;
  const found = tokens.findIndex((it) => it.toLowerCase() === address.toLowerCase());
  if (found >= 0 && !/^\d+$/.test(address)) return found;
  return /^\d{1,7}$/.test(address) ? Number(address) : undefined;
}

function writeAddress() {
  const { view, layer, head, query, key, others, difference, edits, step } = chosen;
  /** @type {Record<string, any>} */
  const parts = { layer, head, query: wordAddress(query) };
  if (key !== null) parts.key = wordAddress(key);
  parts.view = view;
  if (step !== "weights") parts.step = step;
  if (others.length) parts.with = others.map((place) => place.join(".")).join(",");
  if (difference) parts.difference = 1;
  if (kept) parts.kept = pageData.beside ? "model" : kept.text;
  if (current.text !== opened.text) parts.text = current.text;
  const changed = changedEdits(edits);
  if (changed.length) parts.edits = JSON.stringify(Object.fromEntries(changed));
  try {
    history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
  } catch { /* A page inside a notebook's frame has no address of its own. */ }
}

const changedEdits = (edits) => Object.entries(edits).filter(([name, value]) =>
  JSON.stringify(value) !== JSON.stringify(NO_EDITS[name]));

// The changes that an address asks for. What it says of other texts or heads is left out.
function readAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const changes = {};
  const natural = (text) => (/^\d{1,6}$/.test(text ?? "") ? Number(text) : undefined);
  for (const name of ["layer", "head"]) {
    if (natural(given.get(name)) !== undefined) changes[name] = natural(given.get(name));
  }
  for (const name of ["query", "key"]) {
    const position = given.has(name) ? positionOf(given.get(name), current.tokens) : undefined;
    if (position !== undefined) changes[name] = position;
  }
  if (VIEWS.includes(given.get("view"))) changes.view = given.get("view");
  if (given.has("step")) changes.step = given.get("step");
  if (given.has("difference")) changes.difference = true;
  if (given.has("with")) {
    const places = new Set([...current.places()].map((it) => `${it.layer}.${it.head}`));
    changes.others = given.get("with").split(",").filter((it) => places.has(it)).slice(0, MOST_OTHERS)
      .map((it) => it.split(".").map(Number));
  }
  return changes;
}

const MOST_OTHERS = 4;

// The edits that an address asks for, each of the kind that it must be; others are left out.
function readEdits(hash) {
  let asked = {};
  try {
    asked = JSON.parse(new URLSearchParams(hash.replace(/^#/, "")).get("edits")) ?? {};
  } catch { /* not JSON: no edits */ }
  const number = (it) => Number.isFinite(it);
  const fits = {
    off: (it) => Array.isArray(it) && it.every((p) => Array.isArray(p) && p.length === 2 && p.every(number)),
    temperature: (it) => number(it) && it > 0, scale: number, softcap: (it) => number(it) && it > 0,
    mask: (it) => typeof it === "string", dropout: (it) => number(it) && it >= 0 && it < 1, seed: number,
  };
  const kept = Object.entries(fits).filter(([name, check]) => name in asked && check(asked[name]));
  return { ...NO_EDITS, ...Object.fromEntries(kept.map(([name]) => [name, asked[name]])) };
}
