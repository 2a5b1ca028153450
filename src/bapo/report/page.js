/* Puts the report together, draws it again when the reader or a run changes it, and follows a run if it is served live. */
(() => {
  "use strict";
  const POLL_MILLISECONDS = 2000;
  const FOLDED = "details:not(.meaning, .figure)";  // tables and figures remember theirs
  const main = document.getElementById("page");
  const folded = ({ id }) => document.getElementById(`plot-${id}`)?.closest("details:not([open])");
  const draw = () => charts.drawAll(view.panels().filter((panel) => !folded(panel)), view);

  function render() {
    const scroll = window.scrollY;
    const open = [...main.querySelectorAll(FOLDED)].map((element) => element.open);
    for (const element of main.querySelectorAll(".plot.js-plotly-plot")) Plotly.purge(element);
    main.replaceChildren(...[
      sections.header(), tables.verdict(), sections.defects(), ...sections.contents(), tables.differences(), ...tables.overviews(), tables.cluster(),
      view.arms.length ? view.controls() : null, view.withoutCounts(), ...view.values.figures.map(sections.figure), sections.undrawn(),
      sections.responses(), sections.configuration(), sections.footer(),
    ].filter(Boolean));
    main.querySelectorAll(FOLDED).forEach((element, at) => { element.open = open[at] ?? false; });
    window.scrollTo(0, scroll);
    return draw();
  }

  // Following a run: if only numbers have changed, only they are replaced.

  const shape = (v) => JSON.stringify([v.objectives, v.settings, v.counts.length > 0, v.arms.map((arm) => arm.runs), v.differences.length, Boolean(v.cluster), v.verdict.lines.length + v.verdict.warnings.length > 0,
    v.figures.map((figure) => figure.panels.map((panel) => panel.id)), v.undrawn, v.defects.map((defect) => [defect.path, defect.kind])]);
  let tag = null;

  async function refresh(newer) {
    const before = shape(view.values);
    view.values = newer;
    if (shape(newer) !== before) { await render(); return; }
    const left = document.querySelector("#overview .scroll")?.scrollLeft ?? 0;
    tables.refresh();
    document.querySelector("#overview .scroll")?.scrollTo(left, 0);
    document.getElementById("verdict")?.replaceWith(tables.verdict() ?? "");
    document.getElementById("differences")?.replaceWith(tables.differences() ?? "");
    document.getElementById("cluster")?.replaceWith(tables.cluster() ?? "");
    if (!document.activeElement?.matches(".pick")) document.getElementById("samples")?.replaceWith(sections.responses());
    document.querySelector(".warning")?.replaceWith(sections.defects() ?? "");
    await draw();
  }

  async function poll() {
    const state = () => document.getElementById("state");
    try {
      const answer = await fetch("values.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        const newer = await answer.json();
        tag = answer.headers.get("ETag");
        await refresh(newer);
      }
      state().className = "state following";
      state().textContent = sections.progress();
    } catch {
      state().className = "state lost";
      state().textContent = "the server has stopped; the page keeps what it shows";
    }
    setTimeout(poll, POLL_MILLISECONDS);
  }

  theme.onchange(render);
  view.onchange(draw);
  render();
  sections.unfold(location.hash.slice(1));
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
  if (sections.live) setTimeout(poll, POLL_MILLISECONDS);
})();
