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

  // src/survey/survey.js
  var survey_exports = {};
  __export(survey_exports, {
    chosen: () => chosen,
    go: () => go,
    survey: () => survey,
    ticksOf: () => ticksOf,
    valueOn: () => valueOn
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
  function clip(text, most) {
    const head2 = [...text.slice(0, 2 * most + 2)];
    return head2.length > most ? head2.slice(0, most).join("") + "…" : text;
  }
  function token(text, most = 24, title = text.length > 12 ? text : void 0) {
    return make("bdi", { class: "token", title }, clip(text, most));
  }
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
  var percent = (share) => {
    if (share > 0 && share < 5e-3) return "<1 %";
    const nearlyAll = share > 0.995 && share < 1;
    return `${nearlyAll ? Math.floor(1e3 * share) / 10 : Math.round(100 * share)} %`;
  };
  var count = (n, what, many = `${what}s`) => `${n.toLocaleString("en")} ${n === 1 ? what : many}`;
  function table(caption, columns, rows, kind = "") {
    const head2 = columns.map((name) => make("th", { scope: "col" }, name));
    const body = rows.map(({ cells, kind: kind2 }) => make(
      "tr",
      { class: kind2 },
      cells.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell))
    ));
    const around = make(
      "div",
      { class: "scroll", role: "group", "aria-label": caption },
      make(
        "table",
        { class: kind },
        make("caption", {}, caption),
        make("thead", {}, make("tr", {}, head2)),
        make("tbody", {}, body)
      )
    );
    scrolls.observe(around);
    return around;
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

  // src/json.js
  var parse = (text) => JSON.parse(text, (_, value) => value?.float === void 0 ? value : Number(value.float));
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (it) => it.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return parse(await new Response(stream).text());
  }

  // src/survey/store.js
  var survey = parse(byId("survey").textContent);
  for (const [at, head2] of survey.heads.entries()) {
    head2.metrics = Object.fromEntries(Object.entries(survey.numbers).filter(([, { mean }]) => mean[at] !== null).map(([name, columns]) => [
      name,
      /** @type {any} */
      Object.fromEntries(Object.entries(columns).map(([column, all]) => [column, all[at]]))
    ]));
  }
  var LARGEST = 10;
  var PLACE = ["layer", "head"];
  var DIFFERENCE = "difference:";
  var LEAST_Q = 0.05;
  var known = (name, i) => metricOf(name) ? name : survey.metrics[Math.min(i, survey.metrics.length - 1)].name;
  var metricOf = (name) => survey.metrics.find((it) => it.name === name);
  var START = {
    at: 0,
    // index of the head
    metric: known(survey.grid ? "neighbours" : "previous", 0),
    decile: LARGEST,
    x: known(survey.grid ? "distance" : "first", 1),
    y: known(survey.grid ? "neighbours" : "previous", 0),
    colour: "layer",
    vectors: "",
    // which vectors of the head are shown, such as q; "" for none
    examples: "all",
    // of these vectors, as the next ones
    components: "1.2",
    shade: "looks_at",
    // what their colours show
    group: "",
    // the only one that is not pale; "" for all
    example: ""
    // the selected one; "" for none
  };
  var effectOf = ({ effect, difference }) => effect === null ? difference ? Infinity : 0 : Math.abs(effect);
  var differences = survey.heads.flatMap((it, at) => Object.entries(it.metrics).flatMap(([metric, { compared }]) => compared ? [{ at, metric, compared }] : [])).sort((a, b) => Number(a.compared.q >= LEAST_Q) - Number(b.compared.q >= LEAST_Q) || effectOf(b.compared) - effectOf(a.compared) || Math.abs(b.compared.difference) - Math.abs(a.compared.difference));
  if (differences.length) {
    const { at, metric } = differences[0];
    Object.assign(START, { at, metric, x: metric, y: DIFFERENCE + metric });
  } else {
    const means = survey.heads.map(({ metrics }) => metrics[START.metric]?.mean ?? -Infinity);
    START.at = means.indexOf(Math.max(...means));
  }
  var chosen = { ...START };
  var theme = { isDark: false };
  var screen = {
    draw: () => {
    },
    misread: (
      /** @type {string[]} */
      []
    )
    // parts of the address that the page does not have
  };
  var head = () => survey.heads[chosen.at];
  var numbers = () => head().metrics[chosen.metric];
  var reading = (
    /** @type {Map<string, Promise<any>>} */
    /* @__PURE__ */ new Map()
  );
  function read(packed) {
    if (!reading.has(packed)) reading.set(packed, unpacked(packed));
    return (
      /** @type {Promise<any>} */
      reading.get(packed)
    );
  }
  var readDetails = () => read(head().details);
  var readContext = (number2) => read(survey.contexts[number2]);
  var axes = [
    ...PLACE,
    ...survey.metrics.map((it) => it.name),
    ...survey.other ? survey.metrics.map((it) => DIFFERENCE + it.name) : []
  ];
  var words = (name) => name.replace(DIFFERENCE, "difference of ").replace(/_(\d+)_(\d+)$/, " $1 to $2").replaceAll("_", " ");
  function valueOn(of, axis) {
    if (PLACE.includes(axis)) return of[axis];
    if (axis.startsWith(DIFFERENCE)) return of.metrics[axis.slice(DIFFERENCE.length)]?.compared?.difference ?? NaN;
    return of.metrics[axis]?.mean ?? NaN;
  }
  var metricsOf = (of) => survey.metrics.map((it) => it.name).filter((name) => name in of.metrics);
  function settle() {
    if (!numbers()) chosen.metric = metricsOf(head())[0];
  }

  // src/survey/vector_data.js
  var PARTS = {
    q_unrotated: "queries, before rotation",
    q: "queries",
    k_unrotated: "keys, before rotation",
    k: "keys",
    v: "values",
    o: "outputs, before the output projection"
  };
  var ROTATED = ", rotated by position";
  var EXAMPLES = { all: "all", others: "not on the first token" };
  var COMPONENTS = { "1.2": "1 and 2", "1.3": "1 and 3", "2.3": "2 and 3" };
  var SHADES = {
    looks_at: { title: "kind of key", groups: Object.keys(survey.key_kinds), of: (it) => it.looks_at },
    token_class: { title: "class of the query's token", groups: Object.keys(survey.classes), of: (it) => it.token_class },
    weight: { title: "largest weight", of: (it) => it.value },
    position: { title: "position of the query", of: (it, tokens) => it.query / Math.max(1, tokens.length - 1) }
  };
  var ofHeads = (
    /** @type {Map<number, SurveyVectors>} */
    /* @__PURE__ */ new Map()
  );
  var setVectors = (at, vectors) => ofHeads.set(at, vectors);
  var vectorsOf = (at) => ofHeads.get(at);
  var partNames = (data) => Object.keys(PARTS).filter((name) => data.parts.some((it) => it.name === name));
  var titleOf = (data, name) => PARTS[name] + (partNames(data).includes(`${name}_unrotated`) ? ROTATED : "");
  var partOf = (data) => (
    /** @type {SurveyPart} */
    data.parts.find((it) => it.name === chosen.vectors && it.all === (chosen.examples === "all"))
  );
  var examplesOf = (data) => data.examples.filter((it) => chosen.examples === "all" || it.keys[0]);
  var shadeOf = (data, example) => SHADES[chosen.shade].of(example, data.contexts[example.context].tokens);
  function nameOf(data, { context, query }) {
    const { text, context: number2 } = data.contexts[context];
    return `${text}.${number2}.${query}`;
  }
  function settleVectors() {
    const data = vectorsOf(chosen.at), absent = (
      /** @type {string[]} */
      []
    );
    if (!chosen.vectors) Object.assign(chosen, { group: "", example: "" });
    if (!data || !chosen.vectors) return absent;
    const limit = (name, isThere, otherwise) => {
      if (!chosen[name] || isThere) return;
      absent.push(`${name} “${chosen[name]}”`);
      chosen[name] = otherwise;
    };
    limit("vectors", partNames(data).includes(chosen.vectors), partNames(data)[0]);
    const isGrouped = Boolean(SHADES[chosen.shade].groups);
    limit("group", isGrouped && examplesOf(data).some((it) => shadeOf(data, it) === chosen.group), "");
    limit("example", examplesOf(data).some((it) => nameOf(data, it) === chosen.example), "");
    return absent;
  }

  // src/survey/address.js
  var CHOICES = {
    x: axes,
    y: axes,
    colour: axes,
    vectors: Object.keys(PARTS),
    examples: Object.keys(EXAMPLES),
    components: Object.keys(COMPONENTS),
    shade: Object.keys(SHADES)
  };
  var OF_VECTORS = ["vectors", "examples", "components", "shade", "group", "example"];
  var KNOWN = ["layer", "head", "metric", "decile", "x", "y", "colour", ...OF_VECTORS];
  function go(changes, replaces = false) {
    const { at } = chosen;
    Object.assign(chosen, changes);
    if (chosen.at !== at) Object.assign(chosen, { group: "", example: "", ...vectorsOf(chosen.at) ? {} : { vectors: "" } });
    settle();
    settleVectors();
    screen.misread = [];
    writeAddress(replaces);
    screen.draw();
  }
  function writeAddress(replaces) {
    const { layer, head: number2 } = head(), { metric, decile, x, y, colour } = chosen;
    const parts = { layer, head: number2, metric, decile, x, y, colour };
    for (const name of OF_VECTORS) if (chosen.vectors && chosen[name]) parts[name] = chosen[name];
    const address = `#${new URLSearchParams(
      /** @type {any} */
      parts
    )}`;
    if (address === location.hash) return;
    try {
      if (replaces) history.replaceState(null, "", address);
      else history.pushState(null, "", address);
    } catch {
    }
  }
  function readAddress(hash) {
    const parts = new URLSearchParams(hash.replace(/^#/, "")), misread = (
      /** @type {string[]} */
      []
    );
    Object.assign(chosen, START);
    misread.push(...[...parts.keys()].filter((name) => !KNOWN.includes(name)).map((name) => `“${name}”`));
    if (parts.has("layer") || parts.has("head")) {
      const layer = parts.get("layer") ?? "0", number2 = parts.get("head") ?? "0";
      const at = survey.heads.findIndex((it) => String(it.layer) === layer && String(it.head) === number2);
      if (at < 0) misread.push(`L${layer}H${number2}`);
      else chosen.at = at;
    }
    const choices = { metric: metricsOf(head()), decile: Array.from({ length: LARGEST + 1 }, (_, i) => String(i)), ...CHOICES };
    for (const [name, known2] of Object.entries(choices)) {
      const value = parts.get(name);
      if (value === null) continue;
      if (!known2.includes(value)) misread.push(`${name} “${value}”`);
      else chosen[name] = name === "decile" ? Number(value) : value;
    }
    if (chosen.vectors && survey.host !== "server") {
      misread.push(`vectors “${chosen.vectors}” without a server`);
      chosen.vectors = "";
    }
    for (const name of ["group", "example"]) {
      const value = parts.get(name) ?? "";
      if (chosen.vectors) chosen[name] = value;
      else if (value) misread.push(`${name} “${value}”`);
    }
    settle();
    screen.misread = misread;
  }

  // src/survey/findings.js
  var PLACES = (
    /** @type {Record<string, string>} */
    {
      neighbours: "the four patches beside the query",
      self: "the query itself",
      row: "the patches in its row",
      column: "the patches in its column",
      within_1: "it and the eight patches around it",
      ...Object.fromEntries((survey.grid?.[0] ?? []).map((it) => [`on_${it.replace(/[[\]]/g, "").toLowerCase()}`, it]))
    }
  );
  var BEHAVIOURS = survey.grid ? Object.keys(PLACES) : ["induction", "duplicate", "previous", "self", "separators", "ahead", "first"];
  var BEST = 3;
  var MOST = 0.5;
  var headName = ({ layer, head: head2 }) => `L${layer}H${head2}`;
  var keysOf = (name) => (survey.grid ? PLACES[name] : survey.key_kinds[name] ?? survey.key_kinds[name.replace(/s$/, "")]) ?? words(name);
  function sentences() {
    const kinds2 = Object.entries(survey.key_kinds), heads = survey.heads, several = heads.filter((it) => it.several);
    const leading = heads.map(({ shares }) => shares.findIndex((share) => share > MOST));
    const groups = kinds2.map(([kind, meaning], i) => ({ kind, meaning, n: leading.filter((it) => it === i).length })).filter(({ n }) => n).sort((a, b) => b.n - a.n), all = groups.reduce((sum, { n }) => sum + n, 0);
    const clearest = BEHAVIOURS.filter((name) => name !== "first").flatMap((name) => bestHeads(name).slice(0, 1).map((best) => ({ name, ...best }))).sort((a, b) => excess(b.numbers) - excess(a.numbers)).slice(0, BEST).map(({ name, it, numbers: numbers2 }) => `${headName(it)} puts ${number(numbers2.mean, 2)} of its weight on ${keysOf(name)}` + (numbers2.uniform === null ? "" : ` (equal weights: ${number(numbers2.uniform, 2)})`));
    return [
      survey.grid ? "" : `${all} of ${count(heads.length, "head")} have most of their largest weights on one kind of key${all ? `: ${groups.map(({ n, meaning }) => `${n} on ${meaning}`).join(", ")}` : ""}.`,
      clearest.length ? `${survey.grid ? "The clearest" : "The clearest besides"}: ${clearest.join("; ")}.` : "",
      several.length ? `${count(several.length, "head does", "heads do")} more than one thing${several.length > BEST ? ", for example" : ":"} ${several.slice(0, BEST).map(headName).join(", ")}.` : ""
    ].filter(Boolean);
  }
  var excess = ({ mean, uniform }) => mean - (uniform ?? 0);
  function bestHeads(name) {
    const own = survey.heads.map((it, at) => ({ at, it, numbers: it.metrics[name] }));
    return own.filter(({ numbers: numbers2 }) => numbers2 && (numbers2.low ?? numbers2.mean) > (numbers2.uniform ?? 0)).sort((a, b) => b.numbers.mean - a.numbers.mean).slice(0, BEST);
  }
  function buildFindings() {
    byId("findings-words").replaceChildren(...sentences().map((it) => make("p", { class: "lead" }, it)));
    const rows = BEHAVIOURS.filter(metricOf).map((name) => ({ name, best: bestHeads(name) })).filter(({ best }) => best.length).map(({ name, best }) => ({ kind: "", cells: [
      make("span", { title: metricOf(name)?.formula }, words(name), make("small", {}, keysOf(name))),
      ...best.map(({ at, it, numbers: numbers2 }) => {
        const { mean, low, high } = numbers2, interval = low === null || high === null ? "" : `${number(low, 2)} to ${number(high, 2)}`;
        const button = make(
          "button",
          { type: "button", class: "quiet", "data-at": at, "data-metric": name },
          make("b", {}, headName(it)),
          ` ${number(mean, 2)} `,
          make("small", {}, interval)
        );
        button.addEventListener("click", () => {
          go({ at, metric: name, y: name });
          const title = byId("all-title");
          if (title.getBoundingClientRect().top > innerHeight) title.scrollIntoView();
        });
        return button;
      }),
      ...Array(BEST - best.length).fill(""),
      best[0].numbers.uniform === null ? "" : number(best[0].numbers.uniform, 2)
    ] }));
    byId("findings-table").replaceChildren(...rows.length ? [table("The best heads of each behaviour: mean weight on its keys, with 95 % interval", ["behaviour", "best", "second", "third", "equal weights"], rows)] : []);
  }
  function drawFindings() {
    for (const button of byId("findings-table").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.at) === chosen.at && button.dataset.metric === chosen.metric));
    }
  }

  // src/colours.js
  function mixed(points, place) {
    const at = Math.max(0, Math.min(1, place)) * (points.length - 1);
    const low = points[Math.floor(at)], high = points[Math.ceil(at)];
    return low.map((channel, i) => Math.round(channel + (high[i] - channel) * (at % 1)));
  }
  var css = (colour) => `rgb(${colour.join(" ")})`;
  var linear = (x) => x <= 10 ? x / 3294.6 : ((x / 255 + 0.055) / 1.055) ** 2.4;
  var inkOn = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue) > 0.179 ? "#000000" : "#ffffff";

  // src/survey/mixes.js
  var LEAST_SHARE = 0.01;
  var NAMED = 3;
  var kinds = Object.keys(survey.key_kinds);
  function rolesOf(shares) {
    const parts = shares.map((share, i) => ({ kind: survey.key_kinds[kinds[i]], share })).filter(({ share }) => share >= LEAST_SHARE).sort((a, b) => b.share - a.share).slice(0, NAMED);
    return parts.length ? `Its largest weight is ${parts.map(({ kind, share }, i) => `on ${kind} at ${percent(share)}${i ? "" : " of queries"}`).join(", ")}.` : "";
  }
  function drawMixes({ mixes }) {
    const { several } = head(), scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
    const columns = kinds.map((_, i) => i).filter((i) => mixes.some(({ shares }) => shares[i][0] >= LEAST_SHARE));
    const rows = mixes.map(({ token_class: name, queries, texts, shares }) => {
      const about = survey.classes[name] ?? "all queries";
      const cells = columns.map((i) => {
        const [share, low, high] = shares[i], colour = mixed(scale, Math.sqrt(share));
        const interval = low === null ? "" : `, 95 % interval ${number(low, 3)} to ${number(
          /** @type {number} */
          high,
          3
        )}`;
        const cell = make("span", { class: share ? "" : "none", title: `${name}, on ${survey.key_kinds[kinds[i]]}: ${number(share, 3)}${interval}` }, percent(share));
        if (share >= LEAST_SHARE) Object.assign(cell.style, { background: css(colour), color: inkOn(colour), padding: "0 0.3rem", borderRadius: "3px" });
        return cell;
      });
      const label = make("span", { title: `${about}: ${count(queries, "query", "queries")} of ${count(texts, "text")}` }, name);
      return { kind: "", cells: [label, queries.toLocaleString("en"), ...cells] };
    });
    byId("mixes").replaceChildren(...rows.length ? [table("Largest weight by the class of the query’s token", ["class", "queries", ...columns.map((i) => kinds[i])], rows)] : []);
    byId("several").textContent = several ? `Does more than one thing: ${several}.` : "";
  }

  // src/survey/head.js
  var either = (value, digits = 3) => value === null ? "" : number(value, digits);
  var MOST_TOKENS = 8;
  var signed = (value, decimals = 3) => (value > 0 ? "+" : "") + number(value, decimals);
  function drawHead() {
    const { module, shares } = head();
    byId("head-title").textContent = headName(head());
    byId("module").textContent = module;
    byId("roles").textContent = rolesOf(shares);
    byId("metric-title").textContent = words(chosen.metric);
    drawMetrics();
  }
  var GROUPS = (
    /** @type {[RegExp, string][]} */
    [
      [/^(first|self|previous|next|separators|duplicate|induction|on_.*)$/, "Weight on one kind of key"],
      [/^(neighbours|within_.*|row|column|distance)$/, "Weight by place on the grid, and distance in patches"],
      [/^(last|distance)_|^ahead$/, "Weight by distance, in tokens"],
      [/^(entropy|evenness|support|largest)$/, "How concentrated the weights are"],
      [/^looks_/, "Queries whose largest weight is on this kind of key"],
      [/^/, "Others"]
    ]
  );
  var groupOf = (name) => GROUPS.findIndex(([names]) => names.test(name));
  function drawMetrics() {
    const names = metricsOf(head()).toSorted((a, b) => groupOf(a) - groupOf(b)), columns = survey.other ? 5 : 4;
    const rows = names.flatMap((name, i) => {
      const { formula } = (
        /** @type {any} */
        metricOf(name)
      );
      const { mean, low, high, uniform, compared } = head().metrics[name];
      const button = make("button", {
        type: "button",
        class: "quiet",
        title: formula,
        "aria-pressed": String(name === chosen.metric)
      }, words(name));
      button.addEventListener("click", () => go({ metric: name }));
      const interval = low === null ? "" : `${number(low, 3)} to ${either(high)}`;
      const cells = survey.other ? comparison(compared) : [number(mean, 3), interval, either(uniform)];
      const row = { kind: `${name === chosen.metric ? "chosen" : ""} ${compared && compared.q < LEAST_Q ? "differs" : ""}`, cells: [button, ...cells] };
      const isNew = !i || groupOf(names[i - 1]) !== groupOf(name);
      return isNew ? [{ kind: "group", cells: [GROUPS[groupOf(name)][1], ...Array(columns - 1).fill("")] }, row] : [row];
    });
    byId("metrics").replaceChildren(survey.other ? table("Means of texts, in this survey and in the other", ["metric", "here", "there", "difference", "q"], rows) : table("Means over all queries", ["metric", "mean", "95 % interval", "uniform"], rows));
  }
  var comparison = (compared) => compared ? [number(compared.mean, 3), number(compared.other, 3), signed(compared.difference), number(compared.q, 3)] : ["", "", "", ""];
  function drawHistogram({ bins, counts, quantiles, queries, texts, sd }) {
    const { edges, formula, source, version } = metricOf(chosen.metric) ?? survey.metrics[0];
    byId("formula").textContent = BEHAVIOURS.includes(chosen.metric) ? `The weight on ${keysOf(chosen.metric)}: ${formula}.` : formula;
    byId("source").textContent = `Source: ${source}. Version ${version}. ${count(queries, "query", "queries")} of ${count(texts, survey.grid ? "picture" : "text")}.`;
    const most = Math.max(...counts, 1), all = new Map(bins.map((bin, i) => [bin, counts[i]]));
    const first = Math.min(...bins), last = Math.max(...bins);
    const bars = Array.from({ length: last - first + 1 }, (_, i) => first + i).map((bin) => {
      const n = all.get(bin) ?? 0;
      const column = make(
        "span",
        { class: "column", title: `${number(edges[bin], 3)} to ${number(edges[bin + 1], 3)}: ${count(n, "query", "queries")}` },
        make("span", { class: "fill" })
      );
      column.firstChild.style.height = `${100 * Math.sqrt(n / most)}%`;
      return column;
    });
    byId("histogram").replaceChildren(...bars);
    byId("histogram-ends").replaceChildren(make("span", {}, number(edges[first], 3)), make("span", {}, number(edges[last + 1], 3)));
    const [q05, , q50, , q95] = quantiles;
    byId("quantiles").textContent = `Mean ${number(numbers().mean, 3)}${sd === null ? "" : `, between texts ± ${number(sd, 3)}`}. ` + [
      q50 === null ? "" : `Median ${number(q50, 3)}.`,
      q05 === null ? "" : `5 % of queries are below ${number(q05, 3)}.`,
      q95 === null ? "" : `5 % are above ${number(q95, 3)}.`
    ].join(" ");
  }
  function drawTokens({ tokens }) {
    const parts = (
      /** @type {const} */
      ["query", "key"].map((side) => {
        const rows = tokens.filter((it) => it.side === side).slice(0, MOST_TOKENS).map((it) => ({ kind: "", cells: [token(survey.spelling[it.token]), it.count.toLocaleString("en"), number(it.lift, 2)] }));
        return rows.length ? table(side === "query" ? "Query tokens" : "Key tokens", ["token", "links", "lift"], rows) : "";
      })
    );
    byId("tokens").replaceChildren(...parts.filter(Boolean));
    byId("tokens-note").textContent = parts.some(Boolean) ? "A link is a largest weight that is neither on the first token nor on the query itself. Lift compares the fraction of links with the fraction of the text." : `No token has more links than its fraction of the ${survey.grid ? "pictures" : "text"}.`;
  }

  // src/survey/differences.js
  var MOST2 = 12;
  function drawDifferences() {
    byId("differences").hidden = !survey.other;
    if (!survey.other) return;
    const sure = differences.filter(({ compared }) => compared.q < LEAST_Q);
    const heads = new Set(sure.map(({ at }) => at)).size;
    byId("differences-about").textContent = `Compared with ${survey.other}, text by text: ${sure.length.toLocaleString("en")} of ${count(differences.length, "number")} with a difference, in ${count(heads, "head")}. At most ${LEAST_Q * 100} % of these are expected by chance (q below ${LEAST_Q}, Benjamini and Hochberg).`;
    byId("caution").textContent = survey.caution;
    const listed = sure.length ? sure : differences.filter(({ compared }) => compared.difference);
    const rows = listed.slice(0, MOST2).map(({ at, metric, compared }) => {
      const { layer, head: head2 } = survey.heads[at], isChosen = at === chosen.at && metric === chosen.metric;
      const { mean, other, effect, effect_low: low, effect_high: high } = compared;
      const button = make("button", { type: "button", class: "quiet", "aria-pressed": String(isChosen) }, `L${layer}H${head2} ${words(metric)}`);
      button.addEventListener("click", () => go({ at, metric }));
      const interval = low === null || high === null ? "" : ` (${signed(low, 2)} to ${signed(high, 2)})`;
      return { kind: isChosen ? "chosen" : "", cells: [
        button,
        number(mean, 3),
        number(other, 3),
        effect === null ? "no spread" : `${signed(effect, 2)}${interval}`
      ] };
    });
    if (rows.length) byId("differences-table").replaceChildren(table(
      `The largest ${sure.length ? "sure effects" : "effects, none of them sure"}, in standard deviations of texts`,
      ["head, metric", "here", "there", "effect (95 %)"],
      rows
    ));
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

  // src/survey/examples.js
  var SIDE = 224;
  var BEFORE = 22;
  var AFTER = 8;
  var NEAR_KEY = 5;
  var OF_KEYS = /^(first|self|previous|next|largest|separators|duplicate|induction)$/;
  var LINE_END = /↵$/;
  function buildExamples() {
    const names = [...Array.from({ length: LARGEST }, (_, i) => String(i)), "largest"];
    byId("deciles").append(...names.map((name, i) => {
      const button = make("button", { type: "button", class: "quiet", "data-decile": i }, name);
      button.addEventListener("click", () => go({ decile: i }));
      return button;
    }));
  }
  function drawGroups() {
    for (const button of byId("deciles").children) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.decile) === chosen.decile));
    }
  }
  function drawExamples(shown2, contexts) {
    const isStored = metricOf(chosen.metric)?.examples;
    byId("no-examples").textContent = shown2.length ? "" : isStored ? "No query of the sample is in this decile: its values fall into the bins of another one." : "This metric has no examples. Choose another metric.";
    byId("examples-about").textContent = chosen.decile < LARGEST ? "" : OF_KEYS.test(chosen.metric) ? "The values that most exceed those of equal weights; one of each query token first, and queries with four keys or more." : survey.grid ? "The largest values, one of each query patch first." : "The largest values, of each range of positions in turn; one of each query token first.";
    byId("examples").replaceChildren(...shown2.map((example, i) => article(example, contexts[i])));
  }
  function article(example, context, source = survey) {
    const { value, query } = example, { name, tokens } = context;
    const place = `${name}, ${context.pixels ? source.spelling[tokens[query]] : `position ${query}`}`;
    const from = survey.host === "server" ? make("a", { href: explorerAddress(tokens, query, source) }, place) : place;
    return make(
      "article",
      {},
      make("p", { class: "hint" }, make("b", {}, number(value, 3)), " · ", from),
      ...context.pixels ? picture(example, context, source) : [sample(example, context, source)]
    );
  }
  function picture({ query, keys, weights }, { tokens, pixels }, { spelling }) {
    const [before, rows, columns] = (
      /** @type {NonNullable<SurveyPage["grid"]>} */
      survey.grid
    );
    const scale = survey.inks.sequential[theme.isDark ? "dark" : "light"], colours = decode(pixels), [high, wide] = pixels.stored;
    const weightOf = new Map(keys.map((key, i) => [key - before.length, weights[i]])), cell = Math.max(4, Math.round(SIDE / Math.max(rows, columns)));
    const canvas = (
      /** @type {HTMLCanvasElement} */
      make("canvas", {
        width: columns * cell,
        height: rows * cell,
        role: "img",
        "aria-label": `${spelling[tokens[query]]} and its largest weights on the picture`
      })
    );
    const ink = (
      /** @type {CanvasRenderingContext2D} */
      canvas.getContext("2d")
    ), image = ink.createImageData(canvas.width, canvas.height);
    const paper = theme.isDark ? 16 : 255;
    for (let y = 0; y < canvas.height; y++) {
      for (let x = 0; x < canvas.width; x++) {
        const from = 3 * (Math.floor(y * high / canvas.height) * wide + Math.floor(x * wide / canvas.width));
        const grey = 0.3 * colours[from] + 0.59 * colours[from + 1] + 0.11 * colours[from + 2], faded = (grey + paper) / 2;
        const weight = weightOf.get(Math.floor(y / cell) * columns + Math.floor(x / cell)), part = Math.sqrt(weight ?? 0);
        const colour = mixed(scale, part).map((it) => faded + (it - faded) * (weight === void 0 ? 0 : 0.2 + 0.75 * part));
        image.data.set([...colour, 255], 4 * (y * canvas.width + x));
      }
    }
    ink.putImageData(image, 0, 0);
    const at = query - before.length, frame = make("span", { hidden: at < 0 });
    Object.assign(frame.style, {
      left: `${100 * (at % columns) / columns}%`,
      top: `${100 * Math.floor(at / columns) / rows}%`,
      width: `${100 / columns}%`,
      height: `${100 / rows}%`
    });
    const looks = keys.map((key, i) => `${spelling[tokens[key]]} ${percent(weights[i])}`).join(", ");
    return [make("div", { class: "picture" }, canvas, frame), make("p", { class: "hint" }, `Its largest weights: ${looks}.`)];
  }
  function sample(example, { tokens }, source) {
    const { query, keys, weights } = example;
    const scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
    const weightOf = new Map(keys.map((key, i) => [key, weights[i]]));
    const line = make("p", { class: "sample" });
    let last = -1, wasEnd = false;
    for (const position of positions(example, tokens.length)) {
      if (position > last + 1) line.append(make("span", { class: "gap" }, " … "));
      else if (position) line.append(source.between);
      last = position;
      const text = source.spelling[tokens[position]], weight = weightOf.get(position);
      const piece = make("bdi", { class: position === query ? "query" : "", title: weight === void 0 ? `position ${position}` : `position ${position}, weight ${percent(weight)}` }, text);
      if (weight !== void 0) {
        const colour = mixed(scale, Math.sqrt(weight));
        Object.assign(piece.style, { background: css(colour), color: inkOn(colour) });
      }
      line.append(piece);
      const isEnd = LINE_END.test(text);
      if (isEnd && !wasEnd) line.append(make("br"));
      wasEnd = isEnd;
    }
    return line;
  }
  function explorerAddress(tokens, query, { spelling, between }) {
    const [before, after] = survey.around, text = tokens.slice(before, tokens.length - after).map((i) => spelling[i]).join(between).replaceAll("↵", "\n").replaceAll("⇥", "	").replaceAll("␣", " ");
    const { layer, head: number2 } = head(), at = `${query}:${spelling[tokens[query]].trim()}`;
    return `explore#${new URLSearchParams(
      /** @type {any} */
      { text, layer, head: number2, query: at }
    )}`;
  }
  function positions({ query, keys }, length) {
    const near = /* @__PURE__ */ new Set();
    const add = (first, last) => {
      for (let i = Math.max(0, first); i <= Math.min(length - 1, last); i++) near.add(i);
    };
    add(query - BEFORE, query + AFTER);
    for (const key of keys) add(key - NEAR_KEY, key + NEAR_KEY);
    return [...near].sort((a, b) => a - b);
  }

  // src/ticks.js
  function ticksBetween(low, high, most = 4) {
    if (low > high) return [0, 1];
    const rough = (high - low || 1) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * /** @type {number} */
    [1, 2, 5, 10].find((it) => it * power >= rough * (1 - 1e-9)), first = Math.floor(low / step + 1e-9);
    const last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
    return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
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
  function drawColourScale(low, high, colourOf) {
    const ramp = make("i"), stops = [0, 0.25, 0.5, 0.75, 1].map((part) => colourOf(low + part * (high - low)));
    ramp.style.background = `linear-gradient(to right, ${stops.join()})`;
    byId("colour-scale").replaceChildren(end(low), ramp, end(high));
  }

  // src/survey/points.js
  var FINGER = 20;
  var DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  var pointOf = (frame, number2, [cx, cy], fill, title, isChosen) => makeSvg("circle", {
    id: `${frame.id}-${number2}`,
    role: "option",
    "aria-selected": String(isChosen),
    cx,
    cy,
    fill,
    r: isChosen ? 8 : 5
  }, makeSvg("title", {}, title));
  function showPoints(frame, picture2) {
    picture2.setAttribute("role", "presentation");
    frame.replaceChildren(picture2);
    activeIn(frame)?.classList.add("active");
  }
  function listenToPoints(frame, choose, show2 = (_) => {
  }) {
    const activate = (point) => {
      if (point === activeIn(frame)) return;
      activeIn(frame)?.classList.remove("active");
      frame.setAttribute("aria-activedescendant", point?.id ?? "");
      point?.classList.add("active");
      show2(point ? numberOf(point) : -1);
    };
    const follow = (event) => {
      if (event.movementX || event.movementY) activate(event.type === "pointermove" ? pointUnder(frame, event) : null);
    };
    for (const type of ["pointermove", "pointerleave"]) frame.addEventListener(type, follow);
    frame.addEventListener("blur", () => activate(null));
    frame.addEventListener("focus", () => {
      if (frame.matches(":focus-visible")) activate(frame.querySelector("circle[aria-selected=true]") ?? inOrder(frame)[0] ?? null);
    });
    frame.addEventListener("click", (event) => {
      const point = pointUnder(frame, event);
      if (point) choose(numberOf(point));
    });
    frame.addEventListener("keydown", (event) => {
      const points = inOrder(frame), active = activeIn(frame) ?? points[0], at = points.indexOf(active);
      const target = { Home: 0, End: points.length - 1, PageUp: at - 1, PageDown: at + 1 }[event.key];
      if (!active || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key in DIRECTIONS) activate(nearestToward(DIRECTIONS[event.key], active, points) ?? active);
      else if (target !== void 0) activate(points[target] ?? active);
      else if (event.key === "Enter" || event.key === " ") choose(numberOf(active));
      else return;
      event.preventDefault();
    });
  }
  var activeIn = (frame) => byId(frame.getAttribute("aria-activedescendant") ?? "");
  var numberOf = (point) => Number(point.id.slice(point.id.lastIndexOf("-") + 1));
  var placeOf = (point) => [point.cx.baseVal.value, point.cy.baseVal.value];
  var inOrder = (frame) => [...frame.querySelectorAll("circle:not(.dim)")].sort((a, b) => numberOf(a) - numberOf(b));
  function nearest(points, distance) {
    const least = Math.min(...points.map(distance));
    return least < Infinity ? points.find((point) => distance(point) === least) : null;
  }
  function pointUnder(frame, { target, clientX, clientY, pointerType }) {
    const point = target.closest("circle");
    if (point || pointerType !== "touch") return point;
    const { left, top } = frame.getBoundingClientRect();
    return nearest(inOrder(frame), (it) => {
      const [x, y] = placeOf(it), distance = Math.hypot(x - clientX + left, y - clientY + top);
      return distance <= FINGER ? distance : Infinity;
    });
  }
  function nearestToward([right, down], from, points) {
    const [x0, y0] = placeOf(from);
    return nearest(points, (point) => {
      const [x, y] = placeOf(point), along = right * (x - x0) + down * (y - y0), across = right * (y - y0) - down * (x - x0);
      return along > 0 && Math.abs(across) <= along ? Math.hypot(along, across) : Infinity;
    });
  }

  // src/survey/scatter.js
  var SPACE = { left: 52, right: 14, top: 26, bottom: 36 };
  function buildScatter() {
    for (const axis of ["x", "y", "colour"]) {
      const list = byId(`axis-${axis}`);
      list.append(...axes.map((name) => make("option", { value: name }, words(name))));
      list.addEventListener("change", () => go({
        [axis]: list.value,
        ...axis !== "colour" && metricOf(list.value) ? { metric: list.value } : {}
      }));
    }
    listenToPoints(byId("scatter"), (at) => go({ at }), nameActive);
    new ResizeObserver(drawScatter).observe(byId("scatter"));
  }
  var valuesOn = (axis) => survey.heads.map((it) => valueOn(it, axis));
  function ticksOf(axis) {
    const [low, high] = rangeOf(valuesOn(axis));
    return ticksBetween(low, high);
  }
  var rangeOf2 = (axis) => {
    const ticks = ticksOf(axis);
    return [ticks[0], ticks[ticks.length - 1]];
  };
  var coloursOf = (axis) => {
    const [low, high] = rangeOf(valuesOn(axis));
    return low < high ? [low, high] : rangeOf2(axis);
  };
  var FAR = 3.5;
  var MOST_NAMED = 8;
  function outliers() {
    const median = (values) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;
    const far = [chosen.x, chosen.y].map((axis) => {
      const values = valuesOn(axis), finite = values.filter(Number.isFinite), middle = median(finite);
      const unit = 1.48 * median(finite.map((it) => Math.abs(it - middle))), greatest = Math.max(...finite);
      return values.map((it) => it === greatest ? Infinity : unit && Number.isFinite(it) ? Math.abs(it - middle) / unit : 0);
    });
    const most = survey.heads.map((_, i) => Math.max(far[0][i], far[1][i]));
    return most.map((_, i) => i).filter((i) => most[i] > FAR).sort((a, b) => most[a] === most[b] ? 0 : most[b] - most[a]).slice(0, MOST_NAMED);
  }
  function addNames(picture2, heads, placeOf2, width) {
    const boxes = heads.map(placeOf2).map(([x, y]) => [x - 5, y - 5, x + 5, y + 5]);
    for (const at of heads) {
      const [x, y] = placeOf2(at), name = makeSvg("text", { class: "name", y: y + 4 }, headName(survey.heads[at]));
      picture2.append(name);
      const wide = name.getComputedTextLength();
      const box = [x + 9, x - 9 - wide].map((left) => [left, y - 8, left + wide, y + 8]).find(([left, top, right, bottom]) => left >= 0 && right <= width && boxes.every(([l, t, r, b]) => right < l || left > r || bottom < t || top > b));
      if (!box) {
        name.remove();
        continue;
      }
      boxes.push(box);
      name.setAttribute("x", String(box[0]));
    }
  }
  function nameActive(at) {
    const frame = byId("scatter"), picture2 = frame.firstChild, point = byId(`scatter-${at}`);
    picture2?.querySelector(".at-pointer")?.remove();
    for (const other of picture2?.querySelectorAll(".name") ?? []) other.style.visibility = "";
    if (!point || !picture2) return;
    const [x, y] = [point.cx.baseVal.value, point.cy.baseVal.value], isRight = x > frame.clientWidth / 2;
    const name = makeSvg(
      "text",
      { class: "name at-pointer", x: x + (isRight ? -11 : 11), y: y - 9, "text-anchor": isRight ? "end" : "start" },
      headName(survey.heads[at])
    );
    picture2.append(name);
    for (const other of picture2.querySelectorAll(".name:not(.at-pointer)")) if (isOver(other, name)) other.style.visibility = "hidden";
  }
  function isOver(a, b) {
    const [one, two] = [a, b].map((it) => it.getBoundingClientRect());
    return one.left < two.right && two.left < one.right && one.top < two.bottom && two.top < one.bottom;
  }
  function drawScatter() {
    const frame = byId("scatter"), { clientWidth: width, clientHeight: height } = frame;
    if (!width || !height) return;
    for (const axis of ["x", "y", "colour"]) byId(`axis-${axis}`).value = chosen[axis];
    const [[left, right], [bottom, top], [pale, strong]] = [rangeOf2(chosen.x), rangeOf2(chosen.y), coloursOf(chosen.colour)];
    const x = (value) => SPACE.left + (value - left) / (right - left) * (width - SPACE.left - SPACE.right);
    const y = (value) => height - SPACE.bottom - (value - bottom) / (top - bottom) * (height - SPACE.top - SPACE.bottom);
    const scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
    const colour = (value) => css(mixed(scale, 0.15 + 0.85 * (value - pale) / (strong - pale)));
    drawColourScale(pale, strong, colour);
    const picture2 = makeSvg("svg", { width, height });
    for (const value of ticksOf(chosen.x)) {
      picture2.append(makeSvg("text", { x: x(value), y: height - 20, "text-anchor": value === right ? "end" : "middle" }, tick(value)));
    }
    for (const value of ticksOf(chosen.y)) {
      picture2.append(makeSvg("line", { x1: SPACE.left, x2: width - SPACE.right, y1: y(value), y2: y(value) }));
      picture2.append(makeSvg("text", { x: SPACE.left - 6, y: y(value) + 4, "text-anchor": "end" }, tick(value)));
    }
    picture2.append(makeSvg(
      "text",
      { class: "axis", x: (SPACE.left + width - SPACE.right) / 2, y: height - 4, "text-anchor": "middle" },
      `${words(chosen.x)} →`
    ));
    picture2.append(makeSvg("text", { class: "axis", x: 4, y: 13 }, `↑ ${words(chosen.y)}`));
    const order = survey.heads.map((_, i) => i).sort((a, b) => Number(a === chosen.at) - Number(b === chosen.at));
    for (const i of order) {
      const it = survey.heads[i], at = [valueOn(it, chosen.x), valueOn(it, chosen.y)];
      if (!at.every(Number.isFinite)) continue;
      const isChosen = i === chosen.at, value = valueOn(it, chosen.colour);
      const title = `${headName(it)}: ${[chosen.x, chosen.y, chosen.colour].map((name) => `${words(name)} ${number(valueOn(it, name), 3)}`).join(", ")}`;
      const fill = Number.isFinite(value) ? colour(value) : "none";
      picture2.append(pointOf(frame, i, [x(at[0]), y(at[1])], fill, title, isChosen));
    }
    const placeOf2 = (at) => [x(valueOn(survey.heads[at], chosen.x)), y(valueOn(survey.heads[at], chosen.y))];
    showPoints(frame, picture2);
    addNames(picture2, [.../* @__PURE__ */ new Set([chosen.at, ...outliers()])].filter((at) => placeOf2(at).every(Number.isFinite)), placeOf2, width);
  }

  // src/hosts/server_lines.js
  async function* serverLines(path, request, signal) {
    let response;
    try {
      response = await fetch(path, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(request),
        signal
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Error("The server does not respond. Start clearhead serve again, and open the address that it prints.");
    }
    const reader = (
      /** @type {ReadableStream} */
      response.body.pipeThrough(new TextDecoderStream()).getReader()
    );
    let parts = [];
    for (; ; ) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The server ended before its response was complete. Try again.");
      const [first, ...others] = value.split("\n");
      parts.push(first);
      for (const next of others) {
        yield parts.join("");
        parts = [next];
      }
    }
  }
  var errorWords = ({ gave, rule, hint }) => `${gave} Rule: ${rule} Hint: ${hint}`;

  // src/survey/vectors.js
  var INKS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442", "#999999", "#8b5a2b"];
  var LETTER = { k: "key", k_unrotated: "key", v: "key" };
  var CHOICES2 = ["vectors", "examples", "components", "shade"];
  var running = { at: -1, run: new AbortController() };
  function buildVectors() {
    const isServed = survey.host === "server";
    byId("vectors-about").textContent = isServed ? "The model reads whole contexts again, up to this layer, until it has 200 examples of this head or all. Each is a query, and the key with its largest weight. Principal components are exact." : "Queries, keys, values and outputs of the examples need the model. To see their principal components: " + (survey.grid ? "" : "clearhead serve --model DIR --survey OUT. ") + "In Python: survey.vectors(model, layer, head).pca().";
    if (!isServed) return;
    byId("vectors-compute").addEventListener("click", show);
    const shades = Object.fromEntries(Object.entries(SHADES).map(([name, { title }]) => [name, title]));
    for (const [name, titles] of Object.entries({ examples: EXAMPLES, components: COMPONENTS, shade: shades })) offer(name, titles);
    for (const name of CHOICES2) byId(`cloud-${name}`).addEventListener("change", ({ target }) => go({ [name]: target.value }));
    const nameOfNumber = (i) => nameOf(shown(), examplesOf(shown())[i]);
    listenToPoints(byId("cloud"), (i) => go({ example: nameOfNumber(i) }), showExample);
    new ResizeObserver(drawCloud).observe(byId("cloud"));
  }
  var offer = (name, titles) => byId(`cloud-${name}`).replaceChildren(
    ...Object.entries(titles).map(([value, title]) => make("option", { value }, title))
  );
  var say = (text) => {
    byId("vectors-said").textContent = text;
  };
  var shown = () => (
    /** @type {SurveyVectors} */
    chosen.vectors ? vectorsOf(chosen.at) : void 0
  );
  async function openVectors() {
    if (!chosen.vectors || !(vectorsOf(chosen.at) || await compute())) return;
    screen.misread.push(...settleVectors());
    screen.draw();
  }
  async function show() {
    if (!(vectorsOf(chosen.at) || await compute())) return;
    const names = partNames(vectorsOf(chosen.at)), last = byId("cloud-vectors").value;
    go({ vectors: names.includes(last) ? last : names[0] });
  }
  async function compute() {
    const { at } = chosen, { layer, head: number2 } = head();
    running.run.abort();
    const mine = running = { at, run: new AbortController() };
    drawVectors();
    say("Waiting for the model.");
    try {
      for await (const text of serverLines("vectors", { layer, head: number2 }, mine.run.signal)) {
        const line = parse(text);
        if (line.error) throw new Error(errorWords(line.error));
        if (line.progress) say(`Reading: ${line.progress[0]} of ${count(line.progress[1], "context")}.`);
        if (line.vectors) {
          setVectors(at, line.vectors);
          say("");
          break;
        }
      }
    } catch (error) {
      if (!mine.run.signal.aborted) say(
        /** @type {Error} */
        error.message
      );
    }
    if (running !== mine) return false;
    running.at = -1;
    if (chosen.at === at && vectorsOf(at)) return true;
    drawVectors();
    return false;
  }
  function drawVectors() {
    if (survey.host !== "server") return;
    if (running.at >= 0 && running.at !== chosen.at) {
      running.run.abort();
      running.at = -1;
      say("");
    }
    const data = shown(), button = byId("vectors-compute");
    button.hidden = Boolean(data);
    button.disabled = running.at >= 0;
    button.textContent = `${vectorsOf(chosen.at) ? "Show" : "Compute"} for ${headName(head())}`;
    byId("vectors").hidden = !data;
    if (!data) return;
    offer("vectors", Object.fromEntries(partNames(data).map((name) => [name, titleOf(data, name)])));
    for (const name of CHOICES2) byId(`cloud-${name}`).value = chosen[name];
    drawLegend(data);
    drawCloud();
    showExample(-1);
  }
  function drawLegend(data) {
    const { groups } = SHADES[chosen.shade], scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
    const swatch = (colour) => {
      const dot = make("i", {});
      dot.style.background = colour;
      return dot;
    };
    const names = examplesOf(data).map((it) => shadeOf(data, it));
    const entries = groups ? groups.map((name, i) => ({ name, i, n: names.filter((it) => it === name).length })).filter(({ n }) => n).map(({ name, i, n }) => {
      const isOnly = chosen.group === name;
      const button = make("button", { type: "button", class: "quiet", "aria-pressed": String(isOnly) }, swatch(INKS[i]), `${name} ${n}`);
      button.addEventListener("click", () => go({ group: isOnly ? "" : name }));
      return button;
    }) : [swatch(css(mixed(scale, 0.15))), "0", swatch(css(mixed(scale, 1))), "1"];
    byId("legend").replaceChildren(...entries);
    const { shares, size } = partOf(data), { why_rotated: why, key_head: key } = data;
    byId("shares").textContent = `${count(examplesOf(data).length, "example")} of ${count(data.contexts.length, "context")}; vectors of ${count(size, "number")}` + (LETTER[chosen.vectors] ? ` of key head ${key}` : "") + ". " + (shares.length ? `Variance: ${shares.map((it, i) => `component ${i + 1} ${percent(it)}`).join(", ")}.` : "All vectors are equal.") + (why && "qk".includes(chosen.vectors) ? ` ${why}` : "");
  }
  function drawCloud() {
    const data = shown(), frame = byId("cloud"), { clientWidth: width, clientHeight: height } = frame;
    if (!data || !width || !height) return;
    const { points, shares } = partOf(data), [a, b] = chosen.components.split(".").map((it) => Number(it) - 1);
    const at = points.map((point) => [point[a] ?? 0, point[b] ?? 0]);
    const most = [0, 1].map((i) => Math.max(...at.map((point) => Math.abs(point[i])), 1e-30));
    const scale = Math.min((width / 2 - 30) / most[0], (height / 2 - 26) / most[1]);
    const x = (value) => width / 2 + value * scale, y = (value) => height / 2 - value * scale;
    const inks = survey.inks.sequential[theme.isDark ? "dark" : "light"];
    const picture2 = makeSvg("svg", { width, height });
    picture2.append(
      makeSvg("line", { x1: 0, x2: width, y1: y(0), y2: y(0) }),
      makeSvg("line", { x1: x(0), x2: x(0), y1: 0, y2: height }),
      ...a in shares ? [makeSvg("text", { x: width - 4, y: y(0) - 5, "text-anchor": "end" }, `${a + 1}: ${percent(shares[a])}`)] : [],
      ...b in shares ? [makeSvg("text", { x: x(0) + 5, y: 14 }, `${b + 1}: ${percent(shares[b])}`)] : []
    );
    const { groups } = SHADES[chosen.shade], examples = examplesOf(data), drawn = examples.map((example, i) => {
      const value = shadeOf(data, example), isChosen = nameOf(data, example) === chosen.example;
      const fill = groups ? INKS[groups.indexOf(value)] : css(mixed(inks, 0.15 + 0.85 * value));
      const title = `${wordsOf(data, example)}, in ${data.contexts[example.context].name}, position ${example.query}`;
      const point = pointOf(frame, i, [x(at[i][0]), y(at[i][1])], fill, title, isChosen);
      const isDim = Boolean(chosen.group) && value !== chosen.group;
      point.classList.toggle("dim", isDim);
      return { point, order: isChosen ? 2 : isDim ? 0 : 1 };
    });
    picture2.append(...drawn.sort((one, other) => one.order - other.order).map(({ point }) => point));
    showPoints(frame, picture2);
  }
  function wordsOf(data, { context, query, keys, value, token_class: tokenClass, looks_at: kind }) {
    const { tokens } = data.contexts[context], text = (at) => `“${data.spelling[tokens[at]].trim()}”`;
    return `${text(query)} (${tokenClass}) looks at ${text(keys[0])} (${kind}), weight ${number(value, 2)}`;
  }
  function showExample(number2) {
    const data = shown(), examples = examplesOf(data);
    const i = number2 < 0 ? examples.findIndex((it) => nameOf(data, it) === chosen.example) : number2;
    const { points } = partOf(data), same = points.filter((it) => String(it) === String(points[i])).length - 1;
    byId("vectors-example").replaceChildren(...i < 0 ? [make("p", { class: "hint" }, "Point at an example to see its text; click to select it. Keys: arrows, Page Up and Page Down, Enter.")] : [
      make("p", { class: "lead" }, wordsOf(data, examples[i]) + (same ? `; ${count(same, "other")} at the same point` : "")),
      article(examples[i], data.contexts[examples[i].context], data)
    ]);
  }

  // src/survey/survey.js
  var wrapped = (i, length) => (i + length) % length;
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
  var draws = 0;
  async function drawDetails() {
    const mine = ++draws, section = byId("one");
    section.setAttribute("aria-busy", "true");
    const shown2 = await readShown().catch((error) => {
      if (mine === draws) byId("no-examples").textContent = `This browser does not read compressed data; one of 2023 or later does. ${error}`;
    });
    if (mine !== draws) return;
    section.setAttribute("aria-busy", "false");
    if (!shown2) return;
    const { details, examples, contexts } = shown2;
    drawHistogram(details.metrics[chosen.metric]);
    drawMixes(details);
    drawTokens(details);
    drawExamples(examples, contexts);
  }
  async function readShown() {
    const { metric, decile } = chosen, details = await readDetails();
    const examples = details.metrics[metric].examples.filter((it) => it.decile === decile);
    return { details, examples, contexts: await Promise.all(examples.map(({ context }) => readContext(context))) };
  }
  function listen(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, input")) return;
    const names = metricsOf(head()), { at, decile, metric } = chosen;
    const changes = {
      h: () => ({ at: wrapped(at - 1, survey.heads.length) }),
      l: () => ({ at: wrapped(at + 1, survey.heads.length) }),
      "[": () => ({ decile: Math.max(0, decile - 1) }),
      "]": () => ({ decile: Math.min(LARGEST, decile + 1) }),
      Escape: () => ({ example: "" }),
      m: () => ({ metric: names[wrapped(names.indexOf(metric) + 1, names.length)] })
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
    buildThemeButton((isDark) => {
      theme.isDark = isDark;
    }, draw);
    buildFindings();
    buildScatter();
    buildExamples();
    buildVectors();
    addEventListener("hashchange", open);
    addEventListener("keydown", listen);
    open();
  }
  start();
  return __toCommonJS(survey_exports);
})();
