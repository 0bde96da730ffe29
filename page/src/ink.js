// Colour scales. That of weights is their square root, from 0 to 1, for any number of tokens; that of
// signed numbers is around 0. Weights below one percent have neither a line nor a digit.

import { css, mixed } from "./colours.js";
import { number } from "./marks.js";
import { widthOf } from "./scene.js";
import { pageData, store } from "./store.js";

/** @import { Scene } from "./scene.js" */

export const LEAST = 0.01;
const NAN_COLOUR = [214, 51, 92];

const scale = (name) => pageData.inks[name][store.isDark ? "dark" : "light"];

export const shareColour = (weight) =>
  (Number.isNaN(weight) ? NAN_COLOUR : mixed(scale("sequential"), Math.sqrt(Math.max(0, weight))));

// The colour of a number between -limit and limit.
export const signedColour = (value, limit) =>
  (Number.isNaN(value) ? NAN_COLOUR : mixed(scale("diverging"), 0.5 + 0.5 * value / limit));

// The colours of up to five heads or sides, different for all colour vision.
const SIDES = { light: ["#14637f", "#b4552d", "#5b6f1e", "#7a4a92", "#8a6d00"],
  dark: ["#7cc7dd", "#f0a27e", "#b5cc6a", "#cfa3e6", "#e2c24a"] };
export const sideColour = (i) => SIDES[store.isDark ? "dark" : "light"][i % 5];

/** A colour bar, with labels at fractions of its width.
 * @param {Scene} scene @param {[text: any, at: number, align: CanvasTextAlign][]} labels */
function drawBar(scene, x, y, width, inks, labels) {
  for (let i = 0; i < width; i++) {
    scene.rect(x + i, y, 1.5, 8, { fill: css(mixed(scale(inks), i / (width - 1))) });
  }
  scene.rect(x, y, width, 8, { stroke: "rule" });
  for (const [text, at, align] of labels) {
    scene.text(text, x + at * width, y + 18, { size: 12, fill: "soft", align });
  }
}

export function drawWeightBar(/** @type {Scene} */ scene, x, y, width = 150, name = "weight") {
  drawBar(scene, x, y, width, "sequential", [[0, 0, "left"], [0.1, Math.sqrt(0.1), "center"],
    [0.5, Math.sqrt(0.5), "center"], [1, 1, "right"]]);
  scene.text(name, x + width + 8, y + 4, { size: 12, fill: "soft" });
}

export const shareInks = () => scale("sequential");

// A bar of fractions up to `top`.
export function drawShareBar(/** @type {Scene} */ scene, x, y, top, width = 150, name = "weight") {
  const share = (part) => number(100 * part, part < 0.1 ? 2 : 1);
  drawBar(scene, x, y, width, "sequential", [[0, 0, "left"], [`${share(top)} %`, 1, "right"]]);
  scene.text(name, x + width + 8, y + 4, { size: 12, fill: "soft" });
}

export function drawSignedBar(/** @type {Scene} */ scene, x, y, limit, width = 150,
  ends = [number(-limit, 2), number(limit, 2)]) {
  drawBar(scene, x, y, width, "diverging", [[ends[0], 0, "left"], ["0", 0.5, "center"], [ends[1], 1, "right"]]);
}

// Returns its right end.
export function drawHatchKey(/** @type {Scene} */ scene, x, y) {
  scene.rect(x, y - 2, 18, 12, { stroke: "rule" });
  scene.rect(x, y - 2, 18, 12, { hatch: true });
  scene.text("may not look", x + 24, y + 4, { size: 12, fill: "soft" });
  return x + 24 + widthOf("may not look", { size: 12 });
}
