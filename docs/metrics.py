"""Prints docs/reference/metrics.md: every metric, with the sentence that explains it.

python docs/metrics.py > docs/reference/metrics.md
"""

from __future__ import annotations

from bapo.runs.metrics import BUFFER, EVAL, EVERY_LINE, HELD_OUT, IMITATION, ROLLOUT, SKIPPED, TIMING, UPDATE

SHARED = {key: UPDATE[key] for key in ("tokens", "entropy", "grad_norm", "lr")}
"""Metrics that supervised updates share with the others."""


def page() -> str:
    """The whole page."""
    sections = {
        "Every line": EVERY_LINE,
        "`rollout` lines: once per step": ROLLOUT | BUFFER,
        "`update` lines: once per optimizer step": UPDATE,
        "`skipped` lines: updates that changed nothing": SKIPPED
        | {k: UPDATE[k] for k in ("tokens", "groups", *(k for k in UPDATE if k.startswith("anchor_")))},
        "`eval` lines": EVAL,
        "`imitation` lines of a supervised run: once per optimizer step": IMITATION | SHARED,
        "`held_out` lines of a supervised run": HELD_OUT,
        "`timing.jsonl`: wall clock, once per step": TIMING,
    }
    text = [
        "# Metrics",
        "",
        "Every key of `metrics.jsonl` and `timing.jsonl` and its meaning, written by `python docs/metrics.py`.",
        "",
    ]
    for title, keys in sections.items():
        text += [f"## {title}", "", "| key | meaning |", "|---|---|"]
        text += [f"| `{key}` | {sentence.replace('|', chr(92) + '|')} |" for key, sentence in keys.items()]
        text.append("")
    return "\n".join(text)


if __name__ == "__main__":
    print(page(), end="")
