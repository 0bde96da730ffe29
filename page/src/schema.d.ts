// Made by `make page` from clearhead.explorer.html.schema; do not edit.

/**
 * The data of a page: the JSON that Python writes into it, or sends to it, and its script reads.
 *
 * This is the only description. `make page` writes it as TypeScript to `page/src/schema.d.ts`, against
 * which the script is checked, as mypy checks the Python that builds the data.
 *
 * Letters, as everywhere in clearhead: h head, g key head, q query, k key, d feature, v value
 * feature, e embedding feature, b batch. A position counts from 0. Infinity and NaN are written as
 * ``{"float": "NaN"}`` and read as numbers.
 */

/**
 * A tensor: its shape, its dtype as NumPy names it, and its little-endian bytes in base64.
 */
export interface Numbers {
  stored: number[];
  kind: "f8" | "f4" | "u4" | "i2" | "u2" | "u1";
  data: string;
}

/**
 * A map of one byte a cell: 0 is masked; else 1 + 254 times the square root of the cell's
 * fraction of `top`.
 */
export interface Shades {
  stored: number[];
  kind: "f8" | "f4" | "u4" | "i2" | "u2" | "u1";
  data: string;
  top: number;
}

/**
 * The larger map of one head.
 */
export interface FineMap {
  stored: number[];
  kind: "f8" | "f4" | "u4" | "i2" | "u2" | "u1";
  data: string;
  top: number;
  head: number;
}

/**
 * A step of the computation in words. `shape` has every axis, `axes` those that are stored.
 */
export interface StepText {
  name: string;
  formula: string;
  why: string;
  axes: string[];
  shape: [string, number][];
  axis_names: Record<string, string>;
  kept: Record<string, number[]>;
}

/**
 * A step with its numbers, if the page holds them. `kept` has, for each axis that is not stored
 * in full, the positions that are. `map` is pooled, of every head.
 */
export interface Step {
  name: string;
  formula: string;
  why: string;
  axes: string[];
  shape: [string, number][];
  axis_names: Record<string, string>;
  kept: Record<string, number[]>;
  integer?: boolean;
  stored?: number[];
  kind?: "f8" | "f4" | "u4" | "i2" | "u2" | "u1";
  data?: string;
  map?: Numbers | Shades;
  fine?: FineMap;
}

/**
 * The `n` largest weights of each kept query, in units of 1/65535, and their keys.
 */
export interface Links {
  n: number;
  weights: Numbers;
  keys: Numbers;
}

/**
 * One attention call: sizes by letter, the settings that are finite numbers, the steps.
 */
export interface Call {
  size: Record<string, number>;
  settings: Record<string, number>;
  steps: Step[];
}

/**
 * A call, and what is known of it.
 *
 * `queries` and `keys` are words; left out: the tokens of the text; null: unknown, so they are
 * numbered. `kept` are the queries with exact rows; left out: all. `first` is the position of
 * index 0 of an axis where a larger text was cut. A cell of a map pools `block` positions, or one
 * of `bins`. `max_entropy` is that of uniform weights, in nats.
 */
export interface Layer {
  size: Record<string, number>;
  settings: Record<string, number>;
  steps: Step[];
  queries?: string[] | null;
  keys?: string[] | null;
  kept?: number[];
  first?: Record<string, number>;
  block?: [number, number] | null;
  bins?: [number, number];
  links?: Links;
  module?: string;
  cross_attention?: boolean;
  max_entropy?: number;
}

/**
 * What was measured of a head. `links` are (query, key, weight), `received` (key, mean
 * weight). `measured`: on held-out texts, so that the label holds for every text.
 */
export interface HeadNumbers {
  layer: number;
  head: number;
  label: string;
  number: number;
  measured: boolean;
  entropy: number;
  effective: number;
  shares: Record<string, number>;
  links: [number, number, number][];
  received: [number, number][];
}

/**
 * The same with `effect`, the change of `effect_metric` without the head; `evidence`, how many
 * queries the label rests on; `withheld`, why a head has no label.
 */
export interface Head {
  layer: number;
  head: number;
  label: string;
  number: number;
  measured: boolean;
  entropy: number;
  effective: number;
  shares: Record<string, number>;
  links: [number, number, number][];
  received: [number, number][];
  effect?: number;
  evidence?: string;
  withheld?: string;
}

/**
 * Where the page opens; what is left out, it chooses.
 */
