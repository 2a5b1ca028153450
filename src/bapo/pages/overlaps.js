/* Lines that lie on each other: one of them hides the others. They are drawn as rings of decreasing width, so that every
   colour is seen, and a note below the plot names them. */
const overlaps = (() => {
  "use strict";
  const NEAR = 0.005;  // of the height of the curves: less than the width of a line
  const ROUNDING = 1e-6;  // of the values
  const MOST = 0.9;  // so much of a line must lie on another one
  const RING = 4, WIDEST = 12;  // pixels that each ring adds, and that all of them add

  const named = (trace) => trace.type === "scatter" && trace.mode.includes("lines") && trace.showlegend !== false;

  /* The points of a trace that are drawn, as they are drawn. */
  function points(trace, log) {
    const kept = trace.x.map((_, at) => at).filter((at) => typeof trace.y[at] === "number" && !(log && trace.y[at] <= 0));
    return { x: kept.map((at) => trace.x[at]), y: kept.map((at) => log ? Math.log10(trace.y[at]) : trace.y[at]) };
  }

  /* How many points of one line are within the reach of the other, and whether all of these lie on it. */
  function along(one, other, near) {
    const within = one.x.map((_, at) => at).filter((at) => other.x[0] <= one.x[at] && one.x[at] <= other.x.at(-1));
    const there = lines.readOff(other, within.map((at) => one.x[at]));
    return { count: within.length, on: within.every((at, place) => Math.abs(one.y[at] - there[place]) <= near) };
  }

  function meet(one, other, near) {
    if (!one.x.length || !other.x.length) return false;
    const [there, back] = [along(one, other, near), along(other, one, near)];
    return there.on && back.on && (there.count >= MOST * one.x.length || back.count >= MOST * other.x.length);
  }

  const reach = ({ x }) => x.length ? x.at(-1) - x[0] : 0;

  /* Sets of traces that all lie on each other, as places in the list. A short line may lie on several that part later. */
  function groups(traces, log = false) {
    const drawn = traces.map((trace) => named(trace) ? points(trace, log) : null);
    const ys = drawn.flatMap((line) => line?.y ?? []);
    const low = ys.reduce((a, b) => Math.min(a, b), Infinity), high = ys.reduce((a, b) => Math.max(a, b), -Infinity);
    const near = Math.max(NEAR * (high - low), ROUNDING * Math.max(Math.abs(low), Math.abs(high)));
    const longestFirst = drawn.map((_, at) => at).filter((at) => drawn[at]).sort((one, other) => reach(drawn[other]) - reach(drawn[one]));
    const found = [];
    for (const at of longestFirst) {
      const mine = found.filter((group) => group.every((other) => meet(drawn[at], drawn[other], near)));
      mine.forEach((group) => group.push(at));
      if (!mine.length) found.push([at]);
    }
    return found.filter((group) => group.length > 1).map((group) => group.sort((one, other) => one - other));
  }

  /* The same traces, where a line is wider than those that are drawn on it later. Another dash is another setting, whose
     lines show through the gaps. */
  function ringed(traces, found) {
    const result = [...traces];
    for (const group of found) {
      for (const at of group) {
        const alike = group.filter((other) => traces[other].line.dash === traces[at].line.dash);
        const above = alike.filter((other) => other > at).length;
        const more = above * Math.min(RING, WIDEST / Math.max(1, alike.length - 1));
        const { line, marker } = traces[at], width = Math.max(result[at].line.width, line.width + more);
        result[at] = { ...traces[at], line: { ...line, width }, marker: { ...marker, size: marker.size + width - line.width } };
      }
    }
    return result;
  }

  /* What names them; empty if there are none. */
  function said(traces, found) {
    const joined = (names) => `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
    const differ = (group) => new Set(group.map((at) => [traces[at].x[0], traces[at].x.at(-1)].join())).size > 1;
    return found.map((group) => `Lines on each other${differ(group) ? " as far as they go" : ""}: ${joined(group.map((at) => traces[at].name))}.`).join(" ");
  }

  return { groups, ringed, said };
})();
