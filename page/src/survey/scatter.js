// The scatter of all heads: two numbers as axes, a third one as colour.

import { css, mixed } from "../colours.js";
import { byId, make, makeSvg, number } from "../marks.js";
import { drawColourScale, rangeOf as endsOf, tick, ticksBetween } from "../ticks.js";
import { go } from "./address.js";
import { headName } from "./findings.js";
import { listenToPoints, pointOf, showPoints } from "./points.js";
import { axes, chosen, metricOf, survey, theme, valueOn, words } from "./store.js";

const SPACE = { left: 52, right: 14, top: 26, bottom: 36 };

export function buildScatter() {
  for (const axis of ["x", "y", "colour"]) {
    const list = byId(`axis-${axis}`);
    list.append(...axes.map((name) => make("option", { value: name }, words(name))));
    list.addEventListener("change", () => go({ [axis]: list.value,
      ...(axis !== "colour" && metricOf(list.value) ? { metric: list.value } : {}) })); // with its examples
  }
  listenToPoints(byId("scatter"), (at) => go({ at }), nameActive);
  new ResizeObserver(drawScatter).observe(byId("scatter"));
}

const valuesOn = (axis) => survey.heads.map((it) => valueOn(it, axis));

/** Round numbers from below the least value of an axis to above the greatest. @returns {number[]} */
export function ticksOf(axis) {
  const [low, high] = endsOf(valuesOn(axis));
  return ticksBetween(low, high);
}

const rangeOf = (axis) => {
  const ticks = ticksOf(axis);
  return [ticks[0], ticks[ticks.length - 1]];
};

// The colours end at the values, because no axis shows them.
const coloursOf = (axis) => {
  const [low, high] = endsOf(valuesOn(axis));
  return low < high ? [low, high] : rangeOf(axis);
};

const FAR = 3.5, MOST_NAMED = 8;

/** The heads that are far from the others on an axis, and that with the greatest value, the farthest first: in units of
 * 1.48 times the median distance from the median, which is the standard deviation of a normal distribution. */
export function outliers() {
  const median = (values) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;
  const far = [chosen.x, chosen.y].map((axis) => {
    const values = valuesOn(axis), finite = values.filter(Number.isFinite), middle = median(finite);
    const unit = 1.48 * median(finite.map((it) => Math.abs(it - middle))), greatest = Math.max(...finite);
    return values.map((it) => (it === greatest ? Infinity : unit && Number.isFinite(it) ? Math.abs(it - middle) / unit : 0));
  });
  const most = survey.heads.map((_, i) => Math.max(far[0][i], far[1][i]));
  return most.map((_, i) => i).filter((i) => most[i] > FAR).sort((a, b) => (most[a] === most[b] ? 0 : most[b] - most[a])).slice(0, MOST_NAMED);
}

// Names beside points; a name that would cover another one, or its point, or leave the picture, is on the other side or left out.
function addNames(picture, /** @type {number[]} */ heads, /** @type {(at: number) => number[]} */ placeOf, width) {
  const boxes = heads.map(placeOf).map(([x, y]) => [x - 5, y - 5, x + 5, y + 5]);
  for (const at of heads) {
    const [x, y] = placeOf(at), name = makeSvg("text", { class: "name", y: y + 4 }, headName(survey.heads[at]));
    picture.append(name);
    const wide = name.getComputedTextLength();
    const box = [x + 9, x - 9 - wide].map((left) => [left, y - 8, left + wide, y + 8]).find(([left, top, right, bottom]) =>
      left >= 0 && right <= width && boxes.every(([l, t, r, b]) => right < l || left > r || bottom < t || top > b));
    if (!box) {
      name.remove();
      continue;
    }
    boxes.push(box);
    name.setAttribute("x", String(box[0]));
  }
}

