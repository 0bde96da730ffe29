// Numbers: every step of one query, with its exact numbers.

import { keyToken, queryToken } from "../labels.js";
import { MINUS, bar, button, byId, count, elide, ends, gapRow, largest, make, number, precise, sum, table } from "../marks.js";
import { answered } from "../compute.js";
import { go, isBeside, keyOr, placeName, queryOr, shownTrace, snapshot, state } from "../state.js";
import { chosen, screen, store } from "../store.js";
import { beginWalk } from "./walk.js";

/** @import { Step, Trace } from "../data.js" */

// The functions that write a step. Other steps are shown as before and after (queries x keys), or as a
// table of their rows.
const WRITTEN = { scores: dotProduct, weights: exponentials, output: weightedSum };

const selection = (changes = {}) => {
  const { h, q, k } = { h: state().head, q: queryOr(), k: keyOr(), ...changes };
  return { ...changes, ...shownTrace().at(h, q, k) };
};
const rowOf = (/** @type {Step} */ step) => shownTrace().row(step, state().head, queryOr());
const earlierPair = (/** @type {Step} */ step) => shownTrace().pairs[shownTrace().pairs.indexOf(step) - 1];

const write = (/** @type {Step} */ step) =>
  holds(step) ? (WRITTEN[step.name] ?? (step.isPair ? beforeAndAfter : rowsOf))(step) : elsewhere(step);

// Whether the page has the numbers of this step for the selected head and query.
function holds(/** @type {Step} */ step) {
  const indices = selection();
  return (step === shownTrace().weights && rowOf(step)?.some((weight) => weight !== undefined))
    || (step.holdsNumbers && "hgq".split("").every((letter) => step.indexOf[letter]?.has(indices[letter]) ?? true));
}

// A link to a head and query for which the page has them.
export function elsewhere(/** @type {Step} */ step) {
  if (canCompute()) {
    computeSteps();
    return [paragraph("Computing the steps of this layer.")];
  }
  const { h, q } = step.kept, at = state(), to = q && !q.includes(queryOr()) ? { query: q[0] } : {};
  const heads = h ?? (step.holdsNumbers ? [at.head] : []), others = [...snapshot().exactHeads()];
  const [layer, head] = heads.length ? [at.layer, heads.includes(at.head) ? at.head : heads[0]] : others[0] ?? [];
  const why = paragraph(isLong(shownTrace()) ? "This text is too long to store every step of every head."
    : "With every step of every head this page would be large.", head === undefined ? "" : " It has them for " +
    (heads.length ? `${heads.map((it) => placeName(at.layer, it)).join(", ")} in this layer.` : `${count(others.length, "head")} in other layers.`));
  if (head === undefined) return [why];
  return [why, button({}, () => go({ layer, head, ...to }), `Go to ${placeName(layer, head)}${to.query === undefined ? "" : `, query ${to.query}`}`)];
}

const MOST_TOKENS = 512; // of a text of which the host computes every step

export const isLong = (/** @type {Trace} */ { size }) => Math.max(size.q, size.k) > MOST_TOKENS;

const canCompute = () => Boolean(store.source?.can.steps) && !isBeside() && !isLong(shownTrace());

let requested = null; // the snapshot and the layer of which steps were requested last

async function computeSteps() {
  const from = snapshot(), { layer } = chosen;
  if (requested?.from === from && requested.layer === layer) return;
  requested = { from, layer };
  await answered(async () => {
    const data = await store.source?.steps?.(from.text, chosen.edits, layer);
    if (!data || snapshot() !== from) return;
    from.addSteps(layer, data);
    requested = null;
    screen.fillAll();
    screen.draw();
    if (chosen.view === "walk") beginWalk(); // it had nothing to play
  });
}

// One tab for each step.
export function fillStages() {
  const { steps } = shownTrace();
  return make("div", { class: "stages", role: "group", "aria-label": "Step" }, steps.map((step, stage) =>
    button({ "aria-pressed": stage === chosen.stage }, () => go({ stage }),
      make("span", { class: "ordinal" }, stage + 1), step.name)));
}

export function turnStage(by) {
  const last = shownTrace().steps.length - 1;
  go({ stage: Math.max(0, Math.min(last, chosen.stage + by)) });
}

export function drawNumbers() {
  const trace = shownTrace(), query = queryOr(), key = keyOr();
  byId("panel").replaceChildren(
    make("p", { class: "hint" }, "Query ", queryToken(query), ` (position ${trace.numbered("q", query)}), key `,
      keyToken(key), ` (position ${trace.numbered("k", key)}). The left and right arrow keys change the step.`),
    stepArticle(Math.min(chosen.stage, trace.steps.length - 1)));
}

// One step in full: name, formula, shape, reason, numbers.
export function stepArticle(stage) {
  const step = shownTrace().steps[stage];
  const shape = step.shape.map(([letter, size]) =>
    make("span", {}, `${step.axis_names[letter]} `, make("b", {}, size)));
  return make("article", { class: "step", "data-step": step.name },
    make("h3", {}, make("span", { class: "ordinal" }, stage + 1), step.name),
    make("p", { class: "formula" }, step.formula),
    make("p", { class: "why" }, step.why),
    make("p", { class: "shape" }, "shape ", ...shape),
    ...write(step));
}

