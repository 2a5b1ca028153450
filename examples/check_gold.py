"""Does the verifier accept every ground truth of a data set, and refuse wrong answers?

    python examples/check_gold.py gsm8k/test.jsonl math500/test.jsonl aime24.parquet …

The script reads GSM8K's own files, files with an `answer` column, and verl's parquet files. The verifier must accept
every ground truth in a box, as a sentence and as a #### line, and the data set's own solutions if it has them. It must
refuse the answer of the next problem; the right answer plus one, with its sign turned, in the thinking only, boxed
before another one, in a list of candidates, or in a box that is not closed; an empty box; and an empty response. The
script lists every wrong decision.
"""

import json
import sys
import time
from pathlib import Path

from bapo.tasks.verify.sandbox import VerifierPool

RIGHT = {
    "boxed": lambda gold: f"We add them up.\nThe answer is $\\boxed{{{gold}}}$.",
    "sentence": lambda gold: f"We add them up.\nThe answer is {gold}.",
    "hashes": lambda gold: f"We add them up.\n#### {gold}",
}
WRONG = {
    "plus one": lambda gold, other: f"\\boxed{{{gold} + 1}}",
    "sign": lambda gold, other: f"\\boxed{{-({gold})}}",
    "next": lambda gold, other: f"\\boxed{{{other}}}",
    "next, sentence": lambda gold, other: f"The answer is {other}.",
    "thinking": lambda gold, other: f"<think>It is \\boxed{{{gold}}}.",
    "early box": lambda gold, other: f"\\boxed{{{gold}}}, or rather \\boxed{{{other}}}",
    "list": lambda gold, other: f"\\boxed{{{gold}, {other}, 123456}}",
    "open box": lambda gold, other: f"\\boxed{{{gold}",
    "empty": lambda gold, other: "\\boxed{}",
    "nothing": lambda gold, other: "",
}


def ground_truths(path: Path) -> tuple[list[str], list[str]]:
    """The answers, and the solutions that end in them, if there are any."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return [row["ground_truth"] for row in parquet.read_table(path).column("reward_model").to_pylist()], []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    solutions = [row.get("solution", row["answer"]) for row in rows]
    return [row["answer"].rpartition("####")[2].strip() for row in rows], solutions


def main(paths: list[str]) -> None:
    with VerifierPool("bapo.tasks.verify.math:verify") as pool:
        for path in map(Path, paths):
            golds, solutions = ground_truths(path)
            print(f"{path}: {len(golds)} answers")
            right = {name: [write(gold) for gold in golds] for name, write in RIGHT.items()}
            for name, responses in (right | {"own solution": solutions} if solutions else right).items():
                started = time.perf_counter()
                scores = pool.scores(list(zip(golds, responses, strict=True)))
                refused = [(gold, s) for gold, s in zip(golds, scores, strict=True) if s.reward != 1.0]
                seconds = time.perf_counter() - started
                print(f"  {name:16} accepted {len(golds) - len(refused):6} of {len(golds)}   {seconds:5.1f} s")
                for gold, score in refused:
                    print(f"    refused {gold!r}: found {score.answer!r} {score.failure}")
            forms = [score.answer for score in pool.scores([(gold, f"\\boxed{{{gold}}}") for gold in golds])]
            for name, write in WRONG.items():
                others = [(gold, other) for (gold, form), (other, its_form) in pairs(golds, forms) if form != its_form]
                if name == "sign":
                    others = [(gold, other) for gold, other in others if gold != "0"]
                scores = pool.scores([(gold, write(gold, other)) for gold, other in others])
                wrong = [(pair, s) for pair, s in zip(others, scores, strict=True) if s.reward != 0.0]
                failed = sum(score.reward is None for _, score in wrong)
                refused = len(others) - len(wrong)
                print(f"  {name:16} refused  {refused:6} of {len(others)}" + f"   ({failed} failed)" * bool(failed))
                for (gold, other), score in wrong:
                    print(f"    accepted for {gold!r}: {write(gold, other)!r}: {score.answer!r} {score.failure}")


def pairs(golds, forms):
    """Pairs of a ground truth with its form, and the next ground truth with its form."""
    both = list(zip(golds, forms, strict=True))
    return zip(both, both[1:] + both[:1], strict=True)


if __name__ == "__main__":
    main(sys.argv[1:])
