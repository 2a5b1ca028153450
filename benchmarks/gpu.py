"""Everything that should be fast on a GPU, against what people use today, in one run on one machine.

    python benchmarks/gpu.py                            all sections: engine, learner, bounds, step
    python benchmarks/gpu.py engine --shapes 135m --batches 256
    python benchmarks/gpu.py learner step --json gpu.json
    python benchmarks/gpu.py --tiny                     very small sizes, even on CPU: tests the script, not speed

    engine    tokens/s of GraphEngine in each of --precisions, 64 prompt + 512 new tokens per row, against the rate at
              which memory can deliver weights, keys and values, and (at --generate-batches) transformers `generate`
              over 48 new tokens, because it is slow, and with its static, compiled cache; and with ragged lengths
    learner   tokens/s (prompts count, padding does not) and peak memory of updates of 64 responses, lognormal lengths
              64 to 4,096, vocabulary 151,936, against padding + full logits, and TRL's GRPOTrainer on the same
              responses
    bounds    loss with solved bounds against fixed ones, 2^21 tokens
    step      one whole cycle: 256 responses of 512 tokens (with --step-ragged: of lognormal length, at most 512), then
              updates of 32 responses, against TRL's, which samples through colocated vLLM if that is installed

TRL is measured if it can be imported. A candidate that fails is shown as "n/a" with the reason, and the others go on.
Each result is printed as soon as it is known and written to the file given by --json. The first call warms our side up;
its time (kernels compiled, graphs captured) is given as first_s.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import bounds as bounds_benchmark
import references
import torch
import transformers
import trl_cycles
import workload
from timing import table
from workload import TINY, Peak, Report, Sizes, make_model, timed

from bapo.learn import head, optimizer
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.models.layers import LoraSettings, add_lora
from bapo.rollout.engine import Engine, Precision, Request, Sampling, generate
from bapo.types import Group

SECTIONS = ("engine", "learner", "bounds", "step")


# --------------------------------------------------------------------------------------------------------- engine


def our_engine(model: Any, slots: int, precision: Precision = "model") -> Engine:
    if model.device.type == "cuda":
        from bapo.rollout.cuda.engine import GraphEngine

        engine: Engine = GraphEngine(model, slots=slots, precision=precision)
    else:
        from bapo.rollout.local.engine import LocalEngine

        engine = LocalEngine(model, slots=slots)
    engine.load(model.named_parameters(), version=0)
    return engine


def measure_engine(
    model: Any, slots: int, requests: list[Request], budget_s: float = 8.0, precision: Precision = "model"
) -> dict[str, Any]:
    """Generate once to warm up, shortened if possible, then up to three times in full, none begun after `budget_s`."""
    device = model.device.type
    peak = Peak()
    engine = our_engine(model, slots, precision)
    ragged = len({r.max_new_tokens for r in requests}) > 1  # uses many batch sizes, each with its own graph
    budget = None if ragged else 4 * slots
    first, _ = timed(lambda: generate(engine, requests, Sampling(), token_budget=budget), device)
    peak.reset()
    times: list[float] = []
    while len(times) < 3 and sum(times) < budget_s:
        seconds, segments = timed(lambda: generate(engine, requests, Sampling()), device)
        times.append(seconds)
    assert [len(s.tokens) for s in segments] == [r.max_new_tokens for r in requests]
    tokens = sum(r.max_new_tokens for r in requests)
    return {
        "tokens_per_s": tokens / statistics.median(times),
        "seconds": statistics.median(times),
        "first_s": first,
        "peak_gib": peak.gib(),
    }


def engine_section(report: Report, sizes: Sizes, options: argparse.Namespace) -> None:
    bandwidth = workload.copy_bandwidth(options.device)
    print(f"  memory bandwidth of a large copy: {bandwidth / 1e12:.2f} TB/s")
    rows = [row for shape in sizes.shapes for row in engine_rows(report, shape, sizes, options, bandwidth)]
    header = ["tokens/s", *options.precisions, "bandwidth floor", "generate", "static cache", "ours/generate"]
    print("\n" + table(header, rows))
    slots = ragged_slots(sizes)
    print(f"ragged: {4 * slots} responses of lognormal length, at most {sizes.new}, over {slots} slots\n")


def ragged_slots(sizes: Sizes) -> int:
    return min(256, max(sizes.batches))


def engine_rows(
    report: Report, shape: str, sizes: Sizes, options: argparse.Namespace, bandwidth: float
) -> list[list[str]]:
    device = options.device
    model = make_model(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    vocabulary = model.config.vocab_size

    def ours(case: str, slots: int, requests: list[Request]) -> list[dict[str, Any]]:
        def in_precision(precision: Precision) -> dict[str, Any]:
            return measure_engine(model, slots, requests, precision=precision)

        run = bind(report, "engine", case)
        return [run(f"ours, {one}", partial(in_precision, one)) for one in options.precisions]

    def of_batch(batch: int) -> list[str]:
        case = f"{shape} x {batch}"
        found = ours(case, batch, workload.equal_requests(batch, sizes, vocabulary))
        first, plain = found[0], dict[str, Any]()
        static: dict[str, Any] = {}
        if batch in options.generate_batches:
            run = bind(report, "engine", case)
            plain = run("generate", lambda: references.generate(model, batch, sizes))
            static = run("generate, static cache", lambda: references.generate_static(model, batch, sizes))
        floor = workload.decode_floor(model, batch, sizes, bandwidth)
        reached = f"{100 * first['tokens_per_s'] / floor:.0f}% of {floor:,.0f}" if "tokens_per_s" in first else "n/a"
        rates = [count(numbers, "tokens_per_s") for numbers in (plain, static)]
        return [case, *(count(numbers, "tokens_per_s") for numbers in found), reached, *rates, times(first, plain)]

    def of_ragged(slots: int, group: int) -> list[str]:
        requests = workload.ragged_requests(4 * slots, sizes, vocabulary, group=group)
        case = f"{shape} ragged" if group == 1 else f"{shape} ragged, {group} per prompt"
        return [case, *(count(numbers, "tokens_per_s") for numbers in ours(case, slots, requests)), "", "", "", ""]

    ragged = [of_ragged(ragged_slots(sizes), group) for group in options.groups]
    return [*(of_batch(batch) for batch in sizes.batches), *ragged]


# -------------------------------------------------------------------------------------------------------- learner


def updates_of(groups: list[Group], responses: int, group: int) -> list[list[Group]]:
    size = responses // group
    return [groups[i : i + size] for i in range(0, len(groups), size)]


def measure_learner(groups: list[Group], sizes: Sizes, device: str, fused: bool, **how: bool) -> dict[str, Any]:
    """Times whole updates: packing, forward (twice if the bounds need it), backward, step. The second round counts."""
    peak = Peak()
    model = make_model(sizes.learner_shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    learner = make_learner(model, fused, LearnerSettings(lr=1e-6, micro_tokens=sizes.micro_tokens, **how))
    parts = updates_of(groups, sizes.update, sizes.group)

    def round_() -> None:
        for part in parts:
            learner.step(part)

    first, _ = timed(round_, device)
    peak.reset()
    seconds, _ = timed(round_, device)
    tokens = sum(len(t.prompt) + len(t.tokens) for group in groups for t in group.trajectories)
    return {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "first_s": first,
        "peak_gib": peak.gib(),
        "padded": not learner.packed,
    }


@contextlib.contextmanager
def through_transformers() -> Iterator[None]:
    """Inside, a learner uses transformers' own layers and the plain optimizer, as it does where ours do not fit."""
    with (
        mock.patch.object(head, "can_fuse", return_value=False),
        mock.patch.object(optimizer, "_can_be_flat", return_value=False),
    ):
        yield


