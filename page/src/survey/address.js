// Changes of the selection, and its address, with which a link opens the same view.

import { LARGEST, START, axes, chosen, head, metricsOf, screen, settle, survey } from "./store.js";
import { COMPONENTS, EXAMPLES, PARTS, SHADES, settleVectors, vectorsOf } from "./vector_data.js";

// What an address can have, besides a head and its metric, and a decile.
const CHOICES = { x: axes, y: axes, colour: axes, vectors: Object.keys(PARTS), examples: Object.keys(EXAMPLES),
  components: Object.keys(COMPONENTS), shade: Object.keys(SHADES) };
const OF_VECTORS = ["vectors", "examples", "components", "shade", "group", "example"];
const KNOWN = ["layer", "head", "metric", "decile", "x", "y", "colour", ...OF_VECTORS];

/** Changes the selection. Its view is a step of the history, unless it `replaces` the one before. */
export function go(changes, replaces = false) {
  const { at } = chosen;
  Object.assign(chosen, changes);
  if (chosen.at !== at) Object.assign(chosen, { group: "", example: "", ...(vectorsOf(chosen.at) ? {} : { vectors: "" }) });
  settle();
  settleVectors();
  screen.misread = [];
  writeAddress(replaces);
  screen.draw();
}

function writeAddress(replaces) {
  const { layer, head: number } = head(), { metric, decile, x, y, colour } = chosen;
  const parts = { layer, head: number, metric, decile, x, y, colour };
  for (const name of OF_VECTORS) if (chosen.vectors && chosen[name]) parts[name] = chosen[name];
  const address = `#${new URLSearchParams(/** @type {any} */ (parts))}`;
  if (address === location.hash) return;
  try {
    if (replaces) history.replaceState(null, "", address);
    else history.pushState(null, "", address);
  } catch { /* A page in a notebook's frame has no address. */ }
}

/** Selects what an address names, and without a part of it what the page opens with. What the page does not have is
 * `screen.misread`; vectors are not known before they are computed. */
export function readAddress(hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, "")), misread = /** @type {string[]} */ ([]);
  Object.assign(chosen, START);
  misread.push(...[...parts.keys()].filter((name) => !KNOWN.includes(name)).map((name) => `“${name}”`));
  if (parts.has("layer") || parts.has("head")) {
    const layer = parts.get("layer") ?? "0", number = parts.get("head") ?? "0";
    const at = survey.heads.findIndex((it) => String(it.layer) === layer && String(it.head) === number);
    if (at < 0) misread.push(`L${layer}H${number}`);
    else chosen.at = at;
  }
  const choices = { metric: metricsOf(head()), decile: Array.from({ length: LARGEST + 1 }, (_, i) => String(i)), ...CHOICES };
  for (const [name, known] of Object.entries(choices)) {
    const value = parts.get(name);
    if (value === null) continue;
    if (!known.includes(value)) misread.push(`${name} “${value}”`);
    else chosen[name] = name === "decile" ? Number(value) : value;
  }
  if (chosen.vectors && survey.host !== "server") {
    misread.push(`vectors “${chosen.vectors}” without a server`);
    chosen.vectors = "";
  }
  for (const name of ["group", "example"]) {
    const value = parts.get(name) ?? "";
    if (chosen.vectors) chosen[name] = value;
    else if (value) misread.push(`${name} “${value}”`);
  }
  settle();
  screen.misread = misread;
}
