// The model in this page: the decoder `clearhead.demo.Decoder`, with its weights in `pageData.model`.
// Read from the top: words become ids, ids become vectors, each block lets the words look at each
// other and then transforms each word by itself, and the last vectors predict the next word.
// Letters: T words, d features, H heads, D = d / H.
//
// A matrix is a Float32Array, row by row. Sums are computed in double precision.

import { decode } from "./data.js";
import { readMask } from "./masks.js";
import { count } from "./marks.js";
import { NO_EDITS, pageData } from "./store.js";

/** @typedef {{rows: number, columns: number, values: Float32Array}} Matrix */

/** @import { SnapshotData, StepData } from "./data.js" */
/** @import { Source } from "./store.js" */

/** @returns {Source | null} */
export function liveSource() {
  if (!pageData.model) return null;
  const model = new LiveModel(pageData.model);
  return {
    can: { text: true, rounds: true, edits: Object.keys(pageData.edits) },
    compute: async (text, given) => model.read(text, { ...NO_EDITS, ...given }),
  };
}

class LiveModel {
  constructor({ words, heads, context, near, longest, why, weights }) {
    this.words = words;
    this.heads = heads;
    this.context = context; // the most words
    this.near = near; // smaller distances have separate buckets
    this.longest = longest; // from here on, distances have the same, last bucket
    this.why = why;
    this.number = new Map(words.map((word, i) => [word, i]));
    /** @type {Record<string, Matrix>} */
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
    const ids = tokens.map((token) => this.number.get(token.toLowerCase()) ?? 0);
    const unknown = ids.flatMap((id, i) => (id === 0 ? [i] : []));
    const layers = [];

    // 1. Each word is a row of the table of embeddings.
    let x = pickRows(this.weights["embed.table.weight"], ids);

    // 2. Each block adds the output of the heads, then that of the feed-forward network.
    for (let layer = 0; layer < this.layers; layer++) {
      const part = (name) => this.weights[`blocks.${layer}.${name}`];
      const { steps, out, v } = this.attention(this.norm(x, part("norm_1.weight"), part("norm_1.bias")), layer, mask, edits);
      const norms = this.norms(v, part("attention.out_proj.weight"), tokens.length);
      x = sum(x, linear(out, part("attention.out_proj.weight"), part("attention.out_proj.bias")));
      const hidden = linear(this.norm(x, part("norm_2.weight"), part("norm_2.bias")),
        part("feed_forward.W_1.weight"), part("feed_forward.W_1.bias"));
      hidden.values.forEach((value, i) => { hidden.values[i] = gelu(value); });
      x = sum(x, linear(hidden, part("feed_forward.W_2.weight"), part("feed_forward.W_2.bias")));
      layers.push({ ...steps, norms: { stored: [this.heads, tokens.length], values: norms } });
    }

    // 3. The last vectors are compared with every word: softmax(norm(x) W^T) predicts the next one.
    const logits = linear(this.norm(x, this.weights["norm.weight"], this.weights["norm.bias"]), this.weights["head.weight"]);
    const labels = tokens.map((token, i) => (ids[i] === 0 ? `${token}(?)` : token));
    const about = `${count(layers.length, "layer")}, ${count(layers.length * this.heads, "head")}, ` +
      count(tokens.length, "token");
    return { tokens: labels, text, about, unknown, guesses: this.guesses(logits), layers };
  }

