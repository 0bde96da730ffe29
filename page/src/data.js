// The results of a model on one text: snapshots, their layers, and their steps. schema.d.ts describes
// the data; a model in the page computes the same data.

/** @import * as schema from "./schema.d.ts" */

/** @typedef {Float64Array | Float32Array | Uint32Array | Int16Array | Uint16Array | Uint8Array} Values */
/** @typedef {Partial<schema.Shades> & {values?: Values, decoded?: Values}} Encoded */
/** @typedef {schema.Step & {values?: Values}} StepData */
/** @typedef {Omit<schema.Layer, "steps" | "norms"> & {steps: StepData[], norms?: Encoded}} LayerData */
/** @typedef {Omit<schema.Snapshot, "layers"> & {layers: LayerData[]}} SnapshotData */

// An object with the fields of its data.
class Fields {
  constructor(data) {
    Object.assign(this, data);
  }
}

/** @typedef {Omit<StepData, "stored" | "map" | "fine"> & {stored: number[], map?: Encoded & schema.Numbers,
 *   fine?: Encoded & schema.FineMap, decoded?: Values, limit?: number, compute?: (at: any) => number[] | null}} StepFields */

// One step. `isPair` is true for queries x keys.
export class Step extends /** @type {new (data: StepData) => StepFields} */ (Fields) {
  /** @param {StepData} data */
  constructor(data) {
    super(data);
    this.isPair = this.axes.includes("q") && this.axes.includes("k");
    // For an axis that is not stored in full: the index in the data, by position.
    /** @type {Record<string, Map<number, number>>} */
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
    return this.isPair && (this.map !== undefined || this.isExact(head));
  }

  get isShare() {
    return this.name === "weights" || this.name === "dropped";
  }

  // The numbers along `free` at an index of every other axis, for example
  // along("k", {h: 0, q: 3}) is a row of scores. Null if the page does not have them.
  along(free, indices) {
    if (this.computed) return this.compute?.(indices) ?? null;
    if (!this.holdsNumbers) return null;
    let start = 0, stride = 1, step = 0, length = 1;
    for (let axis = this.axes.length - 1; axis >= 0; axis--) {
      const letter = this.axes[axis];
      if (letter === free) {
        [step, length] = [stride, this.stored[axis]];
      } else {
        const position = indices[letter] ?? 0;
        const index = this.indexOf[letter] ? this.indexOf[letter].get(position) : position;
        if (index === undefined) return null;
        start += index * stride;
      }
      stride *= this.stored[axis];
    }
    return Array.from({ length }, (_, i) => this.numbers[start + i * step]);
  }

  // One head of a queries x keys step as a grid of cells: its numbers, or those of the map of every
  // head. For a tile, the map suffices: `fine` is false.
  grid(head, fine = true) {
    if (this.computed && this.isExact(head) && (fine || !this.map)) {
      const [rows, columns] = ["q", "k"].map((letter) => Object.fromEntries(this.shape)[letter]);
      const values = new Float32Array(rows * columns);
      for (let q = 0; q < rows; q++) values.set(this.along("k", { h: head, q }) ?? [], q * columns);
      return { rows, columns, values };
    }
    if (fine && this.fine && this.fine.head === head) {
      const [rows, columns] = this.fine.stored;
      return { rows, columns, values: numbersOf(this.fine) };
    }
    const from = this.map ?? this;
    const values = numbersOf(from), [rows, columns] = from.stored.slice(-2);
    const start = this.axes.includes("h") ? head * rows * columns : 0;
    return { rows, columns, values: values.subarray(start, start + rows * columns) };
  }
}

// How the steps follow from those before them, as in clearhead.core.engines.reference: one query of one head.
const COMPUTED = {
  scores: (trace, { h, q, g }) => {
    const query = trace.step("query").along("d", { h, q }), keys = trace.vectors("key", "d", g), D = query.length;
    return trace.keys.map((_, k) => query.reduce((score, x, d) => score + x * keys[k * D + d], 0));
  },
  scaled: (trace, _, before) => before.map((x) => x * trace.settings.scale),
  capped: ({ settings }, _, before) => before.map((x) => settings.softcap * Math.tanh(x / settings.softcap)),
  masked: (trace, { q }, before, { spans }) => {
    const ends = numbersOf(spans), [first, after] = [ends[q], ends[trace.size.q + q]];
    return before.map((x, k) => (k >= first && k < after ? x : -Infinity));
  },
  weights: (_, __, before) => {
    const most = before.reduce((a, b) => Math.max(a, b), -Infinity);
    const exps = before.map((x) => (x === -Infinity ? 0 : Math.exp(x - most)));
    const total = exps.reduce((a, b) => a + b, 0);
    return exps.map((x) => (total ? x / total : 0));
  },
  output: (trace, { g }, weights) => {
    const values = trace.vectors("value", "v", g), out = Array(trace.size.v).fill(0);
    weights.forEach((weight, k) => { if (weight) out.forEach((_, i) => { out[i] += weight * values[k * out.length + i]; }); });
    return out;
  },
};

