// The entry point of the page. esbuild bundles this file and its imports.

import { compute, keep, keepLabels } from "./compute.js";
import { buildControls, drawControls, openControls } from "./controls.js";
import { Snapshot } from "./data.js";
import { changedEdits, readEdits } from "./edits.js";
import { buildSave } from "./export.js";
import { buildHeads } from "./heads.js";
import { aheadSource } from "./hosts/ahead.js";
import { linkToCell } from "./hosts/frame.js";
import { remoteSource } from "./hosts/remote.js";
import { LEAST } from "./ink.js";
import { buildPicture, buildPrint, buildTheme, buildViews } from "./listen.js";
import { liveSource } from "./live.js";
import { byId } from "./marks.js";
import { buildSwipe } from "./panes.js";
import { buildStrip } from "./pictures/text.js";
import { stagesOf } from "./pictures/walk.js";
import { go, readAddress, settle, shownTrace } from "./state.js";
import { NO_EDITS, chosen, pageData, screen, store, walk } from "./store.js";
import { mostTelling } from "./telling.js";
import { draw, drawPicture, fillAll } from "./views.js";

const MANY_KEYS = 64; // with so many keys, a weight of a few percent is large

/** @import { Page } from "./schema.d.ts" */
/** @import { Source } from "./store.js" */

/** The source that recomputes the page. A program that embeds the page may declare a pageSource.
 * @param {Page["host"]} host @returns {Source | null} */
function sourceOf(host) {
  const { pageSource } = /** @type {any} */ (globalThis);
  if (pageSource) return pageSource();
  return host === "server" || host === "notebook" ? remoteSource() : liveSource() ?? aheadSource();
}

function start() {
  byId("app").hidden = false;
  document.documentElement.classList.add("live");
  store.source = sourceOf(pageData.host);
  Object.assign(screen, { draw, drawPicture, drawControls, fillAll });
  buildStrip();
  buildHeads();
  buildViews();
  buildSwipe();
  buildPicture();
  buildControls();
  buildSave();
  buildPrint();
  buildTheme();
  const { hash } = location, edits = readEdits(hash), text = new URLSearchParams(hash.slice(1)).get("text");
  const isOther = store.source !== null && Boolean(text ?? changedEdits(edits).length);
  Object.assign(chosen, mostTelling());
  const { changes, misread } = readAddress(hash);
  Object.assign(chosen, changes);
  store.misread = isOther ? [] : misread; // of another text it is read once that is computed
  settle();
  byId("view").setAttribute("aria-labelledby", `view-${chosen.view}`);
  walk.at = stagesOf(shownTrace()).length;
  if (shownTrace().size.k > MANY_KEYS) chosen.threshold = LEAST;
  fillAll();
  draw();
  const before = new URLSearchParams(hash.slice(1)).get("kept");
  if (pageData.beside && before === "model") keep();
  else if (store.source?.can.text && before) store.source.compute(before, NO_EDITS).then((data) => { store.kept = new Snapshot(keepLabels(data)); go({}); }, () => {});
  if (isOther) {
    openControls(changedEdits(edits).length > 0); // they say what was edited
    compute(text ?? store.current.text, edits).then(() => {
      const after = readAddress(hash);
      go(after.changes, after.misread);
    });
  }
}

start();
if (pageData.host === "notebook" || pageData.host === "frame") linkToCell();

// Available in a console, as clearhead.store.current and clearhead.go({ head: 3 }).
export { css, inkOn } from "./colours.js";
export { compute, edit } from "./compute.js";
export { readEdits } from "./edits.js";
export { remoteSource } from "./hosts/remote.js";
export { shareColour, sideColour, signedColour } from "./ink.js";
export { liveSource } from "./live.js";
export { byId } from "./marks.js";
export { isZoomed, zoomedWeight } from "./pictures/zoom.js";
export { inked, widthOf } from "./scene.js";
export { alignment, go, largestAt, shownTrace, sides, snapshot } from "./state.js";
export { chosen, NO_EDITS, pageData, store, walk } from "./store.js";
export { chooseView } from "./listen.js";
export { tellingQuery } from "./telling.js";
export { draw, fillAll } from "./views.js";
export { isolated, quoted } from "./words.js";
