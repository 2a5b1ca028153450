"""The options that all adapters share, without any framework."""

import pytest
import torch

from bapo import ClipSettings, policy_loss
from bapo.adapters.shared import depends_on_tokens_of, refuse_uses, settings_of


def test_an_objective_that_does_not_search_is_a_pair_of_bounds():
    assert settings_of() == ClipSettings()
    assert settings_of(preset="paper", order=None) == ClipSettings.preset("paper")
    pair = {"low": (0.8, 0.8), "high": (1.2, 1.2)}
    assert settings_of("grpo") == ClipSettings(**pair)
    assert settings_of("push_once", used_low=None) == ClipSettings(**pair, used_low=1.0)
    assert settings_of("push_once", high=[1.28, 1.28], used_low=0.9).high == (1.28, 1.28)
    assert settings_of("brake") == ClipSettings(**pair, brake=0.03)
    assert settings_of("brake", high=[1.28, 1.28], brake=0.1) == ClipSettings(
        low=(0.8, 0.8), high=(1.28, 1.28), brake=0.1
    )
    assert settings_of("brake_all") == ClipSettings(**pair, brake=0.03, brake_on="all")


def test_without_an_objective_it_is_the_brake_unless_options_belong_to_the_search():
    assert settings_of(None, measure=None) == settings_of("brake")
    assert settings_of(None, brake=0.1) == settings_of("brake", brake=0.1)
    assert settings_of(None, "weak-model") == ClipSettings.preset("weak-model")
    assert settings_of(None, target_share=0.5, brake=0.1) == ClipSettings(target_share=0.5, brake=0.1)
    assert settings_of(None, used_low=1.0) == ClipSettings(used_low=1.0)


def test_a_brake_looks_at_tokens_only_where_there_are_used_ones():
    pair, search = settings_of("grpo"), ClipSettings()
    for settings, fresh, used in (
        (pair, False, False),
        (settings_of("push_once"), False, False),
        (settings_of("brake"), False, True),
        (settings_of("brake_all"), True, True),
        (search, True, True),
        (ClipSettings(brake=0.1), True, True),
        (ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2), brake=0.1, remainder="weigh"), True, True),
    ):
        assert depends_on_tokens_of(settings, used=False) == fresh
        assert depends_on_tokens_of(settings, used=True) == used


def test_a_hook_that_cannot_count_uses_names_the_brake_that_needs_no_counts():
    for objective, rule in (("push_once", r"used_low=1\.0"), ("brake", r"brake=0\.03")):
        with pytest.raises(
            ValueError, match=f"^{rule} sets a bound for tokens .* before, but nobody counts.*brake_all"
        ):
            refuse_uses(settings_of(objective), "nobody counts")
    for objective in ("grpo", "brake_all", "bapo"):
        refuse_uses(settings_of(objective), "nobody counts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "dcpo"}, "objective='dcpo' is not known"),
        ({"objective": "grpo", "measure": "gradient"}, "measure='gradient' is of objective='bapo', which searches"),
        (
            {"objective": "push_once", "high": (1.2, 2.0)},
            "does not search. Give two equal numbers",
        ),
        ({"preset": "fixed"}, "does not search for bounds. It is an objective: 'grpo'"),
        ({"objective": "brake", "used_low": 1.0}, "objective='brake' does not: it takes low, high, brake"),
        ({"objective": "push_once", "brake": 0.1}, "objective='push_once' does not: it takes low, high, used_low"),
        ({"objective": "brake", "brake_on": "all"}, "brake_on='all' is of objective='bapo'"),
        ({"objective": "brake", "low": (0.6, 0.9)}, "objective='brake' does not search. Give two equal numbers"),
        ({"objective": "brake_all", "brake": 0.0}, "brake=0.0 must be a finite number of at least 1e-6"),
    ],
)
def test_options_that_an_objective_does_not_have_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**options)


@pytest.mark.parametrize("objective", ["grpo", "push_once", "brake", "brake_all"])
def test_the_pair_is_the_objective_of_that_name(objective):
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(6, 20, generator=generator) - 0.1
    start = behavior + 0.3 * torch.randn(6, 20, generator=generator).clamp(max=0.3)
    advantages, mask = torch.randn(6, 1, generator=generator).expand(6, 20), torch.ones(6, 20, dtype=torch.bool)
    uses = {"uses": torch.arange(6)[:, None].expand(6, 20) % 2} if objective in ("push_once", "brake") else {}
    gradients = []
    for options in ({"settings": settings_of(objective)}, {"objective": objective}):
        logprobs = start.clamp(max=0).requires_grad_()
        policy_loss(logprobs, behavior, advantages, mask, **options, **uses).loss.backward()
        gradients.append(logprobs.grad)
    assert torch.equal(*gradients)
