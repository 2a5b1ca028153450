"""Writes two-digit sums as data: python examples/two_digit_sums.py DIR [--solved N] [--test N] [--seed N].

solved.jsonl holds 256 demonstrations for supervised training, train.jsonl 2,048 problems to be rewarded on, and
test.jsonl 128 held-out problems, unless you ask for other numbers. No sum is in two of the files.
"""

import argparse
import json
import random
from pathlib import Path

TRAIN = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory to write the three files to")
    parser.add_argument("--solved", type=int, default=256, help="how many demonstrations")
    parser.add_argument("--test", type=int, default=128, help="how many held-out problems")
    parser.add_argument("--seed", type=int, default=0, help="decides which sums go into which file")
    chosen = parser.parse_args()
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    if chosen.solved < 1 or chosen.test < 1 or chosen.solved + TRAIN + chosen.test > len(sums):
        parser.error(f"there are {len(sums):,} sums, {TRAIN:,} of them to train on: ask for 1 or more, but for fewer.")
    random.Random(chosen.seed).shuffle(sums)  # noqa: S311
    chosen.directory.mkdir(parents=True, exist_ok=True)
    for name, size in {"solved": chosen.solved, "train": TRAIN, "test": chosen.test}.items():
        drawn, sums = sums[:size], sums[size:]
        answer = "response" if name == "solved" else "answer"
        rows = [{"prompt": f"{a}+{b}=", answer: str(a + b)} for a, b in drawn]
        (chosen.directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{chosen.directory / name}.jsonl: {size:,} sums")


if __name__ == "__main__":
    main()
