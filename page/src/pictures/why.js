// Why: the parts of the score of the selected query and key, by what wrote the query and the key. A host
// computes them; a file has those of the head with which it opens, and of the heads before it.

import { commandFor } from "../controls.js";
import { tokenIn } from "../labels.js";
import { MINUS, button, byId, copy, count, make, makeSvg, sum, table } from "../marks.js";
import { go, largestAt, placeInWords, placeName, snapshot } from "../state.js";
import { chosen, screen, store } from "../store.js";

/** @import * as schema from "../schema.d.ts" */
/** @import { Snapshot } from "../data.js" */
/** @import { Pair } from "../store.js" */

/** The answers for a snapshot, by the name of a pair. @type {WeakMap<Snapshot, Map<string, schema.Why>>} */
const known = new WeakMap();
// The newest request, and why it was refused.
let newest = { from: /** @type {Snapshot | null} */ (null), name: "", refusal: "" };
// The pairs from which links led to the selected one, and its name; NEXT if it is selected next.
const NEXT = "next";
let trail = { pairs: /** @type {Pair[]} */ ([]), at: "" };

// What the panel shows of these, so that a pointer elsewhere does not replace a link in it.
let drawn = /** @type {any[]} */ ([]);
const line = make("p", { class: "because", role: "status" });

// What a score is compared with, as clearhead.why names it; where nothing computes, the mean of the other keys.
let against = "others";
const AGAINST = { others: "the mean of the other keys", weights: "the keys by weight", nothing: "nothing: the score itself" };
const nameOf = (/** @type {Pair} */ { layer, head, query, key }, to = against) => [layer, head, query, key, to].join(" ");
const signed = (x) => (Math.abs(x) < 0.005 ? "0.00" : `${x < 0 ? MINUS : "+"}${Math.abs(x).toFixed(2)}`);
const paragraph = (kind, ...words) => make("p", { class: kind }, ...words);

// A token with its position.
const placed = (labels, position, most = 24) =>
  make("span", {}, make("strong", {}, tokenIn(labels, position, most)), ` (${position})`);
const queryIn = ({ layer, query }) => placed(snapshot().layer(layer).queries, query);
const keyIn = ({ layer, key }) => placed(snapshot().layer(layer).keys, key);

/** The selected pair, with the largest key if none is selected; null if that is unknown. The pointer does not
 * change it. @returns {Pair | null} */
function selected() {
  const { layer, head } = chosen, trace = snapshot().layer(layer), query = chosen.query ?? trace.stored(head).at(-1);
  if (query === undefined) return null;
  const row = trace.row(trace.used, head, query) ?? [], key = chosen.key ?? largestAt(row);
  return chosen.key === null && !(row[key] > 0) ? null : { layer, head, query, key };
}

export function drawWhy() {
  const pair = selected(), from = snapshot(), name = pair ? nameOf(pair) : "";
  if (trail.at === NEXT) trail.at = name;
  else if (trail.at !== name) trail = { pairs: [], at: "" };
  const answer = answersOf(from).get(name), shown = [from, name, answer, newest.refusal];
  if (byId("panel").contains(line) && shown.every((it, i) => it === drawn[i])) return;
  drawn = shown;
  byId("panel").replaceChildren(...back(), ...contents(from, pair, answer), ...comparison(from, pair));
  drawn[3] = newest.refusal;
}

function contents(/** @type {Snapshot} */ from, /** @type {Pair | null} */ pair, /** @type {schema.Why | undefined} */ answer) {
  if (!pair) return [say("The page does not have the weights of this token. Choose another token, or a key of it.")];
  if (answer) return written(answer);
  if (from.layer(pair.layer).blocked(pair.head, pair.query)[pair.key]) {
    return [say(...asked(pair), "this query may not look at this key, so there is nothing to explain.")];
  }
  return store.source?.why ? [requested(from, pair)] : onlyIn(from, pair);
}

function answersOf(/** @type {Snapshot} */ from) {
  const answers = known.get(from) ?? new Map((from.data.why ?? []).map((it) => [nameOf(it, it.against), it]));
  known.set(from, answers);
  return answers;
}

// The first sentence, which a screen reader announces.
function say(...words) {
  line.replaceChildren(...words);
  return line;
}

// ---- requests --------------------------------------------------------------------------------

const asked = (pair) => [`${placeInWords(pair.layer, pair.head)} at `, queryIn(pair), " and the key ", keyIn(pair), ": "];