const KINDS = {
  f8: Float64Array, f4: Float32Array, u4: Uint32Array, i2: Int16Array, u2: Uint16Array, u1: Uint8Array,
};

/** @param {Encoded} numbers @returns {Values} */
export function decode({ kind = "f4", data = "", top, values: given }) {
  if (given) return given;
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const values = new KINDS[kind](bytes.buffer);
  if (top === undefined) return values;
  // A shade is the square root of a fraction of the largest number; 0 is a masked cell.
  return Float32Array.from(values, (shade) => (shade ? ((shade - 1) / 254) ** 2 * top : -Infinity));
}

/** The decoded numbers, which are stored for the next call. @param {Encoded} encoded */
const numbersOf = (encoded) => (encoded.decoded ??= decode(encoded));

/** @typedef {Omit<LayerData, "steps" | "queries" | "keys" | "kept"> & {steps: Step[], queries: string[], keys: string[],
 *   kept: number[]}} TraceFields */

// One layer of a snapshot, with methods to read it.
export class Trace extends /** @type {new (data: any) => TraceFields} */ (Fields) {
  /** @param {LayerData} data @param {string[]} tokens */
  constructor(data, tokens) {
    super({ ...data, steps: data.steps.map((step) => new Step(step)) });
    const numbers = (size) => Array.from({ length: size }, (_, i) => String(i));
    const labels = (given, size) => (given === undefined ? tokens : given) ?? numbers(size);
    this.settings ??= {};
    this.queries = labels(data.queries, data.size.q);
    this.keys = labels(data.keys, data.size.k);
    this.kept ??= numbers(data.size.q).map(Number);
    // Whether queries and keys are the same words, so that a word can be both.
    this.isOneText = !this.cross_attention && isAlike(this.queries, this.keys);
    this.pairs = this.steps.filter((step) => step.isPair);
    for (const step of this.steps) if (step.computed) step.compute = this.computing(step);
    this.weights = /** @type {Step} */ (this.step("weights"));
    // The factors of the values: the weights, after dropout if there was dropout.
    this.used = this.step("dropped") ?? this.weights;
    this.heads = data.size.h ?? 1;
    this.keyHeads = data.size.g ?? this.heads;
    this.blocks = /** @type {number[] | null} */ (null);
    this.members = /** @type {number[][] | null} */ (null);
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
  computing(/** @type {Step} */ step) {
    const before = step.isPair ? this.pairs[this.pairs.indexOf(step) - 1] : this.pairs.at(-1), known = new Map();
    return ({ h, q }) => {
      const at = this.at(h, q, 0), name = h * this.size.q + q;
      if (!step.isExact(h)) return null;
      if (!known.has(name)) known.set(name, COMPUTED[step.name](this, at, before?.along("k", at) ?? [], step));
      return known.get(name);
    };
  }

  // The vectors of one head of the keys or the values, one after the other.
  vectors(name, letter, head) {
    const step = /** @type {Step} */ (this.step(name)), size = this.size.k * this.size[letter];
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
  row(/** @type {Step} */ step, head, query) {
    return step.along("k", this.at(head, query, 0)) ??
      (step === this.weights || step === this.used ? this.largestKept(head, query) : null);
  }

  largestKept(head, query) {
    const row = Array(this.size.k).fill(undefined), at = this.kept.indexOf(query);
    if (!this.links || at < 0) return row;
    const { n } = this.links, [weights, keys] = [this.links.weights, this.links.keys].map(numbersOf);
    const start = (head * this.kept.length + at) * n;
    for (let i = start; i < start + n; i++) {
      if (weights[i] > 0) row[keys[i]] = weights[i];
    }
    return row;
  }

  // The row of a query for a picture: where the page has no weight of an image, that of the map, in which the keys
  // of a cell share its weight. If cells are blocks of patches, all of it is that of the map.
  drawn(head, query) {
    const row = this.row(this.used, head, query) ?? [];
    if (!this.picture || !row.includes(undefined)) return row;
    const map = this.weights.grid(head, false), cells = this.blocksOf(head);
    return row.map((weight, key) => {
      if (weight !== undefined && !cells) return weight;
      const cell = this.cellOf(query, key, map), [first, last] = this.columnSpan(cell.column, map.columns);
      const size = cells ? this.tokensOf(cell.column).length : last - first + 1;
      return Math.max(0, map.values[cell.row * map.columns + cell.column]) / size;
    });
  }

  // The cell of each token, if the page has a map of the head, or any map, whose cells are blocks of patches.
  blocksOf(head = /** @type {number | null} */ (null)) {
    const { before, rows, columns, block } = this.picture ?? { before: 0, rows: 0, columns: 0, block: null };
    if (!block || block === 1 || (head !== null && this.used.isExact(head))) return null;
    const across = Math.ceil(columns / block), fewer = across * Math.ceil(rows / block) - rows * columns;
    return (this.blocks ??= this.keys.map((_, at) => (!this.isPatch(at) ? at + (at < before ? 0 : fewer)
      : before + Math.floor(Math.floor((at - before) / columns) / block) * across + Math.floor((at - before) % columns / block))));
  }

  // The tokens of a cell that is a block of patches.
  tokensOf(cell) {
    const cells = /** @type {number[]} */ (this.blocksOf());
    this.members ??= cells.reduce((lists, it, at) => { (lists[it] ??= []).push(at); return lists; },
      /** @type {number[][]} */ ([]));
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
    if (!this.norms || !row.length || this.blocksOf(head) || row.some((weight) => weight === undefined)) return null;
    const norms = numbersOf(this.norms), start = head * this.size.k;
    const parts = row.map((weight, key) => Math.abs(weight) * norms[start + key]);
    const total = parts.reduce((sum, part) => sum + part, 0);
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
  received(head, /** @type {(query: number) => number[] | null} */ rowOf = (query) => this.drawn(head, query)) {
    const sums = Array(this.size.k).fill(0);
    const stored = this.stored(head);
    for (const query of stored) {
      rowOf(query)?.forEach((weight, key) => { sums[key] += weight || 0; });
    }
    return sums.map((sum) => sum / stored.length);
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
      column: cellOf(key, this.size.k, columns, this.block?.[1]),
    };
  }
}

// The first and last position of a cell of a map. The page of a trace has blocks of equal size, that
// of a report bins of nearly equal size.
function span(cell, length, cells, block) {
  if (block) return [cell * block, Math.min(length, (cell + 1) * block) - 1];
  return [Math.floor(cell * length / cells), Math.floor((cell + 1) * length / cells) - 1];
}

const ends = (tokens) => [tokens[0], tokens.at(-1)];

const cellOf = (position, length, cells, block) =>
  block ? Math.floor(position / block) : Math.floor(((position + 1) * cells - 1) / length);

// Whether two lists have the same words.
const isAlike = (a, b) => a === b || (a.length === b.length && a.every((word, i) => word === b[i]));

// A snapshot whose layers are read on first use.
export class Snapshot {
  constructor(data) {
    this.tokens = data.tokens;
    this.text = data.text ?? data.tokens.join(" ");
    this.guesses = data.guesses ?? null;
    /** @type {schema.NextToken} */
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
  writers(/** @type {Trace} */ trace, query) {
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
    if (!spelling || !this.areTokens(labels)) return undefined;
    return `${labels[position]}\nin the vocabulary: ${spelling.raw[position]}, id ${spelling.ids[position]}`;
  }

  // The size and the colours of an image.
  image(index) {
    const image = this.data.images[index];
    return { stored: image.stored, values: numbersOf(image) };
  }

  // Every step of a layer, in place of what the page had of it except for maps, which are quick to draw.
  addSteps(number, data) {
    const { module, cross_attention, part, max_entropy, queries, keys, norms, norms_withheld, picture, steps: old } = this.data.layers[number];
    const steps = data.steps.map((step) => ({ map: step.computed ? old.find((it) => it.name === step.name)?.map : undefined, ...step }));
    this.read[number] = new Trace({ ...data, steps, module, cross_attention, part, max_entropy, queries, keys, norms, norms_withheld,
      picture }, this.tokens);
  }

  layer(number) {
    return (this.read[number] ??= new Trace(this.data.layers[number], this.tokens));
  }

  // The results for a head: its label, entropy, shares; undefined if there are none.
  finding(layer, head) {
    return this.findings.get(`${layer}.${head}`);
  }

  // The heads with every step on the page.
  * exactHeads() {
    for (const { layer, head } of this.places()) {
      const step = this.data.layers[layer].steps.find((it) => it.name === "scores");
      if (step && (step.kept?.h?.includes(head) ?? !step.kept?.q)) yield [layer, head];
    }
  }

  * places() {
    for (let layer = 0; layer < this.layers; layer++) {
      const { size } = this.data.layers[layer];
      for (let head = 0; head < (size.h ?? 1); head++) yield { layer, head };
    }
  }
}
