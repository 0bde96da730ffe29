// The text: the strip of words at the top, and the view of one word: the keys it looks at, the queries
// that look at it, and the predictions of the model after it.

import { LEAST, css, drawSignedBar, drawWeightBar, inkOn, shareColour, sideColour, signedColour } from "../ink.js";
import { byId, clip, keyToken, make, percent, queryToken } from "../marks.js";
import { Scene, fitted, widthOf } from "../scene.js";
import { go, largestAt, point, queryOr, shownTrace, sides, snapshot, state } from "../state.js";
import { chosen, pageData, store } from "../store.js";
import { bare, isPronoun, isWord } from "../words.js";
import { zoomedWeight } from "./zoom.js";

/** @import { Side } from "../state.js" */

export const MANY_WORDS = 2048; // of a longer text, the strip shows the words around the query

export function buildStrip() {
  const strip = byId("strip");
  const wordOf = (event) => {
    const word = event.target.closest("[role=option]");
    return word ? Number(word.dataset.position) : null;
  };
  strip.addEventListener("click", (event) => {
    const query = wordOf(event);
    if (query !== null) go({ query, key: null });
  });
  strip.addEventListener("pointerover", (event) => {
    const query = wordOf(event);
    if (event.pointerType === "mouse") point(query === null ? null : { query, key: null });
  });
  strip.addEventListener("pointerleave", () => point(null));
  strip.addEventListener("scroll", fadeStrip);
  new ResizeObserver(fadeStrip).observe(strip);
  strip.addEventListener("keydown", (event) => {
    const kept = shownTrace().kept, at = kept.indexOf(queryOr());
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10,
      Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    go({ query: kept[Math.max(0, Math.min(kept.length - 1, at + by))], key: null });
  });
}

// The words of the strip are those of the keys; with cross-attention the queries are another text.
export function fillStrip() {
  const { queries } = shownTrace(), strip = byId("strip");
  const first = Math.max(0, Math.min(queries.length - MANY_WORDS, queryOr() - MANY_WORDS / 2));
  const words = queries.slice(first, first + MANY_WORDS), touches = (at) => snapshot().touches(queries, at);
  strip.filled = queries;
  byId("unknown").textContent = unknownInWords();
  const runs = [];
  words.forEach((_, i) => {
    if (!i || !touches(first + i)) runs.push([]);
    const classes = ["word", snapshot().unknown.has(first + i) && "unknown", touches(first + i) && "joined",
      touches(first + i + 1) && "continued"];
    runs.at(-1).push(make("span", { role: "option", id: `word-${first + i}`, "data-position": first + i,
      class: classes.filter(Boolean).join(" ") }, queryToken(first + i)));
  });
  const wrapped = (run) => (run.length > 1 ? make("span", { class: "run", role: "presentation" }, run) : run[0]);
  strip.replaceChildren(...runs.map(wrapped));
}

// The meaning of "(?)" at a word, and the size of the vocabulary.
function unknownInWords() {
  if (!snapshot().unknown.size) return "";
  const known = pageData.model?.words.filter(isWord).length;
  return "(?) marks words outside the model's vocabulary, which it reads as one unknown word." +
    (known ? ` It knows ${known.toLocaleString("en")} words.` : "");
}

export function drawStrip() {
  const trace = shownTrace(), { head, query } = state(), strip = byId("strip");
  if (strip.filled !== trace.queries || (query !== null && !byId(`word-${query}`))) fillStrip();
  const row = !trace.isOneText ? [] : query === null ? trace.received(head) : trace.row(trace.used, head, query);
  const blocked = query === null ? [] : trace.blocked(head, query);
  for (const word of strip.querySelectorAll(".word")) {
    const position = Number(word.dataset.position), weight = row[position];
    const colour = weight >= LEAST ? shareColour(weight) : null;
    word.style.background = colour ? css(colour) : "";
    word.style.color = colour ? inkOn(colour) : "";
    word.classList.toggle("blocked", Boolean(blocked[position]));
    word.setAttribute("aria-selected", position === query);
  }
  if (query === null) strip.removeAttribute("aria-activedescendant");
  else {
    strip.setAttribute("aria-activedescendant", `word-${query}`);
    if (!store.pointed) keepInSight(byId(`word-${query}`), strip);
  }
  fadeStrip();
}

// Shows that words are scrolled out of the strip.
function fadeStrip() {
  const strip = byId("strip"), below = strip.scrollHeight - strip.clientHeight - strip.scrollTop;
  strip.classList.toggle("more-above", strip.scrollTop > 1);
  strip.classList.toggle("more-below", below > 1);
}

