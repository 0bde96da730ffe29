// JSON from Python, in which {"float": "NaN"} is a number that JSON does not have.

export const parse = (/** @type {string} */ text) =>
  JSON.parse(text, (_, value) => (value?.float === undefined ? value : Number(value.float)));