def our_learners(options: argparse.Namespace) -> dict[str, tuple[bool, dict[str, bool]]]:
    """By name: whether layers are fused where they can be, and the settings."""
    learners: dict[str, tuple[bool, dict[str, bool]]] = {
        "ours": (True, {}),
        "ours, layers recomputed": (True, {"activation_checkpointing": True}),
    }
    if options.device == "cuda":
        learners["ours, states on the host"] = True, {"activation_checkpointing": True, "offload_optimizer": True}
        learners["ours, transformers' layers"] = False, {}
        learners["the same, compiled"] = False, {"compile": True}
    return {name: how for name, how in learners.items() if name in (options.ours or learners)}


def learner_section(report: Report, sizes: Sizes, options: argparse.Namespace) -> None:
    device = options.device
    groups = workload.ragged_groups(sizes, workload.SHAPES[sizes.learner_shape][5])
    lengths = [len(t.prompt) + len(t.tokens) for group in groups for t in group.trajectories]
    print(
        f"  {len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all; "
        f"{len(lengths) * max(lengths):,} if padded to the longest. Updates of {sizes.update}, ours in parts of "
        f"{sizes.micro_tokens:,} tokens"
    )
    run = bind(report, "learner", sizes.learner_shape)
    results = {
        **{
            name: run(name, lambda fused=fused, how=how: measure_learner(groups, sizes, device, fused, **how))
            for name, (fused, how) in our_learners(options).items()
        },
        "padded, full logits": run("padded, full logits", lambda: references.padded_learner(groups, sizes, device)),
        "TRL": run("TRL", lambda: trl_cycles.learner(groups, sizes, device, options.trl_checkpointing)),
    }
    trl = results["TRL"]
    rows = [
        [
            name,
            count(numbers, "tokens_per_s"),
            times(numbers, trl),
            gib(numbers),
            f"{numbers['peak_gib'] / trl['peak_gib']:.2f}" if both(numbers, trl, "peak_gib") else "n/a",
        ]
        for name, numbers in results.items()
    ]
    if "update_tokens_per_s" in trl:
        without = {"tokens_per_s": trl["update_tokens_per_s"]}
        rows.append(["TRL, its scoring pass left out", count(without, "tokens_per_s"), times(without, trl), "", ""])
    print("\n" + table(["learner", "tokens/s", "against TRL", "peak memory", "against TRL"], rows) + "\n")


