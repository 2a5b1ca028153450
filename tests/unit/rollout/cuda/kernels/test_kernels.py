"""The CUDA engine's kernels against transformers' own modules, plain attention and the general engine's draw.

On CPU they run under Triton's interpreter; with a GPU, on it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from bapo.core.kernels.layers import add_norm, gate
from bapo.rollout.cuda.kernels.attention import decode_attention, prefill_attention, rotate_and_store, splits_for
from bapo.rollout.cuda.kernels.sampling import SlotStatus, State, sample
from bapo.rollout.local.engine import draw
from bapo.rollout.randomness import stream, uniforms
from tests.precisions import PRECISIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_add_norm_is_transformers_residual_and_norm(dtype):
    norm = LlamaRMSNorm(24, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data = randn(24, dtype=dtype, seed=1)
    residual, delta = randn(3, 24, dtype=dtype, seed=2), randn(3, 24, dtype=dtype, seed=3)
    together = residual + delta
    out = add_norm(residual, delta, norm.weight.data, 1e-5)
    assert_close(residual, together, rtol=0, atol=0)
    assert_close(out, norm(together).detach(), rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-6)
    alone = add_norm(together, None, norm.weight.data, 1e-5)
    assert_close(alone, out, rtol=0, atol=0)
    assert_close(together, residual, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_gate_is_silu_times_up(dtype):
    gated = randn(3, 40, dtype=dtype)
    expected = torch.nn.functional.silu(gated[:, :20]) * gated[:, 20:]
    assert_close(gate(gated), expected, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-6)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_is_transformers_and_the_cache_is_written_in_place(dtype, normed):
    heads, kv_heads, width, reach = 3, 1, 8, 6
    config = LlamaConfig(hidden_size=24, num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=reach)
    rotary = LlamaRotaryEmbedding(config).to(DEVICE)
    slots, positions = torch.tensor([2, 0], device=DEVICE), torch.tensor([4, 1], device=DEVICE)
    qkv = randn(2, (heads + 2 * kv_heads) * width, dtype=dtype)
    query, key, value = qkv.clone().view(2, -1, width).split([heads, kv_heads, kv_heads], dim=1)
    gains = None
    if normed:
        norms = [LlamaRMSNorm(width, eps=1e-6).to(DEVICE, dtype) for _ in range(2)]
        for seed, norm in enumerate(norms):
            norm.weight.data = randn(width, dtype=dtype, seed=seed)
        query, key = norms[0](query).detach(), norms[1](key).detach()
        gains = norms[0].weight.data, norms[1].weight.data
    cos, sin = rotary(qkv, positions[:, None])
    query, key = apply_rotary_pos_emb(query[:, :, None], key[:, :, None], cos, sin)
    every = rotary(qkv, torch.arange(reach, device=DEVICE)[None])
    tables = tuple(table[0, :, : width // 2].contiguous() for table in every)
    page = 4
    table = torch.tensor([[3, 0], [6, 5], [1, 4]], dtype=torch.int32, device=DEVICE)
    keys, values = torch.full((2, 7, kv_heads, page, width), 7.0, dtype=dtype, device=DEVICE)
    rotate_and_store(qkv, slots, positions, tables, gains, keys, values, table, heads=heads, eps=1e-6)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
    assert_close(qkv.view(2, -1, width)[:, :heads], query[:, :, 0], **close)
    for row, (home, place) in enumerate([(4, 0), (3, 1)]):  # slot 2 at 4: the start of its second page; slot 0 at 1
        assert_close(keys[home, :, place], key[row, :, 0], **close)
        assert_close(values[home, :, place], value[row], rtol=0, atol=0)
    assert int((keys == 7).all(-1).sum()) == 7 * page - 2  # nothing else was touched


KV_HEADS, WIDTH, PAGE = 2, 12, 64
TABLES = {
    "in order": [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]],
    "mixed up": [[9, 2, 11], [1, 12, 4], [10, 3, 7], [6, 8, 5]],
    "shared": [[5, 2, 3], [5, 2, 6], [5, 4, 7], [5, 9, 8]],
}


def attention_case(dtype, rows, order, *, heads=6):
    """Queries, pages of random keys and values, their table, and the same keys and values slot by slot."""
    qkv = randn(rows, (heads + 2 * KV_HEADS) * WIDTH, dtype=dtype)
    paged = randn(2, 13, KV_HEADS, PAGE, WIDTH, dtype=dtype, seed=1)
    table = torch.tensor(TABLES[order], dtype=torch.int32, device=DEVICE)
    dense = torch.stack([torch.cat([paged[:, page] for page in pages], dim=2) for pages in TABLES[order]], dim=1)
    return qkv, paged, table, dense


def plain(query, keys, values, length):
    """One query [heads, width] over the first `length` of one slot, in float64."""
    out = scaled_dot_product_attention(
        query[:, None].double(), keys[:, :length].double(), values[:, :length].double(), enable_gqa=True
    )
    return out.reshape(-1)


def assert_attends(out, qkv, dense, slots, positions, rows, *, heads=6):
    for row in rows:
        slot, query = int(slots[row]), qkv[row, : heads * WIDTH].view(heads, WIDTH)
        expected = plain(query, dense[0, slot], dense[1, slot], int(positions[row]) + 1)
        assert_close(out[row].double(), expected, rtol=0, atol=1e-6 if out.dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("order", TABLES)
def test_decoding_attends_to_the_pages_of_the_slot_up_to_the_row_itself(dtype, splits, order):
    qkv, paged, table, dense = attention_case(dtype, 6, order)
    slots = torch.tensor([3, 0, 1, 2, 1, 0], device=DEVICE)
    positions = torch.tensor([0, 63, 64, 127, 128, 191], device=DEVICE)  # around the ends of pages
    out = decode_attention(qkv, *paged, table, slots, positions, heads=6, splits=splits)
    assert_attends(out, qkv, dense, slots, positions, range(6))


def test_decoding_with_one_query_head_per_key_head_and_pages_of_one_turn():
    qkv, paged, _, _ = attention_case(torch.float32, 2, "mixed up", heads=2)
    paged = paged[:, :, :, :32].contiguous()
    table = torch.tensor([[2, 7, 1], [3, 4, 5]], dtype=torch.int32, device=DEVICE)
    dense = torch.stack([torch.cat([paged[:, page] for page in pages], dim=2) for pages in table.tolist()], dim=1)
    slots, positions = torch.tensor([1, 0], device=DEVICE), torch.tensor([40, 95], device=DEVICE)
    out = decode_attention(qkv, *paged, table, slots, positions, heads=2, splits=1)
    assert_attends(out, qkv, dense, slots, positions, range(2), heads=2)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("order", TABLES)
def test_prefill_attends_causally_within_the_pages_of_each_sequence(dtype, order):
    lengths = {2: 130, 1: 1, 0: 3}
    qkv, paged, table, dense = attention_case(dtype, sum(lengths.values()), order)
    slots = torch.tensor([slot for slot, n in lengths.items() for _ in range(n)], device=DEVICE)
    positions = torch.tensor([i for n in lengths.values() for i in range(n)], device=DEVICE)
    blocks = torch.tensor([[0, 64], [64, 64], [128, 2], [130, 1], [131, 3]], device=DEVICE)
    out = prefill_attention(qkv, *paged, table, slots, positions, blocks, heads=6)
    assert_attends(out, qkv, dense, slots, positions, (0, 5, 63, 64, 127, 128, 129, 130, 131, 133))


def test_pages_that_a_turn_would_cross_are_refused():
    qkv, paged, table, _ = attention_case(torch.float32, 1, "in order")
    slots = positions = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(AssertionError, match="pages of 48 tokens"):
        decode_attention(qkv, *paged[:, :, :, :48].contiguous(), table, slots, positions, heads=6, splits=1)


def test_splits_fill_the_device_and_no_more():
    assert [splits_for(rows, 3, 132) for rows in (1, 8, 64, 256, 1024)] == [16, 16, 2, 1, 1]


class Slots:
    """State and records of a few slots, ready for `sample`."""

    def __init__(self, slots, *, left=5, position=0, stop_ids=()):
        self.state = torch.zeros(len(State), slots, dtype=torch.int64, device=DEVICE)
        self.state[State.LEFT] = left
        self.state[State.POSITION] = position
        self.state[State.STATUS] = SlotStatus.RUNNING
        self.streams = np.array([stream(100 + slot) for slot in range(slots)])
        self.state[State.STREAM] = torch.from_numpy(self.streams.view(np.int64)).to(DEVICE)
        self.tokens = torch.zeros(slots, 8, dtype=torch.int32, device=DEVICE)
        self.logprobs, self.entropies = torch.zeros(2, slots, 8, device=DEVICE)
        self.stop_ids = torch.tensor([*stop_ids, *[-1] * (8 - len(stop_ids))], device=DEVICE)

    def sample(self, logits, slots, temperature=1.0):
        sample(
            logits,
            torch.tensor(slots, device=DEVICE),
            self.state,
            self.tokens,
            self.logprobs,
            self.entropies,
            stop_ids=self.stop_ids,
            temperature=torch.tensor([temperature], device=DEVICE),
        )


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("vocabulary", [5, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sampling_is_the_general_engines_draw(dtype, vocabulary, temperature):
    logits = randn(6, vocabulary, dtype=dtype) * 2
    logits[1, :3] = float("-inf")
    slots = Slots(6, position=17)
    order = [4, 0, 2, 5, 1, 3]
    slots.sample(logits, order, temperature)
    uniform = torch.from_numpy(uniforms(slots.streams[order], np.full(6, 17))).to(DEVICE)
    tokens, logprobs, entropies = draw(logits, uniform, temperature=temperature)
    assert slots.tokens[order, 0].tolist() == tokens.tolist()
    assert_close(slots.logprobs[order, 0], logprobs, rtol=1e-5, atol=1e-5)
    assert_close(slots.entropies[order, 0], entropies, rtol=1e-5, atol=1e-5)
    assert slots.state[State.LAST][order].tolist() == tokens.tolist()
    for field, value in {State.LENGTH: 1, State.PRODUCED: 1, State.LEFT: 4, State.POSITION: 18}.items():
        assert slots.state[field].tolist() == [value] * 6


def test_what_ends_a_response():
    logits = torch.full((4, 4), -30.0, device=DEVICE)
    logits[0, 2] = logits[1, 1] = logits[3, 1] = 30.0
    logits[2, 1] = float("nan")
    slots = Slots(4, left=1, stop_ids=(2, 3))
    slots.state[State.LEFT, 3] = 2
    slots.sample(logits, [0, 1, 2, 3])
    expected = [SlotStatus.STOPPED, SlotStatus.TRUNCATED, SlotStatus.BROKEN, SlotStatus.RUNNING]
    assert slots.state[State.STATUS].tolist() == expected
    before = slots.state.clone()
    slots.sample(logits[:3], [0, 1, 2])  # none of them runs any more
    assert torch.equal(slots.state, before)


def test_frequencies_match_the_softmax():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]], device=DEVICE).expand(200, 4).contiguous()
    slots = Slots(200)
    slots.sample(logits, list(range(200)))
    counts = torch.bincount(slots.tokens[:, 0].cpu(), minlength=4) / 200
    assert_close(counts, logits[0].softmax(-1).cpu(), rtol=0, atol=0.1)
