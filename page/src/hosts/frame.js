// Exchange addresses between a page in a notebook's frame and its cell: the page sends its address
// after a click, and goes to the address that Python sets.

export function linkToCell() {
  if (parent === window) return;
  const write = history.replaceState.bind(history);
  history.replaceState = (state, title, address) => {
    if (address) parent.postMessage({ address: String(address) }, "*");
    return write(state, title, address);
  };
  addEventListener("message", ({ source, data }) => {
    if (source === parent && typeof data.address === "string") location.hash = data.address;
  });
}
