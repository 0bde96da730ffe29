// Lines: every query on the left, every key on the right, a line for each weight above the
// threshold. Pointing at a word isolates its lines. Several heads have different colours.

import { css } from "../colours.js";
import { LEAST, sideColour, signedColour } from "../ink.js";
import { largest, percent } from "../marks.js";
import { Scene, fitted, widthOf } from "../scene.js";
import { isBeside, sides } from "../state.js";
import { chosen, store } from "../store.js";

const ROW = 22, LEAST_ROW = 15;

export function drawLines(width, height) {
  const all = sides(), scene = new Scene(width, height), bar = 36;
  const panels = (store.edited || isBeside()) && !chosen.difference ? all.map((side) => [side]) : [all];
  const wide = (width - 30 * (panels.length - 1)) / panels.length;
  const isNamed = all.length > 1 && !chosen.difference; // a difference has the colours of its legend
  const cut = panels.map((members, i) => linesPanel(scene, members, i * (wide + 30), wide, height - bar, isNamed));
  if (chosen.difference && all.length === 2) {
    const words = fitted(`${all[1].name} minus ${all[0].name}:`, width - 90, {});
    const more = widthOf(words) + 10, less = more + widthOf("more", { bold: true }) + 12;
    scene.text(words, 0, height - 16, { fill: "soft" });
    scene.text("more", more, height - 16, { fill: css(signedColour(1, 1)), bold: true });
    scene.text("less", less, height - 16, { fill: css(signedColour(-1, 1)), bold: true });
  } else {
    const legend = `Lines for weights of ${percent(chosen.threshold)} or more; wider lines for larger weights`;
    scene.text(legend + (cut.includes(true) ? "; ⋮ words that do not fit" : ""), 0, height - 16, { size: 12, fill: "soft" });
  }
  return scene;
}

// Draws one panel. Returns whether some words do not fit.
function linesPanel(/** @type {Scene} */ scene, members, x, width, height, isNamed) {
  const { trace, query, key, back } = members[0];
  const heading = 26;
  const most = Math.max(4, Math.floor((height - heading) / LEAST_ROW));
  const stored = trace.stored(members[0].head), queries = around(stored, most, query ?? stored.at(-1));
  const keys = keysToShow(members, queries, most);
  const row = Math.min(ROW, (height - heading) / Math.max(queries.length, keys.length));
  const middle = (i) => heading + (i + 0.5) * row;
  const label = Math.min(150, width * 0.26), size = Math.max(12, Math.min(15, row - 4));
  const [left, right] = [x + label, x + width - label];
  scene.text("query", left - 8, 10, { size: 12, fill: "soft", align: "right" });
  scene.text("key", right + 8, 10, { size: 12, fill: "soft" });
  if (isNamed) {
    members.forEach((side, i) => scene.text(side.name, left + 20 + 96 * i, 10,
      { size: 13, bold: true, fill: sideColour(side.colour) }));
  }
  const rowsOfSides = members.map((side) => new Map(queries.filter((q) => q !== null)
    .map((q) => [q, side.trace.row(side.trace.used, side.head, q) ?? []])));
  const isFaint = (q, k) => (query !== null && q !== query) || (query === null && key !== null && k !== key);
  const line = (i, j, weight, colour, q, k) => {
    const [y1, y2] = [middle(i), middle(j)], faint = isFaint(q, k), bend = (left + right) / 2;
    scene.path(`M ${left} ${y1} C ${bend} ${y1} ${bend} ${y2} ${right} ${y2}`, { stroke: colour,
      line: (0.75 + Math.min(row - 3, 9) * Math.min(1, weight)), opacity: faint ? 0.1 : 0.35 + 0.6 * Math.min(1, weight) },
    { weight, query: q, key: k });
  };
  const drawn = [];
  queries.forEach((q, i) => q !== null && keys.forEach((k, j) => {
    if (k === null) return;
    if (chosen.difference && members.length === 2) {
      const change = (rowsOfSides[1].get(q)[k] ?? 0) - (rowsOfSides[0].get(q)[k] ?? 0);
      if (Math.abs(change) >= chosen.threshold) {
        drawn.push([i, j, Math.abs(change), css(signedColour(Math.sign(change), 1)), q, k]);
      }
    } else {
      members.forEach((side, s) => {
        const weight = rowsOfSides[s].get(q)[k];
        if (weight >= chosen.threshold && weight >= LEAST) {
          drawn.push([i, j, weight, isNamed ? sideColour(side.colour) : "accent", q, k]);
        }
      });
    }
  }));
  if (!drawn.length) {
    scene.text(`no weight of ${percent(chosen.threshold)} or more`, (left + right) / 2, height / 2,
      { fill: "soft", align: "center" });
  }
  // Isolated lines are on top.
  for (const it of drawn.sort((a, b) => Number(isFaint(b[4], b[5])) - Number(isFaint(a[4], a[5])) || a[2] - b[2])) line(...it);
  const blocked = query === null ? [] : trace.blocked(members[0].head, query);
  const word = (list, i, position, labels, at, align, isChosen, target) => {
    const y = middle(i);
    if (position === null) return scene.text("⋮", at, y, { size: 12, fill: "soft", align });
    const inset = align === "right" ? at - label + 4 : at - 4;
    if (isChosen) scene.rect(inset, y - row / 2, label - 4, row, { fill: "tint", radius: 3 });
    scene.text(labels[position], at, y, { size, serif: true, align, bold: isChosen, room: label - 16,
      fill: list === keys && blocked[position] ? "soft" : "ink" });
    scene.target(inset, y - row / 2, label, row, back(target), members[0].from.title(labels, position));
  };
  queries.forEach((q, i) => word(queries, i, q, trace.queries, left - 8, "right", q === query, { query: q, key: null }));
  keys.forEach((k, i) => word(keys, i, k, trace.keys, right + 8, "left", k === key, { query, key: k }));
  return queries.includes(null) || keys.includes(null);
}

// As many of `positions` as fit around one of them, with null at a gap.
function around(positions, most, centre) {
  if (positions.length <= most) return positions;
  const at = Math.max(0, positions.indexOf(centre));
  const first = Math.max(0, Math.min(positions.length - most + 2, at - Math.floor(most / 2)));
  return [...(first ? [null] : []), ...positions.slice(first, first + most - 2),
    ...(first + most - 2 < positions.length ? [null] : [])];
}

// All keys, or those with the largest weights from the shown queries, the selected one first.
function keysToShow(members, queries, most) {
  const { trace, query, key } = members[0], length = trace.size.k;
  if (length <= most) return Array.from({ length }, (_, i) => i);
  const largestOf = new Array(length).fill(undefined);
  for (const side of members) {
    for (const q of queries) {
      if (q === null) continue;
      const [least, first] = q === query ? [LEAST, 1] : [Math.max(LEAST, chosen.threshold), 0];
      side.trace.row(side.trace.used, side.head, q)?.forEach((weight, k) => {
        if (weight >= least) largestOf[k] = Math.max(largestOf[k] ?? 0, first + weight);
      });
    }
  }
  return largest(largestOf, Math.floor(most * 0.6), key ?? 0).slice(0, most);
}