const paragraph = (...words) => make("p", {}, ...words);

// ---- any step ------------------------------------------------------------------------

// Tokens down (features, for a weight matrix) and features across; the selected token is marked.
function rowsOf(step) {
  const free = step.axes.filter((letter) => !"hg".includes(letter));
  const down = free.find((letter) => "qk".includes(letter)) ?? free.at(-2);
  const across = free.filter((letter) => letter !== down).at(-1);
  const marked = { q: queryOr(), k: keyOr() }[down];
  const length = step.shape.find(([letter]) => letter === down)?.[1] ?? 1;
  const positions = step.kept[down] ?? Array.from({ length }, (_, i) => i);
  const read = (position) => step.along(across ?? "", selection(down ? { [down]: position } : {}));
  const shown = elide(positions.length, 12, Math.max(0, positions.indexOf(marked)));
  const features = ends(read(positions[0]).length, 10);
  const write = (value) => (step.integer ? String(value) : number(value));
  const label = (position) => ({ q: queryToken, k: keyToken })[down]?.(position) ??
    (down ? `${step.axis_names[down]} ${position}` : "all tokens");
  const rows = shown.map((i) => {
    if (i === null) return gapRow(features.length + 1);
    const position = positions[i], values = read(position);
    return {
      kind: position === marked ? "chosen" : "",
      cells: [label(position), ...features.map((j) => (j === null ? "…" : write(values[j])))],
    };
  });
  const names = features.map((j) => (j === null ? "…" : across ? `${across} ${j}` : step.name));
  const each = "qk".includes(down) ? "token" : step.axis_names[down];
  const how = shown.includes(null) ? `some of its ${positions.length} rows, one for each ${each}` : `a row for each ${each}`;
  return [table(`${step.name}, ${how}`, [step.axis_names[down] ?? "", ...names], rows)];
}

// The row of the selected query in the step before, and in this one.
function beforeAndAfter(/** @type {Step} */ step) {
  const earlier = earlierPair(step);
  const after = rowOf(step), before = earlier && rowOf(earlier);
  const note = (i) => {
    if (!before) return "";
    if (after[i] === -Infinity && before[i] !== -Infinity) return "may not look";
    if (step.name === "dropped" && after[i] === 0 && before[i] !== 0) return "dropped";
    if (step.name === "biased") return `bias ${number(after[i] - before[i])}`;
    return "";
  };
  const shown = elide(after.length, 12, keyOr());
  const rows = shown.map((i) => i === null ? gapRow(4) : {
    kind: [i === keyOr() ? "chosen" : "", after[i] === -Infinity ? "masked" : ""].join(" "),
    cells: [keyToken(i), before ? number(before[i]) : "", number(after[i]), note(i)],
  });
  const blocked = after.filter((score) => score === -Infinity).length;
  return [
    ...oneKey(step, before?.[keyOr()], after[keyOr()]),
    ...(step.name === "masked" ? [paragraph(
      blocked ? `This query may not look at ${count(blocked, "key")} of ${after.length}.`
        : "This query may look at every key.")] : []),
    table(`The row of this query, ${earlier?.name ?? "nothing"} before and ${step.name} after`,
      ["key", earlier?.name ?? "before", step.name, "note"], rows, "narrow"),
  ];
}

// The calculation for the selected key, if its setting is known.
function oneKey(/** @type {Step} */ step, before, after) {
  const { scale, softcap, dropout } = shownTrace().settings;
  const calculation = {
    scaled: scale !== undefined && ` × ${precise(scale)} = `,
    capped: softcap !== undefined && `: ${precise(softcap)} × tanh(${number(before)} / ${precise(softcap)}) = `,
    dropped: dropout !== undefined && after !== 0 && ` ÷ (1 ${MINUS} ${precise(dropout)}) = `,
  }[step.name];
  if (!calculation || before === undefined) return [];
  return [make("p", { class: "sum" }, keyToken(keyOr()), " ", number(before), calculation, make("b", {}, number(after)))];
}

// ---- scores: product by product ------------------------------------------------------

