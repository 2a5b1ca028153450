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

  const same = (one, other, near) => one.x.length === other.x.length
    && one.x.every((x, at) => x === other.x[at] && Math.abs(one.y[at] - other.y[at]) <= near);

  /* How many points of one line are within the reach of the other; -1 as soon as one of these does not lie on it. */
  function along(one, other, near) {
    const { x, y } = other;
    let count = 0, after = 0;
    for (const [at, place] of one.x.entries()) {
      if (place < x[0] || place > x.at(-1)) continue;
      while (x[after] < place) after++;
      const slope = x[after] === place ? 0 : (y[after] - y[after - 1]) / (x[after] - x[after - 1]);
      if (Math.abs(one.y[at] - (y[after] + slope * (place - x[after]))) > near) return -1;
      count++;
    }
    return count;
  }

  /* A single point is not yet a line: most lines begin at the same place. */
  function meet(one, other, near) {
    if (!one.x.length || !other.x.length || (one.x.length === 1) !== (other.x.length === 1)) return false;
    if (same(one, other, near)) return true;
    const there = along(one, other, near), back = there < 0 ? -1 : along(other, one, near);
    return back >= 0 && (there >= MOST * one.x.length || back >= MOST * other.x.length);
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
