/* The answer and its numbers: the verdict, the table of differences, and the overview of every arm. */
const tables = (() => {
  "use strict";
  const { make, line } = dom;
  let sorted = null;
  const unfolded = new Set();

  /* What the headings mean, for those who have no pointer to rest on them. */
  function meaning(id, pairs) {
    return make("details", { class: "meaning", open: unfolded.has(id) ? "" : null, ontoggle: (event) => { unfolded[event.currentTarget.open ? "add" : "delete"](id); } },
      make("summary", {}, "What the columns mean"),
      make("dl", {}, ...pairs.flatMap(([label, help]) => [make("dt", {}, label), make("dd", {}, help)])));
  }

  function verdict() {
    const { lines: sentences, notes, warnings, tone } = view.values.verdict;
    if (!sentences.length && !warnings.length) return null;
    return make("section", { id: "verdict", class: `verdict ${tone}`, "aria-label": "verdict" },
      ...sentences.map((sentence) => make("p", { class: sentences.length > 3 ? "answer many" : "answer" }, sentence)),
      ...notes.map((note) => make("p", { class: "limit" }, note)),
      warnings.length ? make("ul", { class: "signs" }, ...warnings.map((text) => make("li", {}, text))) : null);
  }

  function differences() {
    if (!view.values.differences.length) return null;
    return make("section", { id: "differences" }, make("h2", {}, "Differences"),
      make("p", {}, "Taken within each seed; from three seeds on with ± half width of the 95% interval over seeds. Bold with a star: the interval excludes zero."),
      ...view.values.differences.map(({ headings, rows }) => make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table of differences" },
        make("table", { class: "plain" }, make("thead", {}, make("tr", {}, ...headings.map((text) => make("th", { scope: "col" }, text)))),
          make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((text) => make("td", {}, text.endsWith("*") ? make("b", {}, text) : text)))))))));
  }

  // Each overview by its id: where its values are, and its heading.
  const OVERVIEWS = { overview: [() => view.values.table, "Overview"], "sft-overview": [() => view.values.sft, "Supervised runs"] };
  const ids = () => Object.keys(OVERVIEWS).filter((id) => OVERVIEWS[id][0]().rows.length);

  function ordered(id, rows) {
    if (sorted?.table !== id) return rows;
    const value = (row) => row.cells[sorted.key].value;
    return [...rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y) * (sorted.down ? -1 : 1);
    });
  }

  function heading(id, column, at, rows) {
    const mine = sorted?.table === id && sorted.key === column.key;
    return make("th", { scope: "col", "aria-sort": mine ? (sorted.down ? "descending" : "ascending") : null },
      make("button", { type: "button", title: column.help, onclick: () => {
        sorted = { table: id, key: column.key, down: mine ? !sorted.down : typeof rows[0]?.cells[column.key].value === "number" };
        refresh();
        document.querySelector(`#${id} th:nth-child(${at + 1}) button`).focus({ preventScroll: true });
      } }, column.label));
  }

  function overview(id) {
    const [{ columns, rows, caption }, title] = [OVERVIEWS[id][0](), OVERVIEWS[id][1]];
    const body = ordered(id, rows).map((row) => make("tr", {}, ...columns.map((column) => {
      const cell = row.cells[column.key], arm = view.arms[row.arm];
      const text = column.key === "objective"
        ? make("span", { class: "name" }, line(charts.colorOf(view, arm.objective, theme.name()), charts.settingOf(view, arm.setting)), cell.text)
        : cell.text;
      return make("td", {}, text, cell.below ? make("small", {}, cell.below) : null);
    })));
    return make("section", { id }, make("h2", {}, title), caption ? make("p", {}, caption) : null,
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${title.toLowerCase()} table` },
        make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((column, at) => heading(id, column, at, rows)))), make("tbody", {}, ...body))),
      meaning(id, columns.map(({ label, help }) => [label, help])));
  }

  /* Only runs on a cluster have one. */
  function cluster() {
    if (!view.values.cluster) return null;
    const { caption, tables: listed } = view.values.cluster;
    return make("section", { id: "cluster" }, make("h2", {}, "Cluster"), make("p", {}, caption),
      ...listed.flatMap(({ headings, rows, told }, at) => [
        make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `table of ${headings.at(-1)[0].toLowerCase()}` },
          make("table", { class: told ? "plain told" : "plain" }, make("thead", {}, make("tr", {}, ...headings.map(([text, title]) => make("th", { scope: "col", title }, text)))),
            make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((text) => make("td", {}, text))))))),
        meaning(`cluster-${at}`, headings)]));
  }

  const overviews = () => ids().map(overview);
  const refresh = () => ids().forEach((id) => document.getElementById(id).replaceWith(overview(id)));
  const links = () => [...ids().map((id) => [id, OVERVIEWS[id][1]]), ...(view.values.cluster ? [["cluster", "Cluster"]] : [])];

  return { verdict, differences, overviews, cluster, refresh, links };
})();
