// The views and their tabs, and the drawing of all that depends on the selection.

import { drawKeep } from "./controls.js";
import { drawHeadLine, drawHeads, fillHeads } from "./heads.js";
import { keyToken, queryToken } from "./labels.js";
import { button, byId, count, make, percent, precise } from "./marks.js";
import { REGISTERS, drawImage, hasImage, registersOf } from "./pictures/image.js";
import { drawLines } from "./pictures/lines.js";
import { drawMap, withMap } from "./pictures/map.js";
import { drawNumbers, elsewhere, fillStages, isLong } from "./pictures/numbers.js";
import { NORM_WEIGHTED, drawSentence, drawStrip, drawText, fillStrip } from "./pictures/text.js";
import { drawWalk, walkOptions } from "./pictures/walk.js";
import { drawWhy } from "./pictures/why.js";
import { canZoom, isZoomed, zoomButton, zoomedWeight } from "./pictures/zoom.js";
import { paint } from "./scene.js";
import { VIEWS, canDiffer, go, areNormsKnown, keyOr, placeName, queryOr, shownTrace, snapshot, state } from "./state.js";
import { chosen, narrow, pageData, screen, store, walk } from "./store.js";

// The title and the description of a view's tab, and the function that draws its scene.
export const TABS = {
  text: { word: "Text", says: "The words, shaded by the weights of the selected one",
    draw: (width, height) => (hasImage() ? drawImage(width, height) : withMap(drawText(width, height))) },
  lines: { word: "Lines", says: "A line from each word to each word it looks at", draw: drawLines },
  map: { word: "Map", draw: drawMap,
    says: "All weights: a row for each query, a column for each key" },
  numbers: { word: "Numbers", says: "Every step of one query, with all its numbers" }, // no picture
  walk: { word: "Walk", says: "The same steps as an animation", draw: drawWalk },
  why: { word: "Why", says: "What wrote the query and the key of one weight" }, // no picture
};

export function draw() {
  // First, because a narrow page hides the strip beside the picture of the text.
  for (const tab of byId("views").children) {
    const isChosen = tab.dataset.view === chosen.view;
    if (tab.dataset.view === "text") tab.textContent = hasImage() ? "Image" : TABS.text.word;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
  }
  drawStrip();
  drawSentence();
  drawShading();
  drawMisread();
  drawHeads();
  drawHeadLine();
  screen.drawControls();
  byId("beside").setAttribute("aria-pressed", store.isAdding);
  byId("beside").textContent = store.isAdding ? "Done" : "Compare";
  drawKeep();
  drawOptions();
  drawPicture();
}

// Draws what depends on the snapshot: heads, labels, words.
export function fillAll() {
  if (store.current.data.about) byId("about").textContent = store.current.data.about;
  fillStrip();
  fillHeads();
  describeWhatIsLeftOut();
}

export function drawPicture() {
  const { view } = chosen, { clientWidth: width, clientHeight } = byId("view");
  const height = narrow.matches ? parseFloat(getComputedStyle(byId("view")).minHeight) : clientHeight;
  if (!width || !height) return;
  store.picture = TABS[view].draw?.(width, height - 4) ?? null;
  byId("frame").hidden = !store.picture;
  byId("panel").hidden = Boolean(store.picture);
  if (view === "numbers") drawNumbers();
  else if (view === "why") drawWhy();
  else if (!store.picture) {
    byId("panel").replaceChildren(...(shownTrace().steps_withheld ? [make("p", {}, `The walk shows queries, keys and values. ${shownTrace().steps_withheld}`)]
      : elsewhere(shownTrace().step("scores") ?? shownTrace().weights)));
  }
  else {
    const canvas = byId("picture");
    canvas.style.width = `${store.picture.width}px`;
    canvas.style.height = `${store.picture.height}px`;
    paint(canvas, store.picture);
    canvas.setAttribute("aria-label", `${TABS[view].word} of ${byId("head-title").textContent}. ` +
      `${byId("sentence").textContent} Arrow keys move the query and the key.`);
  }
  drawReading();
  if (view === "walk" && !shownTrace().steps_withheld) {
    byId("scrub").value = walk.at;
    byId("play").textContent = walk.isPlaying ? "Pause" : "Play";
  }
}

