"""What travels as arrays arrives as it was sent: segments, and groups as a learner reads them."""

import math
import pickle
from dataclasses import fields

import pytest
import torch

from bapo.learn.packing import pack
from bapo.rollout.engine import Segment
from bapo.train.cluster.cargo import COLUMNS, PLAIN, Answer, Batch
from bapo.types import Status, Trajectory
from tests.sharded import groups

SEGMENTS = [
    (7, Segment([1, 2], [-0.1, -1 / 3], [0.5, 0.25], [4, 4])),
    (9, Segment([], [], [], [], Status.PARKED)),
    (8, Segment([2**17], [-1e-300], [2.0], [5], Status.TRUNCATED)),
]


@pytest.mark.parametrize("truncated", [False, True])
def test_segments_arrive_as_they_were(truncated):
    sent = SEGMENTS
    if truncated:
        sent = [(id, Segment(**vars(s) | {"log_kept": [-0.1] * len(s.tokens)})) for id, s in sent]
    arrived = pickle.loads(pickle.dumps(Answer.of(sent, 0.5)))
    assert arrived.segments() == sent
    assert arrived.seconds == 0.5
    assert Answer.of([], 0.0).segments() == []


def test_entropies_that_are_not_known_stay_unknown():
    ((_, segment),) = Answer.of([(1, Segment([3], [-1.0], [math.nan], [0]))], 0.0).segments()
    assert math.isnan(segment.entropies[0])


def spoken(groups):
    """With turns of an environment, truncated sampling, several rewards and a reference."""
    for group in groups:
        for t in group.trajectories:
            t.log_kept = [-0.25] * len(t.versions)
            t.reference_logprobs = [-1.5 - index for index in range(len(t.versions))]
            t.rewards = {"a": 1.0, "b": None}
            t.observe([5, 6])
    return groups


@pytest.mark.parametrize("change", [lambda groups: groups, spoken])
def test_a_learner_packs_the_same_from_what_arrives(change):
    sent = change(groups())
    arrived = pickle.loads(pickle.dumps(Batch.of(sent))).groups()
    given = {"estimator": "grpo", "micro_tokens": 40, "device": torch.device("cpu"), "kl_in_reward": 0.1}
    for part in ((0, 1), (1, 2)):
        ours, theirs = (pack(each, part=part, **given) for each in (arrived, sent))
        assert len(ours) == len(theirs) > 1
        for found, expected in zip(ours, theirs, strict=True):
            for name, value in vars(expected).items():
                other = getattr(found, name)
                assert torch.equal(other, value) if torch.is_tensor(value) else other == value, name
    assert [(g.id, g.uses, g.oldest) for g in arrived] == [(g.id, g.uses, g.oldest) for g in sent]


def test_all_that_is_known_of_a_trajectory_travels_but_what_no_learner_reads():
    known = {field.name for field in fields(Trajectory)}
    assert known - {*COLUMNS, *PLAIN} == {"entropies", "answers"}
