"""The work of `bapo eval`: sample, score and save one chunk after the other, then write the figures and the page.

Only the engine samples, so any `Engine` will do. Everything but the chunk in progress is already on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

from bapo.config.errors import ConfigError
from bapo.config.placement import placed
from bapo.evaluate.directory import opened
from bapo.evaluate.estimates import Row, mean, results
from bapo.evaluate.inputs import default_directory, identify, load_data_sets, load_model, open_scorers
from bapo.evaluate.options import Settings
from bapo.evaluate.progress import make_progress
from bapo.evaluate.results_page import page
from bapo.evaluate.sampling import Response, sample
from bapo.models import Policy, prompt_text
from bapo.process import stops
from bapo.rollout.engine import Engine, Sampling
from bapo.rollout.local.engine import engine_for
from bapo.screen.terminal import write_line
from bapo.screen.watch import Tell
from bapo.tasks.task import Scorer
from bapo.types import Problem


def evaluate_model(settings: Settings, out: Path | None, stream: TextIO) -> tuple[Path, dict[str, Any]]:
    """Do what an evaluation still lacks; returns its directory and its results."""
    try:
        device, dtype, threads = placed(settings.device, settings.dtype, settings.threads)
        settings = replace(settings, device=device, dtype=dtype, threads=threads)
        data_sets = load_data_sets(settings)
        policy = load_model(settings)
        identity = identify(settings, policy, data_sets)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for data in data_sets:
        if data.note:
            write_line(stream, data.note)
    engine = engine_for(policy.model, slots=settings.slots)
    engine.load(policy.model.named_parameters(), version=0)
    path = out or default_directory(identity)
    stops.enter(stops.Phase.RAISE)
    size, total = settings.chunk_problems, sum(len(data.problems) for data in data_sets)
    chunks = [
        (data.name, data.problems[i : i + size]) for data in data_sets for i in range(0, len(data.problems), size)
    ]
    with opened(path, identity) as directory:
        rows = directory.complete([(name, [problem.id for problem in problems]) for name, problems in chunks])
        unscored = data_sets if len(rows) < total else []
        with (
            make_progress(settings, path, total, rows, stream) as progress,
            open_scorers(unscored, settings, opens_thinking=policy.opens_thinking) as scorers,
        ):
            done = 0
            for name, problems in chunks:
                done += len(problems)
                if done <= len(rows):
                    continue
                progress.working_on(name)
                with progress.sampling() as tell:
                    given = _sampled(engine, policy, scorers[name], problems, identity, tell)
                new = [_row(name, *pair) for pair in zip(problems, given, strict=True)]
                directory.append(new)
                rows += new
                progress.saved(new)
        found = results(rows, identity)
        directory.write("report.html", page(rows, found))
        directory.write("results.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
        stops.done()
    return path, found


def _sampled(
    engine: Engine, policy: Policy, scorer: Scorer, problems: Sequence[Problem], identity: dict[str, Any], tell: Tell
) -> list[list[Response]]:
    sampling = Sampling(identity["temperature"], policy.stop_ids)
    how = {key: identity[key] for key in ("k", "max_tokens", "seed")}
    try:
        return sample(engine, policy, scorer, problems, sampling=sampling, tell=tell, **how)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--slots {identity['slots']} and --max-tokens {identity['max_tokens']} need more memory than the device "
            f"has ({str(error).splitlines()[0].rstrip('.')}). Lower one of them and choose another --out, because both "
            "are part of an evaluation's identity."
        ) from None


def _row(name: str, problem: Problem, responses: Sequence[Response]) -> Row:
    """The line of responses.jsonl for a problem of this data set."""
    return {
        "data": name,
        "id": problem.id,
        "source": problem.source,
        "prompt": prompt_text(problem.prompt),
        "reference": problem.answer,
        "responses": [
            {
                "text": response.text,
                "tokens": len(response.segment.tokens),
                "status": str(response.segment.status),
                "reward": None if response.score.reward is None else float(response.score.reward),
                "failure": response.score.failure,
                "answer": response.score.answer,
                "entropy": mean(response.segment.entropies),
            }
            for response in responses
        ],
    }
