// The explorer in a notebook's cell: the page in a sandboxed frame, and the messages between it and
// Python. anywidget calls `render` for each cell that shows it.

function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.title = "clearhead";
  frame.style.cssText = "width: 100%; height: 760px; border: 0";
  frame.srcdoc = model.get("picture"); // until Python sends the page; where no kernel runs it never does
  let hasPage = false;
  el.append(frame);
  let shown = model.get("address");

  const fromFrame = ({ source, data }) => {
    if (source !== frame.contentWindow) return;
    if (typeof data.address === "string") {
      shown = data.address;
      model.set("address", shown);
      model.save_changes();
    }
    if (typeof data.picture === "string") {
      model.set("picture", data.picture);
      model.save_changes();
    }
    if (data.request) model.send(data.request);
  };
  const fromPython = (message) => {
    if (message.page === undefined) frame.contentWindow?.postMessage(message, "*");
    else if (!hasPage) {
      hasPage = true;
      frame.srcdoc = message.page;
    }
  };
  const chosenInPython = () => {
    const address = model.get("address");
    if (address !== shown) frame.contentWindow?.postMessage({ address }, "*");
    shown = address;
  };

  // The page opens at the selection that Python made before it came.
  const opened = () => {
    if (hasPage && shown) frame.contentWindow?.postMessage({ address: shown }, "*");
  };

  frame.addEventListener("load", opened);
  window.addEventListener("message", fromFrame);
  model.on("msg:custom", fromPython);
  model.on("change:address", chosenInPython);
  model.send({ page: true });
  return () => {
    window.removeEventListener("message", fromFrame);
    model.off("msg:custom", fromPython);
    model.off("change:address", chosenInPython);
  };
}

export default { render };
