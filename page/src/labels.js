// The tokens of the text that the page shows, and the effect of a head in words.

import { token } from "./marks.js";
import { shownTrace, snapshot } from "./state.js";

// The token at a position of a text, with its spelling in the vocabulary for the pointer.
export const tokenIn = (labels, position, most = 24) => token(labels[position], most, snapshot().spelled(labels, position));
export const queryToken = (position, most = 24) => tokenIn(shownTrace().queries, position, most);
export const keyToken = (position, most = 24) => tokenIn(shownTrace().keys, position, most);

// What changes without a head, what it causes, and the first as a sentence. Null if it was not measured.
export function effectOf(it) {
  if (it?.effect == null) return null;
  const metric = snapshot().effectMetric, size = Number(Math.abs(it.effect).toPrecision(2)), falls = it.effect < 0;
  if (metric === "turn") {
    return { without: `vectors turn by ${size}`, causes: `turns vectors by ${size}`,
      sentence: `Without this head the vectors after the last layer turn by ${size}: the mean of 1 - cosine.` };
  }
  const signed = `${falls ? "−" : "+"}${size}`;
  if (metric === "loss") {
    return { without: `loss ${signed} nats`, causes: `${falls ? "costs" : "saves"} ${size} nats of loss`,
      sentence: `Without this head the mean loss of the next token in this text ${falls ? "falls" : "grows"} by ${size} nats.` };
  }
  return { without: signed, causes: `changes ${metric} by ${falls ? "" : "−"}${size}`,
    sentence: `Without this head ${metric} changes by ${signed}.` };
}
