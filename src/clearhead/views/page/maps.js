// 3. The maps: every head small, one head large, and the numbers under the pointer.

const NAN_COLOUR = [214, 51, 92];

// Viridis, mixed between the points that Python wrote.
function colour(share) {
  const points = pageData.viridis;
  const place = Math.max(0, Math.min(1, share)) * (points.length - 1);
  const low = points[Math.floor(place)], high = points[Math.ceil(place)];
  return low.map((channel, i) => Math.round(channel + (high[i] - channel) * (place % 1)));
}

// One colour range for all heads of a step, so that they can be compared. Weights start at zero.
function extent(step) {
  if (step.extent) return step.extent;
  let low = Infinity, high = -Infinity;
  for (const value of step.cells) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (step.fine) high = Math.max(high, step.fine.top);
  if (low > high) [low, high] = [0, 1];
  if (isShare(step)) low = 0;
  return (step.extent = { low, high: high > low ? high : low + 1 });
}

const isShare = (step) => step.name === "weights" || step.name === "dropped";

// Among many keys most weights are small; on a square-root scale they can be seen.
const onRootScale = (step) => isShare(step) && step.shape.at(-1)[1] > 16;

function shade(step, value) {
  const { low, high } = extent(step);
  const share = (value - low) / (high - low);
  return onRootScale(step) ? Math.sqrt(Math.max(0, share)) : share;
}

// Blocked cells are minus infinity: in the step itself (the maps of a report hold them, too), or
// for weights in the step `masked`.
const maskSource = (step) =>
  (isShare(step) && step.siblings.find((it) => it.name === "masked" && it.hasMap)) || step;
const hasBlocked = (step) => (step.blocked ??= step.cells.includes(-Infinity));

// A function that says whether the mask blocks a cell.
function blockedIn(step, head, fine = true) {
  const { values } = maskSource(step).grid(head, fine);
  return (cell) => values[cell] === -Infinity;
}

// One canvas pixel a cell, which the style sheet enlarges without smoothing. Blocked cells stay
// transparent, and show the hatching behind the canvas.
function paint(canvas, step, head, fine = true) {
  const { rows, columns, values } = step.grid(head, fine);
  const isBlocked = blockedIn(step, head, fine);
  [canvas.width, canvas.height] = [columns, rows];
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(columns, rows);
  for (let cell = 0; cell < values.length; cell++) {
    if (isBlocked(cell)) continue;
    const value = values[cell];
    image.data.set(Number.isNaN(value) ? NAN_COLOUR : colour(shade(step, value)), 4 * cell);
    image.data[4 * cell + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
}

// ---- the choice of step and head -----------------------------------------------------

// What depends on the trace that is shown: its steps and heads.
function fillMaps() {
  byId("which").replaceChildren(byId("which").firstElementChild);
  byId("which").hidden = maps.length < 2;
  byId("heads").replaceChildren();
  for (const step of maps) {
    const radio = make("input", { type: "radio", name: "show", value: step.name });
    radio.checked = step.name === state.show;
    radio.addEventListener("change", () => go({ show: step.name }));
    byId("which").append(make("label", {}, radio, make("span", {}, step.name)));
  }
  for (let head = 0; head < heads; head++) {
    const canvas = make("canvas", { "aria-hidden": "true" });
    const button = make("button", { type: "button", role: "radio", class: "head" },
      canvas, make("span", {}, `head ${numbered("h", head)}`));
    button.addEventListener("click", () => go({ head }));
    canvas.addEventListener("pointermove", (event) => read(cellUnder(event, canvas), head));
    canvas.addEventListener("pointerleave", () => read());
    byId("heads").append(button);
  }
  byId("heads").hidden = heads === 1;
}

function buildMaps() {
  byId("heads").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    go({ head: (state.head + by + heads) % heads });
    byId("heads").children[state.head].focus();
  });
  const canvas = byId("canvas");
  canvas.addEventListener("pointermove", (event) => read(cellUnder(event, canvas)));
  canvas.addEventListener("pointerleave", () => read());
  canvas.addEventListener("click", (event) => goToCell(cellUnder(event, canvas)));
  byId("map").addEventListener("keydown", walk);
  new ResizeObserver(layOut).observe(byId("map").parentElement);
}

