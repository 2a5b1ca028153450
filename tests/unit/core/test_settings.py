import dataclasses
import math

import pytest

from bapo import ClipSettings
from bapo.core.settings import CLIP_OPTIONS


def test_defaults_are_the_papers_numbers_with_the_gradient_measure():
    settings = ClipSettings()
    assert (settings.target_share, settings.low, settings.high) == (0.4, (0.6, 0.9), (1.2, 3.0))
    assert (settings.measure, settings.weight, settings.order) == ("gradient", "none", "high_first")
    assert len(settings.path) == 36 + 15 + 1


def test_targets_convert_to_shares():
    # P : N = 2 : 3 in all three ways of stating it
    assert ClipSettings(target_share=0.4).target_share == 0.4
    assert ClipSettings(target_odds=2 / 3).target_share == pytest.approx(0.4)
    assert ClipSettings(target_signed=2 / (3 - 2)).target_share == pytest.approx(0.4)
    assert ClipSettings(target_odds=0.5).target_share == pytest.approx(1 / 3)


def test_presets():
    paper = ClipSettings.preset("paper")
    assert (paper.target_share, paper.low, paper.high, paper.measure) == (0.4, (0.6, 0.9), (1.2, 3.0), "surrogate")
    weak = ClipSettings.preset("weak-model")
    assert (weak.target_share, weak.low, weak.high, weak.low_step) == (0.45, (0.8, 0.9), (1.2, 2.0), 0.02)
    script = ClipSettings.preset("released-script")
    assert (script.target_share, script.order) == (pytest.approx(1 / 3), "low_first")
    assert [round(c, 9) for c in script.low_grid] == [0.8, 0.85, 0.9, 0.95]
    assert len(script.high_grid) == 9


def test_grid_points_are_start_plus_multiples():
    settings = ClipSettings()
    assert settings.low_grid[15] == 0.6 + 15 * 0.02
    assert settings.high_grid[-1] == pytest.approx(3.0)
    assert ClipSettings(high=(1.2, 1.29)).high_grid == (1.2, 1.25)


def test_path_goes_to_one_end_then_to_the_other():
    small = {"low": (0.8, 0.9), "low_step": 0.1, "high": (1.2, 1.4), "high_step": 0.1}
    assert ClipSettings(**small).path == ((0, 0), (0, 1), (0, 2), (1, 2))
    assert ClipSettings(**small, order="low_first").path == ((0, 0), (1, 0), (1, 1), (1, 2))


def test_replace_keeps_the_target_and_takes_a_new_one():
    settings = dataclasses.replace(ClipSettings(target_share=0.3), order="low_first")
    assert settings.target_share == 0.3
    assert dataclasses.replace(settings, target_share=None, target_odds=1.0).target_share == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": (0.9, 0.6)}, r"low=\(0.9, 0.6\) is not ordered"),
        ({"high": (3.0, 1.2)}, r"high=\(3.0, 1.2\) is not ordered"),
        ({"low": (-0.1, 0.9)}, "never negative"),
        ({"high": (1.2, math.inf)}, "finite"),
        ({"low": 0.8}, "must be a pair"),
        ({"low": (0.6, 1.5)}, "do not enclose 1"),
        ({"low_step": 0}, "low_step=0 must be positive"),
        ({"high_step": -0.05}, "high_step=-0.05 must be positive"),
        ({"high_step": math.nan}, "must be positive"),
        ({"high_step": 1e-7}, "too fine"),
        ({"target_share": 1.5}, "exceeds 1"),
        ({"target_share": -0.1}, ">= 0"),
        ({"target_share": math.nan}, "finite"),
        ({"target_odds": -1.0}, "target_odds=-1.0 must be"),
        ({"target_signed": -0.2}, "target_signed=-0.2 must be"),
        ({"target_share": 0.4, "target_odds": 0.5}, "all state the same target"),
        ({"measure": "gradiant"}, "Did you mean 'gradient'"),
        ({"weight": "prob"}, "Choose one of: none, rollout_prob"),
        ({"order": "high_frist"}, "Did you mean 'high_first'"),
        ({"low": (0.8, 0.8), "low_step": 1e-40}, "too fine"),
        ({"target_share": "0.4"}, "finite number"),
    ],
)
def test_impossible_settings_say_what_and_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        ClipSettings(**arguments)


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'weak-model'"):
        ClipSettings.preset("weak_model")
    for name, objective in (("fixed", "grpo"), ("push-once", "push_once")):
        with pytest.raises(ValueError, match=f"not search for bounds. It is an objective: {objective!r}"):
            ClipSettings.preset(name)


@pytest.mark.parametrize("ranges", [{"low": (0.2, 0.2), "high": (0.28, 0.28)}, {"low": (1.1, 1.2)}, {"high": (0.9, 2)}])
def test_epsilons_are_not_bounds(ranges):
    with pytest.raises(ValueError, match=r"do not enclose 1.*not epsilons: an epsilon of 0.2 is low=\(0.8, 0.8\)"):
        ClipSettings(**ranges)


def test_options_of_a_configuration_file_start_from_a_preset():
    settings = ClipSettings.from_options("weak-model", high=[1.2, 1.6], order="low_first")
    assert settings == dataclasses.replace(ClipSettings.preset("weak-model"), high=(1.2, 1.6), order="low_first")
    assert ClipSettings.from_options() == ClipSettings()
    assert ClipSettings.from_options("weak-model", **dict.fromkeys(CLIP_OPTIONS)) == ClipSettings.preset("weak-model")
    with pytest.raises(ValueError, match=r"clip_range=0\.2 is not a clip setting"):
        ClipSettings.from_options(clip_range=0.2)
    with pytest.raises(ValueError, match="preset='papers' is not known"):
        ClipSettings.from_options("papers")
