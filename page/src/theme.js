// The button for the light and the dark theme, on every page.

import { byId } from "./marks.js";

// Shows the button. `set` stores whether the theme is dark, and `draw` draws the page again.
export function buildThemeButton(set, draw) {
  const button = byId("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  let isDark = false;
  const use = (to) => {
    isDark = to;
    set(isDark);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    button.textContent = isDark ? "Light" : "Dark"; // the theme after a click
  };
  button.hidden = false;
  button.addEventListener("click", () => { use(!isDark); draw(); });
  dark.addEventListener("change", () => { use(dark.matches); draw(); });
  use(dark.matches);
}
