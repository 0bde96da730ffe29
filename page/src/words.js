// Words in tokens.

const PRONOUNS = new Set(["he", "she", "it", "they", "him", "her", "them", "his", "hers", "its",
  "their", "theirs", "himself", "herself", "itself", "themselves"]);

// A token without the marks for the begin or the end of a word.
export const bare = (word) => word.replace(/^[▁Ġ␣ ]|^##|[␣ ]$/g, "").toLowerCase();
export const isWord = (token) => /^\p{L}/u.test(bare(token)); // not "." or "[CLS]"
export const isPronoun = (word) => PRONOUNS.has(bare(word));
export const isLineEnd = (token) => token?.includes("↵") ?? false; // as labels show it
