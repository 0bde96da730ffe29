// Where the largest weights of the selected head are, by the class of the query's token.

import { css, inkOn, mixed } from "../colours.js";
import { byId, count, make, number, percent, table } from "../marks.js";
import { head, survey, theme } from "./store.js";

/** @import { SurveyDetails } from "../schema.d.ts" */

const LEAST_SHARE = 0.01; // of a kind of key
const NAMED = 3; // kinds in the sentence; the table has all
const kinds = Object.keys(survey.key_kinds);

/** The most frequent kinds of keys in words. @param {number[]} shares */
export function rolesOf(shares) {
  const parts = shares.map((share, i) => ({ kind: survey.key_kinds[kinds[i]], share }))
    .filter(({ share }) => share >= LEAST_SHARE).sort((a, b) => b.share - a.share).slice(0, NAMED);
  return parts.length ? `Its largest weight is ${parts.map(({ kind, share }, i) => `on ${kind} at ${percent(share)}${i ? "" : " of queries"}`).join(", ")}.` : "";
}

/** @param {SurveyDetails} details */
export function drawMixes({ mixes }) {
  const { several } = head(), scale = survey.inks.sequential[theme.isDark ? "dark" : "light"];
  const columns = kinds.map((_, i) => i).filter((i) => mixes.some(({ shares }) => shares[i][0] >= LEAST_SHARE));
  const rows = mixes.map(({ token_class: name, queries, texts, shares }) => {
    const about = survey.classes[name] ?? "all queries";
    const cells = columns.map((i) => {
      const [share, low, high] = shares[i], colour = mixed(scale, Math.sqrt(share));
      const interval = low === null ? "" : `, 95 % interval ${number(low, 3)} to ${number(/** @type {number} */ (high), 3)}`;
      const cell = make("span", { class: share ? "" : "none", title: `${name}, on ${survey.key_kinds[kinds[i]]}: ${number(share, 3)}${interval}` }, percent(share));
      if (share >= LEAST_SHARE) Object.assign(cell.style, { background: css(colour), color: inkOn(colour), padding: "0 0.3rem", borderRadius: "3px" });
      return cell;
    });
    const label = make("span", { title: `${about}: ${count(queries, "query", "queries")} of ${count(texts, "text")}` }, name);
    return { kind: "", cells: [label, queries.toLocaleString("en"), ...cells] };
  });
  byId("mixes").replaceChildren(...(rows.length
    ? [table("Largest weight by the class of the query’s token", ["class", "queries", ...columns.map((i) => kinds[i])], rows)] : []));
  byId("several").textContent = several ? `Does more than one thing: ${several}.` : "";
}
