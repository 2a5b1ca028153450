/* Light or dark: what the reader's system prefers, until the button of the page says otherwise. */
const theme = (() => {
  "use strict";
  const root = document.documentElement;
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  let changed = () => {};

  const name = () => chosen ?? (preferred.matches ? "dark" : "light");
  const css = (variable) => getComputedStyle(root).getPropertyValue(variable).trim();

  function apply() {
    root.dataset.theme = name();
    root.style.colorScheme = name();
    const button = document.getElementById("theme");
    if (button) button.textContent = name() === "dark" ? "Light" : "Dark";
  }

  function toggle() {
    chosen = name() === "dark" ? "light" : "dark";
    apply();
    changed();
  }

  preferred.addEventListener("change", () => { if (chosen === null) { apply(); changed(); } });
  apply();

  /* The button of a page whose markup has one. Without scripts it stays hidden. */
  const button = document.getElementById("theme");
  if (button) {
    button.hidden = false;
    button.addEventListener("click", toggle);
  }

  return { name, css, apply, toggle, onchange: (act) => { changed = act; } };
})();