function requested(/** @type {Snapshot} */ from, /** @type {Pair} */ pair) {
  if (newest.from !== from || newest.name !== nameOf(pair)) ask(from, pair);
  return say(...asked(pair), newest.refusal || "computing what wrote its query and its key.");
}

async function ask(/** @type {Snapshot} */ from, /** @type {Pair} */ pair) {
  const request = newest = { from, name: nameOf(pair), refusal: "" };
  try {
    const to = AGAINST[against] ? against : Number(against);
    const answer = await store.source?.why?.(from.text, chosen.edits, { ...pair, against: to });
    if (answer) answersOf(from).set(request.name, answer);
  } catch (error) {
    request.refusal = error instanceof Error ? error.message : String(error);
  }
  if (request === newest && chosen.view === "why") screen.drawPicture();
}

// In a file: the pairs that it has, and the command that opens a page with all of them.
function onlyIn(/** @type {Snapshot} */ from, /** @type {Pair} */ pair) {
  const { why = [], why_withheld } = from.data, command = commandFor(from.text);
  const links = why.flatMap((it, i) => [i ? ", " : "", link({}, it, placeName(it.layer, it.head)), " at ", queryIn(it), " and ", keyIn(it)]);
  const copyButton = button({ class: "quiet" }, () => copy(copyButton, command ?? ""), "Copy");
  return [
    say(...asked(pair), "this page does not have what wrote its query and its key. ", why_withheld ?? ""),
    links.length ? paragraph("", "It has it for ", ...links, ".") : "",
    command ? paragraph("", "For every other weight, run: ", make("code", {}, command), " ", copyButton)
      : paragraph("", "In Python, clearhead.why computes it."),
  ];
}

// The choice of what the score is compared with: also another key, one of those with the largest weights.
function comparison(/** @type {Snapshot} */ from, /** @type {Pair | null} */ pair) {
  if (!store.source?.why || !pair) return [];
  const trace = from.layer(pair.layer), row = trace.row(trace.used, pair.head, pair.query) ?? [];
  const others = row.map((_, key) => key).filter((key) => key !== pair.key && row[key] > 0)
    .sort((a, b) => row[b] - row[a]).slice(0, 5).map((key) => [String(key), `${trace.keys[key]} (${key})`]);
  const options = [...Object.entries(AGAINST), ...others];
  if (!options.some(([name]) => name === against)) options.push([against, `position ${against}`]);
  const select = make("select", { id: "against", change: () => { against = select.value; screen.drawPicture(); } },
    options.map(([value, words]) => make("option", { value, selected: value === against }, words)));
  return [make("label", { class: "hint" }, "Compared with ", select)];
}

// ---- an answer -------------------------------------------------------------------------------

function written(/** @type {schema.Why} */ it) {
  const sides = [it.wrote_key, it.wrote_query], limit = Math.max(...sides.flatMap(({ parts }) => parts.map(({ part }) => Math.abs(part))));
  const to = AGAINST[it.against] ?? it.against;
  return [
    say(...sentence(it)),
    paragraph("hint", `Weight ${it.weight.toFixed(3)}, score ${signed(it.score)}, contrast ${signed(it.contrast)} against ${to}`,
      it.softcap === null ? "." : `, before the soft cap ${it.softcap}.`, store.edited ? " With the edits of What if." : ""),
    make("div", { class: "sides" }, sideOf(it, it.wrote_key, "key", limit), sideOf(it, it.wrote_query, "query", limit)),
    it.frequencies ? frequencies(it.frequencies) : "",
    it.further ? further(it, it.further) : "",
    paragraph("hint", "Each list sums exactly to the contrast, with the norms frozen at this run. These are parts of a score, and no claim " +
      "about causes: without a head, norms and later layers change, too. What if runs the model without it."),
    ...it.remarks.map((words) => paragraph("hint", words)),
  ];
}

// The sentence, with tokens in place of its positions: the first is the query.
const sentence = (/** @type {schema.Why} */ it) => it.sentence.split(/position (\d+)/).map((words, i) =>
  (i % 2 === 0 ? words : i === 1 ? queryIn(it) : keyIn({ layer: it.layer, key: Number(words) })));

