// 10. Zoom: of a text whose map is pooled, the exact weights around the chosen query and key, which
// the model's host computes when they are asked for.

const PART = 32; // queries and keys of a part
let zoomed = null; // { from: snapshot, layer, head, trace, first: {q, k} }

// Is the map coarser than the text, and can the host compute a part of it?
const canZoom = () => Boolean(source?.can.tile) && !edited && !isBeside() && (shownTrace().bins ?? []).some(
  (cells, i) => cells < (i ? shownTrace().size.k : shownTrace().size.q));

const isZoomed = () => zoomed !== null && zoomed.from === snapshot() &&
  zoomed.layer === state().layer && zoomed.head === state().head;

// The part as a side, in its own positions.
function zoomedSide() {
  const { layer, head, trace, first } = zoomed, { query, key } = state();
  const inside = (position, from, size) =>
    (position !== null && position >= from && position < from + size ? position - from : null);
  return {
    name: `${placeName(layer, head)}, exactly`, trace, from: snapshot(), layer, head: 0, colour: 0,
    query: inside(query, first.q, trace.size.q), key: inside(key, first.k, trace.size.k),
    back: (changes) => ({
      query: changes.query === null ? null : changes.query + first.q,
      key: changes.key === null ? null : changes.key + first.k,
    }),
  };
}

// The exact weight of the chosen head, if the part holds it.
function zoomedWeight(query, key) {
  if (!isZoomed()) return undefined;
  const { trace, first } = zoomed;
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
    const data = await source.tile(from.text, chosen.edits, part);
    if (snapshot() !== from) return;
    const first = { q: part.queries[0], k: part.keys[0] };
    zoomed = { from, layer, head, first, trace: new Trace(data, []) };
    go({ step: "weights" });
  });
}

function zoomButton() {
  const button = make("button", { type: "button", id: "zoom", "aria-pressed": isZoomed() },
    isZoomed() ? "The whole map" : `Exact weights of ${PART} × ${PART}`);
  button.title = "The model runs again, for the weights around the chosen query and key";
  button.addEventListener("click", () => {
    const isComputing = !byId("stop").hidden; // what is asked for must not end it
    if (!isZoomed()) return isComputing ? undefined : zoom();
    zoomed = null;
    draw();
  });
  return button;
}
