"use strict";

// 1. The data: the JSON that Python wrote into this page, and how to read a number from it.
//
// Letters, as everywhere in clearhead: h head, g key head, q query, k key,
// d feature, v value feature, e embedding feature.

const pageData = JSON.parse(document.getElementById("trace").textContent,
  (_, value) => (value?.float === undefined ? value : Number(value.float)));

// One step. `siblings` are all steps of its trace; `isPair` says that it is queries x keys.
class Step {
  constructor(data, siblings) {
    Object.assign(this, data, { siblings });
    this.isPair = this.axes.includes("q") && this.axes.includes("k");
    // Of an axis that is not kept in full: the index in the data, by position.
    this.indexOf = {};
    for (const [letter, positions] of Object.entries(this.kept)) {
      this.indexOf[letter] = new Map(positions.map((position, index) => [position, index]));
    }
  }

  // Decoded on first use, so that a page of many heads opens quickly.
  get values() {
    return (this.decoded ??= decode(this));
  }

  // The numbers that maps draw: these, or the pooled ones of a long text.
  get cells() {
    return this.map ? (this.pooled ??= decode(this.map)) : this.values;
  }

  // Does the page hold a map of every head?
  get hasMap() {
    return this.isPair && (this.map !== undefined || !this.kept.q);
  }

  // The numbers along `free` at an index of every other axis, for example
  // along("k", {h: 0, q: 3}) is a row of scores. Null if the page does not hold them.
  along(free, indices) {
    if (!this.data) return null;
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
    return Array.from({ length }, (_, i) => this.values[start + i * step]);
  }

  // One head of a queries x keys step as a grid of cells. One head of a long report has a larger
  // map; `fine` says whether to use it.
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
  // A shade is the square root of a share of the largest; 0 is a cell that the mask blocks.
  return Float32Array.from(values, (shade) => (shade ? ((shade - 1) / 254) ** 2 * top : -Infinity));
}

// What is shown now: the trace of the page, or one layer of its report, which is read as a trace.
let trace, steps, pairs, maps, weights, usedWeights, heads, keyHeads;

const layers = pageData.layers?.map(() => null);

function traceOf(data) {
  const steps = [];
  for (const step of data.steps) steps.push(new Step(step, steps));
  const numbers = (size) => Array.from({ length: size }, (_, i) => String(i));
  // Undefined means the tokens of the report; null means that the tokens are unknown.
  const labels = (given, size) => (given === undefined ? pageData.tokens : given) ?? numbers(size);
  return {
    names: pageData.names, ...data, steps,
    queries: labels(data.queries, data.size.q), keys: labels(data.keys, data.size.k),
  };
}

// The layer of that number; it is parsed once.
const layer = (number) => (layers[number] ??= traceOf(pageData.layers[number]));

function open(it) {
  trace = it;
  steps = it.steps;
  pairs = steps.filter((step) => step.isPair);
  maps = steps.filter((step) => step.hasMap);
  weights = stepNamed("weights");
  // What the values are multiplied by: the weights after dropout, if there was dropout.
  usedWeights = stepNamed("dropped") ?? weights;
  heads = it.size.h ?? 1;
  keyHeads = it.size.g ?? heads;
}

// The number that is shown for an index of an axis: from 0, or from where a larger text was cut.
const numbered = (letter, index) => index + (trace.first?.[letter] ?? 0);

const stepNamed = (name) => steps.find((step) => step.name === name);

// What is chosen. Only `go` in page.js changes it.
const state = { show: "weights", layer: 0, head: 0, query: 0, key: 0, row: 0, column: 0, stage: 0 };

// The chosen index of every axis, but for `changes`.
function selection(changes = {}) {
  const indices = { h: state.head, q: state.query, k: state.key, ...changes };
  return { ...indices, g: Math.floor(indices.h / (heads / keyHeads)) };
}

// The row of a queries x keys step for the chosen query. If the page holds only the largest
// weights, the others are undefined.
const rowOf = (step) =>
  step.along("k", selection()) ?? ([weights, usedWeights].includes(step) ? largestKept() : null);

function largestKept() {
  const { kept, links } = trace;
  const row = Array(trace.size.k).fill(undefined);
  if (!links) return row;
  links.decoded ??= { weights: decode(links.weights), keys: decode(links.keys) };
  const start = (state.head * kept.length + kept.indexOf(state.query)) * links.n;
  for (let i = start; i < start + links.n; i++) {
    const weight = links.decoded.weights[i] / 65535;
    if (weight > 0) row[links.decoded.keys[i]] = weight;
  }
  return row;
}

// Which keys the mask blocks for the chosen query, if the page holds the masked scores.
function maskedKeys() {
  const masked = stepNamed("masked"), row = masked && rowOf(masked);
  return row ? row.map((score) => score === -Infinity) : trace.keys.map(() => false);
}

// The first and last position of a cell of a map: blocks of equal size in the page of a trace, bins
// of nearly equal size in that of a report.
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
