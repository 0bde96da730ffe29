// The vectors of the selected head at its examples, on their principal components. A server computes them.

import { css, mixed } from "../colours.js";
import { errorWords, serverLines } from "../hosts/server_lines.js";
import { parse } from "../json.js";
import { byId, count, make, number, percent } from "../marks.js";
import { article } from "./examples.js";
import { element } from "./scatter.js";
import { chosen, head, survey, theme } from "./store.js";

/** @import { SurveyPart, SurveyVectorExample, SurveyVectors } from "../schema.d.ts" */

const PARTS = {
  q_unrotated: "queries, before rotation", q: "queries", k_unrotated: "keys, before rotation", k: "keys",
  v: "values", o: "outputs, before the output projection",
};
const ROTATED = ", rotated by position";
const AXES = [[0, 1], [0, 2], [1, 2]];
// Okabe and Ito 2008, for all colour vision; then brown and grey.
const INKS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442", "#999999", "#8b5a2b"];

/** What a colour shows: names of groups, or a number between 0 and 1.
 * @type {Record<string, {title: string, groups?: string[], of: (example: SurveyVectorExample, context: number[]) => any}>} */
const COLOURS = {
  looks_at: { title: "kind of key", groups: Object.keys(survey.key_kinds), of: (it) => it.looks_at },
  token_class: { title: "class of the query's token", groups: Object.keys(survey.classes), of: (it) => it.token_class },
  weight: { title: "largest weight", of: (it) => it.value },
  position: { title: "position of the query", of: (it, tokens) => it.query / Math.max(1, tokens.length - 1) },
};
const LETTER = { k: "key", k_unrotated: "key", v: "key" };

const results = /** @type {Map<number, SurveyVectors>} */ (new Map());
const shown = { part: "", of: "all", axes: 0, colour: "looks_at", only: "" };
let running = { at: -1, run: new AbortController() };

export function buildVectors() {
  const isServed = survey.host === "server";
  byId("vectors-about").textContent = isServed
    ? "The model reads whole contexts again, up to this layer, until it has 200 examples of this head or all. " +
      "Each is a query, and the key with its largest weight. Principal components are exact."
    : "Queries, keys, values and outputs of the examples need the model. To see their principal components: " +
      "clearhead serve --model DIR --survey OUT. In Python: survey.vectors(model, layer, head).pca().";
  if (!isServed) return;
  byId("vectors-compute").addEventListener("click", compute);
  const lists = /** @type {[string, string[][]][]} */ ([
    ["of", [["all", "all"], ["others", "not on the first token"]]],
    ["axes", AXES.map((pair, i) => [String(i), pair.map((c) => c + 1).join(" and ")])],
    ["colour", Object.entries(COLOURS).map(([name, { title }]) => [name, title])],
  ]);
  for (const [name, entries] of lists) {
    byId(`vectors-${name}`).append(...entries.map(([value, title]) => make("option", { value }, title)));
  }
  for (const name of ["part", "of", "axes", "colour"]) {
    byId(`vectors-${name}`).addEventListener("change", ({ target }) => {
      Object.assign(shown, { [name]: name === "axes" ? Number(target.value) : target.value, only: "" });
      drawVectors();
    });
  }
  new ResizeObserver(drawCloud).observe(byId("cloud"));
}

async function compute() {
  const { at } = chosen, { layer, head: number } = head();
  running.run.abort();
  const mine = running = { at, run: new AbortController() };
  drawVectors();
  say("Waiting for the model.");
  try {
    for await (const text of serverLines("vectors", { layer, head: number }, mine.run.signal)) {
      const line = parse(text);
      if (line.error) throw new Error(errorWords(line.error));
      if (line.progress) say(`Reading: ${line.progress[0]} of ${count(line.progress[1], "context")}.`);
      if (line.vectors) {
        results.set(at, line.vectors);
        say("");
        break;
      }
    }
  } catch (error) {
    if (!mine.run.signal.aborted) say(/** @type {Error} */ (error).message);
  }
  if (running === mine) running.at = -1;
  drawVectors();
}

const say = (text) => { byId("vectors-said").textContent = text; };

export function drawVectors() {
  if (survey.host !== "server") return;
  if (running.at >= 0 && running.at !== chosen.at) { // another head is selected
    running.run.abort();
    running.at = -1;
    say("");
  }
  const data = results.get(chosen.at), button = byId("vectors-compute");
  button.hidden = Boolean(data);
  button.disabled = running.at >= 0;
  button.textContent = `Compute for layer ${head().layer}, head ${head().head}`;
  byId("vectors").hidden = !data;
  if (!data) return;
  const names = data.parts.filter((it) => it.all).map((it) => it.name).sort((a, b) => Object.keys(PARTS).indexOf(a) - Object.keys(PARTS).indexOf(b));
  if (!names.includes(shown.part)) shown.part = names[0];
  const title = (name) => PARTS[name] + (names.includes(`${name}_unrotated`) ? ROTATED : "");
  byId("vectors-part").replaceChildren(...names.map((name) => make("option", { value: name }, title(name))));
  for (const name of ["part", "of", "axes", "colour"]) byId(`vectors-${name}`).value = shown[name];
  drawLegend(data);
  drawCloud();
  showExample(-1);
}

