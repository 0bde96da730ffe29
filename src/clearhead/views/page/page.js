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

  // src/page.js
  var page_exports = {};
  __export(page_exports, {
    NO_EDITS: () => NO_EDITS,
    alignment: () => alignment,
    byId: () => byId,
    chooseView: () => chooseView,
    chosen: () => chosen,
    compute: () => compute,
    css: () => css,
    draw: () => draw,
    edit: () => edit,
    fillAll: () => fillAll,
    go: () => go,
    inkOn: () => inkOn,
    inked: () => inked,
    isZoomed: () => isZoomed,
    isolated: () => isolated,
    largestAt: () => largestAt,
    liveSource: () => liveSource,
    pageData: () => pageData,
    quoted: () => quoted,
    readEdits: () => readEdits,
    remoteSource: () => remoteSource,
    shareColour: () => shareColour,
    shownTrace: () => shownTrace,
    sideColour: () => sideColour,
    sides: () => sides,
    signedColour: () => signedColour,
    snapshot: () => snapshot,
    store: () => store,
    tellingQuery: () => tellingQuery,
    walk: () => walk,
    widthOf: () => widthOf,
    zoomedWeight: () => zoomedWeight
  });

  // src/data.js
  var Fields = class {
    constructor(data) {
      Object.assign(this, data);
    }
  };
  var Step = class extends /** @type {new (data: StepData) => StepFields} */
  Fields {
    /** @param {StepData} data */
    constructor(data) {
      super(data);
      this.isPair = this.axes.includes("q") && this.axes.includes("k");
      this.indexOf = {};
      for (const [letter, positions] of Object.entries(this.kept ?? {})) {
        this.indexOf[letter] = new Map(positions.map((position, index) => [position, index]));
      }
    }
    get holdsNumbers() {
      return Boolean(this.data ?? this.values ?? this.computed);
    }
    // Whether the page has the numbers of every query of a head.
    isExact(head) {
      return this.holdsNumbers && !this.kept?.q && (this.indexOf.h?.has(head) ?? true);
    }
    // Decoded on first use, so that a page of many heads opens quickly.
    get numbers() {
      return numbersOf(this);
    }
    // Whether the page has a map of a head.
    hasMap(head) {
      return this.isPair && (this.map !== void 0 || this.isExact(head));
    }
    get isShare() {
      return this.name === "weights" || this.name === "dropped";
    }
    // The numbers along `free` at an index of every other axis, for example
    // along("k", {h: 0, q: 3}) is a row of scores. Null if the page does not have them.
    along(free, indices) {
      if (this.computed) return this.compute?.(indices) ?? null;
      if (!this.holdsNumbers) return null;
      let start2 = 0, stride = 1, step = 0, length = 1;
      for (let axis = this.axes.length - 1; axis >= 0; axis--) {
        const letter = this.axes[axis];
        if (letter === free) {
          [step, length] = [stride, this.stored[axis]];
        } else {
          const position = indices[letter] ?? 0;
          const index = this.indexOf[letter] ? this.indexOf[letter].get(position) : position;
          if (index === void 0) return null;
          start2 += index * stride;
        }
        stride *= this.stored[axis];
      }
      return Array.from({ length }, (_, i) => this.numbers[start2 + i * step]);
    }
    // One head of a queries x keys step as a grid of cells: its numbers, or those of the map of every
    // head. For a tile, the map suffices: `fine` is false.
    grid(head, fine = true) {
      if (this.computed && this.isExact(head) && (fine || !this.map)) {
        const [rows2, columns2] = ["q", "k"].map((letter) => Object.fromEntries(this.shape)[letter]);
        const values2 = new Float32Array(rows2 * columns2);
        for (let q = 0; q < rows2; q++) values2.set(this.along("k", { h: head, q }) ?? [], q * columns2);
        return { rows: rows2, columns: columns2, values: values2 };
      }
      if (fine && this.fine && this.fine.head === head) {
        const [rows2, columns2] = this.fine.stored;
        return { rows: rows2, columns: columns2, values: numbersOf(this.fine) };
      }
      const from = this.map ?? this;
      const values = numbersOf(from), [rows, columns] = from.stored.slice(-2);
      const start2 = this.axes.includes("h") ? head * rows * columns : 0;
      return { rows, columns, values: values.subarray(start2, start2 + rows * columns) };
    }
  };
  var COMPUTED = {
    scores: (trace, { h, q, g }) => {
      const query = trace.step("query").along("d", { h, q }), keys = trace.vectors("key", "d", g), D = query.length;
      return trace.keys.map((_, k) => query.reduce((score, x, d) => score + x * keys[k * D + d], 0));
    },
    scaled: (trace, _, before) => before.map((x) => x * trace.settings.scale),
    capped: ({ settings }, _, before) => before.map((x) => settings.softcap * Math.tanh(x / settings.softcap)),
    masked: (trace, { q }, before, { spans }) => {
      const ends3 = numbersOf(spans), [first, after] = [ends3[q], ends3[trace.size.q + q]];
      return before.map((x, k) => k >= first && k < after ? x : -Infinity);
    },
    weights: (_, __, before) => {
      const most = before.reduce((a, b) => Math.max(a, b), -Infinity);
      const exps = before.map((x) => x === -Infinity ? 0 : Math.exp(x - most));
      const total = exps.reduce((a, b) => a + b, 0);
      return exps.map((x) => total ? x / total : 0);
    },
    output: (trace, { g }, weights) => {
      const values = trace.vectors("value", "v", g), out = Array(trace.size.v).fill(0);
      weights.forEach((weight, k) => {
        if (weight) out.forEach((_, i) => {
          out[i] += weight * values[k * out.length + i];
        });
      });
      return out;
    }
  };
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
  var numbersOf = (encoded) => encoded.decoded ??= decode(encoded);
  var Trace = class extends /** @type {new (data: any) => TraceFields} */
  Fields {
    /** @param {LayerData} data @param {string[]} tokens */
    constructor(data, tokens) {
      super({ ...data, steps: data.steps.map((step) => new Step(step)) });
      const numbers = (size) => Array.from({ length: size }, (_, i) => String(i));
      const labels = (given, size) => (given === void 0 ? tokens : given) ?? numbers(size);
      this.settings ??= {};
      this.queries = labels(data.queries, data.size.q);
      this.keys = labels(data.keys, data.size.k);
      this.kept ??= numbers(data.size.q).map(Number);
      this.isOneText = !this.cross_attention && isAlike(this.queries, this.keys);
      this.pairs = this.steps.filter((step) => step.isPair);
      for (const step of this.steps) if (step.computed) step.compute = this.computing(step);
      this.weights = /** @type {Step} */
      this.step("weights");
      this.used = this.step("dropped") ?? this.weights;
      this.heads = data.size.h ?? 1;
      this.keyHeads = data.size.g ?? this.heads;
      this.blocks = /** @type {number[] | null} */
      null;
      this.members = /** @type {number[][] | null} */
      null;
    }
    step(name) {
      return this.steps.find((step) => step.name === name);
    }
    // The steps of which the page has a map of a head.
    maps(head) {
      return this.steps.filter((step) => step.hasMap(head));
    }
    // A function that computes one query of one head of a step from the steps before it, and stores it; null if
    // the page does not have the head.
    computing(step) {
      const before = step.isPair ? this.pairs[this.pairs.indexOf(step) - 1] : this.pairs.at(-1), known2 = /* @__PURE__ */ new Map();
      return ({ h, q }) => {
        const at = this.at(h, q, 0), name = h * this.size.q + q;
        if (!step.isExact(h)) return null;
        if (!known2.has(name)) known2.set(name, COMPUTED[step.name](this, at, before?.along("k", at) ?? [], step));
        return known2.get(name);
      };
    }
    // The vectors of one head of the keys or the values, one after the other.
    vectors(name, letter, head) {
      const step = (
        /** @type {Step} */
        this.step(name)
      ), size = this.size.k * this.size[letter];
      const index = step.indexOf.g ? step.indexOf.g.get(head) ?? 0 : head;
      return step.numbers.subarray(index * size, (index + 1) * size);
    }
    // The queries of which the page has the weights of a head, or the largest of them.
    stored(head) {
      return this.used.isExact(head) ? this.queries.map((_, query) => query) : this.kept;
    }
    isStored(head, query) {
      return this.used.isExact(head) || this.kept.includes(query);
    }
    // The position to show for an index of an axis, which in a part of a text does not begin at 0.
    numbered(letter, index) {
      return index + (this.first?.[letter] ?? 0);
    }
    // The index of every axis.
    at(h, q, k) {
      return { h, q, k, g: Math.floor(h / (this.heads / this.keyHeads)) };
    }
    // The row of a queries x keys step. If only the largest weights are stored, others are undefined.
    row(step, head, query) {
      return step.along("k", this.at(head, query, 0)) ?? (step === this.weights || step === this.used ? this.largestKept(head, query) : null);
    }
    largestKept(head, query) {
      const row = Array(this.size.k).fill(void 0), at = this.kept.indexOf(query);
      if (!this.links || at < 0) return row;
      const { n } = this.links, [weights, keys] = [this.links.weights, this.links.keys].map(numbersOf);
      const start2 = (head * this.kept.length + at) * n;
      for (let i = start2; i < start2 + n; i++) {
        if (weights[i] > 0) row[keys[i]] = weights[i];
      }
      return row;
    }
    // The row of a query for a picture: where the page has no weight of an image, that of the map, in which the keys
    // of a cell share its weight. If cells are blocks of patches, all of it is that of the map.
    drawn(head, query) {
      const row = this.row(this.used, head, query) ?? [];
      if (!this.picture || !row.includes(void 0)) return row;
      const map = this.weights.grid(head, false), cells = this.blocksOf(head);
      return row.map((weight, key) => {
        if (weight !== void 0 && !cells) return weight;
        const cell = this.cellOf(query, key, map), [first, last] = this.columnSpan(cell.column, map.columns);
        const size = cells ? this.tokensOf(cell.column).length : last - first + 1;
        return Math.max(0, map.values[cell.row * map.columns + cell.column]) / size;
      });
    }
    // The cell of each token, if the page has a map of the head, or any map, whose cells are blocks of patches.
    blocksOf(head = (
      /** @type {number | null} */
      null
    )) {
      const { before, rows, columns, block } = this.picture ?? { before: 0, rows: 0, columns: 0, block: null };
      if (!block || block === 1 || head !== null && this.used.isExact(head)) return null;
      const across = Math.ceil(columns / block), fewer = across * Math.ceil(rows / block) - rows * columns;
      return this.blocks ??= this.keys.map((_, at) => !this.isPatch(at) ? at + (at < before ? 0 : fewer) : before + Math.floor(Math.floor((at - before) / columns) / block) * across + Math.floor((at - before) % columns / block));
    }
    // The tokens of a cell that is a block of patches.
    tokensOf(cell) {
      const cells = (
        /** @type {number[]} */
        this.blocksOf()
      );
      this.members ??= cells.reduce(
        (lists, it, at) => {
          (lists[it] ??= []).push(at);
          return lists;
        },
        /** @type {number[][]} */
        []
      );
      return this.members[cell];
    }
    // The tokens that share the weight of a token in `drawn`.
    sharing(head, at) {
      const cells = this.blocksOf(head);
      return cells ? this.tokensOf(cells[at]) : [at];
    }
    // The name of a token with those that share its weight: "patch 2,4 to 3,5" for a block.
    nameOf(head, labels, at) {
      const tokens = this.sharing(head, at), last = labels[tokens.at(-1)];
      return labels[tokens[0]] + (tokens.length > 1 ? ` to ${last.split(" ").at(-1)}` : "");
    }
    // Whether a token is a patch of an image.
    isPatch(at) {
      const { before, rows, columns } = this.picture ?? { before: 0, rows: 0, columns: 0 };
      return at >= before && at < before + rows * columns;
    }
    // The norm-weighted attention of a query on each key: the weight times |v W_O|, the norm of what the
    // value writes, divided by the sum over all keys. Null if it is unknown.
    normWeighted(head, query) {
      const row = this.drawn(head, query);
      if (!this.norms || !row.length || this.blocksOf(head) || row.some((weight) => weight === void 0)) return null;
      const norms = numbersOf(this.norms), start2 = head * this.size.k;
      const parts = row.map((weight, key) => Math.abs(weight) * norms[start2 + key]);
      const total = parts.reduce((sum3, part) => sum3 + part, 0);
      return total ? parts.map((part) => part / total) : parts;
    }
    // Why `normWeighted` is null.
    get normsWithheld() {
      if (this.norms) return "The page does not have all weights of this query.";
      return this.norms_withheld ?? "The page does not have the output projection of this layer, W_O.";
    }
    // The weight of every query on one key; undefined if the page does not have it.
    column(head, key) {
      return this.queries.map((_, query) => this.row(this.used, head, query)?.[key]);
    }
    // The mean weight that each key receives from a query, or the mean of another row of each query.
    received(head, rowOf4 = (query) => this.drawn(head, query)) {
      const sums = Array(this.size.k).fill(0);
      const stored = this.stored(head);
      for (const query of stored) {
        rowOf4(query)?.forEach((weight, key) => {
          sums[key] += weight || 0;
        });
      }
      return sums.map((sum3) => sum3 / stored.length);
    }
    // The keys that the mask blocks for a query, if the page has the masked scores.
    blocked(head, query) {
      const masked = this.step("masked"), row = masked && this.row(masked, head, query);
      return row ? row.map((score) => score === -Infinity) : this.keys.map(() => false);
    }
    // The positions that a cell of a map covers, [first, last].
    rowSpan(cell, rows) {
      return rows < this.size.q && this.blocksOf() ? ends(this.tokensOf(cell)) : span(cell, this.size.q, rows, this.block?.[0]);
    }
    columnSpan(cell, columns) {
      return columns < this.size.k && this.blocksOf() ? ends(this.tokensOf(cell)) : span(cell, this.size.k, columns, this.block?.[1]);
    }
    cellOf(query, key, { rows, columns }) {
      const cells = columns < this.size.k && this.blocksOf();
      if (cells) return { row: cells[query], column: cells[key] };
      return {
        row: cellOf(query, this.size.q, rows, this.block?.[0]),
        column: cellOf(key, this.size.k, columns, this.block?.[1])
      };
    }
  };
  function span(cell, length, cells, block) {
    if (block) return [cell * block, Math.min(length, (cell + 1) * block) - 1];
    return [Math.floor(cell * length / cells), Math.floor((cell + 1) * length / cells) - 1];
  }
  var ends = (tokens) => [tokens[0], tokens.at(-1)];
  var cellOf = (position, length, cells, block) => block ? Math.floor(position / block) : Math.floor(((position + 1) * cells - 1) / length);
  var isAlike = (a, b) => a === b || a.length === b.length && a.every((word, i) => word === b[i]);
  var Snapshot = class {
    constructor(data) {
      this.tokens = data.tokens;
      this.text = data.text ?? data.tokens.join(" ");
      this.guesses = data.guesses ?? null;
      this.nextToken = data.next_token ?? { token: "", probability: 0, writers: [] };
      this.effectMetric = data.effect_metric ?? "";
      this.unknown = new Set(data.unknown ?? []);
      this.joined = new Set(data.spelling?.joined ?? []);
      this.data = data;
      this.read = data.layers.map(() => null);
      this.findings = new Map((data.heads ?? []).map((it) => [`${it.layer}.${it.head}`, it]));
    }
    get layers() {
      return this.read.length;
    }
    // The heads that write the predicted next token, if the query is the last token.
    writers(trace, query) {
      const isLast = trace.isOneText && query === this.tokens.length - 1 && trace.size.q === this.tokens.length;
      return isLast ? this.nextToken.writers : [];
    }
    // Whether these labels of a layer are the tokens of the text.
    areTokens(labels) {
      return isAlike(labels, this.tokens);
    }
    // Whether a label follows the one before it without a space, like the pieces of a word.
    touches(labels, position) {
      return this.joined.has(position) && this.areTokens(labels);
    }
    // The title of a label that a picture may cut: the label, with its spelling and its id if known.
    title(labels, position) {
      return this.spelled(labels, position) ?? labels[position];
    }
    // A label with its spelling in the vocabulary and its id; undefined if unknown.
    spelled(labels, position) {
      const { spelling } = this.data;
      if (!spelling || !this.areTokens(labels)) return void 0;
      return `${labels[position]}
in the vocabulary: ${spelling.raw[position]}, id ${spelling.ids[position]}`;
    }
    // The size and the colours of an image.
    image(index) {
      const image = this.data.images[index];
      return { stored: image.stored, values: numbersOf(image) };
    }
    // Every step of a layer, in place of what the page had of it except for maps, which are quick to draw.
    addSteps(number2, data) {
      const { module, cross_attention, part, max_entropy, queries, keys, norms, norms_withheld, picture, steps: old } = this.data.layers[number2];
      const steps = data.steps.map((step) => ({ map: step.computed ? old.find((it) => it.name === step.name)?.map : void 0, ...step }));
      this.read[number2] = new Trace({
        ...data,
        steps,
        module,
        cross_attention,
        part,
        max_entropy,
        queries,
        keys,
        norms,
        norms_withheld,
        picture
      }, this.tokens);
    }
    layer(number2) {
      return this.read[number2] ??= new Trace(this.data.layers[number2], this.tokens);
    }
    // The results for a head: its label, entropy, shares; undefined if there are none.
    finding(layer, head) {
      return this.findings.get(`${layer}.${head}`);
    }
    // The heads with every step on the page.
    *exactHeads() {
      for (const { layer, head } of this.places()) {
        const step = this.data.layers[layer].steps.find((it) => it.name === "scores");
        if (step && (step.kept?.h?.includes(head) ?? !step.kept?.q)) yield [layer, head];
      }
    }
    *places() {
      for (let layer = 0; layer < this.layers; layer++) {
        const { size } = this.data.layers[layer];
        for (let head = 0; head < (size.h ?? 1); head++) yield { layer, head };
      }
    }
  };

  // src/json.js
  var parse = (text) => JSON.parse(text, (_, value) => value?.float === void 0 ? value : Number(value.float));

  // src/store.js
  var pageData = parse(document.getElementById("trace")?.textContent ?? "");
  var opened = new Snapshot(pageData);
  var NO_EDITS = (
    /** @type {any} */
    Object.fromEntries(
      Object.entries(pageData.edits).map(([name, edit2]) => [name, edit2.default])
    )
  );
  var chosen = {
    view: (
      /** @type {View} */
      "text"
    ),
    layer: 0,
    head: 0,
    query: (
      /** @type {number | null} */
      null
    ),
    key: (
      /** @type {number | null} */
      null
    ),
    step: "weights",
    // the matrix that the map shows
    stage: 0,
    // the step of the numbers and the walk
    others: (
      /** @type {Place[]} */
      []
    ),
    // heads shown beside the selected one
    by: (
      /** @type {"weight" | "norm-weighted"} */
      "weight"
    ),
    // what shades the text
    registers: (
      /** @type {"drawn" | "left out"} */
      "drawn"
    ),
    // patches that are registers in all but name
    difference: false,
    // show the difference of two sides instead of both
    threshold: 0.05,
    // a smaller weight gets no line
    edits: NO_EDITS
  };
  var walk = { at: 0, speed: 1, isPlaying: false, frame: 0, last: 0 };
  var sheet = { label: (
    /** @type {string | null} */
    null
  ), order: "place" };
  var stillOnly = matchMedia("(prefers-reduced-motion: reduce)");
  var narrow = matchMedia("(max-width: 52rem)");
  var store = {
    // The target of the pointer, which overrides the selection.
    pointed: (
      /** @type {Partial<typeof chosen> | null} */
      null
    ),
    // Snapshots: the current one, with edits if there are any; one without edits, for comparison; and
    // another for comparison, of an earlier text or of another model.
    current: opened,
    edited: (
      /** @type {Snapshot | null} */
      null
    ),
    before: (
      /** @type {Snapshot | null} */
      null
    ),
    kept: (
      /** @type {Snapshot | null} */
      null
    ),
    // The source, or null; the number of the newest request, so that the response to an older one is
    // not shown; and the newest request, until its response arrives.
    source: (
      /** @type {Source | null} */
      null
    ),
    computing: 0,
    wanted: (
      /** @type {{text: string, edits: schema.Edits} | null} */
      null
    ),
    // The field whose value was refused, which keeps it for correction; and whether the text in its
    // field was refused, so that the earlier text is shown.
    refusedField: (
      /** @type {string | null} */
      null
    ),
    isRefused: false,
    // Exact weights of a part of a pooled map; its index 0 is at `first`.
    zoomed: (
      /** @type {{from: Snapshot, layer: number, head: number, trace: Trace,
      first: {q: number, k: number}} | null} */
      null
    ),
    misread: (
      /** @type {string[]} */
      []
    ),
    // parts of the address that the page does not have
    isAdding: false,
    // whether a click on a head adds it to the comparison
    tiles: (
      /** @type {any[]} */
      []
    ),
    // the buttons of the heads
    picture: (
      /** @type {Scene | null} */
      null
    ),
    // the scene on the canvas
    isDark: false,
    // Caches: the colours of the current theme, and the matching words of two texts.
    themeColours: (
      /** @type {Record<string, string> | null} */
      null
    ),
    aligned: (
      /** @type {{kept: Snapshot | null, current: Snapshot | null, words: Words | null}} */
      { kept: null, current: null, words: null }
    )
  };
  var screen = { draw() {
  }, drawPicture() {
  }, drawControls() {
  }, fillAll() {
  } };

  // src/edits.js
  var changedEdits = (edits) => Object.entries(edits).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(NO_EDITS[
    /** @type {keyof Edits} */
    name
  ]));
  var hasEdits = (edits) => changedEdits({ ...edits, seed: edits.dropout ? edits.seed : 0 }).length > 0;
  function fits(name, value) {
    const { kind, over = -Infinity, least = -Infinity, below = Infinity } = pageData.edits[name];
    if (kind === "mask") return typeof value === "string";
    if (kind === "heads") {
      return Array.isArray(value) && value.every((it) => Array.isArray(it) && it.length === 2 && it.every(Number.isFinite));
    }
    return typeof value === "number" && (kind === "number" || Number.isSafeInteger(value)) && over < value && least <= value && value < below;
  }
  function refusalOf(name, value) {
    const { default: none, label, rule, example } = pageData.edits[name];
    if (value === null && none === null || fits(name, value)) return "";
    const more = none === null ? `, for example ${example}, or empty` : "";
    return `The ${label.toLowerCase()} is ${value}. It is ${rule}${more}.`;
  }
  function editsIn(hash) {
    try {
      return Object.entries(JSON.parse(new URLSearchParams(hash.replace(/^#/, "")).get("edits") ?? "{}") ?? {});
    } catch {
      return null;
    }
  }
  var isReadable = ([name, value]) => Object.hasOwn(NO_EDITS, name) && fits(name, value);
  var readEdits = (hash) => ({ ...NO_EDITS, ...Object.fromEntries((editsIn(hash) ?? []).filter(isReadable)) });
  function misreadEdits(hash) {
    const edits = editsIn(hash);
    if (!edits) return ["not JSON"];
    return edits.filter((it) => !store.source || !isReadable(it)).map(([name]) => name);
  }

  // src/marks.js
  var make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
  async function copy(button2, text) {
    const words = button2.textContent;
    button2.textContent = await (navigator.clipboard?.writeText(text) ?? Promise.reject()).then(() => "Copied", () => "Not copied");
    setTimeout(() => {
      button2.textContent = words;
    }, 2e3);
  }
  var makeSvg = (tag, attributes = {}, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  function filled(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== false && value !== void 0) element.setAttribute(name, value);
    }
    element.append(...children.flat());
    return element;
  }
  var button = (attributes, click, ...children) => make("button", { type: "button", click, ...attributes }, ...children);
  var byId = (id) => document.getElementById(id);
  var sum = (values) => values.reduce((total, value) => total + value, 0);
  function clip(text, most) {
    const head = [...text.slice(0, 2 * most + 2)];
    return head.length > most ? head.slice(0, most).join("") + "…" : text;
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
  function precise(value) {
    if (!Number.isFinite(value) || value === 0) return number(value);
    return String(Number(value.toPrecision(5))).replace("e+", "e").replaceAll("-", MINUS);
  }
  var percent = (share) => {
    if (share > 0 && share < 5e-3) return "<1 %";
    const nearlyAll = share > 0.995 && share < 1;
    return `${nearlyAll ? Math.floor(1e3 * share) / 10 : Math.round(100 * share)} %`;
  };
  var count = (n, what, many = `${what}s`) => `${n.toLocaleString("en")} ${n === 1 ? what : many}`;
  function bar(share) {
    const fill = make("span", { class: "fill" });
    fill.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
    return make("span", { class: "gauge", "aria-hidden": "true" }, fill);
  }
  function elide(length, most, centre = 0) {
    const all = Array.from({ length }, (_, i) => i);
    if (length <= most) return all;
    const near = Math.max(1, Math.floor((most - 4) / 2));
    const middle = Math.max(near + 1, Math.min(length - near - 2, centre));
    return withGaps(
      all.filter((i) => i < 2 || i >= length - 2 || Math.abs(i - middle) <= near),
      length
    );
  }
  function ends2(length, most) {
    const all = Array.from({ length }, (_, i) => i);
    return length <= most ? all : [...all.slice(0, most - 2), null, length - 1];
  }
  function largest(values, most, always) {
    const size = (i) => Number.isNaN(values[i]) ? Infinity : values[i] ?? -Infinity;
    const order = Array.from(values, (_, i) => i).filter((i) => values[i] !== void 0 || i === always).sort((a, b) => size(b) - size(a));
    if (order.length <= most) return withGaps(order.sort((a, b) => a - b), values.length);
    const picked = /* @__PURE__ */ new Set([always, ...order.slice(0, most - 1)]);
    return withGaps([...picked].sort((a, b) => a - b), values.length);
  }
  function withGaps(positions, length) {
    const line2 = [];
    let expected = 0;
    for (const position of positions) {
      if (position === expected + 1) line2.push(expected);
      if (position > expected + 1) line2.push(null);
      line2.push(position);
      expected = position + 1;
    }
    if (expected === length - 1) line2.push(expected);
    if (expected < length - 1) line2.push(null);
    return line2;
  }
  function table(caption, columns, rows, kind = "") {
    const head = columns.map((name) => make("th", { scope: "col" }, name));
    const body = rows.map(({ cells, kind: kind2 }) => make(
      "tr",
      { class: kind2 },
      cells.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell))
    ));
    const around2 = make(
      "div",
      { class: "scroll", role: "group", "aria-label": caption },
      make(
        "table",
        { class: kind },
        make("caption", {}, caption),
        make("thead", {}, make("tr", {}, head)),
        make("tbody", {}, body)
      )
    );
    scrolls.observe(around2);
    return around2;
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
  var gapRow = (columns) => ({ kind: "gap", cells: ["⋮", ...Array(columns - 1).fill("")] });

  // src/words.js
  var PRONOUNS = /* @__PURE__ */ new Set([
    "he",
    "she",
    "it",
    "they",
    "him",
    "her",
    "them",
    "his",
    "hers",
    "its",
    "their",
    "theirs",
    "himself",
    "herself",
    "itself",
    "themselves"
  ]);
  var bare = (word) => word.replace(/^[▁Ġ␣ ]|^##|[␣ ]$/g, "").toLowerCase();
  var isWord = (token2) => /^\p{L}/u.test(bare(token2));
  var isPronoun = (word) => PRONOUNS.has(bare(word));
  var FROM_RIGHT = /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
  var isFromRight = (tokens) => FROM_RIGHT.test(/\p{L}/u.exec(tokens.join(" ").replace(/⟨[^⟩]*⟩|<[^<>\s]+>|\[[A-Z]+\]/g, ""))?.[0] ?? "");
  var isolated = (token2) => /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(token2) ? `⁨${token2}⁩` : token2;
  var quoted = (token2) => /[\p{L}\p{N}]/u.test(token2) ? token2 : `“${token2}”`;
  var isLineEnd = (token2) => token2?.includes("↵") ?? false;
  function writtenApart(words) {
    const short2 = words.map((it) => it.replace(/^␣(?=[^␣])/u, ""));
    return short2.map((it, i) => short2.indexOf(it) === short2.lastIndexOf(it) ? it : words[i]);
  }
  function runsFromLeft(words) {
    const isFromLeft = words.map((it) => /\p{L}|\p{N}/u.test(it) && !FROM_RIGHT.test(it)), runs = (
      /** @type {[number, number][]} */
      []
    );
    words.forEach((_, i) => {
      const last = runs.at(-1);
      if (!isFromLeft[i]) return;
      if (last && words.slice(last[1] + 1, i).every((it) => !/\p{L}|\p{N}/u.test(it))) last[1] = i;
      else runs.push([i, i]);
    });
    return runs.filter(([first, last]) => last > first);
  }
  function writtenLines(tokens) {
    const starts = tokens.flatMap((_, i) => i === 0 || isLineEnd(tokens[i - 1]) ? [i] : []);
    return starts.map((first, i) => {
      const line2 = tokens.slice(first, starts[i + 1]), spaces = /↵([␣⇥]*)$/.exec(tokens[first - 1] ?? "")?.[1] ?? "";
      return { first, tokens: line2, indent: spaces.replaceAll("⇥", "␣␣␣␣").length, isFromRight: isFromRight(line2) };
    });
  }

  // src/state.js
  var VIEWS = ["text", "lines", "map", "numbers", "walk", ...pageData.heads ? (
    /** @type {const} */
    ["why"]
  ) : []];
  var isAt = (layer, head) => ([l, h]) => l === layer && h === head;
  var isOff = (layer, head) => chosen.edits.off.some(isAt(layer, head));
  var toggled = (places, layer, head) => places.some(isAt(layer, head)) ? without(places, layer, head) : [...places, [layer, head]];
  var without = (places, layer, head) => places.filter((it) => !isAt(layer, head)(it));
  var state = () => store.pointed ? { ...chosen, ...store.pointed } : chosen;
  var snapshot = () => store.edited ?? store.current;
  var shownTrace = () => snapshot().layer(state().layer);
  var queryOr = ({ query, head } = state()) => query ?? shownTrace().stored(head).at(-1);
  function keyOr(at = state()) {
    if (at.key !== null) return at.key;
    const row = shownTrace().row(shownTrace().used, at.head, queryOr(at)) ?? [0];
    return largestAt(row);
  }
  var largestAt = (row) => row.reduce((best, weight, i) => weight > (row[best] ?? -1) ? i : best, 0);
  var areNormsKnown = (trace, head, query) => trace.normWeighted(head, query ?? trace.stored(head)[0]) !== null;
  var isByNorm = (trace, head, query) => chosen.by === "norm-weighted" && areNormsKnown(trace, head, query);
  function shades(trace, head, query) {
    const isByNorms = isByNorm(trace, head, query);
    if (query === null) return trace.received(head, isByNorms ? (it) => trace.normWeighted(head, it) : void 0);
    return (isByNorms ? trace.normWeighted(head, query) : trace.drawn(head, query)) ?? [];
  }
  function sides() {
    const { layer, head, others, query, key } = state();
    const side = (name, from, [layer2, head2], colour, words = null) => ({
      name,
      trace: from.layer(layer2),
      from,
      layer: layer2,
      head: head2,
      colour,
      query: there(words, query),
      key: there(words, key),
      rest: atRest(from, layer2, head2, there(words, chosen.query), there(words, chosen.key)),
      back: (changes) => backFrom(words, changes)
    });
    const here = placeName(layer, head);
    const { current, edited, before, kept } = store;
    if (edited && before) {
      return [side(`${here} before`, before, [layer, head], 0), side(`${here} after`, edited, [layer, head], 1)];
    }
    if (kept && isBeside()) {
      const [then, now] = pageData.beside ? [besideName(), pageData.name] : ["kept", "now"];
      const words = kept.tokens.length === current.tokens.length ? null : wordsOf(kept, current);
      return [side(`${here} ${then}`, kept, [layer, head], 0, words), side(`${here} ${now}`, current, [layer, head], 1)];
    }
    return [
      /** @type {Place} */
      [layer, head],
      ...without(others, layer, head)
    ].map((place, i) => side(placeName(...place), current, place, i));
  }
  function atRest(from, layer, head, query, key) {
    const at = layer === state().layer && head === state().head ? chosen : { layer, head };
    const isThere = at.layer < from.layers && query !== null && query < from.layer(at.layer).size.q;
    return { row: isThere ? shades(from.layer(at.layer), at.head, query) : [], query, key };
  }
  function isBeside() {
    const { layer, head } = state();
    return store.kept !== null && !store.edited && isComparable(store.current) && layer < store.kept.layers && head < store.kept.layer(layer).heads;
  }
  var isComparable = (next) => !pageData.beside || next.text === opened.text;
  function canDiffer() {
    const [a, b, ...more] = sides();
    return b !== void 0 && !more.length && a.trace.size.q === b.trace.size.q && a.trace.size.k === b.trace.size.k;
  }
  var MOST_PAIRS = 4e6;
  function wordsOf(kept, current) {
    if (store.aligned.kept !== kept || store.aligned.current !== current) {
      const words = alignment(current.tokens.map(bare), kept.tokens.map(bare));
      const back2 = kept.tokens.map(() => null);
      words.forEach((to, from) => {
        if (to !== null) back2[to] = from;
      });
      store.aligned = { kept, current, words: { to: words, back: back2 } };
    }
    return store.aligned.words;
  }
  function alignment(a, b) {
    if (a.length * b.length > MOST_PAIRS) return a.map((_, i2) => i2 < b.length ? i2 : null);
    const wide = b.length + 1, longest = new Uint16Array((a.length + 1) * wide);
    for (let i2 = a.length - 1; i2 >= 0; i2--) {
      for (let j2 = b.length - 1; j2 >= 0; j2--) {
        longest[i2 * wide + j2] = a[i2] === b[j2] ? longest[(i2 + 1) * wide + j2 + 1] + 1 : Math.max(longest[(i2 + 1) * wide + j2], longest[i2 * wide + j2 + 1]);
      }
    }
    const found = a.map(() => null);
    let [i, j] = [0, 0];
    while (i < a.length || j < b.length) {
      const [from, to] = [i, j];
      while (i < a.length && j < b.length && a[i] !== b[j]) {
        if (longest[(i + 1) * wide + j] >= longest[i * wide + j + 1]) i++;
        else j++;
      }
      if (i === a.length || j === b.length) [i, j] = [a.length, b.length];
      if (i - from === j - to) for (let n = from; n < i; n++) found[n] = to + n - from;
      if (i < a.length && j < b.length) found[i++] = j++;
    }
    return found;
  }
  var there = (words, position) => words && position !== null ? words.to[position] ?? null : position;
  function backFrom(words, changes) {
    if (!words) return changes;
    const moved = Object.fromEntries(Object.entries(changes).map(([name, position]) => [name, position === null ? null : words.back[position] ?? null]));
    return Object.entries(changes).some(([name, position]) => position !== null && moved[name] === null) ? null : moved;
  }
  function besideName() {
    const { name, beside } = pageData;
    return beside?.name === name ? `${name} (2)` : String(beside?.name);
  }
  var isOnlyLayer = () => snapshot().layers === 1 && !snapshot().findings.size;
  var headNumber = (layer, head) => snapshot().layer(layer).numbered("h", head);
  var placeName = (layer, head) => `${isOnlyLayer() ? "head " : `L${layer}H`}${headNumber(layer, head)}`;
  var placeInWords = (layer, head) => placeName(layer, head).replace(/^h/, "H");
  function go(changes, misread = []) {
    Object.assign(chosen, changes);
    store.pointed = null;
    store.misread = misread;
    settle();
    writeAddress();
    screen.draw();
  }
  function point(changes) {
    if (JSON.stringify(changes) === JSON.stringify(store.pointed)) return;
    store.pointed = changes;
    screen.draw();
  }
  function settle() {
    chosen.layer = Math.min(chosen.layer, snapshot().layers - 1);
    const trace = shownTrace();
    chosen.head = Math.min(chosen.head, trace.heads - 1);
    if (chosen.query !== null) chosen.query = Math.min(chosen.query, trace.size.q - 1);
    if (chosen.key !== null) chosen.key = Math.min(chosen.key, trace.size.k - 1);
    chosen.stage = Math.min(chosen.stage, trace.steps.length - 1);
    if (!trace.maps(chosen.head).some((step) => step.name === chosen.step)) chosen.step = "weights";
    if (!canDiffer()) chosen.difference = false;
  }
  function letGo() {
    if (chosen.query !== null || chosen.key !== null) go({ query: null, key: null });
    else if (chosen.others.length) go({ others: [], difference: false });
  }
  function wordAddress(position) {
    if (position === null) return "none";
    const word = snapshot().tokens[position]?.toLowerCase();
    const isOnly = snapshot().tokens.filter((it) => it.toLowerCase() === word).length === 1;
    return isOnly && word.length <= 24 && !/^\d+$/.test(word) ? word : String(position);
  }
  function positionOf(address, tokens) {
    if (address === "none") return null;
    const found = tokens.findIndex((it) => it.toLowerCase() === address.toLowerCase());
    if (found >= 0 && !/^\d+$/.test(address)) return found;
    const [, number2, token2] = /^(\d{1,7})(?::(.*))?$/s.exec(address) ?? [];
    const isThere = token2 === void 0 || tokens[Number(number2)]?.trim() === token2;
    return number2 !== void 0 && isThere ? Number(number2) : void 0;
  }
  function writeAddress() {
    const { view, layer, head, query, key, others, by, registers, difference, edits, step } = chosen;
    const parts = { layer, head, query: wordAddress(query) };
    if (key !== null) parts.key = wordAddress(key);
    parts.view = view;
    if (step !== "weights") parts.step = step;
    if (others.length) parts.with = others.map((place) => place.join(".")).join(",");
    if (by !== "weight") parts.by = by;
    if (registers !== "drawn") parts.registers = registers;
    if (difference) parts.difference = 1;
    if (store.kept) parts.kept = pageData.beside ? "model" : store.kept.text;
    if (store.current.text !== opened.text) parts.text = store.current.text;
    const changed = changedEdits(edits);
    if (changed.length) parts.edits = JSON.stringify(Object.fromEntries(changed));
    try {
      history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
    } catch {
    }
  }
  var ADDRESSED = ["layer", "head", "query", "key", "view", "step", "with", "by", "registers", "difference", "kept", "text", "edits"];
  function readAddress(hash) {
    const given = new URLSearchParams(hash.replace(/^#/, "")), { current } = store;
    const changes = {};
    const misread = [];
    const asked3 = (name) => given.get(name) ?? "";
    const isUnknown = (name) => name && !ADDRESSED.includes(name) && !document.getElementById(name);
    misread.push(...[...given.keys()].filter(isUnknown).map((name) => `“${name}”`));
    if (location.search) misread.push(`“${location.search}” (write # for ?)`);
    const numbered = (name) => given.has(name) ? /^\d{1,6}$/.test(asked3(name)) ? Number(asked3(name)) : NaN : chosen[name];
    const layer = numbered("layer"), head = numbered("head");
    const isThere = layer < current.layers && (!given.has("head") || head < current.layer(layer).heads);
    if (isThere) Object.assign(changes, { layer, head: given.has("head") ? head : Math.min(head, current.layer(layer).heads - 1) });
    else misread.push(["layer", "head"].filter((name) => given.has(name)).map((name) => `${name} ${asked3(name)}`).join(", "));
    const trace = current.layer(isThere ? layer : chosen.layer), { size } = trace;
    for (
      const [name, most] of
      /** @type {const} */
      [["query", size.q], ["key", size.k]]
    ) {
      if (!given.has(name)) continue;
      const position = positionOf(asked3(name), current.tokens);
      if (position === void 0 || position !== null && position >= most) misread.push(`${name} “${asked3(name)}”`);
      else changes[name] = position;
    }
    const offered = {
      view: VIEWS,
      step: trace.maps(changes.head ?? chosen.head).map((it) => it.name),
      by: ["weight", "norm-weighted"],
      registers: ["drawn", "left out"]
    };
    for (const [name, values] of Object.entries(offered)) {
      if (values.includes(asked3(name))) changes[name] = asked3(name);
      else if (given.has(name)) misread.push(`${name} “${asked3(name)}”`);
    }
    if (given.has("difference")) changes.difference = true;
    if (given.has("with")) {
      const places = new Set([...current.places()].map((it) => `${it.layer}.${it.head}`));
      const others = asked3("with").split(",").filter(Boolean), shown = others.filter((it) => places.has(it)).slice(0, MOST_OTHERS);
      changes.others = shown.map((it) => it.split(".").map(Number));
      if (shown.length < others.length) misread.push(`heads ${others.filter((it) => !shown.includes(it)).join(", ")} beside`);
    }
    if (given.has("text") && asked3("text") !== current.text) misread.push("another text");
    const edits = misreadEdits(hash);
    if (edits.length) misread.push(`edits (${edits.join(", ")})`);
    return { changes, misread };
  }
  var MOST_OTHERS = 4;

  // src/roles.js
  var ROLES = new Map(pageData.roles.map((role, rank) => [String(role.label), { ...role, rank }]));
  var SHARES = Object.fromEntries(pageData.roles.map(({ name, share }) => [name, share]));
  var roleOf = (label) => ROLES.get(label);
  var rankOf = (label) => roleOf(label)?.rank ?? ROLES.size;
  var meaningOf = (labels) => labels.map((it) => roleOf(it)?.means ?? "").join(", and ");
  var shortOf = (labels) => labels.map((it) => roleOf(it)?.short ?? it).join(" and ");
  var shareName = (name) => SHARES[name] ?? name;
  var isEvenness = (label) => roleOf(label)?.kind === "evenness";
  var labelsOf = (it) => !it.measured && it.roles.length ? [...new Set(it.roles)] : it.labels;
  var rowOf = (it) => labelsOf(it).find((label) => roleOf(label)?.copy !== void 0) ?? it.labels[0];
  function claimOf(label, query, key, words) {
    const { claim = "", offset, copy: copy2, shows } = roleOf(label) ?? {};
    const holds2 = offset !== void 0 ? key === query + offset : copy2 !== void 0 ? key >= copy2 && key < query - 1 && bare(words[key - copy2]) === bare(words[query]) : shows === "pronoun" ? isPronoun(words[query]) : shows === "earlier" ? key < query : shows === "first" && key === 0;
    return holds2 ? claim : "";
  }

  // src/telling.js
  function mostTelling() {
    const begin = store.current.data.begin;
    const found = [...store.current.findings.values()];
    found.sort((a, b) => rankOf(a.labels[0]) - rankOf(b.labels[0]) || b.number - a.number);
    const [best] = found;
    const layer = begin?.layer ?? best?.layer ?? 0, head = begin?.head ?? best?.head ?? 0;
    if (begin?.query !== void 0 && begin.query !== null) {
      return { layer, head, query: begin.query };
    }
    return { layer, head, query: tellingQuery(layer, head) };
  }
  var examples = /* @__PURE__ */ new WeakMap();
  function exampleOf(trace, head, label) {
    const known2 = examples.get(trace) ?? /* @__PURE__ */ new Map(), name = `${head} ${label}`;
    examples.set(trace, known2);
    if (!known2.has(name)) {
      const strength = (query) => {
        const [weight, key] = shownWeight(trace, head, query, label);
        return weight && weight + (isWord(trace.queries[query]) && isWord(trace.keys[key]) ? 1 : 0);
      };
      const shown = trace.stored(head).filter((query) => query > 0).map((query) => [query, strength(query)]).filter(([, it]) => it > 0);
      known2.set(name, shown.length ? shown.reduce((a, b) => b[1] > a[1] ? b : a)[0] : null);
    }
    return known2.get(name);
  }
  function shownWeight(trace, head, query, label) {
    const row = trace.row(trace.used, head, query) ?? [0], key = largestAt(row);
    return [claimOf(label, query, key, trace.queries) ? row[key] : 0, key];
  }
  function tellingQuery(layer, head) {
    const trace = store.current.layer(layer), finding = store.current.finding(layer, head), label = finding?.labels[0];
    const example = finding && trace.isOneText ? exampleOf(trace, head, rowOf(finding)) : null;
    if (example !== null) return example;
    const held = trace.stored(head).filter((q) => trace.row(trace.used, head, q)?.some((w) => w > 0));
    const strength = (q) => {
      const row = trace.row(trace.used, head, q), key = largestAt(row);
      const words = isWord(trace.queries[q]) && isWord(trace.keys[key]);
      const tells = roleOf(label ?? "")?.shows === "pronoun" ? isPronoun(trace.queries[q]) : words && key !== 0 && key !== q;
      return (tells ? 1 : 0) + row[key];
    };
    if (held.length > 1 && held[0] === 0) held.shift();
    const shown = held.length > 600 ? held.filter((_, i) => i % Math.ceil(held.length / 600) === 0) : held;
    const query = label ? shown.reduce((a, b) => strength(b) > strength(a) ? b : a, shown[0]) : held.at(-1);
    return query ?? null;
  }

  // src/compute.js
  var can = (name) => Boolean(store.source?.can.edits.includes(name));
  var asked = () => store.wanted ?? { text: store.current.text, edits: chosen.edits };
  var edit = (changes, field2 = null) => compute(asked().text, { ...asked().edits, ...changes }, field2);
  async function compute(text, edits, field2 = null) {
    const { source } = store;
    if (!source) return;
    await answered(async (isNewest) => {
      store.wanted = { text, edits };
      store.refusedField = null;
      screen.drawControls();
      const read = async (edits2) => new Snapshot(keepLabels(await source.compute(text, edits2)));
      let plain = store.current, compared = null, after = null;
      try {
        if (text === opened.text) plain = opened;
        else if (text !== store.current.text) plain = await read(NO_EDITS);
        compared = plain;
        if (hasEdits(edits)) {
          if (source.can.rounds && plain === opened) compared = await read(NO_EDITS);
          after = await read(edits);
        }
      } catch (error) {
        if (isNewest()) {
          store.wanted = plain !== store.current ? { text, edits: chosen.edits } : null;
          store.refusedField = field2;
        }
        throw error;
      }
      if (!isNewest()) return;
      store.wanted = null;
      if (store.kept && !isComparable(plain)) say(`${besideName()} has results for the text of this page only.`);
      const isWithoutEffect = changedEdits(edits).length > 0 && (!after || isAlike2(compared, after));
      if (isWithoutEffect) after = null;
      const isNewText = plain !== store.current, had = chosen.query;
      const follow = isNewText ? nextBegin(plain) ?? sameWords(plain) : {};
      [store.current, store.before, store.edited] = [plain, compared, after];
      Object.assign(chosen, { edits, ...follow, ...after ? { others: [] } : {} });
      settle();
      if (isNewText && had !== null && chosen.query === null) chosen.query = tellingQuery(chosen.layer, chosen.head);
      if (isNewText) screen.fillAll();
      if (isWithoutEffect) say(hasEdits(edits) ? NO_EFFECT : "The seed matters only with dropout.", true);
      go({});
    }, text !== store.current.text);
  }
  var NO_EFFECT = "This changes no number.";
  function isAlike2(a, b) {
    if (a.data.outputs && a.data.outputs === b.data.outputs) return true;
    const deciding = (data) => data.steps.filter((it) => ["weights", "dropped", "output"].includes(it.name));
    return a.data.layers.every((layer, i) => {
      const [one, other] = [deciding(layer), deciding(b.data.layers[i])];
      return one.some((it) => it.name === "output") && one.length === other.length && one.every((step, j) => {
        const isWhole = (it) => (it.data ?? it.values) && !Object.keys(it.kept ?? {}).length;
        if (step.name !== other[j].name || !isWhole(step) || !isWhole(other[j])) return false;
        const values = decode(other[j]);
        return decode(step).every((value, at) => Object.is(value, values[at]));
      });
    });
  }
  async function answered(ask2, isOfAnother = false) {
    const request = ++store.computing, isNewest = () => request === store.computing;
    say("");
    byId("stop").hidden = !store.source?.cancel;
    try {
      await ask2(isNewest);
    } catch (error) {
      if (!isNewest()) return;
      say(error instanceof Error ? error.message : String(error), false, isOfAnother);
      screen.drawControls();
    } finally {
      if (isNewest()) byId("stop").hidden = true;
    }
  }
  function stop() {
    store.computing++;
    store.source?.cancel?.();
    byId("stop").hidden = true;
    store.wanted = store.refusedField = null;
    byId("text").value = store.current.text;
    say("Stopped. The text is the earlier one.");
    screen.drawControls();
  }
  function keepLabels(data) {
    if (data.heads || !opened.data.heads) return data;
    const heads = opened.data.heads.filter((it) => it.measured).map((it) => ({ ...it, effect: null }));
    const only = heads.length ? "Only labels that were measured on held-out stories apply to this text. The others, and effects," : "Labels and effects";
    return { ...data, heads, missing: `${only} are of the text with which the page opened: undo to see them, or run clearhead look on this text.` };
  }
  function nextBegin(next) {
    const { begin } = store.current.data, isThere = begin && chosen.layer === begin.layer && chosen.head === begin.head && chosen.query === begin.query && chosen.key === null;
    return isThere && next.data.begin ? { ...next.data.begin, key: null } : null;
  }
  function sameWords(next) {
    const moved = (position) => {
      if (position === null) return null;
      const word = store.current.tokens[position], shift = next.tokens.length - store.current.tokens.length;
      if (next.tokens[position] === word) return position;
      if (next.tokens[position + shift] === word) return position + shift;
      const found = next.tokens.indexOf(word), isReplaced = [position - 1, position + 1].some((at) => next.tokens[at] !== void 0 && next.tokens[at] === store.current.tokens[at]);
      return found >= 0 ? found : shift === 0 && isReplaced ? position : null;
    };
    return { query: moved(chosen.query), key: null };
  }
  function say(words, isProgress = false, isRefusal = false) {
    store.isRefused = isRefusal;
    byId("app").classList.toggle("refused", store.isRefused);
    for (const id of ["edit-said", "typed"]) {
      byId(id).textContent = words;
      byId(id).classList.toggle("progress", isProgress);
    }
  }
  function keep() {
    if (store.kept) store.kept = null;
    else {
      store.kept = pageData.beside ? new Snapshot(pageData.beside) : store.current;
      Object.assign(chosen, { others: [] });
    }
    say("");
    go({});
    if (store.kept && !pageData.beside) byId("text").focus();
  }

  // src/first_edit.js
  var LOOKS = 0.3;
  var MOST_NAMED = 4;
  var LEAST_CHANGE = 0.01;
  function headsThatLook(from, query, key) {
    return [...from.places()].filter(({ layer, head }) => {
      const trace = from.layer(layer);
      return !trace.cross_attention && trace.row(trace.used, head, query)?.[key] >= LOOKS;
    }).map(({ layer, head }) => [layer, head]);
  }
  function firstEdit() {
    if (store.source?.can.ahead) {
      const { off: off2 } = (
        /** @type {import("./schema.d.ts").Ahead} */
        pageData.ahead
      );
      return { off: off2, words: `Switch off ${namesOf(off2)}, which write “${isolated(store.current.nextToken.token)}”` };
    }
    const from = store.before ?? store.current, { layer, head } = state(), query = queryOr(), key = keyOr();
    const all = headsThatLook(from, query, key), looking = 2 * all.length < [...from.places()].length ? all : [], off = looking.length ? looking : [
      /** @type {Place} */
      [layer, head]
    ];
    const { tokens } = from, names = namesOf(off);
    return { off, words: looking.length && tokens[query] !== void 0 ? `Switch off ${names}, which look from “${isolated(tokens[query])}” at “${isolated(tokens[key])}”` : `Switch off ${names}` };
  }
  function namesOf(off) {
    const named = off.slice(0, MOST_NAMED).map((it) => placeName(...it)).join(", ");
    return off.length > MOST_NAMED ? `${named} and ${off.length - MOST_NAMED} more` : named;
  }
  function outcome() {
    const { before, edited } = store, a = before?.guesses, b = edited?.guesses;
    if (!before || !edited) return { words: "" };
    if (!a || !b) return { words: "It changes what is drawn. The page has no predictions to compare." };
    const changes = a.flatMap((guesses, i) => guesses.map(([word2, p]) => {
      const after2 = b[i].find(([other]) => other === word2)?.[1], least2 = b[i].at(-1)?.[1] ?? 0;
      return { word: word2, p, after: after2, least: least2, change: Math.abs(p - (after2 ?? least2)), position: i, token: before.tokens[i] };
    }));
    const most = changes.reduce((best, it) => it.change > best.change ? it : best, changes[0]);
    if (!most || most.change < LEAST_CHANGE) return { words: "No prediction changes by 1 % or more." };
    const least = percent(most.least), after = most.after !== void 0 ? percent(most.after) : least.startsWith("<") ? least : `at most ${least}`;
    const { position, token: token2, word } = most;
    const ends3 = [a, b].map((guesses) => guesses.at(-1)?.[0] ?? ["", 0]), [then, now] = ends3;
    const named = (all, it) => `“${isolated(writtenApart(all)[all.indexOf(it)])}”`, there2 = [a, b].flatMap((guesses) => guesses[position].map(([it]) => it));
    const inWords = ([word2, p]) => `${named(ends3.map(([it]) => it), word2)} (${percent(p)})`;
    const next = then[0] === now[0] ? `The next token is still ${named(ends3.map(([it]) => it), now[0])} (${percent(now[1])}, before ${percent(then[1])}). ` : `The next token is ${inWords(now)} instead of ${inWords(then)}. `;
    return { next, words: `, ${named([...new Set(there2)], word)} goes from ${percent(most.p)} to ${after}: the largest change.`, token: token2, position };
  }
  var isOffered = (edits) => edits.off.length === 0 && Boolean(store.source?.can.edits.includes("off"));

  // src/controls.js
  var shownIn = ({ doubles }, value) => doubles ? Math.log2(value) : value ?? "";
  function valueIn(control, { kind, default: none, doubles }) {
    const text = control.value.trim();
    if (text === "") return none;
    if (kind === "mask") return text;
    return doubles ? Number((2 ** Number(text)).toPrecision(3)) : Number(text);
  }
  function field(name) {
    const offered = pageData.edits[name], { kind, slider, placeholder, label, words } = offered;
    const value = shownIn(offered, offered.default), common = { id: `edit-${name}`, title: words, placeholder, value };
    const [min, max, step] = slider ?? [offered.over ?? offered.least, void 0, kind === "whole number" ? 1 : "any"];
    const change = () => {
      const value2 = valueIn(control, offered), why = control.validity.badInput ? "Enter a number." : refusalOf(name, value2);
      if (!why) return void edit({ [name]: value2 }, name);
      store.refusedField = name;
      say(why, false, store.isRefused);
      drawControls();
    };
    const control = make("input", {
      ...common,
      disabled: !can(name),
      [slider ? "input" : "change"]: change,
      ...kind === "mask" ? { type: "text", list: "masks", maxlength: 200 } : { type: slider ? "range" : "number", min, max, step, class: slider ? void 0 : "short" }
    });
    return make("label", {}, `${label} `, control, make("output", { for: control.id, id: `out-${name}` }));
  }
  function buildControls() {
    const form = byId("controls");
    form.addEventListener("submit", (event) => event.preventDefault());
    byId("whatif").addEventListener("click", () => {
      openControls(form.hidden);
      screen.drawPicture();
    });
    const disabled = !can("off");
    form.classList.toggle("ahead", Boolean(store.source?.can.ahead));
    form.replaceChildren(
      make("p", { class: "hint", id: "edit-outcome", role: "status" }),
      make("p", { class: "hint", id: "edit-why" }, whyNot()),
      button({ id: "edit-first", disabled }, () => edit({ off: firstEdit().off })),
      button({ id: "edit-off", disabled }, () => edit({ off: toggled(asked().edits.off, chosen.layer, chosen.head) })),
      ...Object.keys(pageData.edits).filter((name) => name !== "off").map(field),
      make("datalist", { id: "masks" }),
      button({ id: "edit-none" }, () => edit(NO_EDITS), "Reset"),
      make("p", { class: "hint", id: "edit-said", role: "status" })
    );
    byId("typing").addEventListener("submit", (event) => event.preventDefault());
    byId("typing").hidden = Boolean(pageData.images) || !store.source?.can.text && !pageData.folder;
    byId("text").title = "Shift and Enter begin a line.";
    byId("text").addEventListener("input", () => {
      fitField();
      if (store.source?.can.text) compute(byId("text").value, asked().edits);
      else showCommand();
    });
    byId("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) event.preventDefault();
    });
    byId("command").addEventListener("click", () => copy(byId("command"), commandFor(byId("text").value) ?? ""));
    byId("stop").addEventListener("click", stop);
  }
  function openControls(isOpen = true) {
    byId("controls").hidden = !isOpen;
    byId("whatif").setAttribute("aria-expanded", isOpen);
  }
  function showCommand() {
    const text = byId("text").value, isOther = text !== store.current.text && text.trim() !== "";
    say(isOther ? `This file has one text. To read another, run: ${commandFor(text)}` : "", true);
    byId("command").hidden = !isOther;
  }
  function commandFor(text) {
    if (pageData.images || !pageData.folder && !pageData.model) return null;
    const quoted3 = (it) => `'${it.replaceAll("'", "'\\''")}'`, folder = String(pageData.folder);
    const path = /^[\w~./+@-]+$/.test(folder) ? folder : folder.startsWith("~/") ? `~/${quoted3(folder.slice(2))}` : quoted3(folder);
    return `clearhead serve --open ${pageData.folder ? `--model ${path} ` : ""}${text.startsWith("-") ? "-- " : ""}${quoted3(text)}`;
  }
  function fillMasks() {
    const list = byId("masks"), trace = store.current.layer(chosen.layer), last = trace.size.k - 1;
    const { indexOf } = trace.step("masked") ?? {}, isCausal = trace.size.q > 1 && Boolean(trace.blocked(indexOf?.h?.keys().next().value ?? 0, 0)[last]);
    if (list.isCausal === isCausal) return;
    list.isCausal = isCausal;
    list.replaceChildren(...pageData.masks.suggested.filter((it) => it.changes_causal || !isCausal).map((it) => make("option", { value: it.mask }, it.words)));
  }
  var whyNot = () => store.source ? store.source.can.ahead ? "This file has one edit computed ahead. For others, open the model with clearhead serve." : "" : "This file has numbers, but not the model that computed them, so it cannot recompute anything. For edits, open the model with clearhead serve.";
  function drawKeep() {
    const control = byId("keep");
    control.hidden = !pageData.beside && !store.source?.can.text;
    control.textContent = pageData.beside ? `Beside ${besideName()}` : store.kept ? "Remove the kept text" : "Keep this text";
    control.title = pageData.beside ? "The same head of both models, side by side" : "Then type another text, to see both side by side";
    control.setAttribute("aria-pressed", store.kept !== null);
  }
  function drawControls() {
    const { layer, head } = chosen, { text, edits } = asked();
    const isOff2 = edits.off.some(isAt(layer, head));
    byId("edit-off").textContent = `${pageData.edits.off.label} ${placeName(layer, head)} ${isOff2 ? "is off" : "on"}`;
    byId("edit-off").setAttribute("aria-pressed", isOff2);
    byId("edit-first").hidden = !isOffered(edits);
    byId("edit-first").textContent = isOffered(edits) ? firstEdit().words : "";
    drawOutcome();
    fillMasks();
    for (const [name, edit2] of Object.entries(pageData.edits)) {
      if (name === "off") continue;
      const control = byId(`edit-${name}`), value = edits[name];
      control.setAttribute("aria-invalid", name === store.refusedField);
      if (name !== store.refusedField && (control !== document.activeElement || edit2.slider)) control.value = shownIn(edit2, value);
      if (edit2.slider) byId(`out-${name}`).textContent = ` ${edit2.doubles ? number(value, 2) : percent(value)}`;
    }
    byId("edit-none").disabled = changedEdits(edits).length === 0;
    byId("whatif").classList.toggle("active", store.edited !== null);
    if (byId("text") !== document.activeElement && !store.isRefused && byId("command").hidden) byId("text").value = text;
    fitField();
  }
  function drawOutcome() {
    const line2 = byId("edit-outcome"), { words, next, token: token2, position } = outcome(), shown = `${next} ${position} ${words}`;
    if (line2.shown === shown) return;
    line2.shown = shown;
    line2.replaceChildren(...position === void 0 ? [words] : [
      next,
      "After ",
      button({ class: "link", title: "Go to this token" }, () => go({ query: position, key: null }), `“${isolated(token2 ?? "")}” (${position})`),
      words
    ]);
  }
  var MOST_ROWS = 4;
  function fitField() {
    const field2 = byId("text"), fitted2 = `${innerWidth} ${field2.value}`;
    if (field2.fitted === fitted2) return;
    field2.fitted = fitted2;
    field2.rows = 1;
    const { lineHeight, paddingTop } = getComputedStyle(field2);
    field2.rows = Math.max(1, Math.min(MOST_ROWS, Math.round((field2.scrollHeight - 2 * parseFloat(paddingTop)) / parseFloat(lineHeight))));
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

  // src/scene.js
  var Scene = class {
    /** @type {any[]} */
    shapes;
    /** @type {any[]} */
    targets;
    /** @type {number} */
    width;
    /** @type {number} */
    height;
    /** @type {number} */
    bottom;
    /** @type {{x: number, y: number, cell: number, tall: number, rows: number, columns: number, values: Values}} */
    map;
    constructor(width, height) {
      Object.assign(this, { width, height, bottom: height, shapes: [], targets: [] });
    }
    rect(x, y, width, height, { fill, stroke, hatch, opacity = 1, radius = 0, line: line2 = 1, dash } = {}) {
      this.shapes.push({ kind: "rect", x, y, width, height, fill, stroke, hatch, opacity, radius, line: line2, dash });
    }
    // `d` as in SVG.
    path(d, { stroke, fill, line: line2 = 1, opacity = 1, dash } = {}, about = {}) {
      this.shapes.push({ kind: "path", d, stroke, fill, line: line2, opacity, dash, ...about });
    }
    // A text that has only so much `room` is cut to it.
    text(text, x, y, {
      size = 13,
      align = "left",
      fill = "ink",
      bold = false,
      serif = false,
      turn = 0,
      italic = false,
      opacity = 1,
      room = Infinity
    } = {}) {
      const whole = String(text), shown = room < Infinity ? fitted(whole, room, { size, bold, serif }) : whole;
      this.shapes.push({ kind: "text", text: shown, x, y, size, align, fill, bold, serif, turn, italic, opacity });
    }
    // A grid of cells: `colourOf(cell)` is [r, g, b], or null for a masked cell.
    cells(x, y, cellWidth, cellHeight, rows, columns, colourOf) {
      this.shapes.push({ kind: "cells", x, y, cellWidth, cellHeight, rows, columns, colourOf });
    }
    // The shapes of another scene, moved.
    group({ shapes }, x, y) {
      this.shapes.push({ kind: "group", shapes, x, y });
    }
    // A target of the pointer: pointing at it shows the selection and the title, and clicking selects.
    target(x, y, width, height, changes, title = "") {
      this.targets.push({ x, y, width, height, changes, title });
    }
    // The target at a point, or else the nearest within `reach` pixels.
    under(x, y, reach = 0) {
      const away = (it) => Math.hypot(Math.max(it.x - x, 0, x - it.x - it.width), Math.max(it.y - y, 0, y - it.y - it.height));
      const exact = this.targets.findLast((it) => x >= it.x && x < it.x + it.width && y >= it.y && y < it.y + it.height);
      return exact ?? this.targets.filter((it) => away(it) < reach).sort((a, b) => away(a) - away(b))[0];
    }
  };
  var THEME = ["paper", "sheet", "ink", "soft", "rule", "accent", "tint", "hatch", "mark"];
  function colours() {
    if (store.themeColours) return store.themeColours;
    const probe = document.body.appendChild(make("i", { hidden: true }));
    store.themeColours = {};
    for (const name of THEME) {
      probe.style.color = `var(--${name})`;
      store.themeColours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    return store.themeColours;
  }
  var inked = (name) => colours()[name] ?? name;
  var fontOf = ({ size, bold, serif, italic }) => `${italic ? "italic " : ""}${bold ? 600 : 400} ${size}px ` + (serif ? 'Palatino, "URW Palladio L", Georgia, "Liberation Serif", serif' : 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif');
  var ruler = (
    /** @type {CanvasRenderingContext2D} */
    document.createElement("canvas").getContext("2d")
  );
  function widthOf(text, { size = 13, bold = false, serif = false } = {}) {
    ruler.font = fontOf({ size, bold, serif });
    return ruler.measureText(text).width;
  }
  function fitted(text, room, options) {
    let characters = [...text.slice(0, 200)];
    if (text.length <= 200 && widthOf(text, options) <= room) return text;
    while (characters.length > 1 && widthOf(`${characters.join("")}…`, options) > room) {
      characters = characters.slice(0, Math.min(characters.length - 1, Math.ceil(characters.length * 0.9)));
    }
    return `${characters.join("")}…`;
  }
  function paint(canvas, scene, ratio = devicePixelRatio || 1) {
    const [width, height] = [Math.round(scene.width * ratio), Math.round(scene.height * ratio)];
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, scene.width, scene.height);
    PAINTED.group(pen, { shapes: scene.shapes, x: 0, y: 0 });
  }
  var PAINTED = {
    rect(pen, { x, y, width, height, fill, stroke, hatch, opacity, radius, line: line2, dash }) {
      pen.globalAlpha = opacity;
      pen.beginPath();
      pen.roundRect(x, y, width, height, radius);
      if (fill) {
        pen.fillStyle = inked(fill);
        pen.fill();
      }
      if (hatch) hatching(pen, x, y, width, height);
      if (stroke) {
        pen.setLineDash(dash ?? []);
        pen.strokeStyle = inked(stroke);
        pen.lineWidth = line2;
        pen.stroke();
      }
      pen.globalAlpha = 1;
    },
    path(pen, { d, stroke, fill, line: line2, opacity, dash }) {
      const path = new Path2D(d);
      pen.globalAlpha = opacity;
      pen.setLineDash(dash ?? []);
      if (fill) {
        pen.fillStyle = inked(fill);
        pen.fill(path);
      }
      if (stroke) {
        pen.strokeStyle = inked(stroke);
        pen.lineWidth = line2;
        pen.stroke(path);
      }
      pen.globalAlpha = 1;
    },
    text(pen, shape) {
      pen.font = fontOf(shape);
      pen.fillStyle = inked(shape.fill);
      pen.globalAlpha = shape.opacity;
      pen.textAlign = shape.align;
      pen.textBaseline = "middle";
      pen.save();
      pen.translate(shape.x, shape.y);
      pen.rotate(shape.turn * Math.PI / 180);
      pen.fillText(shape.text, 0, 0);
      pen.restore();
      pen.globalAlpha = 1;
    },
    cells(pen, { x, y, cellWidth, cellHeight, rows, columns, colourOf }) {
      hatching(pen, x, y, cellWidth * columns, cellHeight * rows);
      const small = document.createElement("canvas");
      fillCells(small, rows, columns, colourOf);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(small, x, y, cellWidth * columns, cellHeight * rows);
    },
    group(pen, { shapes, x, y }) {
      pen.save();
      pen.translate(x, y);
      for (const shape of shapes) PAINTED[shape.kind](pen, shape);
      pen.restore();
    }
  };
  function fillCells(canvas, rows, columns, colourOf) {
    [canvas.width, canvas.height] = [columns, rows];
    const pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows);
    for (let cell = 0; cell < rows * columns; cell++) {
      const colour = colourOf(cell);
      if (!colour) continue;
      image.data.set(colour, 4 * cell);
      image.data[4 * cell + 3] = 255;
    }
    pen.putImageData(image, 0, 0);
  }
  function hatching(pen, x, y, width, height) {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    pen.strokeStyle = inked("hatch");
    pen.lineWidth = 1;
    pen.setLineDash([]);
    pen.beginPath();
    for (let at = x - height - (x - height - y) % 5; at < x + width; at += 5) {
      pen.moveTo(at, y + height);
      pen.lineTo(at + height, y);
    }
    pen.stroke();
    pen.restore();
  }
  function pngOf(rows, columns, colourOf) {
    const canvas = document.createElement("canvas");
    fillCells(canvas, rows, columns, colourOf);
    return canvas.toDataURL();
  }
  var MANY_CELLS = 2e4;
  function svgOf({ width, height, shapes }) {
    const hatched = "url(#hatch)";
    const ink = ({ fill, stroke, hatch, opacity, line: line2, dash }) => ({
      opacity,
      fill: hatch ? hatched : fill ? inked(fill) : "none",
      stroke: stroke && inked(stroke),
      "stroke-width": stroke && line2,
      "stroke-dasharray": dash?.join(" ")
    });
    const written2 = {
      rect: ({ x, y, width: width2, height: height2, radius, ...it }) => makeSvg("rect", { x, y, width: width2, height: height2, rx: radius || void 0, ...ink(it) }),
      path: ({ d, ...it }) => makeSvg("path", { d, ...ink(it) }),
      text: (it) => makeSvg("text", {
        x: 0,
        y: 0,
        "dominant-baseline": "central",
        fill: inked(it.fill),
        opacity: it.opacity,
        transform: `translate(${it.x} ${it.y}) rotate(${it.turn})`,
        "text-anchor": { left: "start", center: "middle", right: "end" }[it.align],
        "font-size": it.size,
        "font-weight": it.bold ? 600 : 400,
        "font-family": it.serif ? "serif" : "sans-serif"
      }, it.text),
      cells: ({ x, y, cellWidth: width2, cellHeight: height2, rows, columns, colourOf }) => rows * columns > MANY_CELLS ? [
        makeSvg("image", {
          x,
          y,
          width: width2 * columns,
          height: height2 * rows,
          preserveAspectRatio: "none",
          href: pngOf(rows, columns, colourOf)
        })
      ] : [
        makeSvg("rect", { x, y, width: width2 * columns, height: height2 * rows, fill: hatched }),
        ...Array.from({ length: rows * columns }, (_, cell) => {
          const colour = colourOf(cell);
          return colour && makeSvg("rect", {
            x: x + cell % columns * width2,
            y: y + Math.floor(cell / columns) * height2,
            width: width2,
            height: height2,
            fill: css(colour)
          });
        }).filter(Boolean)
      ],
      group: ({ x, y, shapes: shapes2 }) => makeSvg("g", { transform: `translate(${x} ${y})` }, ...drawn2(shapes2))
    };
    const drawn2 = (shapes2) => shapes2.flatMap((shape) => written2[shape.kind](shape));
    const hatching2 = makeSvg("path", { d: "M0 5 L5 0", stroke: inked("hatch") });
    const root = makeSvg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, width, height },
      makeSvg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse" }, hatching2),
      makeSvg("rect", { width: "100%", height: "100%", fill: inked("paper") }),
      ...drawn2(shapes)
    );
    return new XMLSerializer().serializeToString(root);
  }

  // src/ink.js
  var LEAST = 0.01;
  var NAN_COLOUR = [214, 51, 92];
  var scale = (name) => pageData.inks[name][store.isDark ? "dark" : "light"];
  var shareColour = (weight) => Number.isNaN(weight) ? NAN_COLOUR : mixed(scale("sequential"), Math.sqrt(Math.max(0, weight)));
  var signedColour = (value, limit) => Number.isNaN(value) ? NAN_COLOUR : mixed(scale("diverging"), 0.5 + 0.5 * value / limit);
  var SIDES = {
    light: ["#14637f", "#b4552d", "#5b6f1e", "#7a4a92", "#8a6d00"],
    dark: ["#7cc7dd", "#f0a27e", "#b5cc6a", "#cfa3e6", "#e2c24a"]
  };
  var sideColour = (i) => SIDES[store.isDark ? "dark" : "light"][i % 5];
  function drawBar(scene, x, y, width, inks, labels) {
    for (let i = 0; i < width; i++) {
      scene.rect(x + i, y, 1.5, 8, { fill: css(mixed(scale(inks), i / (width - 1))) });
    }
    scene.rect(x, y, width, 8, { stroke: "rule" });
    for (const [text, at, align] of labels) {
      scene.text(text, x + at * width, y + 18, { size: 12, fill: "soft", align });
    }
  }
  function drawWeightBar(scene, x, y, width = 150, name = "weight") {
    drawBar(scene, x, y, width, "sequential", [
      [0, 0, "left"],
      [0.1, Math.sqrt(0.1), "center"],
      [0.5, Math.sqrt(0.5), "center"],
      [1, 1, "right"]
    ]);
    scene.text(name, x + width + 8, y + 4, { size: 12, fill: "soft" });
  }
  var shareInks = () => scale("sequential");
  function drawShareBar(scene, x, y, top, width = 150, name = "weight") {
    const share = (part) => number(100 * part, part < 0.1 ? 2 : 1);
    drawBar(scene, x, y, width, "sequential", [[0, 0, "left"], [`${share(top)} %`, 1, "right"]]);
    scene.text(name, x + width + 8, y + 4, { size: 12, fill: "soft" });
  }
  function drawSignedBar(scene, x, y, limit, width = 150, ends3 = [number(-limit, 2), number(limit, 2)]) {
    drawBar(scene, x, y, width, "diverging", [[ends3[0], 0, "left"], ["0", 0.5, "center"], [ends3[1], 1, "right"]]);
  }
  function drawHatchKey(scene, x, y) {
    scene.rect(x, y - 2, 18, 12, { stroke: "rule" });
    scene.rect(x, y - 2, 18, 12, { hatch: true });
    scene.text("may not look", x + 24, y + 4, { size: 12, fill: "soft" });
    return x + 24 + widthOf("may not look", { size: 12 });
  }

  // src/labels.js
  var tokenIn = (labels, position, most = 24) => token(labels[position], most, snapshot().spelled(labels, position));
  var queryToken = (position, most = 24) => tokenIn(shownTrace().queries, position, most);
  var keyToken = (position, most = 24) => tokenIn(shownTrace().keys, position, most);
  function effectOf(it) {
    if (it?.effect == null) return null;
    const metric = snapshot().effectMetric, size = Number(Math.abs(it.effect).toPrecision(2)), falls = it.effect < 0;
    if (metric === "turn") {
      return {
        without: `vectors turn by ${size}`,
        causes: `turns vectors by ${size}`,
        sentence: `Without this head the vectors after the last layer turn by ${size}: the mean of 1 - cosine.`
      };
    }
    const signed2 = `${falls ? "−" : "+"}${size}`;
    if (metric === "loss") {
      return {
        without: `loss ${signed2} nats`,
        causes: `${falls ? "costs" : "saves"} ${size} nats of loss`,
        sentence: `Without this head the mean loss of the next token in this text ${falls ? "falls" : "grows"} by ${size} nats.`
      };
    }
    return {
      without: signed2,
      causes: `changes ${metric} by ${falls ? "" : "−"}${size}`,
      sentence: `Without this head ${metric} changes by ${signed2}.`
    };
  }

  // src/pictures/zoom.js
  var PART = 32;
  var canZoom = () => Boolean(store.source?.can.tile) && !store.edited && !isBeside() && (shownTrace().bins ?? []).some(
    (cells, i) => cells < (i ? shownTrace().size.k : shownTrace().size.q)
  );
  function zoomedPart() {
    const { zoomed } = store, { layer, head } = state();
    return zoomed?.from === snapshot() && zoomed.layer === layer && zoomed.head === head ? zoomed : null;
  }
  var isZoomed = () => zoomedPart() !== null;
  function zoomedSide() {
    const part = zoomedPart(), { query, key } = state();
    if (!part) return null;
    const { layer, head, trace, first } = part;
    const inside = (position, from, size) => position !== null && position >= from && position < from + size ? position - from : null;
    return {
      name: `${placeName(layer, head)}, exactly`,
      trace,
      from: snapshot(),
      layer,
      head: 0,
      colour: 0,
      query: inside(query, first.q, trace.size.q),
      key: inside(key, first.k, trace.size.k),
      rest: { row: [], query: null, key: null },
      back: (changes) => ({
        query: changes.query === null ? null : changes.query + first.q,
        key: changes.key === null ? null : changes.key + first.k
      })
    };
  }
  function zoomedWeight(query, key) {
    const part = zoomedPart();
    if (!part) return void 0;
    const { trace, first } = part;
    return trace.row(trace.weights, 0, query - first.q)?.[key - first.k];
  }
  async function zoom() {
    const from = snapshot(), { size } = shownTrace(), { layer, head } = chosen;
    const around2 = (centre, length) => {
      const first = Math.max(0, Math.min(length - PART, centre - PART / 2));
      return [first, Math.min(length, first + PART) - 1];
    };
    const part = { layer, head, queries: around2(queryOr(), size.q), keys: around2(keyOr(), size.k) };
    await answered(async () => {
      const data = await store.source?.tile?.(from.text, chosen.edits, part);
      if (!data || snapshot() !== from) return;
      const first = { q: part.queries[0], k: part.keys[0] };
      store.zoomed = { from, layer, head, first, trace: new Trace(data, []) };
      go({ step: "weights" });
    });
  }
  function zoomButton() {
    const title = "Runs the model again, for the weights around the selected query and key";
    return button({ id: "zoom", "aria-pressed": isZoomed(), title }, () => {
      const isComputing = !byId("stop").hidden;
      if (isZoomed()) {
        store.zoomed = null;
        screen.draw();
      } else if (!isComputing) zoom();
    }, isZoomed() ? "The whole map" : `Exact weights of ${PART} × ${PART}`);
  }

  // src/pictures/text.js
  var MANY_WORDS = 2048;
  var INDENT = 0.5;
  var MOST_INDENTED = 16;
  function buildStrip() {
    const strip = byId("strip");
    const wordOf = (event) => {
      const word = event.target.closest("[role=option]");
      return word ? Number(word.dataset.position) : null;
    };
    strip.addEventListener("click", (event) => {
      const query = wordOf(event);
      if (query !== null) go({ query, key: null });
    });
    strip.addEventListener("pointerover", (event) => {
      const query = wordOf(event);
      if (event.pointerType === "mouse") point(query === null ? null : { query, key: null });
    });
    strip.addEventListener("pointerleave", () => point(null));
    strip.addEventListener("scroll", fadeStrip);
    new ResizeObserver(fadeStrip).observe(strip);
    strip.addEventListener("keydown", (event) => {
      const kept = shownTrace().stored(chosen.head), at = kept.indexOf(queryOr());
      const right = (
        /** @type {HTMLElement} */
        byId(`word-${queryOr()}`)?.closest("[dir]")?.dir === "rtl" ? -1 : 1
      );
      const by = {
        ArrowRight: right,
        ArrowDown: 1,
        ArrowLeft: -right,
        ArrowUp: -1,
        PageDown: 10,
        PageUp: -10,
        Home: -1e9,
        End: 1e9
      }[event.key];
      if (!by) return;
      event.preventDefault();
      go({ query: kept[Math.max(0, Math.min(kept.length - 1, at + by))], key: null });
    });
  }
  function fillStrip() {
    const { queries } = shownTrace(), strip = byId("strip");
    const trace = shownTrace(), all = queries.map((_, at) => at).filter((at) => !trace.isPatch(at));
    const first = Math.max(0, Math.min(all.length - MANY_WORDS, all.indexOf(queryOr()) - MANY_WORDS / 2));
    const places = all.slice(first, first + MANY_WORDS), words = places.map((at) => queries[at]);
    const touches = (at) => snapshot().touches(queries, at);
    strip.filled = queries;
    strip.classList.toggle("drawn", shownTrace().isOneText);
    byId("unknown").textContent = unknownInWords();
    const wordAt = (at) => {
      const classes = ["word", snapshot().unknown.has(at) && "unknown", touches(at) && "joined", touches(at + 1) && "continued"];
      return make(
        "span",
        { role: "option", id: `word-${at}`, "data-position": at, class: classes.filter(Boolean).join(" ") },
        queryToken(at)
      );
    };
    const lines = writtenLines(words).map(({ first: start2, tokens, indent, isFromRight: isFromRight2 }) => {
      const runs = [];
      tokens.forEach((_, i) => {
        const at = places[start2 + i];
        if (!i || !touches(at)) runs.push([]);
        runs.at(-1).push(wordAt(at));
      });
      const wrapped = (run) => run.length > 1 ? make("span", { class: "run", role: "presentation" }, run) : run[0];
      const spans = isFromRight2 ? runsFromLeft(runs.map((run) => run.map((it) => it.textContent).join(""))) : [];
      for (const [from, to] of spans.toReversed()) {
        runs.splice(from, to - from + 1, [make("span", { class: "run", role: "presentation", dir: "ltr" }, runs.slice(from, to + 1).map(wrapped))]);
      }
      const line2 = make("span", { class: "written", role: "presentation", dir: isFromRight2 ? "rtl" : "ltr" }, runs.map(wrapped));
      line2.style.marginInlineStart = `${Math.min(indent, MOST_INDENTED) * INDENT}em`;
      return line2;
    });
    const guesses = places.at(-1) === queries.length - 1 ? snapshot().guesses?.at(-1) ?? [] : [], last = lines.at(-1);
    if (guesses.length) {
      const [next] = writtenApart(guesses.map(([word]) => word));
      last?.append(make(
        "span",
        { class: "guess", "aria-hidden": "true", title: "The most probable next token" },
        last.dir === "rtl" ? "← " : "→ ",
        make("bdi", {}, next),
        " ",
        make("bdi", {}, percent(guesses[0][1]))
      ));
    }
    strip.replaceChildren(...lines);
  }
  function unknownInWords() {
    if (!snapshot().unknown.size) return "";
    const known2 = pageData.model?.words.filter(isWord).length;
    return "(?) marks words outside the model's vocabulary, which it reads as one unknown word." + (known2 ? ` It knows ${known2.toLocaleString("en")} words.` : "");
  }
  function drawStrip() {
    const trace = shownTrace(), { head, query } = state(), strip = byId("strip");
    if (strip.filled !== trace.queries || query !== null && !byId(`word-${query}`)) fillStrip();
    const row = trace.isOneText ? shades(trace, head, query) : [];
    const blocked = query === null ? [] : trace.blocked(head, query);
    for (const word of strip.querySelectorAll(".word")) {
      const position = Number(word.dataset.position), weight = row[position];
      const colour = weight >= LEAST ? shareColour(weight) : null;
      word.style.background = colour ? css(colour) : "";
      word.style.color = colour ? inkOn(colour) : "";
      word.classList.toggle("blocked", Boolean(blocked[position]));
      word.setAttribute("aria-selected", position === query);
    }
    if (query === null) strip.removeAttribute("aria-activedescendant");
    else {
      strip.setAttribute("aria-activedescendant", `word-${query}`);
      if (!store.pointed) keepInSight(byId(`word-${query}`), strip);
    }
    fadeStrip();
  }
  function fadeStrip() {
    const strip = byId("strip"), below = strip.scrollHeight - strip.clientHeight - strip.scrollTop;
    strip.classList.toggle("more-above", strip.scrollTop > 1);
    strip.classList.toggle("more-below", below > 1);
  }
  function keepInSight(word, strip) {
    if (!word) return;
    const top = word.offsetTop, line2 = word.offsetHeight + 2, visible = strip.clientHeight - line2;
    if (top < strip.scrollTop || top > strip.scrollTop + visible) {
      const before = visible >= line2 ? 1 : 0;
      strip.scrollTop = Math.max(0, Math.floor(top / line2) - before) * line2;
    }
  }
  function drawSentence() {
    const trace = shownTrace(), { layer, head, query, key } = state();
    const words = [...snapshot().places()].length > 1 ? [`${placeInWords(layer, head)}: `] : [];
    if (query === null) {
      const row = trace.received(head), most = largestAt(row);
      words.push(keyToken(most, 40), ` receives most weight, ${percent(row[most])} on average over all queries.`);
    } else {
      const row = trace.row(trace.used, head, query) ?? [], to = key ?? largestAt(row);
      if (!trace.isStored(head, query)) {
        words.push(
          queryToken(query, 40),
          ": the page does not have the weights of this token. ",
          make("span", { class: "more" }, STORED)
        );
      } else if (!row.some((weight) => weight > 0)) {
        words.push(queryToken(query, 40), " is fully masked.");
      } else {
        const writer2 = snapshot().writers(trace, query).find((it) => it.layer === layer && it.head === head && it.key === to);
        const claim = claimOf(snapshot().finding(layer, head)?.labels[0], query, to, trace.queries);
        const shown = claim && !store.edited && row[to] > 0.5;
        words.push(
          make("strong", {}, queryToken(query, 40)),
          " looks at ",
          make("strong", {}, keyToken(to, 40)),
          ` (${percentOf(row[to] ?? zoomedWeight(query, to))})`,
          ...writer2 ? [
            ", and this head writes ",
            make("strong", {}, quoted(clip(snapshot().nextToken.token, 40))),
            ", the predicted next token."
          ] : [shown ? `. ${claim}.` : "."],
          ...inDetail(trace, layer, head, query, to, writer2)
        );
      }
    }
    byId("sentence").replaceChildren(...words);
  }
  var STORED = "Of a long text it has those of some tokens for every head, and of all tokens for the heads of which it has every step.";
  var NORM_WEIGHTED = "Norm-weighted attention: the weight of a key times |v W_O|, the norm of what its value writes, as a fraction of the sum over all keys. What two keys write may cancel.";
  function writtenInWords({ from_key, without: without2 }) {
    const { token: token2, probability } = snapshot().nextToken, name = quoted(clip(token2, 24));
    const part = `from there it adds ${number(from_key, 2)} to the logit of ${name}`;
    const words = without2 === null ? part[0].toUpperCase() + part.slice(1) : `Without this head the probability of ${name} is ${percent(without2)} instead of ${percent(probability)}; ${part}`;
    return [" ", make("span", { class: "more", title: WRITES }, words, ".")];
  }
  var crossesInWords = () => "Cross-attention: its queries are " + (snapshot().data.layers.some((it) => it.part === "encoder") ? "the decoder's tokens, and its keys the encoder's." : "tokens of one text, and its keys those of another.");
  var WRITES = "The direct part of a head in the logit, relative to the mean logit of all words. Later layers may add to it, or remove it.";
  function inDetail(trace, layer, head, query, to, writer2) {
    if (writer2) return writtenInWords(writer2);
    if (trace.cross_attention) return [" ", make("span", { class: "more" }, crossesInWords())];
    const byNorm = trace.isOneText && !isOff(layer, head) ? trace.normWeighted(head, query) : null, words = [];
    if (byNorm?.some((part) => part > 0)) {
      const most = largestAt(byNorm), at = most === to ? ["there"] : ["on ", make("strong", {}, keyToken(most, 40))];
      words.push(make("span", { title: NORM_WEIGHTED }, `${percent(byNorm[most])} of its norm-weighted attention is `, ...at));
    }
    const effect = effectOf(snapshot().finding(layer, head));
    if (effect && !store.edited) {
      words.push(make("span", { title: effect.sentence }, words.length ? "; the head " : "The head ", effect.causes));
    }
    return words.length ? [" ", make("span", { class: "more" }, ...words, ".")] : [];
  }
  var percentOf = (weight) => weight === void 0 ? "less than the stored weights" : weight < LEAST ? "under 1 %" : percent(weight);
  var WORD_SIZES = [26, 22, 18, 16, 14, 13, 12];
  var GUTTER = 20;
  var LEAST_GUTTER = 8;
  var LEAST_WRAPPED = 0.1;
  var MARGIN = 14;
  var MOST_SHOWN = 400;
  var boxHeight = (size) => Math.round(size * 1.45);
  function layouts(side, width, gutter) {
    const { trace, from } = side, measured = WORD_SIZES[0], font = { serif: true, size: measured };
    const lineOf = ({ first, tokens, indent, isFromRight: isFromRight2 }) => tokens.map((word, i) => {
      const position = first + i, [joined, continued] = [position, position + 1].map((at) => from.touches(trace.keys, at));
      const bold = !joined && !continued, text = word.length > 12 ? fitted(word, 300, { ...font, bold }) : word;
      return { position, text, joined, continued, isFirst: i === 0, isFromRight: isFromRight2, indent, wide: widthOf(text, { ...font, bold }) };
    });
    const pieces = partsToShow(side).flatMap(([first, last]) => writtenLines(trace.keys.slice(first, last)).flatMap((line2) => lineOf({ ...line2, first: first + line2.first })));
    const bySize = /* @__PURE__ */ new Map();
    const linesOf = (size) => {
      const [begin, end] = [MARGIN, width - MARGIN], lines = (
        /** @type {any[][]} */
        []
      );
      const sized = pieces.map((it) => {
        const before = it.joined ? 0 : 5, after = it.continued ? 0 : 5, middle = it.wide * size / measured;
        return { ...it, before, middle, after, width: before + middle + after, height: boxHeight(size) };
      });
      let left = begin, word = 0;
      sized.forEach((it, i) => {
        if (!it.joined || it.isFirst) {
          word = it.width;
          for (let j = i + 1; sized[j]?.joined && !sized[j].isFirst; j++) word += sized[j].width;
        }
        const isFull = left > begin && left + (it.joined || word > end - begin ? it.width : word) > end;
        if (it.isFirst || isFull) {
          lines.push([]);
          left = begin + (it.isFirst ? Math.min(it.indent, MOST_INDENTED) * INDENT * size : 0);
        }
        lines[lines.length - 1].push({ ...it, left });
        left += it.width + (it.after && 4);
      });
      return lines;
    };
    return (most, least) => {
      const sizes = WORD_SIZES.filter((size2) => size2 >= least);
      const tried = (size2) => {
        const lines = bySize.get(size2) ?? linesOf(size2), high = boxHeight(size2), line2 = high + gutter;
        bySize.set(size2, lines);
        return { lines, size: size2, high, line: line2, gutter, width, most, fits: lines.length * line2 - gutter <= most };
      };
      const size = sizes.find((size2) => tried(size2).fits) ?? sizes.at(-1);
      return tried(size);
    };
  }
  function partsToShow({ trace, rest: { row, query, key } }) {
    const length = trace.keys.length, looked = key ?? largestAt(row);
    const centres = [query ?? 0, looked].sort((a, b) => a - b), isNear = centres[1] - centres[0] < MOST_SHOWN / 2;
    const around2 = (centre, most) => {
      const first = Math.max(0, Math.min(length - most, centre - most / 2));
      return [first, Math.min(length, first + most)];
    };
    if (isNear || length <= MOST_SHOWN) return [around2(query ?? 0, MOST_SHOWN)];
    const [one, other] = centres.map((centre) => around2(centre, MOST_SHOWN / 2));
    return one[1] >= other[0] ? [[one[0], other[1]]] : [one, other];
  }
  function textScene(scene, side, x, y, layout, { difference, limit } = {}) {
    const { trace, head, query, key } = side, { lines, high, line: line2, gutter, width, most } = layout, font = { serif: true, size: layout.size };
    const row = difference ?? shades(trace, head, query);
    const blocked = query === null ? [] : trace.blocked(head, query);
    const kept = linesToShow(
      lines,
      Math.max(2, Math.floor((most + gutter) / line2)),
      difference ?? (side.rest.query === null ? row : side.rest.row),
      [trace.isOneText ? side.rest.query : null, side.rest.key]
    );
    const boxes = /* @__PURE__ */ new Map();
    let top = y - line2, before = -1;
    const cut = (at) => scene.text("⋯", x + MARGIN + 4, at, { size: 12, fill: "soft" });
    for (const i of kept) {
      top += line2;
      if (lines[i][0].position > before + 1) cut(top - gutter / 2);
      const drawn2 = lines[i], { isFromRight: isFromRight2 } = drawn2[0], runs = isFromRight2 ? runsFromLeft(drawn2.map((it) => it.text)) : [];
      drawn2.forEach((word, j) => {
        const run = runs.find(([first, last]) => first <= j && j <= last), end = (it) => width - it.left;
        const left = run ? end(drawn2[run[1]]) - drawn2[run[1]].width + word.left - drawn2[run[0]].left : isFromRight2 ? end(word) - word.width : word.left;
        boxes.set(word.position, { ...word, x: x + left, y: top, before: isFromRight2 && !run ? word.after : word.before });
      });
      before = lines[i].at(-1).position;
    }
    if (before < trace.keys.length - 1) cut(top + high + gutter / 2);
    const from = difference || !trace.isOneText ? void 0 : boxes.get(query);
    for (const [position, to] of boxes) {
      const weight = row[position];
      if (!from || position === query || !(weight >= Math.max(LEAST, chosen.threshold))) continue;
      if (from.y !== to.y && weight < LEAST_WRAPPED) continue;
      scene.path(
        arc(from, to, [x + 5, x + width - 5], gutter),
        { stroke: "accent", line: 1 + gutter / 4 * weight, opacity: 0.25 + 0.7 * weight },
        { weight }
      );
    }
    for (const [position, box] of boxes) {
      const weight = row[position], isQuery = position === query && trace.isOneText;
      const colour = difference ? Math.abs(weight) >= LEAST ? signedColour(weight, limit) : null : weight >= LEAST ? shareColour(weight) : null;
      if (colour) scene.rect(box.x, box.y, box.width, box.height, { fill: css(colour), radius: 4 });
      const framed = (ink) => scene.rect(box.x, box.y, box.width, box.height, { ...ink, radius: 4 });
      if (isQuery) framed({ stroke: "mark", line: 2.5 });
      if (position === key) framed({ stroke: "ink", line: 1.5, dash: [4, 3] });
      scene.text(box.text, box.x + box.before + box.middle / 2, box.y + high / 2, {
        ...font,
        bold: isQuery && !box.joined && !box.continued,
        align: "center",
        fill: colour ? inkOn(colour) : blocked[position] ? "soft" : "ink"
      });
      scene.target(
        box.x,
        box.y,
        box.width + (box.after && 4),
        box.height,
        side.back(trace.isOneText ? { query: position, key: null } : { query, key: position }),
        side.from.title(trace.keys, position)
      );
    }
    return top + high;
  }
  function arc(from, to, sides2, gutter) {
    const [x1, x2] = [from, to].map((it) => it.x + it.width / 2), [y1, y2] = [from.y, to.y];
    if (y1 === y2) {
      const lift = y1 - Math.min(gutter - 4, gutter / 2 + Math.abs(x1 - x2) / 30);
      return `M ${x1} ${y1} C ${x1} ${lift} ${x2} ${lift} ${x2} ${y2}`;
    }
    const [left, right] = sides2, side = x1 - left < right - x1 ? left : right;
    const [above1, above2] = [y1 - gutter / 2, y2 - gutter / 2], round = gutter / 2;
    const towards = (x) => side + Math.sign(x - side) * Math.min(round, Math.abs(x - side)), down = Math.sign(y2 - y1) * round;
    const before = (x) => x + Math.sign(side - x) * Math.min(round, Math.abs(x - side) / 2);
    return `M ${x1} ${y1} Q ${x1} ${above1} ${before(x1)} ${above1} L ${towards(x1)} ${above1} Q ${side} ${above1} ${side} ${above1 + down} L ${side} ${above2 - down} Q ${side} ${above2} ${towards(x2)} ${above2} L ${before(x2)} ${above2} Q ${x2} ${above2} ${x2} ${y2} M ${x2 - 5} ${y2 - 5} L ${x2} ${y2} L ${x2 + 5} ${y2 - 5}`;
  }
  function linesToShow(lines, most, row, wanted) {
    const all = lines.map((_, i) => i);
    if (lines.length <= most) return all;
    const heaviestIn = lines.map((words) => Math.max(0, ...words.map((it) => Math.abs(row[it.position] || 0))));
    const holding = wanted.map((position) => lines.findIndex((words) => words.some((it) => it.position === position))).filter((line2) => line2 >= 0);
    const byWeight = all.toSorted((a, b) => heaviestIn[b] - heaviestIn[a]).filter((line2, i) => i === 0 || holding.length && heaviestIn[line2] >= chosen.threshold);
    const first = [.../* @__PURE__ */ new Set([...holding, ...byWeight])].slice(0, most);
    const distance = (line2) => Math.min(...first.map((it) => Math.abs(it - line2)));
    const near = all.toSorted((a, b) => distance(a) - distance(b));
    return [.../* @__PURE__ */ new Set([...first, ...near])].slice(0, most).sort((a, b) => a - b);
  }
  function wordLists(scene, side, x, y, width, isColumn = false, most = MOST_LISTED) {
    const { trace, head, from, query } = side;
    if (query === null || !most) return y;
    const verb = isByNorm(trace, head, query) ? "by norm" : "looks at", isFirst = (at) => trace.sharing(head, at)[0] === at;
    const row = shades(trace, head, query).map((weight, at) => isFirst(at) ? weight * trace.sharing(head, at).length : void 0);
    const lists = [[
      `${clip(trace.nameOf(head, trace.queries, query), trace.blocksOf(head) ? 24 : 14)} ${verb}`,
      heaviest(row, most).map((i) => [trace.nameOf(head, trace.keys, i), row[i], { key: i }, [trace.keys, i]])
    ]];
    const writers = from.writers(trace, query);
    if (writers.length) lists.push(writersList(from, trace, writers.slice(0, most)));
    else if (trace.isOneText && trace.size.k <= MANY_WORDS) {
      const column = trace.column(head, query);
      lists.push([
        `What looks at ${clip(trace.keys[query], 14)}`,
        heaviest(column, most).map((i) => [trace.queries[i], column[i], { query: i, key: query }, [trace.queries, i]])
      ]);
    }
    const { before, edited } = store, after = edited?.guesses?.[query], earlier = before?.guesses?.[query];
    if (from === edited && after && earlier) lists.push(changedPredictions(trace, query, earlier, after, most));
    else if (from.guesses?.[query] && !(from === before && edited)) {
      const guesses = from.guesses[query].slice(0, most), names = writtenApart(guesses.map(([word]) => word));
      lists.push([`Predictions after ${clip(trace.queries[query], 12)}`, guesses.map(([, share], i) => [names[i], share, null])]);
    }
    if (!isColumn && width < 460 && lists.length > 2) lists.splice(1, 1);
    const parts = lists.map(([, lines]) => lines[0]?.length > 4 ? 1.3 : 1), all = sum(parts);
    let above = y, left = x;
    lists.forEach(([title, lines], i) => {
      const wide = Math.min(280, isColumn ? width : (width - 24 * (lists.length - 1)) * parts[i] / all), y2 = above;
      scene.text(title, left, y2 + 8, { bold: true, room: wide });
      if (!lines.length) scene.text("no weight of 1 % or more", left, y2 + 32, { size: 13, fill: "soft" });
      const pair = 6 + Math.max(...lines.map((it) => widthOf(it[4] ?? "")));
      const longest = Math.max(...lines.map(([word]) => widthOf(word, { size: 14, serif: true })));
      lines.forEach(([word, weight, changes, titled, amount, earlier2], j) => {
        const at = y2 + 32 + j * 23, isPair = earlier2 !== void 0, after2 = isPair ? pair : 50;
        const room = Math.max(wide * (isPair ? 0.32 : amount ? 0.55 : 0.42), Math.min(longest, wide - after2 - 6 - LEAST_BAR));
        const bar3 = Math.max(0, wide - after2 - room - 6);
        scene.text(word, left, at, { size: 14, serif: true, room });
        scene.rect(left + room + 6, at - 5, bar3, 10, { fill: "rule", radius: 2 });
        if (isPair) [earlier2, weight].forEach((part, i2) => scene.rect(left + room + 6, at - 5 + 5 * i2, bar3 * part, 5, { fill: sideColour(i2) }));
        else scene.rect(left + room + 6, at - 5, bar3 * Math.min(1, weight), 10, { fill: "accent", radius: 2 });
        scene.text(amount ?? percent(weight), left + wide, at, { align: "right" });
        if (amount && changes) scene.target(left, at - 11, wide, 23, changes, titled);
        else if (changes) scene.target(left, at - 11, wide, 23, side.back(changes), from.title(...titled));
      });
      if (isColumn) above += 32 + 23 * Math.max(1, lines.length);
      else left += wide + 24;
    });
    return y + 32 + 23 * Math.max(...lists.map(([, lines]) => lines.length), 1);
  }
  function changedPredictions(trace, query, earlier, after, most) {
    const [before, now] = [earlier, after].map((guesses) => new Map(guesses.toReversed())), words = /* @__PURE__ */ new Set([...before.keys(), ...now.keys()]);
    const share = (known2, word) => known2.get(word) ?? 0, largest2 = (word) => Math.max(share(before, word), share(now, word));
    const inWords = (known2, word) => known2.has(word) ? percent(known2.get(word)) : `<${percent([...known2.values()][0]).replace(/^</, "")}`;
    const shown = [...words].sort((a, b) => largest2(b) - largest2(a)).slice(0, most), names = writtenApart(shown);
    return [`Predictions after ${clip(trace.queries[query], 12)}`, shown.map((word, i) => [names[i], share(now, word), null, null, `${inWords(before, word)} → ${inWords(now, word)}`, share(before, word)])];
  }
  function writersList(from, trace, writers) {
    const largest2 = Math.max(...writers.map((it) => it.from_key));
    return [`Added to the logit of ${quoted(clip(from.nextToken.token, 12))}`, writers.map(({ layer, head, key, from_key }) => [
      `${placeName(layer, head)} from ${clip(trace.keys[key], 12)}`,
      from_key / largest2,
      { layer, head, key: null },
      `${placeInWords(layer, head)}. ${WRITES}`,
      `+${number(from_key, 2)}`
    ])];
  }
  var MOST_LISTED = 6;
  var LEAST_BAR = 32;
  var heaviest = (weights, most) => weights.map((_, i) => i).filter((i) => weights[i] >= LEAST).sort((a, b) => weights[b] - weights[a]).slice(0, most);
  var LEAST_SIZE = WORD_SIZES[WORD_SIZES.length - 1];
  var LEAST_SIZES_AND_LISTS = [[18, 6], [16, 6], [16, 4], [14, 3], [LEAST_SIZE, 2], [LEAST_SIZE, 0]];
  var NAME = 20;
  var LEGEND = 40;
  function drawText(width, height) {
    const scene = new Scene(width, height), shown = sides();
    let bottom = 0;
    if (chosen.difference) {
      const [a, b] = shown.map(({ trace, head, query }) => shades(trace, head, query));
      const difference = b.map((weight, i) => (weight ?? 0) - (a[i] ?? 0));
      const limit = Math.max(LEAST, ...difference.map(Math.abs));
      scene.text(`${shown[1].name} minus ${shown[0].name}`, 0, 12, { bold: true });
      const layout = layouts(shown[0], width, LEAST_GUTTER)(height - 90, LEAST_SIZE);
      bottom = textScene(scene, shown[0], 0, 44, layout, { difference, limit });
      drawSignedBar(scene, 0, bottom + 16, limit);
      bottom += 52;
    } else if (shown.length > 2) {
      bottom = manySides(scene, shown, width, height - LEGEND);
    } else {
      const columns = shown.length === 2 && width > 620 ? 2 : 1, wide = (width - 28 * (columns - 1)) / columns;
      const above = shown.length > 1 ? NAME : 0, rows = columns === 2 ? 1 : shown.length;
      shown.forEach((side, i) => {
        const left = columns === 2 ? i * (wide + 28) : 0, top = columns === 2 ? 0 : bottom;
        const { query } = state(), isAbsent = side.query === null && query !== null;
        const name = isAbsent ? `${side.name}: no “${clip(shownTrace().queries[query], 16)}”` : side.name;
        if (above) scene.text(name, left, top + 10, { bold: true, fill: sideColour(i) });
        const free = (height - LEGEND) / rows - above - GUTTER, layOut = layouts(side, wide, above ? LEAST_GUTTER : GUTTER);
        const tried = (side.rest.query === null ? [[LEAST_SIZE, 0]] : LEAST_SIZES_AND_LISTS).map(([least, listed]) => ({ ...layOut(free - (listed ? 50 + 23 * listed : 0), least), listed }));
        const layout = tried.find((it) => it.fits) ?? tried[0];
        const at = textScene(scene, side, left, top + above + GUTTER, layout);
        const after = layout.listed ? wordLists(scene, side, left, at + 14, wide, false, layout.listed) : at;
        bottom = columns === 2 ? Math.max(bottom, after) : after + 8;
      });
    }
    if (!chosen.difference) {
      const { trace, head, query } = shown[0];
      drawWeightBar(scene, 0, bottom + 10, 150, isByNorm(trace, head, query) ? "norm-weighted attention" : "weight");
      bottom += 36;
    }
    Object.assign(scene, { height: Math.max(height, bottom), bottom });
    return scene;
  }
  function manySides(scene, shown, width, height) {
    const most = height / shown.length, label = 10 + Math.max(...shown.map((side) => widthOf(side.name, { bold: true })));
    return shown.reduce((above, side, i) => {
      const layout = layouts(side, width - label, LEAST_GUTTER)(most - LEAST_GUTTER, LEAST_SIZE);
      const top = Math.max(above, i * most) + LEAST_GUTTER;
      scene.text(side.name, 0, top + layout.high / 2, { bold: true, fill: sideColour(i) });
      return textScene(scene, side, label, top, layout);
    }, 0);
  }

  // src/pictures/map.js
  var LARGEST_CELL = 80;
  var DIGITS_FROM = 30;
  var LABEL = 14;
  var TITLE = 20;
  var LEAST_BELOW = 180;
  function blockedIn(trace, step, head, fine = true) {
    const masked = step.isShare && trace.step("masked");
    const { values } = (masked && masked.isExact(head) && (fine || !step.map) ? masked : step).grid(head, fine);
    return (cell) => values[cell] === -Infinity;
  }
  function limitOf(trace, step) {
    if (step.limit) return step.limit;
    let limit = 0;
    for (let head = 0; head < trace.heads; head++) {
      if (step.hasMap(head)) for (const value of step.grid(head).values) {
        if (Number.isFinite(value) && Math.abs(value) > limit) limit = Math.abs(value);
      }
    }
    return step.limit = limit || 1;
  }
  function drawMap(width, height) {
    const scene = new Scene(width, height), zoomed = zoomedSide(), all = zoomed ? [zoomed] : sides(), bar3 = 34;
    const stepOf = (side) => side.trace.maps(side.head).find((it) => it.name === chosen.step) ?? side.trace.weights;
    if (chosen.difference && all.length === 2) {
      const isFine = all.every((side) => stepOf(side).isExact(side.head));
      const [a, b] = all.map((side) => stepOf(side).grid(side.head, isFine));
      const blocked = all.map((side) => blockedIn(side.trace, stepOf(side), side.head, isFine));
      const values = Float32Array.from(b.values, (value, i) => value === a.values[i] ? 0 : value - a.values[i]);
      const both = (cell2) => blocked[0](cell2) && blocked[1](cell2);
      const limit = values.reduce((most, value) => Number.isFinite(value) ? Math.max(most, Math.abs(value)) : most, LEAST);
      mapPanel(
        scene,
        all[1],
        { ...b, values },
        both,
        (value) => signedColour(value, limit),
        0,
        0,
        width,
        height - bar3,
        `${all[1].name} minus ${all[0].name}`
      );
      drawSignedBar(scene, 0, height - 26, limit);
      drawHatchKey(scene, 220, height - 26);
      return scene;
    }
    const { columns, rows } = arrangement(all, stepOf, width, height - bar3);
    const wide = (width - 16 * (columns - 1)) / columns, high = (height - bar3) / rows;
    let hasBlocked = false;
    all.forEach((side, i) => {
      const step2 = stepOf(side), limit = step2.isShare ? 1 : limitOf(side.trace, step2);
      const grid = step2.grid(side.head), isBlocked = blockedIn(side.trace, step2, side.head);
      hasBlocked ||= grid.values.some((_, cell2) => isBlocked(cell2));
      mapPanel(
        scene,
        side,
        grid,
        isBlocked,
        (value) => step2.isShare ? shareColour(value) : signedColour(value, limit),
        i % columns * (wide + 16),
        Math.floor(i / columns) * high,
        wide,
        high - 6,
        all.length > 1 || zoomed ? side.name : ""
      );
    });
    const step = stepOf(all[0]);
    if (step.isShare) drawWeightBar(scene, 0, height - 26);
    else drawSignedBar(scene, 0, height - 26, limitOf(all[0].trace, step));
    const legend2 = hasBlocked ? drawHatchKey(scene, 220, height - 26) : 220;
    const { x, cell, columns: cells } = scene.map, right = Math.max(x + cell * cells, legend2) + 32;
    if (all.length === 1 && !zoomed && width - right >= 200) {
      const listed = Math.max(2, Math.min(6, Math.floor(((height - 10) / 3 - 32) / 23)));
      wordLists(scene, all[0], right, 10, width - right, true, listed);
    }
    return scene;
  }
  function withMap(scene) {
    const [side, ...others] = sides(), top = scene.bottom + 12, room = scene.height - top - 6;
    if (others.length || chosen.difference || room < LEAST_BELOW) return scene;
    const { trace, head } = side, { weights } = trace;
    mapPanel(
      scene,
      side,
      weights.grid(head),
      blockedIn(trace, weights, head),
      shareColour,
      0,
      top,
      scene.width,
      room,
      "All weights of this head: a row for each query, a column for each key"
    );
    return scene;
  }
  function arrangement(all, stepOf, width, height) {
    const grids = all.map((side) => stepOf(side).grid(side.head));
    const cell = (columns, rows) => Math.min(...grids.map((it) => Math.min((width / columns - 16) / it.columns, (height / rows - TITLE) / it.rows)));
    return all.map((_, i) => ({ columns: i + 1, rows: Math.ceil(all.length / (i + 1)) })).reduce((best, it) => cell(it.columns, it.rows) > cell(best.columns, best.rows) ? it : best);
  }
  function mapPanel(scene, side, { rows, columns, values }, isBlocked, colourOf, x, y, width, height, title) {
    const { trace, query } = side, key = keyOf(side);
    const size = 13, above = title ? TITLE : 0;
    const some = (labels) => labels.filter((_, i) => i % Math.ceil(labels.length / 200) === 0 || i === labels.length - 1);
    const longest = (labels) => Math.min(110, 12 + Math.max(...some(labels).map((it) => widthOf(it.slice(0, 20), { size, bold: true }))));
    const bare2 = Math.min(width / columns, (height - above) / rows);
    let left = Math.min(longest(trace.queries), width * 0.25), head = Math.min(longest(trace.keys), height * 0.25);
    const isBare = title && bare2 < LABEL && Math.min((width - left) / columns, (height - above - head) / rows) < 0.8 * bare2;
    if (isBare) [left, head] = [0, 0];
    const cellFor = (rowRanks2, columnRanks2) => {
      const cell2 = Math.min(LARGEST_CELL, (width - rowRanks2 * left) / columns, (height - columnRanks2 * head - above) / rows);
      return cell2 >= 2 ? Math.floor(2 * cell2) / 2 : cell2;
    };
    const plain = cellFor(1, 1), pairs = plain < LABEL ? [[2, 2], [2, 1], [1, 2]] : [];
    const [rowRanks, columnRanks] = pairs.map(([down, across]) => [down, across, cellFor(down, across)]).find(([, , size2]) => 2 * size2 >= LABEL && size2 >= 0.8 * plain) ?? [1, 1];
    const cell = cellFor(rowRanks, columnRanks), isStrip = Math.max(rows, columns) > 2 * Math.min(rows, columns);
    const stretched = (room, cells) => isStrip ? Math.max(cell, Math.min(LABEL, room / cells)) : cell;
    const wide = stretched(width - rowRanks * left - LABEL / 2, columns), tall = stretched(height - columnRanks * head - above, rows);
    const [x0, y0] = [x + left * rowRanks, y + above + head * columnRanks];
    const pair = isBare && query !== null && key !== null ? `  ${trace.queries[query]} → ${trace.keys[key]}` : "";
    if (title) {
      scene.text(title + pair, x, y + 8, { bold: true, fill: chosen.difference ? "ink" : sideColour(side.colour), room: width });
    }
    scene.cells(x0, y0, wide, tall, rows, columns, (at2) => isBlocked(at2) ? null : colourOf(values[at2]));
    scene.rect(x0, y0, wide * columns, tall * rows, { stroke: "rule" });
    const at = trace.cellOf(query ?? 0, key ?? 0, { rows, columns });
    const labelled = (cells, ranks, here, pixels, draw2) => {
      const every = ranks === 2 ? 1 : Math.max(1, Math.ceil(LABEL / pixels));
      for (let cell2 = 0; cell2 < cells; cell2++) {
        const isHere = cell2 === here, rank = ranks === 2 ? cell2 % 2 : 0;
        const gives = here !== null && (ranks === 1 || (cell2 - here) % 2 === 0) && Math.abs(cell2 - here) * pixels < LABEL;
        if (isHere || cell2 % every === 0 && !gives) draw2(cell2, rank, isHere);
      }
    };
    if (!isBare) labelled(rows, rowRanks, query === null ? null : at.row, tall, (row, rank, bold) => {
      const middle = y0 + (row + 0.5) * tall;
      if (rank) scene.rect(x0 - left - 2, middle - 0.5, left - 2, 1, { fill: "rule" });
      const position = bold && query !== null ? query : trace.rowSpan(row, rows)[0];
      scene.text(trace.queries[position], x0 - 6 - rank * left, middle, { size, align: "right", bold, room: left - 8 });
    });
    if (!isBare) labelled(columns, columnRanks, key === null ? null : at.column, wide, (column, rank, bold) => {
      const middle = x0 + (column + 0.5) * wide;
      if (rank) scene.rect(middle - 0.5, y0 - head - 2, 1, head - 2, { fill: "rule" });
      const position = bold && key !== null ? key : trace.columnSpan(column, columns)[0];
      scene.text(trace.keys[position], middle, y0 - 6 - rank * head, { size, turn: -90, bold, room: head - 8 });
    });
    if (Math.min(wide, tall) >= DIGITS_FROM) {
      for (let cell2 = 0; cell2 < values.length; cell2++) {
        if (isBlocked(cell2) || Math.abs(values[cell2]) < LEAST) continue;
        scene.text(
          Number.isNaN(values[cell2]) ? "NaN" : short(values[cell2]),
          x0 + (cell2 % columns + 0.5) * wide,
          y0 + (Math.floor(cell2 / columns) + 0.5) * tall,
          { size: 12, align: "center", fill: inkOn(colourOf(values[cell2])) }
        );
      }
    }
    if (query !== null) scene.rect(x0, y0 + at.row * tall, wide * columns, tall, { stroke: "mark", line: 2 });
    if (key !== null) scene.rect(x0 + at.column * wide, y0, wide, tall * rows, { stroke: "mark", line: 1, dash: [3, 2] });
    scene.map = { x: x0, y: y0, cell: wide, tall, rows, columns, values };
    const stored = trace.stored(side.head);
    for (let row = 0; row < rows; row++) {
      const isIn = (query2) => trace.cellOf(query2, 0, { rows, columns }).row === row;
      const queryAt = stored.find(isIn) ?? trace.rowSpan(row, rows)[0];
      const keyAt = (px) => trace.columnSpan(Math.max(0, Math.min(columns - 1, Math.floor((px - x0) / wide))), columns)[0];
      scene.targets.push({
        x: x0,
        y: y0 + row * tall,
        width: wide * columns,
        height: tall,
        of: (px) => side.back({ query: queryAt, key: keyAt(px) }),
        titleAt: (px) => `query ${side.from.title(trace.queries, queryAt)}
key ${side.from.title(trace.keys, keyAt(px))}`
      });
    }
  }
  function keyOf({ trace, head, query, key }) {
    if (key !== null || query === null) return key;
    const row = trace.row(trace.used, head, query);
    return row ? largestAt(row) : null;
  }
  var short = (value) => Math.abs(value) < 100 ? value.toFixed(2).replace(/^(-?)0\./, "$1.").replace("-", MINUS) : number(value, 0);

  // src/grid.js
  var MANY_HEADS = 64;
  var LEAST_TILE = 14;
  var LEAST_TARGET = 40;
  var LARGEST_TILE = 150;
  var LABEL_HEIGHT = 22;
  var LEAST_LABELLED = 50;
  var ROLE = 1.7;
  var AXIS = 30;
  var AXIS_WITH_PART = 60;
  var COLUMN_NAME = 26;
  var GROUP_GAP = 8;
  var gapOf = () => store.tiles.length > MANY_HEADS ? 3 : 6;
  var tileSize = (tile2) => Math.round(parseFloat(getComputedStyle(tile2).getPropertyValue("--tile")));
  function layOutGrid() {
    const grid = byId("grid"), { clientWidth: width, clientHeight } = grid;
    const height = narrow.matches ? 0 : clientHeight;
    if (!width || !store.tiles.length) return;
    grid.style.setProperty("--gap", `${gapOf()}px`);
    const groups = [...grid.querySelectorAll(".group")];
    if (groups.length) layOutGroups(grid, groups, width - 4, height - 4);
    else layOutRows(grid, width - 4, height - 4);
  }
  var leastTile = () => narrow.matches ? LEAST_TARGET : LEAST_TILE;
  function layOutGroups(grid, groups, width, height) {
    const gap = gapOf(), heading = grid.firstElementChild.offsetWidth + GROUP_GAP, room = narrow.matches ? width : width - heading;
    const heightOf = (group, size2) => {
      const tile2 = sizeIn(group, size2), columns = Math.max(1, Math.floor((room + gap) / (tile2 + gap)));
      return Math.ceil(group.children.length / columns) * (tile2 + gap) + GROUP_GAP;
    };
    const fits2 = (size2) => groups.reduce((sum3, group) => sum3 + heightOf(group, size2), 0) <= height;
    let size = LARGEST_TILE / 2;
    while (size > leastTile() && !fits2(size)) size--;
    grid.classList.remove("labelled", "matrix");
    for (const group of groups) group.style.setProperty("--tile", `${sizeIn(group, size)}px`);
    grid.columns = Math.max(1, Math.floor((room + gap) / (size + gap)));
  }
  var sizeIn = (group, size) => group.classList.contains("role") ? Math.round(size * ROLE) : size;
  function layOutRows(grid, width, height) {
    const layers = snapshot().layers, count2 = store.tiles.length, isByPlace = sheet.order === "place";
    const counts = Array.from({ length: layers }, (_, i) => snapshot().layer(i).heads), across = Math.max(...counts);
    const splits = Array.from({ length: across }, (_, i) => ({ columns: Math.ceil(across / (i + 1)), rows: layers * (i + 1), side: 1 }));
    const shared = counts.every((it) => it === across) ? Array.from({ length: layers - 1 }, (_, i) => ({ columns: across * (i + 2), rows: Math.ceil(layers / (i + 2)), side: i + 2 })) : [];
    const any = Array.from({ length: count2 }, (_, i) => ({ columns: i + 1, rows: Math.ceil(count2 / (i + 1)), side: 1 }));
    const gap = gapOf(), sizes = (isByPlace ? [...splits, ...shared] : any).map((it) => {
      const wide = Math.floor((width + gap) / it.columns) - gap, high = Math.floor((height + gap) / it.rows) - gap;
      const labelled = Math.min(wide, high - LABEL_HEIGHT, LARGEST_TILE);
      return labelled >= LEAST_LABELLED ? { ...it, size: labelled, isLabelled: true } : { ...it, size: Math.min(wide, high, LARGEST_TILE), isLabelled: false };
    });
    const isBetter = (a, b) => a.isLabelled !== b.isLabelled ? a.isLabelled : a.size > b.size;
    let best = sizes.reduce((a, b) => isBetter(b, a) ? b : a);
    if (best.size < leastTile()) {
      const columns = Math.floor((width + gap) / (leastTile() + gap));
      best = { columns: isByPlace ? Math.min(across, columns) : columns, rows: 0, side: 1, size: leastTile(), isLabelled: false };
    }
    const isMatrix = sheet.order === "matrix";
    if (isMatrix) {
      const axis = snapshot().layer(0).part ? AXIS_WITH_PART : AXIS;
      grid.style.setProperty("--axis", `${axis - gap}px`);
      const wide = Math.floor((width - axis + gap) / across) - gap, high = Math.floor((height + gap) / (layers + 1)) - gap;
      const size = Math.max(narrow.matches ? wide : Math.min(wide, high, LARGEST_TILE), leastTile());
      best = { columns: across, rows: layers, side: 1, size, isLabelled: false };
      const every = Math.ceil(COLUMN_NAME / (best.size + gap));
      grid.querySelectorAll(".axis.column").forEach((it, i) => it.classList.toggle("unnamed", i % every > 0));
    }
    grid.classList.toggle("matrix", isMatrix);
    grid.style.setProperty("--columns", best.columns);
    grid.style.setProperty("--tile", `${best.size}px`);
    grid.classList.toggle("labelled", best.isLabelled);
    grid.columns = best.columns;
    for (const it of store.tiles) {
      it.style.gridColumnStart = isByPlace && it.head === 0 ? it.layer % best.side * across + 1 : "";
    }
  }

  // src/panes.js
  var TOP = 9;
  function buildSwipe() {
    byId("swipe").addEventListener("click", (event) => {
      const { pane } = event.target.dataset;
      if (pane) showPane(pane);
    });
    const mark = () => {
      const isSecond = byId("panes").scrollLeft > byId("panes").clientWidth / 2;
      const shown = isSecond ? "heads-pane" : "picture-pane";
      for (const it of byId("swipe").children) it.setAttribute("aria-pressed", it.dataset.pane === shown);
      byId("panes").style.height = narrow.matches ? `${byId(shown).offsetHeight + TOP}px` : "";
    };
    byId("panes").addEventListener("scroll", mark);
    const sizes = new ResizeObserver(mark);
    for (const pane of byId("panes").children) sizes.observe(pane);
    mark();
  }
  function showPane(id) {
    const panes = byId("panes");
    if (panes.scrollWidth > panes.clientWidth + 8) {
      panes.scrollTo({ left: byId(id).offsetLeft - panes.offsetLeft, behavior: stillOnly.matches ? "auto" : "smooth" });
    }
  }

  // src/pictures/image.js
  var NAME2 = 20;
  var LINE = 26;
  var GAP = 20;
  var BELOW = 90;
  var LISTED = 4;
  var MOST_LINES = 4;
  var LISTS = 230;
  var LEAST_PAIR = 520;
  var FADED = 0.55;
  var STRONGEST = 0.9;
  function patchesOf(trace, head, row) {
    const { before, rows, columns } = (
      /** @type {Picture} */
      trace.picture
    ), weights = row.slice(before, before + rows * columns);
    if (chosen.registers === "left out") for (const at of withRegisters(trace, head)) weights[at - before] = void 0;
    return { weights, top: Math.max(1e-9, ...weights.map((it) => it || 0)) };
  }
  var REGISTERS = "Patches that the model uses as registers, with an outlying norm and much weight: leave them out of the maps";
  var registersOf = (trace) => trace.picture?.registers ?? [];
  var withRegisters = (trace, head) => new Set(registersOf(trace).flatMap((at) => trace.sharing(head, at)));
  function drawImage(width, height) {
    const scene = new Scene(width, height), shown = sides();
    const bottom = shown.length === 1 ? oneHead(scene, shown[0], width, height) : severalHeads(scene, shown, width, height);
    return Object.assign(scene, { height: Math.max(height, bottom), bottom });
  }
  function oneHead(scene, side, width, height) {
    const isPair = width >= LEAST_PAIR && !store.edited, columns = isPair ? 2 : 1;
    const wide = (width - GAP * (columns - 1)) / columns, lists = side.query === null ? 0 : 32 + 23 * LISTED;
    const row = rowOf2(side), top = otherTokens(scene, side, row, 0, 0, width), room = height - BELOW - top;
    const beside = sizeIn2(side.trace, (width - LISTS - GAP * columns) / columns, room), below = sizeIn2(
      side.trace,
      wide,
      Math.max(room - lists, isPair ? 160 : Math.min(wide, 340))
    );
    const isBeside2 = isPair && lists && beside.cell > below.cell, size = isBeside2 ? beside : below;
    if (isPair) panel(scene, side, row, 0, top, size, false);
    const left = isPair ? size.width + GAP : 0, bottom = panel(scene, side, row, left, top, size, true);
    legend(scene, side, row, left, bottom + 8, size.width);
    const end = isBeside2 ? wordLists(scene, side, left + size.width + GAP, top, LISTS, true, LISTED) : wordLists(scene, side, 0, bottom + 66, width, false, LISTED);
    return Math.max(end, bottom + 66);
  }
  function severalHeads(scene, shown, width, height) {
    const across = Math.min(shown.length, Math.max(1, Math.floor(width / 200))), down = Math.ceil(shown.length / across);
    const wide = (width - GAP * (across - 1)) / across, high = (height - 40) / down - NAME2 - LINE - 58;
    const ends3 = shown.map((side, i) => {
      const size = sizeIn2(side.trace, wide, Math.max(high, 120)), left = i % across * (wide + GAP);
      const top = Math.floor(i / across) * (size.height + NAME2 + LINE + 62);
      scene.text(side.name, left, top + 8, { bold: true, fill: sideColour(i), room: wide });
      const row = rowOf2(side), at = otherTokens(scene, side, row, left, top + NAME2, wide);
      const below = panel(scene, side, row, left, at, size, true);
      legend(scene, side, row, left, below + 8, wide);
      return below + 58;
    });
    return Math.max(...ends3);
  }
  var rowOf2 = ({ trace, head, query }) => shades(trace, head, query);
  function sizeIn2(trace, width, height) {
    const { rows, columns } = trace.picture, cell = Math.max(4, Math.min(width / columns, height / rows));
    return { cell, width: cell * columns, height: cell * rows };
  }
  function otherTokens(scene, side, row, x, top, width) {
    const { trace, query, key } = side, { before, rows, columns } = trace.picture;
    let left = x, line2 = 0;
    for (let at = 0; at < trace.size.k; at++) {
      if (at === before) at += rows * columns;
      if (at >= trace.size.k) break;
      const text = `${trace.keys[at]} ${row[at] === void 0 ? "" : percent(row[at])}`, wide = widthOf(text, { size: 13 }) + 14;
      if (left + wide > x + width) [left, line2] = [x, line2 + 1];
      if (line2 === MOST_LINES) break;
      const y = top + LINE * line2;
      const colour = row[at] >= LEAST ? shareColour(row[at]) : null;
      scene.rect(left, y, wide, 20, { fill: colour ? css(colour) : void 0, stroke: query === at ? "mark" : "rule", line: query === at ? 2.5 : 1, radius: 4 });
      if (key === at) scene.rect(left, y, wide, 20, { stroke: "ink", line: 1.5, dash: [4, 3], radius: 4 });
      scene.text(text, left + wide / 2, y + 10, { size: 13, align: "center", fill: colour ? inkOn(colour) : "ink" });
      scene.target(left, y, wide, 20, side.back({ query: at, key: null }), trace.keys[at]);
      left += wide + 6;
    }
    return top + (trace.size.k > rows * columns ? LINE * (Math.min(line2, MOST_LINES - 1) + 1) : 0);
  }
  function panel(scene, side, row, x, y, { cell, width, height }, hasWeights) {
    const { trace, head, query, key } = side, { before, rows, columns, image } = trace.picture;
    const pixels = side.from.image(image), [high, wide] = pixels.stored, colours2 = pixels.values;
    const { weights, top } = patchesOf(trace, head, row), paper = store.isDark ? 16 : 255;
    const inks = shareInks();
    scene.cells(x, y, width / wide, height / high, high, wide, (at) => {
      const [red, green, blue] = colours2.subarray(3 * at, 3 * at + 3);
      if (!hasWeights) return [red, green, blue];
      const grey = 0.3 * red + 0.59 * green + 0.11 * blue, faded = paper + (grey - paper) * (1 - FADED);
      const patch = Math.floor(Math.floor(at / wide) * rows / high) * columns + Math.floor(at % wide * columns / wide);
      const part = Math.sqrt((weights[patch] || 0) / top);
      return mixed(inks, 0.25 + 0.75 * part).map((channel) => Math.round(faded + (channel - faded) * STRONGEST * part));
    });
    const corner = (at) => [x + (at - before) % columns * cell, y + Math.floor((at - before) / columns) * cell];
    const framed = (at, ink) => {
      if (at === null || !trace.isPatch(at)) return;
      const tokens = trace.sharing(head, at), [left, above] = corner(tokens[0]), [right, below] = corner(tokens.at(-1));
      scene.rect(left - 1, above - 1, right - left + cell + 2, below - above + cell + 2, { ...ink, radius: 2 });
    };
    for (const at of registersOf(trace)) framed(at, { stroke: "ink", line: 1.5, dash: [2, 2] });
    framed(query, { stroke: "paper", line: 4.5 });
    framed(query, { stroke: "mark", line: 2.5 });
    if (hasWeights) framed(key, { stroke: "ink", line: 2, dash: [3, 2] });
    for (let at = before; at < before + rows * columns; at++) {
      const isRegister = registersOf(trace).includes(at), name = `${trace.keys[at]}${isRegister ? ", a register in all but name" : ""}`;
      const { length } = trace.sharing(head, at), shown = length > 1 ? `${name}
${trace.nameOf(head, trace.keys, at)}` : name;
      const title = row[at] === void 0 ? name : `${shown}: ${percent(length * row[at])}`;
      scene.target(...corner(at), cell, cell, side.back({ query: at, key: null }), hasWeights ? title : name);
    }
    return y + height;
  }
  function legend(scene, side, row, x, y, width) {
    const { trace } = side, { before, rows, columns } = trace.picture, registers = registersOf(trace);
    const name = isByNorm(trace, side.head, side.query) ? "norm-weighted attention" : "weight";
    drawShareBar(scene, x, y, patchesOf(trace, side.head, row).top, Math.min(110, width / 2), name);
    const onAll = row.slice(before, before + rows * columns).reduce((sum3, it) => sum3 + (it || 0), 0);
    const onThem = [...withRegisters(trace, side.head)].reduce((sum3, at) => sum3 + (row[at] || 0), 0);
    scene.text(registers.length ? `${percent(onAll - onThem)} is on patches, ${percent(onThem)} on ${count(registers.length, "register")}` : `${percent(onAll)} is on the patches`, x, y + 38, { size: 12, fill: "soft", room: width });
  }
  var hasImage = () => sides().every((side) => side.trace.picture) && Boolean(snapshot().data.images?.length);

  // src/heads.js
  var ORDERS = {
    place: ["layer and head", (a, b) => a.layer - b.layer || a.head - b.head],
    matrix: ["matrix of layers and heads", (a, b) => a.layer - b.layer || a.head - b.head],
    label: ["label, strongest first", (a, b) => writerRank(a) - writerRank(b) || rankOf(rowOf(a)) - rankOf(rowOf(b)) || b.number - a.number || a.layer - b.layer || a.head - b.head],
    sharp: ["lowest entropy first", (a, b) => a.entropy - b.entropy],
    spread: ["highest entropy first", (a, b) => b.entropy - a.entropy],
    effect: ["largest effect first", (a, b) => Math.abs(b.effect) - Math.abs(a.effect)]
  };
  var isByEntropy = (it) => isEvenness(it.labels[0]);
  var amountOf = (it) => isByEntropy(it) ? `${it.effective.toFixed(1)} tokens` : percent(it.number);
  var writingLabel = () => snapshot().nextToken.writers.length ? `writes “${isolated(clip(snapshot().nextToken.token, 12))}”` : null;
  var writerAt = (it) => snapshot().nextToken.writers.findIndex((x) => x.layer === it.layer && x.head === it.head);
  var writes = (it) => writerAt(it) >= 0;
  var writerRank = (it) => writes(it) ? writerAt(it) : Number.MAX_SAFE_INTEGER;
  var isPlain = (it) => !it || isByEntropy(it) && it.labels[0] !== "sharp";
  function buildHeads() {
    if (snapshot().findings.size > MANY_HEADS) sheet.order = "label";
    for (const [name, [words]] of Object.entries(ORDERS)) {
      byId("order").append(make("option", { value: name }, words));
    }
    byId("order").value = sheet.order;
    byId("order").addEventListener("change", (event) => {
      sheet.order = event.target.value;
      fillHeads();
      drawHeads();
    });
    byId("example").addEventListener("click", () => go({ query: byId("example").query, key: null }));
    byId("grid").addEventListener("keydown", walkGrid);
    byId("grid").addEventListener("pointerleave", () => point(null));
    new ResizeObserver(layOutGrid).observe(byId("grid"));
  }
  function fillHeads() {
    const found = [...snapshot().findings.values()];
    byId("panes").classList.toggle("many", found.length > MANY_HEADS);
    byId("order").parentElement.hidden = found.length < 2;
    const haveEffects = found.length > 0 && found.every((it) => it.effect !== null);
    byId("order").lastElementChild.hidden = !haveEffects;
    if (sheet.order === "effect" && !haveEffects) byId("order").value = sheet.order = "place";
    const counts = /* @__PURE__ */ new Map();
    for (const label of found.flatMap(labelsOf)) counts.set(label, (counts.get(label) ?? 0) + 1);
    const names = [...counts.keys()].sort((a, b) => rankOf(a) - rankOf(b));
    if (!counts.has(sheet.label) && sheet.label !== writingLabel()) sheet.label = null;
    byId("labels").replaceChildren(...names.map((label) => labelButton(label, counts.get(label))));
    byId("labels").hidden = names.length < 2 || sheet.order === "label";
    const places = [...snapshot().places()];
    const order = ORDERS[sheet.order][1];
    if (found.length) {
      const it = ({ layer, head }) => snapshot().finding(layer, head) ?? { layer, head, labels: ["mixed"], roles: [], measured: false, number: 0, entropy: 0 };
      places.sort((a, b) => order(it(a), it(b)));
    }
    store.tiles = places.map(tile);
    byId("grid").classList.toggle("grouped", sheet.order === "label");
    byId("grid").replaceChildren(...{ label: inGroups, matrix: withAxes }[sheet.order]?.(store.tiles) ?? store.tiles);
    const [row, more] = byId("grid").querySelector(".label[data-elsewhere] small")?.textContent.split("+").map(Number) ?? [];
    byId("grid-note").textContent = snapshot().data.missing ?? (more ? `“${row} + ${more}”: ${count(row, "head")} in this row, and ${more} in other rows that ${more === 1 ? "has" : "have"} its role, too.` : "");
    byId("heads-pane").hidden = places.length === 1;
    layOutGrid();
  }
  var SHORT_PARTS = (
    /** @type {Record<string, string>} */
    { encoder: " enc.", decoder: " dec.", "cross-attention": " cross" }
  );
  function withAxes(tiles) {
    const axis = (kind, words) => make("span", { class: `axis ${kind}`, "aria-hidden": "true" }, words);
    const across = Math.max(...tiles.map((it) => it.head)) + 1;
    return [
      axis("row", ""),
      ...Array.from({ length: across }, (_, i) => axis("column", `H${i}`)),
      ...tiles.flatMap((it) => it.head === 0 ? [axis("row", `L${it.layer}${SHORT_PARTS[snapshot().layer(it.layer).part] ?? ""}`), it] : [it])
    ];
  }
  function inGroups(tiles) {
    const groups = /* @__PURE__ */ new Map(), found = [...snapshot().findings.values()];
    const labelled = new Set(found.flatMap(labelsOf).sort((a, b) => rankOf(a) - rankOf(b)));
    for (const label of [...writingLabel() ? [writingLabel()] : [], ...labelled]) groups.set(label, []);
    for (const it of tiles) {
      const finding = snapshot().finding(it.layer, it.head), label = writes(it) && writingLabel() || (finding ? rowOf(finding) : "");
      groups.set(label, [...groups.get(label) ?? [], it]);
    }
    const elsewhere2 = (label, group) => isEvenness(label) || label === writingLabel() ? 0 : found.filter((it) => labelsOf(it).includes(label)).length - group.length;
    return [...groups].filter(([label, group]) => group.length || elsewhere2(label, group)).flatMap(([label, group]) => [
      labelButton(label, group.length, elsewhere2(label, group)),
      make("div", { class: isSmall(label) ? "group" : "group role", role: "presentation" }, group)
    ]);
  }
  var isSmall = (label) => isEvenness(label) || roleOf(label)?.kind === "sink";
  function labelButton(label, number2, elsewhere2 = 0) {
    const what = label === writingLabel() ? `it writes a large part of the logit of the predicted next token, ${snapshot().nextToken.token}.` : isEvenness(label) ? `the head has no role, and ${roleOf(label)?.claim}.` : `a large part ${meaningOf([label])}.`;
    const more = elsewhere2 ? ` This is also a role of ${count(elsewhere2, "head")} in other groups.` : "";
    const title = `${label}: ${what}${more} Click to show these heads.`;
    return button({ class: "label", "data-elsewhere": elsewhere2 || void 0, "aria-pressed": label === sheet.label, title }, () => {
      sheet.label = sheet.label === label ? null : label;
      fillHeads();
      drawHeads();
    }, make("span", {}, label), make("small", {}, ` ${number2}${elsewhere2 ? ` + ${elsewhere2}` : ""}`));
  }
  function tile({ layer, head }) {
    const it = snapshot().finding(layer, head), name = placeName(layer, head);
    const spoken = name.replace(/^L(\d+)H(\d+)$/, "layer $1, head $2");
    const fades = sheet.label !== null && !(it && (labelsOf(it).includes(sheet.label) || writes(it) && sheet.label === writingLabel()));
    const pointerenter = (event) => {
      if (event.pointerType === "mouse") point({ layer, head });
    };
    const element = button(
      {
        role: "radio",
        pointerenter,
        class: fades ? "tile faded" : "tile",
        tabindex: -1,
        "data-place": `${layer}.${head}`,
        title: it ? leadOf(it) : void 0,
        "aria-label": it ? `${namedWithPart(layer, spoken)}: ${it.labels.join(" and ")} ${amountOf(it)}, entropy ${it.entropy.toFixed(2)}` : spoken
      },
      () => choosePlace(layer, head),
      make("canvas", { "aria-hidden": "true" }),
      make("span", { class: "place", "aria-hidden": "true" }, name),
      // short, below a tile
      make(
        "span",
        { class: isPlain(it) ? "does plain" : "does", "aria-hidden": "true" },
        it ? shortOf(it.labels) : ""
      )
    );
    return Object.assign(element, { layer, head });
  }
  function choosePlace(layer, head) {
    go(store.isAdding ? { others: toggled(chosen.others, layer, head).slice(-MOST_OTHERS) } : { layer, head });
    showPane("picture-pane");
  }
  function drawHeads() {
    const { layer, head, others } = state();
    for (const it of store.tiles) {
      const pixels = 2 * (tileSize(it) || 60);
      const here = it.layer === layer && it.head === head, isChosen = it.layer === chosen.layer && it.head === chosen.head;
      it.setAttribute("aria-checked", isChosen);
      it.tabIndex = isChosen ? 0 : -1;
      it.classList.toggle("pointed", here);
      it.classList.toggle("off", isOff(it.layer, it.head));
      const side = others.findIndex(isAt(it.layer, it.head));
      it.style.setProperty("--side", side >= 0 ? sideColour(side + 1) : here && others.length ? sideColour(0) : "");
      it.classList.toggle("side", side >= 0);
      const trace = snapshot().layer(it.layer);
      const query = trace.picture ? chosen.query : null;
      const { registers } = chosen;
      if (it.painted === trace && it.dark === store.isDark && it.query === query && it.registers === registers) continue;
      Object.assign(it, { painted: trace, dark: store.isDark, query, registers });
      paintTile(it.firstChild, trace, it.head, pixels, query);
    }
  }
  function paintTile(canvas, trace, head, pixels, query) {
    if (trace.picture) {
      const { rows, columns } = trace.picture, row = query === null ? trace.received(head) : trace.drawn(head, query);
      const { weights, top } = patchesOf(trace, head, row);
      fillCells(canvas, rows, columns, (cell) => shareColour((weights[cell] || 0) / top));
      canvas.classList.toggle("coarse", rows < pixels);
      return;
    }
    const grid = trace.weights.grid(head, false), isBlocked = blockedIn(trace, trace.weights, head, false);
    fillCells(canvas, grid.rows, grid.columns, (cell) => isBlocked(cell) ? null : shareColour(grid.values[cell]));
    canvas.classList.toggle("coarse", grid.rows < pixels);
  }
  function walkGrid(event) {
    const from = store.tiles.indexOf(event.target.closest(".tile"));
    if (from < 0) return;
    const columns = byId("grid").columns;
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Enter" && !store.isAdding) {
      event.preventDefault();
      byId("picture").focus();
    }
    if (!by) return;
    event.preventDefault();
    const to = store.tiles[Math.max(0, Math.min(store.tiles.length - 1, from + by))];
    if (!store.isAdding) go({ layer: to.layer, head: to.head });
    to.focus();
  }
  function drawHeadLine() {
    const { layer, head } = state(), it = snapshot().finding(layer, head);
    const does = it ? [...writes(it) ? [writingLabel()] : [], ...isByEntropy(it) ? [] : /* @__PURE__ */ new Set([rowOf(it), ...labelsOf(it)])] : [];
    const named = does.flatMap((label, i) => [i ? ", " : ": ", make("em", {}, label), overWords(it, label)]);
    byId("head-title").replaceChildren(namedWithPart(layer, placeInWords(layer, head)), ...named);
    byId("head-title").title = byId("head-title").textContent;
    const why = it && snapshot().data.effects_withheld, effect = effectOf(it), others = othersInWords(it);
    const short2 = why ? "without it: not measured" : effect ? `without it: ${effect.without}` : "";
    const sentence2 = why || (effect?.sentence ?? "");
    Object.assign(byId("effect"), {
      textContent: others ? `${short2}. ${others}` : short2,
      title: others ? `${sentence2} ${STAND_IN}` : sentence2
    });
    drawExample(layer, head, it);
    const isHeadOff = isOff(layer, head);
    byId("head-lead").classList.toggle("roomy", Boolean(it));
    byId("head-lead").textContent = isHeadOff ? "It is switched off: its output is 0." : it ? leadOf(it) : stepsInWords();
    byId("head-lead").title = it && !isHeadOff ? [it.evidence, it.withheld, sharesInWords(it)].filter(Boolean).join("\n") : "";
  }
  function drawExample(layer, head, it) {
    const isOther = layer !== chosen.layer || head !== chosen.head;
    byId("example").style.visibility = isOther ? "hidden" : "";
    if (isOther) return;
    const trace = snapshot().layer(layer), { query } = chosen, label = it ? rowOf(it) : "", last = trace.size.q - 1;
    const writer2 = snapshot().writers(trace, last).find((x) => x.layer === layer && x.head === head);
    const isShown = writer2 ? query === last : query !== null && shownWeight(trace, head, query, label)[0] > 0;
    const isLeftOut = isShown || !trace.isOneText || trace.size.k > MANY_WORDS || isOff(layer, head);
    const best = isLeftOut ? null : writer2 ? last : exampleOf(trace, head, label);
    byId("example").hidden = best === null;
    if (best === null) return;
    const key = writer2 ? writer2.key : shownWeight(trace, head, best, label)[1];
    byId("example").textContent = `seen at “${isolated(clip(trace.queries[best], 10))}” → “${isolated(clip(trace.keys[key], 10))}”`;
    byId("example").query = best;
  }
  function namedWithPart(layer, name) {
    const { part } = snapshot().layer(layer);
    return part ? `${name} (${part})` : name;
  }
  function overWords(it, label) {
    const [mass, queries] = it.masses[it.roles.indexOf(label)] ?? [];
    return mass === void 0 ? "" : make("small", {}, ` ${number(mass, 2)} over ${count(queries, "token")}`);
  }
  function leadOf(it) {
    const says = isByEntropy(it) ? `It looks at ${amountOf(it)} ${meaningOf(it.labels)}.` : `${amountOf(it)} ${meaningOf(it.labels)}.`;
    return [says, it.evidence, it.withheld].filter(Boolean).join(" ");
  }
  var STRONG = 0.5;
  var MOST_NAMED2 = 3;
  var STAND_IN = "A label describes where a head looks, and the effect measures what changes without it. The effect is small if other heads contribute the same.";
  function othersInWords(it) {
    const { layer, head, query } = state();
    if (it?.effect == null || query === null || isByEntropy(it) || it.number < STRONG) return "";
    const found = [...snapshot().findings.values()];
    const largest2 = Math.max(...found.map((other) => Math.abs(other.effect ?? 0)));
    if (Math.abs(it.effect) >= largest2 / 10 || shownTrace().size.k > MANY_WORDS) return "";
    const looking = headsThatLook(snapshot(), query, keyOr());
    const others = without(looking, layer, head);
    if (!others.length || others.length === looking.length) return "";
    const named = others.slice(0, MOST_NAMED2).map((at) => placeName(...at)), more = others.length - named.length;
    const names = more ? [...named, `${more} more`] : named;
    return names.length === 1 ? `Head ${names[0]} looks there, too.` : `Heads ${names.slice(0, -1).join(", ")} and ${names.at(-1)} look there, too.`;
  }
  var sharesInWords = (it) => Object.entries(it.shares ?? {}).map(([name, share]) => `${shareName(name)} ${percent(share)}`).join(", ");
  function stepsInWords() {
    const { size } = shownTrace();
    return `${count(size.q, "query", "queries")}, ${count(size.k, "key")}` + (size.d ? `, ${count(size.d, "feature")} per head` : "");
  }

  // src/pictures/lines.js
  var ROW = 22;
  var LEAST_ROW = 15;
  function drawLines(width, height) {
    const all = sides(), scene = new Scene(width, height), bar3 = 36;
    const panels = (store.edited || isBeside()) && !chosen.difference ? all.map((side) => [side]) : [all];
    const wide = (width - 30 * (panels.length - 1)) / panels.length;
    const isNamed = all.length > 1 && !chosen.difference;
    const cut = panels.map((members, i) => linesPanel(scene, members, i * (wide + 30), wide, height - bar3, isNamed));
    if (chosen.difference && all.length === 2) {
      const words = fitted(`${all[1].name} minus ${all[0].name}:`, width - 90, {});
      const more = widthOf(words) + 10, less = more + widthOf("more", { bold: true }) + 12;
      scene.text(words, 0, height - 16, { fill: "soft" });
      scene.text("more", more, height - 16, { fill: css(signedColour(1, 1)), bold: true });
      scene.text("less", less, height - 16, { fill: css(signedColour(-1, 1)), bold: true });
    } else {
      const legend2 = `Lines for weights of ${percent(chosen.threshold)} or more; wider lines for larger weights`;
      scene.text(legend2 + (cut.includes(true) ? "; ⋮ words that do not fit" : ""), 0, height - 16, { size: 12, fill: "soft" });
    }
    return scene;
  }
  function linesPanel(scene, members, x, width, height, isNamed) {
    const { trace, query, key, back: back2 } = members[0];
    const heading = 26;
    const most = Math.max(4, Math.floor((height - heading) / LEAST_ROW));
    const stored = trace.stored(members[0].head), queries = around(stored, most, query ?? stored.at(-1));
    const keys = keysToShow(members, queries, most);
    const row = Math.min(ROW, (height - heading) / Math.max(queries.length, keys.length));
    const middle = (i) => heading + (i + 0.5) * row;
    const label = Math.min(150, width * 0.26), size = Math.max(12, Math.min(15, row - 4));
    const [left, right] = [x + label, x + width - label];
    scene.text("query", left - 8, 10, { size: 12, fill: "soft", align: "right" });
    scene.text("key", right + 8, 10, { size: 12, fill: "soft" });
    if (isNamed) {
      members.forEach((side, i) => scene.text(
        side.name,
        left + 20 + 96 * i,
        10,
        { size: 13, bold: true, fill: sideColour(side.colour) }
      ));
    }
    const rowsOfSides = members.map((side) => new Map(queries.filter((q) => q !== null).map((q) => [q, side.trace.row(side.trace.used, side.head, q) ?? []])));
    const isFaint = (q, k) => query !== null && q !== query || query === null && key !== null && k !== key;
    const line2 = (i, j, weight, colour, q, k) => {
      const [y1, y2] = [middle(i), middle(j)], faint = isFaint(q, k), bend = (left + right) / 2;
      scene.path(
        `M ${left} ${y1} C ${bend} ${y1} ${bend} ${y2} ${right} ${y2}`,
        {
          stroke: colour,
          line: 0.75 + Math.min(row - 3, 9) * Math.min(1, weight),
          opacity: faint ? 0.1 : 0.35 + 0.6 * Math.min(1, weight)
        },
        { weight, query: q, key: k }
      );
    };
    const drawn2 = [];
    queries.forEach((q, i) => q !== null && keys.forEach((k, j) => {
      if (k === null) return;
      if (chosen.difference && members.length === 2) {
        const change = (rowsOfSides[1].get(q)[k] ?? 0) - (rowsOfSides[0].get(q)[k] ?? 0);
        if (Math.abs(change) >= chosen.threshold) {
          drawn2.push([i, j, Math.abs(change), css(signedColour(Math.sign(change), 1)), q, k]);
        }
      } else {
        members.forEach((side, s) => {
          const weight = rowsOfSides[s].get(q)[k];
          if (weight >= chosen.threshold && weight >= LEAST) {
            drawn2.push([i, j, weight, isNamed ? sideColour(side.colour) : "accent", q, k]);
          }
        });
      }
    }));
    if (!drawn2.length) {
      scene.text(
        `no weight of ${percent(chosen.threshold)} or more`,
        (left + right) / 2,
        height / 2,
        { fill: "soft", align: "center" }
      );
    }
    for (const it of drawn2.sort((a, b) => Number(isFaint(b[4], b[5])) - Number(isFaint(a[4], a[5])) || a[2] - b[2])) line2(...it);
    const blocked = query === null ? [] : trace.blocked(members[0].head, query);
    const word = (list, i, position, labels, at, align, isChosen, target) => {
      const y = middle(i);
      if (position === null) return scene.text("⋮", at, y, { size: 12, fill: "soft", align });
      const inset = align === "right" ? at - label + 4 : at - 4;
      if (isChosen) scene.rect(inset, y - row / 2, label - 4, row, { fill: "tint", radius: 3 });
      scene.text(labels[position], at, y, {
        size,
        serif: true,
        align,
        bold: isChosen,
        room: label - 16,
        fill: list === keys && blocked[position] ? "soft" : "ink"
      });
      scene.target(inset, y - row / 2, label, row, back2(target), members[0].from.title(labels, position));
    };
    queries.forEach((q, i) => word(queries, i, q, trace.queries, left - 8, "right", q === query, { query: q, key: null }));
    keys.forEach((k, i) => word(keys, i, k, trace.keys, right + 8, "left", k === key, { query, key: k }));
    return queries.includes(null) || keys.includes(null);
  }
  function around(positions, most, centre) {
    if (positions.length <= most) return positions;
    const at = Math.max(0, positions.indexOf(centre));
    const first = Math.max(0, Math.min(positions.length - most + 2, at - Math.floor(most / 2)));
    return [
      ...first ? [null] : [],
      ...positions.slice(first, first + most - 2),
      ...first + most - 2 < positions.length ? [null] : []
    ];
  }
  function keysToShow(members, queries, most) {
    const { trace, query, key } = members[0], length = trace.size.k;
    if (length <= most) return Array.from({ length }, (_, i) => i);
    const largestOf = new Array(length).fill(void 0);
    for (const side of members) {
      for (const q of queries) {
        if (q === null) continue;
        const [least, first] = q === query ? [LEAST, 1] : [Math.max(LEAST, chosen.threshold), 0];
        side.trace.row(side.trace.used, side.head, q)?.forEach((weight, k) => {
          if (weight >= least) largestOf[k] = Math.max(largestOf[k] ?? 0, first + weight);
        });
      }
    }
    return largest(largestOf, Math.floor(most * 0.6), key ?? 0).slice(0, most);
  }

  // src/pictures/walk.js
  var WALKED = [
    "query",
    "key",
    "scores",
    "scaled",
    "capped",
    "biased",
    "masked",
    "weights",
    "dropped",
    "value",
    "output"
  ];
  var SECONDS = 2;
  var HEADING = 54;
  var STRIP_ROW = 34;
  var LEGEND2 = 34;
  var LEAST_WALK_ROW = 17;
  var MOST_WALK_ROW = 27;
  var stagesOf = (trace) => WALKED.filter((name) => trace.step(name)?.holdsNumbers).filter((name) => name !== "value" || trace.step("output"));
  function walkPlace(stages) {
    const stage = Math.min(stages.length - 1, Math.max(0, Math.ceil(walk.at) - 1));
    const share = Math.min(1, Math.max(0, walk.at - stage));
    return { stage, progress: stillOnly.matches ? 1 : share * share * (3 - 2 * share) };
  }
  function drawWalk(width, height) {
    const scene = new Scene(width, height), trace = shownTrace(), { head } = state();
    const query = queryOr(), stages = stagesOf(trace);
    const vector = (name2, axis, k) => trace.step(name2)?.along(axis, trace.at(head, query, k)), held = (k) => vector("key", "d", k);
    const key = held(keyOr()) ? keyOr() : trace.step("key")?.kept?.k?.[0] ?? 0;
    if (!stages.includes("query") || !stages.includes("key") || !trace.row(trace.weights, head, query) || !trace.step("scores") || !trace.row(trace.step("scores"), head, query) || !held(key) || !vector("query", "d", key)) return null;
    const { stage, progress } = walkPlace(stages);
    const name = stages[stage], step = trace.step(name);
    const is = (other) => stages.indexOf(other) >= 0 && stages.indexOf(other) <= stage;
    const isNow = (other) => name === other;
    scene.text(`${stage + 1}  ${name}`, 0, 13, { size: 17, bold: true, serif: true });
    const after = 30 + widthOf(`${stage + 1}  ${name}`, { size: 17, bold: true, serif: true });
    const headed = after + widthOf(step.formula, { size: 16, serif: true });
    let foot = 34;
    scene.text(step.formula, after, 13, { size: 16, serif: true, italic: true });
    scene.text(step.why, 0, 38, { size: 14, serif: true, fill: "soft", room: width });
    const used = trace.row(trace.used, head, query);
    const room = height - HEADING - 2 * STRIP_ROW - 12 - LEGEND2;
    const most = Math.max(3, Math.floor(room / LEAST_WALK_ROW));
    const keys = keysOfWalk(trace, used, trace.blocked(head, query), key, most).filter(held);
    const high = Math.min(MOST_WALK_ROW, Math.max(LEAST_WALK_ROW, room / keys.length)), size = Math.min(14, high - 4);
    const label = Math.min(120, width * 0.18), strip = (width - label) * (width < 520 ? 0.34 : 0.42);
    const bars = { x: label + strip + 18, width: width - label - strip - 18 - 66 };
    const rowY = (i) => HEADING + STRIP_ROW + i * high, cellHeight = Math.round(high * 0.7);
    const endY = rowY(keys.length) + 10;
    const byNorm = trace.normWeighted(head, query), largest2 = Math.max(1e-30, ...byNorm ?? []);
    const q = vector("query", "d", key), vectors = keys.map(held), values = keys.map((k) => vector("value", "v", k));
    const products = vectors.map((vector2) => vector2.map((x, d) => x * q[d]));
    const most1 = (lists) => Math.max(1e-30, ...lists.flat().map(Math.abs));
    const named = (
      /** @type {const} */
      { serif: true, align: "right", room: label - 12 }
    );
    scene.text(trace.queries[query], label - 10, HEADING + 12, { ...named, size: 15, bold: true });
    const shownOfQuery = isNow("query") ? progress : 1;
    vectorCells(scene, q, label, HEADING + 3, strip, 18, most1([q]), {
      until: shownOfQuery,
      opacity: is("value") ? 0.25 : 1
    });
    if (isNow("query")) scene.text(`its ${count(q.length, "feature")}`, label + strip + 18, HEADING + 12, { fill: "soft" });
    keys.forEach((k, i) => {
      const y = rowY(i), isChosen = k === key;
      if (isChosen) scene.rect(0, y - 2, width, cellHeight + 4, { fill: "tint", radius: 3 });
      scene.text(trace.keys[k], label - 10, y + cellHeight / 2, { ...named, size, bold: isChosen });
      scene.target(0, y - 3, width, high, { query, key: k }, snapshot().title(trace.keys, k));
      if (is("key") && !is("value")) {
        const lit = isNow("scores") ? progress : is("scores") ? 1 : 0;
        const fade = is("scaled") ? isNow("scaled") ? 1 - 0.7 * progress : 0.3 : 1;
        const sweep = isNow("key") ? Math.max(0, Math.min(1, progress * (keys.length + 4) / 4 - i / 4)) : 1;
        vectorCells(scene, vectors[i], label, y, strip, cellHeight, most1(vectors), { until: sweep, opacity: fade, from: lit });
        if (lit) vectorCells(scene, products[i], label, y, strip, cellHeight, most1(products), { until: lit, opacity: fade });
      }
      if (is("value") && values[i]) {
        const part = byNorm ? 1 : Math.max(0.08, Math.sqrt(Math.abs(used[k]))), amount = isNow("value") ? 0 : progress;
        const tall = cellHeight * (byNorm ? 1 - amount * (1 - byNorm[k] / largest2) : 1);
        const appear = isNow("value") ? progress : 1 - amount * (1 - part);
        if (byNorm && isNow("output")) scene.rect(label, y, strip, cellHeight, { stroke: "rule", opacity: 0.5 });
        vectorCells(scene, values[i], label, y + (cellHeight - tall) / 2, strip, tall, most1(values), { opacity: appear });
        if (byNorm && isNow("output") && byNorm[k] >= LEAST) {
          scene.text(
            percent(byNorm[k]),
            bars.x + bars.width - 6,
            y + cellHeight / 2,
            { size: 12, align: "right", fill: used[k] > 0.8 ? "paper" : "ink" }
          );
        }
        if (isNow("output") && progress < 1 && used[k] >= LEAST) {
          vectorCells(
            scene,
            values[i],
            label,
            y + (endY - y) * progress,
            strip,
            cellHeight,
            most1(values),
            { opacity: Math.sqrt(used[k]) * 0.8 }
          );
        }
      }
    });
    if (is("scores")) walkBars(scene, { trace, head, query, keys, stages, stage, progress, products, bars, rowY, cellHeight, endY });
    if (is("output")) {
      const output = vector("output", "v", key);
      scene.text("output", label - 10, endY + 10, { size: 14, serif: true, bold: true, align: "right" });
      vectorCells(
        scene,
        output,
        label,
        endY,
        strip,
        20,
        most1([...values.filter(Boolean), output]),
        { opacity: isNow("output") ? progress : 1 }
      );
    }
    if (keys.length < trace.size.k) {
      const words = `${keys.length} of ${trace.size.k} keys, the largest weights among them`;
      const isBeside2 = headed + 24 + widthOf(words, { size: 12 }) < width;
      scene.text(words, width, isBeside2 ? 13 : endY + 44, { size: 12, fill: "soft", align: "right" });
      if (!isBeside2) foot = 54;
    }
    drawSignedBar(scene, 0, endY + foot, 1, 150, [`${MINUS}largest`, "largest"]);
    const [cells, marks] = isNow("output") && byNorm ? ["Red below 0, blue above.", "Height of a value, and percent: norm-weighted attention."] : ["A cell is a feature: red below 0, blue above.", "Bars: the numbers beside them."];
    const isHatched = keys.some((k) => trace.blocked(head, query)[k]);
    const meaning = [cells, isHatched ? `${marks} Hatched: may not look.` : marks], small = { size: 12 };
    const fits2 = (lines2) => lines2.every((line2) => widthOf(line2, small) <= width - 170);
    const lines = fits2([meaning.join(" ")]) ? [meaning.join(" ")] : meaning, isBesideBar = fits2(lines);
    const top = endY + foot + (isBesideBar ? 12 - 8 * lines.length : LEGEND2);
    lines.forEach((line2, i) => scene.text(line2, isBesideBar ? 166 : 0, top + 16 * i, { ...small, fill: "soft", room: width }));
    scene.height = Math.max(height, endY + foot + LEGEND2 - 8 + (isBesideBar ? 0 : 16 * lines.length));
    return scene;
  }
  function keysOfWalk(trace, weights, blocked, key, most) {
    if (trace.size.k <= most) return trace.keys.map((_, i) => i);
    const some = blocked.flatMap((isBlocked, i) => isBlocked ? [i] : []).slice(0, 3);
    const others = largest(weights.map((it, i) => blocked[i] ? void 0 : it), most - some.length, key).filter((i) => i !== null && !some.includes(i)).slice(0, most - some.length);
    return [...others, ...some].sort((a, b) => a - b);
  }
  function vectorCells(scene, vector, x, y, width, height, limit, { until = 1, from = 0, opacity = 1 } = {}) {
    const wide = Math.min(26, width / vector.length), gap = wide > 6 ? 1 : 0;
    const [first, last] = [Math.floor(from * vector.length), Math.ceil(until * vector.length)];
    for (let i = first; i < last; i++) {
      scene.rect(x + i * wide, y, wide - gap, height, { fill: css(signedColour(vector[i], limit)), opacity });
    }
    if (last > first) scene.rect(x + first * wide, y, (last - first) * wide - gap, height, { stroke: "rule", opacity });
  }
  function walkBars(scene, { trace, head, query, keys, stages, stage, progress, products, bars, rowY, cellHeight, endY }) {
    const pairs = stages.slice(0, stage + 1).filter((name2) => trace.step(name2).isPair);
    const name = pairs.at(-1), isNow = stages[stage] === name;
    const rowOfStep = (it) => trace.row(trace.step(it), head, query);
    const after = rowOfStep(name), before = pairs.length > 1 ? rowOfStep(pairs.at(-2)) : null;
    const isShare = trace.step(name).isShare, wasShare = before && trace.step(pairs.at(-2)).isShare;
    const p = isNow ? progress : 1;
    const reach = (row) => Math.max(1e-9, ...keys.map((k) => Number.isFinite(row[k]) ? Math.abs(row[k]) : 0));
    const middle = bars.x + bars.width / 2;
    let limit = reach(isShare ? wasShare ? before : before ?? after : after);
    let shrink = p;
    if (name === "scaled" && before) {
      shrink = Math.min(1, 2 * p);
      const zoom2 = Math.max(0, 2 * p - 1);
      limit = reach(before) ** (1 - zoom2) * reach(after) ** zoom2;
    } else if (before && !isShare) limit = Math.max(reach(before), reach(after));
    const rightEnd = bars.x + bars.width + 62;
    keys.forEach((k, i) => {
      const y = rowY(i), height = cellHeight;
      const write2 = (text, fill = "ink") => scene.text(text, rightEnd, y + height / 2, { align: "right", fill });
      const isBlocked = after[k] === -Infinity || isShare && trace.blocked(head, query)[k];
      let value = after[k];
      if (name === "scores" && p < 1) value = sum(products[i].slice(0, Math.ceil(p * products[i].length)));
      else if (before && Number.isFinite(before[k]) && Number.isFinite(after[k])) {
        value = before[k] + (after[k] - before[k]) * shrink;
      }
      if (isBlocked) {
        scene.rect(bars.x, y, bars.width, height * (name === "masked" ? p : 1), { hatch: true });
        write2(isShare ? "0" : p > 0.5 ? MINUS + "∞" : number(before?.[k] ?? 0), "soft");
        return;
      }
      if (isShare) {
        const grown = wasShare ? value : after[k] * p, x0 = bars.x;
        scene.rect(x0, y, bars.width, height, { fill: "rule", opacity: 0.45, radius: 2 });
        scene.rect(x0, y, bars.width * Math.max(0, Math.min(1, grown)), height, { fill: "accent", radius: 2 });
        write2(number(grown));
        return;
      }
      const size = bars.width / 2 / limit;
      if (name === "scaled" && before) {
        const trace1 = Math.max(-1, Math.min(1, before[k] / limit)) * bars.width / 2;
        scene.rect(Math.min(middle, middle + trace1), y, Math.abs(trace1), height, { stroke: "soft", dash: [3, 3], opacity: 0.5 });
      }
      scene.rect(
        Math.min(middle, middle + value * size),
        y,
        Math.abs(value * size),
        height,
        { fill: css(signedColour(Math.sign(value) * 0.8, 1)), radius: 2 }
      );
      write2(number(value));
    });
    if (isShare) {
      let x = bars.x;
      const total = sum(keys.map((k) => Math.max(0, after[k])));
      for (const k of keys) {
        const wide = bars.width * Math.max(0, after[k]) * p / Math.max(1, total);
        scene.rect(x, endY, wide, 14, { fill: css(shareColour(Math.max(0.05, after[k]))) });
        x += wide;
      }
      scene.rect(bars.x, endY, bars.width, 14, { stroke: "ink" });
      scene.text(`Σ ${number(total * p)}`, rightEnd, endY + 7, { align: "right", size: 13 });
    } else {
      scene.path(`M ${middle} ${rowY(0) - 4} V ${endY - 4}`, { stroke: "soft" });
      if (name === "scaled") {
        scene.text("dashed: without scaling", middle, endY + 20, { size: 12, fill: "soft", align: "center" });
      }
      scene.text(number(-limit, 2), bars.x, endY + 4, { size: 12, fill: "soft" });
      scene.text("0", middle, endY + 4, { size: 12, fill: "soft", align: "center" });
      scene.text(number(limit, 2), bars.x + bars.width, endY + 4, { size: 12, fill: "soft", align: "right" });
    }
  }
  function walkOptions() {
    const stages = stagesOf(shownTrace());
    const scrub = make("input", {
      type: "range",
      id: "scrub",
      min: 0,
      max: stages.length,
      step: 0.01,
      value: walk.at,
      "aria-label": "Position of the walk",
      input: () => {
        pauseWalk();
        walk.at = Number(scrub.value);
        screen.drawPicture();
      }
    });
    const speed = make(
      "select",
      { id: "speed", "aria-label": "Speed", change: () => {
        walk.speed = Number(speed.value);
      } },
      [0.25, 0.5, 1, 2].map((it) => make("option", { value: it, selected: it === walk.speed }, `${it}×`))
    );
    return [
      button({ id: "back", "aria-label": "Step back" }, () => stepWalk(-1), "◀ Step"),
      button({ id: "play" }, toggleWalk, walk.isPlaying ? "Pause" : "Play"),
      button({ id: "forth", "aria-label": "Step forward" }, () => stepWalk(1), "Step ▶"),
      scrub,
      speed
    ];
  }
  function stepWalk(by) {
    pauseWalk();
    const stages = stagesOf(shownTrace()), { stage } = walkPlace(stages);
    walk.at = Math.max(1, Math.min(stages.length, stage + 1 + by));
    screen.drawPicture();
  }
  var toggleWalk = () => walk.isPlaying ? pauseWalk() : playWalk();
  function playWalk() {
    const length = stagesOf(shownTrace()).length;
    if (walk.at >= length) walk.at = 0;
    walk.isPlaying = true;
    walk.last = performance.now();
    const tick = (now) => {
      if (!walk.isPlaying) return;
      walk.at = Math.min(length, walk.at + Math.max(0, now - walk.last) / 1e3 / SECONDS * walk.speed);
      walk.last = now;
      if (walk.at >= length) walk.isPlaying = false;
      screen.drawPicture();
      if (walk.isPlaying) walk.frame = requestAnimationFrame(tick);
    };
    walk.frame = requestAnimationFrame(tick);
    screen.drawPicture();
  }
  function beginWalk() {
    walk.at = stillOnly.matches ? stagesOf(shownTrace()).length : 0;
    if (stillOnly.matches) screen.drawPicture();
    else playWalk();
  }
  function pauseWalk() {
    walk.isPlaying = false;
    cancelAnimationFrame(walk.frame);
    if (byId("play")) byId("play").textContent = "Play";
  }

  // src/pictures/numbers.js
  var WRITTEN = { scores: dotProduct, weights: exponentials, output: weightedSum };
  var selection = (changes = {}) => {
    const { h, q, k } = { h: state().head, q: queryOr(), k: keyOr(), ...changes };
    return { ...changes, ...shownTrace().at(h, q, k) };
  };
  var rowOf3 = (step) => shownTrace().row(step, state().head, queryOr());
  var earlierPair = (step) => shownTrace().pairs[shownTrace().pairs.indexOf(step) - 1];
  var write = (step) => holds(step) ? (WRITTEN[step.name] ?? (step.isPair ? beforeAndAfter : rowsOf))(step) : elsewhere(step);
  function holds(step) {
    const indices = selection();
    return step === shownTrace().weights && rowOf3(step)?.some((weight) => weight !== void 0) || step.holdsNumbers && "hgq".split("").every((letter) => step.indexOf[letter]?.has(indices[letter]) ?? true);
  }
  function elsewhere(step) {
    if (canCompute()) {
      computeSteps();
      return [paragraph("Computing the steps of this layer.")];
    }
    const { h, q } = step.kept, at = state(), to = q && !q.includes(queryOr()) ? { query: q[0] } : {};
    const heads = h ?? (step.holdsNumbers ? [at.head] : []), others = [...snapshot().exactHeads()];
    const [layer, head] = heads.length ? [at.layer, heads.includes(at.head) ? at.head : heads[0]] : others[0] ?? [];
    const why = paragraph(isLong(shownTrace()) ? "This text is too long to store every step of every head." : "With every step of every head this page would be large.", head === void 0 ? "" : " It has them for " + (heads.length ? `${heads.map((it) => placeName(at.layer, it)).join(", ")} in this layer.` : `${count(others.length, "head")} in other layers.`));
    if (head === void 0) return [why];
    return [why, button({}, () => go({ layer, head, ...to }), `Go to ${placeName(layer, head)}${to.query === void 0 ? "" : `, query ${to.query}`}`)];
  }
  var MOST_TOKENS = 512;
  var isLong = ({ size }) => Math.max(size.q, size.k) > MOST_TOKENS;
  var canCompute = () => Boolean(store.source?.can.steps) && !isBeside() && !isLong(shownTrace());
  var requested = null;
  async function computeSteps() {
    const from = snapshot(), { layer } = chosen;
    if (requested?.from === from && requested.layer === layer) return;
    requested = { from, layer };
    await answered(async () => {
      const data = await store.source?.steps?.(from.text, chosen.edits, layer);
      if (!data || snapshot() !== from) return;
      from.addSteps(layer, data);
      requested = null;
      screen.fillAll();
      screen.draw();
      if (chosen.view === "walk") beginWalk();
    });
  }
  function fillStages() {
    const { steps } = shownTrace();
    return make("div", { class: "stages", role: "group", "aria-label": "Step" }, steps.map((step, stage) => button(
      { "aria-pressed": stage === chosen.stage },
      () => go({ stage }),
      make("span", { class: "ordinal" }, stage + 1),
      step.name
    )));
  }
  function turnStage(by) {
    const last = shownTrace().steps.length - 1;
    go({ stage: Math.max(0, Math.min(last, chosen.stage + by)) });
  }
  function drawNumbers() {
    const trace = shownTrace(), query = queryOr(), key = keyOr();
    byId("panel").replaceChildren(
      make(
        "p",
        { class: "hint" },
        "Query ",
        queryToken(query),
        ` (position ${trace.numbered("q", query)}), key `,
        keyToken(key),
        ` (position ${trace.numbered("k", key)}). The left and right arrow keys change the step.`
      ),
      stepArticle(Math.min(chosen.stage, trace.steps.length - 1))
    );
  }
  function stepArticle(stage) {
    const step = shownTrace().steps[stage];
    const shape = step.shape.map(([letter, size]) => make("span", {}, `${step.axis_names[letter]} `, make("b", {}, size)));
    return make(
      "article",
      { class: "step", "data-step": step.name },
      make("h3", {}, make("span", { class: "ordinal" }, stage + 1), step.name),
      make("p", { class: "formula" }, step.formula),
      make("p", { class: "why" }, step.why),
      make("p", { class: "shape" }, "shape ", ...shape),
      ...write(step)
    );
  }
  var paragraph = (...words) => make("p", {}, ...words);
  function rowsOf(step) {
    const free = step.axes.filter((letter) => !"hg".includes(letter));
    const down = free.find((letter) => "qk".includes(letter)) ?? free.at(-2);
    const across = free.filter((letter) => letter !== down).at(-1);
    const marked = { q: queryOr(), k: keyOr() }[down];
    const length = step.shape.find(([letter]) => letter === down)?.[1] ?? 1;
    const positions = step.kept[down] ?? Array.from({ length }, (_, i) => i);
    const read = (position) => step.along(across ?? "", selection(down ? { [down]: position } : {}));
    const shown = elide(positions.length, 12, Math.max(0, positions.indexOf(marked)));
    const features = ends2(read(positions[0]).length, 10);
    const write2 = (value) => step.integer ? String(value) : number(value);
    const label = (position) => ({ q: queryToken, k: keyToken })[down]?.(position) ?? (down ? `${step.axis_names[down]} ${position}` : "all tokens");
    const rows = shown.map((i) => {
      if (i === null) return gapRow(features.length + 1);
      const position = positions[i], values = read(position);
      return {
        kind: position === marked ? "chosen" : "",
        cells: [label(position), ...features.map((j) => j === null ? "…" : write2(values[j]))]
      };
    });
    const names = features.map((j) => j === null ? "…" : across ? `${across} ${j}` : step.name);
    const each = "qk".includes(down) ? "token" : step.axis_names[down];
    const how = shown.includes(null) ? `some of its ${positions.length} rows, one for each ${each}` : `a row for each ${each}`;
    return [table(`${step.name}, ${how}`, [step.axis_names[down] ?? "", ...names], rows)];
  }
  function beforeAndAfter(step) {
    const earlier = earlierPair(step);
    const after = rowOf3(step), before = earlier && rowOf3(earlier);
    const note = (i) => {
      if (!before) return "";
      if (after[i] === -Infinity && before[i] !== -Infinity) return "may not look";
      if (step.name === "dropped" && after[i] === 0 && before[i] !== 0) return "dropped";
      if (step.name === "biased") return `bias ${number(after[i] - before[i])}`;
      return "";
    };
    const shown = elide(after.length, 12, keyOr());
    const rows = shown.map((i) => i === null ? gapRow(4) : {
      kind: [i === keyOr() ? "chosen" : "", after[i] === -Infinity ? "masked" : ""].join(" "),
      cells: [keyToken(i), before ? number(before[i]) : "", number(after[i]), note(i)]
    });
    const blocked = after.filter((score) => score === -Infinity).length;
    return [
      ...oneKey(step, before?.[keyOr()], after[keyOr()]),
      ...step.name === "masked" ? [paragraph(
        blocked ? `This query may not look at ${count(blocked, "key")} of ${after.length}.` : "This query may look at every key."
      )] : [],
      table(
        `The row of this query, ${earlier?.name ?? "nothing"} before and ${step.name} after`,
        ["key", earlier?.name ?? "before", step.name, "note"],
        rows,
        "narrow"
      )
    ];
  }
  function oneKey(step, before, after) {
    const { scale: scale2, softcap, dropout } = shownTrace().settings;
    const calculation = {
      scaled: scale2 !== void 0 && ` × ${precise(scale2)} = `,
      capped: softcap !== void 0 && `: ${precise(softcap)} × tanh(${number(before)} / ${precise(softcap)}) = `,
      dropped: dropout !== void 0 && after !== 0 && ` ÷ (1 ${MINUS} ${precise(dropout)}) = `
    }[step.name];
    if (!calculation || before === void 0) return [];
    return [make("p", { class: "sum" }, keyToken(keyOr()), " ", number(before), calculation, make("b", {}, number(after)))];
  }
  function dotProduct(step) {
    const row = rowOf3(step), result = row[keyOr()];
    const q = shownTrace().step("query")?.along("d", selection());
    const k = shownTrace().step("key")?.along("d", selection());
    const parts = [];
    if (q && k) {
      const products = q.map((value, i) => value * k[i]);
      const shown = ends2(products.length, 10);
      const rest = products.filter((_, i) => !shown.includes(i));
      const line2 = (name, values, kind, end = "") => ({
        kind,
        cells: [name, ...shown.map((i) => i === null ? end || "…" : number(values[i]))]
      });
      const left = sum(rest);
      parts.push(
        table(
          "The dot product of this query and the selected key, feature by feature",
          ["feature", ...shown.map((i) => i === null ? `${rest.length} more` : String(i))],
          [
            line2(["query ", queryToken(queryOr())], q),
            line2(["key ", keyToken(keyOr())], k),
            line2("product", products, "total", number(left))
          ]
        ),
        make(
          "p",
          { class: "sum" },
          shown.map((i) => {
            const value = i === null ? left : products[i];
            return (value < 0 ? ` ${MINUS} ` : " + ") + number(Math.abs(value));
          }).join("").replace(/^ \+ /, "").replace(/^ − /, MINUS),
          " = ",
          make("b", {}, number(result))
        )
      );
    } else {
      parts.push(paragraph("This page does not have the features of this key."));
    }
    const keys = elide(row.length, 12, keyOr());
    parts.push(table(
      "The same for every key: the row of this query",
      ["query", ...keys.map((i) => i === null ? "…" : keyToken(i))],
      [{
        cells: [queryToken(queryOr()), ...keys.map((i) => i === null ? "…" : number(row[i]))]
      }]
    ));
    return parts;
  }
  function exponentials(step) {
    const earlier = earlierPair(step);
    const after = rowOf3(step), before = earlier && rowOf3(earlier);
    const total = sum(after);
    if (before?.every((score) => score === -Infinity)) {
      return [paragraph("This query is fully masked, so every weight is 0.")];
    }
    if (!before) {
      const known2 = after.filter((weight) => weight !== void 0).length;
      const rows2 = largest(after, 12, after.findIndex((weight) => weight !== void 0));
      return [table(
        known2 < after.length ? `The ${known2} largest weights of this query` : "The weights of this query",
        ["key", "weight", "share"],
        rows2.map((i) => i === null ? gapRow(3) : { cells: [keyToken(i), number(after[i]), bar(after[i])] }),
        "narrow"
      )];
    }
    const shown = largest(after, 12, keyOr());
    const rest = after.map((_, i) => i).filter((i) => !shown.includes(i));
    const add = (values) => sum(rest.map((i) => values[i]));
    const peak = Math.max(...before.filter((score) => !Number.isNaN(score)));
    const exps = before.map((score) => Math.exp(score - peak));
    const divisor = sum(exps);
    const rows = shown.map((i) => i === null ? gapRow(6) : {
      kind: [i === keyOr() ? "chosen" : "", before[i] === -Infinity ? "masked" : ""].join(" "),
      cells: [
        keyToken(i),
        number(before[i]),
        number(before[i] - peak),
        number(exps[i]),
        number(after[i]),
        bar(after[i])
      ]
    });
    if (rest.length) {
      rows.push({ kind: "", cells: [count(rest.length, "more key"), "", "", number(add(exps)), number(add(after)), ""] });
    }
    rows.push({ kind: "total", cells: ["sum", "", "", number(divisor), number(total), ""] });
    const parts = [table(
      "From scores to weights",
      ["key", "x", `x ${MINUS} max`, "exp", "÷ sum = weight", "share"],
      rows
    )];
    const sinkWeight = 1 - total;
    if (sinkWeight > 1e-4) {
      parts.push(paragraph(
        `The weights sum to ${number(total)}: a sink, which has no value, `,
        `takes the other ${number(sinkWeight)}. So the sum to divide by is ${number(divisor / total)}.`
      ));
    }
    parts.push(make(
      "p",
      { class: "sum" },
      keyToken(keyOr()),
      " ",
      `exp(${number(before[keyOr()] - peak)}) / ${number(divisor / total)} = `,
      make("b", {}, number(after[keyOr()]))
    ));
    return parts;
  }
  function weightedSum(step) {
    const share = rowOf3(shownTrace().used), values = shownTrace().step("value");
    const result = step.along("v", selection()) ?? [];
    const features = ends2(result.length, 4);
    const cells = (row) => features.map((j) => j === null ? "…" : row ? number(row[j]) : "?");
    const shown = largest(share.map(Math.abs), 8, keyOr());
    const given = new Map(shown.filter((i) => i !== null).map((i) => [i, values?.along("v", selection({ k: i }))]));
    const product = (i) => given.get(i)?.map((value) => share[i] === 0 ? 0 : share[i] * value);
    const rows = shown.map((i) => i === null ? gapRow(2 + 2 * features.length + 1) : {
      kind: i === keyOr() ? "chosen" : "",
      cells: [keyToken(i), number(share[i]), ...cells(given.get(i)), "=", ...cells(product(i))]
    });
    const rest = share.length - given.size;
    if (rest) {
      const sums = [...given.keys()].reduce(
        (left, i) => left.map((value, j) => value - (product(i)?.[j] ?? NaN)),
        result
      );
      rows.push({ kind: "", cells: [
        count(rest, "more key"),
        "",
        ...features.map(() => ""),
        "=",
        ...sums.some(Number.isNaN) ? features.map(() => "…") : cells(sums)
      ] });
    }
    rows.push({ kind: "total", cells: ["output", "", ...features.map(() => ""), "=", ...cells(result)] });
    const names = features.map((j) => j === null ? "…" : `v ${j}`);
    return [table(
      "Each value times its weight; the output is their sum",
      ["key", "weight ×", ...names, "=", ...names],
      rows
    )];
  }

  // src/pictures/why.js
  var known = /* @__PURE__ */ new WeakMap();
  var newest = { from: (
    /** @type {Snapshot | null} */
    null
  ), name: "", refusal: "" };
  var NEXT = "next";
  var trail = { pairs: (
    /** @type {Pair[]} */
    []
  ), at: "" };
  var drawn = (
    /** @type {any[]} */
    []
  );
  var line = make("p", { class: "because", role: "status" });
  var against = "others";
  var AGAINST = { others: "the mean of the other keys", weights: "the keys by weight", nothing: "nothing: the score itself" };
  var nameOf = ({ layer, head, query, key }, to = against) => [layer, head, query, key, to].join(" ");
  var signed = (x) => Math.abs(x) < 5e-3 ? "0.00" : `${x < 0 ? MINUS : "+"}${Math.abs(x).toFixed(2)}`;
  var paragraph2 = (kind, ...words) => make("p", { class: kind }, ...words);
  var placed = (labels, position, most = 24) => make("span", {}, make("strong", {}, tokenIn(labels, position, most)), ` (${position})`);
  var queryIn = ({ layer, query }) => placed(snapshot().layer(layer).queries, query);
  var keyIn = ({ layer, key }) => placed(snapshot().layer(layer).keys, key);
  function selected() {
    const { layer, head } = chosen, trace = snapshot().layer(layer), query = chosen.query ?? trace.stored(head).at(-1);
    if (query === void 0) return null;
    const row = trace.row(trace.used, head, query) ?? [], key = chosen.key ?? largestAt(row);
    return chosen.key === null && !(row[key] > 0) ? null : { layer, head, query, key };
  }
  function drawWhy() {
    const pair = selected(), from = snapshot(), name = pair ? nameOf(pair) : "";
    if (trail.at === NEXT) trail.at = name;
    else if (trail.at !== name) trail = { pairs: [], at: "" };
    const answer = answersOf(from).get(name), shown = [from, name, answer, newest.refusal];
    if (byId("panel").contains(line) && shown.every((it, i) => it === drawn[i])) return;
    drawn = shown;
    byId("panel").replaceChildren(...back(), ...contents(from, pair, answer), ...comparison(from, pair));
    drawn[3] = newest.refusal;
  }
  function contents(from, pair, answer) {
    if (!pair) return [say2("The page does not have the weights of this token. Choose another token, or a key of it.")];
    if (answer) return written(answer);
    if (from.layer(pair.layer).blocked(pair.head, pair.query)[pair.key]) {
      return [say2(...asked2(pair), "this query may not look at this key, so there is nothing to explain.")];
    }
    return store.source?.why ? [requested2(from, pair)] : onlyIn(from, pair);
  }
  function answersOf(from) {
    const answers = known.get(from) ?? new Map((from.data.why ?? []).map((it) => [nameOf(it, it.against), it]));
    known.set(from, answers);
    return answers;
  }
  function say2(...words) {
    line.replaceChildren(...words);
    return line;
  }
  var asked2 = (pair) => [`${placeInWords(pair.layer, pair.head)} at `, queryIn(pair), " and the key ", keyIn(pair), ": "];
  function requested2(from, pair) {
    if (newest.from !== from || newest.name !== nameOf(pair)) ask(from, pair);
    return say2(...asked2(pair), newest.refusal || "computing what wrote its query and its key.");
  }
  async function ask(from, pair) {
    const request = newest = { from, name: nameOf(pair), refusal: "" };
    try {
      const to = AGAINST[against] ? against : Number(against);
      const answer = await store.source?.why?.(from.text, chosen.edits, { ...pair, against: to });
      if (answer) answersOf(from).set(request.name, answer);
    } catch (error) {
      request.refusal = error instanceof Error ? error.message : String(error);
    }
    if (request === newest && chosen.view === "why") screen.drawPicture();
  }
  function onlyIn(from, pair) {
    const { why = [], why_withheld } = from.data, command = commandFor(from.text);
    const links = why.flatMap((it, i) => [i ? ", " : "", link({}, it, placeName(it.layer, it.head)), " at ", queryIn(it), " and ", keyIn(it)]);
    const copyButton = button({ class: "quiet" }, () => copy(copyButton, command ?? ""), "Copy");
    return [
      say2(...asked2(pair), "this page does not have what wrote its query and its key. ", why_withheld ?? ""),
      links.length ? paragraph2("", "It has it for ", ...links, ".") : "",
      command ? paragraph2("", "For every other weight, run: ", make("code", {}, command), " ", copyButton) : paragraph2("", "In Python, clearhead.why computes it.")
    ];
  }
  function comparison(from, pair) {
    if (!store.source?.why || !pair) return [];
    const trace = from.layer(pair.layer), row = trace.row(trace.used, pair.head, pair.query) ?? [];
    const others = row.map((_, key) => key).filter((key) => key !== pair.key && row[key] > 0).sort((a, b) => row[b] - row[a]).slice(0, 5).map((key) => [String(key), `${trace.keys[key]} (${key})`]);
    const options = [...Object.entries(AGAINST), ...others];
    if (!options.some(([name]) => name === against)) options.push([against, `position ${against}`]);
    const select = make(
      "select",
      { id: "against", change: () => {
        against = select.value;
        screen.drawPicture();
      } },
      options.map(([value, words]) => make("option", { value, selected: value === against }, words))
    );
    return [make("label", { class: "hint" }, "Compared with ", select)];
  }
  function written(it) {
    const sides2 = [it.wrote_key, it.wrote_query], limit = Math.max(...sides2.flatMap(({ parts }) => parts.map(({ part }) => Math.abs(part))));
    const to = AGAINST[it.against] ?? it.against;
    return [
      say2(...sentence(it)),
      paragraph2(
        "hint",
        `Weight ${it.weight.toFixed(3)}, score ${signed(it.score)}, contrast ${signed(it.contrast)} against ${to}`,
        it.softcap === null ? "." : `, before the soft cap ${it.softcap}.`,
        store.edited ? " With the edits of What if." : ""
      ),
      make("div", { class: "sides" }, sideOf(it, it.wrote_key, "key", limit), sideOf(it, it.wrote_query, "query", limit)),
      it.frequencies ? frequencies(it.frequencies) : "",
      it.further ? further(it, it.further) : "",
      paragraph2("hint", "Each list sums exactly to the contrast, with the norms frozen at this run. These are parts of a score, and no claim about causes: without a head, norms and later layers change, too. What if runs the model without it."),
      ...it.remarks.map((words) => paragraph2("hint", words))
    ];
  }
  var sentence = (it) => it.sentence.split(/position (\d+)/).map((words, i) => i % 2 === 0 ? words : i === 1 ? queryIn(it) : keyIn({ layer: it.layer, key: Number(words) }));
  function sideOf(it, side, kind, limit) {
    const [others, rest] = side.others, { keys, queries } = snapshot().layer(it.layer);
    const row = (name, part, kind2 = "") => ({ kind: kind2, cells: [name, kind2 ? "" : bar2(part, limit), signed(part)] });
    const rows = side.parts.map((part) => row(writer(it, part, it[kind]), part.part));
    if (others) rows.push(row(count(others, "other"), rest));
    return table(
      `What wrote the ${kind} ${(kind === "key" ? keys : queries)[it[kind]]} (${it[kind]})`,
      ["written by", "bar", "part"],
      [...rows, row("sums to", side.total, "total")],
      "parts sums"
    );
  }
  function writer(it, { name, head, source }, position) {
    if (!head || source === null) return name;
    const [layer, number2] = head, trace = snapshot().layer(layer);
    const key = trace.row(trace.used, number2, position)?.[source] === 0 ? null : source;
    return make(
      "span",
      {},
      link({ "data-head": head.join(".") }, { layer, head: number2, query: position, key }, placeName(...head), it),
      "read",
      placed(trace.keys, source, 12)
    );
  }
  function link(attributes, { layer, head, query, key }, words, from = null, pairs = trail.pairs) {
    return button({ class: "link", ...attributes }, () => {
      trail = { pairs: from ? [...pairs, { layer: from.layer, head: from.head, query: from.query, key: from.key }] : pairs, at: NEXT };
      go({ layer, head, query, key });
      byId("panel").focus();
    }, words);
  }
  var back = () => trail.pairs.length === 0 ? [] : [paragraph2(
    "trail",
    ...trail.pairs.flatMap((pair, i) => [link({}, pair, placeName(pair.layer, pair.head), null, trail.pairs.slice(0, i)), " ‹ "]),
    placeName(chosen.layer, chosen.head)
  )];
  function bar2(part, limit) {
    const fill = make("span", { class: part < 0 ? "minus" : "plus" });
    fill.style.width = `${50 * Math.min(1, Math.abs(part) / limit)}%`;
    return make("span", { class: "signed", "aria-hidden": "true" }, fill);
  }
  var STEP = 12;
  var HALF = 28;
  function frequencies(parts) {
    const rotated = parts.slice(0, -1), still = parts.at(-1), limit = Math.max(...rotated.map(Math.abs), 1e-9);
    const bars = rotated.map((part, i) => {
      const high = HALF * Math.abs(part) / limit;
      return makeSvg(
        "rect",
        { class: part < 0 ? "minus" : "plus", x: STEP * i + 1, y: part < 0 ? HALF : HALF - high, width: STEP - 2, height: high },
        makeSvg("title", {}, `Frequency ${i}: ${signed(part)}`)
      );
    });
    const width = STEP * rotated.length, most = rotated.reduce((best, part, i) => Math.abs(part) > Math.abs(rotated[best]) ? i : best, 0);
    const words = `By rotary frequency, from the fastest to the slowest of ${rotated.length}: the largest part is ${signed(rotated[most])} of number ${most}, and all sum to ${signed(sum(rotated))}${still ? `; not rotated ${signed(still)}` : ""}.`;
    return make("figure", {}, makeSvg(
      "svg",
      { class: "frequencies", viewBox: `0 0 ${width} ${2 * HALF}`, width, height: 2 * HALF, role: "img", "aria-label": words },
      makeSvg("line", { x1: 0, x2: width, y1: HALF, y2: HALF }),
      ...bars
    ), make("figcaption", { class: "hint" }, words));
  }
  function further({ weight, softcap }, changes) {
    const moved = [0, ...changes.map((_, i) => 2 ** i)], scores = [0, ...changes];
    const weights = scores.map((x) => 1 / (1 + (1 / weight - 1) * Math.exp(-x)));
    const row = (name, cells) => ({ kind: "", cells: [name, ...cells] });
    return table(
      "If the key were further back",
      ["tokens", ...moved.map(String)],
      [row("change of the score", scores.map((x) => signed(x))), ...softcap === null ? [row("weight", weights.map((x) => x.toFixed(3)))] : []],
      "parts further"
    );
  }

  // src/views.js
  var TABS = {
    text: {
      word: "Text",
      says: "The words, shaded by the weights of the selected one",
      draw: (width, height) => hasImage() ? drawImage(width, height) : withMap(drawText(width, height))
    },
    lines: { word: "Lines", says: "A line from each word to each word it looks at", draw: drawLines },
    map: {
      word: "Map",
      draw: drawMap,
      says: "All weights: a row for each query, a column for each key"
    },
    numbers: { word: "Numbers", says: "Every step of one query, with all its numbers" },
    // no picture
    walk: { word: "Walk", says: "The same steps as an animation", draw: drawWalk },
    why: { word: "Why", says: "What wrote the query and the key of one weight" }
    // no picture
  };
  function draw() {
    for (const tab of byId("views").children) {
      const isChosen = tab.dataset.view === chosen.view;
      if (tab.dataset.view === "text") tab.textContent = hasImage() ? "Image" : TABS.text.word;
      tab.setAttribute("aria-selected", isChosen);
      tab.tabIndex = isChosen ? 0 : -1;
    }
    drawStrip();
    drawSentence();
    drawShading();
    drawMisread();
    drawHeads();
    drawHeadLine();
    screen.drawControls();
    byId("beside").setAttribute("aria-pressed", store.isAdding);
    byId("beside").textContent = store.isAdding ? "Done" : "Compare";
    drawKeep();
    drawOptions();
    drawPicture();
  }
  function fillAll() {
    if (store.current.data.about) byId("about").textContent = store.current.data.about;
    fillStrip();
    fillHeads();
    describeWhatIsLeftOut();
  }
  function drawPicture() {
    const { view } = chosen, { clientWidth: width, clientHeight } = byId("view");
    const height = narrow.matches ? parseFloat(getComputedStyle(byId("view")).minHeight) : clientHeight;
    if (!width || !height) return;
    store.picture = TABS[view].draw?.(width, height - 4) ?? null;
    byId("frame").hidden = !store.picture;
    byId("panel").hidden = Boolean(store.picture);
    if (view === "numbers") drawNumbers();
    else if (view === "why") drawWhy();
    else if (!store.picture) {
      byId("panel").replaceChildren(...shownTrace().steps_withheld ? [make("p", {}, `The walk shows queries, keys and values. ${shownTrace().steps_withheld}`)] : elsewhere(shownTrace().step("scores") ?? shownTrace().weights));
    } else {
      const canvas = byId("picture");
      canvas.style.width = `${store.picture.width}px`;
      canvas.style.height = `${store.picture.height}px`;
      paint(canvas, store.picture);
      canvas.setAttribute("aria-label", `${TABS[view].word} of ${byId("head-title").textContent}. ${byId("sentence").textContent} Arrow keys move the query and the key.`);
    }
    drawReading();
    if (view === "walk" && !shownTrace().steps_withheld) {
      byId("scrub").value = walk.at;
      byId("play").textContent = walk.isPlaying ? "Pause" : "Play";
    }
  }
  function drawReading() {
    const trace = shownTrace(), { head, query } = state();
    const line2 = byId("reading");
    byId("why").hidden = !VIEWS.includes("why") || chosen.view === "why" || chosen.query === null;
    if (query === null && !["walk", "numbers", "why"].includes(chosen.view)) {
      line2.replaceChildren(make("span", { class: "soft" }, "Point at a word to read its numbers."));
      return;
    }
    const at = queryOr(), key = keyOr();
    const numbers = trace.pairs.filter((step) => !(step.name === "masked" && trace.row(step, head, at)?.[key] > -Infinity)).map((step) => [step.name, trace.row(step, head, at)?.[key] ?? (step.name === "weights" ? zoomedWeight(at, key) : void 0)]).filter(([, value]) => value !== void 0).flatMap(([name, value], i) => [
      i ? make("span", { class: "soft" }, "·") : "",
      make(
        "span",
        { "data-step": name, class: name === "weights" ? "shown" : "", title: stepTitle(trace.step(name)) },
        `${OF_PAIR[name] ?? name} `,
        make("b", {}, precise(value))
      )
    ]);
    line2.replaceChildren(
      make("strong", {}, queryToken(at)),
      make("span", { class: "arrow" }, " → "),
      make("strong", {}, keyToken(key)),
      ...numbers
    );
    if (trace.blocked(head, at)[key]) line2.append(make("span", { class: "soft" }, "may not look"));
  }
  var OF_PAIR = {
    scores: "score",
    scaled: "scaled score",
    capped: "capped score",
    biased: "score with bias",
    masked: "masked score",
    weights: "weight",
    dropped: "weight after dropout"
  };
  var STEP_WORDS = {
    scores: "query times key: the products of their features, added up",
    scaled: "the score times a scale, by default 1 divided by the square root of the head size",
    capped: "limited to the soft cap",
    biased: pageData.model ? "plus the learned number for this distance" : "plus a number for this query and key",
    masked: "−∞ where the query may not look at the key",
    weights: "the weight of this key for the query; the weights of all keys sum to 1",
    dropped: "the weight after dropout: 0, or scaled up"
  };
  function stepTitle({ name, formula, why }) {
    const words = STEP_WORDS[name];
    return [words && `${name}: ${words}`, formula && `${name} = ${formula}`, why].filter(Boolean).map((it) => it.replace(/\.$/, "")).join(".\n") + ".";
  }
  function drawOptions() {
    const { view } = chosen, options = byId("options"), parts = [];
    const wanted = JSON.stringify([
      view,
      chosen.step,
      chosen.difference,
      canDiffer(),
      chosen.stage,
      shownTrace().steps.map((it) => it.name),
      shownTrace().maps(state().head).length,
      chosen.others,
      chosen.threshold,
      canZoom(),
      isZoomed()
    ]);
    if (options.wanted === wanted) return;
    options.wanted = wanted;
    if (canDiffer() && TABS[view].draw && view !== "walk") {
      parts.push(button(
        { id: "difference", "aria-pressed": chosen.difference },
        () => go({ difference: !chosen.difference }),
        "Difference"
      ));
    }
    if (view === "lines") {
      const range = make("input", {
        type: "range",
        id: "threshold",
        min: 0.01,
        max: 0.5,
        step: 0.01,
        value: chosen.threshold,
        input: () => go({ threshold: Number(range.value) })
      });
      parts.push(make("label", {}, "Lines from ", range, make("output", { for: "threshold" }, ` ${percent(chosen.threshold)}`)));
    }
    const maps = shownTrace().maps(state().head);
    if (view === "map" && maps.length > 1) {
      const select = make("select", { id: "step", change: () => go({ step: select.value }) }, maps.map((step) => make("option", { value: step.name, selected: step.name === chosen.step }, step.name)));
      parts.push(make("label", {}, "Show ", select));
    }
    if (view === "map" && (canZoom() || isZoomed())) parts.push(zoomButton());
    if (view === "numbers") parts.push(fillStages());
    if (view === "walk" && !shownTrace().steps_withheld) parts.push(...walkOptions());
    if (store.isAdding || chosen.others.length) parts.push(besideWords());
    const focused = options.contains(document.activeElement) ? document.activeElement?.id : null;
    if (focused === "threshold") {
      options.querySelector("output").textContent = ` ${percent(chosen.threshold)}`;
      return;
    }
    options.replaceChildren(...parts);
    if (focused) byId(focused)?.focus();
  }
  function besideWords() {
    const words = chosen.others.length ? `with ${chosen.others.map((it) => placeName(...it)).join(", ")}` : "Choose heads to show beside this one, then press Done.";
    const none = button(
      { class: "quiet" },
      () => {
        store.isAdding = false;
        go({ others: [], difference: false });
      },
      "End the comparison"
    );
    return make("span", { class: "soft beside" }, words, " ", ...chosen.others.length ? [none] : []);
  }
  function drawShading() {
    const trace = shownTrace(), { head, query } = state(), isKnown = areNormsKnown(trace, head, query);
    const named = (by2) => make("button", {
      type: "button",
      "data-by": by2,
      "aria-pressed": chosen.by === by2,
      title: by2 === "weight" ? "The attention weights of the selected token, which sum to 1" : NORM_WEIGHTED
    }, by2);
    byId("shading").hidden = !trace.isOneText;
    byId("shading").title = isKnown ? "" : `No norm-weighted attention: ${trace.normsWithheld}`;
    const registers = registersOf(trace), isWithout = chosen.registers === "left out";
    const by = `${isKnown} ${chosen.by} ${registers} ${isWithout} ${narrow.matches}`;
    if (byId("shading").by === by) return;
    byId("shading").by = by;
    const focused = (
      /** @type {HTMLElement} */
      document.activeElement?.dataset.by
    );
    byId("shading").replaceChildren(registers.length && narrow.matches ? "" : "Shaded by ", ...isKnown ? [named("weight"), named("norm-weighted")] : ["weight"]);
    if (registers.length) byId("shading").append(" ", make("button", {
      type: "button",
      "data-by": "registers",
      "aria-pressed": isWithout,
      title: REGISTERS
    }, `without ${count(registers.length, "register")}`));
    if (focused) byId("shading").querySelector(`[data-by=${focused}]`)?.focus();
  }
  function drawMisread() {
    const { misread } = store, { layer, head } = chosen;
    byId("misread").hidden = misread.length === 0;
    byId("misread").textContent = misread.length === 0 ? "" : `This page does not have these parts of the address: ${misread.join("; ")}. It shows ${placeName(layer, head)}.`;
  }
  function describeWhatIsLeftOut() {
    const trace = shownTrace(), sentences = [];
    if (trace.block) {
      const [high, wide] = trace.block;
      sentences.push(`This text is long. Each cell of a map is the largest of ${high} × ${wide} numbers.`);
      if (trace.kept.length < trace.queries.length) {
        sentences.push(`The page has exact numbers for ${trace.kept.length} of ${count(trace.queries.length, "query", "queries")}, evenly spaced.`);
      }
    }
    if (trace.links) {
      const queries = trace.kept.length === trace.queries.length ? "each query" : `${trace.kept.length} of ${count(trace.queries.length, "query", "queries")}`;
      const all = [...snapshot().places()].length, exact = [...snapshot().exactHeads()];
      const isExact = (it) => exact.some(([layer, head]) => layer === it.layer && head === it.head), acting = [...snapshot().findings.values()].filter((it) => it.roles.length);
      const which = exact.length === all ? "every head" : `${exact.length} of ${count(all, "head")}` + (acting.length && acting.every(isExact) ? ", all those with a role" : "");
      const others = store.source?.can.steps && !isLong(trace) ? "It computes the others for Numbers and Walk." : store.source?.can.text || pageData.images ? "" : "clearhead serve computes the others.";
      const part = trace.blocksOf() ? `a token or a square of ${trace.picture.block} × ${trace.picture.block} patches` : "the mean of a part";
      if (exact.length) sentences.push(`The page has every step of ${which}.`);
      if (exact.length < all) sentences.push(`${exact.length ? "For the other heads it" : isLong(trace) ? "The text is long: the page" : "To stay small, the page"} has a map of ${trace.bins.join(" × ")} cells, each ${part}, and the ${trace.links.n} largest weights of ${queries}.`, others);
    }
    if (trace.size.b > 1) sentences.push(`The first of ${trace.size.b} sequences is shown.`);
    byId("left-out").textContent = sentences.filter(Boolean).join(" ");
    byId("left-out").hidden = sentences.length === 0;
  }

  // src/export.js
  function buildSave() {
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
  function canvasToSave(scale2) {
    const canvas = make("canvas"), scene = pictureToSave(), framed = new Scene(scene.width, scene.height);
    framed.rect(0, 0, scene.width, scene.height, { fill: "paper" });
    framed.group(scene, 0, 0);
    paint(canvas, framed, scale2);
    return canvas;
  }
  function nameSaved() {
    const step = stepToSave(), picture = TABS[chosen.view].draw ? "Picture" : "Map";
    const words = {
      png: `${picture} (PNG)`,
      svg: `${picture} (SVG)`,
      csv: isRowOnly() ? `This query's ${step} (CSV)` : `All ${step} (CSV)`
    };
    for (const [kind, text] of Object.entries(words)) byId("save").querySelector(`[data-save=${kind}]`).textContent = text;
  }
  var stepToSave = () => chosen.view === "map" ? chosen.step : "weights";
  var isRowOnly = () => state().query !== null && state().view !== "map";
  function pictureToSave() {
    const width = Math.max(640, byId("view").clientWidth), height = Math.max(360, byId("view").clientHeight);
    const scene = TABS[state().view].draw?.(width, height) ?? drawMap(width, height);
    const whole = new Scene(scene.width + 32, scene.height + 60);
    whole.text(`${byId("head-title").textContent} · ${pageData.name ?? ""}`, 16, 20, { size: 16, bold: true });
    whole.text(byId("sentence").textContent, 16, 42, { fill: "soft", room: scene.width });
    whole.group(scene, 16, 58);
    return whole;
  }
  var quoted2 = (text) => `"${String(text).replaceAll('"', '""')}"`;
  var inCsv = (text) => quoted2(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);
  function csvOf() {
    const lines = ["side,layer,head,query position,query,key position,key,step,value"];
    for (const side of sides()) {
      const { trace } = side, step = trace.step(stepToSave()) ?? trace.weights;
      for (const query of isRowOnly() ? [queryOr()] : trace.stored(side.head)) {
        (trace.row(step, side.head, query) ?? []).forEach((value, key) => {
          if (value === void 0) return;
          lines.push([
            inCsv(side.name),
            side.layer,
            side.head,
            query,
            inCsv(trace.queries[query]),
            key,
            inCsv(trace.keys[key]),
            step.name,
            value
          ].join(","));
        });
      }
    }
    return lines.join("\r\n") + "\r\n";
  }
  function download(blob, name) {
    const link2 = make("a", { href: URL.createObjectURL(blob), download: name });
    link2.click();
    setTimeout(() => URL.revokeObjectURL(link2.href), 1e4);
  }

  // src/hosts/ahead.js
  function aheadSource() {
    const { ahead } = pageData;
    if (!ahead) return null;
    const only = JSON.stringify({ ...NO_EDITS, off: ahead.off });
    return {
      can: { text: false, ahead: true, edits: ["off"] },
      compute: async (text, edits) => {
        if (text === opened.text && JSON.stringify({ ...NO_EDITS, ...edits }) === only) return ahead.snapshot;
        throw new Error("This file has one text, and one edit of it. For others, open the model with clearhead serve.");
      }
    };
  }

  // src/hosts/frame.js
  var REST = 400;
  function linkToCell() {
    if (parent === window) return;
    const write2 = history.replaceState.bind(history);
    let timer = 0;
    history.replaceState = (state2, title, address) => {
      if (address) {
        parent.postMessage({ address: String(address) }, "*");
        clearTimeout(timer);
        timer = setTimeout(() => parent.postMessage({ picture: pictureAsHtml() }, "*"), REST);
      }
      return write2(state2, title, address);
    };
    addEventListener("message", ({ source, data }) => {
      if (source === parent && typeof data.address === "string") location.hash = data.address;
    });
  }
  function pictureAsHtml() {
    const image = document.implementation.createHTMLDocument().createElement("img");
    Object.assign(image, { src: canvasToSave(1).toDataURL(), alt: `${byId("head-title").textContent}. ${byId("sentence").textContent}` });
    image.style.maxWidth = "100%";
    return image.outerHTML;
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

  // src/hosts/remote.js
  function remoteSource() {
    const PAUSE = 250;
    let newest2 = new AbortController(), newestWhy = new AbortController();
    const newSignal = () => {
      newest2.abort();
      return (newest2 = new AbortController()).signal;
    };
    const wait = (time, signal) => new Promise((resolve, reject) => {
      setTimeout(resolve, time);
      signal.addEventListener("abort", () => reject(signal.reason));
    });
    async function* fromNotebook(path, request, signal) {
      const id = String(Math.random());
      const heard = [];
      let wake = () => {
      };
      const listen = ({ source, data }) => {
        if (source !== parent || data.id !== id) return;
        heard.push(data.line);
        wake();
      };
      const end = () => {
        parent.postMessage({ request: { id, end: true } }, "*");
        wake();
      };
      addEventListener("message", listen);
      signal?.addEventListener("abort", end);
      parent.postMessage({ request: { id, path, request } }, "*");
      try {
        for (; ; ) {
          while (!heard.length && !signal?.aborted) await new Promise((resolve) => {
            wake = resolve;
          });
          signal?.throwIfAborted();
          yield heard.shift();
        }
      } finally {
        removeEventListener("message", listen);
        signal?.removeEventListener("abort", end);
      }
    }
    async function ask2(path, request, signal, report = say) {
      const lines = parent === window ? serverLines : fromNotebook;
      for await (const text of lines(path, request, signal)) {
        const line2 = parse(text);
        if (line2.error) throw new Error(errorWords(line2.error));
        if (line2.progress) report(progressWords(...line2.progress), true);
        const answer = line2.snapshot ?? line2.layer ?? line2.why;
        if (answer) {
          report("", true);
          return answer;
        }
      }
    }
    const progressWords = (done, total) => done ? `Computing: layer ${done}${total ? ` of ${total}` : ""}` : "Computing";
    return {
      can: { text: true, tile: true, steps: true, edits: Object.keys(pageData.edits) },
      // A new request ends the earlier one, in the page and in its host.
      async compute(text, edits) {
        const signal = newSignal();
        await wait(PAUSE, signal);
        return ask2("compute", { text, edits }, signal);
      },
      cancel: () => newest2.abort(),
      // Every step of one layer.
      steps: (text, edits, layer) => ask2("steps", { text, edits, layer }, newSignal()),
      // What wrote the query and the key of a weight. It ends no request but an earlier one of its kind.
      why(text, edits, pair) {
        newestWhy.abort();
        newestWhy = new AbortController();
        return ask2("why", { text, edits, ...pair }, newestWhy.signal, () => {
        });
      },
      // The exact weights of a part of one head, as a layer of one step: part = {layer, head,
      // queries: [first, last], keys: [first, last]}.
      tile: (text, edits, part) => ask2("tile", { text, edits, ...part }, newSignal())
    };
  }

  // src/theme.js
  function buildThemeButton(set, draw2) {
    const button2 = byId("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
    let isDark = false;
    const use = (to) => {
      isDark = to;
      set(isDark);
      document.documentElement.dataset.theme = isDark ? "dark" : "light";
      button2.textContent = isDark ? "Light" : "Dark";
    };
    button2.hidden = false;
    button2.addEventListener("click", () => {
      use(!isDark);
      draw2();
    });
    dark.addEventListener("change", () => {
      use(dark.matches);
      draw2();
    });
    use(dark.matches);
  }

  // src/listen.js
  var FINGER = 40;
  function buildPicture() {
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
        ArrowUp: { query: kept(slot - 1), key },
        ArrowDown: { query: kept(slot + 1), key },
        ArrowLeft: { query: queryOr(), key: Math.max(0, key - 1) },
        ArrowRight: { query: queryOr(), key: Math.min(trace.size.k - 1, key + 1) },
        Home: { query: queryOr(), key: 0 },
        End: { query: queryOr(), key: trace.size.k - 1 }
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
      else if (store.isAdding) {
        store.isAdding = false;
        screen.draw();
      } else letGo();
    });
    addEventListener("hashchange", () => {
      if (byId(location.hash.slice(1))) return;
      const { changes, misread } = readAddress(location.hash);
      go(changes, misread);
    });
  }
  var isChosenPair = ({ query = chosen.query, key }) => VIEWS.includes("why") && typeof key === "number" && key === chosen.key && query !== null && query === chosen.query;
  function openWhy() {
    chooseView("why");
    byId("panel").focus();
  }
  function buildViews() {
    const views = byId("views");
    views.replaceChildren(...VIEWS.map((view) => button(
      { role: "tab", "data-view": view, id: `view-${view}`, "aria-controls": "view", title: TABS[view].says },
      () => chooseView(view),
      TABS[view].word
    )));
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
    byId("beside").addEventListener("click", () => {
      store.isAdding = !store.isAdding;
      byId("options").wanted = null;
      screen.draw();
    });
  }
  function chooseView(view) {
    pauseWalk();
    if (view === "walk") walk.at = walk.at || stagesOf(shownTrace()).length;
    byId("view").setAttribute("aria-labelledby", `view-${view}`);
    go({ view });
    if (view === "walk" && !stillOnly.matches) beginWalk();
  }
  function buildTheme() {
    buildThemeButton((isDark) => {
      store.isDark = isDark;
      store.themeColours = null;
    }, () => screen.draw());
  }
  function buildPrint() {
    addEventListener("beforeprint", () => {
      byId("panel").hidden = false;
      byId("panel").replaceChildren(...shownTrace().steps.map((_, i) => stepArticle(i)));
    });
    addEventListener("afterprint", () => screen.drawPicture());
  }

  // src/masks.js
  var MASKS = {
    causal: () => (q, k) => k <= q,
    everything: () => () => true,
    window: ({ before = null, after = null }) => (q, k) => (before === null || k >= q - before) && (after === null || k <= q + after),
    prefix: ({ n }) => (_, k) => k < Number(n),
    lengths: ({ keys = null, queries = null }) => (q, k) => (keys === null || k < keys) && (queries === null || q < queries)
  };
  function readMask(text) {
    const parts = text.match(/\d+|\w+|\S/g) ?? [];
    let at = 0;
    const fail = (why) => {
      throw new Error(`The mask '${text}' cannot be read: ${why}. A mask here is made of ${notation()}, joined by &, | and ~.`);
    };
    const take = (wanted) => parts[at] === wanted ? Boolean(++at) : false;
    const whole = () => /^\d+$/.test(parts[at] ?? "") ? Number(parts[at++]) : take("None") ? null : fail(`'${parts[at] ?? "its end"}' is not a whole number`);
    const numbers = (mask, names) => {
      const given = {};
      if (!take("(")) fail(`'${parts[at - 1]}' needs its numbers`);
      let bare2 = 0;
      for (let i = 0; !take(")"); i++) {
        if (i && !take(",")) fail("a bracket is open");
        const isNamed = parts[at + 1] === "=";
        const name = isNamed ? parts[at] : names[i];
        if (!names.includes(name)) fail(isNamed ? `'${name}' is not an argument of this mask` : "there are too many numbers");
        if (isNamed) at += 2;
        else bare2++;
        given[name] = whole();
      }
      if (mask === "window" && bare2 && !("after" in given)) {
        fail("a window needs two numbers, or a name: write window(3, 0) or window(before=3)");
      }
      return given;
    };
    const either = () => {
      let left = both();
      while (take("|")) {
        const [a, b] = [left, both()];
        left = (q, k) => a(q, k) || b(q, k);
      }
      return left;
    };
    const both = () => {
      let left = one();
      while (take("&")) {
        const [a, b] = [left, one()];
        left = (q, k) => a(q, k) && b(q, k);
      }
      return left;
    };
    const one = () => {
      if (take("~")) {
        const inner = one();
        return (q, k) => !inner(q, k);
      }
      if (take("(")) {
        const inner = either();
        return take(")") ? inner : fail("a bracket is open");
      }
      const name = parts[at++];
      if (name === void 0) return fail("it ends too early");
      if (!Object.hasOwn(MASKS, name)) return fail(`no mask is called '${name}'`);
      const names = pageData.masks.arguments[name], given = names.length ? numbers(name, names) : {};
      if (name === "prefix" && typeof given.n !== "number") return fail("prefix needs a number");
      return MASKS[name](given);
    };
    const found = either();
    return at < parts.length ? fail(`'${parts[at]}' is too much`) : found;
  }
  function notation() {
    const all = Object.entries(pageData.masks.arguments).map(([name, names]) => names.length ? `${name}(${names.join(", ")})` : name);
    return `${all.slice(0, -1).join(", ")} and ${all.at(-1)}`;
  }

  // src/live.js
  function liveSource() {
    if (!pageData.model) return null;
    const model = new LiveModel(pageData.model);
    return {
      can: { text: true, rounds: true, edits: Object.keys(pageData.edits) },
      compute: async (text, given) => model.read(text, { ...NO_EDITS, ...given })
    };
  }
  var LiveModel = class {
    constructor({ words, heads, context, near, longest, why, weights }) {
      this.words = words;
      this.heads = heads;
      this.context = context;
      this.near = near;
      this.longest = longest;
      this.why = why;
      this.number = new Map(words.map((word, i) => [word, i]));
      this.weights = {};
      for (const [name, rows] of Object.entries(weights)) this.weights[name] = scaledRows(rows);
      this.layers = Object.keys(weights).filter((name) => name.endsWith("W_query.weight")).length;
    }
    /** Returns the snapshot of a text. Throws an Error whose message can be shown. @returns {SnapshotData} */
    read(text, edits) {
      const tokens = tokenize(text);
      if (!tokens.length) throw new Error("The text has no words. Type at least one, for example 'Once upon a time there was a girl.'");
      if (tokens.length > this.context) {
        throw new Error(`The text has ${tokens.length} tokens, and the context of this model is ${this.context}. Shorten it, for example to its last sentences.`);
      }
      const mask = edits.mask === null ? () => true : readMask(edits.mask);
      const ids = tokens.map((token2) => this.number.get(token2.toLowerCase()) ?? 0);
      const unknown = ids.flatMap((id, i) => id === 0 ? [i] : []);
      const layers = [];
      let x = pickRows(this.weights["embed.table.weight"], ids);
      for (let layer = 0; layer < this.layers; layer++) {
        const part = (name) => this.weights[`blocks.${layer}.${name}`];
        const { steps, out, v } = this.attention(this.norm(x, part("norm_1.weight"), part("norm_1.bias")), layer, mask, edits);
        const norms = this.norms(v, part("attention.out_proj.weight"), tokens.length);
        x = sum2(x, linear2(out, part("attention.out_proj.weight"), part("attention.out_proj.bias")));
        const hidden = linear2(
          this.norm(x, part("norm_2.weight"), part("norm_2.bias")),
          part("feed_forward.W_1.weight"),
          part("feed_forward.W_1.bias")
        );
        hidden.values.forEach((value, i) => {
          hidden.values[i] = gelu(value);
        });
        x = sum2(x, linear2(hidden, part("feed_forward.W_2.weight"), part("feed_forward.W_2.bias")));
        layers.push({ ...steps, norms: { stored: [this.heads, tokens.length], values: norms } });
      }
      const logits = linear2(this.norm(x, this.weights["norm.weight"], this.weights["norm.bias"]), this.weights["head.weight"]);
      const labels = tokens.map((token2, i) => ids[i] === 0 ? `${token2}(?)` : token2);
      const about = `${count(layers.length, "layer")}, ${count(layers.length * this.heads, "head")}, ` + count(tokens.length, "token");
      return { tokens: labels, text, about, unknown, guesses: this.guesses(logits), layers };
    }
    // softmax(scale Q K^T + bias) V in every head, with all steps for the page.
    attention(x, layer, mask, edits) {
      const part = (name) => this.weights[`blocks.${layer}.attention.${name}`];
      const T = x.rows, H = this.heads, D = x.columns / H;
      const [q, k, v] = ["query", "key", "value"].map((name) => byHead(linear2(x, part(`W_${name}.weight`), part(`W_${name}.bias`)), H));
      const t = edits.temperature, scale2 = (edits.scale ?? 1 / Math.sqrt(D)) / t;
      const table2 = part("relative.table");
      const pairs = () => new Float32Array(H * T * T);
      const [scores, scaled, capped, biased, masked, weights, dropped] = Array.from({ length: 7 }, pairs);
      const output = new Float32Array(H * T * D);
      for (let h = 0; h < H; h++) {
        const isOff2 = edits.off.some(([l, head]) => l === layer && head === h);
        for (let i = 0; i < T; i++) {
          const row = (h * T + i) * T;
          let largest2 = -Infinity;
          for (let j = 0; j < T; j++) {
            let score = 0;
            for (let d = 0; d < D; d++) score += q[(h * T + i) * D + d] * k[(h * T + j) * D + d];
            scores[row + j] = score;
            let logit = scaled[row + j] = score * scale2;
            if (edits.softcap) logit = capped[row + j] = edits.softcap * Math.tanh(logit / edits.softcap);
            logit = biased[row + j] = logit + table2.values[h * table2.columns + this.bucket(i - j)] / t;
            masked[row + j] = j <= i && mask(i, j) ? logit : -Infinity;
            largest2 = Math.max(largest2, masked[row + j]);
          }
          let total = 0;
          for (let j = 0; j < T; j++) {
            weights[row + j] = largest2 === -Infinity ? 0 : Math.exp(masked[row + j] - largest2);
            total += weights[row + j];
          }
          for (let j = 0; j < T; j++) {
            if (total) weights[row + j] /= total;
            dropped[row + j] = isKept(edits, 0, h, i, j) ? weights[row + j] / (1 - edits.dropout) : 0;
            if (isOff2) continue;
            const used = edits.dropout ? dropped[row + j] : weights[row + j];
            for (let d = 0; d < D; d++) output[(h * T + i) * D + d] += used * v[(h * T + j) * D + d];
          }
        }
      }
      const size = { h: H, q: T, k: T, d: D, v: D, g: H };
      const step = (name, formula, axes, values) => ({
        name,
        formula,
        why: this.why[name],
        axes,
        values,
        kept: {},
        integer: false,
        stored: axes.map((letter) => size[letter]),
        shape: axes.map((letter) => [letter, size[letter]]),
        axis_names: Object.fromEntries(axes.map((letter) => [letter, pageData.names?.[letter]]))
      });
      const short2 = (x2) => String(Number(x2.toPrecision(6)));
      const before = scale2 === 1 ? "scores" : "scaled", last = edits.softcap ? "capped" : before;
      const matrix2 = ["h", "q", "k"];
      const over = t === 1 ? "" : ` / ${short2(t)}`;
      const steps = [
        step("query", "Q", ["h", "q", "d"], q),
        step("key", "K", ["g", "k", "d"], k),
        step("value", "V", ["g", "k", "v"], v),
        step("scores", "Q Kᵀ", matrix2, scores),
        scale2 === 1 ? null : step("scaled", `scores · ${short2(scale2)}${edits.scale === null && t === 1 ? ` = scores / √${D}` : ""}`, matrix2, scaled),
        !edits.softcap ? null : step("capped", `${short2(edits.softcap)} · tanh(${before} / ${short2(edits.softcap)})`, matrix2, capped),
        step("biased", `${last} + bias${over}`, matrix2, biased),
        step("masked", "biased where the mask allows, else −∞", matrix2, masked),
        step("weights", "softmax(masked)", matrix2, weights),
        !edits.dropout ? null : step("dropped", `weights · kept / (1 − ${short2(edits.dropout)})`, matrix2, dropped),
        step("output", `${edits.dropout ? "dropped" : "weights"} · V`, ["h", "q", "v"], output)
      ].filter((it) => it !== null);
      const settings = {
        scale: scale2,
        ...edits.softcap ? { softcap: edits.softcap } : {},
        ...edits.dropout ? { dropout: edits.dropout, seed: edits.seed } : {}
      };
      return { steps: { size, settings, steps }, out: joinHeads(output, T, H, D), v };
    }
    // |v W_O| of each head and key, the norm of what the value writes.
    norms(v, weight, T) {
      const d = weight.rows, D = d / this.heads, norms = new Float32Array(this.heads * T);
      for (let i = 0; i < norms.length; i++) {
        const first = Math.floor(i / T) * D;
        let square = 0;
        for (let row = 0; row < d; row++) {
          let written2 = 0;
          for (let j = 0; j < D; j++) written2 += v[i * D + j] * weight.values[row * d + first + j];
          square += written2 ** 2;
        }
        norms[i] = Math.sqrt(square);
      }
      return norms;
    }
    // The bucket of a distance: near distances have separate ones, far distances common ones (as in T5).
    bucket(distance) {
      const far = Math.abs(distance), shared = this.near;
      let bucket = far;
      if (far >= this.near) {
        const growth = Math.log(far / this.near) / Math.log(this.longest / this.near);
        bucket = this.near + Math.min(Math.floor(growth * shared), shared - 1);
      }
      return distance < 0 ? bucket + this.near + shared : bucket;
    }
    // (x - mean) / sqrt(variance + 1e-5) * weight + bias, for each row.
    norm(x, weight, bias) {
      const y = matrix(x.rows, x.columns);
      for (let r = 0; r < x.rows; r++) {
        const row = x.values.subarray(r * x.columns, (r + 1) * x.columns);
        const mean = row.reduce((total, value) => total + value, 0) / x.columns;
        const variance = row.reduce((total, value) => total + (value - mean) ** 2, 0) / x.columns;
        const factor = 1 / Math.sqrt(variance + 1e-5);
        row.forEach((value, c) => {
          y.values[r * x.columns + c] = (value - mean) * factor * weight.values[c] + bias.values[c];
        });
      }
      return y;
    }
    /** The six most probable next words after each word. @returns {[word: string, probability: number][][]} */
    guesses(logits) {
      return Array.from({ length: logits.rows }, (_, r) => {
        const row = Array.from(logits.values.subarray(r * logits.columns, (r + 1) * logits.columns));
        const largest2 = Math.max(...row), exps = row.map((value) => Math.exp(value - largest2));
        const total = exps.reduce((a, b) => a + b, 0);
        return exps.map((value, i) => (
          /** @type {[string, number]} */
          [this.words[i], Math.round(value / total * 1e4) / 1e4]
        )).sort((a, b) => b[1] - a[1]).slice(0, 6);
      });
    }
  };
  var matrix = (rows, columns) => ({ rows, columns, values: new Float32Array(rows * columns) });
  function scaledRows({ stored: [rows, columns], units, numbers, rest }) {
    const x = matrix(rows, columns), unit = decode(units), high = decode(numbers), low = decode(rest);
    for (let i = 0; i < high.length; i++) x.values[i] = (256 * high[i] + low[i]) * unit[Math.floor(i / columns)];
    return x;
  }
  function pickRows(table2, ids) {
    const x = matrix(ids.length, table2.columns);
    ids.forEach((id, i) => x.values.set(table2.values.subarray(id * table2.columns, (id + 1) * table2.columns), i * table2.columns));
    return x;
  }
  var sum2 = (a, b) => ({ ...a, values: a.values.map((value, i) => value + b.values[i]) });
  function linear2(x, weight, bias = null) {
    const y = matrix(x.rows, weight.rows);
    for (let r = 0; r < x.rows; r++) {
      for (let c = 0; c < weight.rows; c++) {
        let total = bias ? bias.values[c] : 0;
        for (let i = 0; i < x.columns; i++) total += x.values[r * x.columns + i] * weight.values[c * x.columns + i];
        y.values[r * weight.rows + c] = total;
      }
    }
    return y;
  }
  function byHead(x, H) {
    const T = x.rows, D = x.columns / H, y = new Float32Array(x.values.length);
    for (let t = 0; t < T; t++) for (let i = 0; i < x.columns; i++) {
      y[(Math.floor(i / D) * T + t) * D + i % D] = x.values[t * x.columns + i];
    }
    return y;
  }
  function joinHeads(y, T, H, D) {
    const x = matrix(T, H * D);
    for (let t = 0; t < T; t++) for (let i = 0; i < H * D; i++) {
      x.values[t * H * D + i] = y[(Math.floor(i / D) * T + t) * D + i % D];
    }
    return x;
  }
  function gelu(x) {
    const z = Math.abs(x) / Math.SQRT2, t = 1 / (1 + 0.3275911 * z);
    const tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * Math.exp(-z * z);
    return x * (x < 0 ? tail / 2 : 1 - tail / 2);
  }
  function tokenize(text) {
    const glue = "[\\p{M}\\u200c\\u200d\\ufe0f\\u{1f3fb}-\\u{1f3ff}]", letter = "[\\p{L}\\p{N}_]";
    const flag = "[\\u{1f1e6}-\\u{1f1ff}]{2}";
    const character = `[\\u3040-\\u30ff\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff]${glue}*`;
    const word = `(?:(?!${character})${letter}${glue}*)+`, other = "[^\\p{L}\\p{N}_\\s]";
    const sign = `${other}${glue}*(?:(?<=\\u200d)${other}${glue}*)*`;
    const pattern = new RegExp(`${flag}|${character}|${word}(?:['\\u2019]${word})*|${sign}`, "gu");
    return text.normalize("NFC").match(pattern) ?? [];
  }
  function isKept({ dropout, seed }, ...place) {
    if (!dropout) return true;
    let key = stir(stir(0, seed % 2 ** 32), Math.floor(seed / 2 ** 32));
    for (const index of place) key = stir(key, index);
    return key >= Math.round(dropout * 2 ** 32);
  }
  function stir(key, word) {
    let x = key ^ Math.imul(word, 2654435761) + 2135587861;
    x = Math.imul(x ^ x >>> 16, 2246822507);
    x = Math.imul(x ^ x >>> 13, 3266489909);
    return (x ^ x >>> 16) >>> 0;
  }

  // src/page.js
  var MANY_KEYS = 64;
  function sourceOf(host) {
    const { pageSource } = (
      /** @type {any} */
      globalThis
    );
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
    store.misread = isOther ? [] : misread;
    settle();
    byId("view").setAttribute("aria-labelledby", `view-${chosen.view}`);
    walk.at = stagesOf(shownTrace()).length;
    if (shownTrace().size.k > MANY_KEYS) chosen.threshold = LEAST;
    fillAll();
    draw();
    const before = new URLSearchParams(hash.slice(1)).get("kept");
    if (pageData.beside && before === "model") keep();
    else if (store.source?.can.text && before) store.source.compute(before, NO_EDITS).then((data) => {
      store.kept = new Snapshot(keepLabels(data));
      go({});
    }, () => {
    });
    if (isOther) {
      openControls(changedEdits(edits).length > 0);
      compute(text ?? store.current.text, edits).then(() => {
        const after = readAddress(hash);
        go(after.changes, after.misread);
      });
    }
  }
  start();
  if (pageData.host === "notebook" || pageData.host === "frame") linkToCell();
  return __toCommonJS(page_exports);
})();
