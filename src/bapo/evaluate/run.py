"""The work of `bapo eval`: sample, score and save one chunk after the other, then write the figures and the page.

Only the engine samples, so any `Engine` will do. Everything but the chunk in progress is already on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

from bapo.config.errors import ConfigError
from bapo.config.placement import placed
from bapo.evaluate import Response, mean, sample
from bapo.evaluate.data import DataSet, load_data_sets, scorer
from bapo.evaluate.directory import opened
from bapo.evaluate.figures import results
from bapo.evaluate.page import page
from bapo.evaluate.parts import Plan, default_directory, load_model, make_plan
from bapo.evaluate.progress import make_progress
from bapo.evaluate.settings import Settings
from bapo.models import Policy, prompt_text
from bapo.process import stops
from bapo.rollout.engine import Engine, Sampling
from bapo.rollout.in_process import engine_for
from bapo.screen.terminal import write_line
from bapo.screen.watch import Tell
from bapo.tasks.task import Scorer
from bapo.types import Problem

__all__ = ["evaluate_model"]


def evaluate_model(settings: Settings, out: Path | None, stream: TextIO) -> tuple[Path, dict[str, Any]]:
    """Do what an evaluation still lacks; returns its directory and its results."""
    try:
        device, dtype, threads = placed(settings.device, settings.dtype, settings.threads)
        settings = replace(settings, device=device, dtype=dtype, threads=threads)
        data_sets = load_data_sets(settings)
        policy = load_model(settings)
        plan = make_plan(settings, policy, data_sets)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for data in data_sets:
        if data.note:
            write_line(stream, data.note)
    engine = engine_for(policy.model, slots=settings.slots)
    engine.load(policy.model.named_parameters(), version=0)
    path = out or default_directory(plan)
    stops.enter(stops.Phase.RAISE)
    with opened(path, plan.identity) as directory:
        chunks = plan.chunks(data_sets)
        rows = directory.complete([(data.name, [p.id for p in data.problems[part]]) for data, part in chunks])
        total = sum(len(data.problems) for data in data_sets)
        with make_progress(settings, path, total, rows, stream) as progress, ExitStack() as stack:
            scorers = _scorers(data_sets, settings, policy, stack) if len(rows) < total else {}
            done = 0
            for data, part in chunks:
                problems = data.problems[part]
                done += len(problems)
                if done <= len(rows):
                    continue
                progress.working_on(data.name)
                with progress.sampling() as tell:
                    new = _sampled(engine, policy, scorers[data.name], data.name, problems, plan, tell)
                directory.append(new)
                rows += new
                progress.saved(new)
        found = results(rows, plan.identity)
        directory.write("report.html", page(rows, found))
        directory.write("results.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
        stops.done()
    return path, found


def _scorers(data_sets: list[DataSet], settings: Settings, policy: Policy, stack: ExitStack) -> dict[str, Scorer]:
    """What scores each data set. Processes started here end with the stack."""
    chosen = {data.name: data.own_scorer for data in data_sets if data.own_scorer and settings.reward is None}
    if len(chosen) < len(data_sets):
        try:
            shared = stack.enter_context(scorer(settings, opens_thinking=policy.opens_thinking))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        chosen |= {data.name: shared for data in data_sets if data.name not in chosen}
    return chosen


def _sampled(
    engine: Engine, policy: Policy, scores: Scorer, name: str, problems: Sequence[Problem], plan: Plan, tell: Tell
) -> list[dict[str, Any]]:
    """The rows of one chunk."""
    settings = plan.settings
    try:
        answers = sample(
            engine,
            policy,
            scores,
            problems,
            k=settings.k,
            sampling=Sampling(settings.temperature, policy.stop_ids),
            max_tokens=plan.max_tokens,
            seed=settings.seed,
            tell=tell,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--slots {settings.slots} and --max-tokens {plan.max_tokens} need more memory than the device has "
            f"({str(error).splitlines()[0].rstrip('.')}). Lower one of them and choose another --out, because both are "
            "part of an evaluation's identity."
        ) from None
    return [
        {
            "data": name,
            "id": problem.id,
            "source": problem.source,
            "prompt": prompt_text(problem.prompt),
            "reference": problem.answer,
            "responses": [_line(response) for response in given],
        }
        for problem, given in zip(problems, answers, strict=True)
    ]


def _line(response: Response) -> dict[str, Any]:
    return {
        "text": response.text,
        "tokens": len(response.segment.tokens),
        "status": str(response.segment.status),
        "reward": None if response.score.reward is None else float(response.score.reward),
        "failure": response.score.failure,
        "answer": response.score.answer,
        "entropy": mean(response.segment.entropies),
    }
