// The data of a training's page, and the selection.

import { decode } from "../data.js";
import { parse } from "../json.js";
import { byId } from "../marks.js";
import { rangeOf } from "../ticks.js";

/** @import * as schema from "../schema.d.ts" */

/** @type {schema.TrainingPage} */
export const run = parse(byId("training").textContent);

export const metrics = Object.keys(run.values);
export const names = run.heads.map(([layer, head]) => `L${layer}H${head}`);

/** What the numbers of a metric are; "" for one of the run's own. */
export const MEANING = {
  max: "The largest logit, over all queries of the step.",
  entropy: "The mean entropy of the weights, in nats.",
  entropy_fraction: "The mean entropy of the weights as a fraction of that of uniform weights.",
  first: "The mean weight on the first token of the text.",
  self: "The mean weight on the query itself.",
  peaked: "The fraction of queries whose largest weight exceeds 0.99.",
  output: "The norm of the head's output, as a multiple of the mean of its layer.",
  grad_q: "The norm of the gradient of the head's rows of W_Q.",
  grad_k: "The norm of the gradient of the rows of W_K that the head reads.",
};

/** What became of heads, and alarms. */
export const findings = run.findings.map(([sentence, metric, head, step]) => ({ sentence, metric, head, step }));
const first = findings.find((it) => it.head !== null);

/** What the page opens with, without an address: the head of the first finding, at the end. */
export const START = { metric: first?.metric ?? metrics[0], head: first?.head ?? 0, step: run.steps.length - 1 };
export const chosen = { ...START };
export const screen = { isDark: false, draw: () => {}, drawStep: () => {} };

const decoded = {};
export const valuesOf = (metric = chosen.metric) => (decoded[metric] ??= decode(/** @type {any} */ (run.values[metric])));

/** The number of a head at a step, by their indices. */
export const valueAt = (step, head) => valuesOf()[step * names.length + head];

const ranges = {};
/** The least and the greatest number of the metric. Every cell of a picture reads it, so it is computed once. */
export const range = () => (ranges[chosen.metric] ??= rangeOf(valuesOf()));

/** The index of the last shown step that is not after a step. */
export const indexOf = (step) => Math.max(0, run.steps.findLastIndex((it) => it <= step));

/** Changes the selection, and the address, with which a link opens the same view; but not `isFilm`, whose steps are many. */
export function go(changes, isFilm = false) {
  const isOther = Object.keys(changes).some((name) => name !== "step" && changes[name] !== chosen[name]);
  Object.assign(chosen, changes);
  const { metric, head, step } = chosen;
  try {
    if (!isFilm) history.replaceState(null, "", `#${new URLSearchParams({ metric, head: names[head], step: String(run.steps[step]) })}`);
  } catch { /* A page in a notebook's frame has no address. */ }
  (isOther ? screen.draw : screen.drawStep)();
}

/** Selects what an address names. */
export function readAddress(hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, "")), head = names.indexOf(parts.get("head") ?? "");
  Object.assign(chosen, START);
  if (metrics.includes(parts.get("metric") ?? "")) chosen.metric = /** @type {string} */ (parts.get("metric"));
  if (head >= 0) chosen.head = head;
  if (parts.has("step")) chosen.step = indexOf(Number(parts.get("step")));
}
