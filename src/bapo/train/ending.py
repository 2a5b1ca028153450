"""What a run of reinforcement learning prints when it has ended: what training changed, and what went wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bapo.config.numerals import counted
from bapo.config.run import Config
from bapo.runs import files
from bapo.runs.ledger import FILE as LEDGER
from bapo.runs.ledger import balance
from bapo.runs.ledger import read as read_ledger
from bapo.screen.terminal import say
from bapo.screen.view import summary_table
from bapo.train.job import Summary

SELDOM = 0.02
"""With a mean reward below this, most groups have no success at all."""


def show_ending(config: Config, summary: Summary, path: Path, *, drift: str) -> None:
    """Print it. `drift`: since when sampler and learner have not meant the same policy, in words; empty if they do."""
    k = config.eval.k
    title = f"{counted(config.eval.problems or 0, 'held-out problem')}, temperature {config.eval.temperature:g}"
    summary_table(title, _rows(summary, k))
    if not summary["updates"] and not summary["skipped"]:
        say(_why_no_update(config, summary["after"]))
    failures = path / "failures.jsonl"
    if failures.exists() and (lines := files.read(failures).splitlines()):
        told = counted(len(lines), "response was", "responses were")
        say(f"{told} left out, because the verifier failed: {failures}")
    say(
        f"{counted(summary['updates'], 'update')} in {summary['training_seconds']:.0f} s of training; no token "
        f"older than {counted(round(summary['staleness_max']), 'update')} (bound {config.offpolicy.max_staleness})"
    )
    if summary["skipped"]:
        told = counted(summary["skipped"], "update was", "updates were")
        say(f"{told} skipped, because the loss or the gradient was not finite")
    if "restarts" in summary:
        say(f"restarts: {_restarts(summary['restarts'])}")
    if drift:
        say(f"sampler and learner differ since {drift}")
    if (path / LEDGER).exists():
        say(f"ledger: {_balance(config, path)}")


def _balance(config: Config, path: Path) -> str:
    """Whether every group is accounted for, in words."""
    bound = config.offpolicy.max_staleness
    found = balance(read_ledger(path), max_staleness=bound, ended=True, all_used=config.cluster.on)
    return found.line() + (f" (`bapo ledger {path}` lists them)" if found.wrong else "")


def _restarts(counts: dict[str, int]) -> str:
    """How often actors of the cluster were restarted, in words."""
    if not counts:
        return "none"
    times = ", ".join(f"{who} ({count})" for who, count in counts.items())
    return f"{times}; history.jsonl says when and why"


def _why_no_update(config: Config, after: dict[str, Any]) -> str:
    """Say why a run learned nothing and what to change."""
    told = "No update was taken: no group finished with different rewards."
    if config.offpolicy.partial_budget is not None:
        return f"{told} Raise offpolicy.partial_budget or steps."
    if after["eval/avg"] < SELDOM:
        return f"{told} The model hardly ever earns a reward. Warm-start it (docs/sft.md), or give it easier problems."
    return f"{told} Use problems that the model sometimes solves, larger groups, or more steps."


def _rows(summary: Summary, k: int) -> list[tuple[str, str, str]]:
    """What training changed, as rows of the table: name, before, after."""
    before, after = summary["before"], summary["after"]

    def interval(line: dict[str, Any], key: str) -> str:
        return f"{line[key]:.3f}  [{line[f'{key}_low']:.3f}, {line[f'{key}_high']:.3f}]"

    rows = [
        (f"avg@{k}", interval(before, "eval/avg"), interval(after, "eval/avg")),
        (f"pass@{k}", interval(before, "eval/pass"), interval(after, "eval/pass")),
        ("response length", f"{before['eval/length']:.1f}", f"{after['eval/length']:.1f}"),
    ]
    if "eval/entropy" in before and "eval/entropy" in after:  # otherwise the engine does not give entropies
        rows.insert(2, ("entropy, nats per token", f"{before['eval/entropy']:.3f}", f"{after['eval/entropy']:.3f}"))
    for other in summary["also_at"]:
        samples = 1 if other["temperature"] == 0 else k
        name = f"avg@{samples} at temperature {other['temperature']:g}"
        rows.append((name, interval(other["before"], "eval/avg"), interval(other["after"], "eval/avg")))
    return rows
