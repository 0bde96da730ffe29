// Save the picture as PNG or SVG, and its numbers as CSV.

import { byId, copy, make } from "./marks.js";
import { drawMap } from "./pictures/map.js";
import { Scene, paint, svgOf } from "./scene.js";
import { queryOr, sides, state } from "./state.js";
import { chosen, pageData } from "./store.js";
import { TABS } from "./views.js";

export function buildSave() {
  byId("save").hidden = false;
  byId("save").addEventListener("toggle", nameSaved);
  byId("link").hidden = !navigator.clipboard;
  byId("link").addEventListener("click", () => copy(byId("link"), location.href));
  byId("save").addEventListener("click", async (event) => {
    const kind = event.target.closest("[data-save]")?.dataset.save;
    if (!kind) return;
    byId("save").open = false;
    const { layer, head, query, view } = state();
    const stem = ["attention", `${layer}.${head}`, kind === "csv" && !isRowOnly() || query === null ? "all" : query, view].join("-");
    if (kind === "csv") download(new Blob([csvOf()], { type: "text/csv" }), `${stem}.csv`);
    else if (kind === "svg") download(new Blob([svgOf(pictureToSave())], { type: "image/svg+xml" }), `${stem}.svg`);
    else canvasToSave(2).toBlob((blob) => download(blob, `${stem}.png`));
  });
}

// The picture with its title on paper, with `scale` pixels for each of the page.
export function canvasToSave(scale) {
  const canvas = make("canvas"), scene = pictureToSave(), framed = new Scene(scene.width, scene.height);
  framed.rect(0, 0, scene.width, scene.height, { fill: "paper" });
  framed.group(scene, 0, 0);
  paint(canvas, framed, scale);
  return canvas;
}

// The functions of the entries of the menu.
function nameSaved() {
  const step = stepToSave(), picture = TABS[chosen.view].draw ? "Picture" : "Map";
  const words = { png: `${picture} (PNG)`, svg: `${picture} (SVG)`,
    csv: isRowOnly() ? `This query's ${step} (CSV)` : `All ${step} (CSV)` };
  for (const [kind, text] of Object.entries(words)) byId("save").querySelector(`[data-save=${kind}]`).textContent = text;
}

const stepToSave = () => (chosen.view === "map" ? chosen.step : "weights");

// The map shows every query, so all are saved; other views save the selected query, if there is one.
const isRowOnly = () => state().query !== null && state().view !== "map";

// The picture with a title. Numbers and Why have none, so the map replaces it.
function pictureToSave() {
  const width = Math.max(640, byId("view").clientWidth), height = Math.max(360, byId("view").clientHeight);
  const scene = TABS[state().view].draw?.(width, height) ?? drawMap(width, height);
  const whole = new Scene(scene.width + 32, scene.height + 60);
  whole.text(`${byId("head-title").textContent} · ${pageData.name ?? ""}`, 16, 20, { size: 16, bold: true });
  whole.text(byId("sentence").textContent, 16, 42, { fill: "soft", room: scene.width });
  whole.group(scene, 16, 58);
  return whole;
}

const quoted = (text) => `"${String(text).replaceAll('"', '""')}"`;
// A spreadsheet would compute a cell that begins like a formula.
const inCsv = (text) => quoted(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);

// All numbers of the shown matrix, for every side: of the selected query, or of all stored queries.
function csvOf() {
  const lines = ["side,layer,head,query position,query,key position,key,step,value"];
  for (const side of sides()) {
    const { trace } = side, step = trace.step(stepToSave()) ?? trace.weights;
    for (const query of isRowOnly() ? [queryOr()] : trace.stored(side.head)) {
      (trace.row(step, side.head, query) ?? []).forEach((value, key) => {
        if (value === undefined) return;
        lines.push([inCsv(side.name), side.layer, side.head, query, inCsv(trace.queries[query]), key,
          inCsv(trace.keys[key]), step.name, value].join(","));
      });
    }
  }
  return lines.join("\r\n") + "\r\n";
}

function download(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
