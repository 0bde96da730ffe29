// The two panes of the page, between which a narrow screen slides.

import { byId } from "./marks.js";
import { narrow, stillOnly } from "./store.js";

const TOP = 9; // pixels above a pane, of its border and padding

export function buildSwipe() {
  byId("swipe").addEventListener("click", (event) => {
    const { pane } = event.target.dataset;
    if (pane) showPane(pane);
  });
  const mark = () => {
    const isSecond = byId("panes").scrollLeft > byId("panes").clientWidth / 2;
    const shown = isSecond ? "heads-pane" : "picture-pane"; // as the style sheet orders them
    for (const it of byId("swipe").children) it.setAttribute("aria-pressed", it.dataset.pane === shown);
    // A narrow page is as high as the pane that it shows.
    byId("panes").style.height = narrow.matches ? `${byId(shown).offsetHeight + TOP}px` : "";
  };
  byId("panes").addEventListener("scroll", mark);
  const sizes = new ResizeObserver(mark);
  for (const pane of byId("panes").children) sizes.observe(pane);
  mark();
}

// On a narrow screen, slide to the pane that changed.
export function showPane(id) {
  const panes = byId("panes");
  if (panes.scrollWidth > panes.clientWidth + 8) {
    panes.scrollTo({ left: byId(id).offsetLeft - panes.offsetLeft, behavior: stillOnly.matches ? "auto" : "smooth" });
  }
}
