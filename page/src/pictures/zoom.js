// Zoom: for a text whose map is pooled, the exact weights around the selected query and key, which the
// host computes on request.

import { answered } from "../compute.js";
import { Trace } from "../data.js";
import { button, byId } from "../marks.js";
import { go, isBeside, keyOr, placeName, queryOr, shownTrace, snapshot, state } from "../state.js";
import { chosen, screen, store } from "../store.js";

const PART = 32; // queries and keys of a part

// Whether the map is coarser than the text, and the host can compute a part of it.
export const canZoom = () => Boolean(store.source?.can.tile) && !store.edited && !isBeside() && (shownTrace().bins ?? []).some(
  (cells, i) => cells < (i ? shownTrace().size.k : shownTrace().size.q));

// The zoomed part, if it belongs to the selected head.
function zoomedPart() {
  const { zoomed } = store, { layer, head } = state();
  return zoomed?.from === snapshot() && zoomed.layer === layer && zoomed.head === head ? zoomed : null;
}

export const isZoomed = () => zoomedPart() !== null;

// The zoomed part as a side, with its own positions; null if there is none.
export function zoomedSide() {
  const part = zoomedPart(), { query, key } = state();
  if (!part) return null;
  const { layer, head, trace, first } = part;
  const inside = (position, from, size) =>
    (position !== null && position >= from && position < from + size ? position - from : null);
  return {
    name: `${placeName(layer, head)}, exactly`, trace, from: snapshot(), layer, head: 0, colour: 0,
    query: inside(query, first.q, trace.size.q), key: inside(key, first.k, trace.size.k), rest: { row: [], query: null, key: null },
    back: (changes) => ({
      query: changes.query === null ? null : changes.query + first.q,
      key: changes.key === null ? null : changes.key + first.k,
    }),
  };
}

// The exact weight of the selected head, if it is in the part.
export function zoomedWeight(query, key) {
  const part = zoomedPart();
  if (!part) return undefined;
  const { trace, first } = part;
  return trace.row(trace.weights, 0, query - first.q)?.[key - first.k];
}

async function zoom() {
  const from = snapshot(), { size } = shownTrace(), { layer, head } = chosen;
  const around = (centre, length) => {
    const first = Math.max(0, Math.min(length - PART, centre - PART / 2));
    return [first, Math.min(length, first + PART) - 1];
  };
  const part = { layer, head, queries: around(queryOr(), size.q), keys: around(keyOr(), size.k) };
  await answered(async () => {
    const data = await store.source?.tile?.(from.text, chosen.edits, part);
    if (!data || snapshot() !== from) return;
    const first = { q: part.queries[0], k: part.keys[0] };
    store.zoomed = { from, layer, head, first, trace: new Trace(data, []) };
    go({ step: "weights" });
  });
}

export function zoomButton() {
  const title = "Runs the model again, for the weights around the selected query and key";
  return button({ id: "zoom", "aria-pressed": isZoomed(), title }, () => {
    const isComputing = !byId("stop").hidden; // a new request would end it
    if (isZoomed()) {
      store.zoomed = null;
      screen.draw();
    } else if (!isComputing) zoom();
  }, isZoomed() ? "The whole map" : `Exact weights of ${PART} × ${PART}`);
}
