"""The learner of several ranks against the learner of one process: python benchmarks/sharded.py [--shapes 135m,0.5b].

    torchrun --nproc-per-node N benchmarks/sharded.py     on N GPUs, or N processes on a CPU (with --tiny)

Every update is taken on the same responses (lognormal lengths), in turns, in one run. Without torchrun there is one
rank, which shards the model over itself: what is left is the cost of gathering, widening and reducing, which more
ranks divide and overlap with their passes. On one rank `together` does not shard: it is today's single process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from functools import partial
from typing import Any

import torch
import workload
from timing import interleaved, ratio, table
from workload import TINY, Peak, Sizes, make_model

from bapo.learn.fsdp import ShardedLearner
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.ranks import join, leave


def compared(shape: str, sizes: Sizes, ranks: Any, device: torch.device, options: argparse.Namespace) -> list[str]:
    """One row of the table: both learners, in turns."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    settings = LearnerSettings(lr=1e-6, micro_tokens=options.micro_tokens, activation_checkpointing=True)
    peak = Peak()
    plain = Learner(make_model(shape, device.type, dtype), settings)
    groups = workload.ragged_groups(sizes, plain.model.config.vocab_size)[: sizes.update // sizes.group]
    plain.step(groups)
    peaks = [peak.gib()]
    peak = Peak()
    sharded = ShardedLearner(make_model(shape, "cpu", dtype), settings, ranks=ranks, device=device, dtype=dtype)
    sharded.step(groups)
    peaks.append(peak.gib())
    candidates = {"one process": partial(plain.step, groups), "sharded": partial(sharded.step, groups)}
    times = interleaved(candidates, device=device.type, rounds=options.rounds)
    tokens = sum(len(t.prompt) + len(t.tokens) for group in groups for t in group.trajectories)
    return [
        *(shape, str(ranks.size()), f"{tokens:,}"),
        *(f"{statistics.median(found):.0f} ms" for found in times.values()),
        f"{ratio(times, 'sharded', 'one process'):.2f}",
        *(f"{gib or 0:.1f} GiB" for gib in peaks),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="135m", help="comma-separated shapes of benchmarks/workload.py")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--tiny", action="store_true", help="very small sizes, even on CPU: tests the script only")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    meeting = "env://" if size > 1 else f"file://{tempfile.mkdtemp()}/meeting"
    ranks = join(rank, size, meeting=meeting, device=device)
    sizes = TINY if options.tiny else Sizes(shapes=[], batches=[])
    rows = []
    for shape in ["tiny"] if options.tiny else options.shapes.split(","):
        rows.append(compared(shape, sizes, ranks, device, options))
        workload.free()
    if rank == 0:
        header = ["shape", "ranks", "tokens", "one process", "sharded", "ratio", "peak, one process", "peak, sharded"]
        print(table(header, rows))
    leave(ranks)


if __name__ == "__main__":
    main()
