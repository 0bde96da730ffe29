// The response of the server to a request: lines of JSON.

/** Yields the lines. Leaving the page, or aborting, ends them. @param {AbortSignal} [signal] */
export async function* serverLines(path, request, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request), signal,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The server does not respond. Start clearhead serve again, and open the " +
      "address that it prints.");
  }
  const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The server ended before its response was complete. Try again.");
    const [first, ...others] = value.split("\n");
    parts.push(first);
    for (const next of others) {
      yield parts.join("");
      parts = [next];
    }
  }
}

export const errorWords = ({ gave, rule, hint }) => `${gave} Rule: ${rule} Hint: ${hint}`;