function cellUnder(event, canvas) {
  const box = canvas.getBoundingClientRect();
  const along = (offset, size, cells) =>
    Math.max(0, Math.min(cells - 1, Math.floor((offset / size) * cells)));
  return {
    row: along(event.clientY - box.top, box.height, canvas.height),
    column: along(event.clientX - box.left, box.width, canvas.width),
  };
}

function walk(event) {
  const { rows, columns } = weights.grid(state.head);
  const { row, column } = state;
  const moves = {
    ArrowUp: { row: row - 1 }, ArrowDown: { row: row + 1 },
    ArrowLeft: { column: column - 1 }, ArrowRight: { column: column + 1 },
    Home: { column: 0 }, End: { column: columns - 1 },
  };
  const turn = { PageUp: -1, PageDown: 1 }[event.key];
  const to = { row, column, ...moves[event.key] };
  if (!turn && !moves[event.key]) return;
  event.preventDefault();
  if (turn) go({ head: (state.head + turn + heads) % heads });
  else if (to.row >= 0 && to.row < rows && to.column >= 0 && to.column < columns) goToCell(to);
}

// Of a cell that pools several positions: its first key, and the nearest query that is kept.
function goToCell({ row, column }) {
  const [first] = rowSpan(row);
  const near = (position) => Math.abs(position - first);
  const query = trace.kept.reduce((best, next) => (near(next) < near(best) ? next : best));
  go({ query, key: columnSpan(column)[0], row, column });
}

// ---- drawing -------------------------------------------------------------------------

function drawMaps() {
  const step = stepNamed(state.show);
  for (const radio of byId("which").querySelectorAll("input")) {
    radio.checked = radio.value === state.show;
  }
  [...byId("heads").children].forEach((button, head) => {
    const isChosen = head === state.head;
    button.setAttribute("aria-checked", isChosen);
    button.tabIndex = isChosen ? 0 : -1;
    if (button.painted !== step) paint(button.firstChild, step, head);
    button.painted = step;
  });
  paint(byId("canvas"), step, state.head);
  byId("map").setAttribute("aria-label", `Heat map of the ${step.name} of head ${numbered("h", state.head)}`);
  drawScale(step);
  layOut();
  read();
}

const LARGE = 640; // pixels: the height of a large map, so that it fits a screen

// Whole pixels a cell, so that the grid stays even.
function layOut() {
  const { rows, columns, values } = stepNamed(state.show).grid(state.head);
  const map = byId("map"), canvas = byId("canvas");
  const labels = parseFloat(getComputedStyle(map).getPropertyValue("--labels"));
  const room = map.parentElement.clientWidth - labels;
  const cell = Math.max(1, Math.floor(Math.min(60, room / columns, LARGE / rows)));
  map.style.setProperty("--cell", `${cell}px`);
  canvas.style.width = `${cell * columns}px`;
  canvas.style.height = `${cell * rows}px`;
  label(byId("rows"), trace.queries, rows, (at) => rowSpan(at), cell);
  label(byId("columns"), trace.keys, columns, (at) => columnSpan(at), cell);
  map.classList.toggle("lined", cell >= 8);
  writeCells(cell, columns, values);
  placeCursor(byId("pinned"), state);
}

// As many labels as fit at 15 pixels each.
function label(side, tokens, cells, span, size) {
  const every = size < 13 ? Math.ceil(15 / size) : 1;
  side.replaceChildren(...Array.from({ length: cells }, (_, cell) =>
    make("span", {}, cell % every ? "" : token(tokens[span(cell)[0]], 16))));
}

