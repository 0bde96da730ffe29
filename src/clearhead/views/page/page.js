// 14. The page: the views, the first one to show, and what listens to keys and pointers.

const PICTURES = { text: drawText, lines: drawLines, map: drawMap, walk: drawWalk };
const VIEW_WORDS = { text: "Text", lines: "Lines", map: "Map", numbers: "Numbers", walk: "Walk" };
let picture = null; // the scene on the canvas

function draw() {
  drawStrip();
  drawSentence();
  drawHeads();
  drawHeadLine();
  drawControls();
  for (const tab of byId("views").children) {
    const isChosen = tab.dataset.view === chosen.view;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
  }
  byId("beside").setAttribute("aria-pressed", isAdding);
  drawOptions();
  drawPicture();
}

// What depends on the snapshot: heads, labels, words.
function fillAll() {
  fillStrip();
  fillHeads();
  describeWhatIsLeftOut();
}

function drawPicture() {
  const { view } = chosen, { clientWidth: width, clientHeight: height } = byId("view");
  if (!width || !height) return;
  picture = PICTURES[view]?.(width, height - 4) ?? null;
  byId("frame").hidden = !picture;
  byId("panel").hidden = Boolean(picture);
  if (view === "numbers") drawNumbers();
  else if (!picture) byId("panel").replaceChildren(...elsewhere(shownTrace().step("scores") ?? shownTrace().weights));
  else {
    const canvas = byId("picture");
    canvas.style.width = `${picture.width}px`;
    canvas.style.height = `${picture.height}px`;
    paint(canvas, picture);
    canvas.setAttribute("aria-label", `${VIEW_WORDS[view]} of ${byId("head-title").textContent}. ` +
      `${byId("sentence").textContent} Arrow keys move the query and the key.`);
  }
  drawReading();
  if (view === "walk") {
    byId("scrub").value = walk.at;
    byId("play").textContent = walk.isPlaying ? "Pause" : "Play";
  }
}

// The pair under the pointer, or the chosen one, in numbers.
function drawReading() {
  const trace = shownTrace(), { head, query } = state();
  const line = byId("reading");
  if (query === null && chosen.view !== "walk" && chosen.view !== "numbers") {
    line.replaceChildren(make("span", { class: "soft" }, "Point at a word to read its numbers."));
    return;
  }
  const at = queryOr(), key = keyOr();
  const numbers = trace.pairs.filter((step) => !(step.name === "masked" && trace.row(step, head, at)?.[key] > -Infinity))
    .map((step) => [step.name, trace.row(step, head, at)?.[key]])
    .filter(([, value]) => value !== undefined)
    .map(([name, value]) => make("span", { "data-step": name, class: name === "weights" ? "shown" : "" },
      `${name} `, make("b", {}, precise(value))));
  line.replaceChildren(make("strong", {}, queryToken(at)), make("span", { class: "arrow" }, " → "),
    make("strong", {}, keyToken(key)), ...numbers);
  if (trace.blocked(head, at)[key]) line.append(make("span", { class: "soft" }, "may not look"));
}

// The controls of a view, on the line above the picture.
function drawOptions() {
  const { view } = chosen, options = byId("options"), parts = [];
  const wanted = JSON.stringify([view, chosen.step, chosen.difference, sides().length, chosen.stage,
    shownTrace().steps.map((it) => it.name), chosen.others, chosen.threshold]);
  if (options.wanted === wanted) return;
  options.wanted = wanted;
  if (sides().length === 2 && PICTURES[view] && view !== "walk") {
    const both = make("button", { type: "button", id: "difference", "aria-pressed": chosen.difference }, "Difference");
    both.addEventListener("click", () => go({ difference: !chosen.difference }));
    parts.push(both);
  }
  if (view === "lines") {
    const range = make("input", { type: "range", id: "threshold", min: 0.01, max: 0.5, step: 0.01, value: chosen.threshold });
    range.addEventListener("input", () => go({ threshold: Number(range.value) }));
    parts.push(make("label", {}, "Lines from ", range, make("output", { for: "threshold" }, ` ${percent(chosen.threshold)}`)));
  }
  if (view === "map" && shownTrace().maps.length > 1) {
    const select = make("select", { id: "step" }, shownTrace().maps.map((step) =>
      make("option", { value: step.name, selected: step.name === chosen.step }, step.name)));
    select.addEventListener("change", () => go({ step: select.value }));
    parts.push(make("label", {}, "Show ", select));
  }
  if (view === "numbers") parts.push(fillStages());
  if (view === "walk") parts.push(...walkOptions());
  if (isAdding || chosen.others.length) parts.push(besideWords());
  const focused = options.contains(document.activeElement) ? document.activeElement.id : null;
  if (focused === "threshold") {
    options.querySelector("output").textContent = ` ${percent(chosen.threshold)}`;
    return;
  }
  options.replaceChildren(...parts);
  if (focused) byId(focused)?.focus();
}

