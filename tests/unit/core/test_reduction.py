import pytest
import torch
from torch.testing import assert_close

from bapo.core.reduction import denominator_of, reduce_tokens, sequence_sums, spread

VALUES = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
PACKED = (VALUES[MASK], torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1]))


@pytest.mark.parametrize(
    ("reduction", "denominator", "expected"),
    [
        ("token_mean", 3, (1 + 2 + 6) / 3),
        ("sequence_mean", 2, ((1 + 2) / 2 + 6) / 2),  # the empty third sequence does not count
        ("fixed_length", 2 * 10, (1 + 2 + 6) / 20),
    ],
)
def test_reductions_by_hand_padded_and_packed(reduction, denominator, expected):
    for values, mask, ids in ((VALUES, MASK, None), PACKED):
        divisor = denominator_of(mask, reduction, sequence_ids=ids, length=10)
        assert divisor == denominator
        loss = reduce_tokens(values, mask, reduction, denominator=divisor, sequence_ids=ids)
        assert_close(loss, torch.tensor(expected))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length"])
def test_parts_with_the_whole_denominator_add_up_to_the_whole(reduction):
    whole = denominator_of(MASK, reduction, length=10)
    parts = [denominator_of(MASK[i : i + 1], reduction, length=10) for i in range(3)]
    assert sum(parts) == whole
    losses = [reduce_tokens(VALUES[i : i + 1], MASK[i : i + 1], reduction, denominator=whole) for i in range(3)]
    assert_close(sum(losses), reduce_tokens(VALUES, MASK, reduction, denominator=whole))


def test_sequence_sums_and_spread_are_inverse_layouts():
    values, mask, ids = PACKED
    sums = sequence_sums(values, mask, ids)
    assert_close(sums, torch.tensor([3.0, 6.0, 0.0]))
    assert_close(spread(sums, mask, ids), torch.tensor([3.0, 3.0, 6.0]))
    assert_close(sequence_sums(VALUES, MASK, None), torch.tensor([3.0, 6.0, 0.0]))


def test_missing_length_or_ids_are_refused():
    with pytest.raises(ValueError, match="Give the longest response"):
        denominator_of(MASK, "fixed_length")
    with pytest.raises(ValueError, match="Pass sequence_ids"):
        denominator_of(PACKED[1], "sequence_mean")
