// Made by `make page` from the sources f89cfad2074688751d48c6302f2f4fa0a2d8454f6271f920d467f3a6178bfc36; do not edit.
// src/hosts/widget.js
function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.title = "clearhead";
  frame.style.cssText = "width: 100%; height: 760px; border: 0";
  frame.srcdoc = model.get("picture");
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
    if (message.page === void 0) frame.contentWindow?.postMessage(message, "*");
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
var widget_default = { render };
export {
  widget_default as default
};
