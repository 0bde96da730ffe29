"use strict";

// 1. The data: what Python wrote into this page, and how to read a number from it.
//
// Letters, as everywhere in clearhead: h head, g key head, q query, k key,
// d feature, v value feature, e embedding feature.

const opened = JSON.parse(document.getElementById("trace").textContent,
  (_, value) => (value?.float === undefined ? value : Number(value.float)));

class Step {
  constructor(told, among) {
    Object.assign(this, told, { among });
    this.pair = this.axes.includes("q") && this.axes.includes("k");
    this.slots = {};
    for (const [letter, positions] of Object.entries(this.kept)) {
      this.slots[letter] = new Map(positions.map((position, slot) => [position, slot]));
    }
  }

  // Decoded on first use: a page of many heads opens before all of it is read.
  get values() {
    return (this.decoded ??= decode(this));
  }

  // What the maps draw: the same numbers, or the pooled ones of a long text.
  get cells() {
    return this.map ? (this.pooled ??= decode(this.map)) : this.values;
  }

  // Is there a map of every head?
  get drawn() {
    return this.pair && (this.map !== undefined || !this.kept.q);
  }

  // The numbers along `free` with every other axis held at `place`, for example
  // along("k", {h: 0, q: 3}) is a row of scores. Null where the page kept none.
  along(free, place) {
    if (!this.data) return null;
    let start = 0, stride = 1, step = 0, length = 1;
    for (let axis = this.axes.length - 1; axis >= 0; axis--) {
      const letter = this.axes[axis];
      if (letter === free) {
        [step, length] = [stride, this.stored[axis]];
      } else {
        const at = place[letter] ?? 0;
        const slot = this.slots[letter] ? this.slots[letter].get(at) : at;
        if (slot === undefined) return null;
        start += slot * stride;
      }
      stride *= this.stored[axis];
    }
    return Array.from({ length }, (_, i) => this.values[start + i * step]);
  }

  // One head of a queries x keys step as a grid of cells; of one head a report keeps a finer map.
  grid(head, fine = true) {
    if (fine && this.fine?.head === head) {
      const [rows, columns] = this.fine.stored;
      return { rows, columns, values: (this.fine.values ??= decode(this.fine)) };
    }
    const [rows, columns] = (this.map ?? this).stored.slice(-2);
    const start = this.axes.includes("h") ? head * rows * columns : 0;
    return { rows, columns, values: this.cells.subarray(start, start + rows * columns) };
  }
}

const KINDS = { f8: Float64Array, f4: Float32Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array };

function decode({ kind, data, top }) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const values = new KINDS[kind](bytes.buffer);
  if (top === undefined) return values;
  // A shade is the square root of a share of the largest; 0 is where nobody may look.
  return Float32Array.from(values, (shade) => (shade ? ((shade - 1) / 254) ** 2 * top : -Infinity));
}

// What is open now: the trace, or one layer of a report, read as a trace is.
let trace, steps, pairs, maps, weights, mixed, heads, keyHeads;

const layers = opened.layers?.map(() => null);

function layerOf(told) {
  const among = [];
  for (const step of told.steps) among.push(new Step(step, among));
  const numbers = (size) => Array.from({ length: size }, (_, i) => String(i));
  // A side that the layer says nothing of has the report's tokens; null means that nobody told.
  const labels = (said, size) => (said === undefined ? opened.tokens : said) ?? numbers(size);
  return {
    names: opened.names, ...told, steps: among,
    queries: labels(told.queries, told.size.q), keys: labels(told.keys, told.size.k),
  };
}

// The layer of that number, read once.
const layer = (at) => (layers[at] ??= layerOf(opened.layers[at]));

function open(it) {
  trace = it;
  steps = it.steps;
  pairs = steps.filter((step) => step.pair);
  maps = steps.filter((step) => step.drawn);
  weights = stepNamed("weights");
  // What the values are multiplied by: after dropout where there was any.
  mixed = stepNamed("dropped") ?? weights;
  heads = it.size.h ?? 1;
  keyHeads = it.size.g ?? heads;
}

// What a place of an axis is called: counted from 0, or from where it was cut out of a larger text.
const numbered = (letter, at) => at + (trace.first?.[letter] ?? 0);

const stepNamed = (name) => steps.find((step) => step.name === name);

// Where the reader stands; page.js moves it.
const state = { show: "weights", layer: 0, head: 0, query: 0, key: 0, row: 0, column: 0, stage: 0 };

function place(changes = {}) {
  const at = { h: state.head, q: state.query, k: state.key, ...changes };
  return { ...at, g: Math.floor(at.h / (heads / keyHeads)) };
}

// The row of a queries x keys step that belongs to the chosen query; of the weights, where no more
// is kept, the largest ones, with holes between them.
const rowOf = (step) => step.along("k", place()) ?? ([weights, mixed].includes(step) ? largestKept() : null);

function largestKept() {
  const { kept, links } = trace;
  const row = Array(trace.size.k).fill(undefined);
  if (!links) return row;
  links.found ??= { weights: decode(links.weights), keys: decode(links.keys) };
  const start = (state.head * kept.length + kept.indexOf(state.query)) * links.n;
  for (let i = start; i < start + links.n; i++) {
    const weight = links.found.weights[i] / 65535;
    if (weight > 0) row[links.found.keys[i]] = weight;
  }
  return row;
}

// Which keys the chosen query may not look at, as far as the page knows.
function maskedKeys() {
  const masked = stepNamed("masked"), row = masked && rowOf(masked);
  return row ? row.map((score) => score === -Infinity) : trace.keys.map(() => false);
}

// The positions that a cell of a map stands for, first and last: blocks all alike in the page of a
// trace, bins as even as can be in a report.
function span(cell, length, cells, block) {
  if (block) return [cell * block, Math.min(length, (cell + 1) * block) - 1];
  return [Math.floor(cell * length / cells), Math.floor((cell + 1) * length / cells) - 1];
}

const cellOf = (position, length, cells, block) =>
  block ? Math.floor(position / block) : Math.floor(((position + 1) * cells - 1) / length);

const rowSpan = (cell, head = state.head) =>
  span(cell, trace.size.q, weights.grid(head).rows, trace.block?.[0]);
const columnSpan = (cell, head = state.head) =>
  span(cell, trace.size.k, weights.grid(head).columns, trace.block?.[1]);
