// The edits that the page offers, which pageData.edits describes.

import { NO_EDITS, pageData, store } from "./store.js";

/** @import { Edits } from "./schema.d.ts" */

/** The edits that differ from the default, as [name, value]. @param {Edits} edits */
export const changedEdits = (edits) => Object.entries(edits).filter(([name, value]) =>
  JSON.stringify(value) !== JSON.stringify(NO_EDITS[/** @type {keyof Edits} */ (name)]));

/** Whether the edits change anything; the seed alone does not. @param {Edits} edits */
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

/** Why a value of an edit is invalid; empty if it is valid. @param {string} name @param {unknown} value */
export function refusalOf(name, value) {
  const { default: none, label, rule, example } = pageData.edits[name];
  if ((value === null && none === null) || fits(name, value)) return "";
  const more = none === null ? `, for example ${example}, or empty` : "";
  return `The ${label.toLowerCase()} is ${value}. It is ${rule}${more}.`;
}

/** The edits in an address, unchecked; null if they are not JSON. @param {string} hash */
function editsIn(hash) {
  try {
    return Object.entries(JSON.parse(new URLSearchParams(hash.replace(/^#/, "")).get("edits") ?? "{}") ?? {});
  } catch {
    return null;
  }
}

/** @param {[string, unknown]} edit */
const isReadable = ([name, value]) => Object.hasOwn(NO_EDITS, name) && fits(name, value);

/** The edits in an address that this page can compute and whose values are valid.
 * @param {string} hash @returns {Edits} */
export const readEdits = (hash) => ({ ...NO_EDITS, ...Object.fromEntries((editsIn(hash) ?? []).filter(isReadable)) });

/** The names of the other edits in an address: those that this page cannot compute, or with an invalid
 * value. @param {string} hash */
export function misreadEdits(hash) {
  const edits = editsIn(hash);
  if (!edits) return ["not JSON"];
  return edits.filter((it) => !store.source || !isReadable(it)).map(([name]) => name);
}
