// An image whose patches are tokens: the image, and above it the weights of one query.

import { css, inkOn, mixed } from "../colours.js";
import { LEAST, drawShareBar, shareColour, shareInks, sideColour } from "../ink.js";
import { count, percent } from "../marks.js";
import { Scene, widthOf } from "../scene.js";
import { isByNorm, shades, sides, snapshot } from "../state.js";
import { chosen, store } from "../store.js";
import { wordLists } from "./text.js";

/** @import { Trace } from "../data.js" */
/** @import { Picture } from "../schema.d.ts" */

const NAME = 20, LINE = 26, GAP = 20, BELOW = 90, LISTED = 4, MOST_LINES = 4; // pixels; and keys in a list
const LISTS = 230; // pixels of the lists beside an image
const LEAST_PAIR = 520; // pixels in which the image and its weights are side by side
const FADED = 0.55, STRONGEST = 0.9; // of the image under the weights, and of the largest weight above it

// The weights of a query on the patches, and the largest of them. Registers are left out if that is chosen.
export function patchesOf(/** @type {Trace} */ trace, head, row) {
  const { before, rows, columns } = /** @type {Picture} */ (trace.picture), weights = row.slice(before, before + rows * columns);
  if (chosen.registers === "left out") for (const at of withRegisters(trace, head)) weights[at - before] = undefined;
  return { weights, top: Math.max(1e-9, ...weights.map((it) => it || 0)) };
}

export const REGISTERS = "Patches that the model uses as registers, with an outlying norm and much weight: leave them out of the maps";
export const registersOf = (/** @type {Trace} */ trace) => trace.picture?.registers ?? [];

// The registers, and the patches that share their weight.
const withRegisters = (/** @type {Trace} */ trace, head) =>
  new Set(registersOf(trace).flatMap((at) => trace.sharing(head, at)));

export function drawImage(width, height) {
  const scene = new Scene(width, height), shown = sides();
  const bottom = shown.length === 1 ? oneHead(scene, shown[0], width, height) : severalHeads(scene, shown, width, height);
  return Object.assign(scene, { height: Math.max(height, bottom), bottom });
}

// The image, in which one points at a query, beside the weights; on a narrow page only the weights.
function oneHead(scene, side, width, height) {
  const isPair = width >= LEAST_PAIR && !store.edited, columns = isPair ? 2 : 1;
  const wide = (width - GAP * (columns - 1)) / columns, lists = side.query === null ? 0 : 32 + 23 * LISTED;
  const row = rowOf(side), top = otherTokens(scene, side, row, 0, 0, width), room = height - BELOW - top;
  // The lists are beside the image if it is larger so.
  const beside = sizeIn(side.trace, (width - LISTS - GAP * columns) / columns, room), below = sizeIn(side.trace, wide,
    Math.max(room - lists, isPair ? 160 : Math.min(wide, 340)));
  const isBeside = isPair && lists && beside.cell > below.cell, size = isBeside ? beside : below;
  if (isPair) panel(scene, side, row, 0, top, size, false);
  const left = isPair ? size.width + GAP : 0, bottom = panel(scene, side, row, left, top, size, true);
  legend(scene, side, row, left, bottom + 8, size.width);
  const end = isBeside ? wordLists(scene, side, left + size.width + GAP, top, LISTS, true, LISTED)
    : wordLists(scene, side, 0, bottom + 66, width, false, LISTED);
  return Math.max(end, bottom + 66);
}

function severalHeads(scene, shown, width, height) {
  const across = Math.min(shown.length, Math.max(1, Math.floor(width / 200))), down = Math.ceil(shown.length / across);
  const wide = (width - GAP * (across - 1)) / across, high = (height - 40) / down - NAME - LINE - 58;
  const ends = shown.map((side, i) => {
    const size = sizeIn(side.trace, wide, Math.max(high, 120)), left = (i % across) * (wide + GAP);
    const top = Math.floor(i / across) * (size.height + NAME + LINE + 62);
    scene.text(side.name, left, top + 8, { bold: true, fill: sideColour(i), room: wide });
    const row = rowOf(side), at = otherTokens(scene, side, row, left, top + NAME, wide);
    const below = panel(scene, side, row, left, at, size, true);
    legend(scene, side, row, left, below + 8, wide);
    return below + 58;
  });
  return Math.max(...ends);
}

const rowOf = ({ trace, head, query }) => shades(trace, head, query);

function sizeIn(trace, width, height) {
  const { rows, columns } = trace.picture, cell = Math.max(4, Math.min(width / columns, height / rows));
  return { cell, width: cell * columns, height: cell * rows };
}