function besideWords() {
  const words = chosen.others.length ? `with ${chosen.others.map((it) => placeName(...it)).join(", ")}`
    : "Choose heads to show beside this one.";
  const none = make("button", { type: "button", class: "quiet" }, "Only this one");
  none.addEventListener("click", () => { isAdding = false; go({ others: [], difference: false }); });
  return make("span", { class: "soft beside" }, words, " ", ...(chosen.others.length ? [none] : []));
}

// On a narrow screen the panes lie beside each other: slide to the one that changed.
function showPane(id) {
  const panes = byId("panes");
  if (panes.scrollWidth > panes.clientWidth + 8) {
    panes.scrollTo({ left: byId(id).offsetLeft - panes.offsetLeft, behavior: stillOnly.matches ? "auto" : "smooth" });
  }
}

// ---- pointers and keys ---------------------------------------------------------------------

function buildPicture() {
  const canvas = byId("picture");
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const target = picture?.under(x, y);
    return target?.of ? target.of(x, y) : target?.changes ?? null;
  };
  canvas.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "mouse" || walk.isPlaying) return;
    const changes = under(event);
    canvas.style.cursor = changes ? "pointer" : "";
    point(changes);
  });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("click", (event) => {
    const changes = under(event);
    if (changes) go(changes);
  });
  canvas.addEventListener("keydown", (event) => {
    const trace = shownTrace(), slot = trace.kept.indexOf(queryOr()), key = keyOr();
    if (chosen.view === "walk" && (event.key === " " || event.key.startsWith("Arrow"))) {
      event.preventDefault();
      if (event.key === " ") walk.isPlaying ? pauseWalk() : playWalk();
      else if (event.key === "ArrowRight" || event.key === "ArrowLeft") stepWalk(event.key === "ArrowRight" ? 1 : -1);
      if (event.key === " " || event.key === "ArrowRight" || event.key === "ArrowLeft") return;
    }
    const kept = (i) => trace.kept[Math.max(0, Math.min(trace.kept.length - 1, i))];
    const changes = {
      ArrowUp: { query: kept(slot - 1), key }, ArrowDown: { query: kept(slot + 1), key },
      ArrowLeft: { query: queryOr(), key: Math.max(0, key - 1) },
      ArrowRight: { query: queryOr(), key: Math.min(trace.size.k - 1, key + 1) },
      Home: { query: queryOr(), key: 0 }, End: { query: queryOr(), key: trace.size.k - 1 },
    }[event.key];
    if (!changes) return;
    event.preventDefault();
    go(changes);
  });
  byId("panel").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -99, End: 99 }[event.key];
    if (!by || event.target.closest(".scroll") || event.target.closest(".stages")) return;
    event.preventDefault();
    turnStage(by);
  });
  new ResizeObserver(() => drawPicture()).observe(byId("view"));
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (byId("save").open) byId("save").open = false;
    else if (isAdding) { isAdding = false; draw(); }
    else letGo();
  });
  addEventListener("hashchange", () => {
    const changes = readAddress(location.hash);
    if (Object.keys(changes).length) go(changes);
  });
}

function buildViews() {
  const views = byId("views");
  views.replaceChildren(...VIEWS.map((view) => {
    const tab = make("button", { type: "button", role: "tab", "data-view": view, id: `view-${view}`,
      "aria-controls": "view" }, VIEW_WORDS[view]);
    tab.addEventListener("click", () => chooseView(view));
    return tab;
  }));
  views.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    chooseView(VIEWS[(VIEWS.indexOf(chosen.view) + by + VIEWS.length) % VIEWS.length]);
    byId(`view-${chosen.view}`).focus();
  });
  byId("beside").addEventListener("click", () => { isAdding = !isAdding; byId("options").wanted = null; draw(); });
}

