// The walk: the computation of one query as an animation. Positions are fixed: a row for each key, its
// vector on the left, its score or weight on the right, the query above, the output below.

import { css } from "../colours.js";
import { LEAST, drawSignedBar, shareColour, signedColour } from "../ink.js";
import { MINUS, button, byId, count, largest, make, number, percent, sum } from "../marks.js";
import { Scene, widthOf } from "../scene.js";
import { keyOr, queryOr, shownTrace, snapshot, state } from "../state.js";
import { screen, stillOnly, walk } from "../store.js";

/** @import { Trace } from "../data.js" */

const WALKED = ["query", "key", "scores", "scaled", "capped", "biased", "masked", "weights", "dropped",
  "value", "output"];
const SECONDS = 2; // of a stage at speed 1
const HEADING = 54, STRIP_ROW = 34, LEGEND = 34, LEAST_WALK_ROW = 17, MOST_WALK_ROW = 27;

export const stagesOf = (/** @type {Trace} */ trace) => WALKED.filter((name) => trace.step(name)?.holdsNumbers)
  .filter((name) => name !== "value" || trace.step("output"));

// The position of the walk: the stage, and its progress from 0 to 1. At rest a stage is complete.
function walkPlace(stages) {
  const stage = Math.min(stages.length - 1, Math.max(0, Math.ceil(walk.at) - 1));
  const share = Math.min(1, Math.max(0, walk.at - stage));
  return { stage, progress: stillOnly.matches ? 1 : share * share * (3 - 2 * share) };
}

