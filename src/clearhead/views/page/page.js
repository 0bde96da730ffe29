// 7. The page: one state, one function that changes it, and the first drawing.

const selects = {
  layer: byId("layer"), head: byId("head"), query: byId("query"), key: byId("key"),
};

// Every change of the state goes through here; what depends on it is drawn again.
function go(changes) {
  const moved = "query" in changes || "key" in changes;
  const newLayer = layers && "layer" in changes && layer(changes.layer) !== trace;
  Object.assign(state, changes);
  if (newLayer) {
    open(layer(state.layer));
    fillIn();
  }
  if (!trace.kept.includes(state.query)) state.query = nearest(trace.kept, state.query);
  if (newLayer || "head" in changes || (moved && !("row" in changes))) {
    const { rows, columns } = weights.grid(state.head);
    state.row = cellOf(state.query, trace.size.q, rows, trace.block?.[0]);
    state.column = cellOf(state.key, trace.size.k, columns, trace.block?.[1]);
  }
  for (const [what, select] of Object.entries(selects)) choose(select, state[what]);
  const onlyStage = Object.keys(changes).every((name) => name === "stage");
  if (!onlyStage) {
    if (layers) drawReport();
    drawMaps();
    drawLines();
  }
  drawSteps();
}

const nearest = (positions, to) => positions.reduce((best, next) =>
  (Math.abs(next - to) < Math.abs(best - to) ? next : best));

// The controls of the trace that is shown: its steps, heads and queries.
function fillIn() {
  fillBar();
  fillMaps();
  fillSteps();
  describeWhatIsLeftOut();
  if (!steps[state.stage]) state.stage = 0;
  if (!maps.some((step) => step.name === state.show)) state.show = "weights";
  state.head = Math.min(state.head, heads - 1);
  state.key = Math.min(state.key, trace.size.k - 1);
}

function fillBar() {
  const option = (value, text) => make("option", { value }, text);
  const named = (letter, tokens) => (i) =>
    option(i, `${numbered(letter, i)} · ${clip(tokens[i], 24)}`);
  const all = (length) => Array.from({ length }, (_, i) => i);
  selects.layer.replaceChildren(...all(layers?.length ?? 0).map((i) => option(i, i)));
  selects.layer.parentElement.hidden = !layers;
  selects.head.replaceChildren(...all(heads).map((i) => option(i, numbered("h", i))));
  selects.query.replaceChildren(...trace.kept.map(named("q", trace.queries)));
  // A list of many thousands would be slow; the chosen key is added if it is not listed.
  const every = Math.ceil(trace.keys.length / MOST_LISTED);
  selects.key.replaceChildren(
    ...all(trace.keys.length).filter((i) => i % every === 0).map(named("k", trace.keys)));
}

const MOST_LISTED = 2048;

function choose(select, value) {
  select.value = value;
  if (select.selectedIndex >= 0 || select !== selects.key) return;
  select.append(make("option", { value }, `${numbered("k", value)} · ${clip(trace.keys[value], 24)}`));
  select.value = value;
}

function buildBar() {
  for (const [what, select] of Object.entries(selects)) {
    select.addEventListener("change", () => go({ [what]: Number(select.value) }));
  }
}

function buildTheme() {
  const button = byId("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  button.hidden = false;
  let isDark = dark.matches;
  const show = () => {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    button.textContent = isDark ? "Light" : "Dark";  // the theme that it changes to
  };
  button.addEventListener("click", () => { isDark = !isDark; show(); });
  dark.addEventListener("change", () => { isDark = dark.matches; show(); });
  show();
}

// Print every step, one below the other.
function buildPrint() {
  addEventListener("beforeprint", () => pageData.heads?.forEach((it) => drawTile(it.tile)));
  addEventListener("beforeprint", () => byId("panel").replaceChildren(...steps.map((_, i) => stepArticle(i))));
  addEventListener("afterprint", drawSteps);
}

function describeWhatIsLeftOut() {
  const sentences = [];
  if (trace.block) {
    const [high, wide] = trace.block;
    sentences.push(`This text is long. Each cell of a map is the largest of ${high} × ${wide} numbers.`);
    if (trace.kept.length < trace.queries.length) {
      sentences.push(`The exact numbers are kept for ${trace.kept.length} of ` +
        `${count(trace.queries.length, "query", "queries")}, evenly spaced.`);
    }
  }
  if (trace.links) {
    const queries = trace.kept.length === trace.queries.length ? "each query"
      : `${trace.kept.length} of ${count(trace.queries.length, "query", "queries")}`;
    sentences.push(`Of a text of this length the page keeps what a screen can show: a map of ` +
      `${trace.bins.join(" × ")} cells for every head, and the ${trace.links.n} largest weights of ${queries}.`);
  }
  if (trace.size.b > 1) sentences.push(`Of ${trace.size.b} sequences, the first is shown.`);
  byId("left-out").textContent = sentences.join(" ");
  byId("left-out").hidden = sentences.length === 0;
}

byId("app").hidden = false;
buildTheme();
buildBar();
buildMaps();
buildLines();
buildSteps();
buildPrint();
if (layers) buildReport();
open(layers ? layer(0) : traceOf(pageData));
fillIn();
if (layers) begin();
else {
  // Begin at the requested query, or the last, which sees the most keys, and at the key of its
  // largest weight.
  state.query = nearest(trace.kept, pageData.begin ?? trace.kept.at(-1));
  const row = rowOf(weights);
  go({ query: state.query, key: row.indexOf(Math.max(...row)) });
}
