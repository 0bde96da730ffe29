// The points of a picture: to point at, to click, and to reach by keys. They are the options of a list box.

import { byId, makeSvg } from "../marks.js";

const FINGER = 20; // pixels from a point to a touch
const DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Returns the point of a number at a place. Its title is its name for a screen reader.
 * @param {Element} frame @param {number} number @param {number[]} place @param {string} fill */
export const pointOf = (frame, number, [cx, cy], fill, title, isChosen) =>
  makeSvg("circle", { id: `${frame.id}-${number}`, role: "option", "aria-selected": String(isChosen), cx, cy, fill,
    r: isChosen ? 8 : 5 }, makeSvg("title", {}, title));

/** Shows a picture with its points, of which the active one stays active. */
export function showPoints(frame, picture) {
  picture.setAttribute("role", "presentation");
  frame.replaceChildren(picture);
  activeIn(frame)?.classList.add("active");
}

/** Listens to points. `choose` receives the number of the one that is clicked, or selected by Enter; `show` that of the
 * active one, or -1: at the pointer, or reached by keys. */
export function listenToPoints(frame, choose, show = (/** @type {number} */ _) => {}) {
  const activate = (point) => {
    if (point === activeIn(frame)) return;
    activeIn(frame)?.classList.remove("active");
    frame.setAttribute("aria-activedescendant", point?.id ?? "");
    point?.classList.add("active");
    show(point ? numberOf(point) : -1);
  };
  const follow = (event) => { // unless the page scrolls below the pointer
    if (event.movementX || event.movementY) activate(event.type === "pointermove" ? pointUnder(frame, event) : null);
  };
  for (const type of ["pointermove", "pointerleave"]) frame.addEventListener(type, follow);
  frame.addEventListener("blur", () => activate(null));
  frame.addEventListener("focus", () => {
    if (frame.matches(":focus-visible")) activate(frame.querySelector("circle[aria-selected=true]") ?? inOrder(frame)[0] ?? null);
  });
  frame.addEventListener("click", (event) => {
    const point = pointUnder(frame, event);
    if (point) choose(numberOf(point));
  });
  frame.addEventListener("keydown", (event) => {
    const points = inOrder(frame), active = activeIn(frame) ?? points[0], at = points.indexOf(active);
    const target = { Home: 0, End: points.length - 1, PageUp: at - 1, PageDown: at + 1 }[event.key];
    if (!active || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in DIRECTIONS) activate(nearestToward(DIRECTIONS[event.key], active, points) ?? active);
    else if (target !== undefined) activate(points[target] ?? active);
    else if (event.key === "Enter" || event.key === " ") choose(numberOf(active));
    else return;
    event.preventDefault();
  });
}

const activeIn = (frame) => byId(frame.getAttribute("aria-activedescendant") ?? "");
const numberOf = (point) => Number(point.id.slice(point.id.lastIndexOf("-") + 1));
const placeOf = (point) => [point.cx.baseVal.value, point.cy.baseVal.value];
// The points by number, whatever is drawn last; without those that a legend makes pale.
const inOrder = (frame) => [...frame.querySelectorAll("circle:not(.dim)")].sort((a, b) => numberOf(a) - numberOf(b));

function nearest(points, distance) {
  const least = Math.min(...points.map(distance));
  return least < Infinity ? points.find((point) => distance(point) === least) : null;
}

function pointUnder(frame, { target, clientX, clientY, pointerType }) {
  const point = target.closest("circle");
  if (point || pointerType !== "touch") return point;
  const { left, top } = frame.getBoundingClientRect();
  return nearest(inOrder(frame), (it) => {
    const [x, y] = placeOf(it), distance = Math.hypot(x - clientX + left, y - clientY + top);
    return distance <= FINGER ? distance : Infinity;
  });
}

// The nearest point in the quarter of the plane around a direction.
function nearestToward([right, down], from, points) {
  const [x0, y0] = placeOf(from);
  return nearest(points, (point) => {
    const [x, y] = placeOf(point), along = right * (x - x0) + down * (y - y0), across = right * (y - y0) - down * (x - x0);
    return along > 0 && Math.abs(across) <= along ? Math.hypot(along, across) : Infinity;
  });
}
