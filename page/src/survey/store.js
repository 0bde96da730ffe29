// The data of a survey's page, and the selection.

import { parse, unpacked } from "../json.js";
import { byId } from "../marks.js";

/** @import * as schema from "../schema.d.ts" */

/** @typedef {{mean: number, low: number | null, high: number | null, uniform: number | null,
 *   compared?: schema.SurveyDifference | null}} Numbers */
/** @typedef {schema.SurveyHead & {metrics: Record<string, Numbers>}} Head the metrics that it has queries for */

/** @type {Omit<schema.SurveyPage, "heads"> & {heads: Head[]}} */
export const survey = parse(byId("survey").textContent);

// The page has columns, because they are half as long.
for (const [at, head] of survey.heads.entries()) {
  head.metrics = Object.fromEntries(Object.entries(survey.numbers).filter(([, { mean }]) => mean[at] !== null)
    .map(([name, columns]) => [name, /** @type {any} */ (Object.fromEntries(Object.entries(columns).map(([column, all]) => [column, all[at]])))]));
}

export const LARGEST = 10; // the number of the group of largest values, after ten deciles
const PLACE = ["layer", "head"]; // what an axis can show besides means of metrics
const DIFFERENCE = "difference:"; // and differences from another survey
export const LEAST_Q = 0.05; // of a difference that is by chance

const known = (name, i) => (metricOf(name) ? name : survey.metrics[Math.min(i, survey.metrics.length - 1)].name);
export const metricOf = (name) => survey.metrics.find((it) => it.name === name);

/** What the page opens with, without an address. */
export const START = {
  at: 0, // index of the head
  metric: known(survey.grid ? "neighbours" : "previous", 0),
  decile: LARGEST,
  x: known(survey.grid ? "distance" : "first", 1),
  y: known(survey.grid ? "neighbours" : "previous", 0),
  colour: "layer",
  vectors: "", // which vectors of the head are shown, such as q; "" for none
  examples: "all", // of these vectors, as the next ones
  components: "1.2",
  shade: "looks_at", // what their colours show
  group: "", // the only one that is not pale; "" for all
  example: "", // the selected one; "" for none
};

/** @param {schema.SurveyDifference} it */
const effectOf = ({ effect, difference }) => (effect === null ? (difference ? Infinity : 0) : Math.abs(effect));

/** The differences of all heads and metrics: the sure ones first, and of these the largest effects.
 * @type {{at: number, metric: string, compared: schema.SurveyDifference}[]} */
export const differences = survey.heads.flatMap((it, at) => Object.entries(it.metrics)
  .flatMap(([metric, { compared }]) => (compared ? [{ at, metric, compared }] : [])))
  .sort((a, b) => Number(a.compared.q >= LEAST_Q) - Number(b.compared.q >= LEAST_Q) ||
    (effectOf(b.compared) - effectOf(a.compared)) || Math.abs(b.compared.difference) - Math.abs(a.compared.difference));

if (differences.length) {
  const { at, metric } = differences[0];
  Object.assign(START, { at, metric, x: metric, y: DIFFERENCE + metric });
}

else {
  const means = survey.heads.map(({ metrics }) => metrics[START.metric]?.mean ?? -Infinity);
  START.at = means.indexOf(Math.max(...means)); // the head that does most of what the page shows
}

export const chosen = { ...START };
export const theme = { isDark: false };
export const screen = {
  draw: () => {},
  misread: /** @type {string[]} */ ([]), // parts of the address that the page does not have
};

export const head = () => survey.heads[chosen.at];
export const numbers = () => head().metrics[chosen.metric];

const reading = /** @type {Map<string, Promise<any>>} */ (new Map()); // by the packed text, which is read once
function read(packed) {
  if (!reading.has(packed)) reading.set(packed, unpacked(packed));
  return /** @type {Promise<any>} */ (reading.get(packed));
}

/** What the page has of the selected head alone. @returns {Promise<schema.SurveyDetails>} */
export const readDetails = () => read(head().details);

/** @returns {Promise<schema.SurveyContext>} */
export const readContext = (/** @type {number} */ number) => read(survey.contexts[number]);
export const axes = [...PLACE, ...survey.metrics.map((it) => it.name),
  ...(survey.other ? survey.metrics.map((it) => DIFFERENCE + it.name) : [])];
export const words = (name) => name.replace(DIFFERENCE, "difference of ")
  .replace(/_(\d+)_(\d+)$/, " $1 to $2").replaceAll("_", " ");

/** The number of a head on an axis. @param {Head} of */
export function valueOn(of, axis) {
  if (PLACE.includes(axis)) return of[axis];
  if (axis.startsWith(DIFFERENCE)) return of.metrics[axis.slice(DIFFERENCE.length)]?.compared?.difference ?? NaN;
  return of.metrics[axis]?.mean ?? NaN;
}

export const metricsOf = (of) => survey.metrics.map((it) => it.name).filter((name) => name in of.metrics);

// A head has no numbers of a metric without queries.
export function settle() {
  if (!numbers()) chosen.metric = metricsOf(head())[0];
}
