// 14. What if: the same text with another temperature, scale, mask, soft cap or dropout, or without
// some heads; before and after stand side by side.

const MASKS = [["", "as the model does"], ["causal", "causal"], ["causal & window(3, 0)", "the last 3 before it"],
  ["window(2, 2)", "2 on each side"], ["everything", "everything"]];
const EDIT_WORDS = {
  temperature: "Every score is divided by it before softmax: above 1 evens the weights out, below 1 sharpens them.",
  scale: "Every score is multiplied by it; left empty, by what the model has, mostly 1/√d of d features.",
  mask: "Which keys a query may look at, of those that the model allows: it only narrows that.",
  softcap: "Bends the scores so that none is larger than it: c · tanh(score / c); left empty, as the model does it.",
  dropout: "This share of the weights becomes 0 by chance, and the others are enlarged in return.",
  seed: "Which weights dropout hits: the same seed hits the same ones.",
};
let computing = 0; // the number of the newest request, so that an older answer is not shown
/** @type {{text: string, edits: any} | null} */
let wanted = null; // what was last asked for, until it is answered; null: what is shown
let refusedField = null; // the field whose value was refused: it keeps it, to be mended
let isRefused = false; // is the text in the field one that could not be read? what is shown is of the one before

// A host declares pageSource; else the page computes by itself, if it holds a model.
/** @type {Source | null} */
const source = (/** @type {any} */ (globalThis).pageSource ?? liveSource)();
const can = (name) => Boolean(source?.can.edits.includes(name));

function buildControls() {
  const form = byId("controls");
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("whatif").addEventListener("click", () => {
    form.hidden = !form.hidden;
    byId("whatif").setAttribute("aria-expanded", !form.hidden);
    drawPicture();
  });
  const field = (name, words, control, read) => {
    control.id = `edit-${name}`;
    control.title = EDIT_WORDS[name];
    control.disabled = !can(name);
    control.addEventListener(control.type === "range" ? "input" : "change", () => {
      const value = read(control), why = control.validity.badInput ? "It is no number." : refusalOf(name, value);
      if (!why) return void edit({ [name]: value }, name);
      refusedField = name;
      say(why, false, isRefused);
      drawControls();
    });
    return make("label", {}, `${words} `, control, make("output", { for: control.id, id: `out-${name}` }));
  };
  const optional = (control) => (control.value.trim() === "" ? null : Number(control.value));
  const off = make("button", { type: "button", id: "edit-off", "aria-pressed": false });
  off.addEventListener("click", () => {
    const { layer, head } = chosen, { off } = asked().edits, rest = off.filter(([l, h]) => l !== layer || h !== head);
    edit({ off: rest.length < off.length ? rest : [...rest, [layer, head]] });
  });
  off.disabled = !can("off");
  const reset = make("button", { type: "button", id: "edit-none" }, "As it was");
  reset.addEventListener("click", () => edit(NO_EDITS));
  form.replaceChildren(
    make("p", { class: "hint", id: "edit-why" }, whyNot()),
    off,
    field("temperature", "Temperature", make("input", { type: "range", min: -2, max: 3, step: 0.1, value: 0 }),
      (it) => Number((2 ** Number(it.value)).toPrecision(3))),
    field("scale", "Scale", make("input", { type: "number", step: "any", placeholder: "1/√d", class: "short" }), optional),
    field("mask", "Mask", make("input", { type: "text", list: "masks", placeholder: "as the model does", maxlength: 200 }),
      (it) => it.value.trim() || null),
    make("datalist", { id: "masks" }, []),
    field("softcap", "Soft cap", make("input", { type: "number", min: 0, step: "any", placeholder: "none", class: "short" }), optional),
    field("dropout", "Dropout", make("input", { type: "range", min: 0, max: 0.9, step: 0.1, value: 0 }), (it) => Number(it.value)),
    field("seed", "Seed", make("input", { type: "number", min: 0, step: 1, value: 0, class: "short" }), (it) => optional(it) ?? 0),
    reset,
    make("p", { class: "hint", id: "edit-said", role: "status" }));
  byId("typing").addEventListener("submit", (event) => event.preventDefault());
  byId("typing").hidden = !source?.can.text;
  byId("text").addEventListener("input", () => compute(byId("text").value, asked().edits));
  byId("text").addEventListener("paste", (event) => {
    const field = byId("text"), pasted = event.clipboardData.getData("text");
    if (!/[\r\n]/.test(pasted)) return;
    event.preventDefault();
    field.setRangeText(inOneLine(pasted), field.selectionStart, field.selectionEnd, "end");
    field.dispatchEvent(new Event("input"));
  });
  byId("stop").addEventListener("click", stop);
}

