"""Benchmarks by name: where each one is on the hub, and how its prompts are worded.

The prompts ask for the answer in a box because the verifier looks there. Columns are not listed here, because
`columns.py` recognises every layout of these data sets: the hub's, verl's parquet files and the authors' own files.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BENCHMARKS", "BOXED", "BOXED_TEMPLATE", "Benchmark"]

BOXED = r"Let's think step by step and output the final answer within \boxed{}."
"""The sentence that verl and Skywork-OR1 put after their problems."""
BOXED_TEMPLATE = "{prompt} " + BOXED


@dataclass(frozen=True)
class Benchmark:
    """A named data set."""

    hub: str
    """owner/name on the hub."""
    split: str
    """The split that NAME alone stands for. NAME:SPLIT selects another."""
    config: str | None = None
    template: str = BOXED_TEMPLATE
    """Applied to every prompt that does not have this form yet, unless the caller gives a template."""


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", split="test", config="main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", split="test"),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", split="train"),
    "aime25": Benchmark("math-ai/aime25", split="test"),
}
