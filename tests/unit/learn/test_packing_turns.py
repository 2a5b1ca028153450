"""What an environment said is context: packing, loss and gradient of two turns, by hand and by a literal loop."""

import copy

import pytest
import torch

from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.packing import pack
from bapo.learn.reference import Reference, initial
from bapo.types import Group, Problem, Status, Trajectory, group_from_state, group_state
from tests.rounding import carried, rounding
from tests.tiny.models import tiny

CPU = torch.device("cpu")
TEMPERATURE = 0.8


def model(seed=0):
    return tiny(seed=seed, vocab_size=20, tie_word_embeddings=True, initializer_range=0.05)


def response(prompt, turns, reward):
    """Turns of the policy (lists) and what was said between them (tuples); one number of each sampled token.

    A dict: what the policy reads next in place of all that stands before.
    """
    made = Trajectory(prompt, 0, status=Status.STOPPED, reward=reward)
    for turn in turns:
        if isinstance(turn, dict):
            made.contexts.append({"at": len(made.tokens), "tokens": turn["instead"]})
            continue
        if isinstance(turn, tuple):
            made.observe(turn)
            continue
        if made.sampled:
            made.sampled += [True] * len(turn)
        made.tokens += turn
        made.behavior_logprobs += [-2.0 - token / 10 for token in turn]
        made.entropies += [0.5] * len(turn)
        made.versions += [len(made.versions)] * len(turn)
    return made


def group():
    return Group(
        0,
        Problem("p", "", None),
        [
            response([5, 6], [[7, 2], (8, 9, 4), [10, 1]], 1.0),
            response([5, 6], [[11, 12, 13, 2], (3,), [2], (14, 15), [1]], 0.0),
            response([5, 6], [[16, 1]], 0.5),  # one turn beside several
        ],
    )


def forked():
    """The same, but two responses go on from other contexts: one once, one twice."""
    return Group(
        0,
        Problem("p", "", None),
        [
            response([5, 6], [[7, 2], (8, 9, 4), {"instead": [5, 6, 2, 8, 9, 4]}, [10, 1]], 1.0),
            response(
                [5, 6],
                [[11, 12, 2], (3,), {"instead": [5, 2, 3]}, [2], (14,), [17], (15,), {"instead": [18, 15]}, [1]],
                0.0,
            ),
            response([5, 6], [[16, 1]], 0.5),
        ],
    )


def test_packing_contexts_that_were_written_anew_by_hand():
    (batch,) = pack([forked()], estimator="dr_grpo", micro_tokens=100, device=CPU)
    rows = [[5, 6, 11, 12, 2], [5, 2, 3, 2, 14, 17], [18, 15, 1]]  # 14 tokens, and 12 of the other
    rows += [[5, 6, 7, 2], [5, 6, 2, 8, 9, 4, 10, 1], [5, 6, 16, 1]]
    assert batch.input_ids.tolist() == [token for row in rows for token in row]
    assert batch.position_ids.tolist() == [place for row in rows for place in range(len(row))]
    assert batch.offsets.tolist() == [0, 5, 11, 14, 18, 26, 30]
    assert batch.longest == 8
    assert batch.predicts.tolist() == [1, 2, 3, 7, 9, 12, 15, 16, 23, 24, 27, 28]
    assert batch.targets.tolist() == [11, 12, 2, 2, 17, 1, 7, 2, 10, 1, 16, 1]
    assert batch.sequence_ids.tolist() == [0] * 6 + [1] * 4 + [2] * 2  # responses, not rows
    assert batch.versions.tolist() == [0, 0, 0, 3, 4, 5, 0, 0, 2, 2, 0, 0]
    assert batch.advantages.tolist() == [-0.5] * 6 + [0.5] * 4 + [0.0] * 2
    assert batch.loss_weights.tolist()[:10] == pytest.approx([1 / 6] * 6 + [1 / 4] * 4, rel=rounding(2))
    found = {
        (micro_tokens, padded): [
            batch.sequence_ids.max().item() + 1
            for batch in pack([forked()], estimator="dr_grpo", micro_tokens=micro_tokens, padded=padded, device=CPU)
        ]
        for micro_tokens in (1, 26, 30, 40, 48)
        for padded in (True, False)
    }
    assert found == {
        (1, True): [1, 1, 1],
        (1, False): [1, 1, 1],
        (26, True): [1, 2],  # 3 rows of 6 places; 3 rows of 8
        (30, True): [1, 2],
        (26, False): [2, 1],
        (30, False): [3],
        (40, True): [2, 1],  # 5 rows of 8
        (40, False): [3],
        (48, True): [3],
        (48, False): [3],
    }


