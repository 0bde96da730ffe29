// The map: a row for each query, a column for each key.

import { inkOn } from "../colours.js";
import { LEAST, drawHatchKey, drawSignedBar, drawWeightBar, shareColour, sideColour, signedColour } from "../ink.js";
import { MINUS, number } from "../marks.js";
import { Scene, widthOf } from "../scene.js";
import { largestAt, sides } from "../state.js";
import { chosen } from "../store.js";
import { wordLists } from "./text.js";
import { zoomedSide } from "./zoom.js";

/** @import { Trace } from "../data.js" */
/** @import { Step } from "../data.js" */
/** @import { Side } from "../state.js" */

const LARGEST_CELL = 80, DIGITS_FROM = 30; // pixels of the largest cell, and of the least with digits
const LABEL = 14; // pixels from one label to the next
const TITLE = 20; // pixels
const LEAST_BELOW = 180; // pixels of a map below other parts

// Blocked cells are minus infinity: in the step itself (in the maps of a report, too), or for weights in
// the step `masked`.
export function blockedIn(/** @type {Trace} */ trace, /** @type {Step} */ step, head, fine = true) {
  const masked = step.isShare && trace.step("masked");
  const { values } = (masked && masked.isExact(head) && (fine || !step.map) ? masked : step).grid(head, fine);
  return (cell) => values[cell] === -Infinity;
}

// The largest absolute value in a step, over all heads, so that they can be compared.
function limitOf(/** @type {Trace} */ trace, /** @type {Step} */ step) {
  if (step.limit) return step.limit;
  let limit = 0;
  for (let head = 0; head < trace.heads; head++) {
    if (step.hasMap(head)) for (const value of step.grid(head).values) {
      if (Number.isFinite(value) && Math.abs(value) > limit) limit = Math.abs(value);
    }
  }
  return (step.limit = limit || 1);
}

export function drawMap(width, height) {
  const scene = new Scene(width, height), zoomed = zoomedSide(), all = zoomed ? [zoomed] : sides(), bar = 34;
  const stepOf = (/** @type {Side} */ side) => side.trace.maps(side.head).find((it) => it.name === chosen.step) ?? side.trace.weights;
  if (chosen.difference && all.length === 2) {
    const isFine = all.every((side) => stepOf(side).isExact(side.head)); // else both are pooled alike
    const [a, b] = all.map((side) => stepOf(side).grid(side.head, isFine));
    const blocked = all.map((side) => blockedIn(side.trace, stepOf(side), side.head, isFine));
    const values = Float32Array.from(b.values, (value, i) => (value === a.values[i] ? 0 : value - a.values[i]));
    const both = (cell) => blocked[0](cell) && blocked[1](cell);
    const limit = values.reduce((most, value) => (Number.isFinite(value) ? Math.max(most, Math.abs(value)) : most), LEAST);
    mapPanel(scene, all[1], { ...b, values }, both, (value) => signedColour(value, limit), 0, 0, width, height - bar,
      `${all[1].name} minus ${all[0].name}`);
    drawSignedBar(scene, 0, height - 26, limit);
    drawHatchKey(scene, 220, height - 26);
    return scene;
  }
  const { columns, rows } = arrangement(all, stepOf, width, height - bar);
  const wide = (width - 16 * (columns - 1)) / columns, high = (height - bar) / rows;
  let hasBlocked = false;
  all.forEach((side, i) => {
    const step = stepOf(side), limit = step.isShare ? 1 : limitOf(side.trace, step);
    const grid = step.grid(side.head), isBlocked = blockedIn(side.trace, step, side.head);
    hasBlocked ||= grid.values.some((_, cell) => isBlocked(cell));
    mapPanel(scene, side, grid, isBlocked, (value) => (step.isShare ? shareColour(value) : signedColour(value, limit)),
      (i % columns) * (wide + 16), Math.floor(i / columns) * high, wide, high - 6, all.length > 1 || zoomed ? side.name : "");
  });
  const step = stepOf(all[0]);
  if (step.isShare) drawWeightBar(scene, 0, height - 26);
  else drawSignedBar(scene, 0, height - 26, limitOf(all[0].trace, step));
  const legend = hasBlocked ? drawHatchKey(scene, 220, height - 26) : 220;
  // If there is room beside the map and the legend: the row and the column of the query.
  const { x, cell, columns: cells } = scene.map, right = Math.max(x + cell * cells, legend) + 32;
  if (all.length === 1 && !zoomed && width - right >= 200) {
    const listed = Math.max(2, Math.min(6, Math.floor(((height - 10) / 3 - 32) / 23))); // of each of three lists
    wordLists(scene, all[0], right, 10, width - right, true, listed);
  }
  return scene;
}

