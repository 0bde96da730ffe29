// The data of a survey's page, the selection, and its address.

import { parse } from "../json.js";
import { byId } from "../marks.js";

/** @import * as schema from "../schema.d.ts" */

/** @type {schema.SurveyPage} */
export const survey = parse(byId("survey").textContent);

export const LARGEST = 10; // the number of the group of largest values, after ten deciles
const PLACE = ["layer", "head"]; // what an axis can show besides means of metrics
const DIFFERENCE = "difference:"; // and differences from another survey
export const LEAST_Q = 0.05; // of a difference that is by chance

const known = (name, i) => (metricOf(name) ? name : survey.metrics[Math.min(i, survey.metrics.length - 1)].name);
export const metricOf = (name) => survey.metrics.find((it) => it.name === name);

export const chosen = {
  at: 0, // index of the head
  metric: survey.metrics[0].name,
  decile: LARGEST,
  x: known("first", 1),
  y: known("previous", 0),
  colour: "layer",
};

export const screen = { draw: () => {} };
export const theme = { isDark: false };

/** The differences of all heads and metrics, the surest first, then the largest.
 * @type {{at: number, metric: string, compared: schema.SurveyDifference}[]} */
export const differences = survey.heads.flatMap((it, at) => Object.entries(it.metrics)
  .flatMap(([metric, { compared }]) => (compared ? [{ at, metric, compared }] : [])))
  .sort((a, b) => a.compared.q - b.compared.q || Math.abs(b.compared.difference) - Math.abs(a.compared.difference));

if (differences.length) {
  const { at, metric } = differences[0];
  Object.assign(chosen, { at, metric, x: metric, y: DIFFERENCE + metric });
}

export const head = () => survey.heads[chosen.at];
export const numbers = () => head().metrics[chosen.metric];
export const axes = [...PLACE, ...survey.metrics.map((it) => it.name),
  ...(survey.other ? survey.metrics.map((it) => DIFFERENCE + it.name) : [])];
export const words = (name) => name.replace(DIFFERENCE, "difference of ").replaceAll("_", " ");

/** The number of a head on an axis. @param {schema.SurveyHead} of */
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

export function go(changes) {
  Object.assign(chosen, changes);
  settle();
  const { layer, head: number } = head(), { metric, decile, x, y, colour } = chosen;
  const address = new URLSearchParams(/** @type {any} */ ({ layer, head: number, metric, decile, x, y, colour }));
  try {
    history.replaceState(null, "", `#${address}`);
  } catch { /* A page in a notebook's frame has no address. */ }
  screen.draw();
}

/** Parses an address: the changes that this page can make, and the parts that it does not have.
 * @returns {{changes: Record<string, any>, misread: string[]}} */
export function readAddress(hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, "")), misread = /** @type {string[]} */ ([]);
  const changes = /** @type {Record<string, any>} */ ({});
  if (parts.has("layer") || parts.has("head")) {
    const layer = Number(parts.get("layer") ?? 0), number = Number(parts.get("head") ?? 0);
    const at = survey.heads.findIndex((it) => it.layer === layer && it.head === number);
    if (at < 0) misread.push(`layer ${parts.get("layer")}, head ${parts.get("head")}`);
    else changes.at = at;
  }
  for (const name of ["metric", "x", "y", "colour"]) {
    const value = parts.get(name);
    if (value === null) continue;
    const isKnown = name === "metric" ? metricOf(value) : axes.includes(value);
    if (isKnown) changes[name] = value;
    else misread.push(`${name} “${value}”`);
  }
  const decile = parts.get("decile");
  if (decile !== null && /^(10|\d)$/.test(decile)) changes.decile = Number(decile);
  else if (decile !== null) misread.push(`decile “${decile}”`);
  return { changes, misread };
}
