// Compute another text, or the same text with edits, and draw the result.

import { Snapshot, decode } from "./data.js";
import { changedEdits, hasEdits } from "./edits.js";
import { byId } from "./marks.js";
import { besideName, go, isComparable, settle } from "./state.js";
import { NO_EDITS, chosen, opened, pageData, screen, store } from "./store.js";
import { tellingQuery } from "./telling.js";

export const can = (name) => Boolean(store.source?.can.edits.includes(name));

// A change is added to the newest request, which may still run.
export const asked = () => store.wanted ?? { text: store.current.text, edits: chosen.edits };
export const edit = (changes, field = null) => compute(asked().text, { ...asked().edits, ...changes }, field);

// Computes another text or other edits, and draws the result. `field` is the one that changed.
export async function compute(text, edits, field = null) {
  const { source } = store;
  if (!source) return;
  await answered(async (isNewest) => {
    store.wanted = { text, edits };
    store.refusedField = null;
    screen.drawControls();
    const read = async (edits) => new Snapshot(keepLabels(await source.compute(text, edits)));
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
      // A refused value is removed from the request; a text that was read stays.
      if (isNewest()) {
        store.wanted = plain !== store.current ? { text, edits: chosen.edits } : null;
        store.refusedField = field;
      }
      throw error;
    }
    if (!isNewest()) return;
    store.wanted = null;
    if (store.kept && !isComparable(plain)) say(`${besideName()} has results for the text of this page only.`);
    const isWithoutEffect = changedEdits(edits).length > 0 && (!after || isAlike(compared, after));
    if (isWithoutEffect) after = null;
    const isNewText = plain !== store.current, had = chosen.query;
    const follow = isNewText ? nextBegin(plain) ?? sameWords(plain) : {};
    [store.current, store.before, store.edited] = [plain, compared, after];
    Object.assign(chosen, { edits, ...follow, ...(after ? { others: [] } : {}) });
    settle();
    if (isNewText && had !== null && chosen.query === null) chosen.query = tellingQuery(chosen.layer, chosen.head);
    if (isNewText) screen.fillAll();
    if (isWithoutEffect) say(hasEdits(edits) ? NO_EFFECT : "The seed matters only with dropout.", true);
    go({});
  }, text !== store.current.text);
}

const NO_EFFECT = "This changes no number.";

// Whether two snapshots of a text have the same numbers in every head. A digest of the outputs shows it;
// without one, only a snapshot with all numbers does.
function isAlike(a, b) {
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

// Waits for the source, and shows an error; for another text also that the results are those of the
// earlier text. A slow host can be stopped.
export async function answered(ask, isOfAnother = false) {
  const request = ++store.computing, isNewest = () => request === store.computing;
  say("");
  byId("stop").hidden = !store.source?.cancel;
  try {
    await ask(isNewest);
  } catch (error) {
    if (!isNewest()) return;
    say(error instanceof Error ? error.message : String(error), false, isOfAnother);
    screen.drawControls();
  } finally {
    if (isNewest()) byId("stop").hidden = true;
  }
}

export function stop() {
  store.computing++;
  store.source?.cancel?.();
  byId("stop").hidden = true;
  store.wanted = store.refusedField = null;
  byId("text").value = store.current.text;
  say("Stopped. The text is the earlier one.");
  screen.drawControls();
}

// Measured labels hold for every text; the others, and effects, belong to the text of the page.
export function keepLabels(data) {
  if (data.heads || !opened.data.heads) return data;
  const heads = opened.data.heads.filter((it) => it.measured).map((it) => ({ ...it, effect: null }));
  const only = heads.length ? "Only labels that were measured on held-out stories apply to this text. The others, and effects,"
    : "Labels and effects";
  return { ...data, heads, missing: `${only} are of the text with which the page opened: undo to see them, or run ` +
    "clearhead look on this text." };
}

// Where another text begins, if the page is still where this one began: at the head that writes the
// predicted token, for example.
function nextBegin(next) {
  const { begin } = store.current.data, isThere = begin && chosen.layer === begin.layer && chosen.head === begin.head &&
    chosen.query === begin.query && chosen.key === null;
  return isThere && next.data.begin ? { ...next.data.begin, key: null } : null;
}

// The selected query in another text: the same position if its word is still near it, else the word,
// else the position if the word was replaced by one other, else none.
function sameWords(next) {
  const moved = (position) => {
    if (position === null) return null;
    const word = store.current.tokens[position], shift = next.tokens.length - store.current.tokens.length;
    if (next.tokens[position] === word) return position;
    if (next.tokens[position + shift] === word) return position + shift;
    const found = next.tokens.indexOf(word), isReplaced = [position - 1, position + 1].some((at) =>
      next.tokens[at] !== undefined && next.tokens[at] === store.current.tokens[at]);
    return found >= 0 ? found : shift === 0 && isReplaced ? position : null;
  };
  return { query: moved(chosen.query), key: null };
}

// Shows an error or the progress. While a text is refused, the results of the earlier text are dimmed.
export function say(words, isProgress = false, isRefusal = false) {
  store.isRefused = isRefusal;
  byId("app").classList.toggle("refused", store.isRefused);
  for (const id of ["edit-said", "typed"]) {
    byId(id).textContent = words;
    byId(id).classList.toggle("progress", isProgress);
  }
}

// Keeps the text, or the page's other model, for comparison; or removes it.
export function keep() {
  if (store.kept) store.kept = null;
  else {
    store.kept = pageData.beside ? new Snapshot(pageData.beside) : store.current;
    Object.assign(chosen, { others: [] });
  }
  say("");
  go({});
  if (store.kept && !pageData.beside) byId("text").focus();
}
