"""Brake and `bapo_used_low`: the loss knows what an earlier update trained on, however TRL visits its generations."""

import warnings

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl")

from bapo import ClipSettings, policy_loss
from bapo.core.bounds import StopReason
from tests.adapters.trl.test_bounds import ADAPTIVE, Watched, same_run
from tests.adapters.trl.tiny import FIXED, SMALL, log_of, trained, weights

PUSH_ONCE = {**ADAPTIVE, "bapo_used_low": 1.0}
BRAKE = {"bapo_brake": 0.3}
"""Without further options: the objective."""
RULES = {
    "push once": (
        PUSH_ONCE,
        {"settings": ClipSettings(target_share=0.55, low=(0.6, 0.9), high=(1.1, 3.0), used_low=1.0)},
    ),
    "brake": (BRAKE, {"objective": "brake", "delta": 0.3}),
    "brake and search": (
        {**ADAPTIVE, "bapo_brake": 0.3},
        {"settings": ClipSettings(target_share=0.55, low=(0.6, 0.9), high=(1.1, 3.0), brake=0.3)},
    ),
}
"""Options here, and those of `bapo.policy_loss`."""


class Visits(Watched):
    """Keeps of each training loss call: its update, inputs and uses, its log-probs with their gradient, its bounds."""

    def _set_epsilons(self, *args):
        self.uses = self._uses(self._step)
        super()._set_epsilons(*args)

    def seen(self, logprobs):
        logprobs.retain_grad()
        bounds = 1 - self.epsilon_low, 1 + self.epsilon_high
        return self.state.global_step, self._loss_inputs, self.uses, logprobs, bounds


def uses_of(calls):
    """By the objects themselves: how often earlier updates visited the inputs of each call."""
    return [
        sum(before[1] is inputs and before[0] < update for before in calls[:i])
        for i, (update, inputs, *_) in enumerate(calls)
    ]


@pytest.mark.parametrize(
    ("accumulation", "steps_per_generation", "iterations"),
    [(1, 1, 3), (1, 4, 1), (1, 2, 3), (2, 4, 2), (2, 2, 4), (4, 2, 3), (3, 2, 2), (2, 3, 3), (4, 2, 2)],
)
@pytest.mark.parametrize("scope", ["update", "microbatch"])
def test_uses_are_the_visits_of_earlier_updates(tmp_path, scope, accumulation, steps_per_generation, iterations):
    run = trained(
        tmp_path,
        Visits,
        bapo_scope=scope,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
        num_iterations=iterations,
        max_steps=6,
        **PUSH_ONCE,
    )
    uses = uses_of(run.calls)
    assert [call[2] for call in run.calls] == uses
    assert (max(uses) > 0) == (iterations > 1 and accumulation % (steps_per_generation * iterations) != 0)
    for (*_, (low, _)), count in zip(run.calls, uses, strict=True):
        assert (low == pytest.approx(1.0, abs=1e-6)) == (count > 0)


def whole(calls, uses, options):
    """An update of `dr_grpo` in float64 through `bapo.policy_loss`: what it computed, and a gradient for each call."""
    columns = [[], [], [], [], []]
    for (_, inputs, _, logprobs, _), count in zip(calls, uses, strict=True):
        mask = inputs["completion_mask"].bool()
        advantages = inputs["advantages"][:, None].expand_as(logprobs)
        rows = (logprobs.detach(), inputs["old_per_token_logps"], advantages, mask, torch.full_like(mask, count).long())
        for column, row in zip(columns, rows, strict=True):
            column.append(torch.nn.functional.pad(row, (0, SMALL["max_completion_length"] - row.shape[1])))
    logprobs, behavior, advantages, mask, counts = (torch.cat(column) for column in columns)
    leaf = logprobs.double().requires_grad_()
    slots = mask.shape[0] * SMALL["max_completion_length"]
    out = policy_loss(leaf, behavior.double(), advantages.double(), mask, **options, uses=counts, denominator=slots)
    out.loss.backward()
    return out, leaf.grad.split([len(logprobs) for _, _, _, logprobs, _ in calls])