// What wrote the key or the query: a row for each part.
function sideOf(/** @type {schema.Why} */ it, /** @type {schema.WhySide} */ side, /** @type {"key" | "query"} */ kind, limit) {
  const [others, rest] = side.others, { keys, queries } = snapshot().layer(it.layer);
  const row = (name, part, kind = "") => ({ kind, cells: [name, kind ? "" : bar(part, limit), signed(part)] });
  const rows = side.parts.map((part) => row(writer(it, part, it[kind]), part.part));
  if (others) rows.push(row(count(others, "other"), rest));
  return table(`What wrote the ${kind} ${(kind === "key" ? keys : queries)[it[kind]]} (${it[kind]})`,
    ["written by", "bar", "part"], [...rows, row("sums to", side.total, "total")], "parts sums");
}

// A component; a head with a link to it, at this position and the token that it read from.
function writer(/** @type {schema.Why} */ it, /** @type {schema.WhyPart} */ { name, head, source }, position) {
  if (!head || source === null) return name;
  const [layer, number] = head, trace = snapshot().layer(layer);
  // It may have read this token at another key of the comparison, and not see it from here.
  const key = trace.row(trace.used, number, position)?.[source] === 0 ? null : source;
  return make("span", {}, link({ "data-head": head.join(".") }, { layer, head: number, query: position, key }, placeName(...head), it),
    "read", placed(trace.keys, source, 12));
}

// A button that selects a pair, and adds the pair `from` to the trail.
function link(attributes, { layer, head, query, key }, words, /** @type {Pair | null} */ from = null, pairs = trail.pairs) {
  return button({ class: "link", ...attributes }, () => {
    trail = { pairs: from ? [...pairs, { layer: from.layer, head: from.head, query: from.query, key: from.key }] : pairs, at: NEXT };
    go({ layer, head, query, key });
    byId("panel").focus();
  }, words);
}

// The heads from which links led to this one.
const back = () => (trail.pairs.length === 0 ? [] : [paragraph("trail",
  ...trail.pairs.flatMap((pair, i) => [link({}, pair, placeName(pair.layer, pair.head), null, trail.pairs.slice(0, i)), " ‹ "]),
  placeName(chosen.layer, chosen.head))]);

// A bar to the right or to the left of the middle.
function bar(part, limit) {
  const fill = make("span", { class: part < 0 ? "minus" : "plus" });
  fill.style.width = `${50 * Math.min(1, Math.abs(part) / limit)}%`;
  return make("span", { class: "signed", "aria-hidden": "true" }, fill);
}

const STEP = 12, HALF = 28; // pixels: of a frequency, and of the largest part

function frequencies(parts) {
  const rotated = parts.slice(0, -1), still = parts.at(-1), limit = Math.max(...rotated.map(Math.abs), 1e-9);
  const bars = rotated.map((part, i) => {
    const high = HALF * Math.abs(part) / limit;
    return makeSvg("rect", { class: part < 0 ? "minus" : "plus", x: STEP * i + 1, y: part < 0 ? HALF : HALF - high, width: STEP - 2, height: high },
      makeSvg("title", {}, `Frequency ${i}: ${signed(part)}`));
  });
  const width = STEP * rotated.length, most = rotated.reduce((best, part, i) => (Math.abs(part) > Math.abs(rotated[best]) ? i : best), 0);
  const words = `By rotary frequency, from the fastest to the slowest of ${rotated.length}: the largest part is ${signed(rotated[most])} ` +
    `of number ${most}, and all sum to ${signed(sum(rotated))}${still ? `; not rotated ${signed(still)}` : ""}.`;
  return make("figure", {}, makeSvg("svg", { class: "frequencies", viewBox: `0 0 ${width} ${2 * HALF}`, width, height: 2 * HALF, role: "img", "aria-label": words },
    makeSvg("line", { x1: 0, x2: width, y1: HALF, y2: HALF }), ...bars), make("figcaption", { class: "hint" }, words));
}

// What the weight would be if the key, with the vector that it has before rotation, were 1, 2, 4, ... tokens
// further back, and all else as it is. Behind a soft cap the weight does not follow from the change of the score.
function further(/** @type {schema.Why} */ { weight, softcap }, /** @type {number[]} */ changes) {
  const moved = [0, ...changes.map((_, i) => 2 ** i)], scores = [0, ...changes];
  const weights = scores.map((x) => 1 / (1 + (1 / weight - 1) * Math.exp(-x)));
  const row = (name, cells) => ({ kind: "", cells: [name, ...cells] });
  return table("If the key were further back", ["tokens", ...moved.map(String)],
    [row("change of the score", scores.map((x) => signed(x))), ...(softcap === null ? [row("weight", weights.map((x) => x.toFixed(3)))] : [])], "parts further");
}