// The numbers of the pair under the pointer, or of the selected pair.
function drawReading() {
  const trace = shownTrace(), { head, query } = state();
  const line = byId("reading");
  byId("why").hidden = !VIEWS.includes("why") || chosen.view === "why" || chosen.query === null;
  if (query === null && !["walk", "numbers", "why"].includes(chosen.view)) {
    line.replaceChildren(make("span", { class: "soft" }, "Point at a word to read its numbers."));
    return;
  }
  const at = queryOr(), key = keyOr();
  const numbers = trace.pairs.filter((step) => !(step.name === "masked" && trace.row(step, head, at)?.[key] > -Infinity))
    .map((step) => [step.name, trace.row(step, head, at)?.[key] ??
      (step.name === "weights" ? zoomedWeight(at, key) : undefined)])
    .filter(([, value]) => value !== undefined)
    .flatMap(([name, value], i) => [i ? make("span", { class: "soft" }, "·") : "",
      make("span", { "data-step": name, class: name === "weights" ? "shown" : "", title: stepTitle(trace.step(name)) },
        `${OF_PAIR[name] ?? name} `, make("b", {}, precise(value)))]);
  line.replaceChildren(make("strong", {}, queryToken(at)), make("span", { class: "arrow" }, " → "),
    make("strong", {}, keyToken(key)), ...numbers);
  if (trace.blocked(head, at)[key]) line.append(make("span", { class: "soft" }, "may not look"));
}

// The names of steps, for one query and one key.
const OF_PAIR = { scores: "score", scaled: "scaled score", capped: "capped score", biased: "score with bias",
  masked: "masked score", weights: "weight", dropped: "weight after dropout" };

// The meaning of a step's number, for one query and one key.
const STEP_WORDS = {
  scores: "query times key: the products of their features, added up",
  scaled: "the score times a scale, by default 1 divided by the square root of the head size",
  capped: "limited to the soft cap",
  biased: pageData.model ? "plus the learned number for this distance" : "plus a number for this query and key",
  masked: "−∞ where the query may not look at the key",
  weights: "the weight of this key for the query; the weights of all keys sum to 1",
  dropped: "the weight after dropout: 0, or scaled up",
};

function stepTitle({ name, formula, why }) {
  const words = STEP_WORDS[name];
  return [words && `${name}: ${words}`, formula && `${name} = ${formula}`, why].filter(Boolean)
    .map((it) => it.replace(/\.$/, "")).join(".\n") + ".";
}

// The controls of a view, on the line above the picture.
function drawOptions() {
  const { view } = chosen, options = byId("options"), parts = [];
  const wanted = JSON.stringify([view, chosen.step, chosen.difference, canDiffer(), chosen.stage,
    shownTrace().steps.map((it) => it.name), shownTrace().maps(state().head).length, chosen.others, chosen.threshold, canZoom(), isZoomed()]);
  if (options.wanted === wanted) return;
  options.wanted = wanted;
  if (canDiffer() && TABS[view].draw && view !== "walk") {
    parts.push(button({ id: "difference", "aria-pressed": chosen.difference },
      () => go({ difference: !chosen.difference }), "Difference"));
  }
  if (view === "lines") {
    const range = make("input", { type: "range", id: "threshold", min: 0.01, max: 0.5, step: 0.01, value: chosen.threshold,
      input: () => go({ threshold: Number(range.value) }) });
    parts.push(make("label", {}, "Lines from ", range, make("output", { for: "threshold" }, ` ${percent(chosen.threshold)}`)));
  }
  const maps = shownTrace().maps(state().head);
  if (view === "map" && maps.length > 1) {
    const select = make("select", { id: "step", change: () => go({ step: select.value }) }, maps.map((step) =>
      make("option", { value: step.name, selected: step.name === chosen.step }, step.name)));
    parts.push(make("label", {}, "Show ", select));
  }
  if (view === "map" && (canZoom() || isZoomed())) parts.push(zoomButton());
  if (view === "numbers") parts.push(fillStages());
  if (view === "walk" && !shownTrace().steps_withheld) parts.push(...walkOptions());
  if (store.isAdding || chosen.others.length) parts.push(besideWords());
  const focused = options.contains(document.activeElement) ? document.activeElement?.id : null;
  if (focused === "threshold") {
    options.querySelector("output").textContent = ` ${percent(chosen.threshold)}`;
    return;
  }
  options.replaceChildren(...parts);
  if (focused) byId(focused)?.focus();
}

