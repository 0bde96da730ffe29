// Made by `make page` from clearhead.views.html.schema; do not edit.

/**
 * The data of a page: the JSON that Python writes and the script reads.
 *
 * This is the only description. `make page` writes it as TypeScript to `page/src/schema.d.ts`, with
 * which the script is checked; mypy checks the Python that builds the data.
 *
 * Letters, as everywhere in clearhead: h head, g key head, q query, k key, d feature, v value
 * feature, e embedding feature, b batch. Positions count from 0. Infinity and NaN are written as
 * ``{"float": "NaN"}`` and read as numbers.
 */

/**
 * The most probable token after the text, and the heads that write most of its logit.
 *
 * `writers` has the heads with the largest parts, ordered by `from_key`. `clearest` is the one of
 * them that shows best how the model continues: it looks most at an earlier token, writes a large
 * part of the logit from there, and without it the token is less probable. None if no head does,
 * or if the token itself is improbable.
 */
export interface NextToken {
  token: string;
  probability: number;
  writers: Writer[];
  clearest: Writer | null;
}

/**
 * A head that writes the logit of the predicted next token, at the last token of the text.
 *
 * `part` is what it writes, as in `logit_attribution` with ``center=True``. `key` is the token
 * that adds most to it, `from_key`. `without` is the probability of the predicted token if the
 * head outputs 0; None if not measured.
 */
export interface Writer {
  layer: number;
  head: number;
  part: number;
  key: number;
  from_key: number;
  without: number | null;
}

/**
 * A role of a head, or the evenness of its weights.
 *
 * `label` is its name for people, and `short` that below a small map. `means` follows the number
 * of a head, a fraction or the number of keys; `share` names the fraction of weight. `claim` is a
 * sentence about a head whose query and key show the role. They do if the key is at the distance
 * `offset`, if the token `copy` keys before it is a copy of the query, or as `shows` names it.
 */
export interface RoleText {
  name?: string;
  label?: string;
  kind?: "measured" | "role" | "sink" | "evenness";
  short?: string;
  means?: string;
  share?: string;
  claim?: string;
  offset?: number;
  copy?: number;
  shows?: "pronoun" | "earlier" | "first";
}

/**
 * A tensor: its shape, its dtype as NumPy names it, and its little-endian bytes in base64.
 */
export interface Numbers {
  stored: number[];
  kind: "f8" | "f4" | "u4" | "i2" | "u2" | "u1";
  data: string;
}

/**
 * A map with one byte per cell: 0 if masked, else 1 + 254 sqrt(value / `top`).
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
 * The description of a step. `shape` has all axes, `axes` the stored ones.
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
 * A step with its numbers, if the page has them.
 *
 * `kept` has the stored positions of each axis that is not stored in full. `map` is the pooled map
 * of every head. If the step is `computed`, the script computes it from those before it; `spans`
 * has the first key that each query may look at, and the one after the last.
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
  computed?: boolean;
  spans?: Numbers;
  map?: Numbers | Shades;
  fine?: FineMap;
}

/**
 * The `n` largest weights of each stored query, and their keys.
 */
export interface Links {
  n: number;
  weights: Numbers;
  keys: Numbers;
}

/**
 * An image whose patches are the tokens of a layer, row by row, after the first `before`.
 *
 * `image` is its index in the `images` of the snapshot. A cell of the map is a token, or a square
 * of patches with `block` on a side; null: maps have `bins`. `registers` are the patches that the
 * model uses as registers, by their number among the tokens.
 */
export interface Picture {
  before: number;
  rows: number;
  columns: number;
  image: number;
  block: number | null;
  registers: number[];
}

/**
 * One attention call: its sizes by letter, its finite numeric settings, and its steps.
 */
export interface Call {
  size: Record<string, number>;
  settings: Record<string, number>;
  steps: Step[];
}

/**
 * The norms of the values, |v W_O|, (heads, keys), in units of 1/65535 of the largest; or why
 * they are missing.
 */
export interface LayerNorms {
  norms?: Numbers;
  norms_withheld?: string;
}

/**
 * Why a layer has no step but the weights, if another program computed them.
 */
export interface LayerOrigin {
  steps_withheld?: string;
}

