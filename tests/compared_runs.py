"""A few real, tiny runs laid out as `bapo compare` does (grid.json, SETTING/OBJECTIVE/seed-N), in tests/data/compared.

    python -m tests.compared_runs tests/data/compared

made them: everything but checkpoints, models and locks. Reading them takes no time, so that every test of the report
can.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from bapo.compare import write_json
from bapo.config.recipe import parse
from bapo.config.run import Config

COMPARED = Path(__file__).parent / "data" / "compared"
TINY = {
    "steps": 3,
    "threads": 1,
    "device": "cpu",
    "rollout": {"prompts": 4, "responses": 4},
    "learn": {"batch_groups": 4, "warmup_updates": 0, "lr": 3e-4},
    "eval": {"problems": 4, "k": 2, "every": 1},
}
SEARCHING = {"name": "bapo", "preset": "weak-model"}
ARMS = {
    ("reuse-2", "bapo"): (SEARCHING, {"reuse": 2}, (0, 1)),
    ("reuse-2", "grpo"): ({"name": "grpo"}, {"reuse": 2}, (0, 1)),
    ("reuse-4", "bapo"): (SEARCHING, {"reuse": 4}, (0,)),
    ("reuse-4", "clip_higher"): ({"name": "clip_higher"}, {"reuse": 4}, (0,)),
    ("reuse-4", "push-once"): ({"name": "push_once"}, {"reuse": 4}, (0,)),
    ("partial", "bapo"): (SEARCHING, {"reuse": 2, "partial_budget": 600}, (0,)),
}


def record() -> dict[str, Any]:
    """Their grid.json."""
    runs = [
        {"setting": setting, "objective": objective, "seed": seed, "path": f"{setting}/{objective}/seed-{seed}"}
        for (setting, objective), (_, _, seeds) in ARMS.items()
        for seed in seeds
    ]
    labels = {f"{kind}s": list(dict.fromkeys(run[kind] for run in runs)) for kind in ("setting", "objective", "seed")}
    return {"name": "compared", **labels, "runs": runs}


def make(root: Path) -> None:
    """Train them all."""
    from bapo.train.run import start

    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "grid.json", record())
    for (setting, objective), (loss, off, seeds) in ARMS.items():
        for seed in seeds:
            out = root / setting / objective / f"seed-{seed}"
            steps = 8 if setting == "partial" else 3
            values = {**TINY, "steps": steps, "out": str(out), "seed": seed, "objective": loss, "offpolicy": off}
            start(parse(Config, values, source="test"), plain=True)
            for heavy in ("checkpoints", "model"):
                shutil.rmtree(out / heavy)
            (out / "lock").unlink()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
