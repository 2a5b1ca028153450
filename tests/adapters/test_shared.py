"""The options that all adapters share, without any framework."""

import pytest
import torch

from bapo import ClipSettings, policy_loss
from bapo.adapters.shared import settings_of


def test_an_objective_that_does_not_search_is_a_pair_of_bounds():
    assert settings_of() == ClipSettings()
    assert settings_of(preset="paper", order=None) == ClipSettings.preset("paper")
    pair = {"low": (0.8, 0.8), "high": (1.2, 1.2)}
    assert settings_of("grpo") == ClipSettings(**pair)
    assert settings_of("push_once", used_low=None) == ClipSettings(**pair, used_low=1.0)
    assert settings_of("push_once", high=[1.28, 1.28], used_low=0.9).high == (1.28, 1.28)


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
    ],
)
def test_options_that_an_objective_does_not_have_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**options)


@pytest.mark.parametrize("objective", ["grpo", "push_once"])
def test_the_pair_is_the_objective_of_that_name(objective):
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(6, 20, generator=generator) - 0.1
    start = behavior + 0.3 * torch.randn(6, 20, generator=generator).clamp(max=0.3)
    advantages, mask = torch.randn(6, 1, generator=generator).expand(6, 20), torch.ones(6, 20, dtype=torch.bool)
    uses = {"uses": torch.arange(6)[:, None].expand(6, 20) % 2} if objective == "push_once" else {}
    gradients = []
    for options in ({"settings": settings_of(objective)}, {"objective": objective}):
        logprobs = start.clamp(max=0).requires_grad_()
        policy_loss(logprobs, behavior, advantages, mask, **options, **uses).loss.backward()
        gradients.append(logprobs.grad)
    assert torch.equal(*gradients)