  // softmax(scale Q K^T + bias) V in every head, with all steps for the page.
  attention(x, layer, mask, edits) {
    const part = (name) => this.weights[`blocks.${layer}.attention.${name}`];
    const T = x.rows, H = this.heads, D = x.columns / H;
    const [q, k, v] = ["query", "key", "value"].map((name) =>
      byHead(linear(x, part(`W_${name}.weight`), part(`W_${name}.bias`)), H));
    const t = edits.temperature, scale = (edits.scale ?? 1 / Math.sqrt(D)) / t;
    const table = part("relative.table");
    const pairs = () => new Float32Array(H * T * T);
    const [scores, scaled, capped, biased, masked, weights, dropped] = Array.from({ length: 7 }, pairs);
    const output = new Float32Array(H * T * D);
    for (let h = 0; h < H; h++) {
      const isOff = edits.off.some(([l, head]) => l === layer && head === h);
      for (let i = 0; i < T; i++) {
        const row = (h * T + i) * T;
        let largest = -Infinity;
        for (let j = 0; j < T; j++) {
          let score = 0;
          for (let d = 0; d < D; d++) score += q[(h * T + i) * D + d] * k[(h * T + j) * D + d];
          scores[row + j] = score;
          let logit = scaled[row + j] = score * scale;
          if (edits.softcap) logit = capped[row + j] = edits.softcap * Math.tanh(logit / edits.softcap);
          logit = biased[row + j] = logit + table.values[h * table.columns + this.bucket(i - j)] / t;
          masked[row + j] = j <= i && mask(i, j) ? logit : -Infinity;
          largest = Math.max(largest, masked[row + j]);
        }
        let total = 0;
        for (let j = 0; j < T; j++) {
          weights[row + j] = largest === -Infinity ? 0 : Math.exp(masked[row + j] - largest);
          total += weights[row + j];
        }
        for (let j = 0; j < T; j++) {
          if (total) weights[row + j] /= total;
          dropped[row + j] = isKept(edits, 0, h, i, j) ? weights[row + j] / (1 - edits.dropout) : 0;
          if (isOff) continue;
          const used = edits.dropout ? dropped[row + j] : weights[row + j];
          for (let d = 0; d < D; d++) output[(h * T + i) * D + d] += used * v[(h * T + j) * D + d];
        }
      }
    }
    const size = { h: H, q: T, k: T, d: D, v: D, g: H };
    /** @returns {StepData} */
    const step = (name, formula, axes, values) => ({
      name, formula, why: this.why[name], axes, values, kept: {}, integer: false,
      stored: axes.map((letter) => size[letter]),
      shape: axes.map((letter) => [letter, size[letter]]),
      axis_names: Object.fromEntries(axes.map((letter) => [letter, pageData.names?.[letter]])),
    });
    const short = (x) => String(Number(x.toPrecision(6)));
    const before = scale === 1 ? "scores" : "scaled", last = edits.softcap ? "capped" : before;
    const matrix = ["h", "q", "k"];
    const over = t === 1 ? "" : ` / ${short(t)}`;
    const steps = [
      step("query", "Q", ["h", "q", "d"], q),
      step("key", "K", ["g", "k", "d"], k),
      step("value", "V", ["g", "k", "v"], v),
      step("scores", "Q Kᵀ", matrix, scores),
      scale === 1 ? null : step("scaled", `scores · ${short(scale)}${edits.scale === null && t === 1 ? ` = scores / √${D}` : ""}`, matrix, scaled),
      !edits.softcap ? null : step("capped", `${short(edits.softcap)} · tanh(${before} / ${short(edits.softcap)})`, matrix, capped),
      step("biased", `${last} + bias${over}`, matrix, biased),
      step("masked", "biased where the mask allows, else −∞", matrix, masked),
      step("weights", "softmax(masked)", matrix, weights),
      !edits.dropout ? null : step("dropped", `weights · kept / (1 − ${short(edits.dropout)})`, matrix, dropped),
      step("output", `${edits.dropout ? "dropped" : "weights"} · V`, ["h", "q", "v"], output),
    ].filter((it) => it !== null);
    const settings = { scale, ...(edits.softcap ? { softcap: edits.softcap } : {}),
      ...(edits.dropout ? { dropout: edits.dropout, seed: edits.seed } : {}) };
    return { steps: { size, settings, steps }, out: joinHeads(output, T, H, D), v };
  }

