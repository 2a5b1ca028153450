/* What the report shows, and how the reader wants to see it: which arms, over updates or over sampled responses, and how
   smooth. The bar of controls is here, too. */
const view = (() => {
  "use strict";
  const { make, line } = dom;
  const HASHES = { "": false, "#x=updates": false, "#x=responses": true };

  let values = JSON.parse(document.getElementById("values").textContent);
  let smoothing = null;
  let counted = false;
  let changed = () => {};
  const hidden = { objective: new Set(), setting: new Set() };

  const panels = () => values.figures.flatMap((figure) => figure.panels);
  const self = {
    get values() { return values; },
    set values(newer) { values = newer; },
    get arms() { return values.arms; },
    get objectives() { return values.objectives; },
    get settings() { return values.settings; },
    get counts() { return values.counts; },
    get title() { return values.title; },
    visible: (arm) => !hidden.objective.has(arm.objective) && !hidden.setting.has(arm.setting),
    smoothing: () => smoothing,
    counted: () => counted,
    panels, controls, withoutCounts,
    onchange: (act) => { changed = act; },
    redraw: () => changed(),
  };

  function defaultSmoothing() {
    const lengths = panels().filter((panel) => panel.kind === "curves" && !panel.markers).flatMap((panel) => panel.series.map((series) => series.x.length));
    const longest = Math.max(1, ...lengths);
    return longest < 40 ? 1 : Math.min(25, 2 * Math.floor(longest / 80) + 1);
  }

  // The address keeps the choice of the axis.

  function readHash() {
    const asked = HASHES[location.hash] ?? counted;
    const other = asked !== counted;
    counted = asked;
    return other;
  }
  window.addEventListener("hashchange", () => {
    if (!readHash()) return;
    for (const input of document.getElementsByName("x")) input.checked = (input.value === "responses") === counted;
    document.getElementById("uncounted").replaceWith(withoutCounts());
    changed();
  });

  function withoutCounts() {
    const lacking = panels().filter((panel) => charts.overResponses(panel, self)).flatMap((panel) => panel.series.filter((series) => !series.responses));
    const names = [...new Set(lacking.map((series) => values.arms[series.arm]))].map((arm) => charts.label(self, arm));
    return make("div", { id: "uncounted", class: "note", role: "status", hidden: names.length ? null : "" },
      `The logs of these arms do not say how many responses were sampled, so their curves are only drawn over updates: ${names.join("; ")}.`);
  }

  // The bar of controls

  function chips(kind, heading, list, sample) {
    if (list.length < 2) return null;
    return make("div", { class: "chips", role: "group", "aria-label": kind }, make("span", {}, heading),
      ...list.map((name, at) => make("button", {
        class: "chip", type: "button", "aria-pressed": String(!hidden[kind].has(name)), title: "show or hide",
        onclick: (event) => {
          if (!hidden[kind].delete(name)) hidden[kind].add(name);
          event.currentTarget.setAttribute("aria-pressed", String(!hidden[kind].has(name)));
          changed();
        },
      }, sample(name, at), make("b", {}, name))));
  }

  function axis() {
    const choice = (value, text) => make("label", {}, make("input", {
      type: "radio", name: "x", value, checked: (value === "responses") === counted ? "" : null,
      onchange: () => { location.hash = `x=${value}`; },
    }), make("span", {}, text));
    return make("fieldset", { class: "axis" }, make("legend", {}, "Curves over"), choice("updates", "updates"), choice("responses", "sampled responses"));
  }

  function slider() {
    const say = () => smoothing === 1 ? "no smoothing" : `mean of ${smoothing} points`;
    const output = make("output", {}, say());
    return make("label", { class: "smooth" }, "Smoothing", make("input", {
      type: "range", min: 1, max: defaultSmoothing() === 1 ? 9 : 25, step: 2, value: smoothing, "aria-label": "smoothing, points",
      oninput: (event) => { smoothing = Number(event.currentTarget.value); output.textContent = say(); changed(); },
    }), output);
  }

  /* On a phone only the legend stays in sight, with a way back to the contents. */
  function controls() {
    return make("div", { class: "controls" },
      values.counts.length ? axis() : null,
      slider(),
      make("div", { class: "legend" },
        chips("objective", "Objective", values.objectives, (name) => line(charts.colorOf(self, name, theme.name()), 0)),
        chips("setting", "Setting", values.settings, (name, at) => line(theme.css("--quiet"), at)),
        make("a", { class: "up", href: "#contents", onclick: () => { document.getElementById("contents").open = true; } }, "Contents")));
  }

  smoothing = defaultSmoothing();
  readHash();
  return self;
})();
