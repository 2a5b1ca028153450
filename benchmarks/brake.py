"""What the brake costs in whole updates: packing, forward, bounds, backward and step, against GRPO's fixed clip.

grpo       the fixed clip; this column is a time, and the others are multiples of it in the same round
previous   the brake by the drift of the update before (the default)
update     the brake by the update's own drift: with several micro-batches, one more forward pass
new        the same where no token was trained on before: no further pass
bapo       BAPO's search; with brake: beside the default brake

python benchmarks/brake.py [--device cuda] [--shape 135m] [--rounds 9]
"""

import argparse
import statistics
from dataclasses import replace

import torch
import workload
from timing import interleaved, ratio, table

from bapo.core.settings import ClipSettings
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings

LEARNERS = {
    "grpo": {"objective": "grpo"},
    "previous": {"objective": "brake"},
    "update": {"objective": "brake", "sensor": "update"},
    "new": {"objective": "brake", "sensor": "update"},
    "bapo": {},
    "bapo, brake": {"clip": ClipSettings(brake=0.03)},
}


def measure(shape: str, cuts: int, device: str, rounds: int) -> list[str]:
    longest = (8, 24, 64) if device == "cpu" else (64, 256, 1024)
    sizes = replace(workload.TINY, learner_shape=shape, learner_lengths=longest, sequences=128, group=8)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    fresh = workload.ragged_groups(sizes, workload.SHAPES[shape][5])
    used = [replace(group, uses=1) for group in fresh]
    places = sum(len(t.prompt) + len(t.tokens) for group in fresh for t in group.trajectories)
    micro_tokens = places + 1 if cuts == 1 else -(-places // cuts) + 64
    candidates = {}
    for name, how in LEARNERS.items():
        model = workload.make_model(shape, device, dtype)
        learner = Learner(model, LearnerSettings(lr=1e-9, micro_tokens=micro_tokens, **how))
        groups = fresh if name == "new" else used
        candidates[name] = lambda learner=learner, groups=groups: learner.step(groups)
    times = interleaved(candidates, device=device, rounds=rounds)
    return [
        str(cuts),
        f"{places:,}",
        f"{statistics.median(times['grpo']):.1f} ms",
        *(f"{ratio(times, name, 'grpo'):.2f}x" for name in LEARNERS if name != "grpo"),
        f"{ratio(times, 'bapo, brake', 'bapo'):.2f}x",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default=None, help=f"one of {', '.join(workload.SHAPES)}")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds")
    given = parser.parse_args()
    shape = given.shape or ("tiny" if given.device == "cpu" else "135m")
    rows = [measure(shape, cuts, given.device, given.rounds) for cuts in (1, 4)]
    names = [*list(LEARNERS)[1:], "bapo with / without"]
    print(table(["micro-batches", "tokens", "grpo", *names], rows))


if __name__ == "__main__":
    main()
