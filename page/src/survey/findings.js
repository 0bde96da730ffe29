// The findings with which the page opens: what most heads do, and the best heads of each behaviour.

import { byId, count, make, number, table } from "../marks.js";
import { go } from "./address.js";
import { chosen, metricOf, survey, words } from "./store.js";

// Metrics of mass on the keys of one kind, the most telling first; of pictures, on patches at one place beside the query.
const PLACES = /** @type {Record<string, string>} */ ({ neighbours: "the four patches beside the query", self: "the query itself",
  row: "the patches in its row", column: "the patches in its column", within_1: "it and the eight patches around it",
  ...Object.fromEntries((survey.grid?.[0] ?? []).map((it) => [`on_${it.replace(/[[\]]/g, "").toLowerCase()}`, it])) });
export const BEHAVIOURS = survey.grid ? Object.keys(PLACES) : ["induction", "duplicate", "previous", "self", "separators", "ahead", "first"];
const BEST = 3; // heads of a behaviour
const MOST = 0.5; // of the largest weights

export const headName = (/** @type {{layer: number, head: number}} */ { layer, head }) => `L${layer}H${head}`;

/** The keys of a behaviour in words, such as "the token before". */
export const keysOf = (/** @type {string} */ name) => (survey.grid ? PLACES[name] : survey.key_kinds[name] ?? survey.key_kinds[name.replace(/s$/, "")]) ?? words(name);

/** What the heads do, as sentences. */
export function sentences() {
  const kinds = Object.entries(survey.key_kinds), heads = survey.heads, several = heads.filter((it) => it.several);
  const leading = heads.map(({ shares }) => shares.findIndex((share) => share > MOST));
  const groups = kinds.map(([kind, meaning], i) => ({ kind, meaning, n: leading.filter((it) => it === i).length }))
    .filter(({ n }) => n).sort((a, b) => b.n - a.n), all = groups.reduce((sum, { n }) => sum + n, 0);
  const clearest = BEHAVIOURS.filter((name) => name !== "first").flatMap((name) => bestHeads(name).slice(0, 1).map((best) => ({ name, ...best })))
    .sort((a, b) => excess(b.numbers) - excess(a.numbers)).slice(0, BEST)
    .map(({ name, it, numbers }) => `${headName(it)} puts ${number(numbers.mean, 2)} of its weight on ${keysOf(name)}` +
      (numbers.uniform === null ? "" : ` (equal weights: ${number(numbers.uniform, 2)})`));
  return [
    survey.grid ? "" : `${all} of ${count(heads.length, "head")} have most of their largest weights on one kind of key` +
      `${all ? `: ${groups.map(({ n, meaning }) => `${n} on ${meaning}`).join(", ")}` : ""}.`,
    clearest.length ? `${survey.grid ? "The clearest" : "The clearest besides"}: ${clearest.join("; ")}.` : "",
    several.length ? `${count(several.length, "head does", "heads do")} more than one thing${several.length > BEST ? ", for example" : ":"} ${several.slice(0, BEST).map(headName).join(", ")}.` : "",
  ].filter(Boolean);
}

const excess = (/** @type {{mean: number, uniform: number | null}} */ { mean, uniform }) => mean - (uniform ?? 0);

/** The heads with the largest means of a behaviour that are above uniform weights with their interval. */
export function bestHeads(/** @type {string} */ name) {
  const own = survey.heads.map((it, at) => ({ at, it, numbers: it.metrics[name] }));
  return own.filter(({ numbers }) => numbers && (numbers.low ?? numbers.mean) > (numbers.uniform ?? 0))
    .sort((a, b) => b.numbers.mean - a.numbers.mean).slice(0, BEST);
}

export function buildFindings() {
  byId("findings-words").replaceChildren(...sentences().map((it) => make("p", { class: "lead" }, it)));
  const rows = BEHAVIOURS.filter(metricOf).map((name) => ({ name, best: bestHeads(name) })).filter(({ best }) => best.length)
    .map(({ name, best }) => ({ kind: "", cells: [make("span", { title: metricOf(name)?.formula }, words(name), make("small", {}, keysOf(name))),
      ...best.map(({ at, it, numbers }) => {
        const { mean, low, high } = numbers, interval = low === null || high === null ? "" : `${number(low, 2)} to ${number(high, 2)}`;
        const button = make("button", { type: "button", class: "quiet", "data-at": at, "data-metric": name },
          make("b", {}, headName(it)), ` ${number(mean, 2)} `, make("small", {}, interval));
        button.addEventListener("click", () => {
          go({ at, metric: name, y: name });
          const title = byId("all-title"); // below a narrow screen
          if (title.getBoundingClientRect().top > innerHeight) title.scrollIntoView();
        });
        return button;
      }), ...Array(BEST - best.length).fill(""), best[0].numbers.uniform === null ? "" : number(best[0].numbers.uniform, 2)] }));
  byId("findings-table").replaceChildren(...(rows.length
    ? [table("The best heads of each behaviour: mean weight on its keys, with 95 % interval", ["behaviour", "best", "second", "third", "equal weights"], rows)] : []));
}

export function drawFindings() {
  for (const button of byId("findings-table").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.at) === chosen.at && button.dataset.metric === chosen.metric));
  }
}
