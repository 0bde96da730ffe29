// The text: the strip of words at the top, and the view of one word: the keys it looks at, the queries
// that look at it, and the predictions of the model after it.

import { css, inkOn } from "../colours.js";
import { LEAST, drawSignedBar, drawWeightBar, shareColour, sideColour, signedColour } from "../ink.js";
import { effectOf, keyToken, queryToken } from "../labels.js";
import { byId, clip, make, number, percent, sum } from "../marks.js";
import { claimOf } from "../roles.js";
import { Scene, fitted, widthOf } from "../scene.js";
import { go, isByNorm, isOff, largestAt, placeInWords, placeName, point, queryOr, shades, shownTrace, sides, snapshot, state } from "../state.js";
import { chosen, pageData, store } from "../store.js";
import { isWord, quoted, runsFromLeft, writtenApart, writtenLines } from "../words.js";
import { zoomedWeight } from "./zoom.js";

/** @import { Snapshot } from "../data.js" */
/** @import { Side } from "../state.js" */

export const MANY_WORDS = 2048; // of a longer text, the strip shows the words around the query
const INDENT = 0.5, MOST_INDENTED = 16; // the width of a space before a line, in letters, and the most spaces

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
    const kept = shownTrace().stored(chosen.head), at = kept.indexOf(queryOr());
    const right = /** @type {HTMLElement} */ (byId(`word-${queryOr()}`)?.closest("[dir]"))?.dir === "rtl" ? -1 : 1;
    const by = { ArrowRight: right, ArrowDown: 1, ArrowLeft: -right, ArrowUp: -1, PageDown: 10, PageUp: -10,
      Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    go({ query: kept[Math.max(0, Math.min(kept.length - 1, at + by))], key: null });
  });
}

