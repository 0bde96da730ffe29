// Where the numbers of a served page come from: `clearhead serve` computes them. It answers a
// question by lines of JSON: {"progress": [done, total]} now and then, at last one of {"error"} and
// {"snapshot"} or {"layer"}.
//
// This file stands after all others, and its function takes the place of an earlier pageSource.

function pageSource() {
  const PAUSE = 250; // milliseconds without typing after which a text is sent
  let newest = new AbortController();

  const asNumber = (_, value) => (value?.float === undefined ? value : Number(value.float));
  const tell = (words) => typeof say === "function" && say(words);
  const wait = (time, signal) => new Promise((resolve, reject) => {
    setTimeout(resolve, time);
    signal.addEventListener("abort", () => reject(signal.reason));
  });

  async function* lines(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let parts = [];
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const [first, ...others] = value.split("\n");
      parts.push(first);
      for (const next of others) {
        yield JSON.parse(parts.join(""), asNumber);
        parts = [next];
      }
    }
  }

  async function ask(path, question, signal) {
    let response;
    try {
      response = await fetch(path, {
        method: "POST", headers: { "Content-Type": "application/json" },
        body: JSON.stringify(question), signal,
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Error("The server does not answer. Start clearhead serve again, and open the " +
        "address that it prints.");
    }
    for await (const line of lines(response)) {
      if (line.error) throw new Error(Object.values(line.error).join(" "));
      if (line.progress) tell(progressWords(...line.progress));
      if (line.snapshot ?? line.layer) {
        tell("");
        return line.snapshot ?? line.layer;
      }
    }
    throw new Error("The server ended before it had answered. Ask again.");
  }

  const progressWords = (done, total) =>
    (done ? `Computing: layer ${done}${total ? ` of ${total}` : ""}` : "Computing");

  return {
    can: {
      text: true, tile: true,
      edits: ["off", "temperature", "scale", "mask", "softcap", "dropout", "seed"],
    },

    // A new question ends the one before it, here and on the server.
    async compute(text, edits) {
      newest.abort();
      const { signal } = (newest = new AbortController());
      await wait(PAUSE, signal);
      return ask("compute", { text, edits }, signal);
    },

    cancel() {
      newest.abort();
    },

    // The exact weights of a part of one head, as a layer of one step: part = {layer, head,
    // queries: [first, last], keys: [first, last]}.
    tile(text, edits, part) {
      return ask("tile", { text, edits, ...part });
    },
  };
}