// Null if the page does not have the steps of this head and query.
export function drawWalk(width, height) {
  const scene = new Scene(width, height), trace = shownTrace(), { head } = state();
  const query = queryOr(), stages = stagesOf(trace);
  const vector = (name, axis, k) => trace.step(name)?.along(axis, trace.at(head, query, k)), held = (k) => vector("key", "d", k);
  const key = held(keyOr()) ? keyOr() : trace.step("key")?.kept?.k?.[0] ?? 0;
  if (!stages.includes("query") || !stages.includes("key") || !trace.row(trace.weights, head, query)
      || !trace.step("scores") || !trace.row(trace.step("scores"), head, query)
      || !held(key) || !vector("query", "d", key)) return null;
  const { stage, progress } = walkPlace(stages);
  const name = stages[stage], step = trace.step(name);
  const is = (other) => stages.indexOf(other) >= 0 && stages.indexOf(other) <= stage;
  const isNow = (other) => name === other;
  scene.text(`${stage + 1}  ${name}`, 0, 13, { size: 17, bold: true, serif: true });
  const after = 30 + widthOf(`${stage + 1}  ${name}`, { size: 17, bold: true, serif: true });
  const headed = after + widthOf(step.formula, { size: 16, serif: true });
  let foot = 34; // pixels below the top of the output
  scene.text(step.formula, after, 13, { size: 16, serif: true, italic: true });
  scene.text(step.why, 0, 38, { size: 14, serif: true, fill: "soft", room: width });

  const used = trace.row(trace.used, head, query);
  const room = height - HEADING - 2 * STRIP_ROW - 12 - LEGEND;
  const most = Math.max(3, Math.floor(room / LEAST_WALK_ROW));
  const keys = keysOfWalk(trace, used, trace.blocked(head, query), key, most).filter(held);
  const high = Math.min(MOST_WALK_ROW, Math.max(LEAST_WALK_ROW, room / keys.length)), size = Math.min(14, high - 4);
  const label = Math.min(120, width * 0.18), strip = (width - label) * (width < 520 ? 0.34 : 0.42);
  const bars = { x: label + strip + 18, width: width - label - strip - 18 - 66 };
  const rowY = (i) => HEADING + STRIP_ROW + i * high, cellHeight = Math.round(high * 0.7);
  const endY = rowY(keys.length) + 10;

  const byNorm = trace.normWeighted(head, query), largest = Math.max(1e-30, ...(byNorm ?? []));
  const q = vector("query", "d", key), vectors = keys.map(held), values = keys.map((k) => vector("value", "v", k));
  const products = vectors.map((vector) => vector.map((x, d) => x * q[d]));
  const most1 = (lists) => Math.max(1e-30, ...lists.flat().map(Math.abs));

  // The query, always at the top.
  const named = /** @type {const} */ ({ serif: true, align: "right", room: label - 12 });
  scene.text(trace.queries[query], label - 10, HEADING + 12, { ...named, size: 15, bold: true });
  const shownOfQuery = isNow("query") ? progress : 1;
  vectorCells(scene, q, label, HEADING + 3, strip, 18, most1([q]), { until: shownOfQuery,
    opacity: is("value") ? 0.25 : 1 });
  if (isNow("query")) scene.text(`its ${count(q.length, "feature")}`, label + strip + 18, HEADING + 12, { fill: "soft" });

  keys.forEach((k, i) => {
    const y = rowY(i), isChosen = k === key;
    if (isChosen) scene.rect(0, y - 2, width, cellHeight + 4, { fill: "tint", radius: 3 });
    scene.text(trace.keys[k], label - 10, y + cellHeight / 2, { ...named, size, bold: isChosen });
    scene.target(0, y - 3, width, high, { query, key: k }, snapshot().title(trace.keys, k));
    if (is("key") && !is("value")) {
      const lit = isNow("scores") ? progress : is("scores") ? 1 : 0;
      const fade = is("scaled") ? (isNow("scaled") ? 1 - 0.7 * progress : 0.3) : 1;
      const sweep = isNow("key") ? Math.max(0, Math.min(1, progress * (keys.length + 4) / 4 - i / 4)) : 1;
      vectorCells(scene, vectors[i], label, y, strip, cellHeight, most1(vectors), { until: sweep, opacity: fade, from: lit });
      if (lit) vectorCells(scene, products[i], label, y, strip, cellHeight, most1(products), { until: lit, opacity: fade });
    }
    if (is("value") && values[i]) {
      // The strip of a value shrinks to its norm-weighted attention; if that is unknown, it fades by its weight.
      const part = byNorm ? 1 : Math.max(0.08, Math.sqrt(Math.abs(used[k]))), amount = isNow("value") ? 0 : progress;
      const tall = cellHeight * (byNorm ? 1 - amount * (1 - byNorm[k] / largest) : 1);
      const appear = isNow("value") ? progress : 1 - amount * (1 - part);
      if (byNorm && isNow("output")) scene.rect(label, y, strip, cellHeight, { stroke: "rule", opacity: 0.5 });
      vectorCells(scene, values[i], label, y + (cellHeight - tall) / 2, strip, tall, most1(values), { opacity: appear });
      if (byNorm && isNow("output") && byNorm[k] >= LEAST) {
        scene.text(percent(byNorm[k]), bars.x + bars.width - 6, y + cellHeight / 2,
          { size: 12, align: "right", fill: used[k] > 0.8 ? "paper" : "ink" });
      }
      if (isNow("output") && progress < 1 && used[k] >= LEAST) {
        vectorCells(scene, values[i], label, y + (endY - y) * progress, strip, cellHeight, most1(values),
          { opacity: Math.sqrt(used[k]) * 0.8 });
      }
    }
  });
  if (is("scores")) walkBars(scene, { trace, head, query, keys, stages, stage, progress, products, bars, rowY, cellHeight, endY });
  if (is("output")) {
    const output = vector("output", "v", key);
    scene.text("output", label - 10, endY + 10, { size: 14, serif: true, bold: true, align: "right" });
    vectorCells(scene, output, label, endY, strip, 20, most1([...values.filter(Boolean), output]),
      { opacity: isNow("output") ? progress : 1 });
  }
  if (keys.length < trace.size.k) {
    // Beside the name of the stage if it fits, else at the end.
    const words = `${keys.length} of ${trace.size.k} keys, the largest weights among them`;
    const isBeside = headed + 24 + widthOf(words, { size: 12 }) < width;
    scene.text(words, width, isBeside ? 13 : endY + 44, { size: 12, fill: "soft", align: "right" });
    if (!isBeside) foot = 54;
  }
  drawSignedBar(scene, 0, endY + foot, 1, 150, [`${MINUS}largest`, "largest"]);
  const [cells, marks] = isNow("output") && byNorm
    ? ["Red below 0, blue above.", "Height of a value, and percent: norm-weighted attention."]
    : ["A cell is a feature: red below 0, blue above.", "Bars: the numbers beside them."];
  const isHatched = keys.some((k) => trace.blocked(head, query)[k]);
  const meaning = [cells, isHatched ? `${marks} Hatched: may not look.` : marks], small = { size: 12 };
  // Beside the bar of colours, in one line or two if they fit, else below it.
  const fits = (lines) => lines.every((line) => widthOf(line, small) <= width - 170);
  const lines = fits([meaning.join(" ")]) ? [meaning.join(" ")] : meaning, isBesideBar = fits(lines);
  const top = endY + foot + (isBesideBar ? 12 - 8 * lines.length : LEGEND);
  lines.forEach((line, i) => scene.text(line, isBesideBar ? 166 : 0, top + 16 * i, { ...small, fill: "soft", room: width }));
  scene.height = Math.max(height, endY + foot + LEGEND - 8 + (isBesideBar ? 0 : 16 * lines.length));
  return scene;
}