// The masks to choose from. A mask only narrows what the model allows, so those are left out that change
// nothing, or of which one half changes nothing.
function fillMasks() {
  const list = byId("masks"), trace = current.layer(chosen.layer), last = trace.size.k - 1;
  const isCausal = trace.size.q > 1 && trace.kept[0] < last && Boolean(trace.blocked(0, trace.kept[0])[last]);
  if (list.isCausal === isCausal) return;
  list.isCausal = isCausal;
  const idle = isCausal ? ["causal", "window(2, 2)", "everything"] : ["everything"];
  list.replaceChildren(...MASKS.filter(([value]) => !idle.includes(value)).map(([value, words]) => make("option", { value }, words)));
}

// Why a value is no edit, as Python has it; empty if it is one.
function refusalOf(name, value) {
  if (name === "softcap" && value !== null && !(value > 0 && value < 1e30)) {
    return `The soft cap is ${value}. It is a positive number, for example 30, or left empty.`;
  }
  if (name === "scale" && value !== null && !(Math.abs(value) < 1e30)) {
    return `The scale is ${value}. It is a number, for example 0.125, or left empty.`;
  }
  if (name === "seed" && !(Number.isSafeInteger(value) && value >= 0)) {
    return `The seed is ${value}. It is a whole number, 0 or more.`;
  }
  return "";
}

const whyNot = () => (source
  ? ""
  : "This file holds numbers, not the model that made them, so nothing can be computed anew here. " +
    "clearhead serve opens a model to which all of this can be done.");

// A change builds on what was last asked for, which may still be computed.
const asked = () => wanted ?? { text: current.text, edits: chosen.edits };
const edit = (changes, field = null) => compute(asked().text, { ...asked().edits, ...changes }, field);

// Another text or other edits: the source computes, then all of it is drawn at once. `field` is the
// one whose value was changed.
function compute(text, edits, field = null) {
  return answered(async (isNewest) => {
    wanted = { text, edits };
    refusedField = null;
    drawControls();
    let plain = current, compared = null, after = null;
    try {
      if (text !== current.text) plain = new Snapshot(keepLabels(await source.compute(text, NO_EDITS)));
      compared = plain;
      if (hasEdits(edits)) {
        if (source.can.rounds && plain === opened) compared = new Snapshot(keepLabels(await source.compute(text, NO_EDITS)));
        after = new Snapshot(keepLabels(await source.compute(text, edits)));
      }
    } catch (error) {
      // What was refused is asked for no longer; a text that could be read still is.
      if (isNewest()) {
        wanted = plain !== current ? { text, edits: chosen.edits } : null;
        refusedField = field;
      }
      throw error;
    }
    if (!isNewest()) return;
    wanted = null;
    if (kept && !isComparable(plain)) say(`${besideName()} read the text of this page only.`);
    const isWithoutEffect = changedEdits(edits).length > 0 && (!after || isAlike(compared, after));
    if (isWithoutEffect) after = null;
    const isNewText = plain !== current, had = chosen.query;
    const follow = isNewText ? sameWords(plain) : {};
    [current, before, edited] = [plain, compared, after];
    Object.assign(chosen, { edits, ...follow, ...(after ? { others: [] } : {}) });
    settle();
    if (isNewText && had !== null && chosen.query === null) chosen.query = tellingQuery(chosen.layer, chosen.head);
    if (isNewText) fillAll();
    if (isWithoutEffect) say(hasEdits(edits) ? NO_EFFECT : "The seed counts once weights are dropped.", true);
    go({});
  }, text !== current.text);
}

const NO_EFFECT = "With this every number stays as it was.";

