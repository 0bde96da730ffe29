// All state of the page, for all modules.
//
// Pointing shows something temporarily, clicking selects it, Escape clears the selection. The
// selection is a layer, a head, a query and a key. If the query is null, pictures show all queries
// alike.

import { Snapshot } from "./data.js";
import { parse } from "./json.js";

/** @import * as schema from "./schema.d.ts" */
/** @import { SnapshotData, LayerData, Trace } from "./data.js" */
/** @import { Scene } from "./scene.js" */
/** @import { Words } from "./state.js" */

/** @typedef {"text" | "lines" | "map" | "numbers" | "walk" | "why"} View */
/** @typedef {[layer: number, head: number]} Place */

/** Computes snapshots. Its promises reject with an Error whose message can be shown. If it `rounds`,
 * its weights differ slightly from those of the model that computed the numbers of the page.
 * @typedef {{
 *   can: { text: boolean, ahead?: boolean, tile?: boolean, steps?: boolean, rounds?: boolean, edits: string[] },
 *   compute: (text: string, edits: schema.Edits) => Promise<SnapshotData>,
 *   tile?: (text: string, edits: schema.Edits, part: Part) => Promise<LayerData>,
 *   steps?: (text: string, edits: schema.Edits, layer: number) => Promise<LayerData>,
 *   why?: (text: string, edits: schema.Edits, pair: Pair & {against: string | number}) => Promise<schema.Why>,
 *   cancel?: () => void,
 * }} Source */

/** A part of one head, with the first and last of its queries and keys.
 * @typedef {{layer: number, head: number, queries: number[], keys: number[]}} Part */

/** One weight of a head. @typedef {{layer: number, head: number, query: number, key: number}} Pair */

/** @type {schema.Page} */
export const pageData = parse(document.getElementById("trace")?.textContent ?? "");

export const opened = new Snapshot(pageData);

/** The edits that do not change the model. @type {schema.Edits} */
export const NO_EDITS = /** @type {any} */ (Object.fromEntries(
  Object.entries(pageData.edits).map(([name, edit]) => [name, edit.default])));

// The selection, made by clicks.
export const chosen = {
  view: /** @type {View} */ ("text"),
  layer: 0,
  head: 0,
  query: /** @type {number | null} */ (null),
  key: /** @type {number | null} */ (null),
  step: "weights", // the matrix that the map shows
  stage: 0, // the step of the numbers and the walk
  others: /** @type {Place[]} */ ([]), // heads shown beside the selected one
  by: /** @type {"weight" | "norm-weighted"} */ ("weight"), // what shades the text
  registers: /** @type {"drawn" | "left out"} */ ("drawn"), // patches that are registers in all but name
  difference: false, // show the difference of two sides instead of both
  threshold: 0.05, // a smaller weight gets no line
  edits: NO_EDITS,
};

// The position of the walk, in stages.
export const walk = { at: 0, speed: 1, isPlaying: false, frame: 0, last: 0 };

// The list of heads: its filter by label, and its order.
export const sheet = { label: /** @type {string | null} */ (null), order: "place" };

export const stillOnly = matchMedia("(prefers-reduced-motion: reduce)");
export const narrow = matchMedia("(max-width: 52rem)"); // as in the style sheet

export const store = {
  // The target of the pointer, which overrides the selection.
  pointed: /** @type {Partial<typeof chosen> | null} */ (null),

  // Snapshots: the current one, with edits if there are any; one without edits, for comparison; and
  // another for comparison, of an earlier text or of another model.
  current: opened,
  edited: /** @type {Snapshot | null} */ (null),
  before: /** @type {Snapshot | null} */ (null),
  kept: /** @type {Snapshot | null} */ (null),

  // The source, or null; the number of the newest request, so that the response to an older one is
  // not shown; and the newest request, until its response arrives.
  source: /** @type {Source | null} */ (null),
  computing: 0,
  wanted: /** @type {{text: string, edits: schema.Edits} | null} */ (null),

  // The field whose value was refused, which keeps it for correction; and whether the text in its
  // field was refused, so that the earlier text is shown.
  refusedField: /** @type {string | null} */ (null),
  isRefused: false,

  // Exact weights of a part of a pooled map; its index 0 is at `first`.
  zoomed: /** @type {{from: Snapshot, layer: number, head: number, trace: Trace,
    first: {q: number, k: number}} | null} */ (null),

  misread: /** @type {string[]} */ ([]), // parts of the address that the page does not have

  isAdding: false, // whether a click on a head adds it to the comparison
  tiles: /** @type {any[]} */ ([]), // the buttons of the heads
  picture: /** @type {Scene | null} */ (null), // the scene on the canvas
  isDark: false,

  // Caches: the colours of the current theme, and the matching words of two texts.
  themeColours: /** @type {Record<string, string> | null} */ (null),
  aligned: /** @type {{kept: Snapshot | null, current: Snapshot | null, words: Words | null}} */ (
    { kept: null, current: null, words: null }),
};

// Modules that change the state call these functions, which page.js defines, so that they do not
// depend on the modules that draw it.
export const screen = { draw() {}, drawPicture() {}, drawControls() {}, fillAll() {} };
