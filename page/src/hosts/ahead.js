// The source of a file without its model, which has one edit computed ahead: without the heads that write the next
// token.

import { NO_EDITS, opened, pageData } from "../store.js";

/** @import { Source } from "../store.js" */

/** @returns {Source | null} */
export function aheadSource() {
  const { ahead } = pageData;
  if (!ahead) return null;
  const only = JSON.stringify({ ...NO_EDITS, off: ahead.off });
  return {
    can: { text: false, ahead: true, edits: ["off"] },
    compute: async (text, edits) => {
      if (text === opened.text && JSON.stringify({ ...NO_EDITS, ...edits }) === only) return ahead.snapshot;
      throw new Error("This file has one text, and one edit of it. For others, open the model with clearhead serve.");
    },
  };
}
