// Pictures. A scene is a list of shapes, which is painted on a canvas or, for export, written as SVG.
// Colours are names of the theme ("ink", "accent") or CSS colours.

import { css } from "./colours.js";
import { make, makeSvg } from "./marks.js";
import { store } from "./store.js";

/** @import { Values } from "./data.js" */

/** @typedef {{fill?: string, stroke?: string, hatch?: boolean, opacity?: number, radius?: number, line?: number,
 *   dash?: number[]}} Ink */
/** @typedef {{size?: number, align?: CanvasTextAlign, fill?: string, bold?: boolean, serif?: boolean, turn?: number,
 *   italic?: boolean, opacity?: number, room?: number}} Lettering */

export class Scene {
  /** @type {any[]} */ shapes;
  /** @type {any[]} */ targets;
  /** @type {number} */ width;
  /** @type {number} */ height;
  /** @type {number} */ bottom;
  /** @type {{x: number, y: number, cell: number, tall: number, rows: number, columns: number, values: Values}} */ map;

  constructor(width, height) {
    Object.assign(this, { width, height, bottom: height, shapes: [], targets: [] });
  }

  rect(x, y, width, height, /** @type {Ink} */ { fill, stroke, hatch, opacity = 1, radius = 0, line = 1, dash } = {}) {
    this.shapes.push({ kind: "rect", x, y, width, height, fill, stroke, hatch, opacity, radius, line, dash });
  }

  // `d` as in SVG.
  path(d, /** @type {Ink} */ { stroke, fill, line = 1, opacity = 1, dash } = {}, about = {}) {
    this.shapes.push({ kind: "path", d, stroke, fill, line, opacity, dash, ...about });
  }

  // A text that has only so much `room` is cut to it.
  text(text, x, y, /** @type {Lettering} */ { size = 13, align = "left", fill = "ink", bold = false, serif = false,
    turn = 0, italic = false, opacity = 1, room = Infinity } = {}) {
    const whole = String(text), shown = room < Infinity ? fitted(whole, room, { size, bold, serif }) : whole;
    this.shapes.push({ kind: "text", text: shown, x, y, size, align, fill, bold, serif, turn, italic, opacity });
  }

  // A grid of cells: `colourOf(cell)` is [r, g, b], or null for a masked cell.
  cells(x, y, cellWidth, cellHeight, rows, columns, colourOf) {
    this.shapes.push({ kind: "cells", x, y, cellWidth, cellHeight, rows, columns, colourOf });
  }

  // The shapes of another scene, moved.
  group(/** @type {Scene} */ { shapes }, x, y) {
    this.shapes.push({ kind: "group", shapes, x, y });
  }

  // A target of the pointer: pointing at it shows the selection and the title, and clicking selects.
  target(x, y, width, height, changes, title = "") {
    this.targets.push({ x, y, width, height, changes, title });
  }

  // The target at a point, or else the nearest within `reach` pixels.
  under(x, y, reach = 0) {
    const away = (it) => Math.hypot(Math.max(it.x - x, 0, x - it.x - it.width), Math.max(it.y - y, 0, y - it.y - it.height));
    const exact = this.targets.findLast((it) => x >= it.x && x < it.x + it.width && y >= it.y && y < it.y + it.height);
    return exact ?? this.targets.filter((it) => away(it) < reach).sort((a, b) => away(a) - away(b))[0];
  }
}

// ---- colours of the theme -------------------------------------------------------------------

const THEME = ["paper", "sheet", "ink", "soft", "rule", "accent", "tint", "hatch", "mark"];

// The colours of the names in the current theme, as the browser computes them.
function colours() {
  if (store.themeColours) return store.themeColours;
  const probe = document.body.appendChild(make("i", { hidden: true }));
  store.themeColours = {};
  for (const name of THEME) {
    probe.style.color = `var(--${name})`;
    store.themeColours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return store.themeColours;
}

export const inked = (name) => colours()[name] ?? name;
const fontOf = (/** @type {Lettering} */ { size, bold, serif, italic }) => `${italic ? "italic " : ""}${bold ? 600 : 400} ${size}px ` +
  (serif ? 'Palatino, "URW Palladio L", Georgia, "Liberation Serif", serif'
    : 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif');

const ruler = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));

// The width of a text in pixels.
export function widthOf(text, /** @type {Lettering} */ { size = 13, bold = false, serif = false } = {}) {
  ruler.font = fontOf({ size, bold, serif });
  return ruler.measureText(text).width;
}

// A text cut to a width, by whole characters.
export function fitted(text, room, options) {
  let characters = [...text.slice(0, 200)];
  if (text.length <= 200 && widthOf(text, options) <= room) return text;
  while (characters.length > 1 && widthOf(`${characters.join("")}…`, options) > room) {
    characters = characters.slice(0, Math.min(characters.length - 1, Math.ceil(characters.length * 0.9)));
  }
  return `${characters.join("")}…`;
}

// ---- on a canvas ---------------------------------------------------------------------------

export function paint(canvas, /** @type {Scene} */ scene, ratio = devicePixelRatio || 1) {
  const [width, height] = [Math.round(scene.width * ratio), Math.round(scene.height * ratio)];
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, scene.width, scene.height);
  PAINTED.group(pen, { shapes: scene.shapes, x: 0, y: 0 });
}

