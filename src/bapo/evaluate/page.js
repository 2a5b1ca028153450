/* Sorts the tables of problems and switches between light and dark. The only text it writes is the button's. */
(() => {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;

  function applyTheme() {
    const theme = chosen ?? (preferred.matches ? "dark" : "light");
    root.dataset.theme = theme;
    root.style.colorScheme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
  }
  preferred.addEventListener("change", applyTheme);
  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    applyTheme();
  });
  button.hidden = false;
  applyTheme();

  function sort(table, column, descending) {
    const value = (body) => body.rows[0].cells[column].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = column === 0 ? x.localeCompare(y) : Number(x) - Number(y);
      return descending ? -order : order;
    };
    table.append(...Array.from(table.tBodies).sort(compare));
    for (const [index, heading] of Array.from(table.tHead.rows[0].cells).entries()) {
      if (index === column) heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    }
  }
  for (const table of document.querySelectorAll("table.each")) {
    for (const [column, heading] of Array.from(table.tHead.rows[0].cells).entries()) {
      heading.querySelector("button").addEventListener("click", () =>
        sort(table, column, heading.getAttribute("aria-sort") === "ascending"));
    }
  }
  root.dataset.drawn = "";
})();