function dotProduct(/** @type {Step} */ step) {
  const row = rowOf(step), result = row[keyOr()];
  const q = shownTrace().step("query")?.along("d", selection());
  const k = shownTrace().step("key")?.along("d", selection());
  const parts = [];
  if (q && k) {
    const products = q.map((value, i) => value * k[i]);
    const shown = ends(products.length, 10);
    const rest = products.filter((_, i) => !shown.includes(i));
    const line = (name, values, kind, end = "") => ({
      kind, cells: [name, ...shown.map((i) => (i === null ? end || "…" : number(values[i])))],
    });
    const left = sum(rest);
    parts.push(
      table("The dot product of this query and the selected key, feature by feature",
        ["feature", ...shown.map((i) => (i === null ? `${rest.length} more` : String(i)))], [
          line(["query ", queryToken(queryOr())], q),
          line(["key ", keyToken(keyOr())], k),
          line("product", products, "total", number(left)),
        ]),
      make("p", { class: "sum" },
        shown.map((i) => {
          const value = i === null ? left : products[i];
          return (value < 0 ? ` ${MINUS} ` : " + ") + number(Math.abs(value));
        }).join("").replace(/^ \+ /, "").replace(/^ − /, MINUS),
        " = ", make("b", {}, number(result))));
  } else {
    parts.push(paragraph("This page does not have the features of this key."));
  }
  const keys = elide(row.length, 12, keyOr());
  parts.push(table("The same for every key: the row of this query",
    ["query", ...keys.map((i) => (i === null ? "…" : keyToken(i)))], [{
      cells: [queryToken(queryOr()), ...keys.map((i) => (i === null ? "…" : number(row[i])))],
    }]));
  return parts;
}

// ---- weights: the exponentials and their sum -----------------------------------------

function exponentials(/** @type {Step} */ step) {
  const earlier = earlierPair(step);
  const after = rowOf(step), before = earlier && rowOf(earlier);
  const total = sum(after);
  if (before?.every((score) => score === -Infinity)) {
    return [paragraph("This query is fully masked, so every weight is 0.")];
  }
  if (!before) {
    const known = after.filter((weight) => weight !== undefined).length;
    const rows = largest(after, 12, after.findIndex((weight) => weight !== undefined));
    return [table(known < after.length ? `The ${known} largest weights of this query` : "The weights of this query",
      ["key", "weight", "share"],
      rows.map((i) => i === null ? gapRow(3) : { cells: [keyToken(i), number(after[i]), bar(after[i])] }), "narrow")];
  }
  const shown = largest(after, 12, keyOr());
  const rest = after.map((_, i) => i).filter((i) => !shown.includes(i));
  const add = (values) => sum(rest.map((i) => values[i]));
  const peak = Math.max(...before.filter((score) => !Number.isNaN(score)));
  const exps = before.map((score) => Math.exp(score - peak));
  const divisor = sum(exps);
  const rows = shown.map((i) => i === null ? gapRow(6) : {
    kind: [i === keyOr() ? "chosen" : "", before[i] === -Infinity ? "masked" : ""].join(" "),
    cells: [keyToken(i), number(before[i]), number(before[i] - peak), number(exps[i]),
      number(after[i]), bar(after[i])],
  });
  if (rest.length) {
    rows.push({ kind: "", cells: [count(rest.length, "more key"), "", "", number(add(exps)), number(add(after)), ""] });
  }
  rows.push({ kind: "total", cells: ["sum", "", "", number(divisor), number(total), ""] });
  const parts = [table("From scores to weights",
    ["key", "x", `x ${MINUS} max`, "exp", "÷ sum = weight", "share"], rows)];
  const sinkWeight = 1 - total;
  if (sinkWeight > 1e-4) {
    parts.push(paragraph(`The weights sum to ${number(total)}: a sink, which has no value, `,
      `takes the other ${number(sinkWeight)}. So the sum to divide by is ${number(divisor / total)}.`));
  }
  parts.push(make("p", { class: "sum" }, keyToken(keyOr()), " ",
    `exp(${number(before[keyOr()] - peak)}) / ${number(divisor / total)} = `,
    make("b", {}, number(after[keyOr()]))));
  return parts;
}

// ---- output: the weighted sum --------------------------------------------------------

function weightedSum(/** @type {Step} */ step) {
  const share = rowOf(shownTrace().used), values = shownTrace().step("value");
  const result = step.along("v", selection()) ?? [];
  const features = ends(result.length, 4);
  const cells = (row) => features.map((j) => (j === null ? "…" : row ? number(row[j]) : "?"));
  const shown = largest(share.map(Math.abs), 8, keyOr());
  const given = new Map(shown.filter((i) => i !== null).map((i) => [i, values?.along("v", selection({ k: i }))]));
  const product = (i) => given.get(i)?.map((value) => (share[i] === 0 ? 0 : share[i] * value));
  const rows = shown.map((i) => i === null ? gapRow(2 + 2 * features.length + 1) : {
    kind: i === keyOr() ? "chosen" : "",
    cells: [keyToken(i), number(share[i]), ...cells(given.get(i)), "=", ...cells(product(i))],
  });
  const rest = share.length - given.size;
  if (rest) {
    const sums = [...given.keys()].reduce(
      (left, i) => left.map((value, j) => value - (product(i)?.[j] ?? NaN)), result);
    rows.push({ kind: "", cells: [count(rest, "more key"), "", ...features.map(() => ""), "=",
      ...(sums.some(Number.isNaN) ? features.map(() => "…") : cells(sums))] });
  }
  rows.push({ kind: "total", cells: ["output", "", ...features.map(() => ""), "=", ...cells(result)] });
  const names = features.map((j) => (j === null ? "…" : `v ${j}`));
  return [table("Each value times its weight; the output is their sum",
    ["key", "weight ×", ...names, "=", ...names], rows)];
}
