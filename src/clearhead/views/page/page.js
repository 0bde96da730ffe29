// 6. The page: one state, one way to change it, and the first drawing.

const selects = { head: byId("head"), query: byId("query"), key: byId("key") };

// Every choice of the reader comes through here; what it touches is drawn again.
function go(changes) {
  const moved = "query" in changes || "key" in changes;
  Object.assign(state, changes);
  if (moved && !("row" in changes)) {
    const [high, wide] = trace.block ?? [1, 1];
    state.row = Math.floor(state.query / high);
    state.column = Math.floor(state.key / wide);
  }
  for (const [what, select] of Object.entries(selects)) select.value = state[what];
  const turned = Object.keys(changes).every((name) => name === "stage");
  if (!turned) {
    drawMaps();
    drawLines();
  }
  drawSteps();
}

function buildBar() {
  const option = (value, text) => make("option", { value }, text);
  for (let head = 0; head < heads; head++) selects.head.append(option(head, head));
  for (const i of trace.kept) selects.query.append(option(i, `${i} · ${clip(trace.queries[i], 24)}`));
  trace.keys.forEach((text, i) => selects.key.append(option(i, `${i} · ${clip(text, 24)}`)));
  for (const [what, select] of Object.entries(selects)) {
    select.addEventListener("change", () => go({ [what]: Number(select.value) }));
  }
}

function buildTheme() {
  const button = byId("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  let isDark = dark.matches;
  const show = () => {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    button.setAttribute("aria-pressed", isDark);
  };
  button.addEventListener("click", () => { isDark = !isDark; show(); });
  dark.addEventListener("change", () => { isDark = dark.matches; show(); });
  show();
}

// Paper has no buttons: print every step, one after the other.
function buildPrint() {
  addEventListener("beforeprint", () => byId("panel").replaceChildren(...steps.map((_, i) => leaf(i))));
  addEventListener("afterprint", drawSteps);
}

function tellWhatIsLeftOut() {
  const told = [];
  if (trace.block) {
    const [high, wide] = trace.block;
    told.push(`This text is long. Each cell of a map is the largest of ${high} × ${wide} numbers.`);
    if (trace.kept.length < trace.queries.length) {
      told.push(`The exact numbers are kept for ${trace.kept.length} of ` +
        `${count(trace.queries.length, "query").replace("querys", "queries")}, evenly spaced.`);
    }
  }
  if (trace.size.b > 1) told.push(`Of ${trace.size.b} sequences, the first is shown.`);
  byId("left-out").textContent = told.join(" ");
  byId("left-out").hidden = told.length === 0;
}

byId("app").hidden = false;
buildTheme();
buildBar();
buildMaps();
buildLines();
buildSteps();
buildPrint();
tellWhatIsLeftOut();

// Begin at the last query, which has the most to look at, and the key it looks at most.
const last = trace.kept.at(-1);
const row = weights.along("k", place({ q: last }));
go({ query: last, key: row.indexOf(Math.max(...row)) });
