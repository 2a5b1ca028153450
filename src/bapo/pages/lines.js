/* The arithmetic of the curves: smoothing, and the mean over seeds at equal updates or at equal sampled responses. */
const lines = (() => {
  "use strict";
  const mean = (ys) => ys.reduce((sum, y) => sum + y, 0) / ys.length;

  /* The standard deviation of a sample; 0 of a single value. */
  function spread(ys) {
    const middle = mean(ys);
    return Math.sqrt(ys.reduce((sum, y) => sum + (y - middle) ** 2, 0) / Math.max(1, ys.length - 1));
  }

  function smooth(ys, window) {
    const half = Math.floor(window / 2);
    return ys.map((y, at) => y === null ? null : mean(ys.slice(Math.max(0, at - half), at + half + 1).filter((value) => value !== null)));
  }

  function acrossSeeds(runs) {
    const columns = runs[0].map((_, at) => runs.map((run) => run[at]).filter((value) => value !== null));
    const over = (of) => columns.map((here) => here.length ? of(here) : null);
    return { mean: over(mean), low: over((here) => Math.min(...here)), high: over((here) => Math.max(...here)), spread: over(spread), count: over((here) => here.length) };
  }

  /* The updates of one step were taken after the same responses, so they have the same place. They become their mean. */
  function overResponses(counts, ys) {
    const places = new Map();
    ys.forEach((y, at) => {
      if (y === null || counts[at] === null) return;
      if (!places.has(counts[at])) places.set(counts[at], []);
      places.get(counts[at]).push(y);
    });
    return { x: [...places.keys()], y: [...places.values()].map(mean) };
  }

  /* Where seeds that sampled different numbers of responses are averaged: at the mean of their first places, of their
     second places, and so on, but only from where the last seed begins to where the first one ends. */
  function commonPlaces(runs) {
    const from = Math.max(...runs.map((run) => run.x[0])), to = Math.min(...runs.map((run) => run.x.at(-1)));
    if (from > to) return [];
    const longest = Math.max(...runs.map((run) => run.x.length));
    const means = Array.from({ length: longest }, (_, at) => mean(runs.filter((run) => at < run.x.length).map((run) => run.x[at])));
    return [...new Set([from, ...means.filter((x) => from < x && x < to).sort((a, b) => a - b), to])];
  }

  /* A run at places between its first and its last one, on the straight lines between its points. */
  function readOff({ x, y }, places) {
    let after = 0;
    return places.map((place) => {
      while (x[after] < place) after++;
      if (x[after] === place) return y[after];
      return y[after - 1] + ((y[after] - y[after - 1]) * (place - x[after - 1])) / (x[after] - x[after - 1]);
    });
  }

  /* What is drawn of a series: each seed as logged; of the smoothed seeds the mean, the range, the standard deviation and
     the number. `counts` has the sampled responses of every seed, or is null to draw over the x of the series. */
  function drawn(series, window, counts) {
    if (counts === null) {
      const seeds = series.runs.map((y) => ({ x: series.x, y }));
      return { seeds, x: series.x, ...acrossSeeds(series.runs.map((y) => smooth(y, window))) };
    }
    const seeds = series.runs.map((y, run) => overResponses(counts[run], y)).filter(({ x }) => x.length);
    if (!seeds.length) return { seeds, x: [], mean: [], low: [], high: [], spread: [], count: [] };
    const x = commonPlaces(seeds);
    return { seeds, x, ...acrossSeeds(seeds.map((seed) => readOff({ x: seed.x, y: smooth(seed.y, window) }, x))) };
  }

  return { drawn };
})();
