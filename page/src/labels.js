// The tokens of the text that the page shows.

import { token } from "./marks.js";
import { shownTrace, snapshot } from "./state.js";

// The token at a position of a text, with its spelling in the vocabulary for the pointer.
const tokenAt = (labels, position, most) => token(labels[position], most, snapshot().spelled(labels, position));
export const queryToken = (position, most = 24) => tokenAt(shownTrace().queries, position, most);
export const keyToken = (position, most = 24) => tokenAt(shownTrace().keys, position, most);