# --------------------------------------------------------------------------------------------------------- bounds


def bounds_section(report: Report, sizes: Sizes, options: argparse.Namespace) -> None:
    def measure() -> dict[str, Any]:
        row = bounds_benchmark.measure(sizes.bound_tokens, options.device, sizes.rounds)
        return dict(zip(bounds_benchmark.header(options.device), row, strict=True))

    numbers = report.attempt("bounds", f"{sizes.bound_tokens:,}", "loss, forward + backward", measure)
    if "unavailable" not in numbers:
        print("\n" + table(list(numbers), [list(numbers.values())]) + "\n")


# ----------------------------------------------------------------------------------------------------------- step


def make_learner(model: Any, fused: bool, settings: LearnerSettings) -> Learner:
    with contextlib.nullcontext() if fused else through_transformers():
        return Learner(model, settings)


def measure_step(sizes: Sizes, device: str, fused: bool, **how: bool) -> dict[str, Any]:
    """Times a whole cycle: sample, score, pack, and take every update. The second cycle counts."""
    peak = Peak()
    model = make_model(sizes.step_shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    if sizes.step_lora:
        add_lora(model, LoraSettings(sizes.step_lora), seed=0)
    learner = make_learner(model, fused, LearnerSettings(lr=1e-6, micro_tokens=sizes.step_micro_tokens, **how))
    engine = our_engine(model, sizes.step_responses)
    make = workload.ragged_requests if sizes.step_ragged else workload.equal_requests
    requests = make(sizes.step_responses, sizes, model.config.vocab_size, group=sizes.group)

    def learn(segments: list[Any]) -> None:
        groups = workload.grouped(workload.trajectories_of(requests, segments), sizes.group)
        for part in updates_of(groups, sizes.step_update, sizes.group):
            learner.step(part)

    def sample() -> list[Any]:
        engine.load(learner.weights(), version=learner.version)
        return generate(engine, requests, Sampling())

    first, _ = timed(lambda: learn(sample()), device)
    peak.reset()
    generate_s, segments = timed(sample, device)
    updates_s, _ = timed(lambda: learn(segments), device)
    seconds = generate_s + updates_s
    return {
        "tokens_per_s": sum(r.max_new_tokens for r in requests) / seconds,
        "seconds": seconds,
        "generate_s": generate_s,
        "updates_s": updates_s,
        "first_s": first,
        "peak_gib": peak.gib(),
    }


def step_section(report: Report, sizes: Sizes, options: argparse.Namespace) -> None:
    run = bind(report, "step", sizes.step_shape)
    ours = {
        name: run(name, lambda fused=fused, how=how: measure_step(sizes, options.device, fused, **how))
        for name, (fused, how) in our_learners(options).items()
    }
    theirs = "TRL with vLLM" if trl_cycles.has_vllm() else "TRL"
    trl = run(theirs, lambda: trl_cycles.cycle(sizes, options.device, options.trl_checkpointing))
    rows = [
        [
            name,
            *(f"{x[key]:.2f} s" if key in x else "n/a" for key in ("seconds", "generate_s", "scoring_s", "updates_s")),
            times(x, trl),
            gib(x),
        ]
        for name, x in {**ours, theirs: trl}.items()
    ]
    tokens = f"{'at most ' if sizes.step_ragged else ''}{sizes.new} tokens"
    print(f"\n{sizes.step_responses} responses of {tokens}, updates of {sizes.step_update}")
    header = ["cycle", "whole", "sampling", "old log-probs", "updates", "against TRL", "peak memory"]
    print(table(header, rows) + "\n")


# ------------------------------------------------------------------------------------------------------ the script


def bind(report: Report, section: str, case: str) -> Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]:
    return lambda name, measure: report.attempt(section, case, name, measure)