/**
 * A call with its labels and maps.
 *
 * `queries` and `keys` are tokens; missing: the tokens of the text; null: unknown, so they are
 * numbered. `kept` are the queries with exact rows; missing: all. `first` is the position of index
 * 0 of an axis, in a part of a larger text. A cell of a map pools `block` positions, or is one of
 * `bins`. `max_entropy` is that of uniform weights, in nats. `part` is that of a model of two
 * texts, such as "decoder".
 */
export interface Layer {
  size: Record<string, number>;
  settings: Record<string, number>;
  steps: Step[];
  norms?: Numbers;
  norms_withheld?: string;
  steps_withheld?: string;
  queries?: string[] | null;
  keys?: string[] | null;
  kept?: number[];
  first?: Record<string, number>;
  block?: [number, number] | null;
  bins?: [number, number];
  links?: Links;
  module?: string;
  cross_attention?: boolean;
  part?: string;
  max_entropy?: number;
  picture?: Picture;
}

/**
 * A head, as in `models.report.findings.Head`; `roles` are the labels of its roles,
 * and `masses` the fraction of its weight on the keys of each, with the number of its queries.
 */
export interface Head {
  layer: number;
  head: number;
  labels: string[];
  number: number;
  measured: boolean;
  entropy: number;
  effective: number;
  shares: Record<string, number>;
  effect: number | null;
  evidence: string;
  withheld: string;
  roles: string[];
  masses: [number, number][];
}

/**
 * The selection with which the page opens; the page chooses missing parts.
 */
export interface Begin {
  layer?: number;
  head?: number;
  query?: number;
}

/**
 * The spelling of each token in the vocabulary, and its id.
 *
 * `joined` are the positions of tokens that follow the token before them without a space.
 */
export interface Spelling {
  raw: string[];
  ids: number[];
  joined: number[];
}

/**
 * A text with the layers of a model.
 */
export interface Reading {
  tokens: string[];
  layers: Layer[];
}

/**
 * What a component wrote of a contrast. A head is a pair (layer, head), and `source` the token
 * that it read from.
 */
export interface WhyPart {
  name: string;
  part: number;
  head: [number, number] | null;
  source: number | null;
}

/**
 * The largest parts of the key or of the query, how many others there are and their sum, and
 * the sum of all.
 */
export interface WhySide {
  parts: WhyPart[];
  others: [number, number];
  total: number;
}

/**
 * Why a head looks from a query at a key: `models.why.Why`.
 *
 * `sentence` names positions. `frequencies` has the rotary frequencies from the fastest to the
 * slowest, and at last what is not rotated. `further` are the changes of the score if the key
 * were 1, 2, 4, ... 64 tokens further back.
 */
export interface Why {
  layer: number;
  head: number;
  query: number;
  key: number;
  against: string;
  sentence: string;
  weight: number;
  score: number;
  contrast: number;
  softcap: number | null;
  wrote_key: WhySide;
  wrote_query: WhySide;
  frequencies: number[] | null;
  further: number[] | null;
  remarks: string[];
}

/**
 * The same with the results of a report.
 *
 * `names` are the names of the axes, `name` is that of the model. `spelling` is that of the
 * tokens; missing: they are words. `text` is the content of the text field; missing: the tokens.
 * `about` has the sizes in words. `unknown` are positions of unknown words. `guesses` has the most
 * probable next words of each position, and `next_token` the heads that write the last one.
 * `heads` has an entry for each head of each layer. `effect_metric` is "loss" (in nats), "turn" or
 * a name, and `effects_withheld` the reason for missing effects. `outputs` is a digest of the
 * outputs of all attention calls. `why` is computed ahead, for the head with which the page opens
 * and the heads before it; `why_withheld` is the reason if it could not. `images` have the colours
 * of each pixel, (height, width, 3).
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
  next_token?: NextToken;
  heads?: Head[];
  effect_metric?: string;
  effects_withheld?: string;
  outputs?: string;
  begin?: Begin;
  why?: Why[];
  why_withheld?: string;
  images?: Numbers[];
}

/**
 * A matrix with 24 bits per number: each row as integers, 256 `numbers` + `rest`, times its own
 * unit.
 */