export interface Begin {
  layer?: number;
  head?: number;
  query?: number;
}

/**
 * Of each token its spelling in the vocabulary and its id, and the positions of those that
 * touch the token before them, without a space.
 */
export interface Spelling {
  raw: string[];
  ids: number[];
  joined: number[];
}

/**
 * What a model did with one text.
 */
export interface Reading {
  tokens: string[];
  layers: Layer[];
}

/**
 * The same, and what is known of it.
 *
 * `names` are those of the axes, `name` is the model's. `spelling` is that of the tokens; left
 * out: they are words. `text` is what the text field holds; left
 * out: the tokens. `about` has the sizes in words. `unknown` are positions of words that the model
 * does not know. `guesses` has, for each position, the most probable next words. `heads` has one
 * entry for each head of each layer. `effect_metric` is "loss" (in nats), "turn" or a name;
 * `effects_withheld` is why there are no effects. `outputs` is a digest of what every attention
 * call returned.
 */
export interface Snapshot {
  tokens: string[];
  layers: Layer[];
  names?: Record<string, string>;
  name?: string;
  spelling?: Spelling;
  text?: string;
  about?: string;
  unknown?: number[];
  guesses?: [string, number][][] | null;
  heads?: Head[];
  effect_metric?: string;
  effects_withheld?: string;
  outputs?: string;
  begin?: Begin;
}

/**
 * A matrix in 16 bits a number: each row as whole numbers of a unit of its own.
 */
export interface Rows {
  stored: number[];
  units: Numbers;
  numbers: Numbers;
}

/**
 * A model that the page runs by itself: `clearhead.results.live.LiveModel`.
 */
export interface Model {
  words: string[];
  heads: number;
  context: number;
  near: number;
  longest: number;
  why: Record<string, string>;
  weights: Record<string, Rows>;
}

/**
 * An edit of attention that a page offers. `label` stands beside its control, `words` say what
 * it does, `rule` what a value must be. `default` leaves everything as the model does it.
 */
export interface Edit {
  kind: "heads" | "number" | "whole number" | "mask";
  default: number | [number, number][] | null;
  label: string;
  words: string;
  rule: string;
}

/**
 * An edit by a number: more than `over`, at least `least`, less than `below`, for `example`.
 * Its control is a `slider`, (least, most, step), of powers of two if it `doubles`; else a field,
 * in which `placeholder` stands for null.
 */
export interface NumberEdit {
  kind: "heads" | "number" | "whole number" | "mask";
  default: number | [number, number][] | null;
  label: string;
  words: string;
  rule: string;
  over?: number;
  least?: number;
  below?: number;
  example?: number;
  slider?: [number, number, number];
  doubles?: boolean;
  placeholder?: string;
}

/**
 * The values of all edits, as a request has them: `off` are (layer, head).
 */
export interface Edits {
  off: [number, number][];
  temperature: number;
  scale: number | null;
  mask: string | null;
  softcap: number | null;
  dropout: number;
  seed: number;
}

/**
 * A mask to choose from. Does it change a model whose mask is causal?
 */
export interface SuggestedMask {
  mask: string;
  words: string;
  changes_causal: boolean;
}

/**
 * Masks that a page suggests, and the arguments of those that a model in the page reads.
 */
export interface Masks {
  suggested: SuggestedMask[];
  arguments: Record<string, string[]>;
}

/**
 * What every page holds besides a snapshot: the points of its colour scales, by scale and
 * theme, what it can offer, and what computes it anew.
 */
export interface PageParts {
  inks: Record<string, Record<string, [number, number, number][]>>;
  edits: Record<string, NumberEdit>;
  masks: Masks;
  host: "server" | "notebook" | "frame" | null;
}

/**
 * All that a page holds. With a `model` it reads other texts by itself; `beside` is another
 * model's snapshot of the same text, to compare with.
 */
export interface Page {
  tokens: string[];
  layers: Layer[];
  names?: Record<string, string>;
  name?: string;
  spelling?: Spelling;
  text?: string;
  about?: string;
  unknown?: number[];
  guesses?: [string, number][][] | null;
  heads?: Head[];
  effect_metric?: string;
  effects_withheld?: string;
  outputs?: string;
  begin?: Begin;
  inks: Record<string, Record<string, [number, number, number][]>>;
  edits: Record<string, NumberEdit>;
  masks: Masks;
  host: "server" | "notebook" | "frame" | null;
  model?: Model;
  beside?: Snapshot;
}
