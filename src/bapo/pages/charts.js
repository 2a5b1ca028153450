/* Turns panels into plots. A panel is a plain object with a kind, a title and values; `kinds` says how each kind is drawn,
   and a page may add its own. The view of a page says which arms there are and how they are shown:

     arms, objectives, settings, counts    as in the values of the report
     title                                 of the page; stands below the title of a saved picture
     legend                                whether plots show one; otherwise the page has chips for it
     visible(arm), smoothing(), counted()  what the reader chose; counted: over sampled responses instead of updates

   Colour shows the objective, dash and symbol show the setting. */
const charts = (() => {
  "use strict";
  const COLORS = {
    light: ["#0b63a5", "#d1490c", "#0a8a63", "#b0478d", "#a67c00", "#5b4fc4", "#4d5561", "#00889c"],
    dark: ["#6cb6f5", "#ff9160", "#4fd1a5", "#ee8fcb", "#e8c14a", "#a99cff", "#b4bcc8", "#5fd4e6"],
  };
  const DASHES = ["solid", "9px,9px", "3px,3px", "9px,3px,3px,3px", "15px,15px", "15px,6px,3px,6px"];  // the same at every width
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  const MOST_BANDS = 2;  // with more, bands and seeds of an arm are shown only while the pointer is on it
  const MOST_COVERED = 0.5;  // so are two bands of which one covers more than this part of the other
  const FADED = 0.25;
  const STILL = 1e-4;  // a line that moves by less than this part of its value stays where it is

  // What an arm looks like

  const color = (at, mode) => COLORS[mode][Math.max(0, at) % COLORS.light.length];
  const colorOf = (view, objective, mode) => color(view.objectives.indexOf(objective), mode);
  const settingOf = (view, setting) => Math.max(0, view.settings.indexOf(setting));
  const dashOf = (view, arm) => DASHES[settingOf(view, arm.setting) % DASHES.length];
  const symbolOf = (view, setting) => SYMBOLS[settingOf(view, setting) % SYMBOLS.length];
  const label = (view, arm) => [
    view.objectives.length > 1 || view.settings.length === 1 ? arm.objective : null,
    view.settings.length > 1 ? arm.setting : null,
  ].filter(Boolean).join(" · ");
  const faded = (shade, alpha) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(shade.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  };

  // Curves. A panel without numbers of responses stays over updates.

  const overResponses = (panel, view) => view.counted() && panel.series.some((series) => series.responses);
  const windowOf = (panel, view) => panel.kind === "curves" && !panel.markers ? view.smoothing() : 1;
  const hasDetail = (panel, view, series) => series.runs.length > 1 || windowOf(panel, view) > 1;
  function crowded(panel, view) {
    if (!["curves", "profile"].includes(panel.kind) || panel.markers) return false;
    const detailed = panel.series.filter((series) => view.visible(view.arms[series.arm]) && hasDetail(panel, view, series));
    return detailed.length > MOST_BANDS || (detailed.length === 2 && covered(...detailed) > MOST_COVERED);
  }

  /* The part of the narrower band that the other one covers, on average. */
  function covered(one, other) {
    const reach = (series) => new Map(series.x.map((x, at) => [x, series.runs.map((run) => run[at]).filter((y) => y !== null)])
      .filter(([, ys]) => ys.length > 1).map(([x, ys]) => [x, [Math.min(...ys), Math.max(...ys)]]));
    const [first, second] = [reach(one), reach(other)];
    const parts = [...first].filter(([x]) => second.has(x)).map(([x, [low, high]]) => {
      const [from, to] = second.get(x), narrower = Math.min(high - low, to - from);
      return narrower ? Math.max(0, Math.min(high, to) - Math.max(low, from)) / narrower : 0;
    });
    return parts.length ? parts.reduce((sum, part) => sum + part, 0) / parts.length : 0;
  }

  /* The points of a series that one line may join, and those that it may not, because they were measured otherwise. */
  function separated(series, counts) {
    const apart = series.apart ?? [];
    const part = (wanted) => {
      const keep = (values) => values.filter((_, at) => Boolean(apart[at]) === wanted);
      const kept = { x: keep(series.x), runs: series.runs.map(keep), problems: series.problems?.map(keep) };
      return { series: kept, counts: counts && counts.map(keep) };
    };
    return apart.some(Boolean) ? [part(false), part(true)] : [{ series, counts }, null];
  }

  function curves(panel, view, mode) {
    const list = [];
    const detail = crowded(panel, view) ? 0 : 1;
    for (const series of panel.series) {
      const arm = view.arms[series.arm];
      const counts = overResponses(panel, view) ? series.responses?.map((run) => view.counts[run]) : null;
      if (!view.visible(arm) || counts === undefined) continue;
      const [joined, apart] = separated(series, counts);
      list.push(...armCurves(panel, view, mode, series.arm, joined, detail));
      if (apart) list.push(...apartPoints(panel, view, mode, series.arm, apart));
    }
    return list;
  }

  function armCurves(panel, view, mode, index, { series, counts }, detail) {
    const arm = view.arms[index];
    const shade = colorOf(view, arm.objective, mode), dash = dashOf(view, arm), name = label(view, arm);
    const window = windowOf(panel, view);
    const { seeds, x, mean, low, high, spread, count } = lines.drawn(series, window, counts);
    const base = { x, type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false, meta: { arm: index, detail: true }, opacity: detail };
    const list = [];
    if (seeds.length > 1 && !panel.markers) {
      const kept = mean.map((_, at) => at).filter((at) => mean[at] !== null);
      const shape = { ...base, x: kept.map((at) => x[at]), line: { width: 0 } };
      list.push({ ...shape, y: kept.map((at) => high[at]) });
      list.push({ ...shape, y: kept.map((at) => low[at]), fill: "tonexty", ...band(faded(shade, 0.13), detail), meta: { arm: index, detail: true, band: faded(shade, 0.13) } });
    }
    if (hasDetail(panel, view, series) && !panel.markers) {
      for (const seed of seeds) list.push({ ...base, ...seed, connectgaps: true, line: { width: 0.8, color: faded(shade, 0.35), dash } });
    }
    if (seeds.length > 1 && panel.markers) {
      for (const seed of seeds) list.push({ ...base, ...seed, mode: "markers", marker: { size: 4, color: faded(shade, 0.45) } });
    }
    list.push({
      ...base, y: mean, name, showlegend: true, hoverinfo: undefined, connectgaps: true, meta: { arm: index }, opacity: 1,
      mode: panel.markers || panel.kind === "profile" || x.length < 2 ? "lines+markers" : "lines",
      line: { width: 2.2, color: shade, dash }, cliponaxis: false,
      marker: { size: 6, color: shade, symbol: symbolOf(view, arm.setting) },
      ...(panel.markers ? { error_y: bars(panel, series, counts, { mean, spread, count }, shade) } : {}),
      hovertemplate: `%{y:.4g}${counts ? " after %{x:,.0f}" : ""}<extra>${dom.escaped(name)}</extra>`,
      ...(panel.kind === "profile" ? { customdata: panel.bins, hovertemplate: `%{customdata}: %{y:.3g}<extra>${dom.escaped(name)}</extra>` } : {}),
    });
    return list;
  }

  const band = (shade, detail) => ({ fillcolor: detail ? shade : "rgba(0,0,0,0)" });  // opacity does not reach a fill

  /* How far from each point its 95% interval reaches: over seeds if there are enough, or over problems. */
  function bars(panel, series, counts, { mean, spread, count }, shade) {
    const within = (y) => Math.min(panel.ends[1] ?? Infinity, Math.max(panel.ends[0] ?? -Infinity, y));
    const ends = series.problems
      ? series.problems.map((end) => lines.drawn({ x: series.x, runs: [end] }, 1, counts).mean)
      : [-1, 1].map((side) => mean.map((y, at) => panel.reach[count[at]] ? within(y + side * panel.reach[count[at]] * spread[at]) : null));
    return whiskers(mean, ...ends, faded(shade, 0.6));
  }

  /* Bars from low to high at each y; none where these are null. */
  const whiskers = (ys, low, high, color) => ({
    type: "data", symmetric: false, color, thickness: 1, width: 3, visible: high.some((end) => end !== null),
    array: ys.map((y, at) => (high[at] ?? y) - y), arrayminus: ys.map((y, at) => y - (low[at] ?? y)),
  });

  function apartPoints(panel, view, mode, index, { series, counts }) {
    const arm = view.arms[index], shade = colorOf(view, arm.objective, mode);
    const { x, mean, spread, count } = lines.drawn(series, 1, counts);
    return [{
      type: "scatter", mode: "markers", x, y: mean, cliponaxis: false, showlegend: false, name: label(view, arm), meta: { arm: index, apart: true },
      marker: { size: 6, color: shade, symbol: `${symbolOf(view, arm.setting)}-open`, line: { width: 1.4 } },
      error_y: bars(panel, series, counts, { mean, spread, count }, shade),
      hovertemplate: `%{y:.4g}, fewer problems<extra>${dom.escaped(label(view, arm))}</extra>`,
    }];
  }

  /* Of any number of values: a call cannot have hundreds of thousands of arguments. */
  const least = (values) => values.reduce((one, other) => Math.min(one, other), Infinity);
  const most = (values) => values.reduce((one, other) => Math.max(one, other), -Infinity);

  /* A line that stays where it is, but for rounding, would get an axis too short for ticks. */
  function stillRange(panel, view) {
    const shown = panel.series.filter((series) => view.visible(view.arms[series.arm]));
    const values = [...shown.flatMap((series) => [...series.runs, ...(series.problems ?? [])].flat()), ...(panel.marks ?? []).map((mark) => mark.value)].filter((value) => value !== null);
    const low = least(values), high = most(values), size = Math.max(Math.abs(low), Math.abs(high));
    if (!values.length || high - low > STILL * size) return null;
    return size ? [low - size / 10, high + size / 10] : [-0.05, 1];
  }

  function curvesLayout(result, panel, view) {
    if (!panel.markers) result.xaxis.rangemode = "tozero";
    if (!panel.ticks && !overResponses(panel, view) && most(panel.series.flatMap((series) => series.x)) < 6) result.xaxis.dtick = 1;  // there is no half step
    const range = stillRange(panel, view);
    if (range) result.yaxis.range = range;
    if (panel.ticks) Object.assign(result.xaxis, { tickvals: panel.ticks.map((tick) => tick.at), ticktext: panel.ticks.map((tick) => dom.escaped(tick.text)) });
    if (overResponses(panel, view)) result.xaxis.hoverformat = ",.0f";
    if (crowded(panel, view)) result.hovermode = "closest";
  }

  const kinds = { curves: { traces: curves, layout: curvesLayout } };

  // The frame around any kind

  const dotted = (ink, shape) => ({ type: "line", line: { color: ink, width: 1, dash: "dot" }, opacity: 0.7, ...shape });

  /* `exported`: what a saved picture says besides, or nothing for a plot of the page. */
  function layout(panel, view, exported = null) {
    const ink = exported ? "#1c1f24" : theme.css("--quiet");
    const grid = exported ? "#e6e6e8" : theme.css("--grid");
    const axis = {
      gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, fixedrange: false, layer: "below traces",
      tickfont: { size: 11 }, title: { font: { size: 11.5 }, standoff: 6 },
    };
    const result = {
      font: { family: theme.css("--body"), color: ink, size: 12 }, paper_bgcolor: exported ? "#ffffff" : "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 44, r: 10, t: exported?.note ? 80 : exported ? 64 : 10, b: 40 }, hovermode: "x unified",
      hoverlabel: { bgcolor: theme.css("--card"), bordercolor: theme.css("--line"), font: { size: 11.5, color: theme.css("--ink") } },
      showlegend: Boolean(exported || view.legend), barmode: "group", bargap: 0.25,
      xaxis: { ...axis, title: { ...axis.title, text: overResponses(panel, view) ? "sampled responses" : panel.x } },
      yaxis: { ...axis, tickformat: "~g", nticks: 6 },
      legend: { orientation: "h", traceorder: "normal", font: { size: 11 }, ...(exported ? { y: -0.22 } : { x: 0, y: 1.02, yanchor: "bottom" }) },
      shapes: [], annotations: [], dragmode: "zoom",
    };
    if (exported) result.title = { text: dom.escaped(panel.title), font: { size: 15 }, x: 0.02, xanchor: "left", subtitle: { text: subtitle(panel, view, exported.note).map(dom.escaped).join("<br>"), font: { size: 11 } } };
    kinds[panel.kind].layout(result, panel, view, ink);
    for (const mark of panel.marks ?? []) {
      result.shapes.push(dotted(ink, { x0: 0, x1: 1, xref: "paper", y0: mark.value, y1: mark.value }));
      result.annotations.push({ x: 1, xref: "paper", xanchor: "right", y: mark.value, yanchor: "bottom", showarrow: false, text: mark.text, font: { size: 10.5 }, bgcolor: faded(exported ? "#ffffff" : theme.css("--card"), 0.75) });
    }
    return result;
  }

  /* What a saved picture needs to say besides its title, in lines: whose runs these are, what lines and bands are, and which
     lines lie on each other. */
  function subtitle(panel, view, note) {
    const several = ["curves", "profile"].includes(panel.kind) && panel.series.some((series) => view.visible(view.arms[series.arm]) && series.runs.length > 1);
    const band = crowded(panel, view) || panel.markers ? "" : ", band from lowest to highest";
    const said = [view.title, several ? `mean over seeds${band}` : null, panel.bars,
      windowOf(panel, view) > 1 ? `moving mean of ${windowOf(panel, view)} points` : null].filter(Boolean).join(" · ");
    return [said, note].filter(Boolean).map((line) => line.length > 118 ? `${line.slice(0, 117)}…` : line);
  }

  /* In a crowded plot, the arm under the pointer shows its band and its seeds, and the others step back. */
  function lift(element, index) {
    const opacity = element.data.map(({ meta }) => meta?.arm === index ? 1 : meta?.detail ? 0 : index === null ? 1 : FADED);
    if (opacity.every((value, at) => value === (element.data[at].opacity ?? 1))) return;
    const bands = element.data.map((_, at) => at).filter((at) => element.data[at].meta?.band);
    Plotly.restyle(element, { opacity });
    if (bands.length) Plotly.restyle(element, { fillcolor: bands.map((at) => band(element.data[at].meta.band, opacity[at]).fillcolor) }, bands);
  }

  /* The traces of a panel, and what is said of lines that lie on each other. */
  function drawing(panel, view, mode) {
    const traces = kinds[panel.kind].traces(panel, view, mode);
    const found = overlaps.groups(traces, panel.log);
    return { traces: overlaps.ringed(traces, found), note: overlaps.said(traces, found) };
  }

  async function draw(element, panel, view) {
    const { traces, note } = drawing(panel, view, theme.name());
    const below = element.parentElement.querySelector(".overlaps");
    below.textContent = note;
    below.hidden = !note;
    await Plotly.react(element, traces, layout(panel, view), CONFIG);
    element.removeAllListeners("plotly_hover");
    element.removeAllListeners("plotly_unhover");
    if (crowded(panel, view)) {
      element.on("plotly_hover", ({ points }) => lift(element, points[0].data.meta?.arm ?? null));
      element.on("plotly_unhover", () => lift(element, null));
    }
  }

  async function save(panel, view) {
    const { traces, note } = drawing(panel, view, "light");
    const figure = { data: traces, layout: layout(panel, view, { note }) };
    const url = await Plotly.toImage(figure, { format: "png", width: 720, height: 460, scale: 4 });
    dom.make("a", { href: url, download: `${panel.id}.png` }).click();
  }

  /* One after the other, so that the page stays alive; a later call ends an earlier one. */
  let turn = 0;
  async function drawAll(panels, view) {
    const mine = ++turn;
    for (const panel of panels) {
      if (mine !== turn) return;
      const element = document.getElementById(`plot-${panel.id}`);
      if (element) await draw(element, panel, view);
      await new Promise((resolve) => setTimeout(resolve));
    }
    if (mine === turn) document.documentElement.dataset.drawn = String(mine);
  }

  /* The card of a plot: its title, the button that saves it, and room for it. */
  function card(panel, view, heading) {
    return dom.make("div", { class: "panel" },
      dom.make("header", {}, dom.make("h3", {}, panel.title),
        dom.make("button", { class: "button", type: "button", title: "save as PNG, 2880 × 1840", "aria-label": `save ${panel.title} as PNG`, onclick: () => save(panel, view) }, "PNG")),
      dom.make("div", { class: "plot", id: `plot-${panel.id}`, role: "img", "aria-label": `${heading}: ${panel.title}`, style: panel.height ? `height: ${panel.height}px` : null }),
      dom.make("p", { class: "overlaps", hidden: "" }));
  }

  return { kinds, curves, color, colorOf, settingOf, symbolOf, label, faded, dotted, whiskers, overResponses, drawAll, card };
})();
