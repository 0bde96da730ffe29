// The vectors of heads at their examples, and what one can choose of them.

import { chosen, survey } from "./store.js";

/** @import { SurveyPart, SurveyVectorExample, SurveyVectors } from "../schema.d.ts" */

export const PARTS = {
  q_unrotated: "queries, before rotation", q: "queries", k_unrotated: "keys, before rotation", k: "keys",
  v: "values", o: "outputs, before the output projection",
};
const ROTATED = ", rotated by position";
export const EXAMPLES = { all: "all", others: "not on the first token" };
export const COMPONENTS = { "1.2": "1 and 2", "1.3": "1 and 3", "2.3": "2 and 3" };

/** What the colour of a point shows: names of groups, or a number between 0 and 1.
 * @type {Record<string, {title: string, groups?: string[], of: (example: SurveyVectorExample, tokens: number[]) => any}>} */
export const SHADES = {
  looks_at: { title: "kind of key", groups: Object.keys(survey.key_kinds), of: (it) => it.looks_at },
  token_class: { title: "class of the query's token", groups: Object.keys(survey.classes), of: (it) => it.token_class },
  weight: { title: "largest weight", of: (it) => it.value },
  position: { title: "position of the query", of: (it, tokens) => it.query / Math.max(1, tokens.length - 1) },
};

const ofHeads = /** @type {Map<number, SurveyVectors>} */ (new Map()); // by the index of the head

export const setVectors = (at, vectors) => ofHeads.set(at, vectors);
export const vectorsOf = (at) => ofHeads.get(at);

export const partNames = (data) => Object.keys(PARTS).filter((name) => data.parts.some((it) => it.name === name));
export const titleOf = (data, name) => PARTS[name] + (partNames(data).includes(`${name}_unrotated`) ? ROTATED : "");

/** @param {SurveyVectors} data */
export const partOf = (data) => /** @type {SurveyPart} */ (
  data.parts.find((it) => it.name === chosen.vectors && it.all === (chosen.examples === "all")));

/** @param {SurveyVectors} data */
export const examplesOf = (data) => data.examples.filter((it) => chosen.examples === "all" || it.keys[0]);

/** What the colour of an example shows. @param {SurveyVectors} data */
export const shadeOf = (data, example) => SHADES[chosen.shade].of(example, data.contexts[example.context].tokens);

/** The name of an example in an address: its text, context and query. @param {SurveyVectors} data */
export function nameOf(data, { context, query }) {
  const { text, context: number } = data.contexts[context];
  return `${text}.${number}.${query}`;
}

/** Limits the selection to what the selected head has, and returns what it does not have. */
export function settleVectors() {
  const data = vectorsOf(chosen.at), absent = /** @type {string[]} */ ([]);
  if (!chosen.vectors) Object.assign(chosen, { group: "", example: "" });
  if (!data || !chosen.vectors) return absent;
  const limit = (name, isThere, otherwise) => {
    if (!chosen[name] || isThere) return;
    absent.push(`${name} “${chosen[name]}”`);
    chosen[name] = otherwise;
  };
  limit("vectors", partNames(data).includes(chosen.vectors), partNames(data)[0]);
  const isGrouped = Boolean(SHADES[chosen.shade].groups);
  limit("group", isGrouped && examplesOf(data).some((it) => shadeOf(data, it) === chosen.group), "");
  limit("example", examplesOf(data).some((it) => nameOf(data, it) === chosen.example), "");
  return absent;
}
