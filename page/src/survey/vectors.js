// The vectors of the selected head at its examples, on their principal components. A server computes them.

import { css, mixed } from "../colours.js";
import { errorWords, serverLines } from "../hosts/server_lines.js";
import { parse } from "../json.js";
import { byId, count, make, makeSvg, number, percent } from "../marks.js";
import { go } from "./address.js";
import { article } from "./examples.js";
import { headName } from "./findings.js";
import { listenToPoints, pointOf, showPoints } from "./points.js";
import { chosen, head, screen, survey, theme } from "./store.js";
import { COMPONENTS, EXAMPLES, SHADES, examplesOf, nameOf, partNames, partOf, setVectors, settleVectors, shadeOf, titleOf,
  vectorsOf } from "./vector_data.js";

/** @import { SurveyVectorExample, SurveyVectors } from "../schema.d.ts" */

// Okabe and Ito 2008, for all colour vision; then brown and grey.
const INKS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442", "#999999", "#8b5a2b"];
const LETTER = { k: "key", k_unrotated: "key", v: "key" };
const CHOICES = ["vectors", "examples", "components", "shade"];

let running = { at: -1, run: new AbortController() };

export function buildVectors() {
  const isServed = survey.host === "server";
  byId("vectors-about").textContent = isServed
    ? "The model reads whole contexts again, up to this layer, until it has 200 examples of this head or all. " +
      "Each is a query, and the key with its largest weight. Principal components are exact."
    : "Queries, keys, values and outputs of the examples need the model. To see their principal components: " +
      (survey.grid ? "" : "clearhead serve --model DIR --survey OUT. ") + "In Python: survey.vectors(model, layer, head).pca().";
  if (!isServed) return;
  byId("vectors-compute").addEventListener("click", show);
  const shades = Object.fromEntries(Object.entries(SHADES).map(([name, { title }]) => [name, title]));
  for (const [name, titles] of Object.entries({ examples: EXAMPLES, components: COMPONENTS, shade: shades })) offer(name, titles);
  for (const name of CHOICES) byId(`cloud-${name}`).addEventListener("change", ({ target }) => go({ [name]: target.value }));
  const nameOfNumber = (i) => nameOf(shown(), examplesOf(shown())[i]);
  listenToPoints(byId("cloud"), (i) => go({ example: nameOfNumber(i) }), showExample);
  new ResizeObserver(drawCloud).observe(byId("cloud"));
}

const offer = (name, titles) => byId(`cloud-${name}`).replaceChildren(
  ...Object.entries(titles).map(([value, title]) => make("option", { value }, title)));
const say = (text) => { byId("vectors-said").textContent = text; };

// The vectors of the selected head, if they are to be shown.
const shown = () => /** @type {SurveyVectors} */ (chosen.vectors ? vectorsOf(chosen.at) : undefined);

/** Computes the vectors that an address names, unless the page has them. */
export async function openVectors() {
  if (!chosen.vectors || !(vectorsOf(chosen.at) || await compute())) return;
  screen.misread.push(...settleVectors());
  screen.draw();
}

// Shows vectors of the selected head: those that were shown last, if it has them.
async function show() {
  if (!(vectorsOf(chosen.at) || await compute())) return;
  const names = partNames(vectorsOf(chosen.at)), last = byId("cloud-vectors").value;
  go({ vectors: names.includes(last) ? last : names[0] });
}

// Returns whether the page now has the vectors of the selected head.
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
        setVectors(at, line.vectors);
        say("");
        break;
      }
    }
  } catch (error) {
    if (!mine.run.signal.aborted) say(/** @type {Error} */ (error).message);
  }
  if (running !== mine) return false;
  running.at = -1;
  if (chosen.at === at && vectorsOf(at)) return true;
  drawVectors();
  return false;
}

export function drawVectors() {
  if (survey.host !== "server") return;
  if (running.at >= 0 && running.at !== chosen.at) { // another head is selected
    running.run.abort();
    running.at = -1;
    say("");
  }
  const data = shown(), button = byId("vectors-compute");
  button.hidden = Boolean(data);
  button.disabled = running.at >= 0;
  button.textContent = `${vectorsOf(chosen.at) ? "Show" : "Compute"} for ${headName(head())}`;
  byId("vectors").hidden = !data;
  if (!data) return;
  offer("vectors", Object.fromEntries(partNames(data).map((name) => [name, titleOf(data, name)])));
  for (const name of CHOICES) byId(`cloud-${name}`).value = chosen[name];
  drawLegend(data);
  drawCloud();
  showExample(-1);
}

