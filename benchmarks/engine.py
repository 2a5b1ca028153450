"""Tokens per second of LocalEngine against transformers' own `generate`, in one run, on one model.

    python benchmarks/engine.py [--repeats 5] [--slots 128 ...] [--threads N]

The model is a Llama of 0.8 million parameters with random weights, the size of the embedded demo. At that size the cost
of a step is mostly overhead, which is what an engine can save. There are two loads, of 32 and 128 sequences each:

    ragged   response lengths are lognormal with a mean of about 0.3 of the limit of 256. LocalEngine gets each length
             as that request's max_new_tokens. `generate` has one limit for its batch, so it runs to the longest
             response, as it does in practice; its tokens past a sequence's own length are not counted.
    equal    every response has 64 tokens, so that refilling slots gains nothing.

Prompts have 8 to 24 tokens. `generate` gets them left-padded with an attention mask, use_cache, pure sampling at
the same temperature, and an EOS token (which is suppressed, so that the lengths are the given ones). It does less than
the engine, which also records log-probs and entropies. Only useful tokens are counted. The two are timed alternately;
the table gives medians, and the lowest and highest ratio of the paired repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import LlamaForCausalLM
from transformers.generation import LogitsProcessor, LogitsProcessorList
from workload import make_model

from bapo.rollout.engine import Request, Sampling, generate
from bapo.rollout.local.engine import LocalEngine

VOCABULARY, EOS, PAD, LIMIT, TEMPERATURE = 32, 1, 0, 256, 1.0


def demo_sized_model() -> LlamaForCausalLM:
    model = make_model("demo", "cpu", torch.float32)
    model.generation_config.eos_token_id = EOS
    return model


def load(name: str, count: int) -> list[Request]:
    rng = np.random.default_rng(count)
    if name == "ragged":
        lengths = np.clip(rng.lognormal(np.log(58), 0.8, count), 1, LIMIT).astype(int)
        lengths[rng.integers(count)] = LIMIT
    else:
        lengths = np.full(count, 64)
    prompts = [rng.integers(3, VOCABULARY, rng.integers(8, 25)).tolist() for _ in range(count)]
    return [Request(prompt, 0, seed, int(n)) for seed, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))]


class NoEos(LogitsProcessor):
    """Keeps sequences from ending early, so that both sides sample exactly the drawn lengths."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, EOS] = float("-inf")
        return scores


def time_generate(model: LlamaForCausalLM, requests: list[Request]) -> float:
    width = max(len(request.context) for request in requests)
    ids = torch.full((len(requests), width), PAD)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - len(request.context) :] = torch.tensor(request.context)
        mask[row, width - len(request.context) :] = 1
    start = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        use_cache=True,
        max_new_tokens=max(request.max_new_tokens for request in requests),
        logits_processor=LogitsProcessorList([NoEos()]),
    )
    return time.perf_counter() - start


def time_engine(engine: LocalEngine, requests: list[Request]) -> float:
    start = time.perf_counter()
    segments = generate(engine, requests, Sampling(TEMPERATURE))
    elapsed = time.perf_counter() - start
    assert [len(segment.tokens) for segment in segments] == [request.max_new_tokens for request in requests]
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slots", type=int, nargs="+", default=[128])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = demo_sized_model()
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"Llama, {size / 1e6:.2f}M parameters, {model.device}, {arguments.threads} threads, {arguments.repeats} repeats"
    )
    print(
        f"{'load':7} {'sequences':>9} {'tokens':>7} {'slots':>5} {'generate/s':>10} {'ours/s':>8} {'ratio':>6}  spread"
    )
    for name in ("ragged", "equal"):
        for count in (32, 128):
            requests = load(name, count)
            tokens = sum(request.max_new_tokens for request in requests)
            engines = [LocalEngine(model, slots=slots) for slots in arguments.slots]
            few = [Request(request.context, 0, request.seed, 4) for request in requests]
            for engine in engines:
                engine.load(model.named_parameters(), version=0)
                time_engine(engine, few)
            time_generate(model, few)
            theirs: list[float] = []
            ours: list[list[float]] = [[] for _ in engines]
            for _ in range(arguments.repeats):
                theirs.append(time_generate(model, requests))
                for engine, times in zip(engines, ours, strict=True):
                    times.append(time_engine(engine, requests))
            for engine, times in zip(engines, ours, strict=True):
                ratios = sorted(a / b for a, b in zip(theirs, times, strict=True))
                print(
                    f"{name:7} {count:9} {tokens:7} {engine.slots:5} {tokens / statistics.median(theirs):10.0f} "
                    f"{tokens / statistics.median(times):8.0f} {statistics.median(ratios):6.2f}  "
                    f"{ratios[0]:.2f}-{ratios[-1]:.2f}"
                )


if __name__ == "__main__":
    main()
