// "What if": the same text with edits, or without some heads, with before and after side by side.
// pageData.edits describes the control of each edit and its valid values.

import { asked, can, compute, edit, say, stop } from "./compute.js";
import { changedEdits, refusalOf } from "./edits.js";
import { firstEdit, isOffered, outcome } from "./first_edit.js";
import { button, byId, copy, make, number, percent } from "./marks.js";
import { besideName, go, isAt, placeName, toggled } from "./state.js";
import { NO_EDITS, chosen, pageData, screen, store } from "./store.js";
import { isolated } from "./words.js";

/** @import { NumberEdit } from "./schema.d.ts" */

// Convert a value to the content of an edit's control, and back.
/** @param {NumberEdit} edit @param {any} value */
const shownIn = ({ doubles }, value) => (doubles ? Math.log2(value) : value ?? "");

/** @param {any} control @param {NumberEdit} edit */
function valueIn(control, { kind, default: none, doubles }) {
  const text = control.value.trim();
  if (text === "") return none;
  if (kind === "mask") return text;
  return doubles ? Number((2 ** Number(text)).toPrecision(3)) : Number(text);
}

function field(name) {
  const offered = pageData.edits[name], { kind, slider, placeholder, label, words } = offered;
  const value = shownIn(offered, offered.default), common = { id: `edit-${name}`, title: words, placeholder, value };
  const [min, max, step] = slider ?? [offered.over ?? offered.least, undefined, kind === "whole number" ? 1 : "any"];
  const change = () => {
    const value = valueIn(control, offered), why = control.validity.badInput ? "Enter a number." : refusalOf(name, value);
    if (!why) return void edit({ [name]: value }, name);
    store.refusedField = name;
    say(why, false, store.isRefused);
    drawControls();
  };
  const control = make("input", { ...common, disabled: !can(name), [slider ? "input" : "change"]: change,
    ...(kind === "mask" ? { type: "text", list: "masks", maxlength: 200 }
      : { type: slider ? "range" : "number", min, max, step, class: slider ? undefined : "short" }) });
  return make("label", {}, `${label} `, control, make("output", { for: control.id, id: `out-${name}` }));
}

export function buildControls() {
  const form = byId("controls");
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("whatif").addEventListener("click", () => {
    openControls(form.hidden);
    screen.drawPicture();
  });
  const disabled = !can("off");
  form.classList.toggle("ahead", Boolean(store.source?.can.ahead));
  form.replaceChildren(
    make("p", { class: "hint", id: "edit-outcome", role: "status" }),
    make("p", { class: "hint", id: "edit-why" }, whyNot()),
    button({ id: "edit-first", disabled }, () => edit({ off: firstEdit().off })),
    button({ id: "edit-off", disabled }, () => edit({ off: toggled(asked().edits.off, chosen.layer, chosen.head) })),
    ...Object.keys(pageData.edits).filter((name) => name !== "off").map(field),
    make("datalist", { id: "masks" }),
    button({ id: "edit-none" }, () => edit(NO_EDITS), "Reset"),
    make("p", { class: "hint", id: "edit-said", role: "status" }));
  byId("typing").addEventListener("submit", (event) => event.preventDefault());
  byId("typing").hidden = Boolean(pageData.images) || (!store.source?.can.text && !pageData.folder);
  byId("text").title = "Shift and Enter begin a line.";
  byId("text").addEventListener("input", () => {
    fitField();
    if (store.source?.can.text) compute(byId("text").value, asked().edits);
    else showCommand();
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) event.preventDefault(); // a line end is a token
  });
  byId("command").addEventListener("click", () => copy(byId("command"), commandFor(byId("text").value) ?? ""));
  byId("stop").addEventListener("click", stop);
}

export function openControls(isOpen = true) {
  byId("controls").hidden = !isOpen;
  byId("whatif").setAttribute("aria-expanded", isOpen);
}

// In a file without the model: the command that reads the typed text in a page that can.
function showCommand() {
  const text = byId("text").value, isOther = text !== store.current.text && text.trim() !== "";
  say(isOther ? `This file has one text. To read another, run: ${commandFor(text)}` : "", true);
  byId("command").hidden = !isOther;
}

