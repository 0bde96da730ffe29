// 6. The page of a report: every head of the model, then one head. The query and its steps are the
// same as in the page of a trace.

// What a label means, after the number of a head. The first three are measured on held-out stories,
// the others on this text.
const MEANS = {
  "previous word": "of held-out words have its largest weight on the word before",
  subject: "of held-out verbs have its largest weight on their subject",
  antecedent: "of held-out pronouns have its largest weight on whom they mean",
  induction: "of its weight, where a token occurred before, lies on what followed it then",
  "duplicate token": "of its weight, where a token occurred before, lies on that occurrence",
  "previous token": "of its weight lies on the token before",
  "next token": "of its weight lies on the token after",
  "same token": "of its weight stays on the token itself",
  "first token (sink)": "of its weight rests on the first token, where weight goes that is not needed",
  separators: "of its weight lies on punctuation and special tokens",
  "nothing (sink logit)": "of its weight goes to its sink, which gives no value",
  spread: "at a time, on average: it looks at nearly everything alike",
  sharp: "at a time, on average: few, and not one kind of them",
  mixed: "at a time, on average",
  NaN: "at a time, on average: its weights are not numbers",
};
// The label below a small map.
const SHORT = {
  induction: "induct.", "duplicate token": "repeat",
  "previous token": "previous", "next token": "next", "same token": "itself",
  "first token (sink)": "first", "nothing (sink logit)": "sink", "previous word": "prev. word",
};
const SHARES = {
  induction: "after an earlier copy", duplicate: "earlier copy",
  previous: "token before", next: "token after", same: "itself", first: "first token",
  separators: "separators", sink: "its sink",
};
const ORDERS = {
  place: ["layer and head", (a, b) => a.layer - b.layer || a.head - b.head],
  sharp: ["lowest entropy first", (a, b) => a.entropy - b.entropy],
  spread: ["highest entropy first", (a, b) => b.entropy - a.entropy],
  label: ["label, strongest first", (a, b) =>
    rank(a) - rank(b) || b.number - a.number || a.layer - b.layer || a.head - b.head],
};
const rank = (head) => Object.keys(MEANS).indexOf(head.label.split(" and ")[0]);
const means = (head) => head.label.split(" and ").map((label) => MEANS[label]).join(", and ");
// The number of a label: a share; or how many keys, if the label says how even the weights are.
const isByEntropy = (head) => ["spread", "sharp", "mixed", "NaN"].includes(head.label);
const amountOf = (head) => (isByEntropy(head) ? `${head.effective.toFixed(1)} keys` : percent(head.number));
const caption = (head) => amountOf(head) + (head.measured ? " held out" : "");
const nearlyAll = (share) => share > 0.995 && share < 1; // which must not be shown as 100%
const percent = (share) =>
  `${nearlyAll(share) ? Math.floor(1000 * share) / 10 : Math.round(100 * share)}%`;

const grid = { label: "all", order: "place" };
const chosenHead = () => pageData.heads.find((it) => it.layer === state.layer && it.head === state.head);

function buildReport() {
  byId("model").hidden = byId("one").hidden = false;
  const counts = new Map();
  for (const { label } of pageData.heads) counts.set(label, (counts.get(label) ?? 0) + 1);
  const labels = [...counts.keys()].sort((a, b) => rank({ label: a }) - rank({ label: b }));
  for (const label of ["all", ...labels]) {
    const radio = make("input", { type: "radio", name: "label", value: label });
    radio.checked = label === "all";
    radio.addEventListener("change", () => { grid.label = label; fillGrid(); });
    byId("labels").append(make("label", {}, radio, make("span", {}, label,
      make("small", {}, ` ${counts.get(label) ?? pageData.heads.length}`))));
  }
  for (const [name, [words]] of Object.entries(ORDERS)) {
    byId("order").append(make("option", { value: name }, words));
  }
  const measured = labels.filter((label) =>
    pageData.heads.some((it) => it.measured && it.label === label));
  byId("labels-note").textContent = measured.length === 0 ? ""
    : `The labels ${measured.join(", ")} were measured on held-out stories and hold for every ` +
      "text; the others, such as previous token, only say where the weight lies on this text.";
  byId("order").addEventListener("change", (event) => { grid.order = event.target.value; fillGrid(); });
  for (const it of pageData.heads) it.tile = tile(it);
  byId("grid").addEventListener("keydown", walkGrid);
  for (const list of ["links", "received"]) {
    byId(list).addEventListener("click", (event) => {
      const { query, key } = event.target.closest("button")?.dataset ?? {};
      if (key === undefined) return;
      go({ key: Number(key), ...(query === undefined ? {} : { query: Number(query) }) });
    });
  }
  byId("numbers").addEventListener("toggle", () => byId("table").replaceChildren(numbers()), { once: true });
  fillGrid();
}

