"""With equal fixed bounds, BapoTrainer is GRPOTrainer bit for bit at both scopes, whatever else TRL is asked to do."""

import pytest

pytest.importorskip("trl")

from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from bapo.adapters.trl import BapoTrainer
from tests.adapters.trl.test_bounds import Watched, same_run
from tests.adapters.trl.tiny import FIXED, log_of, model, tokenizer, trained

TOOL_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% for call in message['tool_calls'] or [] %}"
    "{{ call['function']['name'] }}{{ call['function']['arguments'] }}{% endfor %}{% endfor %}"
)


def speaking():
    """A tokenizer whose parser takes an answer that holds a digit for a call of the tool `add`."""
    words = tokenizer()
    words.chat_template = TOOL_TEMPLATE
    words.response_schema = {"type": "object"}  # TRL only asks whether there is one

    def parse_response(ids):
        text = words.decode(ids, skip_special_tokens=True)
        digits = [int(c) for c in text if c in "0123456789"]
        call = {"type": "function", "function": {"name": "add", "arguments": {"number": sum(digits)}}}
        return {"role": "assistant", "content": text, **({"tool_calls": [call]} if digits else {})}

    words.parse_response = parse_response
    return words


def add(number: int) -> str:
    """
    Adds one.

    Args:
        number: What to add one to.

    Returns:
        The sum.
    """
    return str(number + 1)


class Sum:
    """An environment that adds up what it is told, and rewards it."""

    def reset(self, **kwargs) -> str | None:
        self.total = 0

    def add(self, number: int) -> str:
        """
        Adds to the total.

        Args:
            number: What to add.

        Returns:
            The total.
        """
        self.total += number
        return str(self.total)

    def get_reward(self) -> float:
        return float(self.total % 7)


def chat():
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i % 10}:"}] for i in range(32)]})


def lora(**options):
    return {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **options)}


def with_tools(**what):
    return {"processing_class": speaking(), "train_dataset": chat(), **what}


def path(folder):
    """TRL loads the reference model of a KL term from a path."""
    model().save_pretrained(folder / "model")
    return {"model": str(folder / "model")}


