// Words in tokens.

const PRONOUNS = new Set(["he", "she", "it", "they", "him", "her", "them", "his", "hers", "its",
  "their", "theirs", "himself", "herself", "itself", "themselves"]);

// A token without the marks for the begin or the end of a word.
export const bare = (word) => word.replace(/^[▁Ġ␣ ]|^##|[␣ ]$/g, "").toLowerCase();
export const isWord = (token) => /^\p{L}/u.test(bare(token)); // not "." or "[CLS]"
export const isPronoun = (word) => PRONOUNS.has(bare(word));
// Whether a text is written from right to left: whether its first letter is. ⟨D8⟩ is not a letter.
export const isFromRight = (tokens) => /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u
  .test(/\p{L}/u.exec(tokens.join(" ").replace(/⟨[^⟩]*⟩/g, ""))?.[0] ?? "");
export const isLineEnd = (token) => token?.includes("↵") ?? false; // as labels show it
