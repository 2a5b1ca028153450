"""What we compare with on the GPU: transformers' `generate`, and a padded learner. trl_cycles.py holds TRL.

Each is used as its users would use it, with its best settings where there is a choice. Each function says what it
measures. Learners keep float32 weights and compute in bfloat16 autocast, which is TRL's default for a model it loads
and the same arithmetic as ours (bfloat16 weights with float32 masters).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from workload import Peak, Sizes, make_model, prompts, timed

from bapo.types import Group, Trajectory

# ------------------------------------------------------------------------------------------------------- sampling


class StopAfter(StoppingCriteria):
    """Ends all rows at a given length, while the cache keeps the size that max_new_tokens sets."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        done = input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)


def sample(model: LlamaForCausalLM, ids: Tensor, limit: int, count: int, **options: Any) -> None:
    """Run `generate` at temperature 1 with a limit of `limit` tokens, and end it after `count` tokens."""
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=limit,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([StopAfter(ids.shape[1] + count)]),
        **options,
    )


def generate(model: LlamaForCausalLM, batch: int, sizes: Sizes) -> dict[str, Any]:
    """`generate` with its default, growing cache, over the first few tokens."""
    device = model.device.type
    ids = torch.tensor(prompts(batch, sizes.prompt, model.config.vocab_size), device=device)
    sample(model, ids, sizes.short_new, 2)
    seconds, _ = timed(lambda: sample(model, ids, sizes.short_new, sizes.short_new), device)
    return {"tokens_per_s": batch * sizes.short_new / seconds, "new_tokens": sizes.short_new}


def generate_static(model: LlamaForCausalLM, batch: int, sizes: Sizes) -> dict[str, Any]:
    """`generate` with the static cache, whose decoding step transformers compiles (reduce-overhead: CUDA graphs)."""
    device = model.device.type
    if device != "cuda":
        raise RuntimeError("transformers compiles the decoding step only on CUDA")
    ids = torch.tensor(prompts(batch, sizes.prompt, model.config.vocab_size), device=device)

    def run(count: int) -> None:
        sample(model, ids, sizes.new, count, cache_implementation="static")

    try:
        compile_s, _ = timed(lambda: [run(4), run(4), run(4)], device)  # compile, record, replay
        seconds = min(timed(lambda: run(sizes.static_new), device)[0] for _ in range(2))  # each makes a new cache
    finally:
        torch.compiler.reset()
        vars(model).pop("_compiled_call", None)
    return {
        "tokens_per_s": batch * sizes.static_new / seconds,
        "new_tokens": sizes.static_new,
        "first_s": compile_s,
    }


# ------------------------------------------------------------------------------------------------------- learning


def padded_learner(groups: list[Group], sizes: Sizes, device: str) -> dict[str, Any]:
    """A learner that pads rows to the longest of their micro-batch: full logits, log-softmax, PPO clip, fused AdamW.

    The sampler's log-probs are given, so there is one forward pass. Micro-batches are halved until they fit.
    """
    rows = sizes.padded_rows
    while True:
        try:
            return _padded_learner(groups, sizes, device, rows) | {"rows": rows}
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows //= 2
        torch.cuda.empty_cache()


def _padded_learner(groups: list[Group], sizes: Sizes, device: str, rows: int) -> dict[str, Any]:
    peak = Peak()
    model = make_model(sizes.learner_shape, device, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    trajectories = [t for group in groups for t in group.trajectories]
    updates = [trajectories[i : i + sizes.update] for i in range(0, len(trajectories), sizes.update)]

    def step(update: list[Trajectory]) -> None:
        total = sum(len(t.tokens) for t in update)
        for i in range(0, len(update), rows):
            _naive_loss(model, update[i : i + rows], total, device).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(updates[0])
    peak.reset()
    seconds, _ = timed(lambda: [step(update) for update in updates], device)
    tokens = sum(len(t.prompt) + len(t.tokens) for t in trajectories)
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "peak_gib": peak.gib()}


def _naive_loss(model: LlamaForCausalLM, part: list[Trajectory], total: int, device: str) -> Tensor:
    width = max(len(t.prompt) + len(t.tokens) for t in part)
    ids = torch.zeros(len(part), width, dtype=torch.int64)
    attend, behavior, advantages, learn = (torch.zeros(len(part), width) for _ in range(4))
    for row, t in enumerate(part):
        start, end = len(t.prompt), len(t.prompt) + len(t.tokens)
        ids[row, :end] = torch.tensor(t.prompt + t.tokens)
        attend[row, :end] = 1
        learn[row, start:end] = 1
        behavior[row, start:end] = torch.tensor(t.behavior_logprobs)
        advantages[row] = 2 * (t.reward or 0.0) - 1
    ids, attend, behavior, advantages, learn = (x.to(device) for x in (ids, attend, behavior, advantages, learn))
    with torch.autocast(device, torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=attend.long(), use_cache=False).logits
    logprobs = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    ratio = torch.where(learn[:, 1:] > 0, logprobs - behavior[:, 1:], 0.0).exp()
    loss = -torch.min(ratio * advantages[:, 1:], ratio.clamp(0.8, 1.2) * advantages[:, 1:])
    return (loss * learn[:, 1:]).sum() / total
