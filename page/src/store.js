// What the page holds and what it shows: all state of the page, for all modules.
//
// Pointing shows something for a moment, clicking keeps it, Escape lets go. Everything reacts to the
// same four choices: layer, head, query, key. A query of null means none: pictures then show all of
// them alike.

import { Snapshot } from "./data.js";

/** @import * as schema from "./schema.d.ts" */
/** @import { SnapshotData, LayerData, Trace } from "./data.js" */
/** @import { Scene } from "./scene.js" */
/** @import { Words } from "./state.js" */

/** @typedef {"text" | "lines" | "map" | "numbers" | "walk"} View */
/** @typedef {[layer: number, head: number]} Place */

/** Computes snapshots. Its promises reject with an Error whose message can be shown. One that `rounds`
 * has weights a little other than those of the model that made the page's own numbers.
 * @typedef {{
 *   can: { text: boolean, tile?: boolean, rounds?: boolean, edits: string[] },
 *   compute: (text: string, edits: schema.Edits) => Promise<SnapshotData>,
 *   tile?: (text: string, edits: schema.Edits, part: Part) => Promise<LayerData>,
 *   cancel?: () => void,
 * }} Source */

/** A part of one head; the first and the last of its queries and keys.
 * @typedef {{layer: number, head: number, queries: number[], keys: number[]}} Part */

/** @type {schema.Page} */
export const pageData = JSON.parse(document.getElementById("trace")?.textContent ?? "",
  (_, value) => (value?.float === undefined ? value : Number(value.float)));

export const opened = new Snapshot(pageData);

/** The edits that leave everything as the model does it. @type {schema.Edits} */
export const NO_EDITS = /** @type {any} */ (Object.fromEntries(
  Object.entries(pageData.edits).map(([name, edit]) => [name, edit.default])));

// What was clicked.
export const chosen = {
  view: /** @type {View} */ ("text"),
  layer: 0,
  head: 0,
  query: /** @type {number | null} */ (null),
  key: /** @type {number | null} */ (null),
  step: "weights", // which matrix the map shows
  stage: 0, // which step the numbers and the walk are at
  others: /** @type {Place[]} */ ([]), // heads shown beside the chosen one
  difference: false, // of two sides, the difference instead of both
  threshold: 0.05, // a smaller weight gets no line
  edits: NO_EDITS,
};

// Where the walk is, in stages.
export const walk = { at: 0, speed: 1, isPlaying: false, frame: 0, last: 0 };

// How the heads are listed: those with one label only, and in which order.
export const sheet = { label: /** @type {string | null} */ (null), order: "place" };

export const stillOnly = matchMedia("(prefers-reduced-motion: reduce)");

export const store = {
  // What the pointer is on; it overrides what is chosen.
  pointed: /** @type {Partial<typeof chosen> | null} */ (null),

  // Snapshots: of the text; of the text with the edits, if there are any; of the text without them, to
  // compare with; and another one to compare with, of a text before or of another model.
  current: opened,
  edited: /** @type {Snapshot | null} */ (null),
  before: /** @type {Snapshot | null} */ (null),
  kept: /** @type {Snapshot | null} */ (null),

  // What computes anew, if anything does; the number of the newest request, so that an older answer is
  // not shown; what was last asked for, until it is answered.
  source: /** @type {Source | null} */ (null),
  computing: 0,
  wanted: /** @type {{text: string, edits: schema.Edits} | null} */ (null),

  // The field whose value was refused: it keeps it, to be mended. Is the text in its field one that
  // could not be read? What is shown is then of the one before.
  refusedField: /** @type {string | null} */ (null),
  isRefused: false,

  // Exact weights of a part of a pooled map, whose index 0 is at `first`.
  zoomed: /** @type {{from: Snapshot, layer: number, head: number, trace: Trace,
    first: {q: number, k: number}} | null} */ (null),

  misread: /** @type {string[]} */ ([]), // what the address asks for and the page does not have

  isAdding: false, // does a click on a head add it to those that are compared?
  tiles: /** @type {any[]} */ ([]), // the buttons of the heads
  picture: /** @type {Scene | null} */ (null), // the scene on the canvas
  isDark: false,

  // Computed once: the colours of the theme that is shown, and which words of two texts are the same.
  themeColours: /** @type {Record<string, string> | null} */ (null),
  aligned: /** @type {{kept: Snapshot | null, current: Snapshot | null, words: Words | null}} */ (
    { kept: null, current: null, words: null }),
};

// Whoever changes what is shown calls these, and page.js says what they do: so no module has to know
// those that draw it.
export const screen = { draw() {}, drawPicture() {}, drawControls() {}, fillAll() {} };
