// The two panes of the page, between which a narrow screen slides.

import { byId } from "./marks.js";
import { stillOnly } from "./store.js";

export function buildSwipe() {
  byId("swipe").addEventListener("click", (event) => {
    const { pane } = event.target.dataset;
    if (pane) showPane(pane);
  });
  const mark = () => {
    const isSecond = byId("panes").scrollLeft > byId("panes").clientWidth / 2;
    const shown = isSecond ? "heads-pane" : "picture-pane"; // as the style sheet orders them
    for (const it of byId("swipe").children) it.setAttribute("aria-pressed", it.dataset.pane === shown);
  };
  byId("panes").addEventListener("scroll", mark);
  mark();
}

// On a narrow screen, slide to the pane that changed.
export function showPane(id) {
  const panes = byId("panes");
  if (panes.scrollWidth > panes.clientWidth + 8) {
    panes.scrollTo({ left: byId(id).offsetLeft - panes.offsetLeft, behavior: stillOnly.matches ? "auto" : "smooth" });
  }
}
