// Examples of the selected head and metric: texts, shaded by the weights of one query.

import { css, inkOn, mixed } from "../colours.js";
import { byId, make, number, percent } from "../marks.js";
import { go } from "./address.js";
import { LARGEST, chosen, head, metricOf, survey, theme } from "./store.js";

/** @import { SurveyContext, SurveyExample, SurveyPage } from "../schema.d.ts" */

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
    : "The largest values, of each range of positions in turn; one of each query token first.";
  byId("examples").replaceChildren(...shown.map((example, i) => article(example, contexts[i])));
}

/** An example in its context. `source` has the texts of its tokens.
 * @param {SurveyExample} example @param {SurveyContext} context @param {Pick<SurveyPage, "spelling" | "between">} [source] */
export function article(example, { name, tokens }, source = survey) {
  const { value, query, keys, weights } = example;
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
  const place = `${name}, position ${query}`;
  const from = survey.host === "server" ? make("a", { href: explorerAddress(tokens, query, source) }, place) : place;
  return make("article", {}, make("p", { class: "hint" }, make("b", {}, number(value, 3)), " · ", from), line);
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