function buildSwipe() {
  byId("swipe").addEventListener("click", (event) => {
    const { pane } = event.target.dataset;
    if (pane) showPane(pane);
  });
  const mark = () => {
    const shown = byId("panes").scrollLeft > byId("panes").clientWidth / 2 ? "picture-pane" : "heads-pane";
    for (const it of byId("swipe").children) it.setAttribute("aria-pressed", it.dataset.pane === shown);
  };
  byId("panes").addEventListener("scroll", mark);
  mark();
}

function chooseView(view) {
  pauseWalk();
  if (view === "walk") walk.at = walk.at || stagesOf(shownTrace()).length;
  byId("view").setAttribute("aria-labelledby", `view-${view}`);
  go({ view });
  if (view === "walk" && !stillOnly.matches) { walk.at = 0; playWalk(); }
}

function buildTheme() {
  const button = byId("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  button.hidden = false;
  const show = (to) => {
    isDark = to;
    themeColours = null;
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    button.textContent = isDark ? "Light" : "Dark"; // the theme that it changes to
    if (current) draw();
  };
  button.addEventListener("click", () => show(!isDark));
  dark.addEventListener("change", () => show(dark.matches));
  show(dark.matches);
}

// On paper: every step of the chosen query, one below the other.
function buildPrint() {
  addEventListener("beforeprint", () => {
    byId("panel").hidden = false;
    byId("panel").replaceChildren(...shownTrace().steps.map((_, i) => stepArticle(i)));
  });
  addEventListener("afterprint", () => drawPicture());
}

function describeWhatIsLeftOut() {
  const trace = shownTrace(), sentences = [];
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

// ---- the first view ------------------------------------------------------------------------

const TELLING = ["antecedent", "subject", "induction", "duplicate token", "previous word", "sharp",
  "previous token", "next token", "mixed", "separators", "spread"];

// The head that tells most, and a query that shows it: a pronoun and whom it means, if there is one.
function mostTelling() {
  const begin = current.data.begin;
  const found = [...current.findings.values()];
  const order = (it) => {
    const at = TELLING.indexOf(it.label.split(" and ")[0]);
    return at < 0 ? TELLING.length : at;
  };
  found.sort((a, b) => order(a) - order(b) || b.number - a.number);
  const [best] = found;
  const layer = begin?.layer ?? best?.layer ?? 0, head = begin?.head ?? best?.head ?? 0;
  const trace = current.layer(layer);
  if (begin?.query !== undefined && begin.query !== null) {
    return { layer, head, query: trace.nearest(begin.query) };
  }
  const complete = trace.step("scores")?.kept?.q ?? trace.kept; // of which the page holds every step
  const held = complete.filter((q) => trace.row(trace.used, head, q)?.some((w) => w > 0));
  const strength = (q) => {
    const row = trace.row(trace.used, head, q), key = largestAt(row);
    const tells = best?.label.startsWith("antecedent") ? isPronoun(trace.queries[q]) : key !== 0 && key !== q;
    return (tells ? 1 : 0) + row[key];
  };
  const shown = held.length > 600 ? held.filter((_, i) => i % Math.ceil(held.length / 600) === 0) : held;
  const query = best ? shown.reduce((a, b) => (strength(b) > strength(a) ? b : a), shown[0]) : held.at(-1);
  return { layer, head, query: query ?? null };
}

const MANY_KEYS = 64; // among which a weight of a few percent is much
const opened = new Snapshot(pageData);

function start() {
  byId("app").hidden = false;
  document.documentElement.classList.add("live");
  buildStrip();
  buildHeads();
  buildViews();
  buildSwipe();
  buildPicture();
  buildControls();
  buildSave();
  buildPrint();
  buildTheme();
  current = opened;
  const asked = readAddress(location.hash), edits = readEdits(location.hash);
  const text = new URLSearchParams(location.hash.slice(1)).get("text");
  Object.assign(chosen, mostTelling(), asked);
  settle();
  byId("view").setAttribute("aria-labelledby", `view-${chosen.view}`);
  walk.at = stagesOf(shownTrace()).length;
  if (shownTrace().size.k > MANY_KEYS) chosen.threshold = LEAST;
  fillAll();
  draw();
  if (source && (text ?? changedEdits(edits).length)) {
    compute(text ?? current.text, edits).then(() => go(readAddress(asked.hash ?? location.hash)));
  }
}

start();
