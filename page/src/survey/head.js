// The selected head: its metrics, the distribution of one of them, and the tokens that it connects.

import { byId, count, make, number, table, token } from "../marks.js";
import { go } from "./address.js";
import { BEHAVIOURS, headName, keysOf } from "./findings.js";
import { rolesOf } from "./mixes.js";
import { LEAST_Q, chosen, head, metricOf, metricsOf, numbers, survey, words } from "./store.js";

const either = (value, digits = 3) => (value === null ? "" : number(value, digits));
const MOST_TOKENS = 8; // on each side

/** @import { SurveyDetail, SurveyDetails, SurveyDifference } from "../schema.d.ts" */

export const signed = (value, decimals = 3) => (value > 0 ? "+" : "") + number(value, decimals);

export function drawHead() {
  const { module, shares } = head();
  byId("head-title").textContent = headName(head());
  byId("module").textContent = module;
  byId("roles").textContent = rolesOf(shares);
  byId("metric-title").textContent = words(chosen.metric);
  drawMetrics();
}

// The groups of metrics in the table, by their names; the first that fits.
const GROUPS = /** @type {[RegExp, string][]} */ ([
  [/^(first|self|previous|next|separators|duplicate|induction|on_.*)$/, "Weight on one kind of key"],
  [/^(neighbours|within_.*|row|column|distance)$/, "Weight by place on the grid, and distance in patches"],
  [/^(last|distance)_|^ahead$/, "Weight by distance, in tokens"],
  [/^(entropy|evenness|support|largest)$/, "How concentrated the weights are"],
  [/^looks_/, "Queries whose largest weight is on this kind of key"],
  [/^/, "Others"],
]);
const groupOf = (/** @type {string} */ name) => GROUPS.findIndex(([names]) => names.test(name));

function drawMetrics() {
  const names = metricsOf(head()).toSorted((a, b) => groupOf(a) - groupOf(b)), columns = survey.other ? 5 : 4;
  const rows = names.flatMap((name, i) => {
    const { formula } = /** @type {any} */ (metricOf(name));
    const { mean, low, high, uniform, compared } = head().metrics[name];
    const button = make("button", { type: "button", class: "quiet", title: formula,
      "aria-pressed": String(name === chosen.metric) }, words(name));
    button.addEventListener("click", () => go({ metric: name }));
    const interval = low === null ? "" : `${number(low, 3)} to ${either(high)}`;
    const cells = survey.other ? comparison(compared) : [number(mean, 3), interval, either(uniform)];
    const row = { kind: `${name === chosen.metric ? "chosen" : ""} ${compared && compared.q < LEAST_Q ? "differs" : ""}`, cells: [button, ...cells] };
    const isNew = !i || groupOf(names[i - 1]) !== groupOf(name);
    return isNew ? [{ kind: "group", cells: [GROUPS[groupOf(name)][1], ...Array(columns - 1).fill("")] }, row] : [row];
  });
  byId("metrics").replaceChildren(survey.other
    ? table("Means of texts, in this survey and in the other", ["metric", "here", "there", "difference", "q"], rows)
    : table("Means over all queries", ["metric", "mean", "95 % interval", "uniform"], rows));
}

/** @param {SurveyDifference | null | undefined} compared */
const comparison = (compared) => (compared
  ? [number(compared.mean, 3), number(compared.other, 3), signed(compared.difference), number(compared.q, 3)]
  : ["", "", "", ""]);

/** @param {SurveyDetail} detail */
export function drawHistogram({ bins, counts, quantiles, queries, texts, sd }) {
  const { edges, formula, source, version } = metricOf(chosen.metric) ?? survey.metrics[0];
  byId("formula").textContent = BEHAVIOURS.includes(chosen.metric) ? `The weight on ${keysOf(chosen.metric)}: ${formula}.` : formula;
  byId("source").textContent = `Source: ${source}. Version ${version}. ${count(queries, "query", "queries")} of ${count(texts, survey.grid ? "picture" : "text")}.`;
  const most = Math.max(...counts, 1), all = new Map(bins.map((bin, i) => [bin, counts[i]]));
  const first = Math.min(...bins), last = Math.max(...bins);
  const bars = Array.from({ length: last - first + 1 }, (_, i) => first + i).map((bin) => {
    const n = all.get(bin) ?? 0;
    const column = make("span", { class: "column", title: `${number(edges[bin], 3)} to ${number(edges[bin + 1], 3)}: ${count(n, "query", "queries")}` },
      make("span", { class: "fill" }));
    column.firstChild.style.height = `${100 * Math.sqrt(n / most)}%`; // small counts must be visible
    return column;
  });
  byId("histogram").replaceChildren(...bars);
  byId("histogram-ends").replaceChildren(make("span", {}, number(edges[first], 3)), make("span", {}, number(edges[last + 1], 3)));
  const [q05, , q50, , q95] = quantiles;
  byId("quantiles").textContent = `Mean ${number(numbers().mean, 3)}${sd === null ? "" : `, between texts ± ${number(sd, 3)}`}. ` +
    [q50 === null ? "" : `Median ${number(q50, 3)}.`, q05 === null ? "" : `5 % of queries are below ${number(q05, 3)}.`,
      q95 === null ? "" : `5 % are above ${number(q95, 3)}.`].join(" ");
}

/** @param {SurveyDetails} details */
export function drawTokens({ tokens }) {
  const parts = /** @type {const} */ (["query", "key"]).map((side) => {
    const rows = tokens.filter((it) => it.side === side).slice(0, MOST_TOKENS)
      .map((it) => ({ kind: "", cells: [token(survey.spelling[it.token]), it.count.toLocaleString("en"), number(it.lift, 2)] }));
    return rows.length ? table(side === "query" ? "Query tokens" : "Key tokens", ["token", "links", "lift"], rows) : "";
  });
  byId("tokens").replaceChildren(...parts.filter(Boolean));
  byId("tokens-note").textContent = parts.some(Boolean)
    ? "A link is a largest weight that is neither on the first token nor on the query itself. Lift compares the fraction of links with the fraction of the text."
    : `No token has more links than its fraction of the ${survey.grid ? "pictures" : "text"}.`;
}
