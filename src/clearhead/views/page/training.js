// Made by `make page` from the sources c378d796ae56040ca579808cbfc0f56e7875ea156a3f86b7374ebcf8338a8173; do not edit.
"use strict";
var clearhead = (() => {
  var __defProp = Object.defineProperty;
  var __getOwnPropDesc = Object.getOwnPropertyDescriptor;
  var __getOwnPropNames = Object.getOwnPropertyNames;
  var __hasOwnProp = Object.prototype.hasOwnProperty;
  var __export = (target, all) => {
    for (var name in all)
      __defProp(target, name, { get: all[name], enumerable: true });
  };
  var __copyProps = (to, from, except, desc) => {
    if (from && typeof from === "object" || typeof from === "function") {
      for (let key of __getOwnPropNames(from))
        if (!__hasOwnProp.call(to, key) && key !== except)
          __defProp(to, key, { get: () => from[key], enumerable: !(desc = __getOwnPropDesc(from, key)) || desc.enumerable });
    }
    return to;
  };
  var __toCommonJS = (mod) => __copyProps(__defProp({}, "__esModule", { value: true }), mod);

  // src/training/training.js
  var training_exports = {};
  __export(training_exports, {
    chosen: () => chosen,
    go: () => go,
    run: () => run
  });

  // src/marks.js
  var make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
  var makeSvg = (tag, attributes = {}, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  function filled(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== false && value !== void 0) element.setAttribute(name, value);
    }
    element.append(...children.flat());
    return element;
  }
  var byId = (id) => document.getElementById(id);
  var MINUS = "−";
  function number(value, digits = 4) {
    if (Number.isNaN(value)) return "NaN";
    const sign = value < 0 ? MINUS : "";
    const size = Math.abs(value);
    if (size === Infinity) return sign + "∞";
    if (size === 0) return "0";
    if (size >= 1e6 || size < 0.5 * 10 ** -digits) {
      return sign + size.toExponential(digits - 2).replace("e+", "e").replace("e-", "e" + MINUS);
    }
    return sign + size.toFixed(Math.max(0, digits - Math.max(0, Math.floor(Math.log10(size)))));
  }
  var scrolls = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const target = (
        /** @type {HTMLElement} */
        entry.target
      );
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });

  // src/theme.js
  function buildThemeButton(set, draw2) {
    const button = byId("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
    let isDark = false;
    const use = (to) => {
      isDark = to;
      set(isDark);
      document.documentElement.dataset.theme = isDark ? "dark" : "light";
      button.textContent = isDark ? "Light" : "Dark";
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      use(!isDark);
      draw2();
    });
    dark.addEventListener("change", () => {
      use(dark.matches);
      draw2();
    });
    use(dark.matches);
  }

  // src/colours.js
  function mixed(points, place) {
    const at = Math.max(0, Math.min(1, place)) * (points.length - 1);
    const low = points[Math.floor(at)], high = points[Math.ceil(at)];
    return low.map((channel, i) => Math.round(channel + (high[i] - channel) * (at % 1)));
  }
  var css = (colour) => `rgb(${colour.join(" ")})`;

  // src/ticks.js
  function ticksBetween(low, high, most = 4) {
    if (low > high) return [0, 1];
    const rough = (high - low || 1) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * /** @type {number} */
    [1, 2, 5, 10].find((it) => it * power >= rough * (1 - 1e-9)), first2 = Math.floor(low / step + 1e-9);
    const last3 = Math.max(first2 + 1, Math.ceil(high / step - 1e-9));
    return Array.from({ length: last3 - first2 + 1 }, (_, i) => Number(((first2 + i) * step).toPrecision(12)));
  }
  var rangeOf = (values) => {
    let low = Infinity, high = -Infinity;
    for (let i = 0; i < values.length; i++) {
      if (Number.isFinite(values[i])) [low, high] = [Math.min(low, values[i]), Math.max(high, values[i])];
    }
    return [low, high];
  };
  var tick = (value) => String(value).replace("-", "−");
  var end = (value) => Number.isInteger(value) ? String(value) : number(value, 3);
  function drawColourScale(low, high, colourOf2) {
    const ramp = make("i"), stops = [0, 0.25, 0.5, 0.75, 1].map((part) => colourOf2(low + part * (high - low)));
    ramp.style.background = `linear-gradient(to right, ${stops.join()})`;
    byId("colour-scale").replaceChildren(end(low), ramp, end(high));
  }

  // src/data.js
  var KINDS = {
    f8: Float64Array,
    f4: Float32Array,
    u4: Uint32Array,
    i2: Int16Array,
    u2: Uint16Array,
    u1: Uint8Array
  };
  function decode({ kind = "f4", data = "", top, values: given }) {
    if (given) return given;
    const text = atob(data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const values = new KINDS[kind](bytes.buffer);
    if (top === void 0) return values;
    return Float32Array.from(values, (shade) => shade ? ((shade - 1) / 254) ** 2 * top : -Infinity);
  }

  // src/json.js
  var parse = (text) => JSON.parse(text, (_, value) => value?.float === void 0 ? value : Number(value.float));

  // src/training/store.js
  var run = parse(byId("training").textContent);
  var metrics = Object.keys(run.values);
  var names = run.heads.map(([layer, head]) => `L${layer}H${head}`);
  var MEANING = {
    max: "The largest logit, over all queries of the step.",
    entropy: "The mean entropy of the weights, in nats.",
    entropy_fraction: "The mean entropy of the weights as a fraction of that of uniform weights.",
    first: "The mean weight on the first token of the text.",
    self: "The mean weight on the query itself.",
    peaked: "The fraction of queries whose largest weight exceeds 0.99.",
    output: "The norm of the head's output, as a multiple of the mean of its layer.",
    grad_q: "The norm of the gradient of the head's rows of W_Q.",
    grad_k: "The norm of the gradient of the rows of W_K that the head reads."
  };
  var findings = run.findings.map(([sentence, metric, head, step]) => ({ sentence, metric, head, step }));
  var first = findings.find((it) => it.head !== null);
  var START = { metric: first?.metric ?? metrics[0], head: first?.head ?? 0, step: run.steps.length - 1 };
  var chosen = { ...START };
  var screen = { isDark: false, draw: () => {
  }, drawStep: () => {
  } };
  var decoded = {};
  var valuesOf = (metric = chosen.metric) => decoded[metric] ??= decode(
    /** @type {any} */
    run.values[metric]
  );
  var valueAt = (step, head) => valuesOf()[step * names.length + head];
  var ranges = {};
  var range = () => ranges[chosen.metric] ??= rangeOf(valuesOf());
  var indexOf = (step) => Math.max(0, run.steps.findLastIndex((it) => it <= step));
  function go(changes, isFilm = false) {
    const isOther = Object.keys(changes).some((name) => name !== "step" && changes[name] !== chosen[name]);
    Object.assign(chosen, changes);
    const { metric, head, step } = chosen;
    try {
      if (!isFilm) history.replaceState(null, "", `#${new URLSearchParams({ metric, head: names[head], step: String(run.steps[step]) })}`);
    } catch {
    }
    (isOther ? screen.draw : screen.drawStep)();
  }
  function readAddress(hash) {
    const parts = new URLSearchParams(hash.replace(/^#/, "")), head = names.indexOf(parts.get("head") ?? "");
    Object.assign(chosen, START);
    if (metrics.includes(parts.get("metric") ?? "")) chosen.metric = /** @type {string} */
    parts.get("metric");
    if (head >= 0) chosen.head = head;
    if (parts.has("step")) chosen.step = indexOf(Number(parts.get("step")));
  }

  // src/training/pictures.js
  var SPACE = { left: 48, right: 52, top: 16, bottom: 22 };
  var NEAR = 30;
  var FEW = 12;
  var THIN = 6;
  var NAMED = 4;
  var last = run.steps.length - 1;
  var colourOf = (value) => {
    const [low, high] = range();
    return Number.isFinite(value) ? css(mixed(
      run.inks.sequential[screen.isDark ? "dark" : "light"],
      high > low ? (value - low) / (high - low) : 0.5
    )) : null;
  };
  var placeOf = (number2, width) => SPACE.left + (last ? (number2 - run.steps[0]) / (run.steps[last] - run.steps[0]) : 0.5) * (width - SPACE.left - SPACE.right);
  var xOf = (step, width) => placeOf(run.steps[step], width);
  var stepAt = (x, width) => {
    const away = run.steps.map((_, i) => Math.abs(xOf(i, width) - x));
    return away.indexOf(Math.min(...away));
  };
  var reading = (head, step) => `${names[head]}, step ${run.steps[step]}: ${chosen.metric.replaceAll("_", " ")} ${number(valueAt(step, head), 3)}`;
  function listen(frame, placeAt) {
    const at = (event) => {
      const { left, top } = frame.getBoundingClientRect();
      return placeAt(event.clientX - left, event.clientY - top, frame.clientWidth, frame.clientHeight);
    };
    frame.addEventListener("pointermove", (event) => point(at(event)));
    frame.addEventListener("pointerleave", () => point(null));
    frame.addEventListener("click", (event) => {
      const place = at(event);
      if (place) go(place);
    });
  }
  function point(place) {
    byId("reading").textContent = place ? reading(place.head, place.step) : reading(chosen.head, chosen.step);
    byId("lines").querySelector(".active")?.remove();
    if (place) byId("lines").firstChild?.append(makeSvg("path", { class: "active", d: lineOf(place.head) }));
    for (const cell of byId("frame").querySelectorAll(".active")) cell.classList.remove("active");
    if (place) byId(`cell-${place.head}`).classList.add("active");
  }
  function buildPictures() {
    listen(byId("lines"), (x, y, width, height) => {
      const step = stepAt(x, width), up = upOf(height);
      const away = names.map((_, head) => Math.abs(up(valueAt(step, head)) - y)).map((it) => Number.isNaN(it) ? Infinity : it);
      const least = Math.min(...away);
      return least < NEAR ? { head: away.indexOf(least), step } : null;
    });
    listen(byId("cells"), (x, y, width, height) => {
      const head = Math.floor(y / (height - SPACE.bottom) * names.length);
      return head < names.length && x >= SPACE.left - 4 && x <= width - SPACE.right + 4 ? { head, step: stepAt(x, width) } : null;
    });
    buildFrame();
    new ResizeObserver(() => screen.draw()).observe(byId("lines"));
  }
  function drawPictures() {
    drawLines();
    drawCells();
    const [low, high] = range();
    if (low <= high) drawColourScale(low, high, colourOf);
    else byId("colour-scale").replaceChildren("no number");
    drawStep();
  }
  var upOf = (height) => {
    const ticks = ticksBetween(...range()), [bottom, top] = [ticks[0], ticks[ticks.length - 1]];
    return (value) => height - SPACE.bottom - (value - bottom) / (top - bottom) * (height - SPACE.top - SPACE.bottom);
  };
  function lineOf(head) {
    const { clientWidth: width, clientHeight: height } = byId("lines"), up = upOf(height);
    let isDown = false, d = "";
    for (let step = 0; step <= last; step++) {
      const value = valueAt(step, head), at = `${xOf(step, width).toFixed(1)} ${up(value).toFixed(1)}`;
      if (Number.isFinite(value)) d += isDown ? `L${at}` : `M${at}h0.01`;
      isDown = Number.isFinite(value);
    }
    return d;
  }
  function changed() {
    const change = names.map((_, head) => {
      const values = run.steps.map((_2, step) => valueAt(step, head)).filter(Number.isFinite);
      return values.length ? Math.max(...values) - Math.min(...values) : -1;
    });
    return names.map((_, head) => head).sort((a, b) => change[b] - change[a]);
  }
  function drawLines() {
    const frame = byId("lines"), { clientWidth: width, clientHeight: height } = frame;
    if (!width || !height) return;
    const up = upOf(height), picture = makeSvg("svg", { width, height });
    for (const value of ticksBetween(...range())) {
      picture.append(
        makeSvg("line", { x1: SPACE.left, x2: width - SPACE.right, y1: up(value), y2: up(value) }),
        makeSvg("text", { x: SPACE.left - 6, y: up(value) + 4, "text-anchor": "end" }, tick(value))
      );
    }
    drawSteps(picture, width, height);
    for (let head = 0; head < names.length; head++) picture.append(makeSvg("path", { class: "line", d: lineOf(head) }));
    picture.append(makeSvg("path", { class: "chosen", d: lineOf(chosen.head) }), makeSvg("line", { class: "now" }));
    const rows = (
      /** @type {number[]} */
      []
    );
    for (const head of [chosen.head, ...changed().slice(0, NAMED)]) {
      const y = up(valueAt(last, head)) + 4;
      if (!Number.isFinite(y) || rows.some((it) => Math.abs(it - y) < 14)) continue;
      rows.push(y);
      picture.append(makeSvg("text", { class: head === chosen.head ? "name" : "", x: width - SPACE.right + 5, y }, names[head]));
    }
    for (const { sentence, head, step } of marks()) {
      const x = xOf(step, width), mark = makeSvg("path", { class: "mark", d: `M${x - 5} 2h10l-5 9z` }, makeSvg("title", {}, sentence));
      mark.addEventListener("click", (event) => {
        event.stopPropagation();
        go({ step, ...head === null ? {} : { head } });
      });
      picture.append(mark);
    }
    frame.replaceChildren(picture);
  }
  var marks = () => findings.filter((it) => it.metric === chosen.metric && it.step !== null).map((it) => ({ ...it, step: indexOf(
    /** @type {number} */
    it.step
  ) }));
  function drawSteps(picture, width, height) {
    for (const step of ticksBetween(run.steps[0], run.steps[last], width < 500 ? 3 : 6)) {
      if (step < run.steps[0] || step > run.steps[last]) continue;
      picture.append(makeSvg("text", { x: placeOf(step, width), y: height - 6, "text-anchor": "middle" }, step.toLocaleString("en")));
    }
  }
  function drawCells() {
    const frame = byId("cells"), { clientWidth: width, clientHeight: height } = frame, tall = (height - SPACE.bottom) / names.length;
    if (!width || !height) return;
    const canvas = make("canvas"), pen = canvas.getContext("2d"), ratio = devicePixelRatio || 1;
    const size = [width - SPACE.left - SPACE.right, height - SPACE.bottom];
    [canvas.width, canvas.height] = size.map((it) => it * ratio);
    [canvas.style.width, canvas.style.height, canvas.style.left] = [...size, SPACE.left].map((it) => `${it}px`);
    pen.scale(ratio, ratio);
    pen.translate(-SPACE.left, 0);
    const edges = run.steps.map((_, i) => i ? (xOf(i - 1, width) + xOf(i, width)) / 2 : xOf(0, width));
    edges.push(xOf(last, width));
    if (!last) [edges[0], edges[1]] = [SPACE.left, width - SPACE.right];
    for (let step = 0; step <= last; step++) {
      for (let head = 0; head < names.length; head++) {
        const colour = colourOf(valueAt(step, head));
        if (!colour) continue;
        pen.fillStyle = colour;
        pen.fillRect(edges[step], head * tall, edges[step + 1] - edges[step] + 0.5, tall + 0.5);
      }
    }
    const picture = makeSvg("svg", { width, height });
    drawSteps(picture, width, height);
    let above = -Infinity;
    run.heads.forEach(([layer, number2], head) => {
      const y = Math.max(10, (head + 0.5) * tall + 4), isNew = head === 0 || run.heads[head - 1][0] !== layer;
      if (isNew && head) picture.append(makeSvg("line", { class: "layer", x1: SPACE.left - 4, x2: width - SPACE.right, y1: head * tall, y2: head * tall }));
      if (y - above < 13 || !(isNew || tall >= 13)) return;
      picture.append(makeSvg("text", { x: SPACE.left - 6, y, "text-anchor": "end" }, tall >= 13 ? `L${layer}H${number2}` : `L${layer}`));
      above = y;
    });
    for (const { sentence, head, step } of marks()) {
      if (head !== null) picture.append(makeSvg("circle", { class: "mark", cx: xOf(step, width), cy: (head + 0.5) * tall, r: 4 }, makeSvg("title", {}, sentence)));
    }
    const [from, wide] = tall < THIN ? [SPACE.left - 4, 2] : [SPACE.left, width - SPACE.left - SPACE.right];
    picture.append(
      makeSvg("rect", { class: "row", x: from, y: chosen.head * tall, width: wide, height: tall }),
      makeSvg("line", { class: "now" }),
      makeSvg("text", { class: "name", x: width - SPACE.right + 5, y: (chosen.head + 0.5) * tall + 4 }, names[chosen.head])
    );
    frame.replaceChildren(canvas, picture);
  }
  function buildFrame() {
    const frame = byId("frame"), layers = [...new Set(run.heads.map(([layer]) => layer))];
    const columns = Math.max(...run.heads.map(([, head]) => head)) + 1;
    frame.style.setProperty("--columns", String(columns));
    frame.classList.toggle("many", layers.length > FEW);
    byId("cells").style.setProperty("--heads", String(names.length));
    frame.replaceChildren(...layers.flatMap((layer) => [
      make("span", {}, `L${layer}`),
      ...Array.from({ length: columns }, (_, column) => {
        const head = run.heads.findIndex(([a, b]) => a === layer && b === column);
        if (head < 0) return make("i");
        return make("button", {
          type: "button",
          id: `cell-${head}`,
          "data-head": head,
          click: () => go({ head }),
          pointerenter: () => point({ head, step: chosen.step }),
          pointerleave: () => point(null),
          focus: () => point({ head, step: chosen.step }),
          blur: () => point(null)
        });
      })
    ]));
    frame.addEventListener("keydown", (event) => {
      const [layer, number2] = run.heads[chosen.head], at = layers.indexOf(layer);
      const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
      const head = run.heads.findIndex(([a, b]) => a === layers[at + down] && b === number2 + right);
      if (!(down || right) || head < 0) return;
      event.preventDefault();
      go({ head });
      byId(`cell-${head}`).focus();
    });
  }
  function drawStep() {
    const { step } = chosen;
    byId("frame-title").textContent = `All heads at step ${run.steps[step].toLocaleString("en")}`;
    byId("step").value = String(step);
    byId("step").setAttribute("aria-valuetext", `step ${run.steps[step]}`);
    byId("out-step").textContent = `step ${run.steps[step].toLocaleString("en")}`;
    for (const cell of byId("frame").querySelectorAll("button")) {
      const head = Number(cell.dataset.head);
      cell.style.background = colourOf(valueAt(step, head)) ?? "";
      cell.setAttribute("aria-label", reading(head, step));
      cell.title = reading(head, step);
      cell.setAttribute("aria-pressed", String(head === chosen.head));
      cell.tabIndex = head === chosen.head ? 0 : -1;
    }
    for (const line of document.querySelectorAll("line.now")) {
      const { clientWidth: width, clientHeight: height } = (
        /** @type {Element} */
        line.closest("div")
      );
      for (const [name, value] of Object.entries({ x1: xOf(step, width), x2: xOf(step, width), y1: 0, y2: height - SPACE.bottom })) {
        line.setAttribute(name, String(value));
      }
    }
    point(null);
  }

  // src/training/training.js
  var FILM = 8e3;
  var LEAST = 40;
  var wrapped = (i, length) => (i + length) % length;
  var last2 = run.steps.length - 1;
  var timer = 0;
  var words = (metric) => metric.replaceAll("_", " ");
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
    if (chosen.step === last2) go({ step: 0 });
    byId("play").textContent = "Stop";
    timer = setInterval(() => {
      go({ step: chosen.step + 1 }, true);
      if (chosen.step === last2) stop();
    }, Math.max(LEAST, Math.min(400, FILM / (last2 + 1))));
  }
  function buildFindings() {
    byId("findings").append(...findings.map(({ sentence, metric, head, step }) => {
      if (head === null && step === null) return make("p", {}, sentence);
      const changes = { metric, ...head === null ? {} : { head }, ...step === null ? {} : { step: indexOf(step) } };
      return make("p", {}, make("button", { type: "button", class: "link", "data-view": `${metric} ${head}`, click: () => go(changes) }, sentence));
    }));
  }
  function buildControls() {
    for (
      const [id, options] of
      /** @type {[string, string[][]][]} */
      [
        ["metric", metrics.map((it) => [it, words(it)])],
        ["head", names.map((name, i) => [String(i), name])]
      ]
    ) {
      byId(id).append(...options.map(([value, text]) => make("option", { value }, text)));
      byId(id).addEventListener("change", () => go({ [id]: id === "head" ? Number(byId(id).value) : byId(id).value }));
    }
    byId("step").max = String(last2);
    byId("step").addEventListener("input", () => {
      if (timer) stop();
      go({ step: Number(byId("step").value) });
    });
    byId("play").addEventListener("click", play);
    byId("play").disabled = !last2;
  }
  function listen2(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select")) return;
    const { head, metric } = chosen;
    const change = {
      h: () => go({ head: wrapped(head - 1, names.length) }),
      l: () => go({ head: wrapped(head + 1, names.length) }),
      m: () => go({ metric: metrics[wrapped(metrics.indexOf(metric) + 1, metrics.length)] }),
      p: play
    }[event.key];
    if (change) change();
  }
  function start() {
    byId("app").hidden = false;
    screen.draw = draw;
    screen.drawStep = drawStep;
    buildThemeButton((isDark) => {
      screen.isDark = isDark;
    }, draw);
    buildFindings();
    buildControls();
    buildPictures();
    addEventListener("keydown", listen2);
    addEventListener("hashchange", () => {
      readAddress(location.hash);
      draw();
    });
    readAddress(location.hash);
    draw();
  }
  start();
  return __toCommonJS(training_exports);
})();
