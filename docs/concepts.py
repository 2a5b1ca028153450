"""Draws the pictures of docs/concepts.md from two runs, and the one of docs/index.md from docs/notes/measurements.csv.

    bapo train offpolicy --steps 14 --offpolicy.partial-budget 4000 --out runs/parked
    bapo train --steps 4 --rollout.prompts 8 --learn.batch-groups 8 --objective.name bapo --offpolicy.reuse 16 \
        --learn.lr 2e-4 --out runs/bounds
    python docs/concepts.py runs/parked runs/bounds

writes staleness.svg, parking.svg, bounds.svg and passes.svg into docs/pictures. Without arguments it draws passes.svg
alone. The shapes come from docs/figures.py.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from figures import Plot, nice_range, picture, text

HERE = Path(__file__).parent
PASSES = ("1", "2", "4", "8")
BLUE, ORANGE, GREY = "#0b63a5", "#c2410c", "#8a919c"
VERSION_COLORS = ("#cfe3f3", "#8fbfe3", "#4a94cd", "#0b63a5", "#083d66")


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == kind]


def rule(plot: Plot, y: float, words: str, *, place: float = 1.0) -> str:
    """A dashed horizontal line, and what it is: at the left (0), at the right (1), or beside the plot (above 1)."""
    start, height = plot.place((plot.x[0], y))
    end = start + plot.width
    ends = f'x1="{start:.1f}" x2="{end:.1f}" y1="{height:.1f}" y2="{height:.1f}"'
    line = f'<line {ends} stroke="{GREY}" stroke-dasharray="5 4"/>'
    if place > 1:
        return line + text(end + 6, height + 4, words, "tick")
    return line + (
        text(start + 4, height - 6, words, "tick") if place == 0 else text(end - 4, height - 6, words, "tick", "end")
    )


def staleness_picture(run: Path) -> str:
    """Every update as a column, in which a cell is the darker the more tokens have that age."""
    updates = lines_of(run, "update")
    bound = json.loads((run / "config.json").read_text())["offpolicy"]["max_staleness"]
    plot = Plot(56, 44, 720, 220, (0.5, len(updates) + 0.5), (-0.5, bound + 1.5))
    step = nice_range([0.0, float(len(updates))])[1]
    parts = plot.frame(
        "Age of the tokens that each update trains on, in updates (darker: more tokens)",
        "update",
        {tick: f"{tick:g}" for tick in step if 1 <= tick <= len(updates)},
        [float(age) for age in range(0, bound + 1, 4)],
    )
    width, height = plot.width / len(updates), plot.height / (bound + 2)
    for number, update in enumerate(updates, 1):
        histogram = update["staleness_histogram"]
        for age, tokens in enumerate(histogram):
            if tokens:
                x, y = plot.place((number - 0.5, age + 0.5))
                shade = 0.12 + 0.88 * (tokens / sum(histogram)) ** 0.5
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 0.6:.1f}" height="{height - 0.6:.1f}" '
                    f'fill="{BLUE}" opacity="{shade:.2f}"/>'
                )
    last = len(updates[0]["staleness_histogram"]) - 1
    parts = [
        part.replace(f">{last}</text>", f">{last}+</text>") if 'text-anchor="end"' in part else part for part in parts
    ]
    parts.append(rule(plot, float(bound), f"the promise: nothing older than {bound} updates"))
    return picture(322, "Age of the tokens of each update of a run with reuse, replay and parking", parts)


def parking_picture(run: Path) -> str:
    """The responses that most versions wrote, as bars of tokens, with a colour for each version."""
    groups = [json.loads(line) for line in (run / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]
    written = [trajectory["versions"] for group in groups for trajectory in group["trajectories"]]
    parked = sorted((w for w in written if len(set(w)) > 1), key=lambda w: (-len(set(w)), w[0], -len(w)))[:10]
    longest = max(map(len, parked))
    plot = Plot(56, 44, 720, 26.0 * len(parked), (0.0, float(longest)), (0.0, float(len(parked))))
    ticks = {tick: f"{tick:g}" for tick in nice_range([0.0, float(longest)])[1] if tick <= longest}
    parts = plot.frame(
        f"{len(parked)} responses, token by token, and the version that wrote each part", "token", ticks, [0, 1]
    )
    parts = [part for part in parts if 'class="grid"' not in part and 'text-anchor="end"' not in part]
    for row, versions in enumerate(sorted(parked)):
        at = 0
        for place, (version, tokens) in enumerate(groupby(versions)):
            length = len(list(tokens))
            x, y = plot.place((float(at), len(parked) - row))
            end, _ = plot.place((float(at + length), 0))
            color = VERSION_COLORS[min(place + 1, len(VERSION_COLORS) - 1)]
            parts.append(f'<rect x="{x:.1f}" y="{y + 3:.1f}" width="{end - x - 1:.1f}" height="20" fill="{color}"/>')
            if end - x > 60:
                label = text((x + end) / 2, y + 17, f"version {version}", "tick", "middle")
                parts.append(label.replace("<text ", '<text style="fill:#fff" ') if place >= 2 else label)
            at += length
    return picture(int(plot.top + plot.height + 50), "Responses that several versions of the model wrote", parts)


def bounds_picture(run: Path) -> str:
    """The positive share at fixed bounds and at BAPO's, and the bounds that BAPO chose."""
    updates = lines_of(run, "update")
    end = float(len(updates))
    ticks = {tick: f"{tick:g}" for tick in nice_range([0.0, end])[1] if tick <= end}
    drawn = {
        "Share of positive tokens in the signal": [
            ("share_fixed", "at GRPO's bounds", ORANGE),
            ("share", "at BAPO's bounds", BLUE),
        ],
        "The bounds that BAPO chose": [("clip_high", "upper bound", BLUE), ("clip_low", "lower bound", ORANGE)],
    }
    parts: list[str] = []
    for row, (title, curves) in enumerate(drawn.items()):
        values = [update[key] for key, _, _ in curves for update in updates]
        reach, y_ticks = nice_range([*values, 0.4] if row == 0 else values)
        plot = Plot(56, 44 + 226 * row, 690, 140, (0.0, end), reach)
        parts += plot.frame(title, "update", ticks, y_ticks)
        for place, (key, name, color) in enumerate(curves):
            parts.append(plot.line([(number, update[key]) for number, update in enumerate(updates, 1)], color))
            x, y = 480 + 150 * place, plot.top - 16
            parts.append(f'<line x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="3"/>')
            parts.append(text(x + 24, y + 4, name, "label"))
        if row == 0:
            parts.append(rule(plot, 0.4, "target", place=2))
    return picture(456, "The share of positive tokens and BAPO's bounds over the updates of a run", parts)


