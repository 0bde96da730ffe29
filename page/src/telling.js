// Choose the most interesting head and query, with which the page opens.

import { claimOf, rankOf, roleOf, rowOf } from "./roles.js";
import { largestAt } from "./state.js";
import { store } from "./store.js";
import { isPronoun, isWord } from "./words.js";

/** @import { Trace } from "./data.js" */

// The most interesting head and a query that shows it: a pronoun with its antecedent, if possible.
export function mostTelling() {
  const begin = store.current.data.begin;
  const found = [...store.current.findings.values()];
  found.sort((a, b) => rankOf(a.labels[0]) - rankOf(b.labels[0]) || b.number - a.number);
  const [best] = found;
  const layer = begin?.layer ?? best?.layer ?? 0, head = begin?.head ?? best?.head ?? 0;
  if (begin?.query !== undefined && begin.query !== null) {
    return { layer, head, query: begin.query };
  }
  return { layer, head, query: tellingQuery(layer, head) };
}

const examples = new WeakMap(); // by trace, then by head and label

/** The query, of those that the page has, with the largest weight as the label of a head claims, if possible between words;
 * null if none is.
 * @param {Trace} trace @param {number} head @param {string} label @returns {number | null} */
export function exampleOf(trace, head, label) {
  const known = examples.get(trace) ?? new Map(), name = `${head} ${label}`;
  examples.set(trace, known);
  if (!known.has(name)) {
    const strength = (query) => {
      const [weight, key] = shownWeight(trace, head, query, label);
      return weight && weight + (isWord(trace.queries[query]) && isWord(trace.keys[key]) ? 1 : 0);
    };
    const shown = trace.stored(head).filter((query) => query > 0).map((query) => [query, strength(query)]).filter(([, it]) => it > 0);
    known.set(name, shown.length ? shown.reduce((a, b) => (b[1] > a[1] ? b : a))[0] : null);
  }
  return known.get(name);
}

/** The largest weight of a query if it is as the label claims, or 0; and its key. */
export function shownWeight(/** @type {Trace} */ trace, head, query, label) {
  const row = trace.row(trace.used, head, query) ?? [0], key = largestAt(row);
  return [claimOf(label, query, key, trace.queries) ? row[key] : 0, key];
}

// The query that best shows what a head does. Null if the page has none of its rows.
export function tellingQuery(layer, head) {
  const trace = store.current.layer(layer), finding = store.current.finding(layer, head), label = finding?.labels[0];
  const example = finding && trace.isOneText ? exampleOf(trace, head, rowOf(finding)) : null;
  if (example !== null) return example;
  const held = trace.stored(head).filter((q) => trace.row(trace.used, head, q)?.some((w) => w > 0));
  const strength = (q) => {
    const row = trace.row(trace.used, head, q), key = largestAt(row);
    const words = isWord(trace.queries[q]) && isWord(trace.keys[key]);
    const tells = roleOf(label ?? "")?.shows === "pronoun" ? isPronoun(trace.queries[q]) : words && key !== 0 && key !== q;
    return (tells ? 1 : 0) + row[key];
  };
  if (held.length > 1 && held[0] === 0) held.shift(); // it has one key
  const shown = held.length > 600 ? held.filter((_, i) => i % Math.ceil(held.length / 600) === 0) : held;
  const query = label ? shown.reduce((a, b) => (strength(b) > strength(a) ? b : a), shown[0]) : held.at(-1);
  return query ?? null;
}
