// The table of roles, which Python writes into the page: what the labels of heads mean.

import { pageData } from "./store.js";
import { bare, isPronoun } from "./words.js";

/** @import { Head, RoleText } from "./schema.d.ts" */

/** @type {Map<string, RoleText & {rank: number}>} */
const ROLES = new Map(pageData.roles.map((role, rank) => [String(role.label), { ...role, rank }]));
const SHARES = Object.fromEntries(pageData.roles.map(({ name, share }) => [name, share]));

export const roleOf = (/** @type {string} */ label) => ROLES.get(label);
export const rankOf = (/** @type {string} */ label) => roleOf(label)?.rank ?? ROLES.size;
export const meaningOf = (/** @type {string[]} */ labels) => labels.map((it) => roleOf(it)?.means ?? "").join(", and ");
export const shortOf = (/** @type {string[]} */ labels) => labels.map((it) => roleOf(it)?.short ?? it).join(" and ");
export const shareName = (/** @type {string} */ name) => SHARES[name] ?? name;
// Whether a label describes the entropy of a head that has no role.
export const isEvenness = (/** @type {string} */ label) => roleOf(label)?.kind === "evenness";
// All labels of a head: measured ones, or those of its roles.
export const labelsOf = (/** @type {Head} */ it) => (!it.measured && it.roles.length ? [...new Set(it.roles)] : it.labels);
// The label of the row of a head: one that repeats, because sinks and windows are many, or the leading one.
export const rowOf = (/** @type {Head} */ it) => labelsOf(it).find((label) => roleOf(label)?.copy !== undefined) ?? it.labels[0];

// The claim about a head of this label, if the query and the key show it.
export function claimOf(label, query, key, words) {
  const { claim = "", offset, copy, shows } = roleOf(label) ?? {};
  const holds = offset !== undefined ? key === query + offset
    : copy !== undefined ? key >= copy && key < query - 1 && bare(words[key - copy]) === bare(words[query])
    : shows === "pronoun" ? isPronoun(words[query]) : shows === "earlier" ? key < query : shows === "first" && key === 0;
  return holds ? claim : "";
}
