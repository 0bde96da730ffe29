// The heads: a small map and a description of each.

import { headsThatLook } from "./first_edit.js";
import { shareColour, sideColour } from "./ink.js";
import { MANY_HEADS, layOutGrid, tileSize } from "./grid.js";
import { effectOf } from "./labels.js";
import { button, byId, clip, count, make, number, percent } from "./marks.js";
import { showPane } from "./panes.js";
import { patchesOf } from "./pictures/image.js";
import { blockedIn } from "./pictures/map.js";
import { MANY_WORDS } from "./pictures/text.js";
import { isEvenness, labelsOf, meaningOf, rankOf, roleOf, rowOf, shareName, shortOf } from "./roles.js";
import { fillCells } from "./scene.js";
import { MOST_OTHERS, go, isAt, isOff, keyOr, placeInWords, placeName, point, shownTrace, snapshot, state, toggled, without } from "./state.js";
import { chosen, sheet, store } from "./store.js";
import { exampleOf, shownWeight } from "./telling.js";
import { isolated } from "./words.js";

/** @import { Trace } from "./data.js" */

const ORDERS = {
  place: ["layer and head", (a, b) => a.layer - b.layer || a.head - b.head],
  matrix: ["matrix of layers and heads", (a, b) => a.layer - b.layer || a.head - b.head],
  label: ["label, strongest first", (a, b) =>
    writerRank(a) - writerRank(b) || rankOf(rowOf(a)) - rankOf(rowOf(b)) || b.number - a.number || a.layer - b.layer || a.head - b.head],
  sharp: ["lowest entropy first", (a, b) => a.entropy - b.entropy],
  spread: ["highest entropy first", (a, b) => b.entropy - a.entropy],
  effect: ["largest effect first", (a, b) => Math.abs(b.effect) - Math.abs(a.effect)],
};
// The number of a head: a fraction; or a number of tokens, for labels about entropy.
const isByEntropy = (it) => isEvenness(it.labels[0]);
const amountOf = (it) => (isByEntropy(it) ? `${it.effective.toFixed(1)} tokens` : percent(it.number));
// The label of the heads that write the predicted token; null if these are unknown.
const writingLabel = () => (snapshot().nextToken.writers.length ? `writes “${isolated(clip(snapshot().nextToken.token, 12))}”` : null);
const writerAt = (it) => snapshot().nextToken.writers.findIndex((x) => x.layer === it.layer && x.head === it.head);
const writes = (it) => writerAt(it) >= 0;
const writerRank = (it) => (writes(it) ? writerAt(it) : Number.MAX_SAFE_INTEGER);
const isPlain = (it) => !it || (isByEntropy(it) && it.labels[0] !== "sharp");

export function buildHeads() {
  if (snapshot().findings.size > MANY_HEADS) sheet.order = "label";
  for (const [name, [words]] of Object.entries(ORDERS)) {
    byId("order").append(make("option", { value: name }, words));
  }
  byId("order").value = sheet.order;
  byId("order").addEventListener("change", (event) => {
    sheet.order = event.target.value;
    fillHeads();
    drawHeads();
  });
  byId("example").addEventListener("click", () => go({ query: byId("example").query, key: null }));
  byId("grid").addEventListener("keydown", walkGrid);
  byId("grid").addEventListener("pointerleave", () => point(null));
  new ResizeObserver(layOutGrid).observe(byId("grid"));
}