// The name of the head at the pointer, in place of those that it would cover.
function nameActive(/** @type {number} */ at) {
  const frame = byId("scatter"), picture = frame.firstChild, point = byId(`scatter-${at}`);
  picture?.querySelector(".at-pointer")?.remove();
  for (const other of picture?.querySelectorAll(".name") ?? []) other.style.visibility = "";
  if (!point || !picture) return;
  const [x, y] = [point.cx.baseVal.value, point.cy.baseVal.value], isRight = x > frame.clientWidth / 2;
  const name = makeSvg("text", { class: "name at-pointer", x: x + (isRight ? -11 : 11), y: y - 9, "text-anchor": isRight ? "end" : "start" },
    headName(survey.heads[at]));
  picture.append(name);
  for (const other of picture.querySelectorAll(".name:not(.at-pointer)")) if (isOver(other, name)) other.style.visibility = "hidden";
}

function isOver(a, b) {
  const [one, two] = [a, b].map((it) => it.getBoundingClientRect());
  return one.left < two.right && two.left < one.right && one.top < two.bottom && two.top < one.bottom;
}

export function drawScatter() {
  const frame = byId("scatter"), { clientWidth: width, clientHeight: height } = frame;
  if (!width || !height) return;
  for (const axis of ["x", "y", "colour"]) byId(`axis-${axis}`).value = chosen[axis];
  const [[left, right], [bottom, top], [pale, strong]] = [rangeOf(chosen.x), rangeOf(chosen.y), coloursOf(chosen.colour)];
  const x = (value) => SPACE.left + (value - left) / (right - left) * (width - SPACE.left - SPACE.right);
  const y = (value) => height - SPACE.bottom - (value - bottom) / (top - bottom) * (height - SPACE.top - SPACE.bottom);
  const scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
  const colour = (value) => css(mixed(scale, 0.15 + 0.85 * (value - pale) / (strong - pale)));
  drawColourScale(pale, strong, colour);

  const picture = makeSvg("svg", { width, height });
  for (const value of ticksOf(chosen.x)) {
    picture.append(makeSvg("text", { x: x(value), y: height - 20, "text-anchor": value === right ? "end" : "middle" }, tick(value)));
  }
  for (const value of ticksOf(chosen.y)) {
    picture.append(makeSvg("line", { x1: SPACE.left, x2: width - SPACE.right, y1: y(value), y2: y(value) }));
    picture.append(makeSvg("text", { x: SPACE.left - 6, y: y(value) + 4, "text-anchor": "end" }, tick(value)));
  }
  picture.append(makeSvg("text", { class: "axis", x: (SPACE.left + width - SPACE.right) / 2, y: height - 4, "text-anchor": "middle" },
    `${words(chosen.x)} →`));
  picture.append(makeSvg("text", { class: "axis", x: 4, y: 13 }, `↑ ${words(chosen.y)}`));

  const order = survey.heads.map((_, i) => i).sort((a, b) => Number(a === chosen.at) - Number(b === chosen.at));
  for (const i of order) {
    const it = survey.heads[i], at = [valueOn(it, chosen.x), valueOn(it, chosen.y)];
    if (!at.every(Number.isFinite)) continue;
    const isChosen = i === chosen.at, value = valueOn(it, chosen.colour);
    const title = `${headName(it)}: ${[chosen.x, chosen.y, chosen.colour]
      .map((name) => `${words(name)} ${number(valueOn(it, name), 3)}`).join(", ")}`;
    const fill = Number.isFinite(value) ? colour(value) : "none";
    picture.append(pointOf(frame, i, [x(at[0]), y(at[1])], fill, title, isChosen));
  }
  const placeOf = (at) => [x(valueOn(survey.heads[at], chosen.x)), y(valueOn(survey.heads[at], chosen.y))];
  showPoints(frame, picture);
  addNames(picture, [...new Set([chosen.at, ...outliers()])].filter((at) => placeOf(at).every(Number.isFinite)), placeOf, width);
}
