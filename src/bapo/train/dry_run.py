"""`bapo train --dry-run`: what a run would be, on one screen, and everything that is wrong with it.

The model is looked at without its weights, and nothing is written. Memory and time are estimates, made in
`preflight/memory.py`.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import permutations, product
from pathlib import Path
from typing import Any

import torch

from bapo.config.errors import BapoError
from bapo.config.run import Config
from bapo.models import Policy, hush, outline_policy
from bapo.preflight.checks import written_answers
from bapo.preflight.data import TaskData
from bapo.preflight.memory import GIB, Memory, Seconds, Shape, memory, seconds
from bapo.screen.terminal import duration, printable
from bapo.tasks.countdown import Countdown
from bapo.tasks.task import Task
from bapo.train.build import longest_prompt, misfits, prompting, resolve, unreadable
from bapo.train.tasks import make_task
from bapo.types import Problem

SHOWN = 600
"""Characters of the prompt that are shown."""
TRIALS = 20
"""How often each speed is measured."""


def dry_run(config: Config, data: TaskData | None, wrong: list[str]) -> tuple[list[str], list[str]]:
    """The lines of the plan, and everything that is wrong. `wrong` is what is known already."""
    wrong, policy, task, facts = list(wrong), None, None, dict[str, str]()
    hush()
    try:
        config = resolve(config)
    except BapoError as error:
        wrong.append(str(error))
    try:
        policy = outline_policy(config.model.path, **prompting(config.model))
    except (ValueError, OSError) as error:
        wrong.append(str(error))
    if policy is not None and (config.task.name != "data" or data is not None):
        try:
            prepared = make_task(config, policy, data)
            task, facts["notes"] = prepared.task, "; ".join(prepared.notes)
        except (ValueError, OSError) as error:
            if not str(error) or not any(str(error) in line for line in wrong):
                wrong.append(str(error))
    if policy is not None and task is not None:
        config = config.model_copy(update={"eval": config.eval.among(len(task.test))})
        wrong += [*misfits(config, policy, task), *unreadable(config, policy, task)]
    lines = [*_model(config, policy), *_task(config, policy, task, facts), *_steps(config)]
    if policy is not None and task is not None:
        lines += _needs(config, policy, task)
    return [*lines, *_place(config)], list(dict.fromkeys(wrong))


def shape_of(policy: Policy, config: Config) -> Shape:
    """The dimensions of a model, and how many of its parameters are trained."""
    settings = policy.model.config.get_text_config()
    heads = settings.num_attention_heads
    parameters, rank = int(policy.model.num_parameters()), config.model.lora.rank
    head = policy.model.get_output_embeddings()
    chosen = [
        module
        for name, module in policy.model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and (not config.model.lora.targets or name.rpartition(".")[2] in config.model.lora.targets)
    ]
    return Shape(
        parameters=parameters,
        trained=rank * sum(m.in_features + m.out_features for m in chosen) if rank else parameters,
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        intermediate=getattr(settings, "intermediate_size", None) or 4 * settings.hidden_size,
        key_heads=getattr(settings, "num_key_value_heads", None) or heads,
        head_width=getattr(settings, "head_dim", None) or settings.hidden_size // heads,
    )


def _line(name: str, text: str) -> str:
    first, *rest = text.splitlines() or [""]
    return "\n".join([f"{name:<11}{first}", *(f"{'':<11}{line}" for line in rest)])


def _model(config: Config, policy: Policy | None) -> Iterator[str]:
    told = f"{config.model.path}, {config.model.dtype} on {config.device}"
    if policy is not None:
        shape = shape_of(policy, config)
        trained = "all trained" if shape.trained == shape.parameters else f"{shape.trained / 1e6:,.1f} M trained (LoRA)"
        told += f"; {shape.parameters / 1e6:,.1f} M parameters, {trained}"
    yield _line("model", told)


def _task(config: Config, policy: Policy | None, task: Task | None, facts: dict[str, str]) -> Iterator[str]:
    if policy is None or task is None:
        return
    sizes = f"{len(task.train):,} problems to train on, {len(task.test):,} held out"
    asked = f"{config.eval.problems:,} of them evaluated, {config.eval.k} responses each"
    yield _line("data", "\n".join(filter(None, (f"{config.task.name}: {sizes}, {asked}", facts["notes"]))))
    problem = task.train[0]
    text = printable(policy.decode(policy.encode(problem.prompt)))
    yield _line("prompt", text if len(text) <= SHOWN else f"{text[:SHOWN]} …")
    yield _line("answer", _gold(problem, task))


def _gold(problem: Problem, task: Task) -> str:
    """A right response and its reward."""
    tries = _solutions(problem) if isinstance(task, Countdown) else written_answers(problem)
    scored = list(zip(tries, task.scores([(problem, text) for text in tries]), strict=True))
    found = [(score.reward, text) for text, score in scored if score.reward is not None]
    if not found:
        return f"the verifier fails on the reference answer {problem.answer!r}: {scored[0][1].failure}"
    reward, text = max(found, key=lambda pair: pair[0])
    if reward <= 0:
        return (
            f"{problem.answer!r} gets reward {reward:g}, however it is written ({', '.join(map(repr, tries))}).\n"
            "Check task.reward, or ask for the form of answer that it wants in task.template."
        )
    return f"{printable(text)!r} gets reward {reward:g}"


def _solutions(problem: Problem) -> list[str]:
    """Every expression of the embedded task with these numbers, as a response."""
    answer: Any = problem.answer
    return [
        f"{a}{first}{b}{second}{c}={answer['target']}."
        for (a, b, c), (first, second) in product(permutations(answer["numbers"]), product("+-*", repeat=2))
    ]


def _steps(config: Config) -> Iterator[str]:
    rollout, off, per_step = config.rollout, config.offpolicy, config.updates_per_step
    responses = rollout.prompts * rollout.responses
    yield _line(
        "sampling",
        f"{config.steps} steps of {rollout.prompts} prompts x {rollout.responses} responses = "
        f"{config.steps * responses:,} responses of up to {rollout.max_tokens:,} tokens, temperature "
        f"{rollout.temperature:g}",
    )
    yield _line(
        "updates",
        f"{per_step} per step, {config.steps * per_step:,} in all, of {config.learn.batch_groups} groups each; "
        f"learning rate {config.learn.lr:g} ({config.learn.schedule}), {config.learn.reduction}",
    )
    yield _line("clip", _clip(config))
    oldest = per_step - 1 + config.cluster.ahead * per_step * config.cluster.on
    sources = [f"{off.reuse} passes over each rollout"]
    sources += [f"{off.replay_fraction:.0%} replay"] if off.replay_fraction else []
    sources += [f"partial rollout of {off.partial_budget:,} tokens a step"] if off.partial_budget else []
    grows = "" if len(sources) > 1 else f"; tokens grow {oldest} updates old"
    yield _line("staleness", f"at most {off.max_staleness} updates, enforced; {', '.join(sources)}{grows}")


def _clip(config: Config) -> str:
    """Which rule decides what a token may change."""
    objective = config.objective
    if objective.name != "bapo":
        options = ", ".join(f"{name} {value}" for name, value in objective.options.items())
        return objective.name + (f", {options}" if options else "")
    clip = objective.clip
    low, high = (" to ".join(f"{bound:g}" for bound in dict.fromkeys(pair)) for pair in (clip.low, clip.high))
    told = f"lower bound {low}, upper bound {high}"
    if clip.used_low is not None:
        told += f", and {clip.used_low:g} below for negative tokens that were used before (push once)"
    if clip.low[0] != clip.low[1] or clip.high[0] != clip.high[1]:
        told += ", chosen anew in every update (BAPO)"
    return f"{told}; preset {objective.preset}"


def _needs(config: Config, policy: Policy, task: Task) -> Iterator[str]:
    shape, longest = shape_of(policy, config), longest_prompt(policy, task)
    held = memory(config, shape, longest)
    yield _line("memory", _told_memory(config, held))
    if config.cluster.on:
        return
    flops, bandwidth = measured_speed(config)
    took = seconds(config, shape, longest, flops=flops, bandwidth=bandwidth)
    yield _line("time", _told_time(took))
    yield _line(
        "disk", f"about {_bytes(held.disk)} in the run directory; {_bytes(_free(Path(config.out)))} are free there"
    )


def _told_memory(config: Config, held: Memory) -> str:
    parts = (
        ("weights and optimizer", held.states),
        ("sampler's copy", held.sampler),
        ("copy of the initial weights", held.reference),
        ("keys and values", held.cache),
        ("activations", held.activations),
    )
    told = f"about {_bytes(held.in_all)}: {', '.join(f'{name} {_bytes(size)}' for name, size in parts if size)}"
    if config.device == "cuda" and torch.cuda.is_available():
        has = torch.cuda.get_device_properties(0).total_memory
        told += f"\nthe GPU has {_bytes(has)}"
        if held.in_all > 0.9 * has and not config.cluster.on:
            told += "; lower rollout.slots or learn.micro_tokens, set rollout.cache_tokens or model.lora.rank"
    return told


def _told_time(took: Seconds) -> str:
    parts = (("sampling", took.sampling), ("learning", took.learning), ("evaluating", took.evaluating))
    return (
        f"very roughly {duration(took.in_all)} if every response has its full length: "
        f"{', '.join(f'{name} {duration(part)}' for name, part in parts)}"
    )


def measured_speed(config: Config) -> tuple[float, float]:
    """Floating-point operations and bytes per second of this machine, in the precision of the run.

    On the CPU they are those of one thread, in time of its own, so that a busy machine does not look slow.
    """
    dtype, device = getattr(torch, config.model.dtype), torch.device(config.device)
    on_gpu = device.type == "cuda"
    size = 4096 if on_gpu else 256
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    flops = 2 * size**3 / _seconds_of(lambda: a @ b, on_gpu=on_gpu)
    large = torch.ones(2**28 if on_gpu else 2**22, device=device)
    bandwidth = 2 * 4 * large.numel() / _seconds_of(large.clone, on_gpu=on_gpu)
    torch.set_num_threads(threads)
    return flops * (1 if on_gpu else config.threads), bandwidth


def _seconds_of(work: Callable[[], object], *, on_gpu: bool) -> float:
    """How long some work takes: the best of several trials, after one that does not count."""
    clock = time.perf_counter if on_gpu else time.thread_time
    best = math.inf
    for trial in range(TRIALS):
        began = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, clock() - began) if trial else best
    return best


def _place(config: Config) -> Iterator[str]:
    yield _line(
        "out", f"{config.out}, a checkpoint every {config.checkpoint_every} steps, {config.checkpoint_keep} kept"
    )


def _free(path: Path) -> float:
    above = next(place for place in (path, *path.absolute().parents) if place.exists())
    return float(shutil.disk_usage(above).free)


def _bytes(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{math.ceil(size / 2**20)} MiB"