const PAINTED = {
  rect(pen, { x, y, width, height, fill, stroke, hatch, opacity, radius, line, dash }) {
    pen.globalAlpha = opacity;
    pen.beginPath();
    pen.roundRect(x, y, width, height, radius);
    if (fill) { pen.fillStyle = inked(fill); pen.fill(); }
    if (hatch) hatching(pen, x, y, width, height);
    if (stroke) {
      pen.setLineDash(dash ?? []);
      pen.strokeStyle = inked(stroke);
      pen.lineWidth = line;
      pen.stroke();
    }
    pen.globalAlpha = 1;
  },
  path(pen, { d, stroke, fill, line, opacity, dash }) {
    const path = new Path2D(d);
    pen.globalAlpha = opacity;
    pen.setLineDash(dash ?? []);
    if (fill) { pen.fillStyle = inked(fill); pen.fill(path); }
    if (stroke) { pen.strokeStyle = inked(stroke); pen.lineWidth = line; pen.stroke(path); }
    pen.globalAlpha = 1;
  },
  text(pen, shape) {
    pen.font = fontOf(shape);
    pen.fillStyle = inked(shape.fill);
    pen.globalAlpha = shape.opacity;
    pen.textAlign = shape.align;
    pen.textBaseline = "middle";
    pen.save();
    pen.translate(shape.x, shape.y);
    pen.rotate(shape.turn * Math.PI / 180);
    pen.fillText(shape.text, 0, 0);
    pen.restore();
    pen.globalAlpha = 1;
  },
  cells(pen, { x, y, cellWidth, cellHeight, rows, columns, colourOf }) {
    hatching(pen, x, y, cellWidth * columns, cellHeight * rows);
    const small = document.createElement("canvas");
    fillCells(small, rows, columns, colourOf);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, x, y, cellWidth * columns, cellHeight * rows);
  },
  group(pen, { shapes, x, y }) {
    pen.save();
    pen.translate(x, y);
    for (const shape of shapes) PAINTED[shape.kind](pen, shape);
    pen.restore();
  },
};

// One pixel per cell; a cell without a colour is transparent and shows the hatching behind it.
export function fillCells(canvas, rows, columns, colourOf) {
  [canvas.width, canvas.height] = [columns, rows];
  const pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows);
  for (let cell = 0; cell < rows * columns; cell++) {
    const colour = colourOf(cell);
    if (!colour) continue;
    image.data.set(colour, 4 * cell);
    image.data[4 * cell + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
}

function hatching(pen, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.strokeStyle = inked("hatch");
  pen.lineWidth = 1;
  pen.setLineDash([]);
  pen.beginPath();
  for (let at = x - height - ((x - height - y) % 5); at < x + width; at += 5) {
    pen.moveTo(at, y + height);
    pen.lineTo(at + height, y);
  }
  pen.stroke();
  pen.restore();
}

function pngOf(rows, columns, colourOf) {
  const canvas = document.createElement("canvas");
  fillCells(canvas, rows, columns, colourOf);
  return canvas.toDataURL();
}

const MANY_CELLS = 20_000; // an SVG has more as one image

// ---- as SVG --------------------------------------------------------------------------------

export function svgOf(/** @type {Scene} */ { width, height, shapes }) {
  const hatched = "url(#hatch)";
  const ink = (/** @type {Ink} */ { fill, stroke, hatch, opacity, line, dash }) => ({ opacity,
    fill: hatch ? hatched : fill ? inked(fill) : "none", stroke: stroke && inked(stroke),
    "stroke-width": stroke && line, "stroke-dasharray": dash?.join(" ") });
  const written = {
    rect: ({ x, y, width, height, radius, ...it }) =>
      makeSvg("rect", { x, y, width, height, rx: radius || undefined, ...ink(it) }),
    path: ({ d, ...it }) => makeSvg("path", { d, ...ink(it) }),
    text: (it) => makeSvg("text", { x: 0, y: 0, "dominant-baseline": "central", fill: inked(it.fill),
      opacity: it.opacity, transform: `translate(${it.x} ${it.y}) rotate(${it.turn})`,
      "text-anchor": { left: "start", center: "middle", right: "end" }[it.align],
      "font-size": it.size, "font-weight": it.bold ? 600 : 400,
      "font-family": it.serif ? "serif" : "sans-serif" }, it.text),
    cells: ({ x, y, cellWidth: width, cellHeight: height, rows, columns, colourOf }) => rows * columns > MANY_CELLS ? [
      makeSvg("image", { x, y, width: width * columns, height: height * rows, preserveAspectRatio: "none",
        href: pngOf(rows, columns, colourOf) })] : [
      makeSvg("rect", { x, y, width: width * columns, height: height * rows, fill: hatched }),
      ...Array.from({ length: rows * columns }, (_, cell) => {
        const colour = colourOf(cell);
        return colour && makeSvg("rect", { x: x + (cell % columns) * width, y: y + Math.floor(cell / columns) * height,
          width, height, fill: css(colour) });
      }).filter(Boolean)],
    group: ({ x, y, shapes }) => makeSvg("g", { transform: `translate(${x} ${y})` }, ...drawn(shapes)),
  };
  const drawn = (shapes) => shapes.flatMap((shape) => written[shape.kind](shape));
  const hatching = makeSvg("path", { d: "M0 5 L5 0", stroke: inked("hatch") });
  const root = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, width, height },
    makeSvg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse" }, hatching),
    makeSvg("rect", { width: "100%", height: "100%", fill: inked("paper") }), ...drawn(shapes));
  return new XMLSerializer().serializeToString(root);
}