// One head as a small map, painted when it first comes near the screen.
function tile(it) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  const button = make("button", {
    type: "button", role: "radio", class: "tile", "aria-checked": false, tabindex: -1,
    "aria-label": `layer ${it.layer}, head ${it.head}: ${it.label} ${amountOf(it)}, ` +
      `entropy ${it.entropy.toFixed(2)}`,
    title: `layer ${it.layer}, head ${it.head}, ${it.label}: ${amountOf(it)} ${means(it)}`,
  }, canvas,
  make("span", { class: "place", "aria-hidden": "true" }, `${it.layer}·${it.head}`),
  make("span", { class: it.label in { mixed: 1, spread: 1 } ? "does plain" : "does", "aria-hidden": "true" },
    SHORT[it.label] ?? it.label, " ", make("small", {}, caption(it))));
  button.addEventListener("click", () => show(it));
  button.it = it;
  return button;
}

const painter = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting) drawTile(target);
  }
}, { rootMargin: "300px" });

function drawTile(button) {
  painter.unobserve(button);
  if (button.painted) return;
  button.painted = true;
  const { layer: at, head } = button.it;
  const canvas = button.firstChild;
  const weights = layer(at).steps.find((step) => step.name === "weights");
  paint(canvas, weights, head, false); // all at one size, so that they can be compared
  canvas.classList.toggle("coarse", canvas.width < 64);
}

// The heads of the chosen label, in the chosen order; all of them by place: a row for each layer.
function fillGrid() {
  const rows = grid.order === "place" && grid.label === "all";
  const shown = pageData.heads
    .filter((it) => grid.label === "all" || it.label === grid.label)
    .sort(ORDERS[grid.order][1]);
  byId("grid").classList.toggle("by-layer", rows);
  const across = Math.max(...pageData.layers.map((it) => it.size.h ?? 1));
  byId("grid").style.setProperty("--across", across);
  const above = make("div", { class: "row", "aria-hidden": "true" },
    make("span", { class: "row-name" }, "head"),
    Array.from({ length: across }, (_, i) => make("span", { class: "column-name" }, i)));
  byId("grid").replaceChildren(...(rows ? [above, ...pageData.layers.map((_, at) => make("div", { class: "row" },
    make("span", { class: "row-name", "aria-hidden": "true" }, `layer ${at}`),
    shown.filter((it) => it.layer === at).map((it) => it.tile)))] : shown.map((it) => it.tile)));
  for (const it of shown) if (!it.tile.painted) painter.observe(it.tile);
  byId("grid-note").textContent = shown.length === pageData.heads.length ? ""
    : `${count(shown.length, "head")} of ${pageData.heads.length}.`;
  markGrid();
}

function markGrid() {
  const tiles = [...byId("grid").querySelectorAll(".tile")];
  const here = chosenHead().tile;
  for (const it of pageData.heads) {
    it.tile.setAttribute("aria-checked", it.tile === here);
    it.tile.tabIndex = it.tile === here ? 0 : -1;
  }
  if (tiles.length && !tiles.includes(here)) tiles[0].tabIndex = 0;
}

