"""verl's own functions score here as they are."""

import pytest

pytest.importorskip("verl")

from verl.utils.reward_score import default_compute_score, math_dapo

from bapo.tasks.verify.functions import FunctionReward, IsolatedReward
from bapo.types import Problem, Score

GSM8K = Problem(
    "p",
    [{"role": "user", "content": "3+4="}],
    "7",
    extra={"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "7"}, "index": 1},
)
TEXTS = ("3 + 4 = 7\n#### 7", "#### 12", "seven")


@pytest.mark.parametrize("kind", [FunctionReward, IsolatedReward])
@pytest.mark.parametrize(
    "name", ["verl.utils.reward_score:default_compute_score", "verl.utils.reward_score.gsm8k:compute_score"]
)
def test_verls_score_of_gsm8k_runs_unmodified(kind, name):
    reward = kind(name, seconds=60)
    assert reward.scores([(GSM8K, text) for text in TEXTS]) == [Score(1.0), Score(0.0), Score(0.0)]
    assert [default_compute_score("openai/gsm8k", text, "7") for text in TEXTS] == [1.0, 0.0, 0.0]
    reward.close()


def test_of_a_dict_the_score_counts_and_the_prediction_is_the_answer():
    reward, text = FunctionReward("verl.utils.reward_score.math_dapo:compute_score"), "So it is.\nAnswer: 7"
    theirs = math_dapo.compute_score(text, "7")
    assert reward.scores([(GSM8K, text)]) == [Score(theirs["score"], answer=theirs["pred"])] == [Score(1.0, answer="7")]
    assert reward.scores([(GSM8K, "Answer: 8")])[0].reward == -1.0
