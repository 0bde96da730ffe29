// Exchange addresses between a page in a notebook's frame and its cell: the page sends its address
// after a click, with its picture for a notebook that is saved, and goes to the address that Python sets.

import { canvasToSave } from "../export.js";
import { byId } from "../marks.js";

const REST = 400; // milliseconds without another change, after which the picture is sent

export function linkToCell() {
  if (parent === window) return;
  const write = history.replaceState.bind(history);
  let timer = 0;
  history.replaceState = (state, title, address) => {
    if (address) {
      parent.postMessage({ address: String(address) }, "*");
      clearTimeout(timer);
      timer = setTimeout(() => parent.postMessage({ picture: pictureAsHtml() }, "*"), REST);
    }
    return write(state, title, address);
  };
  addEventListener("message", ({ source, data }) => {
    if (source === parent && typeof data.address === "string") location.hash = data.address;
  });
}

// An image of what is shown, of a document that loads none: the policy of the page forbids it.
function pictureAsHtml() {
  const image = document.implementation.createHTMLDocument().createElement("img");
  Object.assign(image, { src: canvasToSave(1).toDataURL(), alt: `${byId("head-title").textContent}. ${byId("sentence").textContent}` });
  image.style.maxWidth = "100%";
  return image.outerHTML;
}