// The command that opens a text in a page that computes; null if a shell has no name of the model.
export function commandFor(text) {
  if (pageData.images || (!pageData.folder && !pageData.model)) return null;
  const quoted = (it) => `'${it.replaceAll("'", "'\\''")}'`, folder = String(pageData.folder);
  const path = /^[\w~./+@-]+$/.test(folder) ? folder : folder.startsWith("~/") ? `~/${quoted(folder.slice(2))}` : quoted(folder);
  return `clearhead serve --open ${pageData.folder ? `--model ${path} ` : ""}${text.startsWith("-") ? "-- " : ""}${quoted(text)}`;
}

// The masks to choose from. A mask only narrows what the model allows, so masks that change nothing, or
// have a part that changes nothing, are left out.
function fillMasks() {
  const list = byId("masks"), trace = store.current.layer(chosen.layer), last = trace.size.k - 1;
  const { indexOf } = trace.step("masked") ?? {}, isCausal = trace.size.q > 1 && Boolean(trace.blocked(indexOf?.h?.keys().next().value ?? 0, 0)[last]);
  if (list.isCausal === isCausal) return;
  list.isCausal = isCausal;
  list.replaceChildren(...pageData.masks.suggested.filter((it) => it.changes_causal || !isCausal)
    .map((it) => make("option", { value: it.mask }, it.words)));
}

const whyNot = () => (store.source
  ? store.source.can.ahead ? "This file has one edit computed ahead. For others, open the model with clearhead serve." : ""
  : "This file has numbers, but not the model that computed them, so it cannot recompute anything. " +
    "For edits, open the model with clearhead serve.");

export function drawKeep() {
  const control = byId("keep");
  control.hidden = !pageData.beside && !store.source?.can.text;
  control.textContent = pageData.beside ? `Beside ${besideName()}` : store.kept ? "Remove the kept text" : "Keep this text";
  control.title = pageData.beside ? "The same head of both models, side by side"
    : "Then type another text, to see both side by side";
  control.setAttribute("aria-pressed", store.kept !== null);
}

export function drawControls() {
  const { layer, head } = chosen, { text, edits } = asked();
  const isOff = edits.off.some(isAt(layer, head));
  byId("edit-off").textContent = `${pageData.edits.off.label} ${placeName(layer, head)} ${isOff ? "is off" : "on"}`;
  byId("edit-off").setAttribute("aria-pressed", isOff);
  byId("edit-first").hidden = !isOffered(edits);
  byId("edit-first").textContent = isOffered(edits) ? firstEdit().words : "";
  drawOutcome();
  fillMasks();
  for (const [name, edit] of Object.entries(pageData.edits)) {
    if (name === "off") continue;
    const control = byId(`edit-${name}`), value = edits[name];
    control.setAttribute("aria-invalid", name === store.refusedField);
    if (name !== store.refusedField && (control !== document.activeElement || edit.slider)) control.value = shownIn(edit, value);
    if (edit.slider) byId(`out-${name}`).textContent = ` ${edit.doubles ? number(value, 2) : percent(value)}`;
  }
  byId("edit-none").disabled = changedEdits(edits).length === 0;
  byId("whatif").classList.toggle("active", store.edited !== null);
  if (byId("text") !== document.activeElement && !store.isRefused && byId("command").hidden) byId("text").value = text;
  fitField();
}

// What an edit changes most, with a link to its position.
function drawOutcome() {
  const line = byId("edit-outcome"), { words, next, token, position } = outcome(), shown = `${next} ${position} ${words}`;
  if (line.shown === shown) return;
  line.shown = shown;
  line.replaceChildren(...(position === undefined ? [words] : [next, "After ",
    button({ class: "link", title: "Go to this token" }, () => go({ query: position, key: null }), `“${isolated(token ?? "")}” (${position})`), words]));
}

const MOST_ROWS = 4; // of the text field

// As many rows as the text has, wrapped.
function fitField() {
  const field = byId("text"), fitted = `${innerWidth} ${field.value}`;
  if (field.fitted === fitted) return;
  field.fitted = fitted;
  field.rows = 1;
  const { lineHeight, paddingTop } = getComputedStyle(field);
  field.rows = Math.max(1, Math.min(MOST_ROWS, Math.round((field.scrollHeight - 2 * parseFloat(paddingTop)) / parseFloat(lineHeight))));
}
