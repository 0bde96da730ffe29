"use strict";

// 1. The data: what Python wrote into this page, and how to read a number from it.
//
// Letters, as everywhere in clearhead: h head, g key head, q query, k key,
// d feature, v value feature, e embedding feature.

const trace = JSON.parse(document.getElementById("trace").textContent);

const heads = trace.size.h ?? 1;
const keyHeads = trace.size.g ?? heads;

class Step {
  constructor(told) {
    Object.assign(this, told);
    this.pair = this.axes.includes("q") && this.axes.includes("k");
    this.slots = {};
    for (const [letter, positions] of Object.entries(this.kept)) {
      this.slots[letter] = new Map(positions.map((position, slot) => [position, slot]));
    }
  }

  // Decoded on first use: a page of many heads opens before all of it is read.
  get values() {
    return (this.decoded ??= decode(this.kind, this.data));
  }

  // What the maps draw: the same numbers, or the pooled ones of a long text.
  get cells() {
    return this.map ? (this.pooled ??= decode(this.map.kind, this.map.data)) : this.values;
  }

  // The numbers along `free` with every other axis held at `place`, for example
  // along("k", {h: 0, q: 3}) is a row of scores. Null where the page kept none.
  along(free, place) {
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

  // One head of a queries x keys step as a grid of cells.
  grid(head) {
    const [rows, columns] = (this.map ?? this).stored.slice(-2);
    const start = this.axes.includes("h") ? head * rows * columns : 0;
    return { rows, columns, values: this.cells.subarray(start, start + rows * columns) };
  }
}

function decode(kind, data) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return kind === "f8" ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
}

const steps = trace.steps.map((told) => new Step(told));
const stepNamed = (name) => steps.find((step) => step.name === name);
const pairs = steps.filter((step) => step.pair);
const weights = stepNamed("weights");
// What the values are multiplied by: after dropout where there was any.
const mixed = stepNamed("dropped") ?? weights;

// Where the reader stands. `go` in page.js is the only one that moves it.
const state = { show: "weights", head: 0, query: 0, key: 0, row: 0, column: 0, stage: 0 };

function place(changes = {}) {
  const at = { h: state.head, q: state.query, k: state.key, ...changes };
  return { ...at, g: Math.floor(at.h / (heads / keyHeads)) };
}

// The row of a queries x keys step that belongs to the chosen query.
const rowOf = (step) => step.along("k", place());

// Which keys the chosen query may not look at.
function maskedKeys() {
  const masked = stepNamed("masked");
  return masked ? rowOf(masked).map((score) => score === -Infinity) : trace.keys.map(() => false);
}
