// The source of a page with a host: a server or a notebook's Python computes the numbers. The response
// to a request is lines of JSON: {"progress": [done, total]} several times, then one of {"error"},
// {"snapshot"}, {"layer"} and {"why"}.

import { say } from "../compute.js";
import { parse } from "../json.js";
import { pageData } from "../store.js";
import { errorWords, serverLines } from "./server_lines.js";

/** @import { Source } from "../store.js" */

/** @returns {Source} */
export function remoteSource() {
  const PAUSE = 250; // milliseconds without typing after which a text is sent
  let newest = new AbortController(), newestWhy = new AbortController();
  const newSignal = () => {
    newest.abort();
    return (newest = new AbortController()).signal;
  };

  const wait = (time, signal) => new Promise((resolve, reject) => {
    setTimeout(resolve, time);
    signal.addEventListener("abort", () => reject(signal.reason));
  });

  // The lines of the response of a notebook's Python, as messages through the cell of this frame.
  async function* fromNotebook(path, request, signal) {
    const id = String(Math.random());
    const heard = [];
    /** @type {(_?: any) => void} */
    let wake = () => {};
    const listen = ({ source, data }) => {
      if (source !== parent || data.id !== id) return;
      heard.push(data.line);
      wake();
    };
    const end = () => {
      parent.postMessage({ request: { id, end: true } }, "*");
      wake();
    };
    addEventListener("message", listen);
    signal?.addEventListener("abort", end);
    parent.postMessage({ request: { id, path, request } }, "*");
    try {
      for (;;) {
        while (!heard.length && !signal?.aborted) await new Promise((resolve) => { wake = resolve; });
        signal?.throwIfAborted();
        yield heard.shift();
      }
    } finally {
      removeEventListener("message", listen);
      signal?.removeEventListener("abort", end);
    }
  }

  /** @param {(words: string, isProgress: boolean) => void} [report] shows the progress */
  async function ask(path, request, signal, report = say) {
    const lines = parent === window ? serverLines : fromNotebook;
    for await (const text of lines(path, request, signal)) {
      const line = parse(text);
      if (line.error) throw new Error(errorWords(line.error));
      if (line.progress) report(progressWords(...line.progress), true);
      const answer = line.snapshot ?? line.layer ?? line.why;
      if (answer) {
        report("", true);
        return answer;
      }
    }
  }

  const progressWords = (done, total) =>
    (done ? `Computing: layer ${done}${total ? ` of ${total}` : ""}` : "Computing");

  return {
    can: { text: true, tile: true, steps: true, edits: Object.keys(pageData.edits) },

    // A new request ends the earlier one, in the page and in its host.
    async compute(text, edits) {
      const signal = newSignal();
      await wait(PAUSE, signal);
      return ask("compute", { text, edits }, signal);
    },

    cancel: () => newest.abort(),

    // Every step of one layer.
    steps: (text, edits, layer) => ask("steps", { text, edits, layer }, newSignal()),

    // What wrote the query and the key of a weight. It ends no request but an earlier one of its kind.
    why(text, edits, pair) {
      newestWhy.abort();
      newestWhy = new AbortController();
      return ask("why", { text, edits, ...pair }, newestWhy.signal, () => {});
    },

    // The exact weights of a part of one head, as a layer of one step: part = {layer, head,
    // queries: [first, last], keys: [first, last]}.
    tile: (text, edits, part) => ask("tile", { text, edits, ...part }, newSignal()),
  };
}
