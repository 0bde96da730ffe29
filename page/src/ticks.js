// Ticks of axes, and the scale of a colour.

import { byId, make, number } from "./marks.js";

/** Round numbers from below `low` to above `high`, about `most` of them. @returns {number[]} */
export function ticksBetween(low, high, most = 4) {
  if (low > high) return [0, 1];
  const rough = (high - low || 1) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * (/** @type {number} */ ([1, 2, 5, 10].find((it) => it * power >= rough * (1 - 1e-9)))), first = Math.floor(low / step + 1e-9);
  const last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** The least and the greatest finite number. */
export const rangeOf = (/** @type {ArrayLike<number>} */ values) => {
  let low = Infinity, high = -Infinity;
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) [low, high] = [Math.min(low, values[i]), Math.max(high, values[i])];
  }
  return [low, high];
};

export const tick = (value) => String(value).replace("-", "−");
const end = (value) => (Number.isInteger(value) ? String(value) : number(value, 3));

/** Draws the scale of a colour, from the least to the greatest number that has one. */
export function drawColourScale(low, high, colourOf) {
  const ramp = make("i"), stops = [0, 0.25, 0.5, 0.75, 1].map((part) => colourOf(low + part * (high - low)));
  ramp.style.background = `linear-gradient(to right, ${stops.join()})`;
  byId("colour-scale").replaceChildren(end(low), ramp, end(high));
}