@pytest.mark.parametrize(
    ("accumulation", "steps_per_generation"), [(2, 2), (3, 2), (1, 1)], ids=["aligned", "mixed", "single"]
)
@pytest.mark.parametrize("rule", RULES)
def test_several_passes_are_those_of_the_core(tmp_path, rule, accumulation, steps_per_generation):
    """`mixed`: an update holds the last pass over one generation and the first pass over the next."""
    run = trained(
        tmp_path,
        Visits,
        loss_type="dr_grpo",
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
        num_iterations=4,
        max_steps=8,
        max_grad_norm=0.0,
        **RULES[rule][0],
    )
    uses, stopped, by_the_rule, together, braked, drifts = uses_of(run.calls), 0, 0, set(), [], []
    for first in range(0, len(run.calls), accumulation):
        part = slice(first, first + accumulation)
        out, gradients = whole(run.calls[part], uses[part], RULES[rule][1])
        used_low = float(out.bounds.used_low)
        braked.append(used_low)
        if rule != "push once" and out.bounds.stop != StopReason.NO_SIGNAL:
            drifts.append(out.bounds.drift.item())
        together.add(frozenset(count > 0 for count in uses[part]))
        for (_, inputs, count, logprobs, (low, high)), gradient in zip(run.calls[part], gradients, strict=True):
            assert high == pytest.approx(out.bounds.high.item(), abs=1e-6)
            assert low == pytest.approx(used_low if count else out.bounds.low.item(), abs=1e-6)
            assert_close(logprobs.grad.double(), gradient[:, : logprobs.shape[1]], rtol=1e-5, atol=1e-9)
            ratio = (logprobs - inputs["old_per_token_logps"]).exp()
            below = (ratio < used_low) & (inputs["advantages"][:, None] < 0) & inputs["completion_mask"].bool()
            stopped += int(below.sum()) if count else 0
            by_the_rule += int((below & (ratio > out.bounds.low)).sum()) if count else 0
    assert by_the_rule > 2  # it had something to do
    assert rule != "push once" or stopped > 20
    assert log_of(run, "bapo/drift") == pytest.approx(drifts, abs=1e-6)
    if rule != "push once":
        assert any(0.82 < low < 1 for low in braked)
    if accumulation == 3:
        assert frozenset({True, False}) in together


def test_the_first_pass_is_the_one_without_the_rule_bit_for_bit(tmp_path):
    """Stale tokens, but fresh ones: four updates from one generation, each slice visited once."""
    fresh = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "num_iterations": 1, "max_steps": 8}
    same_run(trained(tmp_path / "once", **fresh, **PUSH_ONCE), trained(tmp_path / "plain", **fresh, **ADAPTIVE))
    reused = {**fresh, "num_iterations": 2, "max_steps": 4}
    same_run(trained(tmp_path / "one", **reused, **PUSH_ONCE), trained(tmp_path / "first", **reused, **ADAPTIVE))
    reused["max_steps"] = 5  # the second pass begins
    ours = weights(trained(tmp_path / "two", **reused, **PUSH_ONCE))
    theirs = weights(trained(tmp_path / "second", **reused, **ADAPTIVE))
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_first_pass_with_the_brake_is_grpo_bit_for_bit(tmp_path):
    first = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 2}
    brake = trained(tmp_path / "brake", **first)
    same_run(brake, trained(tmp_path / "grpo", bapo_objective="grpo", **first))
    assert log_of(brake, "bapo/drift") == [0.0, 0.0]
    assert log_of(brake, "bapo/used_low") == log_of(brake, "bapo/clip_low") == pytest.approx([0.8, 0.8])
    first["max_steps"] = 4  # the second pass
    ours = weights(trained(tmp_path / "two", bapo_brake=1e-6, **first))
    theirs = weights(trained(tmp_path / "second", bapo_objective="grpo", **first))
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_rule_for_used_tokens_without_a_second_pass_is_pointed_out(tmp_path):
    once = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 1}
    with pytest.warns(UserWarning, match=r"^bapo_used_low=1\.0 .* does nothing with num_iterations=1"):
        trained(tmp_path / "once", num_iterations=1, bapo_objective="push_once", **once)
    with pytest.warns(UserWarning, match=r"^bapo_brake=0\.03 \(which bapo_objective=brake, the default.* does nothing"):
        trained(tmp_path / "brake", num_iterations=1, **once)
    for quiet in ({"num_iterations": 2, "bapo_objective": "push_once"}, {"num_iterations": 1, "bapo_preset": "paper"}):
        with warnings.catch_warnings(record=True) as said:
            trained(tmp_path / "quiet", **quiet, **once)
        assert not [one for one in said if "does nothing" in str(one.message)]


def test_a_used_token_at_its_bound_has_no_gradient(tmp_path):
    """A learning rate of 0 leaves every ratio at exactly 1, where the core clips and `torch.clamp` alone would not."""
    run = trained(tmp_path, Visits, learning_rate=0.0, num_iterations=2, max_steps=2, bapo_used_low=1.0, **FIXED)
    checked = 0
    for (_, inputs, _, logprobs, _), count in zip(run.calls, uses_of(run.calls), strict=True):
        assert torch.equal(logprobs.detach(), inputs["old_per_token_logps"])
        mask = inputs["completion_mask"].bool()
        for sign in (1, -1):
            signed = mask & (sign * inputs["advantages"][:, None] > 0)
            assert ((logprobs.grad[signed] != 0) == (count == 0 or sign > 0)).all()
            checked += int(signed.sum())
    assert checked > 40
