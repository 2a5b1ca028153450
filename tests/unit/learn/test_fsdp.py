"""How an update is divided among ranks, and the two things that weights are compared by: log-probs and fingerprints."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from bapo.learn.forward import can_pack
from bapo.learn.fsdp import ShardedLearner
from bapo.learn.packing import pack, pack_demonstrations
from bapo.learn.state import fingerprint
from tests.rounding import carried
from tests.sharded import CPU, SETTINGS, alone, groups
from tests.tiny.models import tiny


def tokens_of(batches):
    return [row.tolist() for batch in batches for row in batch.input_ids.tensor_split(batch.offsets[1:-1].long())]


def test_the_longest_go_first_to_whoever_has_least():
    lengths = [
        9,
        7,
        6,
        5,
        4,
        3,
    ]  # 9 | 7 | then 6 to the second, 5 to the first, 4 to the second (13 < 14), 3 to the first
    pairs = [([1], [i] * (length - 1)) for i, length in enumerate(lengths)]
    taken = [
        sorted(len(row) for row in tokens_of(pack_demonstrations(pairs, micro_tokens=99, device=CPU, part=(rank, 2))))
        for rank in range(2)
    ]
    assert taken == [[3, 5, 9], [4, 6, 7]]


@pytest.mark.parametrize("ranks", [2, 3, 40])
def test_parts_hold_every_response_once_with_the_advantage_of_its_whole_group(ranks):
    options = {"estimator": "grpo", "micro_tokens": 40, "device": CPU}
    whole = pack(groups(), **options)
    parts = [batch for rank in range(ranks) for batch in pack(groups(), **options, part=(rank, ranks))]
    assert sorted(tokens_of(parts)) == sorted(tokens_of(whole))

    def advantages(batches):
        return sorted(zip(*(torch.cat([getattr(b, n) for b in batches]).tolist() for n in NAMES), strict=True))

    assert advantages(parts) == advantages(whole)


NAMES = ("behavior_logprobs", "advantages", "targets", "uses")


@pytest.mark.numeric
@pytest.mark.parametrize("case", ["searched", "tied head", "low rank"])
def test_next_logprobs_are_those_of_the_model(case):
    learner = alone(case)
    learner.settings = replace(learner.settings, temperature=0.7)
    contexts = [[5, 6, 7], [9], [4, 8, 15, 16, 23]]
    found = learner.next_logprobs(contexts)
    assert found.dtype == torch.float32
    limit = carried(lambda: learner.next_logprobs(contexts))
    for row, context in zip(found, contexts, strict=True):
        with torch.no_grad():
            logits = learner.model(torch.tensor([context])).logits[0, -1].double()
        assert_close(row.double(), torch.log_softmax(logits / 0.7, -1), rtol=0, atol=limit)


def test_a_fingerprint_shows_one_changed_bit_and_swapped_tensors():
    one, other = torch.randn(6, 4, dtype=torch.float32), torch.randn(6, 4).bfloat16()
    before = fingerprint([one, other])
    assert fingerprint([one.clone(), other.clone()]) == before
    assert fingerprint([other, one]) != before
    one.view(torch.int32)[2, 1] ^= 1
    assert fingerprint([one, other]) != before
    assert fingerprint([]) == 0


def test_a_fingerprint_is_of_the_masters():
    learner = alone("bfloat16")
    before = learner.fingerprint()
    with torch.no_grad():
        learner.optimizer.masters[0][5, 0] *= 1 + 1e-6  # too little for bfloat16
    assert learner.fingerprint() != before


def test_packing_can_be_decided_before_the_model_is_on_its_device():
    assert not can_pack(tiny())
    assert can_pack(tiny(), device=torch.device("cuda"), dtype=torch.bfloat16)


def test_compiled_layers_are_refused():
    class Two:
        def size(self):
            return 2

    settings = replace(SETTINGS, compile=True)
    with pytest.raises(ValueError, match="2 ranks share this model"):
        ShardedLearner(tiny(), settings, ranks=Two(), device=CPU, dtype=torch.float32)