def test_packing_two_turns_by_hand():
    (batch,) = pack([group()], estimator="dr_grpo", micro_tokens=100, device=CPU)
    assert batch.input_ids.tolist() == [5, 6, 11, 12, 13, 2, 3, 2, 14, 15, 1, 5, 6, 7, 2, 8, 9, 4, 10, 1, 5, 6, 16, 1]
    assert batch.position_ids.tolist() == [*range(11), *range(9), *range(4)]
    assert batch.offsets.tolist() == [0, 11, 20, 24]
    assert batch.predicts.tolist() == [1, 2, 3, 4, 6, 9, 12, 13, 17, 18, 21, 22]
    assert batch.targets.tolist() == [11, 12, 13, 2, 2, 1, 7, 2, 10, 1, 16, 1]
    assert batch.sequence_ids.tolist() == [0] * 6 + [1] * 4 + [2] * 2
    assert batch.versions.tolist() == [0, 0, 0, 0, 4, 5, 0, 0, 2, 2, 0, 0]
    assert batch.advantages.tolist() == [-0.5] * 6 + [0.5] * 4 + [0.0] * 2
    assert batch.behavior_logprobs.tolist() == pytest.approx([-2 - t / 10 for t in batch.targets.tolist()])
    # balanced: the positive side has 4 sampled tokens of one response, the negative side 6
    assert batch.loss_weights.tolist()[:10] == pytest.approx([1 / 6] * 6 + [1 / 4] * 4, rel=rounding(2))


def literal_logprobs(exact, trajectory):
    """Log-probs of the sampled tokens, one after the other, in float64: each from all that stands before it."""
    said = trajectory.sampled or [True] * len(trajectory.tokens)
    found, read = [], list(trajectory.prompt)
    instead = {one["at"]: one["tokens"] for one in trajectory.contexts}
    for place, (token, own) in enumerate(zip(trajectory.tokens, said, strict=True)):
        read = list(instead.get(place, read))
        if own:
            logits = exact(torch.tensor([read])).logits[0, -1].double() / TEMPERATURE
            found.append(logits[token] - logits.logsumexp(0))
        read.append(token)
    return torch.stack(found)


def literal_loss(exact, group, reduction):
    """GRPO's clip at 0.8 and 1.2 with A = R - mean, over the sampled tokens."""
    mean = sum(t.reward for t in group.trajectories) / len(group.trajectories)
    total, tokens = 0.0, 0
    for t in group.trajectories:
        now, sampled = literal_logprobs(exact, t), torch.tensor(t.behavior_logprobs, dtype=torch.float64)
        ratio, advantage = (now - sampled).exp(), t.reward - mean
        losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total = total + (losses.mean() if reduction == "sequence_mean" else losses.sum())
        tokens += len(losses)
    return total / {"token_mean": tokens, "sequence_mean": len(group.trajectories)}[reduction]


@pytest.mark.numeric
@pytest.mark.parametrize("micro_tokens", [12, 10_000])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("group", [group, forked])
def test_loss_and_gradient_of_two_turns_are_those_of_a_literal_loop(group, reduction, micro_tokens):
    start = model()
    options = {"objective": "grpo", "advantages": "dr_grpo", "temperature": TEMPERATURE}
    settings = LearnerSettings(reduction=reduction, micro_tokens=micro_tokens, **options)
    exact = copy.deepcopy(start).double()
    loss = literal_loss(exact, group(), reduction)
    loss.backward()
    gradient = sum(float(p.grad.square().sum()) for p in exact.parameters()) ** 0.5

    def learner():
        made = Learner(copy.deepcopy(start), settings)
        made.version = 6  # newer than every token
        return made

    def told(learner):
        metrics = learner.step([group()]).metrics
        return {name: metrics[name] for name in ("loss", "grad_norm", "tokens")}

    found, limits = told(learner()), carried(told, given=learner)
    assert found["tokens"] == 12
    for name, value in (("loss", loss.item()), ("grad_norm", gradient)):
        limit = limits[name] + rounding(4, abs(value))
        assert found[name] == pytest.approx(value, rel=0, abs=limit)
        assert limit < 1e-2 * abs(value)


@pytest.mark.parametrize("group", [group, forked])
def test_a_reference_gives_log_probs_to_sampled_tokens_only(group):
    start = model()
    learner = Learner(start, LearnerSettings(temperature=TEMPERATURE, kl=0.1))
    learner.version = 6
    learner.reference = Reference(initial(start, moves=False), learner.whole, learner.settings)
    given = group()
    learner.reference.add_logprobs([given])
    for trajectory in given.trajectories:
        expected = literal_logprobs(copy.deepcopy(start).double(), trajectory).tolist()
        assert trajectory.reference_logprobs == pytest.approx(expected, abs=1e-5)
    learner.step([given])  # it finds a log-prob for each of its tokens


def test_a_group_of_conversations_comes_back_from_its_state():
    given = group()
    given.trajectories[0].answers = [{"at": 0, "tokens": 0, "text": "", "over": False, "reward": None}]
    given.trajectories[0].ending = "answered"
    given.trajectories[0].contexts = [{"at": 5, "tokens": [5, 6, 2, 8, 9, 4]}]
    state = group_state(given)
    assert group_from_state(state) == given
    assert not {"sampled", "answers", "contexts", "ending"} & state["trajectories"][2].keys()  # as before environments
