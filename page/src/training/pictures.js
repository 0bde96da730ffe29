// Three pictures of a metric: a line for each head, a row of a heat map for each head, and all heads at one step.

import { css, mixed } from "../colours.js";
import { byId, make, makeSvg, number } from "../marks.js";
import { drawColourScale, tick, ticksBetween } from "../ticks.js";
import { chosen, findings, go, indexOf, names, range, run, screen, valueAt } from "./store.js";

const SPACE = { left: 48, right: 52, top: 16, bottom: 22 }, NEAR = 30; // pixels from a line to the pointer
const FEW = 12; // layers whose heads have large cells
const THIN = 6; // pixels of a row of the heat map
const NAMED = 4; // lines with a name, besides the selected one
const last = run.steps.length - 1;

const colourOf = (value) => {
  const [low, high] = range();
  return Number.isFinite(value) ? css(mixed(run.inks.sequential[screen.isDark ? "dark" : "light"],
    high > low ? (value - low) / (high - low) : 0.5)) : null;
};
// The place of a step, by its number, and by its index.
const placeOf = (number, width) => SPACE.left + (last ? (number - run.steps[0]) / (run.steps[last] - run.steps[0]) : 0.5) *
  (width - SPACE.left - SPACE.right);
const xOf = (step, width) => placeOf(run.steps[step], width);
// The step at a place, the nearest one.
const stepAt = (x, width) => {
  const away = run.steps.map((_, i) => Math.abs(xOf(i, width) - x));
  return away.indexOf(Math.min(...away));
};
export const reading = (head, step) => `${names[head]}, step ${run.steps[step]}: ${chosen.metric.replaceAll("_", " ")} ${
  number(valueAt(step, head), 3)}`;

/** Listens to a picture. `placeAt` returns the head and the step at a place, or null. */
function listen(frame, placeAt) {
  const at = (event) => {
    const { left, top } = frame.getBoundingClientRect();
    return placeAt(event.clientX - left, event.clientY - top, frame.clientWidth, frame.clientHeight);
  };
  frame.addEventListener("pointermove", (event) => point(at(event)));
  frame.addEventListener("pointerleave", () => point(null));
  frame.addEventListener("click", (event) => {
    const place = at(event);
    if (place) go(place);
  });
}

// Names the head at the pointer, and shows its line and its cell.
function point(place) {
  byId("reading").textContent = place ? reading(place.head, place.step) : reading(chosen.head, chosen.step);
  byId("lines").querySelector(".active")?.remove();
  if (place) byId("lines").firstChild?.append(makeSvg("path", { class: "active", d: lineOf(place.head) }));
  for (const cell of byId("frame").querySelectorAll(".active")) cell.classList.remove("active");
  if (place) byId(`cell-${place.head}`).classList.add("active");
}

export function buildPictures() {
  listen(byId("lines"), (x, y, width, height) => {
    const step = stepAt(x, width), up = upOf(height);
    const away = names.map((_, head) => Math.abs(up(valueAt(step, head)) - y)).map((it) => (Number.isNaN(it) ? Infinity : it));
    const least = Math.min(...away);
    return least < NEAR ? { head: away.indexOf(least), step } : null;
  });
  listen(byId("cells"), (x, y, width, height) => {
    const head = Math.floor(y / (height - SPACE.bottom) * names.length);
    return head < names.length && x >= SPACE.left - 4 && x <= width - SPACE.right + 4 ? { head, step: stepAt(x, width) } : null;
  });
  buildFrame();
  new ResizeObserver(() => screen.draw()).observe(byId("lines"));
}

export function drawPictures() {
  drawLines();
  drawCells();
  const [low, high] = range();
  if (low <= high) drawColourScale(low, high, colourOf);
  else byId("colour-scale").replaceChildren("no number");
  drawStep();
}

// ---- lines -----------------------------------------------------------------------------------

const upOf = (height) => {
  const ticks = ticksBetween(...range()), [bottom, top] = [ticks[0], ticks[ticks.length - 1]];
  return (value) => height - SPACE.bottom - (value - bottom) / (top - bottom) * (height - SPACE.top - SPACE.bottom);
};

