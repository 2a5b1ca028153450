"""The bounds TRL clips with are those of the update's own tokens, however the update is split."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer

from bapo import ClipSettings, solve_bounds
from bapo.adapters.trl import LOSS_TYPES, BapoTrainer
from tests.adapters.trl.tiny import FIXED, log_of, model, trained, weights

ADAPTIVE = {"bapo_target_share": 0.55, "bapo_low": [0.6, 0.9], "bapo_high": [1.1, 3.0]}
"""A target that a tiny model under a high learning rate does not meet at once."""


class Watched(BapoTrainer):
    """Keeps something of each training loss call."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_inputs is not None:
            self.calls.append(self.seen(outputs[0]))
        return outputs


class Recording(Watched):
    """Keeps what each training loss call saw: its inputs, its log-probs and the epsilons it ran with."""

    def seen(self, logprobs):
        return self._loss_inputs, logprobs.detach(), 1 - self.epsilon_low, 1 + self.epsilon_high


def same_run(one, other):
    assert log_of(one, "loss") == log_of(other, "loss")
    assert log_of(one, "grad_norm") == log_of(other, "grad_norm")
    ours, theirs = weights(one), weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def pair(tmp_path, build=None, **options):
    """The same run by BapoTrainer with bounds fixed at 0.8 and 1.2, and by TRL."""
    bapo_only = {name: options.pop(name) for name in list(options) if name.startswith("bapo_")}
    make = build or (lambda: {})
    ours = trained(tmp_path / "bapo", arguments=make(), **FIXED, **bapo_only, **options)
    theirs = trained(tmp_path / "grpo", GRPOTrainer, GRPOConfig, arguments=make(), **options)
    assert max(log_of(theirs, "clip_ratio/region_mean")) > 0  # otherwise no bound was put to the test
    return ours, theirs


