// What a page in a notebook's frame tells the cell around it: what is chosen, as the address that it
// would have in a window of its own; and what Python chooses there, as the address to go to.

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
