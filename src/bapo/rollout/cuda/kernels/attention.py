"""The way of new tokens into a key-value cache in pages, and their attention over it, with grouped query heads.

Queries and keys are rotated, and keys and values put into the cache, in one launch. Every intermediate is rounded to
the model's dtype where transformers rounds it, so that a sampled token's log-prob equals the learner's up to the order
of sums inside matrix products and attention. Norm and gate are in `core/kernels`.

A table says which page holds which stretch of a slot's tokens. One turn of the loop stays within one page, so it looks
the page up once.

Decoding has one query per row, and its cost is reading keys and values once: one program per row and key head serves
all query heads that share it. If the rows are too few to fill the device, each context is cut into `splits` parts,
whose softmaxes are joined afterwards (flash decoding). Prefill has blocks of queries, each from one sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
"""Scores are multiplied by it, because exp2 is faster than exp."""
KEYS = 32
"""Keys per turn of the loop. A page holds a multiple of it."""
QUERIES = 64
"""Queries per block of prefill."""


@triton.jit
def _rotated(first, second, gain_first, gain_second, cos, sin, eps, dtype, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """Norm over each head (if the model has one), then rotation by position; halves of heads, [heads, WIDTH / 2]."""
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / WIDTH + eps)
        first = (first * scale[:, None]).to(dtype).to(tl.float32)
        second = (second * scale[:, None]).to(dtype).to(tl.float32)
        first = (first * gain_first[None, :]).to(dtype).to(tl.float32)
        second = (second * gain_second[None, :]).to(dtype).to(tl.float32)
    turned = (first * cos[None, :]).to(dtype).to(tl.float32) - (second * sin[None, :]).to(dtype).to(tl.float32)
    other = (second * cos[None, :]).to(dtype).to(tl.float32) + (first * sin[None, :]).to(dtype).to(tl.float32)
    return turned.to(dtype), other.to(dtype)


@triton.jit
def _rotate_and_store(
    qkv, slots, positions, cos_table, sin_table, query_gain, key_gain, keys, values, table, eps, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    dtype = qkv.dtype.element_ty
    half: tl.constexpr = WIDTH // 2
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    lane = tl.arange(0, HALF_BLOCK)
    within = lane < half
    cos = tl.load(cos_table + position * half + lane, mask=within, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + position * half + lane, mask=within, other=0.0).to(tl.float32)
    base = qkv + token * (HEADS + 2 * KV_HEADS) * WIDTH

    head = tl.arange(0, HEADS_BLOCK)
    here = (head < HEADS)[:, None] & within[None, :]
    place = base + head[:, None] * WIDTH + lane[None, :]
    first = tl.load(place, mask=here, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=here, other=0.0).to(tl.float32)
    gain_first = cos
    gain_second = cos
    if NORM:
        gain_first = tl.load(query_gain + lane, mask=within, other=0.0).to(tl.float32)
        gain_second = tl.load(query_gain + half + lane, mask=within, other=0.0).to(tl.float32)
    first_out, second_out = _rotated(first, second, gain_first, gain_second, cos, sin, eps, dtype, WIDTH, NORM)
    tl.store(place, first_out, mask=here)
    tl.store(place + half, second_out, mask=here)

    kv_head = tl.arange(0, KV_BLOCK)
    here_kv = (kv_head < KV_HEADS)[:, None] & within[None, :]
    place_k = base + (HEADS + kv_head[:, None]) * WIDTH + lane[None, :]
    key_first = tl.load(place_k, mask=here_kv, other=0.0).to(tl.float32)
    key_second = tl.load(place_k + half, mask=here_kv, other=0.0).to(tl.float32)
    if NORM:
        gain_first = tl.load(key_gain + lane, mask=within, other=0.0).to(tl.float32)
        gain_second = tl.load(key_gain + half + lane, mask=within, other=0.0).to(tl.float32)
    key_first_out, key_second_out = _rotated(
        key_first, key_second, gain_first, gain_second, cos, sin, eps, dtype, WIDTH, NORM
    )
    page = tl.load(table + slot * table_stride + position // PAGE).to(tl.int64)
    home = ((page * KV_HEADS + kv_head[:, None]) * PAGE + position % PAGE) * WIDTH + lane[None, :]
    tl.store(keys + home, key_first_out, mask=here_kv)
    tl.store(keys + home + half, key_second_out, mask=here_kv)
    place_v = base + (HEADS + KV_HEADS + kv_head[:, None]) * WIDTH + lane[None, :]
    tl.store(values + home, tl.load(place_v, mask=here_kv, other=0.0), mask=here_kv)
    tl.store(values + home + half, tl.load(place_v + half, mask=here_kv, other=0.0), mask=here_kv)


def rotate_and_store(
    qkv: Tensor,  # [tokens, (heads + 2 kv_heads) * width]; queries are rotated in place
    slots: Tensor,  # [tokens] int: the row of the table of each token
    positions: Tensor,  # [tokens] int
    rotation: tuple[Tensor, Tensor],  # cos and sin, [positions, width / 2]
    gains: tuple[Tensor, Tensor] | None,  # of the query and key norms, [width] each
    keys: Tensor,  # [pages, kv_heads, page, width]; written in the page of the position
    values: Tensor,  # same
    table: Tensor,  # [slots, pages per slot] int: the pages of each slot, in the order of its tokens
    *,
    heads: int,
    eps: float,
) -> None:
    """Norm (if the model does) and rotate queries and keys, and put keys and values into the cache."""
    _, kv_heads, page, width = keys.shape
    cos, sin = rotation
    query_gain, key_gain = gains if gains is not None else (cos, cos)
    _rotate_and_store[(len(qkv),)](
        *(qkv, slots, positions, cos, sin, query_gain, key_gain, keys, values, table, eps, table.stride(0)),
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, HEADS_BLOCK=triton.next_power_of_2(heads),
        KV_BLOCK=triton.next_power_of_2(kv_heads), HALF_BLOCK=triton.next_power_of_2(width // 2), PAGE=page,
        NORM=gains is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _decode(
    qkv, keys, values, table, slots, positions, out, maxima, sums, scale, table_stride, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    slot = tl.load(slots + row).to(tl.int64)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    part = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    begin = split * part
    end = tl.minimum(begin + part, length)

    member = tl.arange(0, GROUP_BLOCK)
    lane = tl.arange(0, WIDTH_BLOCK)
    column = tl.arange(0, KEYS)
    head = kv_head * group + member
    here = (member < group)[:, None] & (lane < WIDTH)[None, :]
    query = tl.load(qkv + row * qkv_stride + head[:, None] * WIDTH + lane[None, :], mask=here, other=0.0)
    pages = table + slot * table_stride
    tile = column[:, None] * WIDTH + lane[None, :]

    best = tl.full([GROUP_BLOCK], -1e30, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, WIDTH_BLOCK], tl.float32)
    # Each turn loads the page of the next one. If a turn loaded its own, Triton would give a stage of the pipeline to
    # that load and would fetch keys and values one turn less ahead.
    page = tl.load(pages + begin // PAGE, mask=begin < end, other=0).to(tl.int64)
    for start in range(begin, end, KEYS):
        place = start + column
        inside = (place < end)[:, None] & (lane < WIDTH)[None, :]
        home = ((page * KV_HEADS + kv_head) * PAGE + start % PAGE) * WIDTH
        page = tl.load(pages + (start + KEYS) // PAGE, mask=start + KEYS < end, other=0).to(tl.int64)
        key = tl.load(keys + home + tile, mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where((place < end)[None, :], score, -1e30)
        new_best = tl.maximum(best, tl.max(score, axis=1))
        shrink = tl.exp2(best - new_best)
        weight = tl.where((place < end)[None, :], tl.exp2(score - new_best[:, None]), 0.0)
        value = tl.load(values + home + tile, mask=inside, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weight, axis=1)
        best = new_best

    if SPLITS == 1:
        mixed = mixed / total[:, None]
        tl.store(out + (row * HEADS + head[:, None]) * WIDTH + lane[None, :], mixed.to(out.dtype.element_ty), mask=here)
    else:
        entry = (row * HEADS + head) * SPLITS + split
        tl.store(out + entry[:, None] * WIDTH + lane[None, :], mixed, mask=here)
        tl.store(maxima + entry, best, mask=member < group)
        tl.store(sums + entry, total, mask=member < group)


@triton.jit
def _join(parts, maxima, sums, out, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    lane = tl.arange(0, WIDTH_BLOCK)
    best = tl.load(maxima + entry * SPLITS + split)
    grow = tl.exp2(best - tl.max(best, axis=0))
    total = tl.sum(tl.load(sums + entry * SPLITS + split) * grow, axis=0)
    inside = lane < WIDTH
    mixed = tl.load(parts + (entry * SPLITS + split[:, None]) * WIDTH + lane[None, :], mask=inside[None, :], other=0.0)
    joined = tl.sum(mixed * grow[:, None], axis=0) / total
    tl.store(out + entry * WIDTH + lane, joined.to(out.dtype.element_ty), mask=inside)


def splits_for(rows: int, kv_heads: int, processors: int) -> int:
    """Parts per context: a power of two such that the device has about two programs per processor, at most 16."""
    wanted = 2 * processors / (rows * kv_heads)
    splits = 1
    while splits < wanted and splits < 16:
        splits *= 2
    return splits


def decode_attention(
    qkv: Tensor,  # [rows, (heads + 2 kv_heads) * width], queries rotated
    keys: Tensor,  # [pages, kv_heads, page, width]
    values: Tensor,
    table: Tensor,  # [slots, pages per slot] int: the pages of each slot, in the order of its tokens
    slots: Tensor,  # [rows]
    positions: Tensor,  # [rows]: where the row's own token is; it attends up to there
    *,
    heads: int,
    splits: int,
) -> Tensor:  # [rows, heads * width]
    """Let each row's query attend to its slot."""
    _, kv_heads, page, width = keys.shape
    assert page % KEYS == 0, f"pages of {page} tokens are not a multiple of KEYS={KEYS}"
    rows = len(qkv)
    out = qkv.new_empty(rows, heads * width)
    shape = (rows * heads, splits)
    parts = out if splits == 1 else torch.empty(*shape, width, dtype=torch.float32, device=qkv.device)
    maxima, sums = (out, out) if splits == 1 else torch.empty(2, *shape, dtype=torch.float32, device=qkv.device)
    block = triton.next_power_of_2(width)
    _decode[(rows, kv_heads, splits)](
        *(qkv, keys, values, table, slots, positions, parts, maxima, sums),
        *(width**-0.5 * LOG2_E, table.stride(0), qkv.stride(0)),
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, GROUP_BLOCK=max(16, triton.next_power_of_2(heads // kv_heads)),
        WIDTH_BLOCK=max(16, block), PAGE=page, KEYS=KEYS, SPLITS=splits,
        num_warps=2, num_stages=3 if keys.element_size() == 2 else 1,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * heads,)](parts, maxima, sums, out, WIDTH=width, WIDTH_BLOCK=block, SPLITS=splits, num_warps=1)
    return out


@triton.jit
def _prefill(
    qkv, keys, values, table, slots, positions, blocks, out, scale, table_stride, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first = tl.load(blocks + 2 * tl.program_id(0)).to(tl.int64)
    count = tl.load(blocks + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    slot = tl.load(slots + first).to(tl.int64)
    start_position = tl.load(positions + first).to(tl.int32)

    index = tl.arange(0, QUERIES)
    lane = tl.arange(0, WIDTH_BLOCK)
    column = tl.arange(0, KEYS)
    here = (index < count)[:, None] & (lane < WIDTH)[None, :]
    token = first + index
    query = tl.load(qkv + token[:, None] * qkv_stride + head * WIDTH + lane[None, :], mask=here, other=0.0)
    position = start_position + index
    pages = table + slot * table_stride
    tile = column[:, None] * WIDTH + lane[None, :]

    best = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH_BLOCK], tl.float32)
    end = (start_position + count).to(tl.int32)
    for start in range(0, end, KEYS):
        place = start + column
        inside = (place < end)[:, None] & (lane < WIDTH)[None, :]
        page = tl.load(pages + start // PAGE).to(tl.int64)
        home = ((page * KV_HEADS + kv_head) * PAGE + start % PAGE) * WIDTH
        key = tl.load(keys + home + tile, mask=inside, other=0.0)
        seen = place[None, :] <= position[:, None]
        score = tl.where(seen, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, -1e30)
        new_best = tl.maximum(best, tl.max(score, axis=1))
        shrink = tl.exp2(best - new_best)
        weight = tl.where(seen, tl.exp2(score - new_best[:, None]), 0.0)
        value = tl.load(values + home + tile, mask=inside, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weight, axis=1)
        best = new_best
    mixed = mixed / total[:, None]
    tl.store(out + (token[:, None] * HEADS + head) * WIDTH + lane[None, :], mixed.to(out.dtype.element_ty), mask=here)


def prefill_attention(
    qkv: Tensor,  # [tokens, (heads + 2 kv_heads) * width], queries rotated; sequences end to end
    keys: Tensor,  # [pages, kv_heads, page, width], the tokens' own keys already in place
    values: Tensor,
    table: Tensor,  # [slots, pages per slot] int
    slots: Tensor,  # [tokens]
    positions: Tensor,  # [tokens], consecutive within a sequence
    blocks: Tensor,  # [blocks, 2] int: first token and number of tokens (at most QUERIES) of each block of queries
    *,
    heads: int,
) -> Tensor:  # [tokens, heads * width]
    """Let each token attend to its slot, up to itself."""
    _, kv_heads, page, width = keys.shape
    assert page % KEYS == 0, f"pages of {page} tokens are not a multiple of KEYS={KEYS}"
    out = qkv.new_empty(len(qkv), heads * width)
    _prefill[(len(blocks), heads)](
        *(qkv, keys, values, table, slots, positions, blocks, out),
        *(width**-0.5 * LOG2_E, table.stride(0), qkv.stride(0)),
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, WIDTH_BLOCK=max(16, triton.next_power_of_2(width)),
        QUERIES=QUERIES, PAGE=page, KEYS=KEYS,
        num_warps=4, num_stages=2 if keys.element_size() == 2 else 1,
    )  # fmt: skip
    return out
