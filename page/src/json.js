// JSON from Python, in which {"float": "NaN"} is a number that JSON does not have.

export const parse = (/** @type {string} */ text) =>
  JSON.parse(text, (_, value) => (value?.float === undefined ? value : Number(value.float)));

/** What `packed` of views/html/document.py compressed: JSON in gzip, in base64. */
export async function unpacked(/** @type {string} */ text) {
  const bytes = Uint8Array.from(atob(text), (it) => it.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return parse(await new Response(stream).text());
}