// Rebuilds labels and tiles for another snapshot.
export function fillHeads() {
  const found = [...snapshot().findings.values()];
  byId("panes").classList.toggle("many", found.length > MANY_HEADS);
  byId("order").parentElement.hidden = found.length < 2;
  const haveEffects = found.length > 0 && found.every((it) => it.effect !== null);
  byId("order").lastElementChild.hidden = !haveEffects;
  if (sheet.order === "effect" && !haveEffects) byId("order").value = sheet.order = "place";
  const counts = new Map();
  for (const label of found.flatMap(labelsOf)) counts.set(label, (counts.get(label) ?? 0) + 1);
  const names = [...counts.keys()].sort((a, b) => rankOf(a) - rankOf(b));
  if (!counts.has(sheet.label) && sheet.label !== writingLabel()) sheet.label = null;
  byId("labels").replaceChildren(...names.map((label) => labelButton(label, counts.get(label))));
  byId("labels").hidden = names.length < 2 || sheet.order === "label"; // there each group has its button
  const places = [...snapshot().places()];
  const order = ORDERS[sheet.order][1];
  if (found.length) {
    const it = ({ layer, head }) => snapshot().finding(layer, head) ??
      { layer, head, labels: ["mixed"], roles: [], measured: false, number: 0, entropy: 0 };
    places.sort((a, b) => order(it(a), it(b)));
  }
  store.tiles = places.map(tile);
  byId("grid").classList.toggle("grouped", sheet.order === "label");
  byId("grid").replaceChildren(...({ label: inGroups, matrix: withAxes }[sheet.order]?.(store.tiles) ?? store.tiles));
  const [row, more] = byId("grid").querySelector(".label[data-elsewhere] small")?.textContent.split("+").map(Number) ?? [];
  byId("grid-note").textContent = snapshot().data.missing ?? (more
    ? `“${row} + ${more}”: ${count(row, "head")} in this row, and ${more} in other rows that ${more === 1 ? "has" : "have"} its role, too.` : "");
  byId("heads-pane").hidden = places.length === 1;
  layOutGrid();
}

const SHORT_PARTS = /** @type {Record<string, string>} */ ({ encoder: " enc.", decoder: " dec.", "cross-attention": " cross" });

// The tiles of a matrix of layers and heads, with a name before each row and above each column.
function withAxes(tiles) {
  const axis = (kind, words) => make("span", { class: `axis ${kind}`, "aria-hidden": "true" }, words);
  const across = Math.max(...tiles.map((it) => it.head)) + 1;
  return [axis("row", ""), ...Array.from({ length: across }, (_, i) => axis("column", `H${i}`)),
    ...tiles.flatMap((it) => (it.head === 0 ? [axis("row", `L${it.layer}${SHORT_PARTS[snapshot().layer(it.layer).part] ?? ""}`), it] : [it]))];
}

// The tiles in a row for each label, with a button that fades the others. A role that no head has as its row has
// a button, too.
function inGroups(tiles) {
  const groups = new Map(), found = [...snapshot().findings.values()];
  const labelled = new Set(found.flatMap(labelsOf).sort((a, b) => rankOf(a) - rankOf(b)));
  for (const label of [...(writingLabel() ? [writingLabel()] : []), ...labelled]) groups.set(label, []);
  for (const it of tiles) {
    const finding = snapshot().finding(it.layer, it.head), label = (writes(it) && writingLabel()) || (finding ? rowOf(finding) : "");
    groups.set(label, [...(groups.get(label) ?? []), it]);
  }
  const elsewhere = (label, group) => (isEvenness(label) || label === writingLabel() ? 0
    : found.filter((it) => labelsOf(it).includes(label)).length - group.length);
  return [...groups].filter(([label, group]) => group.length || elsewhere(label, group)).flatMap(([label, group]) => [
    labelButton(label, group.length, elsewhere(label, group)),
    make("div", { class: isSmall(label) ? "group" : "group role", role: "presentation" }, group)]);
}

// Whether a label has small tiles: a sink has its weight where it does least.
const isSmall = (label) => isEvenness(label) || roleOf(label)?.kind === "sink";

// A button that shows the heads with a label and fades the others. More of them may be in other groups.
function labelButton(label, number, elsewhere = 0) {
  const what = label === writingLabel() ? `it writes a large part of the logit of the predicted next token, ${snapshot().nextToken.token}.`
    : isEvenness(label) ? `the head has no role, and ${roleOf(label)?.claim}.` : `a large part ${meaningOf([label])}.`;
  const more = elsewhere ? ` This is also a role of ${count(elsewhere, "head")} in other groups.` : "";
  const title = `${label}: ${what}${more} Click to show these heads.`;
  return button({ class: "label", "data-elsewhere": elsewhere || undefined, "aria-pressed": label === sheet.label, title }, () => {
    sheet.label = sheet.label === label ? null : label;
    fillHeads();
    drawHeads();
  }, make("span", {}, label), make("small", {}, ` ${number}${elsewhere ? ` + ${elsewhere}` : ""}`));
}

