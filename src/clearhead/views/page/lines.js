// 4. The lines: one query on the left, the keys it looks at on the right.

const LINE = 28, GAP = 14; // pixels of a token and of a gap, as in the style sheet
const MOST = 32; // tokens a side, which fit a screen

function buildLines() {
  listen(byId("queries"), "query", (by) => {
    const at = trace.kept.indexOf(state.query) + by;
    return trace.kept[Math.max(0, Math.min(trace.kept.length - 1, at))];
  });
  listen(byId("keys"), "key", (by) =>
    Math.max(0, Math.min(trace.keys.length - 1, state.key + by)));
}

function listen(list, what, moved) {
  list.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 };
    if (!(event.key in by)) return;
    event.preventDefault();
    go({ [what]: moved(by[event.key]) });
  });
  list.addEventListener("click", (event) => {
    const option = event.target.closest("[role=option]");
    if (option) go({ [what]: Number(option.dataset.position) });
  });
}

function drawLines() {
  const row = rowOf(usedWeights), before = rowOf(weights), masked = maskedKeys();
  const slot = trace.kept.indexOf(state.query);
  const queries = elideAround(trace.kept.length, slot).map((i) => i === null ? null : trace.kept[i]);
  const keys = largest(row, MOST, state.key);

  // If not every query is kept, each shows its position.
  const skips = trace.kept.some((position, i) => position !== i);
  fill(byId("queries"), queries, state.query, (position) =>
    skips ? [query(position), make("small", {}, ` ${numbered("q", position)}`)] : [query(position)]);
  fill(byId("keys"), keys, state.key, (position) => [
    key(position),
    bar(row[position]),
    make("span", { class: "figure" }, masked[position] ? "masked"
      : row[position] === 0 && before[position] > 0 ? "dropped" : amount(row, position)),
  ], (position) => (masked[position] ? "masked" : ""));

  const curves = byId("curves"), SVG = "http://www.w3.org/2000/svg";
  const [left, right] = [queries, keys].map(middles);
  const height = Math.max(left.height, right.height);
  curves.setAttribute("viewBox", `0 0 100 ${height}`);
  curves.style.height = `${height}px`;
  const from = left.at[queries.indexOf(state.query)];
  curves.replaceChildren(...keys.flatMap((position, i) => {
    const weight = position === null ? 0 : row[position];
    if (!(weight > 0)) return [];
    const to = right.at[i];
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", `M 0 ${from} C 50 ${from} 50 ${to} 100 ${to}`);
    path.setAttribute("stroke-width", (1 + 14 * Math.min(1, weight)).toFixed(2));
    path.setAttribute("stroke-opacity", (0.2 + 0.75 * Math.min(1, weight)).toFixed(3));
    path.setAttribute("data-key", position);
    path.setAttribute("class", position === state.key ? "chosen" : "");
    return [path];
  }));
  const drawn = keys.filter((position) => position !== null).length;
  byId("lines-note").textContent = drawn < trace.keys.length
    ? `${count(drawn, "key")} of ${trace.keys.length.toLocaleString("en")}, the largest weights among them.` : "";
}

// A weight as text. One that is not kept is at most the smallest that is.
function amount(row, position) {
  if (row[position] !== undefined) return number(row[position]);
  return `≤ ${number(Math.min(...row.filter((weight) => weight !== undefined)))}`;
}

// The height of a list, and the middle of each of its lines.
function middles(positions) {
  let height = 0;
  const at = positions.map((position) => {
    const line = position === null ? GAP : LINE;
    height += line;
    return height - line / 2;
  });
  return { at, height };
}

// Which queries are listed: consecutive ones around the chosen one, with null for each gap.
function elideAround(length, chosen) {
  const first = Math.max(0, Math.min(length - MOST, chosen - MOST / 2));
  const window = Array.from({ length: Math.min(MOST, length) }, (_, i) => first + i);
  return withGaps(window, length);
}

function fill(list, positions, chosen, write, kind = () => "") {
  list.replaceChildren(...positions.map((position) => {
    if (position === null) return make("div", { class: "gap", "aria-hidden": "true" }, "⋮");
    const option = make("div", {
      role: "option", id: `${list.id}-${position}`, class: kind(position),
      "data-position": position, "aria-selected": position === chosen,
    }, ...write(position));
    return option;
  }));
  list.setAttribute("aria-activedescendant", `${list.id}-${chosen}`);
}
