"""How good a policy is on a set of problems (`bapo eval`).

    options.py      what is asked for                 sampling.py       responses and their rewards
    evaluation.py   inputs, and the work in chunks    estimates.py      figures and their intervals
    progress.py     what is seen meanwhile            directory.py      what is saved
    results_page.py what is seen at the end

Here are the arguments of the command, and what it prints at the end. No torch is imported before they are checked.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from bapo.config.command_line import option
from bapo.evaluate.estimates import avg_at_k, maj_at_k, pass_at_k
from bapo.evaluate.options import Settings
from bapo.evaluate.sampling import Evaluation, evaluate
from bapo.screen.terminal import say

__all__ = ["Arguments", "Evaluation", "avg_at_k", "evaluate", "maj_at_k", "pass_at_k", "run"]


@dataclass(frozen=True)
class Arguments:
    """Evaluate a model on benchmarks.

    Samples k responses to every problem, scores them, and reports avg@k, pass@k and maj@k with 95% intervals over
    problems.

    examples:
      bapo eval --model demo --data countdown --k 8 --problems 64
      bapo eval --model runs/my-run/model --data aime24,aime25,math500 --k 16 --max-tokens 8192
      bapo eval --model Qwen/Qwen3-1.7B --data gsm8k=data/gsm8k/test.jsonl --k 1 --temperature 0
      bapo eval --model demo --data countdown --reward my_rewards:score

    The same command continues an evaluation that was stopped: what is saved is not sampled again.
    """

    settings: Annotated[Settings, arg(name="")]
    out: Annotated[Path | None, option(default="evals/MODEL-IDENTITY, which the same command finds again")] = None
    """The directory for everything that is written."""


def run(arguments: Arguments) -> int:
    """Carry out the command and return its exit code."""
    from bapo.evaluate.evaluation import evaluate_model
    from bapo.evaluate.progress import failure_note, results_table

    path, results = evaluate_model(arguments.settings, arguments.out, sys.stdout)
    note = failure_note(results)
    say(f"\n{results_table(results)}\n" + (f"\n{note}\n" if note else ""))
    say(f"responses  {path / 'responses.jsonl'}")
    say(f"results    {path / 'results.json'}\nreport     {path / 'report.html'}")
    return 0