function tile({ layer, head }) {
  const it = snapshot().finding(layer, head), name = placeName(layer, head);
  const spoken = name.replace(/^L(\d+)H(\d+)$/, "layer $1, head $2"); // for a screen reader
  const fades = sheet.label !== null && !(it && (labelsOf(it).includes(sheet.label) || (writes(it) && sheet.label === writingLabel())));
  const pointerenter = (event) => { if (event.pointerType === "mouse") point({ layer, head }); };
  const element = button({
    role: "radio", pointerenter, class: fades ? "tile faded" : "tile", tabindex: -1,
    "data-place": `${layer}.${head}`,
    title: it ? leadOf(it) : undefined,
    "aria-label": it ? `${namedWithPart(layer, spoken)}: ${it.labels.join(" and ")} ${amountOf(it)}, ` +
      `entropy ${it.entropy.toFixed(2)}` : spoken,
  }, () => choosePlace(layer, head), make("canvas", { "aria-hidden": "true" }),
  make("span", { class: "place", "aria-hidden": "true" }, name), // short, below a tile
  make("span", { class: isPlain(it) ? "does plain" : "does", "aria-hidden": "true" },
    it ? shortOf(it.labels) : ""));
  return Object.assign(element, { layer, head });
}

function choosePlace(layer, head) {
  go(store.isAdding ? { others: toggled(chosen.others, layer, head).slice(-MOST_OTHERS) } : { layer, head });
  showPane("picture-pane");
}

export function drawHeads() {
  const { layer, head, others } = state();
  for (const it of store.tiles) {
    const pixels = 2 * (tileSize(it) || 60);
    const here = it.layer === layer && it.head === head, isChosen = it.layer === chosen.layer && it.head === chosen.head;
    it.setAttribute("aria-checked", isChosen);
    it.tabIndex = isChosen ? 0 : -1;
    it.classList.toggle("pointed", here);
    it.classList.toggle("off", isOff(it.layer, it.head));
    const side = others.findIndex(isAt(it.layer, it.head));
    it.style.setProperty("--side", side >= 0 ? sideColour(side + 1) : here && others.length ? sideColour(0) : "");
    it.classList.toggle("side", side >= 0);
    const trace = snapshot().layer(it.layer);
    const query = trace.picture ? chosen.query : null; // a tile of an image shows one query
    const { registers } = chosen;
    if (it.painted === trace && it.dark === store.isDark && it.query === query && it.registers === registers) continue;
    Object.assign(it, { painted: trace, dark: store.isDark, query, registers });
    paintTile(it.firstChild, trace, it.head, pixels, query);
  }
}

// A small map: pixels without smoothing if its cells are large, else smoothed by the browser.
function paintTile(canvas, /** @type {Trace} */ trace, head, pixels, query) {
  if (trace.picture) {
    const { rows, columns } = trace.picture, row = query === null ? trace.received(head) : trace.drawn(head, query);
    const { weights, top } = patchesOf(trace, head, row);
    fillCells(canvas, rows, columns, (cell) => shareColour((weights[cell] || 0) / top));
    canvas.classList.toggle("coarse", rows < pixels);
    return;
  }
  const grid = trace.weights.grid(head, false), isBlocked = blockedIn(trace, trace.weights, head, false);
  fillCells(canvas, grid.rows, grid.columns, (cell) =>
    (isBlocked(cell) ? null : shareColour(grid.values[cell])));
  canvas.classList.toggle("coarse", grid.rows < pixels);
}

// Arrow keys: left and right to the next head, up and down to the one above or below.
function walkGrid(event) {
  const from = store.tiles.indexOf(event.target.closest(".tile"));
  if (from < 0) return;
  const columns = byId("grid").columns;
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -1e9, End: 1e9 }[event.key];
  if (event.key === "Enter" && !store.isAdding) {
    event.preventDefault();
    byId("picture").focus();
  }
  if (!by) return;
  event.preventDefault();
  const to = store.tiles[Math.max(0, Math.min(store.tiles.length - 1, from + by))];
  if (!store.isAdding) go({ layer: to.layer, head: to.head });
  to.focus();
}

// ---- the selected head in words ------------------------------------------------------------