def rows_of_results() -> dict[tuple[str, str], tuple[float, float]]:
    """avg@8 at temperature 0.6 and its interval, by setting and rule, from docs/notes/measurements.csv."""
    with (HERE / "notes" / "measurements.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["grid"] == "uses, brake"]
    scores = {(row["setting"], row["objective"]): row["avg@8, T = .6"].split(" ± ") for row in rows}
    return {key: (float(mean), float(half)) for key, (mean, half) in scores.items()}


RULES = {"grpo": ("GRPO", ORANGE), "brake": ("the brake", BLUE)}
RATES = ("3e-5", "1e-4")
BEFORE = 0.546
"""avg@8 at temperature 0.6 before training (docs/notes/measurements.csv)."""


def passes_picture() -> str:
    """What is left of the score with more passes, at the better of two learning rates and at the larger one."""
    rows = rows_of_results()

    def score(number: str, rule_name: str, rates: Sequence[str]) -> tuple[float, float]:
        name = "either" if number == "1" else rule_name
        return max(rows[key] for rate in rates if (key := (f"{number}x-{rate}", name)) in rows)

    parts = [
        text(24, 32, "More passes cost GRPO its gain. The brake keeps most of it.", "headline"),
        text(24, 56, "Right answers to held-out problems at temperature 0.6, 95% intervals over seeds", "label"),
    ]
    panels = (
        (64, "each rule at its better learning rate (16×: 3e-5)", (*PASSES, "16"), RATES),
        (470, "learning rate 1e-4", PASSES, RATES[1:]),
    )
    for left, words, passes, rates in panels:
        plot = Plot(left, 96, 245, 220, (-0.2, len(passes) - 0.8), (0.45, 0.8))
        places = {float(place): f"{number}×" for place, number in enumerate(passes)}
        frame = plot.frame(words, "passes over each sampled response", places, [0.5, 0.6, 0.7, 0.8])
        parts += [re.sub(r">0\.(\d)<", r">\g<1>0%<", part) for part in frame]
        parts.append(rule(plot, BEFORE, "before training", place=0))
        for rule_name, (label, color) in RULES.items():
            scores = [score(number, rule_name, rates) for number in passes]
            parts.append(plot.line([(float(x), middle) for x, (middle, _) in enumerate(scores)], color))
            parts += [plot.estimate(float(x), middle, half, color) for x, (middle, half) in enumerate(scores)]
            x, y = plot.place((len(passes) - 1.0, scores[-1][0]))
            style = f"fill:{color};font-size:13px;font-weight:600"
            parts.append(f'<text x="{x + 10:.1f}" y="{y + 5:.1f}" style="{style}">{label}</text>')
    return picture(368, "Scores of GRPO and of the brake against the number of passes", parts).replace(
        ".tick{", ".headline{fill:#1c1f24;font-size:17px;font-weight:600}.tick{"
    )


def main() -> None:
    """Draw the pictures."""
    if len(sys.argv) not in (1, 3):
        sys.exit("usage: python docs/concepts.py [runs/parked runs/bounds]")
    drawn = {"passes.svg": passes_picture()}
    if len(sys.argv) == 3:
        parked, bounds = map(Path, sys.argv[1:])
        drawn |= {"staleness.svg": staleness_picture(parked), "parking.svg": parking_picture(parked)}
        drawn |= {"bounds.svg": bounds_picture(bounds)}
    for name, content in drawn.items():
        file = HERE / "pictures" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
