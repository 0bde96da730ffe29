// Examples of the selected head and metric: texts, shaded by the weights of one query.

import { css, inkOn, mixed } from "../colours.js";
import { decode } from "../data.js";
import { byId, make, number, percent } from "../marks.js";
import { go } from "./address.js";
import { LARGEST, chosen, head, metricOf, survey, theme } from "./store.js";

/** @import { SurveyContext, SurveyExample, SurveyPage } from "../schema.d.ts" */

const SIDE = 224; // pixels of a picture
const BEFORE = 22, AFTER = 8, NEAR_KEY = 5; // tokens around the query and around a key
const OF_KEYS = /^(first|self|previous|next|largest|separators|duplicate|induction)$/; // weights on some keys
const LINE_END = /↵$/;

export function buildExamples() {
  const names = [...Array.from({ length: LARGEST }, (_, i) => String(i)), "largest"];
  byId("deciles").append(...names.map((name, i) => {
    const button = make("button", { type: "button", class: "quiet", "data-decile": i }, name);
    button.addEventListener("click", () => go({ decile: i }));
    return button;
  }));
}

export function drawGroups() {
  for (const button of byId("deciles").children) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.decile) === chosen.decile));
  }
}

/** @param {SurveyExample[]} shown @param {SurveyContext[]} contexts */
export function drawExamples(shown, contexts) {
  const isStored = metricOf(chosen.metric)?.examples;
  byId("no-examples").textContent = shown.length ? "" : isStored
    ? "No query of the sample is in this decile: its values fall into the bins of another one."
    : "This metric has no examples. Choose another metric.";
  byId("examples-about").textContent = chosen.decile < LARGEST ? "" : OF_KEYS.test(chosen.metric)
    ? "The values that most exceed those of equal weights; one of each query token first, and queries with four keys or more."
    : survey.grid ? "The largest values, one of each query patch first." : "The largest values, of each range of positions in turn; one of each query token first.";
  byId("examples").replaceChildren(...shown.map((example, i) => article(example, contexts[i])));
}

/** An example in its context. `source` has the texts of its tokens.
 * @param {SurveyExample} example @param {SurveyContext} context @param {Pick<SurveyPage, "spelling" | "between">} [source] */
export function article(example, context, source = survey) {
  const { value, query } = example, { name, tokens } = context;
  const place = `${name}, ${context.pixels ? source.spelling[tokens[query]] : `position ${query}`}`;
  const from = survey.host === "server" ? make("a", { href: explorerAddress(tokens, query, source) }, place) : place;
  return make("article", {}, make("p", { class: "hint" }, make("b", {}, number(value, 3)), " · ", from),
    ...(context.pixels ? picture(example, context, source) : [sample(example, context, source)]));
}

// The picture in grey, with the colours of the weights above their patches and a frame around the query; and the weights
// as words, because the tokens before the patches are not in the picture.
function picture({ query, keys, weights }, { tokens, pixels }, { spelling }) {
  const [before, rows, columns] = /** @type {NonNullable<SurveyPage["grid"]>} */ (survey.grid);
  const scale = survey.inks.sequential[theme.isDark ? "dark" : "light"], colours = decode(pixels), [high, wide] = pixels.stored;
  const weightOf = new Map(keys.map((key, i) => [key - before.length, weights[i]])), cell = Math.max(4, Math.round(SIDE / Math.max(rows, columns)));
  const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", { width: columns * cell, height: rows * cell, role: "img",
    "aria-label": `${spelling[tokens[query]]} and its largest weights on the picture` }));
  const ink = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d")), image = ink.createImageData(canvas.width, canvas.height);
  const paper = theme.isDark ? 16 : 255;
  for (let y = 0; y < canvas.height; y++) {
    for (let x = 0; x < canvas.width; x++) {
      const from = 3 * (Math.floor((y * high) / canvas.height) * wide + Math.floor((x * wide) / canvas.width));
      const grey = 0.3 * colours[from] + 0.59 * colours[from + 1] + 0.11 * colours[from + 2], faded = (grey + paper) / 2;
      const weight = weightOf.get(Math.floor(y / cell) * columns + Math.floor(x / cell)), part = Math.sqrt(weight ?? 0);
      const colour = mixed(scale, part).map((it) => faded + (it - faded) * (weight === undefined ? 0 : 0.2 + 0.75 * part));
      image.data.set([...colour, 255], 4 * (y * canvas.width + x));
    }
  }
  ink.putImageData(image, 0, 0);
  const at = query - before.length, frame = make("span", { hidden: at < 0 });
  Object.assign(frame.style, { left: `${(100 * (at % columns)) / columns}%`, top: `${(100 * Math.floor(at / columns)) / rows}%`,
    width: `${100 / columns}%`, height: `${100 / rows}%` });
  const looks = keys.map((key, i) => `${spelling[tokens[key]]} ${percent(weights[i])}`).join(", ");
  return [make("div", { class: "picture" }, canvas, frame), make("p", { class: "hint" }, `Its largest weights: ${looks}.`)];
}

// The tokens around the query and its keys, shaded by the weights.
function sample(example, { tokens }, source) {
  const { query, keys, weights } = example;
  const scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
  const weightOf = new Map(keys.map((key, i) => [key, weights[i]]));
  const line = make("p", { class: "sample" });
  let last = -1, wasEnd = false;
  for (const position of positions(example, tokens.length)) {
    if (position > last + 1) line.append(make("span", { class: "gap" }, " … "));
    else if (position) line.append(source.between);
    last = position;
    const text = source.spelling[tokens[position]], weight = weightOf.get(position);
    const piece = make("bdi", { class: position === query ? "query" : "", title:
      weight === undefined ? `position ${position}` : `position ${position}, weight ${percent(weight)}` }, text);
    if (weight !== undefined) {
      const colour = mixed(scale, Math.sqrt(weight));
      Object.assign(piece.style, { background: css(colour), color: inkOn(colour) });
    }
    line.append(piece);
    const isEnd = LINE_END.test(text);
    if (isEnd && !wasEnd) line.append(make("br")); // no empty lines
    wasEnd = isEnd;
  }
  return line;
}

// The address of the explorer with a text, at the selected head and this query. It names the query's token, because
// a tokenizer may read what it wrote as other tokens.
function explorerAddress(tokens, query, { spelling, between }) {
  const [before, after] = survey.around, text = tokens.slice(before, tokens.length - after).map((i) => spelling[i])
    .join(between).replaceAll("↵", "\n").replaceAll("⇥", "\t").replaceAll("␣", " ");
  const { layer, head: number } = head(), at = `${query}:${spelling[tokens[query]].trim()}`;
  return `explore#${new URLSearchParams(/** @type {any} */ ({ text, layer, head: number, query: at }))}`;
}

// The positions to show: those around the query and its keys.
function positions({ query, keys }, length) {
  const near = new Set();
  const add = (first, last) => { for (let i = Math.max(0, first); i <= Math.min(length - 1, last); i++) near.add(i); };
  add(query - BEFORE, query + AFTER);
  for (const key of keys) add(key - NEAR_KEY, key + NEAR_KEY);
  return [...near].sort((a, b) => a - b);
}