// All keys, or the largest weights and up to three that the mask blocks.
function keysOfWalk(/** @type {Trace} */ trace, weights, blocked, key, most) {
  if (trace.size.k <= most) return trace.keys.map((_, i) => i);
  const some = blocked.flatMap((isBlocked, i) => (isBlocked ? [i] : [])).slice(0, 3);
  const others = largest(weights.map((it, i) => (blocked[i] ? undefined : it)), most - some.length, key)
    .filter((i) => i !== null && !some.includes(i)).slice(0, most - some.length);
  return [...others, ...some].sort((a, b) => a - b);
}

// The cells of a vector between the fractions `from` and `until` of its length.
function vectorCells(/** @type {Scene} */ scene, vector, x, y, width, height, limit, { until = 1, from = 0, opacity = 1 } = {}) {
  const wide = Math.min(26, width / vector.length), gap = wide > 6 ? 1 : 0;
  const [first, last] = [Math.floor(from * vector.length), Math.ceil(until * vector.length)];
  for (let i = first; i < last; i++) {
    scene.rect(x + i * wide, y, wide - gap, height, { fill: css(signedColour(vector[i], limit)), opacity });
  }
  if (last > first) scene.rect(x + first * wide, y, (last - first) * wide - gap, height, { stroke: "rule", opacity });
}

// Scores become weights: the bars on the right, with the exact number of the stage beside them.
function walkBars(/** @type {Scene} */ scene, { trace, head, query, keys, stages, stage, progress, products, bars, rowY, cellHeight, endY }) {
  const pairs = stages.slice(0, stage + 1).filter((name) => trace.step(name).isPair);
  const name = pairs.at(-1), isNow = stages[stage] === name;
  const rowOfStep = (it) => trace.row(trace.step(it), head, query);
  const after = rowOfStep(name), before = pairs.length > 1 ? rowOfStep(pairs.at(-2)) : null;
  const isShare = trace.step(name).isShare, wasShare = before && trace.step(pairs.at(-2)).isShare;
  const p = isNow ? progress : 1;
  const reach = (row) => Math.max(1e-9, ...keys.map((k) => (Number.isFinite(row[k]) ? Math.abs(row[k]) : 0)));
  const middle = bars.x + bars.width / 2;
  // Scaling: first the bars shrink on the axis of the scores, then the axis does.
  let limit = reach(isShare ? (wasShare ? before : before ?? after) : after);
  let shrink = p;
  if (name === "scaled" && before) {
    shrink = Math.min(1, 2 * p);
    const zoom = Math.max(0, 2 * p - 1);
    limit = reach(before) ** (1 - zoom) * reach(after) ** zoom;
  } else if (before && !isShare) limit = Math.max(reach(before), reach(after));
  const rightEnd = bars.x + bars.width + 62;
  keys.forEach((k, i) => {
    const y = rowY(i), height = cellHeight;
    const write = (text, fill = "ink") => scene.text(text, rightEnd, y + height / 2, { align: "right", fill });
    const isBlocked = after[k] === -Infinity || (isShare && trace.blocked(head, query)[k]);
    let value = after[k];
    if (name === "scores" && p < 1) value = sum(products[i].slice(0, Math.ceil(p * products[i].length)));
    else if (before && Number.isFinite(before[k]) && Number.isFinite(after[k])) {
      value = before[k] + (after[k] - before[k]) * shrink;
    }
    if (isBlocked) {
      scene.rect(bars.x, y, bars.width, height * (name === "masked" ? p : 1), { hatch: true });
      write(isShare ? "0" : p > 0.5 ? MINUS + "∞" : number(before?.[k] ?? 0), "soft");
      return;
    }
    if (isShare) {
      const grown = wasShare ? value : after[k] * p, x0 = bars.x;
      scene.rect(x0, y, bars.width, height, { fill: "rule", opacity: 0.45, radius: 2 });
      scene.rect(x0, y, bars.width * Math.max(0, Math.min(1, grown)), height, { fill: "accent", radius: 2 });
      write(number(grown));
      return;
    }
    const size = bars.width / 2 / limit;
    if (name === "scaled" && before) {
      const trace1 = Math.max(-1, Math.min(1, before[k] / limit)) * bars.width / 2;
      scene.rect(Math.min(middle, middle + trace1), y, Math.abs(trace1), height, { stroke: "soft", dash: [3, 3], opacity: 0.5 });
    }
    scene.rect(Math.min(middle, middle + value * size), y, Math.abs(value * size), height,
      { fill: css(signedColour(Math.sign(value) * 0.8, 1)), radius: 2 });
    write(number(value));
  });
  if (isShare) {
    // The weights in a row, which fill one bar.
    let x = bars.x;
    const total = sum(keys.map((k) => Math.max(0, after[k]))); // after dropout more than 1
    for (const k of keys) {
      const wide = bars.width * Math.max(0, after[k]) * p / Math.max(1, total);
      scene.rect(x, endY, wide, 14, { fill: css(shareColour(Math.max(0.05, after[k]))) });
      x += wide;
    }
    scene.rect(bars.x, endY, bars.width, 14, { stroke: "ink" });
    scene.text(`Σ ${number(total * p)}`, rightEnd, endY + 7, { align: "right", size: 13 });
  } else {
    scene.path(`M ${middle} ${rowY(0) - 4} V ${endY - 4}`, { stroke: "soft" });
    if (name === "scaled") {
      scene.text("dashed: without scaling", middle, endY + 20, { size: 12, fill: "soft", align: "center" });
    }
    scene.text(number(-limit, 2), bars.x, endY + 4, { size: 12, fill: "soft" });
    scene.text("0", middle, endY + 4, { size: 12, fill: "soft", align: "center" });
    scene.text(number(limit, 2), bars.x + bars.width, endY + 4, { size: 12, fill: "soft", align: "right" });
  }
}

