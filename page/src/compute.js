// Another text, or the same with edits: the source computes it, then all of it is drawn at once.

import { Snapshot, decode } from "./data.js";
import { changedEdits, hasEdits } from "./edits.js";
import { byId } from "./marks.js";
import { besideName, go, isComparable, settle } from "./state.js";
import { NO_EDITS, chosen, opened, pageData, screen, store } from "./store.js";
import { tellingQuery } from "./telling.js";

export const can = (name) => Boolean(store.source?.can.edits.includes(name));

// A change builds on what was last asked for, which may still be computed.
export const asked = () => store.wanted ?? { text: store.current.text, edits: chosen.edits };
export const edit = (changes, field = null) => compute(asked().text, { ...asked().edits, ...changes }, field);

// Another text or other edits: the source computes, then all of it is drawn at once. `field` is the
// one whose value was changed.
export async function compute(text, edits, field = null) {
  const { source } = store;
  if (!source) return;
  await answered(async (isNewest) => {
    store.wanted = { text, edits };
    store.refusedField = null;
    screen.drawControls();
    let plain = store.current, compared = null, after = null;
    try {
      if (text !== store.current.text) plain = new Snapshot(keepLabels(await source.compute(text, NO_EDITS)));
      compared = plain;
      if (hasEdits(edits)) {
        if (source.can.rounds && plain === opened) compared = new Snapshot(keepLabels(await source.compute(text, NO_EDITS)));
        after = new Snapshot(keepLabels(await source.compute(text, edits)));
      }
    } catch (error) {
      // What was refused is asked for no longer; a text that could be read still is.
      if (isNewest()) {
        store.wanted = plain !== store.current ? { text, edits: chosen.edits } : null;
        store.refusedField = field;
      }
      throw error;
    }
    if (!isNewest()) return;
    store.wanted = null;
    if (store.kept && !isComparable(plain)) say(`${besideName()} read the text of this page only.`);
    const isWithoutEffect = changedEdits(edits).length > 0 && (!after || isAlike(compared, after));
    if (isWithoutEffect) after = null;
    const isNewText = plain !== store.current, had = chosen.query;
    const follow = isNewText ? sameWords(plain) : {};
    [store.current, store.before, store.edited] = [plain, compared, after];
    Object.assign(chosen, { edits, ...follow, ...(after ? { others: [] } : {}) });
    settle();
    if (isNewText && had !== null && chosen.query === null) chosen.query = tellingQuery(chosen.layer, chosen.head);
    if (isNewText) screen.fillAll();
    if (isWithoutEffect) say(hasEdits(edits) ? NO_EFFECT : "The seed counts once weights are dropped.", true);
    go({});
  }, text !== store.current.text);
}

const NO_EFFECT = "With this every number stays as it was.";

// Are the numbers of two snapshots of a text the same, in every head? A digest of the outputs can say so,
// of a long text nothing else; without one, a snapshot that holds all numbers.
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

// Waits for what the source answers, and says what went wrong; of another text, that what is shown is
// of the one before. A host that takes its time can be stopped.
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

// A field of one line drops what ends a line, and would join the words beside it.
export function inOneLine(text) {
  return text.replace(/\s*[\r\n]+\s*/g, " ");
}

export function stop() {
  store.computing++;
  store.source?.cancel?.();
  byId("stop").hidden = true;
  store.wanted = store.refusedField = null;
  byId("text").value = inOneLine(store.current.text);
  say("Stopped. The text is the one before.");
  screen.drawControls();
}

// Labels that were measured hold for every text; the others, and effects, were of the text before.
export function keepLabels(data) {
  if (data.heads || !opened.data.heads) return data;
  return { ...data, heads: opened.data.heads.filter((it) => it.measured).map(({ effect, ...it }) => it) };
}

// The chosen query in another text: the same position if its word is still near it, else the word,
// else the position if no word was added or taken away, else none.
function sameWords(next) {
  const moved = (position) => {
    if (position === null) return null;
    const word = store.current.tokens[position], shift = next.tokens.length - store.current.tokens.length;
    if (next.tokens[position] === word) return position;
    if (next.tokens[position + shift] === word) return position + shift;
    const found = next.tokens.indexOf(word);
    return found >= 0 ? found : shift === 0 ? position : null;
  };
  return { query: moved(chosen.query), key: null };
}

// What went wrong, or what is being done. While a text is refused, what is shown of the one before is
// dimmed.
export function say(words, isProgress = false, isRefusal = false) {
  store.isRefused = isRefusal;
  byId("app").classList.toggle("refused", store.isRefused);
  for (const id of ["edit-said", "typed"]) {
    byId(id).textContent = words;
    byId(id).classList.toggle("progress", isProgress);
  }
}

// Keeps the text, or the other model that the page holds, to stand beside; or lets it go.
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