  // |v W_O| of each head and key, the norm of what the value writes.
  norms(v, weight, T) {
    const d = weight.rows, D = d / this.heads, norms = new Float32Array(this.heads * T);
    for (let i = 0; i < norms.length; i++) {
      const first = Math.floor(i / T) * D;
      let square = 0;
      for (let row = 0; row < d; row++) {
        let written = 0;
        for (let j = 0; j < D; j++) written += v[i * D + j] * weight.values[row * d + first + j];
        square += written ** 2;
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
      const largest = Math.max(...row), exps = row.map((value) => Math.exp(value - largest));
      const total = exps.reduce((a, b) => a + b, 0);
      return exps.map((value, i) => /** @type {[string, number]} */ ([this.words[i], Math.round(value / total * 1e4) / 1e4]))
        .sort((a, b) => b[1] - a[1]).slice(0, 6);
    });
  }
}

// ---- matrices ------------------------------------------------------------------------------

const matrix = (rows, columns) => ({ rows, columns, values: new Float32Array(rows * columns) });

// Weights are stored in 24 bits: integers in two parts, and a unit for each row.
function scaledRows({ stored: [rows, columns], units, numbers, rest }) {
  const x = matrix(rows, columns), unit = decode(units), high = decode(numbers), low = decode(rest);
  for (let i = 0; i < high.length; i++) x.values[i] = (256 * high[i] + low[i]) * unit[Math.floor(i / columns)];
  return x;
}

function pickRows(table, ids) {
  const x = matrix(ids.length, table.columns);
  ids.forEach((id, i) => x.values.set(table.values.subarray(id * table.columns, (id + 1) * table.columns), i * table.columns));
  return x;
}

const sum = (a, b) => ({ ...a, values: a.values.map((value, i) => value + b.values[i]) });

// x W^T + b
function linear(x, weight, /** @type {Matrix | null} */ bias = null) {
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

// (T, H D) -> (H, T, D), and the reverse.
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

// x P(X <= x) for a normal X. The error function is formula 7.1.26 of Abramowitz and Stegun,
// "Handbook of Mathematical Functions", with an error of at most 1.5e-7.
function gelu(x) {
  const z = Math.abs(x) / Math.SQRT2, t = 1 / (1 + 0.3275911 * z);
  const tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * Math.exp(-z * z);
  return x * (x < 0 ? tail / 2 : 1 - tail / 2);
}

// ---- words ---------------------------------------------------------------------------------

// As clearhead.nn.tokenize: words and signs; combining marks stay with their letter.
function tokenize(text) {
  const glue = "[\\p{M}\\u200c\\u200d\\ufe0f\\u{1f3fb}-\\u{1f3ff}]", letter = "[\\p{L}\\p{N}_]";
  const flag = "[\\u{1f1e6}-\\u{1f1ff}]{2}";
  const character = `[\\u3040-\\u30ff\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff]${glue}*`;
  const word = `(?:(?!${character})${letter}${glue}*)+`, other = "[^\\p{L}\\p{N}_\\s]";
  const sign = `${other}${glue}*(?:(?<=\\u200d)${other}${glue}*)*`;
  const pattern = new RegExp(`${flag}|${character}|${word}(?:['\\u2019]${word})*|${sign}`, "gu");
  return text.normalize("NFC").match(pattern) ?? [];
}

// ---- dropout -------------------------------------------------------------------------------

// Whether the weight at (b, h, q, k) is kept: a hash of its position, as in every engine.
function isKept({ dropout, seed }, ...place) {
  if (!dropout) return true;
  let key = stir(stir(0, seed % 2 ** 32), Math.floor(seed / 2 ** 32));
  for (const index of place) key = stir(key, index);
  return key >= Math.round(dropout * 2 ** 32);
}

function stir(key, word) {
  let x = key ^ (Math.imul(word, 0x9e3779b1) + 0x7f4a7c15);
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}