function besideWords() {
  const words = chosen.others.length ? `with ${chosen.others.map((it) => placeName(...it)).join(", ")}`
    : "Choose heads to show beside this one, then press Done.";
  const none = button({ class: "quiet" },
    () => { store.isAdding = false; go({ others: [], difference: false }); }, "End the comparison");
  return make("span", { class: "soft beside" }, words, " ", ...(chosen.others.length ? [none] : []));
}

// The switch between weights and norm-weighted attention; if this is unknown, the reason. And that of registers.
function drawShading() {
  const trace = shownTrace(), { head, query } = state(), isKnown = areNormsKnown(trace, head, query);
  const named = (by) => make("button", { type: "button", "data-by": by, "aria-pressed": chosen.by === by,
    title: by === "weight" ? "The attention weights of the selected token, which sum to 1" : NORM_WEIGHTED }, by);
  byId("shading").hidden = !trace.isOneText;
  byId("shading").title = isKnown ? "" : `No norm-weighted attention: ${trace.normsWithheld}`;
  const registers = registersOf(trace), isWithout = chosen.registers === "left out";
  const by = `${isKnown} ${chosen.by} ${registers} ${isWithout} ${narrow.matches}`;
  if (byId("shading").by === by) return;
  byId("shading").by = by;
  const focused = /** @type {HTMLElement} */ (document.activeElement)?.dataset.by;
  byId("shading").replaceChildren(registers.length && narrow.matches ? "" : "Shaded by ", ...(isKnown ? [named("weight"), named("norm-weighted")] : ["weight"]));
  if (registers.length) byId("shading").append(" ", make("button", { type: "button", "data-by": "registers", "aria-pressed": isWithout,
    title: REGISTERS }, `without ${count(registers.length, "register")}`));
  if (focused) byId("shading").querySelector(`[data-by=${focused}]`)?.focus();
}

function drawMisread() {
  const { misread } = store, { layer, head } = chosen;
  byId("misread").hidden = misread.length === 0;
  byId("misread").textContent = misread.length === 0 ? ""
    : `This page does not have these parts of the address: ${misread.join("; ")}. It shows ${placeName(layer, head)}.`;
}

function describeWhatIsLeftOut() {
  const trace = shownTrace(), sentences = [];
  if (trace.block) {
    const [high, wide] = trace.block;
    sentences.push(`This text is long. Each cell of a map is the largest of ${high} × ${wide} numbers.`);
    if (trace.kept.length < trace.queries.length) {
      sentences.push(`The page has exact numbers for ${trace.kept.length} of ` +
        `${count(trace.queries.length, "query", "queries")}, evenly spaced.`);
    }
  }
  if (trace.links) {
    const queries = trace.kept.length === trace.queries.length ? "each query"
      : `${trace.kept.length} of ${count(trace.queries.length, "query", "queries")}`;
    const all = [...snapshot().places()].length, exact = [...snapshot().exactHeads()];
    const isExact = (it) => exact.some(([layer, head]) => layer === it.layer && head === it.head), acting = [...snapshot().findings.values()].filter((it) => it.roles.length);
    const which = exact.length === all ? "every head" : `${exact.length} of ${count(all, "head")}` + (acting.length && acting.every(isExact) ? ", all those with a role" : "");
    const others = store.source?.can.steps && !isLong(trace) ? "It computes the others for Numbers and Walk."
      : store.source?.can.text || pageData.images ? "" : "clearhead serve computes the others.";
    const part = trace.blocksOf() ? `a token or a square of ${trace.picture.block} × ${trace.picture.block} patches` : "the mean of a part";
    if (exact.length) sentences.push(`The page has every step of ${which}.`);
    if (exact.length < all) sentences.push(`${exact.length ? "For the other heads it" : isLong(trace) ? "The text is long: the page" : "To stay small, the page"} has a map of ` +
      `${trace.bins.join(" × ")} cells, each ${part}, and the ${trace.links.n} largest weights of ${queries}.`, others);
  }
  if (trace.size.b > 1) sentences.push(`The first of ${trace.size.b} sequences is shown.`);
  byId("left-out").textContent = sentences.filter(Boolean).join(" ");
  byId("left-out").hidden = sentences.length === 0;
}