// The tokens that are not patches, with their weights. Returns the lower end.
function otherTokens(scene, side, row, x, top, width) {
  const { trace, query, key } = side, { before, rows, columns } = trace.picture;
  let left = x, line = 0;
  for (let at = 0; at < trace.size.k; at++) {
    if (at === before) at += rows * columns;
    if (at >= trace.size.k) break;
    const text = `${trace.keys[at]} ${row[at] === undefined ? "" : percent(row[at])}`, wide = widthOf(text, { size: 13 }) + 14;
    if (left + wide > x + width) [left, line] = [x, line + 1];
    if (line === MOST_LINES) break;
    const y = top + LINE * line;
    const colour = row[at] >= LEAST ? shareColour(row[at]) : null;
    scene.rect(left, y, wide, 20, { fill: colour ? css(colour) : undefined, stroke: query === at ? "mark" : "rule", line: query === at ? 2.5 : 1, radius: 4 });
    if (key === at) scene.rect(left, y, wide, 20, { stroke: "ink", line: 1.5, dash: [4, 3], radius: 4 });
    scene.text(text, left + wide / 2, y + 10, { size: 13, align: "center", fill: colour ? inkOn(colour) : "ink" });
    scene.target(left, y, wide, 20, side.back({ query: at, key: null }), trace.keys[at]);
    left += wide + 6;
  }
  return top + (trace.size.k > rows * columns ? LINE * (Math.min(line, MOST_LINES - 1) + 1) : 0);
}

// The image, plain or under the weights. Pointing at a patch of the plain one selects a query, and of the weights
// a key, if both are drawn. Returns the lower end.
function panel(scene, side, row, x, y, { cell, width, height }, hasWeights) {
  const { trace, head, query, key } = side, { before, rows, columns, image } = trace.picture;
  const pixels = side.from.image(image), [high, wide] = pixels.stored, colours = pixels.values;
  const { weights, top } = patchesOf(trace, head, row), paper = store.isDark ? 16 : 255;
  const inks = shareInks();
  scene.cells(x, y, width / wide, height / high, high, wide, (at) => {
    const [red, green, blue] = colours.subarray(3 * at, 3 * at + 3);
    if (!hasWeights) return [red, green, blue];
    const grey = 0.3 * red + 0.59 * green + 0.11 * blue, faded = paper + (grey - paper) * (1 - FADED);
    const patch = Math.floor(Math.floor(at / wide) * rows / high) * columns + Math.floor((at % wide) * columns / wide);
    const part = Math.sqrt((weights[patch] || 0) / top);
    return mixed(inks, 0.25 + 0.75 * part).map((channel) => Math.round(faded + (channel - faded) * STRONGEST * part));
  });
  const corner = (at) => [x + ((at - before) % columns) * cell, y + Math.floor((at - before) / columns) * cell];
  const framed = (at, ink) => {
    if (at === null || !trace.isPatch(at)) return;
    const tokens = trace.sharing(head, at), [left, above] = corner(tokens[0]), [right, below] = corner(tokens.at(-1));
    scene.rect(left - 1, above - 1, right - left + cell + 2, below - above + cell + 2, { ...ink, radius: 2 });
  };
  for (const at of registersOf(trace)) framed(at, { stroke: "ink", line: 1.5, dash: [2, 2] });
  framed(query, { stroke: "paper", line: 4.5 });
  framed(query, { stroke: "mark", line: 2.5 });
  if (hasWeights) framed(key, { stroke: "ink", line: 2, dash: [3, 2] });
  for (let at = before; at < before + rows * columns; at++) {
    const isRegister = registersOf(trace).includes(at), name = `${trace.keys[at]}${isRegister ? ", a register in all but name" : ""}`;
    const { length } = trace.sharing(head, at), shown = length > 1 ? `${name}\n${trace.nameOf(head, trace.keys, at)}` : name;
    const title = row[at] === undefined ? name : `${shown}: ${percent(length * row[at])}`;
    scene.target(...corner(at), cell, cell, side.back({ query: at, key: null }), hasWeights ? title : name);
  }
  return y + height;
}

// What the colours mean, and how much of the weight is on the image at all.
function legend(scene, side, row, x, y, width) {
  const { trace } = side, { before, rows, columns } = trace.picture, registers = registersOf(trace);
  const name = isByNorm(trace, side.head, side.query) ? "norm-weighted attention" : "weight";
  drawShareBar(scene, x, y, patchesOf(trace, side.head, row).top, Math.min(110, width / 2), name);
  const onAll = row.slice(before, before + rows * columns).reduce((sum, it) => sum + (it || 0), 0);
  const onThem = [...withRegisters(trace, side.head)].reduce((sum, at) => sum + (row[at] || 0), 0);
  scene.text(registers.length ? `${percent(onAll - onThem)} is on patches, ${percent(onThem)} on ${count(registers.length, "register")}`
    : `${percent(onAll)} is on the patches`, x, y + 38, { size: 12, fill: "soft", room: width });
}

export const hasImage = () => sides().every((side) => side.trace.picture) && Boolean(snapshot().data.images?.length);
