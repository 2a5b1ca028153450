"""What we compare with on the GPU: transformers' `generate`, a padded learner, and TRL's GRPOTrainer.

Each is used as its users would use it, with its best settings where there is a choice. Each function says what it
measures. Learners keep float32 weights and compute in bfloat16 autocast, which is TRL's default for a model it loads
and the same arithmetic as ours (bfloat16 weights with float32 masters).
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from typing import Any

import torch
from timing import synchronize
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
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


# ------------------------------------------------------------------------------------------------------------ TRL


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One word per id, and an end-of-text token for which the model has no logit, so no response ends by itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocabulary)} | {"<end>": vocabulary}
    special = {"pad_token": "w0", "unk_token": "w0", "eos_token": "<end>"}
    tokenizer = Tokenizer(models.WordLevel(words, special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def trl_learner(groups: list[Group], sizes: Sizes, device: str, checkpointing: bool) -> dict[str, Any]:
    """GRPOTrainer on given responses: scoring (its old log-probs, one forward pass) and all updates of a batch.

    The responses come from a `rollout_func`, TRL's own hook, and cost nothing. `update_tokens_per_s` excludes scoring.
    """
    trajectories = [t for group in groups for t in group.trajectories]

    def rollout(every: list[str], trainer: Any) -> dict[str, Any]:
        del every
        warm_up = trainer.state.global_step == 0
        return {
            "prompt_ids": [t.prompt for t in trajectories],
            "completion_ids": [t.tokens[: 1 + len(t.tokens) // 8] if warm_up else t.tokens for t in trajectories],
            "logprobs": None,
        }

    numbers = _trl(
        shape=sizes.learner_shape,
        device=device,
        checkpointing=checkpointing,
        rows=sizes.trl_rows,
        update=sizes.update,
        responses=len(trajectories),
        sizes=sizes,
        new=sizes.learner_lengths[2],
        rollout=rollout,
    )
    tokens = sum(len(t.prompt) + len(t.tokens) for t in trajectories)
    scoring, seconds = numbers["scoring_s"], numbers["seconds"]
    return {
        "tokens_per_s": tokens / seconds,
        "update_tokens_per_s": tokens / (seconds - scoring),
        "rows": sizes.trl_rows,
    } | numbers


def trl_cycle(sizes: Sizes, device: str, checkpointing: bool) -> dict[str, Any]:
    """A whole GRPOTrainer cycle: `generate`, reward, old log-probs, and every update on the sampled responses."""
    numbers = _trl(
        shape=sizes.step_shape,
        device=device,
        checkpointing=checkpointing,
        rows=sizes.step_update,
        update=sizes.step_update,
        responses=sizes.step_responses,
        sizes=sizes,
        new=sizes.new,
        rollout=None,
    )
    return {"tokens_per_s": sizes.step_responses * sizes.new / numbers["seconds"]} | numbers


def _trl(
    *,
    shape: str,
    device: str,
    checkpointing: bool,
    rows: int,
    update: int,
    responses: int,
    sizes: Sizes,
    new: int,
    rollout: Any,
) -> dict[str, Any]:
    """Two cycles of a GRPOTrainer. The first warms up, with short responses; the second is measured."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    peak = Peak()
    clock = _Clock(device, peak)

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if rollout is None:
                self.generation_config.max_new_tokens = new if clock.cycles else min(8, new)
            clock.begin_cycle()
            with clock.phase("scoring_s"):
                return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
            with clock.phase("generate_s"):
                result = super()._generate_single_turn(*arguments, **options)
            clock.sampled = sum(len(tokens) for tokens in result[0])
            return result

    class EndOfUpdate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end_update()

    model = make_model(shape, device, torch.float32)
    vocabulary = model.config.vocab_size
    texts = [
        " ".join(f"w{i}" for i in prompt) for prompt in prompts(responses // sizes.group, sizes.prompt, vocabulary)
    ]
    with tempfile.TemporaryDirectory() as directory:
        arguments = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=update // rows,
            steps_per_generation=responses // rows,
            num_generations=sizes.group,
            max_completion_length=new,
            max_steps=2 * responses // update,
            bf16=True,
            gradient_checkpointing=checkpointing,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        with contextlib.redirect_stdout(io.StringIO()):  # keep the trainer's own reports out of our table
            trainer = Timed(
                model=model,
                reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
                args=arguments,
                train_dataset=Dataset.from_dict({"prompt": texts}),
                processing_class=word_tokenizer(vocabulary),
                rollout_func=rollout,
                callbacks=[EndOfUpdate()],
            )
            trainer.train()
    assert clock.cycles == 2
    assert rollout is not None or clock.sampled == responses * new, f"{clock.sampled} tokens were sampled"
    phases = clock.phases
    scoring = phases["scoring_s"] - phases.get("generate_s", 0.0)
    seconds = clock.last_update - clock.start
    numbers = {"seconds": seconds, "scoring_s": scoring, "updates_s": seconds - phases["scoring_s"]}
    if "generate_s" in phases:
        numbers["generate_s"] = phases["generate_s"]
    return numbers | {"peak_gib": peak.gib(), "checkpointing": checkpointing}


class _Clock:
    """When the last cycle began, how long its phases took, and when its last update ended."""

    def __init__(self, device: str, peak: Peak) -> None:
        self.device, self.peak = device, peak
        self.cycles = 0
        self.phases: dict[str, float] = {}
        self.start = self.last_update = 0.0
        self.sampled = 0

    def begin_cycle(self) -> None:
        self.cycles += 1
        self.phases = {}
        self.peak.reset()
        synchronize(self.device)
        self.start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Any:
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self.phases[name] = time.perf_counter() - start

    def end_update(self) -> None:
        synchronize(self.device)
        self.last_update = time.perf_counter()
