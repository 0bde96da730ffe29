// The entry point of a training's page. esbuild bundles this file and its imports.

import { byId, make } from "../marks.js";
import { buildThemeButton } from "../theme.js";
import { buildPictures, drawPictures, drawStep } from "./pictures.js";
import { MEANING, chosen, findings, go, indexOf, metrics, names, readAddress, run, screen } from "./store.js";

const FILM = 8000, LEAST = 40; // milliseconds of the film, and of a step
const wrapped = (i, length) => (i + length) % length, last = run.steps.length - 1;
let timer = 0;

const words = (metric) => metric.replaceAll("_", " ");

function draw() {
  byId("metric").value = chosen.metric;
  byId("head").value = String(chosen.head);
  byId("meaning").textContent = MEANING[chosen.metric] ?? `${words(chosen.metric)}, as the run logged it.`;
  for (const button of byId("findings").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === `${chosen.metric} ${chosen.head}`));
  }
  drawPictures();
}

function stop() {
  clearInterval(timer);
  timer = 0;
  byId("play").textContent = "Play";
  go({});
}

function play() {
  if (timer) return stop();
  if (chosen.step === last) go({ step: 0 });
  byId("play").textContent = "Stop";
  timer = setInterval(() => {
    go({ step: chosen.step + 1 }, true);
    if (chosen.step === last) stop();
  }, Math.max(LEAST, Math.min(400, FILM / (last + 1))));
}

function buildFindings() {
  byId("findings").append(...findings.map(({ sentence, metric, head, step }) => {
    if (head === null && step === null) return make("p", {}, sentence);
    const changes = { metric, ...(head === null ? {} : { head }), ...(step === null ? {} : { step: indexOf(step) }) };
    return make("p", {}, make("button", { type: "button", class: "link", "data-view": `${metric} ${head}`, click: () => go(changes) }, sentence));
  }));
}

function buildControls() {
  for (const [id, options] of /** @type {[string, string[][]][]} */ ([["metric", metrics.map((it) => [it, words(it)])],
    ["head", names.map((name, i) => [String(i), name])]])) {
    byId(id).append(...options.map(([value, text]) => make("option", { value }, text)));
    byId(id).addEventListener("change", () => go({ [id]: id === "head" ? Number(byId(id).value) : byId(id).value }));
  }
  byId("step").max = String(last);
  byId("step").addEventListener("input", () => { if (timer) stop(); go({ step: Number(byId("step").value) }); });
  byId("play").addEventListener("click", play);
  byId("play").disabled = !last;
}

// h and l for heads and m for metrics, as on the page of a survey; p for the film.
function listen(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select")) return;
  const { head, metric } = chosen;
  const change = {
    h: () => go({ head: wrapped(head - 1, names.length) }),
    l: () => go({ head: wrapped(head + 1, names.length) }),
    m: () => go({ metric: metrics[wrapped(metrics.indexOf(metric) + 1, metrics.length)] }),
    p: play,
  }[event.key];
  if (change) change();
}

function start() {
  byId("app").hidden = false;
  screen.draw = draw;
  screen.drawStep = drawStep;
  buildThemeButton((isDark) => { screen.isDark = isDark; }, draw);
  buildFindings();
  buildControls();
  buildPictures();
  addEventListener("keydown", listen);
  addEventListener("hashchange", () => { readAddress(location.hash); draw(); });
  readAddress(location.hash);
  draw();
}

start();

// Available in a console, as clearhead.go({ head: 3 }).
export { chosen, go, run };
