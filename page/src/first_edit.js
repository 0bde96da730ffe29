// "What if": the edit to begin with, and what an edit changes.

import { percent } from "./marks.js";
import { keyOr, placeName, queryOr, state } from "./state.js";
import { pageData, store } from "./store.js";
import { isolated, writtenApart } from "./words.js";

/** @import { Snapshot } from "./data.js" */
/** @import { Place } from "./store.js" */

const LOOKS = 0.3; // of the query's weight
const MOST_NAMED = 4, LEAST_CHANGE = 0.01;

/** The heads that look from a query at a key. @returns {Place[]} */
export function headsThatLook(/** @type {Snapshot} */ from, query, key) {
  return [...from.places()].filter(({ layer, head }) => {
    const trace = from.layer(layer);
    return !trace.cross_attention && trace.row(trace.used, head, query)?.[key] >= LOOKS;
  }).map(({ layer, head }) => [layer, head]);
}

/** The edit to begin with: without all heads that look from the selected query at its key, or without the
 * selected head. @returns {{off: Place[], words: string}} */
export function firstEdit() {
  if (store.source?.can.ahead) {
    const { off } = /** @type {import("./schema.d.ts").Ahead} */ (pageData.ahead);
    return { off, words: `Switch off ${namesOf(off)}, which write “${isolated(store.current.nextToken.token)}”` };
  }
  const from = store.before ?? store.current, { layer, head } = state(), query = queryOr(), key = keyOr();
  // All heads look from the first token at itself, and switching off most of a model shows nothing.
  const all = headsThatLook(from, query, key), looking = 2 * all.length < [...from.places()].length ? all : [], off = looking.length ? looking : [/** @type {Place} */ ([layer, head])];
  const { tokens } = from, names = namesOf(off);
  return { off, words: looking.length && tokens[query] !== undefined
    ? `Switch off ${names}, which look from “${isolated(tokens[query])}” at “${isolated(tokens[key])}”` : `Switch off ${names}` };
}

function namesOf(/** @type {Place[]} */ off) {
  const named = off.slice(0, MOST_NAMED).map((it) => placeName(...it)).join(", ");
  return off.length > MOST_NAMED ? `${named} and ${off.length - MOST_NAMED} more` : named;
}

/** The prediction that an edit changes most, with its position, and the next token of the text if that is another one.
 * @returns {{words: string, next?: string, token?: string, position?: number}} */
export function outcome() {
  const { before, edited } = store, a = before?.guesses, b = edited?.guesses;
  if (!before || !edited) return { words: "" };
  if (!a || !b) return { words: "It changes what is drawn. The page has no predictions to compare." };
  const changes = a.flatMap((guesses, i) => guesses.map(([word, p]) => {
    const after = b[i].find(([other]) => other === word)?.[1], least = b[i].at(-1)?.[1] ?? 0;
    return { word, p, after, least, change: Math.abs(p - (after ?? least)), position: i, token: before.tokens[i] };
  }));
  const most = changes.reduce((best, it) => (it.change > best.change ? it : best), changes[0]);
  if (!most || most.change < LEAST_CHANGE) return { words: "No prediction changes by 1 % or more." };
  const least = percent(most.least), after = most.after !== undefined ? percent(most.after) : least.startsWith("<") ? least : `at most ${least}`;
  const { position, token, word } = most;
  const ends = [a, b].map((guesses) => guesses.at(-1)?.[0] ?? ["", 0]), [then, now] = ends;
  const named = (all, it) => `“${isolated(writtenApart(all)[all.indexOf(it)])}”`, there = [a, b].flatMap((guesses) => guesses[position].map(([it]) => it));
  const inWords = ([word, p]) => `${named(ends.map(([it]) => it), word)} (${percent(p)})`;
  const next = then[0] === now[0] ? `The next token is still ${named(ends.map(([it]) => it), now[0])} (${percent(now[1])}, before ${percent(then[1])}). ` : `The next token is ${inWords(now)} instead of ${inWords(then)}. `;
  return { next, words: `, ${named([...new Set(there)], word)} goes from ${percent(most.p)} to ${after}: the largest change.`, token, position };
}

// Whether the edit to begin with is offered: nothing is edited, and the page can switch heads off.
export const isOffered = (edits) => edits.off.length === 0 && Boolean(store.source?.can.edits.includes("off"));