// ---- play, pause, step ---------------------------------------------------------------------

export function walkOptions() {
  const stages = stagesOf(shownTrace());
  const scrub = make("input", { type: "range", id: "scrub", min: 0, max: stages.length, step: 0.01,
    value: walk.at, "aria-label": "Position of the walk",
    input: () => { pauseWalk(); walk.at = Number(scrub.value); screen.drawPicture(); } });
  const speed = make("select", { id: "speed", "aria-label": "Speed", change: () => { walk.speed = Number(speed.value); } },
    [0.25, 0.5, 1, 2].map((it) => make("option", { value: it, selected: it === walk.speed }, `${it}×`)));
  return [button({ id: "back", "aria-label": "Step back" }, () => stepWalk(-1), "◀ Step"),
    button({ id: "play" }, toggleWalk, walk.isPlaying ? "Pause" : "Play"),
    button({ id: "forth", "aria-label": "Step forward" }, () => stepWalk(1), "Step ▶"), scrub, speed];
}

export function stepWalk(by) {
  pauseWalk();
  const stages = stagesOf(shownTrace()), { stage } = walkPlace(stages);
  walk.at = Math.max(1, Math.min(stages.length, stage + 1 + by));
  screen.drawPicture();
}

export const toggleWalk = () => (walk.isPlaying ? pauseWalk() : playWalk());

export function playWalk() {
  const length = stagesOf(shownTrace()).length;
  if (walk.at >= length) walk.at = 0;
  walk.isPlaying = true;
  walk.last = performance.now();
  const tick = (now) => {
    if (!walk.isPlaying) return;
    walk.at = Math.min(length, walk.at + Math.max(0, now - walk.last) / 1000 / SECONDS * walk.speed);
    walk.last = now;
    if (walk.at >= length) walk.isPlaying = false;
    screen.drawPicture();
    if (walk.isPlaying) walk.frame = requestAnimationFrame(tick);
  };
  walk.frame = requestAnimationFrame(tick);
  screen.drawPicture();
}

// Plays from the beginning, or shows the end where nothing is to move.
export function beginWalk() {
  walk.at = stillOnly.matches ? stagesOf(shownTrace()).length : 0;
  if (stillOnly.matches) screen.drawPicture();
  else playWalk();
}

export function pauseWalk() {
  walk.isPlaying = false;
  cancelAnimationFrame(walk.frame);
  if (byId("play")) byId("play").textContent = "Play";
}
