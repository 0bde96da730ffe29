// The entry point of a survey's page. esbuild bundles this file and its imports.

import { byId } from "../marks.js";
import { buildThemeButton } from "../theme.js";
import { go, readAddress } from "./address.js";
import { drawDifferences } from "./differences.js";
import { buildExamples, drawExamples, drawGroups } from "./examples.js";
import { buildFindings, drawFindings } from "./findings.js";
import { drawHead, drawHistogram, drawTokens } from "./head.js";
import { drawMixes } from "./mixes.js";
import { buildScatter, drawScatter, ticksOf } from "./scatter.js";
import { LARGEST, chosen, head, metricsOf, readContext, readDetails, screen, survey, theme, valueOn } from "./store.js";
import { buildVectors, drawVectors, openVectors } from "./vectors.js";

const wrapped = (i, length) => (i + length) % length;

function draw() {
  byId("misread").textContent = screen.misread.length ? `This survey does not have: ${screen.misread.join(", ")}.` : "";
  drawFindings();
  drawScatter();
  drawDifferences();
  drawHead();
  drawGroups();
  drawVectors();
  drawDetails();
}

let draws = 0; // a drawing that waits ends if a later one has begun

// Draws what the page has of the selected head alone.
async function drawDetails() {
  const mine = ++draws, section = byId("one");
  section.setAttribute("aria-busy", "true");
  const shown = await readShown().catch((error) => {
    if (mine === draws) byId("no-examples").textContent = `This browser does not read compressed data; one of 2023 or later does. ${error}`;
  });
  if (mine !== draws) return;
  section.setAttribute("aria-busy", "false");
  if (!shown) return;
  const { details, examples, contexts } = shown;
  drawHistogram(details.metrics[chosen.metric]);
  drawMixes(details);
  drawTokens(details);
  drawExamples(examples, contexts);
}

// Reads the details of the selected head, and the contexts of the examples to show.
async function readShown() {
  const { metric, decile } = chosen, details = await readDetails();
  const examples = details.metrics[metric].examples.filter((it) => it.decile === decile);
  return { details, examples, contexts: await Promise.all(examples.map(({ context }) => readContext(context))) };
}

// The keys of HeadVis: h and l for heads, brackets for deciles, and m for metrics. A key that is held is one step back.
function listen(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, input")) return;
  const names = metricsOf(head()), { at, decile, metric } = chosen;
  const changes = {
    h: () => ({ at: wrapped(at - 1, survey.heads.length) }),
    l: () => ({ at: wrapped(at + 1, survey.heads.length) }),
    "[": () => ({ decile: Math.max(0, decile - 1) }),
    "]": () => ({ decile: Math.min(LARGEST, decile + 1) }),
    Escape: () => ({ example: "" }),
    m: () => ({ metric: names[wrapped(names.indexOf(metric) + 1, names.length)] }),
  }[event.key];
  if (changes) go(changes(), event.repeat);
}

function open() {
  readAddress(location.hash);
  openVectors();
  draw();
}

function start() {
  byId("app").hidden = false;
  screen.draw = draw;
  buildThemeButton((isDark) => { theme.isDark = isDark; }, draw);
  buildFindings();
  buildScatter();
  buildExamples();
  buildVectors();
  addEventListener("hashchange", open);
  addEventListener("keydown", listen);
  open();
}

start();

// Available in a console, as clearhead.go({ at: 3 }).
export { chosen, go, survey, ticksOf, valueOn };