const STRIP_LINE = 32; // pixels, as in the style sheet

function keepInSight(word, strip) {
  if (!word) return;
  const top = word.offsetTop, visible = strip.clientHeight - STRIP_LINE;
  if (top < strip.scrollTop || top > strip.scrollTop + visible) {
    strip.scrollTop = Math.max(0, Math.floor(top / STRIP_LINE) - 1) * STRIP_LINE;
  }
}

// What a head of a label does, if this query and key show it. For copies, keys count as in the report
// (report/role_keys.py): neither the query itself nor the one before it.
const FINDS = {
  antecedent: ["this head finds the antecedent of a pronoun", (q, _, words) => isPronoun(words[q])],
  subject: ["this head finds the subject of a verb", (q, k) => k < q],
  "previous word": ["this head looks at the word before", (q, k) => k === q - 1],
  "previous token": ["this head looks at the token before", (q, k) => k === q - 1],
  "two before": ["this head looks two tokens before", (q, k) => k === q - 2],
  "next token": ["this head looks at the token after", (q, k) => k === q + 1],
  "same token": ["this head looks at the token itself", (q, k) => k === q],
  "first token (sink)": ["this head looks at the first token", (_, k) => k === 0],
  induction: ["this head finds what followed an earlier copy", (q, k, words) =>
    k > 0 && k < q - 1 && bare(words[k - 1]) === bare(words[q])],
  "duplicate token": ["this head finds an earlier copy", (q, k, words) =>
    k < q - 1 && bare(words[k]) === bare(words[q])],
};

export function drawSentence() {
  const trace = shownTrace(), { layer, head, query, key } = state();
  const words = [];
  if (query === null) {
    const row = trace.received(head), most = largestAt(row);
    words.push("All queries: ", keyToken(most, 40), ` receives most, ${percent(row[most])} on average.`);
  } else {
    const row = trace.row(trace.used, head, query) ?? [], to = key ?? largestAt(row);
    if (!row.some((weight) => weight > 0)) {
      words.push(queryToken(query, 40), " is fully masked.");
    } else {
      const [claim, holds] = FINDS[snapshot().finding(layer, head)?.label.split(" and ")[0]] ?? [];
      const shown = claim && !store.edited && row[to] > 0.5 && holds(query, to, trace.queries);
      words.push(make("strong", {}, queryToken(query, 40)), " looks at ",
        make("strong", {}, keyToken(to, 40)), ` (${percentOf(row[to] ?? zoomedWeight(query, to))})`,
        shown ? `: ${claim}.` : ".");
    }
  }
  byId("sentence").replaceChildren(...words);
}

const percentOf = (weight) =>
  (weight === undefined ? "less than the stored weights" : weight < LEAST ? "under 1 %" : percent(weight));

// ---- the view of the text ------------------------------------------------------------------

const WORD_SIZES = [26, 22, 18]; // the largest that fits, with at most four lines of words
const boxHeight = (size) => Math.round(size * 1.55), lineHeight = (size) => boxHeight(size) + 18;

