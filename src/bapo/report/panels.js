/* The kinds of panels that only the report has: profiles over bins, bars by category, and scores by staleness. */
(() => {
  "use strict";
  const PATTERNS = ["", "/", ".", "x", "-", "\\"];

  function profileLayout(result, panel, view, ink) {
    Object.assign(result.xaxis, {
      tickvals: panel.ticks.map((tick) => tick.at), ticktext: panel.ticks.map((tick) => tick.text), tickangle: 0,
      range: [-0.6, panel.bins.length - 0.4], tickfont: { size: 9.5 }, showgrid: false, zeroline: false,
    });
    result.hovermode = "closest";
    if (panel.log) { Object.assign(result.yaxis, { type: "log", tickformat: "~%", dtick: 1 }); delete result.yaxis.nticks; }
    result.shapes = panel.verticals.map((x) => charts.dotted(ink, { x0: x, x1: x, y0: 0, y1: 1, yref: "paper" }));
  }

  function bars(panel, view, mode) {
    return panel.series.filter((series) => view.visible(view.arms[series.arm])).map((series) => {
      const arm = view.arms[series.arm], name = charts.label(view, arm);
      const color = charts.colorOf(view, arm.objective, mode);
      return {
        type: "bar", x: panel.categories, y: series.values, name,
        marker: {
          color, line: { width: 0 },
          pattern: { shape: PATTERNS[charts.settingOf(view, arm.setting) % PATTERNS.length], fgcolor: color, bgcolor: charts.faded(color, 0.3), size: 6, solidity: 0.4 },
        },
        hovertemplate: `%{y:.3%}<extra>${dom.escaped(name)}</extra>`,
      };
    });
  }

  function barsLayout(result, panel) {
    Object.assign(result.xaxis, { type: "category", tickangle: 0 });
    result.yaxis.tickformat = "~%";
    result.hovermode = "closest";
    if (panel.categories.length > 8) result.xaxis.nticks = 12;
    if (panel.categories.some((name) => name.includes("<br>"))) result.xaxis.tickfont = { size: 9.5 };
  }

  function points(panel, view, mode) {
    const list = [];
    for (const objective of view.objectives) {
      const mine = panel.series.filter((s) => s.objective === objective && view.visible(s)).sort((a, b) => a.x - b.x);
      if (!mine.length) continue;
      const color = charts.colorOf(view, objective, mode);
      list.push({
        type: "scatter", mode: "markers", showlegend: false, hoverinfo: "skip",
        x: mine.flatMap((s) => s.runs.map(() => s.x)), y: mine.flatMap((s) => s.runs),
        marker: { size: 5, color: charts.faded(color, 0.45) },
      });
      list.push({
        type: "scatter", mode: "lines+markers", name: objective, x: mine.map((s) => s.x), y: mine.map((s) => s.y),
        customdata: mine.map((s) => dom.escaped(s.setting)),
        line: { width: 2.2, color }, marker: { size: 9, color, symbol: mine.map((s) => charts.symbolOf(view, s.setting)) },
        error_y: { ...charts.whiskers(mine.map((s) => s.y), mine.map((s) => s.ends?.[0] ?? null), mine.map((s) => s.ends?.[1] ?? null), color), thickness: 1.4, width: 4 },
        hovertemplate: `%{y:.4g}, %{customdata}<extra>${dom.escaped(objective)}</extra>`,
      });
    }
    return list;
  }

  function pointsLayout(result, panel, view) {
    const reach = panel.series.filter(view.visible).flatMap((s) => [...s.runs, s.y, ...(s.ends ?? [])]);
    const room = 0.1 * (Math.max(...reach) - Math.min(...reach)) || 0.05;
    if (reach.length) result.yaxis.range = [Math.max(-0.02, Math.min(...reach) - room), Math.min(1.02, Math.max(...reach) + room)];
    result.hovermode = "closest";
    result.xaxis.rangemode = "tozero";
  }

  Object.assign(charts.kinds, {
    profile: { traces: charts.curves, layout: profileLayout },
    bars: { traces: bars, layout: barsLayout },
    points: { traces: points, layout: pointsLayout },
  });
})();
