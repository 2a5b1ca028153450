"""TRL's own reward functions run here as they are, and gdpo gives the advantages that TRL computes."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer
from trl import rewards as of_trl

from bapo.core.advantages import gdpo
from bapo.tasks.verify.functions import DOES_NOT_APPLY, FunctionReward, IsolatedReward
from bapo.types import Problem, ResponseText, Score
from tests.adapters.trl.tiny import digits, trained

MADE = """
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment
repetition = get_repetition_penalty_reward(ngram_size=2)
overlong = get_soft_overlong_punishment(max_completion_len=6, soft_punish_cache=4)
cosine = get_cosine_scaled_reward(max_len=6)
"""
TEXTS = (
    "<think>\nThree and four.\n</think>\nIt is $\\boxed{7}$.",
    "<think>\nThree by four.\n</think>\nIt is $\\boxed{12}$.",
    "It is $\\boxed{7}$",
)
IDS = ([1, 2, 3, 1, 2], [4, 4, 4, 4, 4, 4], [5])


@pytest.mark.parametrize("kind", [FunctionReward, IsolatedReward])
@pytest.mark.parametrize("name", ["think_format_reward", "accuracy_reward", "reasoning_accuracy_reward"])
def test_reward_functions_of_trl_run_unmodified(kind, name):
    if name != "think_format_reward":
        pytest.importorskip("math_verify")
    solutions = {"7": "$7$", "nothing that can be read": ""}
    prompt = [{"role": "user", "content": "3+4="}]
    reward = kind(f"trl.rewards:{name}", seconds=60)
    for answer, solution in solutions.items():
        problem = Problem(answer, prompt, answer, extra={"solution": solution, "level": 1})
        messages = [[{"role": "assistant", "content": text}] for text in TEXTS]
        expected = getattr(of_trl, name)(completions=messages, solution=[solution] * 3, level=[1] * 3)
        found = reward.scores([(problem, text) for text in TEXTS])
        assert found == [Score(None, DOES_NOT_APPLY) if one is None else Score(float(one)) for one in expected]
    reward.close()


@pytest.mark.parametrize("name", ["repetition", "overlong", "cosine"])
def test_reward_functions_that_trl_makes_see_the_tokens(tmp_path, monkeypatch, name):
    if name == "cosine":
        pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made_by_trl.py").write_text(MADE)
    reward = FunctionReward(f"made_by_trl:{name}")
    problem = Problem("p", [{"role": "user", "content": "3+4="}], "7", extra={"solution": "$7$"})
    found = [
        score.reward
        for score in reward.scores([(problem, ResponseText(*pair)) for pair in zip(TEXTS, IDS, strict=True)])
    ]
    if name == "repetition":  # bigrams: one of four twice, one five times, none
        assert found == pytest.approx([-0.25, -0.8, 0.0])
    elif name == "overlong":  # from the third token on, a quarter each
        assert found == [-0.75, -1.0, 0.0]
    else:
        messages = [[{"role": "assistant", "content": text}] for text in TEXTS]
        assert found == of_trl.get_cosine_scaled_reward(6)(messages, ["$7$"] * 3, list(IDS))


def lengths(completion_ids, **kwargs):
    """None where the number of tokens is even."""
    return [float(len(ids)) if len(ids) % 2 else None for ids in completion_ids]


def test_gdpo_gives_the_advantages_of_normalize_then_sum(tmp_path):
    options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.3], "max_steps": 1}
    given = {"reward_funcs": [digits, lengths]}
    logged = trained(tmp_path, GRPOTrainer, GRPOConfig, arguments=given, num_iterations=1, **options)._logs
    rewards = torch.tensor([logged["rewards"][name] for name in ("digits", "lengths")], dtype=torch.float64).T
    assert rewards.shape == (8, 2)  # two groups of four
    assert rewards.isnan().any()
    found = gdpo(rewards, torch.arange(8) // 4, weights=[1.0, 0.3], eps=1e-4).advantages
    assert_close(found.float(), torch.tensor(logged["advantages"]), rtol=0, atol=1e-5)