// The line of a head, with a gap where it has no number.
function lineOf(head) {
  const { clientWidth: width, clientHeight: height } = byId("lines"), up = upOf(height);
  let isDown = false, d = "";
  for (let step = 0; step <= last; step++) {
    const value = valueAt(step, head), at = `${xOf(step, width).toFixed(1)} ${up(value).toFixed(1)}`;
    if (Number.isFinite(value)) d += isDown ? `L${at}` : `M${at}h0.01`; // a dot for a number between gaps
    isDown = Number.isFinite(value);
  }
  return d;
}

// The heads that changed most, the largest change first.
function changed() {
  const change = names.map((_, head) => {
    const values = run.steps.map((_, step) => valueAt(step, head)).filter(Number.isFinite);
    return values.length ? Math.max(...values) - Math.min(...values) : -1;
  });
  return names.map((_, head) => head).sort((a, b) => change[b] - change[a]);
}

function drawLines() {
  const frame = byId("lines"), { clientWidth: width, clientHeight: height } = frame;
  if (!width || !height) return;
  const up = upOf(height), picture = makeSvg("svg", { width, height });
  for (const value of ticksBetween(...range())) {
    picture.append(makeSvg("line", { x1: SPACE.left, x2: width - SPACE.right, y1: up(value), y2: up(value) }),
      makeSvg("text", { x: SPACE.left - 6, y: up(value) + 4, "text-anchor": "end" }, tick(value)));
  }
  drawSteps(picture, width, height);
  for (let head = 0; head < names.length; head++) picture.append(makeSvg("path", { class: "line", d: lineOf(head) }));
  picture.append(makeSvg("path", { class: "chosen", d: lineOf(chosen.head) }), makeSvg("line", { class: "now" }));
  const rows = /** @type {number[]} */ ([]);
  for (const head of [chosen.head, ...changed().slice(0, NAMED)]) {
    const y = up(valueAt(last, head)) + 4;
    if (!Number.isFinite(y) || rows.some((it) => Math.abs(it - y) < 14)) continue;
    rows.push(y);
    picture.append(makeSvg("text", { class: head === chosen.head ? "name" : "", x: width - SPACE.right + 5, y }, names[head]));
  }
  for (const { sentence, head, step } of marks()) {
    const x = xOf(step, width), mark = makeSvg("path", { class: "mark", d: `M${x - 5} 2h10l-5 9z` }, makeSvg("title", {}, sentence));
    mark.addEventListener("click", (event) => {
      event.stopPropagation();
      go({ step, ...(head === null ? {} : { head }) });
    });
    picture.append(mark);
  }
  frame.replaceChildren(picture);
}

// The findings and alarms of the metric that have a step, with its index.
const marks = () => findings.filter((it) => it.metric === chosen.metric && it.step !== null)
  .map((it) => ({ ...it, step: indexOf(/** @type {number} */ (it.step)) }));

function drawSteps(picture, width, height) {
  for (const step of ticksBetween(run.steps[0], run.steps[last], width < 500 ? 3 : 6)) {
    if (step < run.steps[0] || step > run.steps[last]) continue;
    picture.append(makeSvg("text", { x: placeOf(step, width), y: height - 6, "text-anchor": "middle" }, step.toLocaleString("en")));
  }
}

// ---- heat map --------------------------------------------------------------------------------