// The seed is one of dropout.
const hasEdits = (edits) => changedEdits({ ...edits, seed: edits.dropout ? edits.seed : 0 }).length > 0;

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
async function answered(ask, isOfAnother = false) {
  const request = ++computing, isNewest = () => request === computing;
  say("");
  byId("stop").hidden = !source.cancel;
  try {
    await ask(isNewest);
  } catch (error) {
    if (!isNewest()) return;
    say(error.message ?? String(error), false, isOfAnother);
    drawControls();
  } finally {
    if (isNewest()) byId("stop").hidden = true;
  }
}

// A field of one line drops what ends a line, and would join the words beside it.
function inOneLine(text) {
  return text.replace(/\s*[\r\n]+\s*/g, " ");
}

function stop() {
  computing++;
  source.cancel();
  byId("stop").hidden = true;
  wanted = refusedField = null;
  byId("text").value = inOneLine(current.text);
  say("Stopped. The text is the one before.");
  drawControls();
}

// Labels that were measured hold for every text; the others, and effects, were of the text before.
function keepLabels(data) {
  if (data.heads || !opened.data.heads) return data;
  return { ...data, heads: opened.data.heads.filter((it) => it.measured).map(({ effect, ...it }) => it) };
}

// The chosen query in another text: the same position if its word is still near it, else the word,
// else the position if no word was added or taken away, else none.
function sameWords(next) {
  const moved = (position) => {
    if (position === null) return null;
    const word = current.tokens[position], shift = next.tokens.length - current.tokens.length;
    if (next.tokens[position] === word) return position;
    if (next.tokens[position + shift] === word) return position + shift;
    const found = next.tokens.indexOf(word);
    return found >= 0 ? found : shift === 0 ? position : null;
  };
  return { query: moved(chosen.query), key: null };
}

// What went wrong, or what is being done. While a text is refused, what is shown of the one before is
// dimmed.
function say(words, isProgress = false, isRefusal = false) {
  isRefused = isRefusal;
  byId("app").classList.toggle("refused", isRefused);
  for (const id of ["edit-said", "typed"]) {
    byId(id).textContent = words;
    byId(id).classList.toggle("progress", isProgress);
  }
}

// Keeps the text, or the other model that the page holds, to stand beside; or lets it go.
function keep() {
  if (kept) kept = null;
  else {
    kept = pageData.beside ? new Snapshot(pageData.beside) : current;
    Object.assign(chosen, { others: [] });
  }
  say("");
  go({});
  if (kept && !pageData.beside) byId("text").focus();
}

function drawKeep() {
  const button = byId("keep");
  button.hidden = !pageData.beside && !source?.can.text;
  button.textContent = pageData.beside ? `Beside ${besideName()}` : kept ? "Let the kept text go" : "Keep this text";
  button.title = pageData.beside ? "The same head of both models, side by side"
    : "Then type another: both stand side by side";
  button.setAttribute("aria-pressed", kept !== null);
}

function drawControls() {
  const { layer, head } = chosen, { text, edits } = asked();
  const isOff = edits.off.some(([l, h]) => l === layer && h === head);
  byId("edit-off").textContent = `Head ${layer}·${head} ${isOff ? "is off" : "on"}`;
  byId("edit-off").setAttribute("aria-pressed", isOff);
  const put = (name, value) => {
    const control = byId(`edit-${name}`);
    control.setAttribute("aria-invalid", name === refusedField);
    if (name === refusedField) return;
    if (control !== document.activeElement || control.type === "range") control.value = value;
  };
  fillMasks();
  put("temperature", Math.log2(edits.temperature));
  put("scale", edits.scale ?? "");
  put("mask", edits.mask ?? "");
  put("softcap", edits.softcap ?? "");
  put("dropout", edits.dropout);
  put("seed", edits.seed);
  byId("out-temperature").textContent = ` ${number(edits.temperature, 2)}`;
  byId("out-dropout").textContent = ` ${percent(edits.dropout)}`;
  byId("edit-none").disabled = changedEdits(edits).length === 0;
  byId("whatif").classList.toggle("active", edited !== null);
  if (byId("text") !== document.activeElement && !isRefused) byId("text").value = inOneLine(text);
}
