// The scatter of all heads: two numbers as axes, a third one as colour.

import { css, mixed } from "../colours.js";
import { byId, make, makeSvg, number } from "../marks.js";
import { go } from "./address.js";
import { listenToPoints, pointOf, showPoints } from "./points.js";
import { axes, chosen, survey, theme, valueOn, words } from "./store.js";

const SPACE = { left: 52, right: 14, top: 12, bottom: 36 };

export function buildScatter() {
  for (const axis of ["x", "y", "colour"]) {
    const list = byId(`axis-${axis}`);
    list.append(...axes.map((name) => make("option", { value: name }, words(name))));
    list.addEventListener("change", () => go({ [axis]: list.value }));
  }
  listenToPoints(byId("scatter"), (at) => go({ at }));
  new ResizeObserver(drawScatter).observe(byId("scatter"));
}

// The least and the greatest value of an axis, never equal.
function rangeOf(axis) {
  const values = survey.heads.map((it) => valueOn(it, axis)).filter(Number.isFinite);
  const low = Math.min(...values, Infinity), high = Math.max(...values, -Infinity);
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

const end = (value) => (Number.isInteger(value) ? String(value) : number(value, 3));

export function drawScatter() {
  const frame = byId("scatter"), { clientWidth: width, clientHeight: height } = frame;
  if (!width || !height) return;
  for (const axis of ["x", "y", "colour"]) byId(`axis-${axis}`).value = chosen[axis];
  const [[left, right], [bottom, top], [pale, strong]] = [chosen.x, chosen.y, chosen.colour].map(rangeOf);
  const x = (value) => SPACE.left + (value - left) / (right - left) * (width - SPACE.left - SPACE.right);
  const y = (value) => height - SPACE.bottom - (value - bottom) / (top - bottom) * (height - SPACE.top - SPACE.bottom);
  const scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
  const colour = (value) => css(mixed(scale, 0.15 + 0.85 * (value - pale) / (strong - pale)));
  const stops = [0, 0.25, 0.5, 0.75, 1].map((part) => colour(pale + part * (strong - pale)));
  const ramp = make("i");
  ramp.style.background = `linear-gradient(to right, ${stops.join()})`;
  byId("colour-scale").replaceChildren(end(pale), ramp, end(strong));

  const picture = makeSvg("svg", { width, height });
  for (const [value, anchor] of [[left, "start"], [(left + right) / 2, "middle"], [right, "end"]]) {
    picture.append(makeSvg("text", { x: x(value), y: height - 20, "text-anchor": anchor }, end(value)));
  }
  for (const value of [bottom, (bottom + top) / 2, top]) {
    picture.append(makeSvg("line", { x1: SPACE.left, x2: width - SPACE.right, y1: y(value), y2: y(value) }));
    picture.append(makeSvg("text", { x: SPACE.left - 6, y: y(value) + 4, "text-anchor": "end" }, end(value)));
  }
  picture.append(makeSvg("text", { class: "axis", x: (SPACE.left + width - SPACE.right) / 2, y: height - 4, "text-anchor": "middle" },
    words(chosen.x)));

  const order = survey.heads.map((_, i) => i).sort((a, b) => Number(a === chosen.at) - Number(b === chosen.at));
  for (const i of order) {
    const it = survey.heads[i], at = [valueOn(it, chosen.x), valueOn(it, chosen.y)];
    if (!at.every(Number.isFinite)) continue;
    const isChosen = i === chosen.at, value = valueOn(it, chosen.colour);
    const title = `L${it.layer}H${it.head}: ${[chosen.x, chosen.y, chosen.colour]
      .map((name) => `${words(name)} ${number(valueOn(it, name), 3)}`).join(", ")}`;
    const fill = Number.isFinite(value) ? colour(value) : "none";
    picture.append(pointOf(frame, i, [x(at[0]), y(at[1])], fill, title, isChosen));
  }
  showPoints(frame, picture);
}
