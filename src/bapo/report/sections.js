/* The other parts of the report, from top to bottom: header, contents, defects, figures, responses, configuration. */
const sections = (() => {
  "use strict";
  const { make } = dom;
  const live = document.documentElement.dataset.live === "true";
  let picked = 0;

  function header() {
    const several = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
    const runs = (arms) => arms.reduce((sum, arm) => sum + arm.runs.length, 0);
    const different = (arms, key) => new Set(arms.map((arm) => arm[key])).size;
    const sft = view.values.sft.rows.map((row) => view.arms[row.arm]);
    const others = view.arms.filter((arm) => !sft.includes(arm));
    const facts = [
      ...(others.length || !sft.length ? [several(runs(others), "run")] : []),
      ...(others.length > 1 ? [several(different(others, "objective"), "objective"), several(different(others, "setting"), "setting")] : []),
      ...(sft.length ? [several(runs(sft), "supervised run")] : []),
    ];
    const { written, by, title } = view.values;
    const state = live ? make("span", { class: "state following", id: "state" }, progress()) : `written ${written} by ${by}`;
    return make("div", { class: "top" },
      make("div", {}, make("h1", {}, title), make("p", {}, `${facts.join(", ")} · `, state)),
      make("button", { class: "button", id: "theme", type: "button", onclick: theme.toggle }, theme.name() === "dark" ? "Light" : "Dark"));
  }

  function progress() {
    const all = view.arms.flatMap((arm) => arm.steps.map((step, at) => ({ step, of: arm.of, finished: arm.finished[at] })));
    if (!all.length) return "waiting for the first logged lines";
    if (all.every((run) => run.finished)) return "complete";
    const done = all.reduce((sum, run) => sum + run.step, 0), of = all.reduce((sum, run) => sum + run.of, 0);
    return `following, step ${done} of ${of}`;
  }

  function contents() {
    if (!view.arms.length) return [];
    const links = [
      ...(view.values.differences.length ? [["differences", "Differences"]] : []), ...tables.links(),
      ...view.values.figures.map((figure) => [figure.id, figure.title]), ["samples", "Responses"], ["configuration", "Configuration"],
    ];
    const list = (onclick = () => {}) => make("nav", { "aria-label": "contents" }, ...links.map(([id, text]) => make("a", { href: `#${id}`, onclick: () => { unfold(id); onclick(); } }, text)));
    const folded = make("details", { id: "contents", class: "contents" }, make("summary", {}, "Contents"), list(() => { folded.open = false; }));
    return [list(), folded];  // style shows the first on a wide page, and the second on a phone
  }

  function defects() {
    const listed = view.values.defects.filter((defect) => !live || defect.kind !== "unfinished");
    if (!listed.length) return null;
    return make("div", { class: "warning", role: "status" },
      make("strong", {}, listed.length === 1 ? "One directory is not a finished run" : `${listed.length} directories are not finished runs`),
      make("ul", {}, ...listed.map((defect) => make("li", {}, make("b", {}, defect.kind), ` ${defect.path}: ${defect.message}`))));
  }

  /* A figure for experts opens with its heading; only then are its plots drawn. */
  const opened = new Set();

  function figure(spec) {
    const layout = spec.panels.length === 1 ? "panels single" : spec.panels.length === 3 ? "panels triple" : "panels";
    const heading = make("h2", {}, spec.title);
    const body = [make("p", {}, spec.caption), spec.note ? make("div", { class: "note" }, spec.note) : null,
      make("div", { class: layout }, ...spec.panels.map((panel) => charts.card(panel, view, spec.title)))];
    if (!spec.folded) return make("section", { id: spec.id }, heading, ...body);
    const toggled = ({ currentTarget: { open } }) => {
      if (open === opened.has(spec.id)) return;
      opened[open ? "add" : "delete"](spec.id);
      if (open) view.redraw();
    };
    return make("section", { id: spec.id }, make("details", { class: "figure", open: opened.has(spec.id) ? "" : null, ontoggle: toggled }, make("summary", {}, heading), ...body));
  }

  /* Whoever follows a link to a figure wants to see it. */
  function unfold(id) {
    const folded = document.getElementById(id)?.querySelector("details.figure");
    if (folded) folded.open = true;
  }

  function undrawn() {
    if (!view.values.undrawn.length) return null;
    return make("section", { id: "undrawn" }, make("h2", {}, "Not drawn"),
      make("dl", { class: "undrawn" }, ...view.values.undrawn.flatMap(({ title, reason }) => [make("dt", {}, title), make("dd", {}, reason)])));
  }

  function responses() {
    if (!view.arms.length) return null;
    picked = Math.min(picked, view.values.samples.length - 1);
    const chosen = view.values.samples[picked];
    const pick = view.arms.length < 2 ? null : make("select", { class: "pick", "aria-label": "arm", onchange: (event) => {
      picked = Number(event.currentTarget.value);
      document.getElementById("samples").replaceWith(responses());
      document.querySelector(".pick").focus({ preventScroll: true });
    } }, ...view.arms.map((arm, at) => make("option", { value: at, selected: at === picked ? "" : null }, `${arm.objective} · ${arm.setting} · seed ${arm.seeds[0]}`)));
    return make("section", { id: "samples" }, make("h2", {}, "Responses"),
      make("p", {}, "One group of sampled responses at the start, in the middle and at the end of training. If several versions of the policy wrote one response, each part is tinted and starts with its version number. What an environment said is framed."),
      pick, chosen.note ? make("div", { class: "note" }, chosen.note) : null,
      make("div", { class: "samples" }, ...chosen.shown.map((group) => make("article", { class: "sample" },
        make("h3", {}, group.moment), make("p", {}, `step ${group.step} · mean reward ${group.mean_reward === null ? "–" : group.mean_reward.toFixed(2)} over ${group.count} responses`),
        make("pre", { class: "prompt" }, group.prompt), ...group.responses.map(response)))));
  }

  function response(one) {
    const several = new Set(one.pieces.map(([version]) => version).filter((version) => version !== null)).size > 1;
    const pieces = one.pieces.map(([version, text], at) => version === null
      ? make("span", { class: "piece said", title: "the environment" }, text)
      : several
      ? make("span", { class: "piece", style: `background: rgba(var(--version), ${(0.1 + (0.28 * at) / one.pieces.length).toFixed(2)})`, title: `version ${version}` }, make("sup", {}, String(version)), text)
      : text);
    const versions = one.versions.length && one.versions[0] !== one.versions[1] ? `versions ${one.versions[0]}–${one.versions[1]}` : one.versions.length ? `version ${one.versions[0]}` : "";
    return make("div", { class: "response" },
      make("small", {}, make("span", { class: one.reward > 0.5 ? "reward right" : "reward" }, one.reward === null ? "no reward" : `reward ${one.reward}`),
        ...[`${one.tokens} tokens`, one.ending && one.ending !== "answered" ? one.ending : one.status === "stopped" ? "" : one.status, versions].filter(Boolean).map((text) => make("span", {}, text))),
      make("pre", {}, ...pieces, one.cut ? ` … and ${one.cut} more characters` : ""));
  }

  function configuration() {
    if (!view.arms.length) return null;
    const rows = (object) => make("dl", {}, ...Object.entries(object).flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, JSON.stringify(value))]));
    const own = (arm) => ({ ...arm.config, ...Object.fromEntries(arm.runs.map((path, at) => [`run with seed ${arm.seeds[at]}`, path])) });
    const folded = (summary, object) => make("details", {}, make("summary", {}, summary), rows(object));
    const [only] = view.arms;
    return make("section", { id: "configuration" }, make("h2", {}, "Configuration"),
      ...(view.arms.length === 1 ? [folded(`${only.objective} · ${only.setting}`, { ...own(only), ...view.values.common })]
        : [...view.arms.map((arm) => folded(`${arm.objective} · ${arm.setting}`, own(arm))), folded("Common to all", view.values.common)]));
  }

  function footer() {
    const series = view.panels().flatMap((panel) => panel.series);
    const widest = Math.max(1, ...series.map((one) => one.stretch ?? 1));
    const seeds = view.arms.some((arm) => arm.runs.length > 1);
    return make("footer", {}, [
      seeds ? "Bold lines are means over seeds, bands reach from the lowest to the highest seed, and thin lines show each seed as logged. In a plot with more than two arms, or with two bands that cover each other, bands and thin lines appear for the arm under the pointer." : "",
      "Smoothing is a centred moving mean; thin lines are not smoothed.",
      widest > 1 ? `Long curves are drawn as means of up to ${widest} consecutive updates.` : "",
      view.counts.length ? "Sampled responses are those of all groups that were finished or dropped so far, whether or not filtering kept them. Over them, the updates of one step are drawn as their mean, because they were taken after the same responses." : "",
      view.counts.length && seeds ? "Seeds are averaged at equal numbers of responses, on the straight lines between their points, and the mean ends where the first seed ends." : "",
      "All curves are from the runs given here. Drag in a plot to zoom, double-click to reset.",
    ].filter(Boolean).join(" "));
  }

  return { live, header, progress, contents, defects, figure, unfold, undrawn, responses, configuration, footer };
})();