// Arrow keys: left and right to the next tile, up and down to the tile above or below.
function walkGrid(event) {
  const tiles = [...byId("grid").querySelectorAll(".tile")];
  const from = tiles.indexOf(event.target.closest(".tile"));
  if (from < 0) return;
  if (event.key === "Enter") {
    event.preventDefault();
    show(tiles[from].it);
    byId("one-title").focus();
    return;
  }
  const box = (tile) => tile.getBoundingClientRect();
  const level = (by) => {
    const { left, top } = box(tiles[from]);
    const beyond = tiles.filter((tile) => by * (box(tile).top - top) > 4);
    const distance = (tile) => 1e4 * Math.abs(box(tile).top - top) + Math.abs(box(tile).left - left);
    return beyond.sort((a, b) => distance(a) - distance(b))[0];
  };
  const to = {
    ArrowRight: () => tiles[from + 1], ArrowLeft: () => tiles[from - 1],
    ArrowDown: () => level(1), ArrowUp: () => level(-1),
    Home: () => tiles[0], End: () => tiles.at(-1), " ": () => tiles[from],
  }[event.key];
  if (!to) return;
  event.preventDefault();
  const tile = to();
  if (!tile) return;
  show(tile.it);
  tile.focus();
}

// Shows a head at its strongest link.
function show(it) {
  const [query, key] = it.links[0] ?? [state.query, state.key];
  go({ layer: it.layer, head: it.head, query, key });
}

// Begins at the head with the clearest label.
function begin() {
  const named = pageData.heads.filter((it) => rank(it) < rank({ label: "spread" }));
  const pool = named.length ? named : pageData.heads;
  show(pool.reduce((best, it) => (it.number > best.number ? it : best)));
}

function drawReport() {
  markGrid();
  const it = chosenHead();
  byId("one-title").replaceChildren(`Layer ${it.layer}, head ${it.head}: `, make("em", {}, it.label));
  const keys = isByEntropy(it) ? "" : `; it looks at ${it.effective.toFixed(1)} keys at a time, on average`;
  byId("one-lead").textContent = `${amountOf(it)} ${means(it)}. ` +
    `Its entropy is ${it.entropy.toFixed(2)} of at most ${trace.max_entropy.toFixed(2)} nats${keys}.` +
    (trace.module ? ` Module ${trace.module}${trace.cross_attention ? ", from one text into another" : ""}.` : "");
  byId("shares").replaceChildren(make("dl", { class: "shares" },
    Object.entries(it.shares).map(([name, share]) => make("div", {},
      make("dt", {}, SHARES[name] ?? name), make("dd", {}, bar(share), percent(share))))));
  byId("links").replaceChildren(...it.links.map(([query, key, weight]) =>
    make("button", { type: "button", "data-query": query, "data-key": key },
      token(trace.queries[query]), make("small", {}, ` ${query}`),
      make("span", { class: "arrow" }, " looks at "),
      token(trace.keys[key]), make("small", {}, ` ${key}`),
      make("span", { class: "figure" }, weight.toFixed(2)))));
  const top = it.received[0]?.[1] || 1;
  byId("received").replaceChildren(...it.received.map(([key, weight]) =>
    make("button", { type: "button", "data-key": key }, token(trace.keys[key]),
      make("small", {}, ` ${key}`), bar(weight / top),
      make("span", { class: "figure" }, weight.toFixed(2)))));
}

function numbers() {
  const names = [...new Set(pageData.heads.flatMap((it) => Object.keys(it.shares)))];
  return table("Means over the queries; entropy in nats, shares of the weight",
    ["head", "looks at", "by", "entropy", "keys", ...names.map((name) => SHARES[name] ?? name)],
    pageData.heads.map((it) => ({ cells: [
      `layer ${it.layer}, head ${it.head}`, it.label, isByEntropy(it) ? "" : it.number.toFixed(2), it.entropy.toFixed(2),
      it.effective.toFixed(1), ...names.map((name) => it.shares[name]?.toFixed(2) ?? "")] })));
}