@pytest.mark.parametrize("scope", ["update", "microbatch"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_fixed_bounds_are_grpo_bit_for_bit(tmp_path, loss_type, scope):
    same_run(*pair(tmp_path, loss_type=loss_type, bapo_scope=scope))


@pytest.mark.parametrize(
    ("accumulation", "steps_per_generation", "iterations"),
    [(1, 4, 1), (2, 4, 2), (4, 2, 1), (3, 2, 1), (2, 3, 1), (4, 2, 3)],
)
def test_fixed_bounds_are_grpo_however_updates_and_generations_interleave(
    tmp_path, accumulation, steps_per_generation, iterations
):
    options = {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": steps_per_generation,
        "num_iterations": iterations,
        "max_steps": 5,
    }
    ours = trained(tmp_path / "bapo", **FIXED, **options)
    same_run(ours, trained(tmp_path / "grpo", GRPOTrainer, GRPOConfig, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"delta": 1.5},
        {"top_entropy_quantile": 0.5},
        {"off_policy_mask_threshold": 0.01},
        {"entropy_coef": 0.01},
        {"bf16": True},
    ],
    ids=str,
)
def test_fixed_bounds_are_grpo_with_what_else_trl_has(tmp_path, options):
    same_run(*pair(tmp_path, **options))


def test_fixed_bounds_are_grpo_with_a_kl_term(tmp_path):
    model().save_pretrained(tmp_path / "model")  # TRL loads the reference model from the path
    same_run(*pair(tmp_path, build=lambda: {"model": str(tmp_path / "model")}, beta=0.1))


def test_fixed_bounds_are_grpo_under_dropout(tmp_path):
    """The pass ahead draws no random numbers, so that sampling goes on as it would have."""
    same_run(*pair(tmp_path, build=lambda: {"model": model(attention_dropout=0.2)}))


def by_hand(calls, settings):
    """The bounds of these loss calls together, from the public solver."""
    ratio, advantages, mask = [], [], []
    for inputs, logprobs, _, _ in calls:
        ratio.append((logprobs - inputs.get("old_per_token_logps", logprobs)).exp().flatten())
        advantages.append(inputs["advantages"][:, None].expand_as(logprobs).flatten())
        mask.append(inputs["completion_mask"].flatten())
    bounds = solve_bounds(torch.cat(ratio), torch.cat(advantages), torch.cat(mask), settings)
    return float(bounds.low), float(bounds.high)


@pytest.mark.parametrize("scope", ["update", "microbatch"])
def test_the_bounds_in_use_are_those_of_the_tokens(tmp_path, scope):
    run = trained(tmp_path, Recording, bapo_scope=scope, max_steps=6, **ADAPTIVE)
    settings = ClipSettings(target_share=0.55, low=(0.6, 0.9), high=(1.1, 3.0))
    assert run.args.clip_settings == settings
    assert len(run.calls) == 12
    together = 2 if scope == "update" else 1
    used = []
    for first in range(0, 12, together):
        calls = run.calls[first : first + together]
        used += [call[2:] for call in calls]
        assert used[-together:] == [by_hand(calls, settings)] * together
    assert len(set(used)) > 2  # the bounds really moved
    assert log_of(run, "bapo/clip_low") == [(used[i][0] + used[i + 1][0]) / 2 for i in range(0, 12, 2)]
    assert log_of(run, "bapo/clip_high") == [(used[i][1] + used[i + 1][1]) / 2 for i in range(0, 12, 2)]
    assert (run.epsilon_low, run.epsilon_high) == (0.2, 0.2)  # lent for the call, then given back


CAPPED = {"bapo_target_share": 0.55, "bapo_low": [0.6, 0.9], "bapo_high": [1.05, 1.1], "delta": 1.1}


@pytest.mark.parametrize("scope", ["update", "microbatch"])
@pytest.mark.parametrize("measure", ["gradient", "surrogate"])
def test_tokens_past_delta_have_no_gradient_and_are_counted_so(tmp_path, scope, measure):
    """TRL's loss is delta |A| for a negative token with r > delta: constant."""
    run = trained(tmp_path, Recording, bapo_scope=scope, bapo_measure=measure, num_iterations=4, max_steps=6, **CAPPED)
    together = 2 if scope == "update" else 1
    silenced = 0
    for first in range(0, 12, together):
        calls = run.calls[first : first + together]
        masked = []
        for inputs, logprobs, *bounds in calls:
            ratio = (logprobs - inputs.get("old_per_token_logps", logprobs)).exp()
            capped = (ratio > 1.1) & (inputs["advantages"][:, None] < 0)
            silenced += int((capped & inputs["completion_mask"].bool()).sum())
            kept = inputs["completion_mask"] * ~capped if measure == "gradient" else inputs["completion_mask"]
            masked.append(({**inputs, "completion_mask": kept}, logprobs, *bounds))
        assert [call[2:] for call in calls] == [by_hand(masked, run.args.clip_settings)] * together
    assert silenced > 0  # otherwise delta was not put to the test


class Grading(Watched):
    """Keeps the log-probs of each training loss call, with their gradient, and what the metrics take for retained."""

    def seen(self, logprobs):
        logprobs.retain_grad()
        return logprobs, self._update.parts[-1].columns


@pytest.mark.parametrize(
    "options",
    [{"bapo_preset": "paper"}, CAPPED, {"bapo_used_low": 1.0}, {}, {"bapo_objective": "brake_all"}],
    ids=["no delta", "delta", "push once", "brake", "brake on all"],
)
def test_what_is_retained_is_what_has_a_gradient_in_trls_loss(tmp_path, options):
    run = trained(tmp_path, Grading, num_iterations=4, max_steps=6, **options)
    assert blocked_without_a_gradient(run.calls)[-1] > 0


def blocked_without_a_gradient(calls):
    """How many positive and negative tokens of these loss calls were not retained; none of them has a gradient."""
    blocked = torch.zeros(2, dtype=torch.int64)
    for logprobs, (_, _, advantages, mask, _, retained) in calls:
        signed = mask & (advantages != 0)
        torch.testing.assert_close(logprobs.grad.flatten()[signed] != 0, retained[signed], rtol=0, atol=0)
        for i, sign in enumerate((1, -1)):
            blocked[i] += (~retained & signed & (sign * advantages > 0)).sum()
    return blocked.tolist()


@pytest.mark.parametrize(
    ("options", "positive", "negative"),
    [
        ({"bapo_low": [1.0, 1.0], "bapo_high": [1.2, 1.2]}, False, True),
        ({"bapo_low": [0.8, 0.8], "bapo_high": [1.0, 1.0]}, True, False),
        ({"bapo_low": [1.0, 1.0], "bapo_high": [1.0, 1.0]}, True, True),
        ({"bapo_low": [0.8, 0.8], "bapo_high": [1.0, 1.0], "bapo_used_low": 1.0}, True, True),
        (
            {"bapo_low": [0.6, 1.0], "bapo_high": [1.2, 1.2], "bapo_target_share": 1.0, "bapo_low_step": 0.1},
            False,
            True,
        ),
    ],
    ids=["low", "high", "both", "high and push once", "searched"],
)
@pytest.mark.parametrize("scope", ["update", "microbatch"])
def test_a_bound_of_one_clips_fresh_tokens_as_in_the_core(tmp_path, scope, options, positive, negative):
    """A learning rate of 0 leaves every ratio at exactly 1, the bound itself, where `torch.clamp` alone lets pass."""
    run = trained(tmp_path, Grading, learning_rate=0.0, num_iterations=2, max_steps=2, bapo_scope=scope, **options)
    blocked = blocked_without_a_gradient(run.calls)
    assert [count > 0 for count in blocked] == [positive, negative]
    for logprobs, (_, behavior, advantages, mask, _, retained) in run.calls:
        assert torch.equal(logprobs.detach().flatten()[mask], behavior[mask])
        if positive and negative and "bapo_used_low" not in options:
            assert not retained[mask & (advantages != 0)].any()


def test_one_microbatch_needs_no_pass_ahead(tmp_path):
    one = trained(tmp_path / "update", gradient_accumulation_steps=1, bapo_scope="update", **ADAPTIVE)
    same_run(one, trained(tmp_path / "micro", gradient_accumulation_steps=1, bapo_scope="microbatch", **ADAPTIVE))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_one_batch_of_eight_equals_eight_of_one(tmp_path, loss_type):
    options = {"loss_type": loss_type, "max_grad_norm": 0.0, "optim": "sgd", "max_steps": 6, **ADAPTIVE}
    wide = trained(tmp_path / "1x8", per_device_train_batch_size=8, gradient_accumulation_steps=1, **options)
    long = trained(tmp_path / "8x1", per_device_train_batch_size=1, gradient_accumulation_steps=8, **options)
    for key in ("bapo/clip_low", "bapo/clip_high"):
        assert log_of(wide, key) == log_of(long, key)
    assert len(set(log_of(wide, "bapo/clip_high"))) > 1
    for key in ("bapo/share", "bapo/low_prob_high_adv_retained", "bapo/predicted_entropy_change"):
        assert_close(torch.tensor(log_of(wide, key)), torch.tensor(log_of(long, key)))
    assert_close(weights(wide), weights(long))


def launched(processes, out):
    """What two_processes.py saw, as accelerate's only process or under torchrun with gloo."""
    script = Path(__file__).with_name("two_processes.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(script), str(out)]
    paths = f"{Path(__file__).parents[3]}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(out, weights_only=True)


def test_two_processes_choose_the_bounds_of_one(tmp_path):
    one, two = launched(1, tmp_path / "one.pt"), launched(2, tmp_path / "two.pt")
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["collectives"] == [1] * 6  # for the whole update, in two micro-batches
    assert one["clip_low"] == two["clip_low"]
    assert one["clip_high"] == two["clip_high"]
    assert len(set(one["clip_high"])) > 1
    assert_close(torch.tensor(one["share"]), torch.tensor(two["share"]))
    assert_close(one["weights"], two["weights"])
    assert max(two["clipped"]) > 0
    for name in ("drift", "used_low"):
        assert_close(torch.tensor(one[name]), torch.tensor(two[name]), rtol=0, atol=1e-6)
        assert len(set(one[name])) > 1
    for seen in (one, two):
        theirs, *ours = seen["fixed"]  # at fixed bounds: TRL's own trainer, then ours at both scopes
        for loss, norm, moved in ours:
            assert (loss, norm) == theirs[:2]
            assert all(torch.equal(value, theirs[2][name]) for name, value in moved.items())


def test_without_stale_tokens_the_ratio_is_one_and_the_pass_ahead_is_saved(tmp_path):
    """TRL keeps no old log-probs when every update trains on tokens it has just sampled."""
    run = trained(tmp_path, Recording, num_iterations=1, **ADAPTIVE)
    assert all("old_per_token_logps" not in inputs for inputs, *_ in run.calls)
    settings = run.args.clip_settings
    for first in range(0, len(run.calls), 2):
        calls = run.calls[first : first + 2]
        assert [call[2:] for call in calls] == [by_hand(calls, settings)] * 2


def test_the_vllm_correction_weighs_the_signal(tmp_path):
    """TRL multiplies each token's loss by its importance ratio; a ratio of 0 must silence the token in the share."""
    run = trained(tmp_path, Recording, max_steps=2, bapo_scope="microbatch", **ADAPTIVE)
    inputs, logprobs, *_ = run.calls[-1]
    silenced = inputs["completion_mask"].clone()
    silenced[:, 1::2] = 0
    run.use_vllm, run.vllm_importance_sampling_correction = True, True
    weighed = run._four_tensors({**inputs, "importance_sampling_ratio": silenced * 0.5}, logprobs, None)
    run.use_vllm = False
    plain = run._four_tensors({**inputs, "completion_mask": silenced}, logprobs, None)
    settings = run.args.clip_settings
    solved = [solve_bounds((a - b).exp(), adv, mask, settings) for a, b, adv, mask in (weighed, plain)]
    assert_close(solved[0].share, solved[1].share)
    assert (solved[0].low, solved[0].high) == (solved[1].low, solved[1].high)
