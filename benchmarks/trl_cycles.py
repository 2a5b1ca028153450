"""TRL's GRPOTrainer on our loads: updates on given responses, and whole cycles, sampled by vLLM if it is installed.

vLLM runs colocated, as TRL starts it by default: in the same process, on the same GPU, with the weights handed over
before every cycle. TRL sets the same limit for all responses; for ragged lengths each response gets its own limit in
the call that TRL makes. Weights are float32 and computed with in bfloat16 autocast, which is TRL's default for a model
that it loads; under low-rank additions the frozen weights are bfloat16, as ours are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import workload
from timing import synchronize
from transformers import PreTrainedTokenizerFast, TrainerCallback
from workload import Peak, Sizes, make_model, prompts

from bapo.types import Group

LOCAL = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the trainer's process, where TRL reaches its weights
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # used for top-k and top-p only, which we do not ask for
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}
"""What vLLM needs on a machine without network."""


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One word per id, and an end-of-text token for which the model has no logit, so no response ends by itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocabulary)} | {"<end>": vocabulary}
    special = {"pad_token": "w0", "unk_token": "w0", "eos_token": "<end>"}
    tokenizer = Tokenizer(models.WordLevel(words, special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def learner(groups: list[Group], sizes: Sizes, device: str, checkpointing: bool) -> dict[str, Any]:
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

    numbers = _two_cycles(
        shape=sizes.learner_shape,
        device=device,
        checkpointing=checkpointing,
        rows=sizes.trl_rows,
        update=sizes.update,
        lengths=[sizes.learner_lengths[2]] * len(trajectories),
        sizes=sizes,
        rollout=rollout,
    )
    tokens = sum(len(t.prompt) + len(t.tokens) for t in trajectories)
    scoring, seconds = numbers["scoring_s"], numbers["seconds"]
    return {
        "tokens_per_s": tokens / seconds,
        "update_tokens_per_s": tokens / (seconds - scoring),
        "rows": sizes.trl_rows,
    } | numbers


def cycle(sizes: Sizes, device: str, checkpointing: bool) -> dict[str, Any]:
    """A whole cycle: sampling by vLLM or `generate`, reward, old log-probs, and every update on the responses."""
    lengths = workload.step_lengths(sizes)
    numbers = _two_cycles(
        shape=sizes.step_shape,
        device=device,
        checkpointing=checkpointing,
        rows=sizes.trl_step_rows,
        update=sizes.step_update,
        lengths=lengths,
        sizes=sizes,
        rollout=None,
        lora=sizes.step_lora,
    )
    return {"tokens_per_s": sum(lengths) / numbers["seconds"], "rows": sizes.trl_step_rows} | numbers


def _two_cycles(
    *,
    shape: str,
    device: str,
    checkpointing: bool,
    rows: int,
    update: int,
    lengths: list[int],
    sizes: Sizes,
    rollout: Any,
    lora: int = 0,
) -> dict[str, Any]:
    """Two cycles of a GRPOTrainer. The first warms up, with short responses; the second is measured."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    peak = Peak()
    clock = _Clock(device, peak)
    through_vllm = rollout is None and has_vllm()
    if rollout is None and not through_vllm and len(set(lengths)) > 1:
        raise RuntimeError("TRL's generate gives all responses one limit, so ragged lengths need vLLM")
    new = max(lengths)

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            limit = new if clock.cycles else min(8, new)
            if through_vllm:
                self.vllm_generation.max_completion_length = limit
                self.vllm_generation.llm.limits = [min(limit, n) for n in lengths]
            elif rollout is None:
                self.generation_config.max_new_tokens = limit
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

    model = make_model(shape, device, torch.bfloat16 if lora else torch.float32)
    vocabulary = model.config.vocab_size
    texts = [
        " ".join(f"w{i}" for i in prompt) for prompt in prompts(len(lengths) // sizes.group, sizes.prompt, vocabulary)
    ]
    # Named, because the library finds a name by pickling, which fails once vLLM is imported.
    dataset = Dataset(InMemoryTable.from_pydict({"prompt": texts}), fingerprint="prompts")
    with tempfile.TemporaryDirectory() as directory:
        arguments = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=update // rows,
            steps_per_generation=len(lengths) // rows,
            num_generations=sizes.group,
            max_completion_length=new,
            max_steps=2 * len(lengths) // update,
            bf16=True,
            gradient_checkpointing=checkpointing,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            use_vllm=through_vllm,
            vllm_max_model_length=sizes.prompt + new if through_vllm else None,
            generation_kwargs={"ignore_eos": True, "detokenize": False} if through_vllm else None,
        )
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),  # keep the trainer's own reports out of our table
            _colocated(model, Path(directory)) if through_vllm else contextlib.nullcontext(),
        ):
            trainer = Timed(
                model=model,
                reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
                args=arguments,
                train_dataset=dataset,
                processing_class=word_tokenizer(vocabulary),
                rollout_func=rollout,
                peft_config=_additions(lora),
                callbacks=[EndOfUpdate()],
            )
            trainer.train()
    assert clock.cycles == 2
    assert rollout is not None or clock.sampled == sum(lengths), f"{clock.sampled} tokens were sampled"
    return clock.numbers() | {"peak_gib": peak.gib(), "checkpointing": checkpointing}


def _additions(rank: int) -> Any:
    if not rank:
        return None
    import peft

    return peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )


@contextlib.contextmanager
def _colocated(model: Any, directory: Path) -> Iterator[None]:
    """Inside, TRL's vLLM is made from the model's configuration alone; TRL hands it the weights before it samples."""
    with mock.patch.dict(os.environ, LOCAL):
        import vllm
        from trl.generation import vllm_generation

        class Limited(vllm.LLM):
            limits: list[int]

            def __init__(self, **options: Any) -> None:
                dtype = "bfloat16" if model.device.type == "cuda" else "float32"
                super().__init__(**options, skip_tokenizer_init=True, load_format="dummy", dtype=dtype)

            def generate(self, prompts: Any, sampling_params: Any, **options: Any) -> Any:
                each = []
                for limit in self.limits:
                    each.append(sampling_params.clone())
                    each[-1].max_tokens = limit
                return super().generate(prompts, sampling_params=each, **options)

        model.config.save_pretrained(directory / "model")
        model.config._name_or_path = model.name_or_path = str(directory / "model")
        with mock.patch.object(vllm_generation, "LLM", Limited):
            yield


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
    def phase(self, name: str) -> Iterator[None]:
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self.phases[name] = time.perf_counter() - start

    def end_update(self) -> None:
        synchronize(self.device)
        self.last_update = time.perf_counter()

    def numbers(self) -> dict[str, float]:
        """Seconds of the last cycle: whole, sampling if there was any, scoring without sampling, and updates."""
        sampling = {name: seconds for name, seconds in self.phases.items() if name == "generate_s"}
        before = self.phases["scoring_s"]
        seconds = self.last_update - self.start
        return {
            "seconds": seconds,
            **sampling,
            "scoring_s": before - sum(sampling.values()),
            "updates_s": seconds - before,
        }
