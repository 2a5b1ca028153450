import pytest
import torch
from torch.testing import assert_close

from bapo.core.advantages import to_tokens
from bapo.core.reduction import balanced_weights, denominator_of, reduce_tokens, sequence_sums, spread

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


def test_balanced_weights_by_hand():
    # Group 0: two positives of 1 + 3 tokens, n / T = 2 / 4, and a negative of 2. Group 1: a negative of 4 tokens, a
    # zero of 2, and a positive without a token, which does not count.
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.0, -3.0, 1.0], dtype=torch.float64)
    lengths, groups = torch.tensor([1, 4, 3, 2, 2, 0]), torch.tensor([0, 1, 0, 1, 0, 1])
    weights = balanced_weights(advantages, lengths, groups)
    assert weights.tolist() == [0.5, 0.25, 0.5, 0.5, 0.5, 0.0]
    assert weights.dtype == torch.float64
    # All tokens of a set weigh as much as it has responses, so losses of 1 have a mean of 1.
    assert (weights * lengths).sum() == 5
    mask = torch.arange(4) < lengths[:, None]
    assert denominator_of(mask, "balanced") == 5
    # An update whose advantages overflowed is skipped where its loss is looked at, not here.
    assert (
        balanced_weights(torch.tensor([float("nan"), 1.0]), torch.tensor([2, 4]), torch.zeros(2).int()).isfinite().all()
    )


def random_responses(seed=0):
    """Losses, mask, one advantage per response and its group, of responses in any order; some have no token."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(24, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) < torch.randint(0, 9, (24, 1), generator=generator)
    advantages = torch.randint(-1, 2, (24,), generator=generator).double() * 0.7
    return losses, mask, advantages, torch.randint(0, 5, (24,), generator=generator)


def balanced_by_loop(losses, mask, advantages, groups):
    """The paper's equation, one set of responses after the other, in float64."""
    total, responses = 0.0, 0
    for group in groups.unique().tolist():
        for sign in (-1, 0, 1):
            rows = [i for i in range(24) if groups[i] == group and advantages[i].sign() == sign and mask[i].any()]
            tokens = [loss for i in rows for loss in losses[i][mask[i]].tolist()]
            total += len(rows) * sum(tokens) / max(len(tokens), 1)
            responses += len(rows)
    return total / responses


@pytest.mark.parametrize("sizes", [[24], [11, 13], [3, 20, 1]])
def test_balanced_losses_of_any_parts_are_those_of_a_loop_over_the_sets(sizes):
    for seed in range(5):
        losses, mask, advantages, groups = random_responses(seed)
        weights = to_tokens(balanced_weights(advantages, mask.sum(1), groups), mask)
        parts = list(zip(*(x.split(sizes) for x in (losses, mask, weights)), strict=True))
        denominator = sum(denominator_of(part, "balanced") for _, part, _ in parts)
        padded = [
            reduce_tokens(*part, "balanced", denominator=denominator, loss_weights=given) for *part, given in parts
        ]
        expected = balanced_by_loop(losses, mask, advantages, groups)
        assert sum(padded).item() == pytest.approx(expected, abs=1e-14)
        ids = torch.arange(24)[:, None].expand(24, 9)[mask]
        packed = reduce_tokens(
            losses[mask],
            mask[mask],
            "balanced",
            denominator=denominator_of(mask[mask], "balanced", sequence_ids=ids),
            sequence_ids=ids,
            loss_weights=weights[mask],
        )
        assert packed.item() == pytest.approx(expected, abs=1e-14)


def test_balanced_is_a_sequence_mean_where_lengths_are_equal_and_a_token_mean_where_signs_are():
    losses, _, advantages, groups = random_responses()
    mask = torch.arange(9).expand(24, 9) < 6
    weights = to_tokens(balanced_weights(advantages, mask.sum(1), groups), mask)
    sequence = reduce_tokens(losses, mask, "sequence_mean", denominator=24)
    assert_close(reduce_tokens(losses, mask, "balanced", denominator=24, loss_weights=weights), sequence)
    mask = torch.arange(9) < torch.arange(24)[:, None] % 8 + 1
    one = to_tokens(balanced_weights(torch.ones(24, dtype=torch.float64), mask.sum(1), 0 * groups), mask)
    tokens = reduce_tokens(losses, mask, "token_mean", denominator=mask.sum())
    assert_close(reduce_tokens(losses, mask, "balanced", denominator=24, loss_weights=one), tokens)


def test_weights_hold_anything_where_the_mask_is_off():
    weights = torch.tensor([[1.0, 1.0, float("nan")], [1.0, float("inf"), -1.0], [float("nan")] * 3])
    loss = reduce_tokens(VALUES, MASK, "balanced", denominator=2, loss_weights=weights)
    assert loss == (1 + 2 + 6) / 2


def test_missing_length_or_ids_are_refused():
    with pytest.raises(ValueError, match="Give the longest response"):
        denominator_of(MASK, "fixed_length")
    with pytest.raises(ValueError, match="Pass sequence_ids"):
        denominator_of(PACKED[1], "sequence_mean")