// Where a cell is wide enough for its number, the number stands in it.
function writeCells(cell, columns, values) {
  const step = stepNamed(state.show), isBlocked = blockedIn(step, state.head);
  const written = byId("written");
  written.replaceChildren();
  if (cell < 34) return;
  for (let at = 0; at < values.length; at++) {
    const dark = shade(step, values[at]) < 0.45;
    written.append(make("span", { class: dark ? "on-dark" : "on-light" },
      isBlocked(at) ? "" : short(values[at])));
  }
  written.style.gridTemplateColumns = `repeat(${columns}, ${cell}px)`;
}

const short = (value) =>
  Math.abs(value) < 100 ? value.toFixed(2).replace("-", MINUS) : number(value, 0);

function placeCursor(cursor, cell) {
  cursor.hidden = !cell;
  if (!cell) return;
  cursor.style.transform =
    `translate(calc(${cell.column} * var(--cell)), calc(${cell.row} * var(--cell)))`;
}

function drawScale(step) {
  const { low, high } = extent(step);
  const stops = pageData.viridis.map(([r, g, b]) => `rgb(${r} ${g} ${b})`).join(", ");
  const ramp = make("span", { class: "ramp" });
  ramp.style.background = `linear-gradient(to right, ${stops})`;
  const notes = hasBlocked(maskSource(step)) ? [make("span", { class: "swatch" }), " may not look"] : [];
  byId("scale").replaceChildren(
    make("span", {}, number(low, 2)), ramp, make("span", {}, number(high, 2)),
    make("span", { class: "aside" }, onRootScale(step) ? "square-root scale" : ""),
    make("span", { class: "aside" }, ...notes));
}

// A value as text: the maps of a report hold shades, from which two digits can be read.
const mapValue = (step, value) => (step.map?.top === undefined ? precise(value)
  : `≈ ${Number(Math.max(0, value).toPrecision(2))}`);

// ---- the reading ---------------------------------------------------------------------

// Describes the cell under the pointer, or else the chosen cell: its two tokens, and its number at
// every step that has a map.
function read(cell, head = state.head) {
  const { row, column } = cell ?? state;
  placeCursor(byId("point"), head === state.head ? cell : undefined);
  const tokens = (letter, labels, [first, last]) => {
    const one = (at) => [token(labels[at], 40), make("small", {}, ` ${numbered(letter, at)}`)];
    return last > first ? [...one(first), " to ", ...one(last)] : one(first);
  };
  const numbers = maps.map((step) => {
    const { columns, values } = step.grid(head);
    return make("div", { class: step.name === state.show ? "shown" : undefined },
      make("dt", {}, step.name),
      make("dd", { "data-step": step.name },
        mapValue(step, values[row * columns + column])));
  });
  const looks = blockedIn(weights, head)(row * weights.grid(head).columns + column)
    ? " may not look at " : " looks at ";
  const lines = [
    make("p", {}, make("small", {}, `head ${numbered("h", head)}`)),
    make("p", { class: "looks" },
      ...tokens("q", trace.queries, rowSpan(row, head)), make("span", { class: "arrow" }, looks),
      ...tokens("k", trace.keys, columnSpan(column, head))),
    make("dl", {}, ...numbers),
  ];
  if (trace.block) {
    const [high, wide] = trace.block;
    lines.push(make("p", {}, make("small", {}, `the largest of ${high} × ${wide} cells`)));
  } else if (trace.bins) {
    const { rows, columns } = weights.grid(head);
    const pooled = rows < trace.size.q || columns < trace.size.k;
    lines.push(make("p", {}, make("small", {}, pooled
      ? "the weight on these keys together, a mean over these queries, read from the map's shade"
      : "read from the map's shade; the exact weight stands below")));
  }
  byId("readout").replaceChildren(...lines);
  for (const [id, at] of [["rows", row], ["columns", column]]) {
    [...byId(id).children].forEach((span, i) => span.classList.toggle("here", i === at));
  }
  const spot = byId("map-cell");
  spot.textContent = byId("readout").textContent;
}