// The words of the strip are those of the keys; with cross-attention the queries are another text.
export function fillStrip() {
  const { queries } = shownTrace(), strip = byId("strip");
  // The patches of an image are in its picture.
  const trace = shownTrace(), all = queries.map((_, at) => at).filter((at) => !trace.isPatch(at));
  const first = Math.max(0, Math.min(all.length - MANY_WORDS, all.indexOf(queryOr()) - MANY_WORDS / 2));
  const places = all.slice(first, first + MANY_WORDS), words = places.map((at) => queries[at]);
  const touches = (at) => snapshot().touches(queries, at);
  strip.filled = queries;
  strip.classList.toggle("drawn", shownTrace().isOneText);
  byId("unknown").textContent = unknownInWords();
  const wordAt = (at) => {
    const classes = ["word", snapshot().unknown.has(at) && "unknown", touches(at) && "joined", touches(at + 1) && "continued"];
    return make("span", { role: "option", id: `word-${at}`, "data-position": at, class: classes.filter(Boolean).join(" ") },
      queryToken(at));
  };
  const lines = writtenLines(words).map(({ first: start, tokens, indent, isFromRight }) => {
    const runs = [];
    tokens.forEach((_, i) => {
      const at = places[start + i];
      if (!i || !touches(at)) runs.push([]);
      runs.at(-1).push(wordAt(at));
    });
    const wrapped = (run) => (run.length > 1 ? make("span", { class: "run", role: "presentation" }, run) : run[0]);
    // Words from left to right in a line from right to left keep their order.
    const spans = isFromRight ? runsFromLeft(runs.map((run) => run.map((it) => it.textContent).join(""))) : [];
    for (const [from, to] of spans.toReversed()) {
      runs.splice(from, to - from + 1, [make("span", { class: "run", role: "presentation", dir: "ltr" }, runs.slice(from, to + 1).map(wrapped))]);
    }
    const line = make("span", { class: "written", role: "presentation", dir: isFromRight ? "rtl" : "ltr" }, runs.map(wrapped));
    line.style.marginInlineStart = `${Math.min(indent, MOST_INDENTED) * INDENT}em`;
    return line;
  });
  const guesses = places.at(-1) === queries.length - 1 ? snapshot().guesses?.at(-1) ?? [] : [], last = lines.at(-1);
  if (guesses.length) {
    const [next] = writtenApart(guesses.map(([word]) => word));
    last?.append(make("span", { class: "guess", "aria-hidden": "true", title: "The most probable next token" },
      last.dir === "rtl" ? "← " : "→ ", make("bdi", {}, next), " ", make("bdi", {}, percent(guesses[0][1]))));
  }
  strip.replaceChildren(...lines);
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
  const row = trace.isOneText ? shades(trace, head, query) : [];
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

function keepInSight(word, strip) {
  if (!word) return;
  const top = word.offsetTop, line = word.offsetHeight + 2, visible = strip.clientHeight - line;
  if (top < strip.scrollTop || top > strip.scrollTop + visible) {
    const before = visible >= line ? 1 : 0; // the line above it, if there is room for two
    strip.scrollTop = Math.max(0, Math.floor(top / line) - before) * line;
  }
}

export function drawSentence() {
  const trace = shownTrace(), { layer, head, query, key } = state();
  const words = [...snapshot().places()].length > 1 ? [`${placeInWords(layer, head)}: `] : [];
  if (query === null) {
    const row = trace.received(head), most = largestAt(row);
    words.push(keyToken(most, 40), ` receives most weight, ${percent(row[most])} on average over all queries.`);
  } else {
    const row = trace.row(trace.used, head, query) ?? [], to = key ?? largestAt(row);
    if (!trace.isStored(head, query)) {
      words.push(queryToken(query, 40), ": the page does not have the weights of this token. ",
        make("span", { class: "more" }, STORED));
    } else if (!row.some((weight) => weight > 0)) {
      words.push(queryToken(query, 40), " is fully masked.");
    } else {
      const writer = snapshot().writers(trace, query).find((it) => it.layer === layer && it.head === head && it.key === to);
      const claim = claimOf(snapshot().finding(layer, head)?.labels[0], query, to, trace.queries);
      const shown = claim && !store.edited && row[to] > 0.5;
      words.push(make("strong", {}, queryToken(query, 40)), " looks at ",
        make("strong", {}, keyToken(to, 40)), ` (${percentOf(row[to] ?? zoomedWeight(query, to))})`,
        ...(writer ? [", and this head writes ", make("strong", {}, quoted(clip(snapshot().nextToken.token, 40))),
          ", the predicted next token."] : [shown ? `. ${claim}.` : "."]), ...inDetail(trace, layer, head, query, to, writer));
    }
  }
  byId("sentence").replaceChildren(...words);
}

const STORED = "Of a long text it has those of some tokens for every head, and of all tokens for the heads of which it has every step.";
export const NORM_WEIGHTED = "Norm-weighted attention: the weight of a key times |v W_O|, the norm of what its value writes, " +
  "as a fraction of the sum over all keys. What two keys write may cancel.";

// What the head writes of the predicted token, and how probable this is without it, if it was measured.
function writtenInWords({ from_key, without }) {
  const { token, probability } = snapshot().nextToken, name = quoted(clip(token, 24));
  const part = `from there it adds ${number(from_key, 2)} to the logit of ${name}`;
  const words = without === null ? part[0].toUpperCase() + part.slice(1)
    : `Without this head the probability of ${name} is ${percent(without)} instead of ${percent(probability)}; ${part}`;
  return [" ", make("span", { class: "more", title: WRITES }, words, ".")];
}

const crossesInWords = () => "Cross-attention: its queries are " + (snapshot().data.layers.some((it) => it.part === "encoder")
  ? "the decoder's tokens, and its keys the encoder's." : "tokens of one text, and its keys those of another.");
const WRITES = "The direct part of a head in the logit, relative to the mean logit of all words. Later layers may add to it, or remove it.";

// Where most of the norm-weighted attention is, and what the head causes, if this is known.
function inDetail(trace, layer, head, query, to, writer) {
  if (writer) return writtenInWords(writer);
  if (trace.cross_attention) return [" ", make("span", { class: "more" }, crossesInWords())];
  const byNorm = trace.isOneText && !isOff(layer, head) ? trace.normWeighted(head, query) : null, words = [];
  if (byNorm?.some((part) => part > 0)) {
    const most = largestAt(byNorm), at = most === to ? ["there"] : ["on ", make("strong", {}, keyToken(most, 40))];
    words.push(make("span", { title: NORM_WEIGHTED }, `${percent(byNorm[most])} of its norm-weighted attention is `, ...at));
  }
  const effect = effectOf(snapshot().finding(layer, head));
  if (effect && !store.edited) {
    words.push(make("span", { title: effect.sentence }, words.length ? "; the head " : "The head ", effect.causes));
  }
  return words.length ? [" ", make("span", { class: "more" }, ...words, ".")] : [];
}

const percentOf = (weight) =>
  (weight === undefined ? "less than the stored weights" : weight < LEAST ? "under 1 %" : percent(weight));

// ---- the view of the text ------------------------------------------------------------------

const WORD_SIZES = [26, 22, 18, 16, 14, 13, 12]; // the largest that fits
const GUTTER = 20, LEAST_GUTTER = 8; // pixels between two lines of words, in which arcs run
const LEAST_WRAPPED = 0.1; // of the weights of arcs between two lines
const MARGIN = 14; // pixels beside the words, in which arcs run past other lines
const MOST_SHOWN = 400; // words
const boxHeight = (size) => Math.round(size * 1.45);

// A function that lays out the words of a side in lines of a width: in the largest size of at least `least`
// pixels with which `most` pixels suffice. `fits` is false if none does; then the size is the smallest.
function layouts(/** @type {Side} */ side, width, gutter) {
  const { trace, from } = side, measured = WORD_SIZES[0], font = { serif: true, size: measured };
  // The pieces of a word touch, and are on one line if they fit. A line of the text begins a line.
  const lineOf = ({ first, tokens, indent, isFromRight }) => tokens.map((word, i) => {
    const position = first + i, [joined, continued] = [position, position + 1].map((at) => from.touches(trace.keys, at));
    const bold = !joined && !continued, text = word.length > 12 ? fitted(word, 300, { ...font, bold }) : word;
    return { position, text, joined, continued, isFirst: i === 0, isFromRight, indent, wide: widthOf(text, { ...font, bold }) };
  });
  const pieces = partsToShow(side).flatMap(([first, last]) => writtenLines(trace.keys.slice(first, last))
    .flatMap((line) => lineOf({ ...line, first: first + line.first })));
  /** @type {Map<number, any[][]>} */
  const bySize = new Map();
  const linesOf = (size) => {
    const [begin, end] = [MARGIN, width - MARGIN], lines = /** @type {any[][]} */ ([]);
    const sized = pieces.map((it) => {
      const before = it.joined ? 0 : 5, after = it.continued ? 0 : 5, middle = it.wide * size / measured;
      return { ...it, before, middle, after, width: before + middle + after, height: boxHeight(size) };
    });
    let left = begin, word = 0; // the width of the word from its first piece
    sized.forEach((it, i) => {
      if (!it.joined || it.isFirst) {
        word = it.width;
        for (let j = i + 1; sized[j]?.joined && !sized[j].isFirst; j++) word += sized[j].width;
      }
      const isFull = left > begin && left + (it.joined || word > end - begin ? it.width : word) > end;
      if (it.isFirst || isFull) {
        lines.push([]);
        left = begin + (it.isFirst ? Math.min(it.indent, MOST_INDENTED) * INDENT * size : 0);
      }
      lines[lines.length - 1].push({ ...it, left });
      left += it.width + (it.after && 4);
    });
    return lines;
  };
  return (most, least) => {
    const sizes = WORD_SIZES.filter((size) => size >= least);
    const tried = (size) => {
      const lines = bySize.get(size) ?? linesOf(size), high = boxHeight(size), line = high + gutter;
      bySize.set(size, lines);
      return { lines, size, high, line, gutter, width, most, fits: lines.length * line - gutter <= most };
    };
    const size = sizes.find((size) => tried(size).fits) ?? sizes.at(-1);
    return tried(size);
  };
}

// The parts of a text to show, [first, after the last]: all of it, or of a long text the words around the query,
// and around the key if that is elsewhere.
function partsToShow(/** @type {Side} */ { trace, rest: { row, query, key } }) {
  const length = trace.keys.length, looked = key ?? largestAt(row);
  const centres = [query ?? 0, looked].sort((a, b) => a - b), isNear = centres[1] - centres[0] < MOST_SHOWN / 2;
  const around = (centre, most) => {
    const first = Math.max(0, Math.min(length - most, centre - most / 2));
    return [first, Math.min(length, first + most)];
  };
  if (isNear || length <= MOST_SHOWN) return [around(query ?? 0, MOST_SHOWN)];
  const [one, other] = centres.map((centre) => around(centre, MOST_SHOWN / 2));
  return one[1] >= other[0] ? [[one[0], other[1]]] : [one, other];
}

// The words in lines; with a query, arcs to the keys that it looks at. Returns the lower end.
function textScene(/** @type {Scene} */ scene, /** @type {Side} */ side, x, y, layout, /** @type {{difference?: number[], limit?: number}} */ { difference, limit } = {}) {
  const { trace, head, query, key } = side, { lines, high, line, gutter, width, most } = layout, font = { serif: true, size: layout.size };
  const row = difference ?? shades(trace, head, query);
  const blocked = query === null ? [] : trace.blocked(head, query);
  // As many lines as fit: at least those of the query and of its largest weight.
  const kept = linesToShow(lines, Math.max(2, Math.floor((most + gutter) / line)), difference ?? (side.rest.query === null ? row : side.rest.row),
    [trace.isOneText ? side.rest.query : null, side.rest.key]);
  const boxes = new Map();
  let top = y - line, before = -1; // the position before a line
  const cut = (at) => scene.text("⋯", x + MARGIN + 4, at, { size: 12, fill: "soft" });
  for (const i of kept) {
    top += line;
    if (lines[i][0].position > before + 1) cut(top - gutter / 2);
    const drawn = lines[i], { isFromRight } = drawn[0], runs = isFromRight ? runsFromLeft(drawn.map((it) => it.text)) : [];
    drawn.forEach((word, j) => {
      const run = runs.find(([first, last]) => first <= j && j <= last), end = (it) => width - it.left;
      const left = run ? end(drawn[run[1]]) - drawn[run[1]].width + word.left - drawn[run[0]].left
        : isFromRight ? end(word) - word.width : word.left;
      boxes.set(word.position, { ...word, x: x + left, y: top, before: isFromRight && !run ? word.after : word.before });
    });
    before = lines[i].at(-1).position;
  }
  if (before < trace.keys.length - 1) cut(top + high + gutter / 2);
  const from = difference || !trace.isOneText ? undefined : boxes.get(query);
  for (const [position, to] of boxes) {
    const weight = row[position];
    if (!from || position === query || !(weight >= Math.max(LEAST, chosen.threshold))) continue;
    if (from.y !== to.y && weight < LEAST_WRAPPED) continue; // its shade is enough: faint lines around words look like frames
    scene.path(arc(from, to, [x + 5, x + width - 5], gutter),
      { stroke: "accent", line: 1 + gutter / 4 * weight, opacity: 0.25 + 0.7 * weight }, { weight });
  }
  for (const [position, box] of boxes) {
    const weight = row[position], isQuery = position === query && trace.isOneText;
    const colour = difference ? (Math.abs(weight) >= LEAST ? signedColour(weight, limit) : null)
      : weight >= LEAST ? shareColour(weight) : null;
    if (colour) scene.rect(box.x, box.y, box.width, box.height, { fill: css(colour), radius: 4 });
    const framed = (ink) => scene.rect(box.x, box.y, box.width, box.height, { ...ink, radius: 4 });
    if (isQuery) framed({ stroke: "mark", line: 2.5 });
    if (position === key) framed({ stroke: "ink", line: 1.5, dash: [4, 3] });
    scene.text(box.text, box.x + box.before + box.middle / 2, box.y + high / 2, { ...font, bold: isQuery && !box.joined && !box.continued, align: "center",
      fill: colour ? inkOn(colour) : blocked[position] ? "soft" : "ink" });
    scene.target(box.x, box.y, box.width + (box.after && 4), box.height,
      side.back(trace.isOneText ? { query: position, key: null } : { query, key: position }),
      side.from.title(trace.keys, position));
  }
  return top + high;
}

// The path from one word to another, which crosses no word: through the space above the line of each,
// and, if they are on two lines, along one of the `sides`: the nearer one of the query, so that no two make a frame. There it ends in an arrow.
function arc(from, to, sides, gutter) {
  const [x1, x2] = [from, to].map((it) => it.x + it.width / 2), [y1, y2] = [from.y, to.y];
  if (y1 === y2) {
    const lift = y1 - Math.min(gutter - 4, gutter / 2 + Math.abs(x1 - x2) / 30);
    return `M ${x1} ${y1} C ${x1} ${lift} ${x2} ${lift} ${x2} ${y2}`;
  }
  const [left, right] = sides, side = x1 - left < right - x1 ? left : right;
  const [above1, above2] = [y1 - gutter / 2, y2 - gutter / 2], round = gutter / 2;
  const towards = (x) => side + Math.sign(x - side) * Math.min(round, Math.abs(x - side)), down = Math.sign(y2 - y1) * round;
  const before = (x) => x + Math.sign(side - x) * Math.min(round, Math.abs(x - side) / 2);
  return `M ${x1} ${y1} Q ${x1} ${above1} ${before(x1)} ${above1} L ${towards(x1)} ${above1} ` +
    `Q ${side} ${above1} ${side} ${above1 + down} L ${side} ${above2 - down} Q ${side} ${above2} ${towards(x2)} ${above2} ` +
    `L ${before(x2)} ${above2} Q ${x2} ${above2} ${x2} ${y2} M ${x2 - 5} ${y2 - 5} L ${x2} ${y2} L ${x2 + 5} ${y2 - 5}`;
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
export function wordLists(/** @type {Scene} */ scene, /** @type {Side} */ side, x, y, width, isColumn = false, most = MOST_LISTED) {
  const { trace, head, from, query } = side;
  if (query === null || !most) return y;
  const verb = isByNorm(trace, head, query) ? "by norm" : "looks at", isFirst = (at) => trace.sharing(head, at)[0] === at;
  const row = shades(trace, head, query).map((weight, at) => (isFirst(at) ? weight * trace.sharing(head, at).length : undefined));
  const lists = [[`${clip(trace.nameOf(head, trace.queries, query), trace.blocksOf(head) ? 24 : 14)} ${verb}`,
    heaviest(row, most).map((i) => [trace.nameOf(head, trace.keys, i), row[i], { key: i }, [trace.keys, i]])]];
  const writers = from.writers(trace, query);
  if (writers.length) lists.push(writersList(from, trace, writers.slice(0, most)));
  else if (trace.isOneText && trace.size.k <= MANY_WORDS) {
    const column = trace.column(head, query);
    lists.push([`What looks at ${clip(trace.keys[query], 14)}`,
      heaviest(column, most).map((i) => [trace.queries[i], column[i], { query: i, key: query }, [trace.queries, i]])]);
  }
  const { before, edited } = store, after = edited?.guesses?.[query], earlier = before?.guesses?.[query];
  if (from === edited && after && earlier) lists.push(changedPredictions(trace, query, earlier, after, most));
  else if (from.guesses?.[query] && !(from === before && edited)) {
    const guesses = from.guesses[query].slice(0, most), names = writtenApart(guesses.map(([word]) => word));
    lists.push([`Predictions after ${clip(trace.queries[query], 12)}`, guesses.map(([, share], i) => [names[i], share, null])]);
  }
  if (!isColumn && width < 460 && lists.length > 2) lists.splice(1, 1);
  // A list of heads names two things on each line, so it is wider.
  const parts = lists.map(([, lines]) => (lines[0]?.length > 4 ? 1.3 : 1)), all = sum(parts);
  let above = y, left = x;
  lists.forEach(([title, lines], i) => {
    const wide = Math.min(280, isColumn ? width : (width - 24 * (lists.length - 1)) * parts[i] / all), y = above;
    scene.text(title, left, y + 8, { bold: true, room: wide });
    if (!lines.length) scene.text("no weight of 1 % or more", left, y + 32, { size: 13, fill: "soft" });
    const pair = 6 + Math.max(...lines.map((it) => widthOf(it[4] ?? "")));
    const longest = Math.max(...lines.map(([word]) => widthOf(word, { size: 14, serif: true })));
    lines.forEach(([word, weight, changes, titled, amount, earlier], j) => {
      const at = y + 32 + j * 23, isPair = earlier !== undefined, after = isPair ? pair : 50;
      // A long word has the room of its bar, of which a part is left.
      const room = Math.max(wide * (isPair ? 0.32 : amount ? 0.55 : 0.42), Math.min(longest, wide - after - 6 - LEAST_BAR));
      const bar = Math.max(0, wide - after - room - 6);
      scene.text(word, left, at, { size: 14, serif: true, room });
      scene.rect(left + room + 6, at - 5, bar, 10, { fill: "rule", radius: 2 });
      if (isPair) [earlier, weight].forEach((part, i) => scene.rect(left + room + 6, at - 5 + 5 * i, bar * part, 5, { fill: sideColour(i) }));
      else scene.rect(left + room + 6, at - 5, bar * Math.min(1, weight), 10, { fill: "accent", radius: 2 });
      scene.text(amount ?? percent(weight), left + wide, at, { align: "right" });
      if (amount && changes) scene.target(left, at - 11, wide, 23, changes, titled);
      else if (changes) scene.target(left, at - 11, wide, 23, side.back(changes), from.title(...titled));
    });
    if (isColumn) above += 32 + 23 * Math.max(1, lines.length);
    else left += wide + 24;
  });
  return y + 32 + 23 * Math.max(...lists.map(([, lines]) => lines.length), 1);
}

// The predictions before and after an edit, in one list; of those of one run only, the other has less than its last.
function changedPredictions(trace, query, earlier, after, most) {
  const [before, now] = [earlier, after].map((guesses) => new Map(guesses.toReversed())), words = new Set([...before.keys(), ...now.keys()]);
  const share = (known, word) => known.get(word) ?? 0, largest = (word) => Math.max(share(before, word), share(now, word));
  const inWords = (known, word) => (known.has(word) ? percent(known.get(word)) : `<${percent([...known.values()][0]).replace(/^</, "")}`);
  const shown = [...words].sort((a, b) => largest(b) - largest(a)).slice(0, most), names = writtenApart(shown);
  return [`Predictions after ${clip(trace.queries[query], 12)}`, shown
    .map((word, i) => [names[i], share(now, word), null, null, `${inWords(before, word)} → ${inWords(now, word)}`, share(before, word)])];
}

// The heads that write the predicted token, with what each adds to its logit from one token.
function writersList(/** @type {Snapshot} */ from, trace, writers) {
  const largest = Math.max(...writers.map((it) => it.from_key));
  return [`Added to the logit of ${quoted(clip(from.nextToken.token, 12))}`, writers.map(({ layer, head, key, from_key }) =>
    [`${placeName(layer, head)} from ${clip(trace.keys[key], 12)}`, from_key / largest, { layer, head, key: null }, `${placeInWords(layer, head)}. ${WRITES}`,
      `+${number(from_key, 2)}`])];
}

const MOST_LISTED = 6, LEAST_BAR = 32; // pixels

// The positions of the `most` largest weights of at least one percent.
const heaviest = (weights, most) => weights.map((_, i) => i).filter((i) => weights[i] >= LEAST)
  .sort((a, b) => weights[b] - weights[a]).slice(0, most);

const LEAST_SIZE = WORD_SIZES[WORD_SIZES.length - 1];
const LEAST_SIZES_AND_LISTS = [[18, 6], [16, 6], [16, 4], [14, 3], [LEAST_SIZE, 2], [LEAST_SIZE, 0]]; // from the best on
const NAME = 20, LEGEND = 40; // pixels above the words of a side, and below all

export function drawText(width, height) {
  const scene = new Scene(width, height), shown = sides();
  let bottom = 0;
  if (chosen.difference) {
    const [a, b] = shown.map(({ trace, head, query }) => shades(trace, head, query));
    const difference = b.map((weight, i) => (weight ?? 0) - (a[i] ?? 0));
    const limit = Math.max(LEAST, ...difference.map(Math.abs));
    scene.text(`${shown[1].name} minus ${shown[0].name}`, 0, 12, { bold: true });
    const layout = layouts(shown[0], width, LEAST_GUTTER)(height - 90, LEAST_SIZE);
    bottom = textScene(scene, shown[0], 0, 44, layout, { difference, limit });
    drawSignedBar(scene, 0, bottom + 16, limit);
    bottom += 52;
  } else if (shown.length > 2) {
    bottom = manySides(scene, shown, width, height - LEGEND);
  } else {
    const columns = shown.length === 2 && width > 620 ? 2 : 1, wide = (width - 28 * (columns - 1)) / columns;
    const above = shown.length > 1 ? NAME : 0, rows = columns === 2 ? 1 : shown.length;
    shown.forEach((side, i) => {
      const left = columns === 2 ? i * (wide + 28) : 0, top = columns === 2 ? 0 : bottom;
      const { query } = state(), isAbsent = side.query === null && query !== null; // in another text
      const name = isAbsent ? `${side.name}: no “${clip(shownTrace().queries[query], 16)}”` : side.name;
      if (above) scene.text(name, left, top + 10, { bold: true, fill: sideColour(i) });
      // All words, if possible with the lists below them; of a longer text, as many lines as fit.
      const free = (height - LEGEND) / rows - above - GUTTER, layOut = layouts(side, wide, above ? LEAST_GUTTER : GUTTER);
      const tried = (side.rest.query === null ? [[LEAST_SIZE, 0]] : LEAST_SIZES_AND_LISTS)
        .map(([least, listed]) => ({ ...layOut(free - (listed ? 50 + 23 * listed : 0), least), listed }));
      const layout = tried.find((it) => it.fits) ?? tried[0];
      const at = textScene(scene, side, left, top + above + GUTTER, layout);
      const after = layout.listed ? wordLists(scene, side, left, at + 14, wide, false, layout.listed) : at;
      bottom = columns === 2 ? Math.max(bottom, after) : after + 8;
    });
  }
  if (!chosen.difference) {
    const { trace, head, query } = shown[0];
    drawWeightBar(scene, 0, bottom + 10, 150, isByNorm(trace, head, query) ? "norm-weighted attention" : "weight");
    bottom += 36;
  }
  Object.assign(scene, { height: Math.max(height, bottom), bottom });
  return scene;
}

// More than two heads, one below the other, with their names at the left.
function manySides(/** @type {Scene} */ scene, shown, width, height) {
  const most = height / shown.length, label = 10 + Math.max(...shown.map((side) => widthOf(side.name, { bold: true })));
  return shown.reduce((above, side, i) => {
    const layout = layouts(side, width - label, LEAST_GUTTER)(most - LEAST_GUTTER, LEAST_SIZE);
    const top = Math.max(above, i * most) + LEAST_GUTTER;
    scene.text(side.name, 0, top + layout.high / 2, { bold: true, fill: sideColour(i) });
    return textScene(scene, side, label, top, layout);
  }, 0);
}