// The words in lines; with a query, arcs to the keys that it looks at. `side` has the head.
function textScene(/** @type {Scene} */ scene, /** @type {Side} */ side, x, y, width, most, /** @type {{difference?: number[], limit?: number}} */ { difference, limit } = {}) {
  const { trace, head, query, key } = side;
  const row = difference ?? (query === null ? trace.received(head) : trace.row(trace.used, head, query) ?? []);
  const blocked = query === null ? [] : trace.blocked(head, query);
  const first = Math.max(0, Math.min(trace.keys.length - 400, (query ?? 0) - 200));
  const shown = trace.keys.slice(first, first + 400);
  const font = { serif: true, size: WORD_SIZES.find((size) =>
    shown.reduce((sum, word) => sum + widthOf(word.slice(0, 30), { serif: true, bold: true, size }) + 14, 0) <
      Math.min(3, 0.85 * Math.floor(most / lineHeight(size))) * width) ?? 16 };
  const high = boxHeight(font.size), line = lineHeight(font.size);
  /** @type {any[][]} */
  const lines = [[]];
  let left = x;
  // The pieces of a word touch, and are on one line if they fit.
  const pieces = shown.map((word, i) => {
    const text = fitted(word, 220, font), [joined, continued] = [first + i, first + i + 1].map((at) => side.from.touches(trace.keys, at));
    const before = joined ? 0 : 5, after = continued ? 0 : 5;
    return { position: first + i, text, joined, before, middle: widthOf(text, { ...font, bold: !joined && !continued }), after };
  });
  const wideOf = (it) => it.before + it.middle + it.after;
  pieces.forEach((it, i) => {
    const end = pieces.findIndex((next, j) => j > i && !next.joined);
    const word = pieces.slice(i, end < 0 ? undefined : end).reduce((sum, part) => sum + wideOf(part), 0);
    if (left > x && left + (it.joined || word > width ? wideOf(it) : word) > x + width) {
      lines.push([]);
      left = x;
    }
    lines[lines.length - 1].push({ ...it, x: left, width: wideOf(it), height: high });
    left += wideOf(it) + (it.after && 4);
  });
  // As many lines as fit: at least those of the query and of its largest weight.
  const kept = linesToShow(lines, Math.max(2, Math.floor(most / line)), row, [trace.isOneText ? query : null, key]);
  const boxes = new Map();
  let top = y - line, before = -1;
  const cut = (at) => scene.text("⋯", x + 4, at, { size: 12, fill: "soft" });
  for (const i of kept) {
    top += line;
    if (i > before + 1) cut(top - 9);
    for (const word of lines[i]) boxes.set(word.position, { ...word, y: top });
    before = i;
  }
  if (before < lines.length - 1) cut(top + high + 9);
  const from = difference || !trace.isOneText ? undefined : boxes.get(query);
  for (const [position, to] of boxes) {
    const weight = row[position];
    if (!from || position === query || !(weight >= Math.max(LEAST, chosen.threshold))) continue;
    const [x1, x2] = [from.x + from.width / 2, to.x + to.width / 2];
    const lift = Math.min(40, 12 + Math.abs(x1 - x2) / 14) + (from.y === to.y ? 0 : 6);
    scene.path(`M ${x1} ${from.y} C ${x1} ${from.y - lift} ${x2} ${to.y - lift} ${x2} ${to.y}`,
      { stroke: "accent", line: 1 + 5 * weight, opacity: 0.25 + 0.7 * weight }, { weight });
  }
  for (const [position, box] of boxes) {
    const weight = row[position], isQuery = position === query && trace.isOneText;
    const colour = difference ? (Math.abs(weight) >= LEAST ? signedColour(weight, limit) : null)
      : weight >= LEAST ? shareColour(weight) : null;
    if (colour) scene.rect(box.x, box.y, box.width, box.height, { fill: css(colour), radius: 4 });
    if (isQuery) scene.rect(box.x, box.y, box.width, box.height, { stroke: "mark", line: 2.5, radius: 4 });
    if (position === key) {
      scene.rect(box.x, box.y, box.width, box.height, { stroke: "ink", line: 1.5, radius: 4, dash: [4, 3] });
    }
    scene.text(box.text, box.x + box.before + box.middle / 2, box.y + high / 2, { ...font, bold: isQuery, align: "center",
      halo: !colour, fill: colour ? inkOn(colour) : blocked[position] ? "soft" : "ink" });
    scene.target(box.x, box.y, box.width + (box.after && 4), box.height,
      side.back(trace.isOneText ? { query: trace.nearest(position), key: null } : { query, key: position }));
  }
  return top + line;
}

// The lines to show, in order: those of the `wanted` positions, then those with the largest weights, then
// those nearest to one of them.
function linesToShow(lines, most, row, wanted) {
  const all = lines.map((_, i) => i);
  if (lines.length <= most) return all;
  const heaviestIn = lines.map((words) => Math.max(0, ...words.map((it) => Math.abs(row[it.position] || 0))));
  const holding = wanted.map((position) => lines.findIndex((words) => words.some((it) => it.position === position)))
    .filter((line) => line >= 0);
  const byWeight = all.toSorted((a, b) => heaviestIn[b] - heaviestIn[a])
    .filter((line, i) => i === 0 || (holding.length && heaviestIn[line] >= chosen.threshold));
  const first = [...new Set([...holding, ...byWeight])].slice(0, most);
  const distance = (line) => Math.min(...first.map((it) => Math.abs(it - line)));
  const near = all.toSorted((a, b) => distance(a) - distance(b));
  return [...new Set([...first, ...near])].slice(0, most).sort((a, b) => a - b);
}

