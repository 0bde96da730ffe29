// The edits that the page offers. Python describes each of them, in pageData.edits.

import { NO_EDITS, pageData } from "./store.js";

/** @import { Edits } from "./schema.d.ts" */

/** The edits that differ from what the model does, as [name, value]. @param {Edits} edits */
export const changedEdits = (edits) => Object.entries(edits).filter(([name, value]) =>
  JSON.stringify(value) !== JSON.stringify(NO_EDITS[/** @type {keyof Edits} */ (name)]));

/** Do they change anything? The seed is one of dropout. @param {Edits} edits */
export const hasEdits = (edits) => changedEdits({ ...edits, seed: edits.dropout ? edits.seed : 0 }).length > 0;

/** @param {string} name @param {unknown} value */
function fits(name, value) {
  const { kind, over = -Infinity, least = -Infinity, below = Infinity } = pageData.edits[name];
  if (kind === "mask") return typeof value === "string";
  if (kind === "heads") {
    return Array.isArray(value) && value.every((it) => Array.isArray(it) && it.length === 2 && it.every(Number.isFinite));
  }
  return typeof value === "number" && (kind === "number" || Number.isSafeInteger(value)) &&
    over < value && least <= value && value < below;
}

/** Why an edit cannot have a value; empty if it can. @param {string} name @param {unknown} value */
export function refusalOf(name, value) {
  const { default: none, label, rule, example } = pageData.edits[name];
  if ((value === null && none === null) || fits(name, value)) return "";
  const more = none === null ? `, for example ${example}, or left empty` : "";
  return `The ${label.toLowerCase()} is ${value}. It is ${rule}${more}.`;
}

/** The edits that an address asks for, each with a value that it can have; others are left out.
 * @param {string} hash @returns {Edits} */
export function readEdits(hash) {
  let asked = {};
  try {
    asked = JSON.parse(new URLSearchParams(hash.replace(/^#/, "")).get("edits") ?? "{}") ?? {};
  } catch { /* not JSON: no edits */ }
  const readable = Object.entries(asked).filter(([name, value]) => Object.hasOwn(NO_EDITS, name) && fits(name, value));
  return { ...NO_EDITS, ...Object.fromEntries(readable) };
}