export function drawHeadLine() {
  const { layer, head } = state(), it = snapshot().finding(layer, head);
  const does = it ? [...(writes(it) ? [writingLabel()] : []), ...(isByEntropy(it) ? [] : new Set([rowOf(it), ...labelsOf(it)]))] : [];
  const named = does.flatMap((label, i) => [i ? ", " : ": ", make("em", {}, label), overWords(it, label)]);
  byId("head-title").replaceChildren(namedWithPart(layer, placeInWords(layer, head)), ...named);
  byId("head-title").title = byId("head-title").textContent;
  const why = it && snapshot().data.effects_withheld, effect = effectOf(it), others = othersInWords(it);
  const short = why ? "without it: not measured" : effect ? `without it: ${effect.without}` : "";
  const sentence = why || (effect?.sentence ?? "");
  Object.assign(byId("effect"), { textContent: others ? `${short}. ${others}` : short,
    title: others ? `${sentence} ${STAND_IN}` : sentence });
  drawExample(layer, head, it);
  const isHeadOff = isOff(layer, head);
  byId("head-lead").classList.toggle("roomy", Boolean(it));
  byId("head-lead").textContent = isHeadOff ? "It is switched off: its output is 0." : it ? leadOf(it) : stepsInWords();
  byId("head-lead").title = it && !isHeadOff ? [it.evidence, it.withheld, sharesInWords(it)].filter(Boolean).join("\n") : "";
}

// A link to the token that shows the role of the head, if the selected one does not: the last one, if it writes the
// predicted token.
function drawExample(layer, head, it) {
  // A head that is pointed at has none, and leaves its room, so that nothing moves.
  const isOther = layer !== chosen.layer || head !== chosen.head;
  byId("example").style.visibility = isOther ? "hidden" : "";
  if (isOther) return;
  const trace = snapshot().layer(layer), { query } = chosen, label = it ? rowOf(it) : "", last = trace.size.q - 1;
  const writer = snapshot().writers(trace, last).find((x) => x.layer === layer && x.head === head);
  const isShown = writer ? query === last : query !== null && shownWeight(trace, head, query, label)[0] > 0;
  const isLeftOut = isShown || !trace.isOneText || trace.size.k > MANY_WORDS || isOff(layer, head);
  const best = isLeftOut ? null : writer ? last : exampleOf(trace, head, label);
  byId("example").hidden = best === null;
  if (best === null) return;
  const key = writer ? writer.key : shownWeight(trace, head, best, label)[1];
  byId("example").textContent = `seen at “${isolated(clip(trace.queries[best], 10))}” → “${isolated(clip(trace.keys[key], 10))}”`;
  byId("example").query = best;
}

function namedWithPart(layer, name) {
  const { part } = snapshot().layer(layer);
  return part ? `${name} (${part})` : name;
}

// The fraction of a role, and the tokens over which it is.
function overWords(it, label) {
  const [mass, queries] = it.masses[it.roles.indexOf(label)] ?? [];
  return mass === undefined ? "" : make("small", {}, ` ${number(mass, 2)} over ${count(queries, "token")}`);
}

function leadOf(it) {
  const says = isByEntropy(it) ? `It looks at ${amountOf(it)} ${meaningOf(it.labels)}.` : `${amountOf(it)} ${meaningOf(it.labels)}.`;
  return [says, it.evidence, it.withheld].filter(Boolean).join(" ");
}

// For a head with a strong label and a small effect: the other heads that look at the same key. A small
// effect is under a tenth of the largest.
const STRONG = 0.5, MOST_NAMED = 3;
const STAND_IN = "A label describes where a head looks, and the effect measures what changes without it. " +
  "The effect is small if other heads contribute the same.";

function othersInWords(it) {
  const { layer, head, query } = state();
  if (it?.effect == null || query === null || isByEntropy(it) || it.number < STRONG) return "";
  const found = [...snapshot().findings.values()];
  const largest = Math.max(...found.map((other) => Math.abs(other.effect ?? 0)));
  if (Math.abs(it.effect) >= largest / 10 || shownTrace().size.k > MANY_WORDS) return "";
  const looking = headsThatLook(snapshot(), query, keyOr());
  const others = without(looking, layer, head);
  if (!others.length || others.length === looking.length) return "";
  const named = others.slice(0, MOST_NAMED).map((at) => placeName(...at)), more = others.length - named.length;
  const names = more ? [...named, `${more} more`] : named;
  return names.length === 1 ? `Head ${names[0]} looks there, too.`
    : `Heads ${names.slice(0, -1).join(", ")} and ${names.at(-1)} look there, too.`;
}

const sharesInWords = (it) => Object.entries(it.shares ?? {})
  .map(([name, share]) => `${shareName(name)} ${percent(share)}`).join(", ");

function stepsInWords() {
  const { size } = shownTrace();
  return `${count(size.q, "query", "queries")}, ${count(size.k, "key")}` +
    (size.d ? `, ${count(size.d, "feature")} per head` : "");
}