// Adds the map of the head below a scene that has one side, if there is room.
export function withMap(/** @type {Scene} */ scene) {
  const [side, ...others] = sides(), top = scene.bottom + 12, room = scene.height - top - 6;
  if (others.length || chosen.difference || room < LEAST_BELOW) return scene;
  const { trace, head } = side, { weights } = trace;
  mapPanel(scene, side, weights.grid(head), blockedIn(trace, weights, head), shareColour, 0, top, scene.width, room,
    "All weights of this head: a row for each query, a column for each key");
  return scene;
}

// The rows and columns of maps with which they are largest.
function arrangement(all, stepOf, width, height) {
  const grids = all.map((side) => stepOf(side).grid(side.head));
  const cell = (columns, rows) => Math.min(...grids.map((it) =>
    Math.min((width / columns - 16) / it.columns, (height / rows - TITLE) / it.rows)));
  return all.map((_, i) => ({ columns: i + 1, rows: Math.ceil(all.length / (i + 1)) }))
    .reduce((best, it) => (cell(it.columns, it.rows) > cell(best.columns, best.rows) ? it : best));
}

function mapPanel(/** @type {Scene} */ scene, /** @type {Side} */ side, { rows, columns, values }, isBlocked, colourOf, x, y, width, height, title) {
  const { trace, query } = side, key = keyOf(side);
  const size = 13, above = title ? TITLE : 0;
  const some = (labels) => labels.filter((_, i) => i % Math.ceil(labels.length / 200) === 0 || i === labels.length - 1);
  const longest = (labels) => Math.min(110, 12 + Math.max(...some(labels).map((it) => widthOf(it.slice(0, 20), { size, bold: true }))));
  const bare = Math.min(width / columns, (height - above) / rows);
  let left = Math.min(longest(trace.queries), width * 0.25), head = Math.min(longest(trace.keys), height * 0.25);
  // Beside small maps, labels would take much of the room: the title has the query and the key.
  const isBare = title && bare < LABEL && Math.min((width - left) / columns, (height - above - head) / rows) < 0.8 * bare;
  if (isBare) [left, head] = [0, 0];
  const cellFor = (rowRanks, columnRanks) => {
    const cell = Math.min(LARGEST_CELL, (width - rowRanks * left) / columns, (height - columnRanks * head - above) / rows);
    return cell >= 2 ? Math.floor(2 * cell) / 2 : cell;
  };
  // Every label, in two ranks if necessary, if the cells stay nearly as large; else every second label,
  // every third, and so on.
  const plain = cellFor(1, 1), pairs = plain < LABEL ? [[2, 2], [2, 1], [1, 2]] : [];
  const [rowRanks, columnRanks] = pairs.map(([down, across]) => [down, across, cellFor(down, across)])
    .find(([, , size]) => 2 * size >= LABEL && size >= 0.8 * plain) ?? [1, 1];
  const cell = cellFor(rowRanks, columnRanks), isStrip = Math.max(rows, columns) > 2 * Math.min(rows, columns);
  // Cells are squares, but for a map that is much longer one way, whose lines would be thin.
  const stretched = (room, cells) => (isStrip ? Math.max(cell, Math.min(LABEL, room / cells)) : cell);
  const wide = stretched(width - rowRanks * left - LABEL / 2, columns), tall = stretched(height - columnRanks * head - above, rows);
  const [x0, y0] = [x + left * rowRanks, y + above + head * columnRanks];
  const pair = isBare && query !== null && key !== null ? `  ${trace.queries[query]} → ${trace.keys[key]}` : "";
  if (title) {
    scene.text(title + pair, x, y + 8, { bold: true, fill: chosen.difference ? "ink" : sideColour(side.colour), room: width });
  }
  scene.cells(x0, y0, wide, tall, rows, columns, (at) => (isBlocked(at) ? null : colourOf(values[at])));
  scene.rect(x0, y0, wide * columns, tall * rows, { stroke: "rule" });
  const at = trace.cellOf(query ?? 0, key ?? 0, { rows, columns });
  // The label under the pointer is always drawn, and replaces labels that it overlaps.
  const labelled = (cells, ranks, here, pixels, draw) => {
    const every = ranks === 2 ? 1 : Math.max(1, Math.ceil(LABEL / pixels));
    for (let cell = 0; cell < cells; cell++) {
      const isHere = cell === here, rank = ranks === 2 ? cell % 2 : 0;
      const gives = here !== null && (ranks === 1 || (cell - here) % 2 === 0) && Math.abs(cell - here) * pixels < LABEL;
      if (isHere || (cell % every === 0 && !gives)) draw(cell, rank, isHere);
    }
  };
  if (!isBare) labelled(rows, rowRanks, query === null ? null : at.row, tall, (row, rank, bold) => {
    const middle = y0 + (row + 0.5) * tall;
    if (rank) scene.rect(x0 - left - 2, middle - 0.5, left - 2, 1, { fill: "rule" });
    const position = bold && query !== null ? query : trace.rowSpan(row, rows)[0];
    scene.text(trace.queries[position], x0 - 6 - rank * left, middle, { size, align: "right", bold, room: left - 8 });
  });
  if (!isBare) labelled(columns, columnRanks, key === null ? null : at.column, wide, (column, rank, bold) => {
    const middle = x0 + (column + 0.5) * wide;
    if (rank) scene.rect(middle - 0.5, y0 - head - 2, 1, head - 2, { fill: "rule" });
    const position = bold && key !== null ? key : trace.columnSpan(column, columns)[0];
    scene.text(trace.keys[position], middle, y0 - 6 - rank * head, { size, turn: -90, bold, room: head - 8 });
  });
  if (Math.min(wide, tall) >= DIGITS_FROM) {
    for (let cell = 0; cell < values.length; cell++) {
      if (isBlocked(cell) || Math.abs(values[cell]) < LEAST) continue;
      scene.text(Number.isNaN(values[cell]) ? "NaN" : short(values[cell]), x0 + (cell % columns + 0.5) * wide,
        y0 + (Math.floor(cell / columns) + 0.5) * tall, { size: 12, align: "center", fill: inkOn(colourOf(values[cell])) });
    }
  }
  // The crosshair: the row of the query, the column of the key.
  if (query !== null) scene.rect(x0, y0 + at.row * tall, wide * columns, tall, { stroke: "mark", line: 2 });
  if (key !== null) scene.rect(x0 + at.column * wide, y0, wide, tall * rows, { stroke: "mark", line: 1, dash: [3, 2] });
  scene.map = { x: x0, y: y0, cell: wide, tall, rows, columns, values };
  const stored = trace.stored(side.head);
  for (let row = 0; row < rows; row++) {
    const isIn = (query) => trace.cellOf(query, 0, { rows, columns }).row === row;
    const queryAt = stored.find(isIn) ?? trace.rowSpan(row, rows)[0];
    const keyAt = (px) => trace.columnSpan(Math.max(0, Math.min(columns - 1, Math.floor((px - x0) / wide))), columns)[0];
    scene.targets.push({ x: x0, y: y0 + row * tall, width: wide * columns, height: tall,
      of: (px) => side.back({ query: queryAt, key: keyAt(px) }),
      titleAt: (px) => `query ${side.from.title(trace.queries, queryAt)}\nkey ${side.from.title(trace.keys, keyAt(px))}` });
  }
}

// The selected key, or that of the query's largest weight.
function keyOf(/** @type {Side} */ { trace, head, query, key }) {
  if (key !== null || query === null) return key;
  const row = trace.row(trace.used, head, query);
  return row ? largestAt(row) : null;
}

const short = (value) =>
  (Math.abs(value) < 100 ? value.toFixed(2).replace(/^(-?)0\./, "$1.").replace("-", MINUS) : number(value, 0));
