// Words in tokens.

const PRONOUNS = new Set(["he", "she", "it", "they", "him", "her", "them", "his", "hers", "its",
  "their", "theirs", "himself", "herself", "itself", "themselves"]);

// A token without the marks for the begin or the end of a word.
export const bare = (word) => word.replace(/^[▁Ġ␣ ]|^##|[␣ ]$/g, "").toLowerCase();
export const isWord = (token) => /^\p{L}/u.test(bare(token)); // not "." or "[CLS]"
export const isPronoun = (word) => PRONOUNS.has(bare(word));
const FROM_RIGHT = /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
// Whether a text is written from right to left: whether its first letter is. ⟨D8⟩ is not a letter, nor are <bos> and [CLS] words.
const isFromRight = (tokens) => FROM_RIGHT.test(/\p{L}/u.exec(tokens.join(" ").replace(/⟨[^⟩]*⟩|<[^<>\s]+>|\[[A-Z]+\]/g, ""))?.[0] ?? "");

/** A token inside a sentence: the direction of one from right to left does not change that of the words beside it. */
export const isolated = (/** @type {string} */ token) => (/[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(token) ? `\u2068${token}\u2069` : token);

/** A token in a sentence: in quotes if it has no letter, because ", the next token" would be read as part of it. */
export const quoted = (/** @type {string} */ token) => (/[\p{L}\p{N}]/u.test(token) ? token : `“${token}”`);
export const isLineEnd = (token) => token?.includes("↵") ?? false; // as labels show it

/** How predicted tokens are written: with the space before a word only if two would look the same without it.
 * @param {string[]} words @returns {string[]} */
export function writtenApart(words) {
  const short = words.map((it) => it.replace(/^␣(?=[^␣])/u, ""));
  return short.map((it, i) => (short.indexOf(it) === short.lastIndexOf(it) ? it : words[i]));
}

/** The parts of a line from right to left whose words are from left to right, [first, last] word of each.
 * @param {string[]} words @returns {[number, number][]} */
export function runsFromLeft(words) {
  const isFromLeft = words.map((it) => /\p{L}|\p{N}/u.test(it) && !FROM_RIGHT.test(it)), runs = /** @type {[number, number][]} */ ([]);
  words.forEach((_, i) => {
    const last = runs.at(-1);
    if (!isFromLeft[i]) return;
    // Signs between two such words belong to them.
    if (last && words.slice(last[1] + 1, i).every((it) => !/\p{L}|\p{N}/u.test(it))) last[1] = i;
    else runs.push([i, i]);
  });
  return runs.filter(([first, last]) => last > first);
}

/** The lines of a text as it was written, each with the index of its first token, the number of spaces before
 * it, and whether it is written from right to left.
 * @param {string[]} tokens @returns {{first: number, tokens: string[], indent: number, isFromRight: boolean}[]} */
export function writtenLines(tokens) {
  const starts = tokens.flatMap((_, i) => (i === 0 || isLineEnd(tokens[i - 1]) ? [i] : []));
  return starts.map((first, i) => {
    const line = tokens.slice(first, starts[i + 1]), spaces = /↵([␣⇥]*)$/.exec(tokens[first - 1] ?? "")?.[1] ?? "";
    return { first, tokens: line, indent: spaces.replaceAll("⇥", "␣␣␣␣").length, isFromRight: isFromRight(line) };
  });
}
