// The heads and metrics that differ most from those of another survey of the same texts.

import { byId, count, make, number, table } from "../marks.js";
import { go } from "./address.js";
import { signed } from "./head.js";
import { LEAST_Q, chosen, differences, survey, words } from "./store.js";

const MOST = 12;

export function drawDifferences() {
  byId("differences").hidden = !survey.other;
  if (!survey.other) return;
  const sure = differences.filter(({ compared }) => compared.q < LEAST_Q);
  const heads = new Set(sure.map(({ at }) => at)).size;
  byId("differences-about").textContent = `Compared with ${survey.other}, text by text: ` +
    `${sure.length.toLocaleString("en")} of ${count(differences.length, "number")} with a difference, in ${count(heads, "head")}. ` +
    `At most ${LEAST_Q * 100} % of these are expected by chance (q below ${LEAST_Q}, Benjamini and Hochberg).`;
  byId("caution").textContent = survey.caution;
  const listed = sure.length ? sure : differences.filter(({ compared }) => compared.difference);
  const rows = listed.slice(0, MOST).map(({ at, metric, compared }) => {
    const { layer, head } = survey.heads[at], isChosen = at === chosen.at && metric === chosen.metric;
    const { mean, other, effect, effect_low: low, effect_high: high } = compared;
    const button = make("button", { type: "button", class: "quiet", "aria-pressed": String(isChosen) }, `L${layer}H${head} ${words(metric)}`);
    button.addEventListener("click", () => go({ at, metric }));
    const interval = low === null || high === null ? "" : ` (${signed(low, 2)} to ${signed(high, 2)})`;
    return { kind: isChosen ? "chosen" : "", cells: [button, number(mean, 3), number(other, 3),
      effect === null ? "no spread" : `${signed(effect, 2)}${interval}`] };
  });
  if (rows.length) byId("differences-table").replaceChildren(table(
    `The largest ${sure.length ? "sure effects" : "effects, none of them sure"}, in standard deviations of texts`,
    ["head, metric", "here", "there", "effect (95 %)"], rows));
}