export interface Rows {
  stored: number[];
  units: Numbers;
  numbers: Numbers;
  rest: Numbers;
}

/**
 * A model that the page can run: `models.report.live_model.LiveModel`.
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
 * An edit of attention that a page offers.
 *
 * `label` is beside its control, `words` describe its effect, and `rule` the valid values. With
 * `default`, nothing changes.
 */
export interface Edit {
  kind: "heads" | "number" | "whole number" | "mask";
  default: number | [number, number][] | null;
  label: string;
  words: string;
  rule: string;
}

/**
 * An edit by a number: more than `over`, at least `least`, and less than `below`.
 *
 * Its control is a `slider`, (least, most, step), of powers of two if it `doubles`; otherwise a
 * field, whose `placeholder` means null.
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
 * The values of all edits in a request. `off` has pairs (layer, head).
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
 * A mask to choose from. `changes_causal`: whether it changes a model with a causal mask.
 */
export interface SuggestedMask {
  mask: string;
  words: string;
  changes_causal: boolean;
}

/**
 * Suggested masks, and the arguments of the masks that a model in the page can read.
 */
export interface Masks {
  suggested: SuggestedMask[];
  arguments: Record<string, string[]>;
}

/**
 * The parts of every page besides a snapshot.
 *
 * `inks` are the points of the colour scales, by scale and theme; `roles` is the table of roles,
 * the most interesting first; `host` is the program that recomputes the page.
 */
export interface PageParts {
  inks: Record<string, Record<string, [number, number, number][]>>;
  roles: RoleText[];
  edits: Record<string, NumberEdit>;
  masks: Masks;
  host: "server" | "notebook" | "frame" | null;
}

/**
 * A run without the heads `off`, which write the next token, computed ahead for What if.
 */
export interface Ahead {
  off: [number, number][];
  snapshot: Snapshot;
}

/**
 * All data of a page.
 *
 * With a `model`, the page can run other texts. `folder` is the model as a shell names it, for the
 * command that reads another text. `beside` is another model's snapshot of the same text, for
 * comparison.
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
  next_token?: NextToken;
  heads?: Head[];
  effect_metric?: string;
  effects_withheld?: string;
  outputs?: string;
  begin?: Begin;
  why?: Why[];
  why_withheld?: string;
  images?: Numbers[];
  inks: Record<string, Record<string, [number, number, number][]>>;
  roles: RoleText[];
  edits: Record<string, NumberEdit>;
  masks: Masks;
  host: "server" | "notebook" | "frame" | null;
  model?: Model;
  folder?: string;
  ahead?: Ahead;
  beside?: Snapshot;
}

/**
 * A metric, and the edges of the bins of its histograms. Has it `examples`?
 */
export interface SurveyMetric {
  name: string;
  formula: string;
  source: string;
  version: number;
  edges: number[];
  examples: boolean;
}

/**
 * A query with its largest weights. `decile` is 0 to 9, or 10 for the largest values.
 */
export interface SurveyExample {
  decile: number;
  value: number;
  context: number;
  query: number;
  keys: number[];
  weights: number[];
}

/**
 * How the mean of texts of a head and metric differs from that of another survey.
 *
 * `difference` is `mean` - `other`, with its 95 % interval. `effect` is its size in standard
 * deviations of the means of texts, with its interval; None if these do not vary. `q` is its
 * p-value over texts, corrected for the number of heads and metrics.
 */
export interface SurveyDifference {
  mean: number;
  other: number;
  difference: number;
  low: number;
  high: number;
  effect: number | null;
  effect_low: number | null;
  effect_high: number | null;
  q: number;
  texts: number;
}

/**
 * A metric of all heads, in their order: columns of the table `heads`.
 *
 * `mean` is None for a head without a query. `compared` has the differences from another survey,
 * and is empty without one.
 */
export interface SurveyNumbers {
  mean: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
  uniform: (number | null)[];
  compared: (SurveyDifference | null)[];
}

/**
 * A metric of one head alone: the rest of its row, histogram without empty bins, examples.
 */