const partOf = (data) => /** @type {SurveyPart} */ (data.parts.find((it) => it.name === shown.part && it.all === (shown.of === "all")));
const examplesOf = (data) => /** @type {SurveyVectorExample[]} */ (data.examples.filter((it) => shown.of === "all" || it.keys[0]));
const tokensOf = (data, example) => data.contexts[example.context].tokens;

/** @param {SurveyVectors} data */
function drawLegend(data) {
  const { groups, of } = COLOURS[shown.colour], scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
  const swatch = (colour) => { const dot = make("i", {}); dot.style.background = colour; return dot; };
  const entries = groups
    ? groups.map((name, i) => ({ name, i, n: examplesOf(data).filter((it) => of(it, []) === name).length })).filter(({ n }) => n)
      .map(({ name, i, n }) => {
        const button = make("button", { type: "button", class: "quiet", "aria-pressed": String(shown.only === name) },
          swatch(INKS[i]), `${name} ${n}`);
        button.addEventListener("click", () => { shown.only = shown.only === name ? "" : name; drawVectors(); });
        return button;
      })
    : [swatch(css(mixed(scale, 0.15))), "0", swatch(css(mixed(scale, 1))), "1"];
  byId("legend").replaceChildren(...entries);
  const { shares, size } = partOf(data), { why_rotated: why, key_head: key } = data;
  byId("shares").textContent = `${count(examplesOf(data).length, "example")} of ${count(data.contexts.length, "context")}; ` +
    `vectors of ${size} numbers` + (LETTER[shown.part] ? ` of key head ${key}` : "") + ". " +
    (shares.length ? `Variance: ${shares.map((it, i) => `component ${i + 1} ${percent(it)}`).join(", ")}.` : "All vectors are equal.") +
    (why && "qk".includes(shown.part) ? ` ${why}` : "");
}

function drawCloud() {
  const data = results.get(chosen.at), frame = byId("cloud"), { clientWidth: width, clientHeight: height } = frame;
  if (!data || !width || !height) return;
  const { points, shares } = partOf(data), [a, b] = AXES[shown.axes], { groups, of } = COLOURS[shown.colour];
  const at = points.map((point) => [point[a] ?? 0, point[b] ?? 0]);
  // One scale for both axes, so that distances are those of the vectors.
  const most = [0, 1].map((i) => Math.max(...at.map((point) => Math.abs(point[i])), 1e-30));
  const scale = Math.min((width / 2 - 30) / most[0], (height / 2 - 26) / most[1]);
  const x = (value) => width / 2 + value * scale, y = (value) => height / 2 - value * scale;
  const inks = survey.inks.sequential[theme.isDark ? "dark" : "light"];
  const picture = element("svg", { width, height });
  picture.append(
    element("line", { x1: 0, x2: width, y1: y(0), y2: y(0) }), element("line", { x1: x(0), x2: x(0), y1: 0, y2: height }),
    ...(a in shares ? [element("text", { x: width - 4, y: y(0) - 5, "text-anchor": "end" }, `${a + 1}: ${percent(shares[a])}`)] : []),
    ...(b in shares ? [element("text", { x: x(0) + 5, y: 14 }, `${b + 1}: ${percent(shares[b])}`)] : []),
  );
  const examples = examplesOf(data), values = examples.map((example) => of(example, tokensOf(data, example)));
  const isDim = (i) => Boolean(shown.only && groups && values[i] !== shown.only);
  const order = values.map((_, i) => i).sort((i, j) => Number(isDim(j)) - Number(isDim(i)));
  for (const i of order) {
    const value = values[i];
    const fill = groups ? INKS[groups.indexOf(value)] : css(mixed(inks, 0.15 + 0.85 * value));
    const point = element("circle", { cx: x(at[i][0]), cy: y(at[i][1]), r: 5, fill, class: isDim(i) ? "dim" : "", "data-example": i });
    point.append(element("title", {}, words(data, examples[i])));
    point.addEventListener("pointerenter", () => showExample(i));
    point.addEventListener("click", () => showExample(i));
    picture.append(point);
  }
  frame.replaceChildren(picture);
}

/** The example in words. @param {SurveyVectors} data @param {SurveyVectorExample} example */
function words(data, example) {
  const tokens = tokensOf(data, example), text = (at) => `“${data.spelling[tokens[at]].trim()}”`;
  return `${text(example.query)} (${example.token_class}) looks at ${text(example.keys[0])} (${example.looks_at}), ` +
    `weight ${number(example.value, 2)}`;
}

function showExample(i) {
  const data = results.get(chosen.at);
  for (const point of byId("cloud").querySelectorAll("circle")) point.classList.toggle("shown", Number(point.dataset.example) === i);
  const same = data && i >= 0 ? partOf(data).points.filter((it) => String(it) === String(partOf(data).points[i])).length - 1 : 0;
  byId("vectors-example").replaceChildren(...(data && i >= 0
    ? [make("p", { class: "lead" }, words(data, examplesOf(data)[i]) + (same ? `; ${count(same, "other")} at the same point` : "")),
      article(examplesOf(data)[i], data)]
    : [make("p", { class: "hint" }, "Point at an example to see its text.")]));
}
