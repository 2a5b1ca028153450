/* Sorts the tables of problems. It writes no text. */
(() => {
  "use strict";
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
  document.documentElement.dataset.drawn = "";
})();