def both(a: dict[str, Any], b: dict[str, Any], key: str) -> bool:
    return bool(a.get(key)) and bool(b.get(key))


def count(numbers: dict[str, Any], key: str) -> str:
    return f"{numbers[key]:,.0f}" if key in numbers else "n/a"


def times(a: dict[str, Any], b: dict[str, Any]) -> str:
    return f"{a['tokens_per_s'] / b['tokens_per_s']:.1f}x" if both(a, b, "tokens_per_s") else "n/a"


def gib(numbers: dict[str, Any]) -> str:
    return f"{numbers['peak_gib']:.1f} GiB" if numbers.get("peak_gib") else "n/a"


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Sizes]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; all if none is given"
    )
    parser.add_argument("--shapes", type=lambda s: s.split(","), help="models of the engine section (135m,1.5b)")
    parser.add_argument("--learner-shape", help="model of the learner section (0.5b)")
    parser.add_argument("--step-shape", help="model of the step section (135m)")
    parser.add_argument("--step-ragged", action="store_true", help="lognormal lengths in the step section")
    parser.add_argument("--step-lora", type=int, metavar="RANK", help="train low-rank additions in the step section")
    parser.add_argument("--trl-step-rows", type=int, help="TRL's per_device_train_batch_size in the step section (16)")
    parser.add_argument("--ours", type=lambda s: s.split(";"), help="only these of our learners, by name, split by ;")
    parser.add_argument("--batches", type=integers, help="batch sizes of the engine section (64,256,1024)")
    parser.add_argument(
        "--generate-batches",
        type=integers,
        default=[256],
        help="batch sizes of transformers' generate, 0 for none (256)",
    )
    parser.add_argument(
        "--precisions",
        type=lambda s: s.split(","),
        default=["model"],
        help="of our engine: model,fp8,fp8-weights (model)",
    )
    parser.add_argument("--groups", type=integers, default=[1, 8], help="responses per prompt of ragged loads (1,8)")
    parser.add_argument("--micro-tokens", type=int, help="tokens per forward pass of our learner (16384; step: 20480)")
    parser.add_argument("--trl-rows", type=int, help="TRL's per_device_train_batch_size in the learner section (8)")
    parser.add_argument(
        "--no-trl-checkpointing",
        dest="trl_checkpointing",
        action="store_false",
        help="run TRL without gradient checkpointing",
    )
    parser.add_argument("--json", type=Path, help="file for all numbers, rewritten after each")
    parser.add_argument("--tiny", action="store_true", help="use very small sizes, to test the script")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}. Name any of {', '.join(SECTIONS)}.")
    named = {*(options.shapes or ()), options.learner_shape, options.step_shape} - {None}
    if unknown := named - set(workload.SHAPES):
        parser.error(f"there is no shape {', '.join(sorted(unknown))}. Name any of {', '.join(workload.SHAPES)}.")
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cpu" and not options.tiny:
        parser.error("torch finds no CUDA device. Without one, only --tiny can run.")
    sizes = TINY if options.tiny else Sizes(shapes=["135m", "1.5b"], batches=[64, 256, 1024])
    names = ["shapes", "batches", "micro_tokens", "trl_rows", "learner_shape"]
    names += ["step_shape", "step_ragged", "step_lora", "trl_step_rows"]
    given = {name: getattr(options, name) for name in names}
    given["step_micro_tokens"] = options.micro_tokens
    return options, dataclasses.replace(sizes, **{name: value for name, value in given.items() if value})


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    options, sizes = parse(sys.argv[1:])
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    environment = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in environment.items()), flush=True)
    report = Report(options.json, environment)
    sections = {
        "engine": engine_section,
        "learner": learner_section,
        "bounds": bounds_section,
        "step": step_section,
    }
    for section in options.sections or SECTIONS:
        print(f"\n{section}", flush=True)
        try:
            sections[section](report, sizes, options)
        except Exception:
            traceback.print_exc()
            print(f"  section {section} ended early", flush=True)
        workload.free()


if __name__ == "__main__":
    main()
