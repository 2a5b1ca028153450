"""Draws the pictures about how often a token is used from the runs of `bapo compare uses`.

docs/results.md, docs/concepts.md and docs/notes/study.md show them.

    bapo compare uses --parallel 24 --only '[1248]x-3e-5/grpo/*' --only '[1248]x-1e-4/grpo/*' \
        --only '[248]x-3e-5/push-once/*' --only '[248]x-1e-4/push-once/*'
    python docs/figures.py runs/uses

writes uses_tokens.svg (what happens to tokens in eight passes) and uses_scores.svg (what the passes give) beside this
file. Lines are means over seeds; bars are 95% intervals over seeds (Student's t). A picture is a few hundred SVG
elements that are written here, so nothing but bapo is needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bapo.runs.read import Defect, Run, find_runs, read_run
from bapo.runs.statistics import aggregate, mean, measures

Point = tuple[float, float]

OBJECTIVES = {"grpo": ("GRPO", "#c2410c"), "push-once": ("push once", "#0b63a5")}
"""What each line is called, and its colour."""
PASSES = (1, 2, 4, 8)
RATES = ("3e-5", "1e-4")
MEASURES = {
    "avg": "avg@8, T = 1",
    "pass": "pass@8, T = 1",
    "avg_at_0.6": "avg@8, T = 0.6",
    "pass_at_0.6": "pass@8, T = 0.6",
}
USES = ("never", "1", "2–3", "4–7")
"""The bins of uses that eight passes fill."""
STRETCH = 64
"""Updates whose mean is one point of the curves of entropy."""
WIDTH = 800


def runs_of(grid: Path, setting: str, objective: str) -> list[Run]:
    """The finished runs of one arm, one per seed."""
    directory = grid / setting / objective
    read = [read_run(path) for path in find_runs(directory)]
    defects = [str(run) for run in read if isinstance(run, Defect)] or ([] if read else [f"{directory}: no runs."])
    if defects:
        advice = f"The pictures need finished runs; the first lines of {__file__} say how to make them."
        sys.exit("\n".join([*defects, advice]))
    return [run for run in read if isinstance(run, Run)]


# Numbers


def by_use(run: Run, key: str) -> list[float]:
    """A metric by use over a whole run. An update counts by its tokens in the bin."""
    values = []
    for position in range(len(USES)):
        weights = [line["use_histogram"][position] for line in run.updates]
        total = sum(weight * line[key][position] for weight, line in zip(weights, run.updates, strict=True))
        values.append(total / sum(weights))
    return values


def entropy(run: Run) -> list[Point]:
    """Entropy of the trained tokens over updates: the mean of every stretch, placed in its middle."""
    stretches: dict[int, list[float]] = {}
    for line in run.updates:
        stretches.setdefault((line["version"] - 1) // STRETCH, []).append(line["entropy"])
    return [((number + 0.5) * STRETCH, mean(values)) for number, values in sorted(stretches.items())]


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over seeds, as far as all of them go."""
    return [(points[0][0], mean([y for _, y in points])) for points in zip(*curves, strict=False)]


def score(grid: Path, rate: str, passes: int, objective: str, measure: str) -> tuple[float, float]:
    """Mean and half width over seeds. In one pass no token is used twice, so both objectives are the same run there."""
    runs = runs_of(grid, f"{passes}x-{rate}", objective if passes > 1 else "grpo")
    middle, half = aggregate([measures(run)[measure] for run in runs])
    return middle, half or 0.0


# Drawing