export interface SurveyDetail {
  sd: number | null;
  quantiles: (number | null)[];
  queries: number;
  texts: number;
  bins: number[];
  counts: number[];
  examples: SurveyExample[];
}

/**
 * A token at one side of a head's links. `token` is an index of `spelling`.
 */
export interface SurveyToken {
  side: "query" | "key";
  token: number;
  count: number;
  lift: number;
}

/**
 * Where the largest weights of the queries of one class are.
 *
 * `shares` has the fraction, and the ends of its 95 % interval, of each of `key_kinds`.
 */
export interface SurveyMix {
  token_class: string;
  queries: number;
  texts: number;
  shares: ([number, number | null, number | null])[];
}

/**
 * What the page has of one head alone. `metrics` leaves out those without a query; `mixes` has
 * one for each class of tokens, then one for all queries.
 */
export interface SurveyDetails {
  mixes: SurveyMix[];
  metrics: Record<string, SurveyDetail>;
  tokens: SurveyToken[];
}

/**
 * One head.
 *
 * `shares` has the fraction of its queries whose largest weight is on each of `key_kinds`.
 * `several` names two behaviours of a head that does more than one thing; "" for another head.
 * `details` are its `SurveyDetails`, packed, and read when the head is selected.
 */
export interface SurveyHead {
  layer: number;
  head: number;
  module: string;
  shares: number[];
  several: string;
  details: string;
}

/**
 * A context of an example, and its numbers in the survey. `tokens` index `spelling`; `pixels`
 * are the colours of a picture, (height, width, 3).
 */
export interface SurveyContext {
  name: string;
  text: number;
  context: number;
  tokens: number[];
  pixels: Numbers | null;
}

/**
 * The vectors of one part of a head on their first principal components, (n, 3) or fewer.
 *
 * `shares` is the fraction of the variance along each. With `all` false, the examples are those
 * whose key is not the first of its context.
 */
export interface SurveyPart {
  name: string;
  all: boolean;
  size: number;
  points: number[][];
  shares: number[];
}

/**
 * An example with the class of the query's token, and the kind of the key.
 */
export interface SurveyVectorExample {
  decile: number;
  value: number;
  context: number;
  query: number;
  keys: number[];
  weights: number[];
  token_class: string;
  looks_at: string;
}

/**
 * The response to the request "vectors" of a survey's page: one head at its examples.
 *
 * Contexts and spelling are those of `SurveyPage`, and only of these examples. `why_rotated` is
 * why vectors before rotation are missing.
 */
export interface SurveyVectors {
  key_head: number;
  parts: SurveyPart[];
  why_rotated: string | null;
  examples: SurveyVectorExample[];
  contexts: SurveyContext[];
  spelling: string[];
  between: string;
}

/**
 * All data of the page of a survey.
 *
 * `key_kinds` and `classes` of tokens have their descriptions. `spelling` has the texts of
 * tokens, and `between` what is between two tokens of a context. The tokenizer puts `around[0]`
 * tokens before the text of each context, and `around[1]` after it.
 * `other` names the survey with which it is compared, and `caution` has what is not compared.
 * Each of `contexts` is a `SurveyContext`, packed, and read when an example is shown. `grid` has
 * the tokens before the patches of pictures, and the rows and columns of these; None for texts.
 */
export interface SurveyPage {
  inks: Record<string, Record<string, [number, number, number][]>>;
  host: "server" | "notebook" | "frame" | null;
  other: string | null;
  caution: string;
  metrics: SurveyMetric[];
  key_kinds: Record<string, string>;
  classes: Record<string, string>;
  heads: SurveyHead[];
  numbers: Record<string, SurveyNumbers>;
  contexts: string[];
  spelling: string[];
  between: string;
  around: [number, number];
  grid: [string[], number, number] | null;
}

/**
 * All data of the page of a training.
 *
 * `heads` are pairs (layer, head), and `values` has each metric, (steps, heads). A finding, or an
 * alarm, is a sentence with its metric, an index of `heads` and a step.
 */
export interface TrainingPage {
  inks: Record<string, Record<string, [number, number, number][]>>;
  steps: number[];
  heads: [number, number][];
  values: Record<string, Numbers>;
  findings: ([string, string, number | null, number | null])[];
}
