/* Draws the charts of a diagnosis. The rest of the page needs no script. */
(() => {
  "use strict";
  const values = JSON.parse(document.getElementById("values").textContent);
  const view = {
    ...values, objectives: values.arms.map((arm) => arm.objective), settings: [""], counts: [], legend: true,
    visible: () => true, smoothing: () => 1, counted: () => false,
  };
  const percent = (share) => `${(100 * Math.abs(share)).toFixed(1)}%`;
  const reversed = (list) => [...list].reverse();  // plotly counts rows from below

  function rowsLayout(result) {
    Object.assign(result.yaxis, { type: "category", tickformat: undefined, nticks: undefined, showgrid: false, ticksuffix: "  " });
    result.showlegend = false;
    result.hovermode = "closest";
  }

  // The share that each rule leaves of one update

  function shares(panel, view, mode) {
    const rows = reversed(panel.rows);
    return [{
      type: "bar", orientation: "h", y: rows.map((row) => row.name), x: rows.map((row) => row.value),
      marker: { color: rows.map((row) => charts.color(row.arm, mode)) },
      text: rows.map((row) => row.value === null ? "none left" : row.value.toFixed(3)), textposition: "auto", hoverinfo: "skip",
    }];
  }

  function sharesLayout(result, panel, view, ink) {
    rowsLayout(result);
    result.xaxis.range = [0, Math.max(0.5, ...panel.rows.map((row) => row.value ?? 0)) * 1.1];
    result.shapes = [charts.dotted(ink, { x0: panel.target.value, x1: panel.target.value, y0: 0, y1: 1, yref: "paper" })];
    result.annotations = [{ x: panel.target.value, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: panel.target.text, font: { size: 10.5 } }];
    result.margin.t += 12;
  }

  // Both bounds that each rule would choose for one update

  function ranges(panel, view, mode) {
    return reversed(panel.rows).map((row) => ({
      type: "scatter", mode: "lines+markers+text", x: [row.low, row.high], y: [row.name, row.name], name: row.name, cliponaxis: false,
      line: { width: 4, color: charts.color(row.arm, mode) }, marker: { size: 9, color: charts.color(row.arm, mode) },
      text: [row.low, row.high].map((bound) => bound.toFixed(2)), textposition: ["middle left", "middle right"], textfont: { size: 10.5 }, hoverinfo: "skip",
    }));
  }

  function rangesLayout(result, panel, view, ink) {
    rowsLayout(result);
    result.xaxis.range = [0.2, Math.max(...panel.rows.map((row) => row.high)) + 0.5];
    result.shapes = [charts.dotted(ink, { x0: 1, x1: 1, y0: 0, y1: 1, yref: "paper" })];
  }

  // Tokens kept and blocked by every rule: negative ones to the left, positive ones to the right

  const SIDES = [
    { name: "negative, kept", color: 1, sign: -1, pale: false },
    { name: "negative, blocked", color: 1, sign: -1, pale: true },
    { name: "positive, kept", color: 0, sign: 1, pale: false },
    { name: "positive, blocked", color: 0, sign: 1, pale: true },
  ];

  function sides(panel, view, mode) {
    const rows = reversed(panel.rows);
    return SIDES.map((side, at) => {
      const shade = charts.color(side.color, mode);
      const parts = rows.map((row) => side.sign * row.parts[at]);
      return {
        type: "bar", orientation: "h", name: side.name, y: rows.map((row) => row.name), x: parts, customdata: parts.map(percent),
        marker: { color: side.pale ? charts.faded(shade, 0.28) : shade, line: { width: 0 } },
        hovertemplate: `%{customdata}<extra>${side.name}</extra>`,
      };
    });
  }

  function sidesLayout(result, panel) {
    rowsLayout(result);
    const reach = Math.max(...panel.rows.flatMap(({ parts }) => [parts[0] + parts[1], parts[2] + parts[3]]));
    const ticks = [-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1].filter((tick) => Math.abs(tick) <= reach + 0.1);
    Object.assign(result.xaxis, { tickvals: ticks, ticktext: ticks.map((tick) => `${Math.abs(100 * tick)}%`), tickangle: 0 });
    Object.assign(result, { showlegend: true, barmode: "relative", bargap: 0.3, hovermode: "y unified" });
  }

  Object.assign(charts.kinds, {
    shares: { traces: shares, layout: sharesLayout },
    ranges: { traces: ranges, layout: rangesLayout },
    sides: { traces: sides, layout: sidesLayout },
  });

  const place = document.getElementById("charts");
  for (const { title, caption, panels } of values.figures) {
    const width = panels.length === 1 ? "panels single" : panels.length === 3 ? "panels triple" : "panels";
    place.append(dom.make("section", {}, dom.make("h2", {}, title), dom.make("p", {}, caption),
      dom.make("div", { class: width }, ...panels.map((panel) => charts.card(panel, view, title)))));
  }
  const draw = () => charts.drawAll(values.figures.flatMap((figure) => figure.panels), view);
  theme.onchange(draw);
  draw();
})();
