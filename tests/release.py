"""Installs a wheel into an empty environment and uses it outside of the repository.

    python tests/release.py dist/bapo-0.1.0-py3-none-any.whl

It trains the embedded model, trains a recipe by its name, and writes a report: what a wheel can lack (a data file, a
dependency, an import of something that only the repository has) shows in these. torch and the others are installed by
pip, at the versions of constraints/base.txt. Nothing is left behind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = ["--steps", "1", "--eval.problems", "8", "--rollout.prompts", "4", "--learn.batch-groups", "4"]
COMMANDS = {
    "the demo run": ["train", *SMALL, "--out", "runs/demo"],
    "a recipe by name": ["train", "offpolicy", *SMALL, "--out", "runs/recipe"],
    "a grid by name": ["compare", "quick", "--dry-run"],
    "the report": ["report", "runs"],
    "starting files": ["init", "data"],
}
WRITTEN = ("runs/demo/summary.json", "runs/recipe/model/model.safetensors", "runs/report.html", "mine.toml")


def main() -> None:
    """Install, use, look at what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "elsewhere"
        work.mkdir()
        venv.create(Path(folder) / "environment", with_pip=True)
        binaries = Path(folder) / "environment" / "bin"

        def call(*words: str | Path) -> None:
            subprocess.run(list(map(str, words)), cwd=work, env=outside, check=True)

        print(f"installing {wheel.name} into an empty environment", flush=True)
        call(binaries / "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints/base.txt", wheel)
        call(binaries / "pip", "check")
        for title, words in COMMANDS.items():
            print(f"{title}: bapo {' '.join(words)}", flush=True)
            call(binaries / "bapo", *words)
        missing = [name for name in WRITTEN if not (work / name).is_file()]
    if missing:
        sys.exit(f"The commands ended without an error but did not write {', '.join(missing)}.")
    print("The wheel works outside of the repository.")


if __name__ == "__main__":
    main()
