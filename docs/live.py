"""Draws docs/live.svg: the live view of a run as it was when three quarters of it were done.

    bapo train --out runs/live
    python docs/live.py runs/live

The numbers are those of the run's logs, and the view is the one that a terminal shows. The picture names no font that
would have to be fetched.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console

from bapo.runs.read import logged_steps
from bapo.screen.view import LiveView

HERE = Path(__file__).parent


def live_picture(run: Path) -> str:
    """The view of a run, as SVG."""
    logged = logged_steps(run)
    steps = logged[: 3 * len(logged) // 4]
    groups = [json.loads(line) for line in (run / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]
    group = [group for group in groups if group["step"] <= steps[-1][0]][-1]
    best = max(range(len(group["responses"])), key=lambda place: group["trajectories"][place]["reward"])
    console = Console(record=True, file=io.StringIO(), force_terminal=True, width=96, height=22, legacy_windows=False)
    now = 0.0
    view = LiveView(len(logged), title="brake · demo · runs/live", console=console, clock=lambda: now)
    now = sum(timing["seconds"] for _, _, timing in steps)
    view.recall(steps)
    response = group["responses"][best].removesuffix("<eos>")
    view.sample(group["problem"]["prompt"], response, group["trajectories"][best]["reward"])
    console.print(view.frame())
    svg = console.export_svg(title="bapo train")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")


def main() -> None:
    """Draw it."""
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/live.py runs/live")
    file = HERE / "live.svg"
    file.write_text(live_picture(Path(sys.argv[1])), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