WITH_TOOLS = {"max_completion_length": 16, "max_tool_calling_iterations": 2}
SETS = {
    "accumulation": ({"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 3}, {}),
    "several generations in an update": ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, {}),
    "iterations": ({"gradient_accumulation_steps": 1, "num_iterations": 4, "max_steps": 5}, {}),
    "KL": ({"beta": 0.1}, path),
    "KL with a reference that follows": ({"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}, path),
    "dropout": (
        {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "num_iterations": 1},
        lambda folder: {"model": model(attention_dropout=0.2)},
    ),
    "LoRA": ({"learning_rate": 0.5, "max_grad_norm": 0.0}, lambda folder: lora(lora_dropout=0.1)),
    "LoRA, KL": ({"learning_rate": 0.5, "max_grad_norm": 0.0, "beta": 0.01}, lambda folder: lora()),
    "tools": (WITH_TOOLS, lambda folder: with_tools(tools=[add])),
    "environments": (WITH_TOOLS, lambda folder: with_tools(environment_factory=Sum, reward_funcs=None)),
    "rewards scaled by the batch": ({"scale_rewards": "batch", "mask_truncated_completions": True}, {}),
}
"""Options, and the trainer's arguments (or a function that makes them, for each trainer its own)."""


@pytest.mark.parametrize("name", SETS)
def test_fixed_bounds_are_grpo_bit_for_bit_at_both_scopes(tmp_path, name):
    options, arguments = SETS[name]
    make = arguments if callable(arguments) else lambda folder: arguments
    theirs = trained(tmp_path / "grpo", GRPOTrainer, GRPOConfig, arguments=make(tmp_path), **options)
    for scope in ("update", "microbatch"):
        ours = trained(tmp_path / scope, arguments=make(tmp_path), bapo_scope=scope, **FIXED, **options)
        same_run(ours, theirs)
    assert max(log_of(theirs, "clip_ratio/region_mean")) > 0  # otherwise no bound was put to the test
    if options is WITH_TOOLS:
        assert max(log_of(theirs, "tools/call_frequency")) > 0


SEARCH = {"bapo_target_share": 0.55, "bapo_high": [1.1, 3.0]}


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize(
    ("bounds", "updates"),
    [
        (FIXED, 0),
        ({"bapo_objective": "push_once"}, 0),
        ({"bapo_scope": "microbatch", **SEARCH}, 0),
        ({"bapo_scope": "microbatch"}, 0),
        ({}, 2),
        ({"bapo_objective": "brake_all"}, 4),
        (SEARCH, 4),
    ],
    ids=["fixed", "push once", "microbatch", "microbatch, brake", "brake", "brake on all", "search"],
)
def test_only_bounds_that_need_the_tokens_of_an_update_ask_for_more_logprobs(
    tmp_path, monkeypatch, bounds, updates, accumulation
):
    """And not for those of the first micro-batch, which its own loss call has. The brake needs none in the first of two
    iterations. `updates`: in how many of four there is a further pass."""
    calls, compute = [], GRPOTrainer._get_per_token_logps_and_entropies

    def counted(self, *args, **kwargs):
        calls.append(0)
        return compute(self, *args, **kwargs)

    counted.__signature__ = __import__("inspect").signature(compute)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counted)
    options = {"gradient_accumulation_steps": accumulation, "num_iterations": 2, "max_steps": 4}
    trained(tmp_path / "grpo", GRPOTrainer, GRPOConfig, **options)
    theirs = len(calls)
    assert theirs == 4 * accumulation + 2  # two generations
    trained(tmp_path / "bapo", **bounds, **options)
    assert len(calls) - theirs == theirs + updates * (accumulation - 1)


def test_the_share_of_fixed_bounds_is_that_of_the_whole_update(tmp_path):
    """As if they had been searched: a search that begins where it has to end, at the same bounds."""
    options = {"gradient_accumulation_steps": 3, "max_steps": 4}
    fixed = trained(tmp_path / "fixed", bapo_low=[0.8, 0.8], bapo_high=[1.2, 1.2], **options)
    searched = {"bapo_low": [0.8, 0.8], "bapo_high": [1.2, 1.3], "bapo_target_share": 0.0}
    search = trained(tmp_path / "search", **searched, **options)
    same_run(fixed, search)
    for key in ("bapo/share", "bapo/clip_low", "bapo/clip_high", "bapo/share_at_start"):
        assert log_of(fixed, key) == log_of(search, key) != []


def in_halves(trainer):
    """A subclass that computes the loss of a micro-batch in two calls."""

    class InHalves(trainer):
        def _compute_loss(self, model, inputs):
            rows = len(inputs["completion_ids"]) // 2
            losses = []
            for part in (slice(None, rows), slice(rows, None)):
                split = {name: value[part] if getattr(value, "ndim", 0) else value for name, value in inputs.items()}
                losses.append(super()._compute_loss(model, split))
            return sum(losses) / 2

    return InHalves


@pytest.mark.parametrize("scope", ["update", "microbatch"])
def test_a_subclass_may_call_the_loss_twice(tmp_path, scope):
    options = {"loss_type": "dr_grpo", "num_iterations": 3, "max_steps": 6}
    theirs = trained(tmp_path / "grpo", in_halves(GRPOTrainer), GRPOConfig, **options)
    same_run(trained(tmp_path / "fixed", in_halves(BapoTrainer), bapo_scope=scope, **FIXED, **options), theirs)


class Uses(Watched):
    def seen(self, logprobs):
        return self._step, self._uses(self._step), 1 - self.epsilon_low, 1 + self.epsilon_high


@pytest.mark.parametrize("scope", ["update", "microbatch"])
def test_and_its_bounds_and_uses_are_those_of_one_call(tmp_path, scope):
    options = {"loss_type": "dr_grpo", "bapo_scope": scope, "bapo_used_low": 1.0, "num_iterations": 3, **SEARCH}
    once = trained(tmp_path / "once", Uses, **options)
    twice = trained(tmp_path / "twice", in_halves(Uses), **options)
    assert [call[:2] for call in twice.calls[::2]] == [call[:2] for call in once.calls]
    assert [call[:2] for call in twice.calls[1::2]] == [call[:2] for call in once.calls]
    assert {call[1] for call in once.calls} == {0, 1, 2}
    if scope == "update":  # solved from whole micro-batches; weights differ by rounding alone
        assert twice.calls[0][2:] == twice.calls[1][2:] == once.calls[0][2:]
    assert len(log_of(twice, "bapo/clip_high")) == len(log_of(once, "bapo/clip_high")) > 0