// Lists below the text: the keys of the query, the queries that look at it, and the predictions.
export function wordLists(/** @type {Scene} */ scene, /** @type {Side} */ side, x, y, width, isColumn = false) {
  const { trace, head, from, query } = side;
  if (query === null) return y;
  const row = trace.row(trace.used, head, query) ?? [];
  const lists = [[`${clip(trace.queries[query], 14)} looks at`, heaviest(row).map((i) => [trace.keys[i], row[i], { key: i }])]];
  if (trace.isOneText && trace.size.k <= MANY_WORDS) {
    const column = trace.column(head, query);
    lists.push([`What looks at ${clip(trace.keys[query], 14)}`,
      heaviest(column).map((i) => [trace.queries[i], column[i], { query: i, key: query }])]);
  }
  if (from.guesses?.[query]) {
    lists.push([`Predictions after ${clip(trace.queries[query], 12)}`,
      from.guesses[query].slice(0, 6).map(([word, share]) => [word, share, null])]);
  }
  if (!isColumn && width < 460 && lists.length > 2) lists.splice(1, 1);
  const wide = Math.min(280, isColumn ? width : (width - 24 * (lists.length - 1)) / lists.length);
  let above = y;
  lists.forEach(([title, lines], i) => {
    const left = isColumn ? x : x + i * (wide + 24), y = above;
    scene.text(fitted(title, wide, { size: 13, bold: true }), left, y + 8, { size: 13, bold: true });
    if (!lines.length) scene.text("no weight of 1 % or more", left, y + 32, { size: 13, fill: "soft" });
    lines.forEach(([word, weight, changes], j) => {
      const at = y + 32 + j * 23, room = wide * 0.42, bar = wide * 0.55 - 50;
      scene.text(fitted(word, room, { size: 14, serif: true }), left, at, { size: 14, serif: true });
      scene.rect(left + wide * 0.45, at - 5, bar, 10, { fill: "rule", radius: 2 });
      scene.rect(left + wide * 0.45, at - 5, bar * Math.min(1, weight), 10, { fill: "accent", radius: 2 });
      scene.text(percent(weight), left + wide, at, { align: "right" });
      if (changes) scene.target(left, at - 11, wide, 23, side.back(changes));
    });
    if (isColumn) above += 32 + 23 * Math.max(1, lines.length);
  });
  return y + 32 + 23 * Math.max(...lists.map(([, lines]) => lines.length), 1);
}

// The positions of the six largest weights of at least one percent.
const heaviest = (weights) => weights.map((_, i) => i).filter((i) => weights[i] >= LEAST)
  .sort((a, b) => weights[b] - weights[a]).slice(0, 6);

export function drawText(width, height) {
  const scene = new Scene(width, height), shown = sides();
  let bottom = 0;
  if (chosen.difference) {
    const [a, b] = shown.map(({ trace, head, query }) =>
      (query === null ? trace.received(head) : trace.row(trace.used, head, query) ?? []));
    const difference = b.map((weight, i) => (weight ?? 0) - (a[i] ?? 0));
    const limit = Math.max(LEAST, ...difference.map(Math.abs));
    scene.text(`${shown[1].name} minus ${shown[0].name}`, 0, 12, { bold: true });
    bottom = textScene(scene, shown[0], 0, 44, width, height - 90, { difference, limit });
    drawSignedBar(scene, 0, bottom + 4, limit);
    bottom += 40;
  } else {
    const columns = shown.length === 2 && width > 620 ? 2 : 1, wide = (width - 28 * (columns - 1)) / columns;
    shown.forEach((side, i) => {
      const left = columns === 2 ? i * (wide + 28) : 0;
      const above = columns === 2 ? 0 : bottom;
      const { query } = state(), isAbsent = side.query === null && query !== null; // in another text
      const name = isAbsent ? `${side.name}: no “${clip(shownTrace().queries[query], 16)}”` : side.name;
      if (shown.length > 1) scene.text(name, left, above + 10, { bold: true, fill: sideColour(i) });
      const lists = side.query === null ? 0 : Math.min(178, height * 0.45), rows = columns === 2 ? 1 : shown.length;
      const at = textScene(scene, side, left, above + (shown.length > 1 ? 46 : 40), wide, height / rows - lists - 84);
      const after = side.query === null ? at : wordLists(scene, side, left, at + 6, wide);
      bottom = columns === 2 ? Math.max(bottom, after) : after + 8;
    });
    drawWeightBar(scene, 0, bottom + 2);
    bottom += 28;
  }
  scene.height = Math.max(height, bottom);
  return scene;
}
