// Event listeners: pointers, keys, the tabs of the views, the theme, the printer.

import { keep } from "./compute.js";
import { button, byId } from "./marks.js";
import { stepArticle, turnStage } from "./pictures/numbers.js";
import { beginWalk, pauseWalk, stagesOf, stepWalk, toggleWalk } from "./pictures/walk.js";
import { VIEWS, go, keyOr, letGo, point, queryOr, readAddress, shownTrace } from "./state.js";
import { chosen, screen, stillOnly, store, walk } from "./store.js";
import { buildThemeButton } from "./theme.js";
import { TABS } from "./views.js";

const FINGER = 40; // pixels of a target, at least, if no other is nearer

export function buildPicture() {
  const canvas = byId("picture");
  const under = (event) => {
    const box = canvas.getBoundingClientRect(), reach = event.pointerType === "touch" ? FINGER / 2 : 0;
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const target = store.picture?.under(x, y, reach);
    canvas.title = (target?.titleAt ? target.titleAt(x) : target?.title) ?? "";
    return target?.of ? target.of(x) : target?.changes ?? null;
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
    if (!changes) return;
    if (isChosenPair(changes)) openWhy();
    else go(changes);
  });
  canvas.addEventListener("keydown", (event) => {
    const trace = shownTrace(), stored = trace.stored(chosen.head), slot = stored.indexOf(queryOr()), key = keyOr();
    const act = { " ": toggleWalk, ArrowRight: () => stepWalk(1), ArrowLeft: () => stepWalk(-1) }[event.key];
    if (chosen.view === "walk" && act) {
      event.preventDefault();
      return act();
    }
    if (event.key === "Enter" && VIEWS.includes("why")) return openWhy();
    const kept = (i) => stored[Math.max(0, Math.min(stored.length - 1, i))];
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
    if (chosen.view === "why") go({ query: queryOr(), key: Math.max(0, Math.min(shownTrace().size.k - 1, keyOr() + by)) });
    else turnStage(by);
  });
  new ResizeObserver(() => screen.drawPicture()).observe(byId("view"));
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (byId("save").open) byId("save").open = false;
    else if (store.isAdding) { store.isAdding = false; screen.draw(); }
    else letGo();
  });
  addEventListener("hashchange", () => {
    if (byId(location.hash.slice(1))) return; // the skip link is the id of an element
    const { changes, misread } = readAddress(location.hash);
    go(changes, misread);
  });
}

// Whether a click is on the weight that is selected already.
const isChosenPair = ({ query = chosen.query, key }) => VIEWS.includes("why") &&
  typeof key === "number" && key === chosen.key && query !== null && query === chosen.query;

function openWhy() {
  chooseView("why");
  byId("panel").focus();
}

export function buildViews() {
  const views = byId("views");
  views.replaceChildren(...VIEWS.map((view) =>
    button({ role: "tab", "data-view": view, id: `view-${view}`, "aria-controls": "view", title: TABS[view].says },
      () => chooseView(view), TABS[view].word)));
  views.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    chooseView(VIEWS[(VIEWS.indexOf(chosen.view) + by + VIEWS.length) % VIEWS.length]);
    byId(`view-${chosen.view}`).focus();
  });
  byId("shading").addEventListener("click", (event) => {
    const { by } = event.target.dataset;
    if (by === "registers") go({ registers: chosen.registers === "drawn" ? "left out" : "drawn" });
    else if (by) go({ by });
  });
  byId("why").addEventListener("click", openWhy);
  byId("keep").addEventListener("click", keep);
  byId("beside").addEventListener("click", () => { store.isAdding = !store.isAdding; byId("options").wanted = null; screen.draw(); });
}

export function chooseView(view) {
  pauseWalk();
  if (view === "walk") walk.at = walk.at || stagesOf(shownTrace()).length;
  byId("view").setAttribute("aria-labelledby", `view-${view}`);
  go({ view });
  if (view === "walk" && !stillOnly.matches) beginWalk();
}

export function buildTheme() {
  buildThemeButton((isDark) => {
    store.isDark = isDark;
    store.themeColours = null;
  }, () => screen.draw());
}

// On paper: every step of the chosen query, one below the other.
export function buildPrint() {
  addEventListener("beforeprint", () => {
    byId("panel").hidden = false;
    byId("panel").replaceChildren(...shownTrace().steps.map((_, i) => stepArticle(i)));
  });
  addEventListener("afterprint", () => screen.drawPicture());
}
