/* Draws the values embedded in the page, or served beside it when the page follows a run, and nothing else.
   Colour shows the objective, dash and symbol show the setting. Text from runs is only ever set as textContent. */
(() => {
  "use strict";
  const COLORS = {
    light: ["#0b63a5", "#d1490c", "#0a8a63", "#b0478d", "#a67c00", "#5b4fc4", "#4d5561", "#00889c"],
    dark: ["#6cb6f5", "#ff9160", "#4fd1a5", "#ee8fcb", "#e8c14a", "#a99cff", "#b4bcc8", "#5fd4e6"],
  };
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const SVG_DASHES = ["", "6 3", "2 3", "6 3 2 3", "9 3", "9 3 2 3"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  const POLL_MILLISECONDS = 2000;

  const root = document.documentElement;
  const main = document.getElementById("page");
  const live = root.dataset.live === "true";
  let values = JSON.parse(document.getElementById("values").textContent);
  const hidden = { objective: new Set(), setting: new Set() };
  let smoothing = null;
  let sorted = null;
  let picked = 0;
  let counted = false;  // whether curves are drawn over sampled responses

  // Elements

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  function line(color, dash) {
    const holder = make("span");
    holder.innerHTML =
      '<svg width="26" height="8" aria-hidden="true"><line x1="1" x2="25" y1="4" y2="4" stroke-width="3" ' +
      `stroke="${color}" stroke-dasharray="${SVG_DASHES[dash % SVG_DASHES.length]}"/></svg>`;
    return holder.firstChild;
  }

  // Theme

  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const theme = () => chosen ?? (preferred.matches ? "dark" : "light");
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  function applyTheme() {
    root.dataset.theme = theme();
    root.style.colorScheme = theme();
  }
  preferred.addEventListener("change", () => { if (chosen === null) { applyTheme(); render(); } });

  // What an arm looks like

  const colorOf = (objective, mode) => COLORS[mode][values.objectives.indexOf(objective) % COLORS.light.length];
  const settingOf = (setting) => Math.max(0, values.settings.indexOf(setting));
  const visible = (arm) => !hidden.objective.has(arm.objective) && !hidden.setting.has(arm.setting);
  const label = (arm) => [
    values.objectives.length > 1 || values.settings.length === 1 ? arm.objective : null,
    values.settings.length > 1 ? arm.setting : null,
  ].filter(Boolean).join(" · ");
  const faded = (color, alpha) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  };

  // Numbers

  function defaultSmoothing() {
    const lengths = values.figures.flatMap((f) => f.panels).filter((p) => p.kind === "curves" && !p.markers)
      .flatMap((p) => p.series.map((s) => s.x.length));
    const longest = Math.max(1, ...lengths);
    return longest < 40 ? 1 : Math.min(25, 2 * Math.floor(longest / 80) + 1);
  }

  // Over updates, or over sampled responses. A panel without numbers of responses stays over updates.

  const HASHES = { "": false, "#x=updates": false, "#x=responses": true };
  const overResponses = (panel) => counted && panel.series.some((series) => series.responses);
  const uncounted = () => {
    const lacking = panels().filter(overResponses).flatMap((panel) => panel.series.filter((series) => !series.responses));
    return [...new Set(lacking.map((series) => values.arms[series.arm]))];
  };
  function readHash() {
    const asked = HASHES[location.hash] ?? counted;
    const changed = asked !== counted;
    counted = asked;
    return changed;
  }
  window.addEventListener("hashchange", () => { if (readHash()) switched(); });
  function switched() {
    for (const input of document.getElementsByName("x")) input.checked = (input.value === "responses") === counted;
    document.getElementById("uncounted").replaceWith(withoutCounts());
    return draw();
  }

  // Panels to plotly

  function traces(panel, mode) {
    if (panel.kind === "bars") return bars(panel, mode);
    if (panel.kind === "points") return points(panel, mode);
    const list = [];
    for (const series of panel.series) {
      const arm = values.arms[series.arm];
      if (!visible(arm)) continue;
      const color = colorOf(arm.objective, mode);
      const dash = DASHES[settingOf(arm.setting) % DASHES.length];
      const window = panel.kind === "curves" && !panel.markers ? smoothing : 1;
      const counts = overResponses(panel) ? series.responses?.map((run) => values.counts[run]) : null;
      if (counts === undefined) continue;
      const { seeds, x, mean, low, high } = lines.drawn(series, window, counts);
      const base = { x, type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false };
      if (seeds.length > 1) {
        const kept = mean.map((y, at) => at).filter((at) => mean[at] !== null);
        const shape = { ...base, x: kept.map((at) => x[at]), line: { width: 0 } };
        list.push({ ...shape, y: kept.map((at) => high[at]) });
        list.push({ ...shape, y: kept.map((at) => low[at]), fill: "tonexty", fillcolor: faded(color, 0.13) });
      }
      if (seeds.length > 1 || window > 1) {
        for (const seed of seeds) {
          list.push({ ...base, ...seed, connectgaps: true, line: { width: 0.8, color: faded(color, 0.35), dash } });
        }
      }
      list.push({
        ...base, y: mean, name: label(arm), showlegend: true, hoverinfo: undefined, connectgaps: true,
        mode: panel.markers || panel.kind === "profile" || x.length < 2 ? "lines+markers" : "lines",
        line: { width: 2.2, color, dash },
        marker: { size: 6, color, symbol: SYMBOLS[settingOf(arm.setting) % SYMBOLS.length] },
        hovertemplate: `%{y:.4g}${counts ? " after %{x:,.0f}" : ""}<extra>${escaped(label(arm))}</extra>`,
        ...(panel.kind === "profile" ? { customdata: panel.bins, hovertemplate: `%{customdata}: %{y:.3g}<extra>${escaped(label(arm))}</extra>` } : {}),
      });
    }
    return list;
  }

  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function bars(panel, mode) {
    return panel.series.filter((series) => visible(values.arms[series.arm])).map((series) => {
      const arm = values.arms[series.arm];
      const color = colorOf(arm.objective, mode);
      return {
        type: "bar", x: panel.categories, y: series.values, name: label(arm),
        marker: {
          color, line: { width: 0 },
          pattern: { shape: ["", "/", ".", "x", "-", "\\"][settingOf(arm.setting) % 6], fgcolor: color, bgcolor: faded(color, 0.3), size: 6, solidity: 0.4 },
        },
        hovertemplate: `%{y:.3%}<extra>${escaped(label(arm))}</extra>`,
      };
    });
  }

  function points(panel, mode) {
    const list = [];
    for (const objective of values.objectives) {
      const mine = panel.series.filter((s) => s.objective === objective && visible(s)).sort((a, b) => a.x - b.x);
      if (!mine.length) continue;
      const color = colorOf(objective, mode);
      list.push({
        type: "scatter", mode: "markers", showlegend: false, hoverinfo: "skip",
        x: mine.flatMap((s) => s.runs.map(() => s.x)), y: mine.flatMap((s) => s.runs),
        marker: { size: 5, color: faded(color, 0.45) },
      });
      list.push({
        type: "scatter", mode: "lines+markers", name: objective, x: mine.map((s) => s.x), y: mine.map((s) => s.y),
        customdata: mine.map((s) => escaped(s.setting)),
        line: { width: 2.2, color }, marker: { size: 9, color, symbol: mine.map((s) => SYMBOLS[settingOf(s.setting) % SYMBOLS.length]) },
        error_y: { type: "data", array: mine.map((s) => s.half ?? 0), visible: mine.some((s) => s.half !== null), color, thickness: 1.4, width: 4 },
        hovertemplate: `%{y:.4g}, %{customdata}<extra>${escaped(objective)}</extra>`,
      });
    }
    return list;
  }

  function layout(panel, mode, exported) {
    const ink = exported ? "#1c1f24" : css("--quiet");
    const grid = exported ? "#e6e6e8" : css("--grid");
    const axis = {
      gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, fixedrange: false,
      tickfont: { size: 11 }, title: { font: { size: 11.5 }, standoff: 6 },
    };
    const result = {
      font: { family: css("--body"), color: ink, size: 12 }, paper_bgcolor: exported ? "#ffffff" : "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 44, r: 10, t: exported ? 48 : 10, b: 40 }, hovermode: "x unified",
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { size: 11.5, color: css("--ink") } },
      showlegend: exported, legend: { orientation: "h", y: -0.22, traceorder: "normal", font: { size: 11 } }, barmode: "group", bargap: 0.25,
      xaxis: { ...axis, title: { ...axis.title, text: overResponses(panel) ? "sampled responses" : panel.x } },
      yaxis: { ...axis, tickformat: "~g", nticks: 6 },
      shapes: [], annotations: [], dragmode: "zoom",
    };
    if (exported) result.title = { text: panel.title, font: { size: 15 }, x: 0.02, xanchor: "left" };
    if (panel.kind === "curves") result.xaxis.rangemode = "tozero";
    if (overResponses(panel)) result.xaxis.hoverformat = ",.0f";
    if (panel.kind === "points") {
      const reach = panel.series.filter(visible).flatMap((s) => [...s.runs, s.y - (s.half ?? 0), s.y + (s.half ?? 0)]);
      const room = 0.1 * (Math.max(...reach) - Math.min(...reach)) || 0.05;
      if (reach.length) result.yaxis.range = [Math.max(-0.02, Math.min(...reach) - room), Math.min(1.02, Math.max(...reach) + room)];
      result.hovermode = "closest";
      result.xaxis.rangemode = "tozero";
    }
    if (panel.kind === "bars") {
      result.xaxis.type = "category";
      result.yaxis.tickformat = "~%";
      result.hovermode = "closest";
      result.xaxis.tickangle = 0;
      if (panel.categories.length > 8) result.xaxis.nticks = 12;
      if (panel.categories.some((c) => c.includes("<br>"))) result.xaxis.tickfont = { size: 9.5 };
    }
    const dotted = (shape) => ({ type: "line", line: { color: ink, width: 1, dash: "dot" }, opacity: 0.7, ...shape });
    if (panel.kind === "profile") {
      Object.assign(result.xaxis, { tickvals: panel.ticks.map((tick) => tick.at), ticktext: panel.ticks.map((tick) => tick.text), tickangle: 0 });
      result.xaxis.range = [-0.6, panel.bins.length - 0.4];
      result.xaxis.tickfont = { size: 9.5 };
      result.xaxis.showgrid = result.xaxis.zeroline = false;
      result.hovermode = "closest";
      if (panel.log) { result.yaxis.type = "log"; result.yaxis.tickformat = "~%"; result.yaxis.dtick = 1; delete result.yaxis.nticks; }
      result.shapes = panel.verticals.map((x) => dotted({ x0: x, x1: x, y0: 0, y1: 1, yref: "paper" }));
    }
    for (const mark of panel.marks ?? []) {
      result.shapes.push(dotted({ x0: 0, x1: 1, xref: "paper", y0: mark.value, y1: mark.value }));
      result.annotations.push({ x: 1, xref: "paper", xanchor: "right", y: mark.value, yanchor: "bottom", showarrow: false, text: mark.text, font: { size: 10.5 } });
    }
    return result;
  }

  async function png(panel) {
    const figure = { data: traces(panel, "light"), layout: layout(panel, "light", true) };
    const url = await Plotly.toImage(figure, { format: "png", width: 720, height: 460, scale: 4 });
    make("a", { href: url, download: `${panel.id}.png` }).click();
  }

  // Sections

  function header() {
    const several = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
    const runs = (arms) => arms.reduce((sum, arm) => sum + arm.runs.length, 0);
    const different = (arms, key) => new Set(arms.map((arm) => arm[key])).size;
    const sft = values.sft.rows.map((row) => values.arms[row.arm]);
    const compared = values.arms.filter((arm) => !sft.includes(arm));
    const facts = [
      ...(compared.length || !sft.length ? [several(runs(compared), "run"), several(different(compared, "objective"), "objective"), several(different(compared, "setting"), "setting")] : []),
      ...(sft.length ? [several(runs(sft), "supervised run")] : []),
    ];
    const state = live ? make("span", { class: "state following", id: "state" }, progress()) : `written ${values.written} by ${values.by}`;
    return make("div", { class: "top" },
      make("div", {}, make("h1", {}, values.title), make("p", {}, `${facts.join(", ")} · `, state)),
      make("button", { class: "button", id: "theme", type: "button", onclick: () => {
        chosen = theme() === "dark" ? "light" : "dark"; applyTheme(); render();
      } }, theme() === "dark" ? "Light" : "Dark"));
  }

  function progress() {
    const all = values.arms.flatMap((arm) => arm.steps.map((step, at) => ({ step, of: arm.of, finished: arm.finished[at] })));
    if (!all.length) return "waiting for the first logged lines";
    if (all.every((run) => run.finished)) return "complete";
    const done = all.reduce((sum, run) => sum + run.step, 0), of = all.reduce((sum, run) => sum + run.of, 0);
    return `following, step ${done} of ${of}`;
  }

  function contents() {
    const links = [...tables().map((id) => [id, TABLES[id][1]]), ...values.figures.filter((f) => f.panels.length).map((f) => [f.id, f.title]), ["samples", "Responses"], ["configuration", "Configuration"]];
    return make("nav", { "aria-label": "contents" }, ...links.map(([id, text]) => make("a", { href: `#${id}` }, text)));
  }

  function defects() {
    const listed = values.defects.filter((defect) => !live || defect.kind !== "unfinished");
    if (!listed.length) return null;
    return make("div", { class: "warning", role: "status" },
      make("strong", {}, listed.length === 1 ? "One directory is not a finished run" : `${listed.length} directories are not finished runs`),
      make("ul", {}, ...listed.map((p) => make("li", {}, make("b", {}, p.kind), ` ${p.path}: ${p.message}`))));
  }

  function controls() {
    const chips = (kind, list, sample) => list.length < 2 ? null : make("div", { class: "chips", role: "group", "aria-label": kind },
      make("span", {}, kind === "objective" ? "Objective" : "Setting"),
      ...list.map((name, at) => make("button", {
        class: "chip", type: "button", "aria-pressed": String(!hidden[kind].has(name)), title: "show or hide",
        onclick: (event) => {
          if (!hidden[kind].delete(name)) hidden[kind].add(name);
          event.currentTarget.setAttribute("aria-pressed", String(!hidden[kind].has(name)));
          draw();
        },
      }, sample(name, at), name)));
    const say = () => smoothing === 1 ? "no smoothing" : `mean of ${smoothing} points`;
    const output = make("output", {}, say());
    const longest = defaultSmoothing() === 1 ? 9 : 25;
    const axis = (value, text) => make("label", {}, make("input", {
      type: "radio", name: "x", value, checked: (value === "responses") === counted ? "" : null,
      onchange: () => { location.hash = `x=${value}`; },
    }), make("span", {}, text));
    return make("div", { class: "controls" },
      values.counts.length ? make("fieldset", { class: "axis" }, make("legend", {}, "Curves over"), axis("updates", "updates"), axis("responses", "sampled responses")) : null,
      chips("objective", values.objectives, (name) => line(colorOf(name, theme()), 0)),
      chips("setting", values.settings, (name, at) => line(css("--quiet"), at)),
      make("label", { class: "smooth" }, "Smoothing", make("input", {
        type: "range", min: 1, max: longest, step: 2, value: smoothing, "aria-label": "smoothing, points",
        oninput: (event) => { smoothing = Number(event.currentTarget.value); output.textContent = say(); draw(); },
      }), output));
  }

  function withoutCounts() {
    const names = uncounted().map(label);
    return make("div", { id: "uncounted", class: "note", role: "status", hidden: names.length ? null : "" },
      `The logs of these arms do not say how many responses were sampled, so their curves are only drawn over updates: ${names.join("; ")}.`);
  }

  // Each table by its id: where its values are, and its heading.
  const TABLES = { overview: [() => values.table, "Overview"], "sft-overview": [() => values.sft, "Supervised runs"] };
  const tables = () => Object.keys(TABLES).filter((id) => TABLES[id][0]().rows.length);

  function table(id) {
    const [{ columns, rows }, heading] = [TABLES[id][0](), TABLES[id][1]];
    const order = [...rows];
    if (sorted?.table === id) {
      const value = (row) => row.cells[sorted.key].value;
      order.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y) * (sorted.down ? -1 : 1);
      });
    }
    const head = columns.map((column) => make("th", {
      scope: "col", "aria-sort": sorted?.table === id && sorted.key === column.key ? (sorted.down ? "descending" : "ascending") : null,
    }, make("button", { type: "button", title: column.help, onclick: () => {
      const down = sorted?.table === id && sorted.key === column.key ? !sorted.down : typeof rows[0]?.cells[column.key].value === "number";
      sorted = { table: id, key: column.key, down };
      tables().forEach((other) => document.getElementById(other).replaceWith(table(other)));
      document.querySelector(`#${id} th:nth-child(${columns.indexOf(column) + 1}) button`).focus({ preventScroll: true });
    } }, column.label)));
    const body = order.map((row) => make("tr", {}, ...columns.map((column) => {
      const cell = row.cells[column.key], arm = values.arms[row.arm];
      const text = column.key === "objective"
        ? make("span", { class: "name" }, line(colorOf(arm.objective, theme()), settingOf(arm.setting)), cell.text)
        : cell.text;
      return make("td", {}, text, cell.below ? make("small", {}, cell.below) : null);
    })));
    return make("section", { id }, make("h2", {}, heading),
      make("p", {}, "Mean over seeds ± half width of its 95% interval (Student's t; wide with two seeds). Click a heading to sort."),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${heading.toLowerCase()} table` },
        make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body))));
  }

  function figure(spec) {
    const layoutClass = spec.panels.length === 1 ? "panels single" : spec.panels.length === 3 ? "panels triple" : "panels";
    return make("section", { id: spec.id },
      make("h2", {}, spec.title, spec.paper ? make("span", { class: "paper", title: "the corresponding figure of arXiv:2510.18927" }, `paper ${spec.paper}`) : null), make("p", {}, spec.caption),
      spec.note ? make("div", { class: "note" }, spec.panels.length ? spec.note : `Not drawn. ${spec.note}`) : null,
      spec.panels.length ? make("div", { class: layoutClass }, ...spec.panels.map((panel) => make("div", { class: "panel" },
        make("header", {}, make("h3", {}, panel.title),
          make("button", { class: "button", type: "button", title: "save as PNG, 2880 × 1840", "aria-label": `save ${panel.title} as PNG`, onclick: () => png(panel) }, "PNG")),
        make("div", { class: "plot", id: `plot-${panel.id}`, role: "img", "aria-label": `${spec.title}: ${panel.title}` })))) : null);
  }

  function responses() {
    if (!values.arms.length) return null;
    picked = Math.min(picked, values.samples.length - 1);
    const chosenArm = values.samples[picked];
    const pick = values.arms.length < 2 ? null : make("select", { class: "pick", "aria-label": "arm", onchange: (event) => {
      picked = Number(event.currentTarget.value);
      document.getElementById("samples").replaceWith(responses());
      document.querySelector(".pick").focus({ preventScroll: true });
    } }, ...values.arms.map((arm, at) => make("option", { value: at, selected: at === picked ? "" : null }, `${arm.objective} · ${arm.setting} · seed ${arm.seeds[0]}`)));
    return make("section", { id: "samples" }, make("h2", {}, "Responses"),
      make("p", {}, "One group of sampled responses at the start, in the middle and at the end of training. If several versions of the policy wrote one response, each part is tinted and starts with its version number."),
      pick, chosenArm.note ? make("div", { class: "note" }, chosenArm.note) : null,
      make("div", { class: "samples" }, ...chosenArm.shown.map((group) => make("article", { class: "sample" },
        make("h3", {}, group.moment), make("p", {}, `step ${group.step} · mean reward ${group.mean_reward === null ? "–" : group.mean_reward.toFixed(2)} over ${group.count} responses`),
        make("pre", { class: "prompt" }, group.prompt), ...group.responses.map(response)))));
  }

  function response(one) {
    const several = new Set(one.pieces.map(([version]) => version)).size > 1;
    const pieces = one.pieces.map(([version, text], at) => several
      ? make("span", { class: "piece", style: `background: rgba(var(--version), ${(0.1 + (0.28 * at) / one.pieces.length).toFixed(2)})`, title: `version ${version}` }, make("sup", {}, String(version)), text)
      : text);
    const versions = one.versions.length && one.versions[0] !== one.versions[1] ? `versions ${one.versions[0]}–${one.versions[1]}` : one.versions.length ? `version ${one.versions[0]}` : "";
    return make("div", { class: "response" },
      make("small", {}, make("span", { class: one.reward > 0.5 ? "reward right" : "reward" }, one.reward === null ? "no reward" : `reward ${one.reward}`),
        ...[`${one.tokens} tokens`, one.status === "stopped" ? "" : one.status, versions].filter(Boolean).map((text) => make("span", {}, text))),
      make("pre", {}, ...pieces, one.cut ? ` … and ${one.cut} more characters` : ""));
  }

  function configuration() {
    if (!values.arms.length) return null;
    const rows = (object) => make("dl", {}, ...Object.entries(object).flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, JSON.stringify(value))]));
    return make("section", { id: "configuration" }, make("h2", {}, "Configuration"),
      ...values.arms.map((arm) => make("details", {}, make("summary", {}, `${arm.objective} · ${arm.setting}`), rows({ ...arm.config, ...Object.fromEntries(arm.runs.map((path, at) => [`run with seed ${arm.seeds[at]}`, path])) }))),
      make("details", {}, make("summary", {}, "Common to all"), rows(values.common)));
  }

  function footer() {
    const widest = Math.max(1, ...values.figures.flatMap((f) => f.panels).flatMap((p) => p.series.map((s) => s.stretch ?? 1)));
    return make("footer", {}, "Bold lines are means over seeds, bands reach from the lowest to the highest seed, and thin lines show each seed as logged. " +
      "Smoothing is a centred moving mean and applies to bold lines and bands. " +
      (widest > 1 ? `Long curves are drawn as means of up to ${widest} consecutive updates. ` : "") +
      (values.counts.length ? "Sampled responses are those of all groups that were finished or dropped so far, whether or not filtering kept them. Over them, the updates of one step are drawn as their mean, " +
        "because they were taken after the same responses. Seeds are averaged at equal numbers of responses, on the straight lines between their points, and the mean ends where the first seed ends. " : "") +
      "The paper is arXiv:2510.18927; the curves are from the runs given here. Drag in a plot to zoom, double-click to reset.");
  }

  // Drawing

  const panels = () => values.figures.flatMap((spec) => spec.panels);
  let turn = 0;
  let drawn = Promise.resolve();
  function draw() {
    const mine = ++turn;
    drawn = (async () => {
      for (const panel of panels()) {
        if (mine !== turn) return;
        const element = document.getElementById(`plot-${panel.id}`);
        if (element) await Plotly.react(element, traces(panel, theme()), layout(panel, theme(), false), CONFIG);
        await new Promise((resolve) => setTimeout(resolve));
      }
      if (mine === turn) root.dataset.drawn = String(mine);
    })();
    return drawn;
  }

  function render() {
    const scroll = window.scrollY;
    const open = [...main.querySelectorAll("details")].map((element) => element.open);
    for (const element of main.querySelectorAll(".plot.js-plotly-plot")) Plotly.purge(element);
    main.replaceChildren(...[header(), values.arms.length ? contents() : null, defects(), values.arms.length ? controls() : null, withoutCounts(), ...tables().map(table),
      ...values.figures.map(figure), responses(), configuration(), footer()].filter(Boolean));
    main.querySelectorAll("details").forEach((element, at) => { element.open = open[at] ?? false; });
    window.scrollTo(0, scroll);
    return draw();
  }

  // Following a run

  const shape = (v) => JSON.stringify([v.objectives, v.settings, v.counts.length > 0, v.arms.map((a) => a.runs), v.figures.map((f) => f.panels.map((p) => p.id)),
    v.defects.map((p) => [p.path, p.kind])]);
  let tag = null;
  async function poll() {
    const state = () => document.getElementById("state");
    try {
      const answer = await fetch("values.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        const before = shape(values);
        values = await answer.json();
        tag = answer.headers.get("ETag");
        if (shape(values) !== before) { render(); } else {
          const left = document.querySelector(".scroll")?.scrollLeft ?? 0;
          tables().forEach((id) => document.getElementById(id)?.replaceWith(table(id)));
          document.querySelector(".scroll")?.scrollTo(left, 0);
          if (!document.activeElement?.matches(".pick")) document.getElementById("samples")?.replaceWith(responses());
          document.querySelector(".warning")?.replaceWith(defects() ?? "");
          await draw();
        }
      }
      state().className = "state following";
      state().textContent = progress();
    } catch {
      state().className = "state lost";
      state().textContent = "the server has stopped; the page keeps what it shows";
    }
    setTimeout(poll, POLL_MILLISECONDS);
  }

  smoothing = defaultSmoothing();
  readHash();
  applyTheme();
  render();
  if (live) setTimeout(poll, POLL_MILLISECONDS);
})();
