"""What the campaign attacks: small real runs of every command, each with an undisturbed twin to compare with.

A world is a directory with a tiny model, a few problems, a reward function, demonstrations and a grid. A setting is one
command in it. Its case lives in a directory of its own beside the world and names everything by relative paths, so that
all files of two cases can be compared. The twin is made once per setting, by a fresh interpreter.

All off-policy sources are on: parked responses, replay, reuse. A checkpoint follows every step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaign_parts import forks
from campaign_parts.outcomes import Failed, Kind, judge

REWARD = '''
import zlib


def score(response, answer):
    """Four rewards, as good as random, that only the text decides."""
    return zlib.crc32(response.encode()) % 4 / 3
'''
GAME = '''
import os
import time
import zlib


class Echo:
    """A game of three turns. Each answer takes another time, and what it says depends on the turns alone."""

    def reset(self, seed):
        self.turns = [str(seed)]
        return f"{seed % 8}+{seed % 5}="

    def step(self, text):
        time.sleep(os.urandom(1)[0] / 4000)
        self.turns.append(text)
        chance = zlib.crc32("|".join(self.turns).encode())
        return "1+" * (chance % 3), chance % 4 / 3, len(self.turns) == 4
'''
DATA = """
task.name = "data"
task.train = ["../world/train.jsonl"]
task.test = ["../world/test.jsonl"]
task.reward = "campaign_reward:score"
"""
PLAYED = """
task.environment = "campaign_game:Echo"
task.environment_train = 40
task.environment_test = 20
"""
TRAIN = """
steps = {steps}
threads = 1
device = "cpu"
checkpoint_every = {every}
out = "run"
model.path = "../world/model"
{task}
rollout = {{ prompts = 3, responses = 4, max_tokens = {tokens}, slots = 8 }}
offpolicy = {{ reuse = 2, replay_fraction = 0.3, partial_budget = 100 }}
learn = {{ batch_groups = 3, lr = 1e-3 }}
eval = {{ problems = 3, k = 2, every = 2 }}
"""
SFT = """
epochs = 2
threads = 1
device = "cpu"
checkpoint_every = 2
eval.every = 3
out = "run"
model.path = "../world/model"
task.train = ["../world/sums.jsonl"]
task.holdout = 0.1
learn = { batch_sequences = 20, lr = 3e-3 }
"""
GRID = """
out = "run"
seeds = 1
[base]
recipe = "train.toml"
steps = 2
[[objective]]
label = "grpo"
objective.name = "grpo"
[[objective]]
label = "bapo"
objective.name = "bapo"
"""
DEMO = [
    *("train", "--device", "cpu", "--steps", "4", "--threads", "1", "--checkpoint-every", "2", "--out", "run"),
    *("--rollout.prompts", "4", "--rollout.responses", "4", "--learn.batch-groups", "4"),
    *("--offpolicy.reuse", "2", "--offpolicy.replay-fraction", "0.3", "--offpolicy.partial-budget", "500"),
    *("--objective.name", "push_once", "--eval.problems", "2", "--eval.k", "2", "--eval.every", "3"),
]
EVAL = [
    *("eval", "--model", "../world/model", "--data", "numbers=../world/test.jsonl", "--k", "2", "--slots", "4"),
    *("--max-tokens", "12", "--reward", "campaign_reward:score", "--threads", "1", "--device", "cpu", "--out", "run"),
]
NOT_COMPARED = {"lock", "history.jsonl", "timing.jsonl", "report.html", "runs.jsonl"}
"""Files that say when and how often something happened."""
VOLATILE = {"training_seconds", "seconds", "run", "seconds_per_step"}
"""Keys of JSON files that say the same."""


@dataclass(frozen=True)
class Setting:
    """One command, as the campaign runs it."""

    name: str
    words: tuple[str, ...]
    resumes: bool
    """Whether `bapo resume` continues it. If not, the same command does."""
    result: str
    """The file whose presence means that it is complete."""
    weight: int
    """How often it is chosen."""


SETTINGS = (
    Setting("train", ("train", "../world/train.toml"), True, "summary.json", 16),
    Setting("train, a checkpoint every 2", ("train", "../world/train-2.toml"), True, "summary.json", 8),
    Setting("train, a game", ("train", "../world/game.toml"), True, "summary.json", 6),
    Setting("train, embedded", tuple(DEMO), True, "summary.json", 1),
    Setting("sft", ("sft", "../world/sft.toml"), True, "summary.json", 14),
    Setting("eval", tuple(EVAL), False, "results.json", 10),
    Setting("compare", ("compare", "../world/grid.toml", "--parallel", "2"), False, "results.json", 1),
)


@dataclass(frozen=True)
class Twin:
    """An undisturbed run of a setting."""

    path: Path
    seconds: float
    """How much CPU time it takes in a fork, which is how long it takes on an idle machine."""
    operations: int
    """How many operations on files it makes."""

    @property
    def deadline(self) -> float:
        """How long one command may take before it counts as a hang."""
        return 60 + 30 * self.seconds


def make_world(root: Path) -> None:
    """Write everything that the settings name."""
    world = root / "world"
    world.mkdir(parents=True)
    code = forks.call(lambda: _write_model(world / "model"))
    if code != 0:
        raise RuntimeError("the tiny model cannot be written")
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    _write_rows(world / "train.jsonl", problems[:40])
    _write_rows(world / "test.jsonl", problems[40:60])
    _write_rows(world / "sums.jsonl", [{"prompt": p["prompt"], "response": p["answer"]} for p in problems])
    (world / "train.toml").write_text(TRAIN.format(steps=5, every=1, task=DATA, tokens=12))
    (world / "train-2.toml").write_text(TRAIN.format(steps=6, every=2, task=DATA, tokens=12))
    (world / "game.toml").write_text(TRAIN.format(steps=5, every=1, task=PLAYED, tokens=30))
    (world / "sft.toml").write_text(SFT)
    (world / "grid.toml").write_text(GRID)


def make_twin(setting: Setting, root: Path) -> Twin:
    """Run a setting twice: in a fresh interpreter, whose result is the twin, and in a fork, which must be equal."""
    path = make_case(root / f"twin-{setting.name.replace(', ', '-').replace(' ', '-')}")
    command = [sys.executable, "-m", "bapo.cli", *setting.words]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=600, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    again = make_case(root / f"{path.name}-again")
    process = forks.start(setting.words, cwd=again, log=again / "log", trap=forks.Trap(0))
    process.wait(600)
    judge(setting.words, process.code, process.said())
    twin = Twin(path, process.cpu, int(forks.operations(again / "log").read_text()))
    check_equal(again, twin.path)
    return twin


def make_case(path: Path) -> Path:
    """A new directory for one case."""
    path.mkdir()
    (path / "campaign_reward.py").write_text(REWARD)
    (path / "campaign_game.py").write_text(GAME)
    return path


def check_equal(case: Path, twin: Path) -> None:
    """Raise a mismatch if a file that must be equal is not."""
    ours, theirs = dict(_contents(case / "run")), dict(_contents(twin / "run"))
    newest = max((path.name for path in (twin / "run").glob("**/checkpoints/step-*")), default="")
    for name in sorted({*ours, *theirs}):
        if "checkpoints" in name and newest not in name:  # a run that is asked to stop saves more of them
            continue
        if name not in ours or name not in theirs:
            raise Failed(Kind.MISMATCH, f"only {'the twin' if name in theirs else 'the case'} has {name}")
        if ours[name] != theirs[name]:
            raise Failed(Kind.MISMATCH, f"{name} differs from the twin's: {_difference(ours[name], theirs[name])}")


def _contents(run: Path) -> Iterator[tuple[str, Any]]:
    """Every file that must be equal, by its name."""
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if not path.is_file() or path.name in NOT_COMPARED or path.suffix == ".log" or ".aside" in name:
            continue
        if path.name in ("state.json", "summary.json", "results.json"):
            yield name, _json_without_times(path)
        elif path.name in ("manifest.json", "model.sha256", "README.md"):  # made from the others
            yield name, None
        else:
            yield name, path.read_bytes()


def _json_without_times(path: Path) -> Any:
    """The values in a file, or its bytes: a checkpoint that was damaged and then not needed stays as it is."""
    try:
        return _without_times(json.loads(path.read_bytes()))
    except ValueError:
        return path.read_bytes()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_times(item) for key, item in value.items() if key not in VOLATILE}
        for key in ("logs", "log_digests"):
            if isinstance(kept.get(key), dict):
                kept[key].pop("timing.jsonl", None)
        return kept
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def _difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, bytes):
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        return f"{len(ours)} and {len(theirs)} bytes, the first different byte is {first}"
    return f"{json.dumps(ours)[:200]} and {json.dumps(theirs)[:200]}"


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_model(path: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tests.tiny.models import ONE_LAYER, untrained
    from tests.tiny.tokenizers import characters

    tokens = characters()
    untrained(tokens, **{**ONE_LAYER, "pad_token_id": tokens.pad_token_id}).save_pretrained(path)
    tokens.save_pretrained(path)