function drawCells() {
  const frame = byId("cells"), { clientWidth: width, clientHeight: height } = frame, tall = (height - SPACE.bottom) / names.length;
  if (!width || !height) return;
  const canvas = make("canvas"), pen = canvas.getContext("2d"), ratio = devicePixelRatio || 1;
  const size = [width - SPACE.left - SPACE.right, height - SPACE.bottom];
  [canvas.width, canvas.height] = size.map((it) => it * ratio);
  [canvas.style.width, canvas.style.height, canvas.style.left] = [...size, SPACE.left].map((it) => `${it}px`);
  pen.scale(ratio, ratio);
  pen.translate(-SPACE.left, 0);
  const edges = run.steps.map((_, i) => (i ? (xOf(i - 1, width) + xOf(i, width)) / 2 : xOf(0, width)));
  edges.push(xOf(last, width));
  if (!last) [edges[0], edges[1]] = [SPACE.left, width - SPACE.right];
  for (let step = 0; step <= last; step++) {
    for (let head = 0; head < names.length; head++) {
      const colour = colourOf(valueAt(step, head));
      if (!colour) continue;
      pen.fillStyle = colour;
      pen.fillRect(edges[step], head * tall, edges[step + 1] - edges[step] + 0.5, tall + 0.5);
    }
  }
  const picture = makeSvg("svg", { width, height });
  drawSteps(picture, width, height);
  let above = -Infinity; // the label before
  run.heads.forEach(([layer, number], head) => {
    const y = Math.max(10, (head + 0.5) * tall + 4), isNew = head === 0 || run.heads[head - 1][0] !== layer;
    if (isNew && head) picture.append(makeSvg("line", { class: "layer", x1: SPACE.left - 4, x2: width - SPACE.right, y1: head * tall, y2: head * tall }));
    if (y - above < 13 || !(isNew || tall >= 13)) return;
    picture.append(makeSvg("text", { x: SPACE.left - 6, y, "text-anchor": "end" }, tall >= 13 ? `L${layer}H${number}` : `L${layer}`));
    above = y;
  });
  for (const { sentence, head, step } of marks()) {
    if (head !== null) picture.append(makeSvg("circle", { class: "mark", cx: xOf(step, width), cy: (head + 0.5) * tall, r: 4 }, makeSvg("title", {}, sentence)));
  }
  const [from, wide] = tall < THIN ? [SPACE.left - 4, 2] : [SPACE.left, width - SPACE.left - SPACE.right]; // a frame would cover a thin row
  picture.append(makeSvg("rect", { class: "row", x: from, y: chosen.head * tall, width: wide, height: tall }),
    makeSvg("line", { class: "now" }), makeSvg("text", { class: "name", x: width - SPACE.right + 5, y: (chosen.head + 0.5) * tall + 4 }, names[chosen.head]));
  frame.replaceChildren(canvas, picture);
}

// ---- all heads at one step --------------------------------------------------------------------

function buildFrame() {
  const frame = byId("frame"), layers = [...new Set(run.heads.map(([layer]) => layer))];
  const columns = Math.max(...run.heads.map(([, head]) => head)) + 1;
  frame.style.setProperty("--columns", String(columns));
  frame.classList.toggle("many", layers.length > FEW);
  byId("cells").style.setProperty("--heads", String(names.length));
  frame.replaceChildren(...layers.flatMap((layer) => [make("span", {}, `L${layer}`),
    ...Array.from({ length: columns }, (_, column) => {
      const head = run.heads.findIndex(([a, b]) => a === layer && b === column);
      if (head < 0) return make("i");
      return make("button", { type: "button", id: `cell-${head}`, "data-head": head, click: () => go({ head }),
        pointerenter: () => point({ head, step: chosen.step }), pointerleave: () => point(null),
        focus: () => point({ head, step: chosen.step }), blur: () => point(null) });
    })]));
  frame.addEventListener("keydown", (event) => {
    const [layer, number] = run.heads[chosen.head], at = layers.indexOf(layer);
    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
    const head = run.heads.findIndex(([a, b]) => a === layers[at + down] && b === number + right);
    if (!(down || right) || head < 0) return;
    event.preventDefault();
    go({ head });
    byId(`cell-${head}`).focus();
  });
}

/** Draws what changes with the step: all heads at this step, and the line at it. */
export function drawStep() {
  const { step } = chosen;
  byId("frame-title").textContent = `All heads at step ${run.steps[step].toLocaleString("en")}`;
  byId("step").value = String(step);
  byId("step").setAttribute("aria-valuetext", `step ${run.steps[step]}`);
  byId("out-step").textContent = `step ${run.steps[step].toLocaleString("en")}`;
  for (const cell of byId("frame").querySelectorAll("button")) {
    const head = Number(cell.dataset.head);
    cell.style.background = colourOf(valueAt(step, head)) ?? "";
    cell.setAttribute("aria-label", reading(head, step));
    cell.title = reading(head, step);
    cell.setAttribute("aria-pressed", String(head === chosen.head));
    cell.tabIndex = head === chosen.head ? 0 : -1; // arrow keys reach the others
  }
  for (const line of document.querySelectorAll("line.now")) {
    const { clientWidth: width, clientHeight: height } = /** @type {Element} */ (line.closest("div"));
    for (const [name, value] of Object.entries({ x1: xOf(step, width), x2: xOf(step, width), y1: 0, y2: height - SPACE.bottom })) {
      line.setAttribute(name, String(value));
    }
  }
  point(null);
}