/** @param {SurveyVectors} data */
function drawLegend(data) {
  const { groups } = SHADES[chosen.shade], scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
  const swatch = (colour) => { const dot = make("i", {}); dot.style.background = colour; return dot; };
  const names = examplesOf(data).map((it) => shadeOf(data, it));
  const entries = groups
    ? groups.map((name, i) => ({ name, i, n: names.filter((it) => it === name).length })).filter(({ n }) => n)
      .map(({ name, i, n }) => {
        const isOnly = chosen.group === name;
        const button = make("button", { type: "button", class: "quiet", "aria-pressed": String(isOnly) }, swatch(INKS[i]), `${name} ${n}`);
        button.addEventListener("click", () => go({ group: isOnly ? "" : name }));
        return button;
      })
    : [swatch(css(mixed(scale, 0.15))), "0", swatch(css(mixed(scale, 1))), "1"];
  byId("legend").replaceChildren(...entries);
  const { shares, size } = partOf(data), { why_rotated: why, key_head: key } = data;
  byId("shares").textContent = `${count(examplesOf(data).length, "example")} of ${count(data.contexts.length, "context")}; ` +
    `vectors of ${count(size, "number")}` + (LETTER[chosen.vectors] ? ` of key head ${key}` : "") + ". " +
    (shares.length ? `Variance: ${shares.map((it, i) => `component ${i + 1} ${percent(it)}`).join(", ")}.` : "All vectors are equal.") +
    (why && "qk".includes(chosen.vectors) ? ` ${why}` : "");
}

function drawCloud() {
  const data = shown(), frame = byId("cloud"), { clientWidth: width, clientHeight: height } = frame;
  if (!data || !width || !height) return;
  const { points, shares } = partOf(data), [a, b] = chosen.components.split(".").map((it) => Number(it) - 1);
  const at = points.map((point) => [point[a] ?? 0, point[b] ?? 0]);
  // One scale for both axes, so that distances are those of the vectors.
  const most = [0, 1].map((i) => Math.max(...at.map((point) => Math.abs(point[i])), 1e-30));
  const scale = Math.min((width / 2 - 30) / most[0], (height / 2 - 26) / most[1]);
  const x = (value) => width / 2 + value * scale, y = (value) => height / 2 - value * scale;
  const inks = survey.inks.sequential[theme.isDark ? "dark" : "light"];
  const picture = makeSvg("svg", { width, height });
  picture.append(
    makeSvg("line", { x1: 0, x2: width, y1: y(0), y2: y(0) }), makeSvg("line", { x1: x(0), x2: x(0), y1: 0, y2: height }),
    ...(a in shares ? [makeSvg("text", { x: width - 4, y: y(0) - 5, "text-anchor": "end" }, `${a + 1}: ${percent(shares[a])}`)] : []),
    ...(b in shares ? [makeSvg("text", { x: x(0) + 5, y: 14 }, `${b + 1}: ${percent(shares[b])}`)] : []),
  );
  const { groups } = SHADES[chosen.shade], examples = examplesOf(data), drawn = examples.map((example, i) => {
    const value = shadeOf(data, example), isChosen = nameOf(data, example) === chosen.example;
    const fill = groups ? INKS[groups.indexOf(value)] : css(mixed(inks, 0.15 + 0.85 * value));
    const title = `${wordsOf(data, example)}, in ${data.contexts[example.context].name}, position ${example.query}`;
    const point = pointOf(frame, i, [x(at[i][0]), y(at[i][1])], fill, title, isChosen);
    const isDim = Boolean(chosen.group) && value !== chosen.group;
    point.classList.toggle("dim", isDim);
    return { point, order: isChosen ? 2 : isDim ? 0 : 1 };
  });
  picture.append(...drawn.sort((one, other) => one.order - other.order).map(({ point }) => point));
  showPoints(frame, picture);
}

/** The example in words. @param {SurveyVectors} data @param {SurveyVectorExample} example */
function wordsOf(data, { context, query, keys, value, token_class: tokenClass, looks_at: kind }) {
  const { tokens } = data.contexts[context], text = (at) => `“${data.spelling[tokens[at]].trim()}”`;
  return `${text(query)} (${tokenClass}) looks at ${text(keys[0])} (${kind}), weight ${number(value, 2)}`;
}

// Shows an example by its number, or the selected one for -1.
function showExample(number) {
  const data = shown(), examples = examplesOf(data);
  const i = number < 0 ? examples.findIndex((it) => nameOf(data, it) === chosen.example) : number;
  const { points } = partOf(data), same = points.filter((it) => String(it) === String(points[i])).length - 1;
  byId("vectors-example").replaceChildren(...(i < 0
    ? [make("p", { class: "hint" }, "Point at an example to see its text; click to select it. Keys: arrows, Page Up and Page Down, Enter.")]
    : [make("p", { class: "lead" }, wordsOf(data, examples[i]) + (same ? `; ${count(same, "other")} at the same point` : "")),
      article(examples[i], data.contexts[examples[i].context], data)]));
}
