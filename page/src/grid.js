// The grid of the heads: tiles as large as their pane allows.

import { byId } from "./marks.js";
import { snapshot } from "./state.js";
import { narrow, sheet, store } from "./store.js";

export const MANY_HEADS = 64; // more are grouped by label
const LEAST_TILE = 14, LEAST_TARGET = 40, LARGEST_TILE = 150; // pixels; a target of a finger
const LABEL_HEIGHT = 22, LEAST_LABELLED = 50, ROLE = 1.7; // a tile with a role is larger
const AXIS = 30, AXIS_WITH_PART = 60, COLUMN_NAME = 26; // pixels, of the name of a layer and of a head
const GROUP_GAP = 8; // pixels, beside and below the name of a group
const gapOf = () => (store.tiles.length > MANY_HEADS ? 3 : 6);

export const tileSize = (tile) => Math.round(parseFloat(getComputedStyle(tile).getPropertyValue("--tile")));

// Sets the largest tiles that fit. If none do, the grid scrolls.
export function layOutGrid() {
  const grid = byId("grid"), { clientWidth: width, clientHeight } = grid;
  const height = narrow.matches ? 0 : clientHeight; // a narrow page scrolls, so its tiles are as large as a finger
  if (!width || !store.tiles.length) return;
  grid.style.setProperty("--gap", `${gapOf()}px`);
  const groups = [...grid.querySelectorAll(".group")];
  if (groups.length) layOutGroups(grid, groups, width - 4, height - 4);
  else layOutRows(grid, width - 4, height - 4);
}

const leastTile = () => (narrow.matches ? LEAST_TARGET : LEAST_TILE);

// A row or more for each group; the tiles of roles are larger.
function layOutGroups(grid, groups, width, height) {
  const gap = gapOf(), heading = grid.firstElementChild.offsetWidth + GROUP_GAP, room = narrow.matches ? width : width - heading;
  const heightOf = (group, size) => {
    const tile = sizeIn(group, size), columns = Math.max(1, Math.floor((room + gap) / (tile + gap)));
    return Math.ceil(group.children.length / columns) * (tile + gap) + GROUP_GAP;
  };
  const fits = (size) => groups.reduce((sum, group) => sum + heightOf(group, size), 0) <= height;
  let size = LARGEST_TILE / 2;
  while (size > leastTile() && !fits(size)) size--;
  grid.classList.remove("labelled", "matrix");
  for (const group of groups) group.style.setProperty("--tile", `${sizeIn(group, size)}px`);
  grid.columns = Math.max(1, Math.floor((room + gap) / (size + gap)));
}

const sizeIn = (group, size) => (group.classList.contains("role") ? Math.round(size * ROLE) : size);

// Rows of nearly equal length. By place, a layer begins a new row, or several layers share one.
function layOutRows(grid, width, height) {
  const layers = snapshot().layers, count = store.tiles.length, isByPlace = sheet.order === "place";
  const counts = Array.from({ length: layers }, (_, i) => snapshot().layer(i).heads), across = Math.max(...counts);
  const splits = Array.from({ length: across }, (_, i) => ({ columns: Math.ceil(across / (i + 1)), rows: layers * (i + 1), side: 1 }));
  const shared = counts.every((it) => it === across)
    ? Array.from({ length: layers - 1 }, (_, i) => ({ columns: across * (i + 2), rows: Math.ceil(layers / (i + 2)), side: i + 2 })) : [];
  const any = Array.from({ length: count }, (_, i) => ({ columns: i + 1, rows: Math.ceil(count / (i + 1)), side: 1 }));
  const gap = gapOf(), sizes = (isByPlace ? [...splits, ...shared] : any).map((it) => {
    const wide = Math.floor((width + gap) / it.columns) - gap, high = Math.floor((height + gap) / it.rows) - gap;
    const labelled = Math.min(wide, high - LABEL_HEIGHT, LARGEST_TILE);
    return labelled >= LEAST_LABELLED ? { ...it, size: labelled, isLabelled: true }
      : { ...it, size: Math.min(wide, high, LARGEST_TILE), isLabelled: false };
  });
  const isBetter = (a, b) => (a.isLabelled !== b.isLabelled ? a.isLabelled : a.size > b.size);
  let best = sizes.reduce((a, b) => (isBetter(b, a) ? b : a));
  if (best.size < leastTile()) {
    const columns = Math.floor((width + gap) / (leastTile() + gap));
    best = { columns: isByPlace ? Math.min(across, columns) : columns, rows: 0, side: 1, size: leastTile(), isLabelled: false };
  }
  const isMatrix = sheet.order === "matrix";
  if (isMatrix) {
    const axis = snapshot().layer(0).part ? AXIS_WITH_PART : AXIS;
    grid.style.setProperty("--axis", `${axis - gap}px`);
    const wide = Math.floor((width - axis + gap) / across) - gap, high = Math.floor((height + gap) / (layers + 1)) - gap;
    const size = Math.max(narrow.matches ? wide : Math.min(wide, high, LARGEST_TILE), leastTile()); // or it scrolls
    best = { columns: across, rows: layers, side: 1, size, isLabelled: false };
    const every = Math.ceil(COLUMN_NAME / (best.size + gap)); // a name is wider than a small tile
    grid.querySelectorAll(".axis.column").forEach((it, i) => it.classList.toggle("unnamed", i % every > 0));
  }
  grid.classList.toggle("matrix", isMatrix);
  grid.style.setProperty("--columns", best.columns);
  grid.style.setProperty("--tile", `${best.size}px`);
  grid.classList.toggle("labelled", best.isLabelled);
  grid.columns = best.columns;
  for (const it of store.tiles) {
    it.style.gridColumnStart = isByPlace && it.head === 0 ? (it.layer % best.side) * across + 1 : "";
  }
}