@dataclass(frozen=True)
class Plot:
    """A rectangle of a picture and the ranges of its axes."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, point: Point) -> Point:
        """Where a point lies in the picture."""
        across, up = ((v - low) / (high - low) for v, (low, high) in zip(point, (self.x, self.y), strict=True))
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def line(self, points: Sequence[Point], color: str, *, thin: bool = False) -> str:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.place, points))
        return f'<polyline class="{"thin" if thin else "bold"}" stroke="{color}" points="{path}"/>'

    def estimate(self, x: float, middle: float, half: float, color: str) -> str:
        """A dot and its interval."""
        across, up = self.place((x, middle))
        ends = [self.place((x, middle + sign * half))[1] for sign in (-1, 1)]
        bar = f'<line x1="{across:.1f}" x2="{across:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}" stroke="{color}"/>'
        return f'{bar}<circle cx="{across:.1f}" cy="{up:.1f}" r="3.2" fill="{color}"/>'

    def frame(self, title: str, x_label: str, x_ticks: dict[float, str], y_ticks: Sequence[float]) -> list[str]:
        """Title, grid lines, numbers and names of the axes."""
        parts = [text(self.left, self.top - 12, title, "title")]
        digits = max(0, -math.floor(math.log10(y_ticks[1] - y_ticks[0]) + 1e-9))
        for tick in y_ticks:
            _, y = self.place((self.x[0], tick))
            end = self.left + self.width
            parts.append(f'<line class="grid" x1="{self.left:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(text(self.left - 6, y + 4, f"{tick:.{digits}f}".replace("-", "−"), "tick", "end"))
        bottom = self.top + self.height
        parts += [text(self.place((at, 0))[0], bottom + 17, name, "tick", "middle") for at, name in x_ticks.items()]
        return [*parts, text(self.left + self.width / 2, bottom + 34, x_label, "label", "middle")]


def text(x: float, y: float, content: str, kind: str, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def legend(note: str) -> list[str]:
    """Which colour is which objective, and a note on the right."""
    y = 24
    parts = [text(WIDTH - 16, y, note, "tick", "end")]
    for position, (name, color) in enumerate(OBJECTIVES.values()):
        x = 46 + 90 * position
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{color}" stroke-width="3"/>')
        parts.append(text(x + 28, y, name, "label"))
    return parts


def picture(height: int, title: str, parts: Sequence[str]) -> str:
    """A whole SVG file, on white."""
    style = (
        "text{fill:#3d4450;font-size:12px}.title{fill:#1c1f24;font-size:13px;font-weight:600}.tick{font-size:11px}"
        ".grid{stroke:#e4e6ea}polyline{fill:none;stroke-linejoin:round}.bold{stroke-width:2.2}"
        ".thin{stroke-width:.8;opacity:.45}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join(
        [
            f'{head} font-family="system-ui, sans-serif" role="img">',
            f"<title>{escape(title)}</title><style>{style}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def nice_range(values: Sequence[float]) -> tuple[tuple[float, float], list[float]]:
    """A range around values that begins and ends at a tick, and its three to six ticks."""
    low, high = min(values), max(values)
    step = next(
        factor * 10.0**power
        for power in range(-4, 6)
        for factor in (1, 2, 5)
        if math.ceil(high / (factor * 10.0**power)) - math.floor(low / (factor * 10.0**power)) <= 5
    )
    ticks = [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]
    return (ticks[0], ticks[-1]), ticks


# The pictures


def tokens_picture(grid: Path) -> str:
    """Eight passes at 1e-4: log r of negative tokens, those that are pushed further down, and entropy."""
    arms = {objective: runs_of(grid, "8x-1e-4", objective) for objective in OBJECTIVES}
    parts = legend("8 passes, learning rate 1e-4; means and 95% intervals over seeds; thin lines: seeds")
    uses = {float(position): name for position, name in enumerate(USES)}
    for column, (key, title) in enumerate(
        [("use_negative", "Negative tokens, mean log r"), ("use_below", "Negative, pushed further down")]
    ):
        estimates = {
            objective: [aggregate(values) for values in zip(*(by_use(run, key) for run in runs), strict=True)]
            for objective, runs in arms.items()
        }
        reach = [middle + sign * (half or 0) for arm in estimates.values() for middle, half in arm for sign in (-1, 1)]
        y, ticks = nice_range([*reach, 0.0])
        plot = Plot(46 + 266 * column, 66, 206, 170, (-0.3, len(USES) - 0.7), y)
        parts += plot.frame(title, "times trained on before", uses, ticks)
        for objective, arm in estimates.items():
            color = OBJECTIVES[objective][1]
            parts.append(plot.line([(x, middle) for x, (middle, _) in enumerate(arm)], color))
            parts += [plot.estimate(x, middle, half or 0.0, color) for x, (middle, half) in enumerate(arm)]
    curves = {objective: [entropy(run) for run in runs] for objective, runs in arms.items()}
    points = [point for arm in curves.values() for curve in arm for point in curve]
    end = max(x for x, _ in points)
    y, ticks = nice_range([0.0, max(y for _, y in points)])
    plot = Plot(578, 66, 206, 170, (0.0, end), y)
    updates = {tick: f"{tick:g}" for tick in nice_range([0.0, end])[1] if tick <= end}
    parts += plot.frame("Entropy, nats per token", "update", updates, ticks)
    for objective, arm in curves.items():
        color = OBJECTIVES[objective][1]
        parts += [*(plot.line(curve, color, thin=True) for curve in arm), plot.line(mean_curve(arm), color)]
    return picture(284, "Eight passes at 1e-4: negative tokens by use, and entropy, of GRPO and of push once", parts)


def scores_picture(grid: Path) -> str:
    """Scores against passes: a row for each learning rate, a column for each measure."""
    parts = legend("means and 95% intervals over seeds; vertical axes differ")
    passes = {float(position): str(number) for position, number in enumerate(PASSES)}
    for row, rate in enumerate(RATES):
        top = 84 + 228 * row
        parts.append(text(46, top - 32, f"learning rate {rate}", "label"))
        for column, (measure, title) in enumerate(MEASURES.items()):
            arms = {
                objective: [score(grid, rate, number, objective, measure) for number in PASSES]
                for objective in OBJECTIVES
            }
            y, ticks = nice_range([m + sign * half for arm in arms.values() for m, half in arm for sign in (-1, 1)])
            plot = Plot(46 + 193 * column, top, 146, 130, (-0.25, len(PASSES) - 0.75), y)
            parts += plot.frame(title, "passes", passes, ticks)
            for shift, (objective, arm) in zip((-0.06, 0.06), arms.items(), strict=True):
                color = OBJECTIVES[objective][1]
                parts.append(plot.line([(x + shift, middle) for x, (middle, _) in enumerate(arm)], color))
                parts += [plot.estimate(x + shift, middle, half, color) for x, (middle, half) in enumerate(arm)]
    return picture(500, "Held-out scores of GRPO and of push once against passes over the same rollouts", parts)


def main() -> None:
    """Draw both pictures from the directory of the comparison."""
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/figures.py runs/uses")
    grid = Path(sys.argv[1])
    for name, draw in (("uses_tokens.svg", tokens_picture), ("uses_scores.svg", scores_picture)):
        file = Path(__file__).parent / name
        file.write_text(draw(grid), encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
