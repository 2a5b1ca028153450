"""Causal attention within each of many sequences that lie end to end, and its gradient.

    o_i = sum_j p_ij v_j,   p_i = softmax_j(scale q_i k_j),   start(i) <= j <= i

The forward pass keeps one number per query and head, the logarithm of the softmax's denominator, and the backward pass
computes p again from it. With D_i = do_i . o_i:

    ds_ij = p_ij (do_i . v_j - D_i)
    dv_j = sum_i p_ij do_i,   dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i

Two kernels share the backward pass: a program of the first owns a block of queries and sums over keys, a program of the
second owns a block of keys and sums over queries and over the query heads that share them. This costs two of seven
products more than one kernel that adds dq in whatever order its programs end, and gives the same bits every time.

Blocks never cross sequences (`blocks_of`). Those with the most work come first, so that none is left for the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """How a kernel cuts its work."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """How each kernel cuts its work. Queries are a multiple of keys in the first two, keys of queries in the last."""

    forward: Tile
    queries: Tile
    keys: Tile


LONG = Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 3))
SHORT = Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 3))
"""What was fastest on an H200 for heads of 64 and 128, with sequences of 8,192 and of 576 places."""
LONG_FROM = 2048
"""Places in the longest sequence."""


class Blocks(NamedTuple):
    """Where the blocks of a batch are."""

    table: Tensor  # [at most so many blocks, 3] int32: first place, and begin and end of its sequence
    size: int


def blocks_of(offsets: Tensor, places: int, size: int, *, longest_last: bool) -> Blocks:
    """Cut every sequence into blocks of `size` places. Blocks past the last sequence have no places.

    Those late in their sequence come first or, with `longest_last`, those early in it.
    """
    lengths = offsets.diff()
    counts = (lengths + (size - 1)) // size
    ends = counts.cumsum(0)
    index = torch.arange(places // size + len(lengths), device=offsets.device)
    sequence = torch.searchsorted(ends, index, right=True)
    inside = sequence < len(lengths)
    sequence = sequence.clamp(max=len(lengths) - 1)
    begin, end = offsets[sequence], offsets[sequence + 1]
    first = begin + (index - (ends - counts)[sequence]) * size
    first, begin, end = (torch.where(inside, x, 0) for x in (first, begin, end))
    work = end - first if longest_last else first + size - begin
    order = torch.where(inside, work, -1).argsort(descending=True, stable=True)
    return Blocks(torch.stack([first, begin, end], dim=1)[order].to(torch.int32).contiguous(), size)


class Plan(NamedTuple):
    """How a batch is cut for each kernel: made once per pass, used by every layer."""

    tiles: Tiles
    forward: Blocks
    queries: Blocks
    keys: Blocks


def plan_of(offsets: Tensor, places: int, longest: int) -> Plan:
    """`offsets`: where sequences begin, and the end of the last, [sequences + 1]. `longest`: the most places of one."""
    tiles = LONG if longest >= LONG_FROM else SHORT
    forward = blocks_of(offsets, places, tiles.forward.queries, longest_last=False)
    same = tiles.queries.queries == tiles.forward.queries
    queries = forward if same else blocks_of(offsets, places, tiles.queries.queries, longest_last=False)
    return Plan(tiles, forward, queries, blocks_of(offsets, places, tiles.keys.keys, longest_last=True))


@triton.jit
def _mix(query, keys, values, place, start, end, scale, best, total, mixed, MASKED: tl.constexpr, KEYS: tl.constexpr,
         key_stride, value_stride):  # fmt: skip
    """Let queries attend to one more block of keys."""
    source = start + tl.arange(0, KEYS)
    row = source.to(tl.int64)[:, None]
    if MASKED:
        key = tl.load(keys + row * key_stride, mask=(source < end)[:, None], other=0.0)
        value = tl.load(values + row * value_stride, mask=(source < end)[:, None], other=0.0)
    else:
        key = tl.load(keys + row * key_stride)
        value = tl.load(values + row * value_stride)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        score = tl.where(source[None, :] <= place[:, None], score, -1e30)
    new_best = tl.maximum(best, tl.max(score, axis=1))
    shrink = tl.exp2(best - new_best)
    weight = tl.exp2(score - new_best[:, None])
    mixed = tl.dot(weight.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return new_best, total * shrink + tl.sum(weight, axis=1), mixed


@triton.jit
def _forward(
    queries, keys, values, out, normalizers, blocks, scale, query_stride, key_stride, value_stride, places,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    first = tl.load(blocks + 3 * tl.program_id(1))
    begin = tl.load(blocks + 3 * tl.program_id(1) + 1)
    end = tl.load(blocks + 3 * tl.program_id(1) + 2)
    if first >= end:
        return
    lane = tl.arange(0, WIDTH)[None, :]
    place = first + tl.arange(0, QUERIES)
    here = (place < end)[:, None]
    row = place.to(tl.int64)
    query = tl.load(queries + row[:, None] * query_stride + head * WIDTH + lane, mask=here, other=0.0)
    key_base = keys + (head // GROUP) * WIDTH + lane
    value_base = values + (head // GROUP) * WIDTH + lane
    best = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(begin, first, KEYS):  # whole blocks that every query sees
        best, total, mixed = _mix(
            query, key_base, value_base, place, start, end, scale, best, total, mixed,
            False, KEYS, key_stride, value_stride,
        )  # fmt: skip
    for start in range(first, tl.minimum(first + QUERIES, end), KEYS):  # around the diagonal
        best, total, mixed = _mix(
            query, key_base, value_base, place, start, end, scale, best, total, mixed,
            True, KEYS, key_stride, value_stride,
        )  # fmt: skip
    mixed = mixed / total[:, None]
    tl.store(out + (row[:, None] * HEADS + head) * WIDTH + lane, mixed.to(out.dtype.element_ty), mask=here)
    tl.store(normalizers + head.to(tl.int64) * places + row, best + tl.log2(total), mask=place < end)


def attend(
    queries: Tensor,  # [places, heads * width], rows may lie apart
    keys: Tensor,  # [places, key heads * width]
    values: Tensor,  # the same
    plan: Plan,
    *,
    width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [places, heads * width], [heads, places] float32
    """The mixed values, and the base-2 logarithm of each softmax's denominator."""
    places, heads, group = _sizes(queries, keys, width)
    out = queries.new_empty(places, heads * width)
    normalizers = torch.empty(heads, places, dtype=torch.float32, device=queries.device)
    tile, blocks = plan.tiles.forward, plan.forward
    _forward[(heads, len(blocks.table))](
        *(queries, keys, values, out, normalizers, blocks.table, scale * LOG2_E),
        *(queries.stride(0), keys.stride(0), values.stride(0), places),
        HEADS=heads, GROUP=group, WIDTH=width, QUERIES=tile.queries, KEYS=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, normalizers


@triton.jit
def _add_to_query(query, pull, dot, normalizer, keys, values, place, start, end, log_scale, total,
                  MASKED: tl.constexpr, KEYS: tl.constexpr, key_stride, value_stride):  # fmt: skip
    """Add what one block of keys contributes to the gradient of queries."""
    source = start + tl.arange(0, KEYS)
    row = source.to(tl.int64)[:, None]
    if MASKED:
        key = tl.load(keys + row * key_stride, mask=(source < end)[:, None], other=0.0)
        value = tl.load(values + row * value_stride, mask=(source < end)[:, None], other=0.0)
    else:
        key = tl.load(keys + row * key_stride)
        value = tl.load(values + row * value_stride)
    weight = tl.exp2(tl.dot(query, tl.trans(key), input_precision="ieee") * log_scale - normalizer[:, None])
    if MASKED:
        weight = tl.where(source[None, :] <= place[:, None], weight, 0.0)
    change = weight * (tl.dot(pull, tl.trans(value), input_precision="ieee") - dot[:, None])
    return tl.dot(change.to(key.dtype), key, total, input_precision="ieee")


@triton.jit
def _query_gradient(
    queries, keys, values, out, gradient, normalizers, dots, query_gradient, blocks,
    scale, log_scale, query_stride, key_stride, value_stride, gradient_stride, places,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    first = tl.load(blocks + 3 * tl.program_id(1))
    begin = tl.load(blocks + 3 * tl.program_id(1) + 1)
    end = tl.load(blocks + 3 * tl.program_id(1) + 2)
    if first >= end:
        return
    lane = tl.arange(0, WIDTH)[None, :]
    place = first + tl.arange(0, QUERIES)
    here = (place < end)[:, None]
    row = place.to(tl.int64)
    query = tl.load(queries + row[:, None] * query_stride + head * WIDTH + lane, mask=here, other=0.0)
    own = (row[:, None] * HEADS + head) * WIDTH + lane
    pull = tl.load(gradient + own, mask=here, other=0.0)
    dot = tl.sum(pull.to(tl.float32) * tl.load(out + own, mask=here, other=0.0).to(tl.float32), axis=1)
    entry = head.to(tl.int64) * places + row
    tl.store(dots + entry, dot, mask=place < end)
    normalizer = tl.load(normalizers + entry, mask=place < end, other=0.0)
    key_base = keys + (head // GROUP) * WIDTH + lane
    value_base = values + (head // GROUP) * WIDTH + lane
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(begin, first, KEYS):
        total = _add_to_query(
            query, pull, dot, normalizer, key_base, value_base, place, start, end, log_scale, total,
            False, KEYS, key_stride, value_stride,
        )  # fmt: skip
    for start in range(first, tl.minimum(first + QUERIES, end), KEYS):
        total = _add_to_query(
            query, pull, dot, normalizer, key_base, value_base, place, start, end, log_scale, total,
            True, KEYS, key_stride, value_stride,
        )  # fmt: skip
    target = query_gradient + row[:, None] * gradient_stride + head * WIDTH + lane
    tl.store(target, (total * scale).to(query_gradient.dtype.element_ty), mask=here)


@triton.jit
def _add_to_keys(key, value, queries, pulls, normalizers, dots, place, start, end, log_scale, key_total, value_total,
                 MASKED: tl.constexpr, QUERIES: tl.constexpr, query_stride, pull_stride):  # fmt: skip
    """Add what one block of queries contributes to the gradients of keys and values."""
    asking = start + tl.arange(0, QUERIES)
    row = asking.to(tl.int64)
    if MASKED:
        exists = asking < end
        query = tl.load(queries + row[:, None] * query_stride, mask=exists[:, None], other=0.0)
        pull = tl.load(pulls + row[:, None] * pull_stride, mask=exists[:, None], other=0.0)
        normalizer = tl.load(normalizers + row, mask=exists, other=0.0)
        dot = tl.load(dots + row, mask=exists, other=0.0)
    else:
        query = tl.load(queries + row[:, None] * query_stride)
        pull = tl.load(pulls + row[:, None] * pull_stride)
        normalizer = tl.load(normalizers + row)
        dot = tl.load(dots + row)
    weight = tl.exp2(tl.dot(key, tl.trans(query), input_precision="ieee") * log_scale - normalizer[None, :])
    if MASKED:
        weight = tl.where((place[:, None] <= asking[None, :]) & (asking < end)[None, :], weight, 0.0)
    value_total = tl.dot(weight.to(pull.dtype), pull, value_total, input_precision="ieee")
    change = weight * (tl.dot(value, tl.trans(pull), input_precision="ieee") - dot[None, :])
    return tl.dot(change.to(query.dtype), query, key_total, input_precision="ieee"), value_total


@triton.jit
def _key_gradient(
    queries, keys, values, gradient, normalizers, dots, key_gradient, value_gradient, blocks,
    scale, log_scale, query_stride, key_stride, value_stride, gradient_stride, places,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    first = tl.load(blocks + 3 * tl.program_id(1))
    end = tl.load(blocks + 3 * tl.program_id(1) + 2)
    if first >= end:
        return
    lane = tl.arange(0, WIDTH)[None, :]
    place = first + tl.arange(0, KEYS)
    here = (place < end)[:, None]
    row = place.to(tl.int64)[:, None]
    key = tl.load(keys + row * key_stride + kv_head * WIDTH + lane, mask=here, other=0.0)
    value = tl.load(values + row * value_stride + kv_head * WIDTH + lane, mask=here, other=0.0)
    key_total = tl.zeros([KEYS, WIDTH], tl.float32)
    value_total = tl.zeros([KEYS, WIDTH], tl.float32)
    after = tl.minimum(first + KEYS, end)  # from here on, every query sees all keys of this block
    whole = after + (end - after) // QUERIES * QUERIES
    for member in range(GROUP):
        head = kv_head * GROUP + member
        query_base = queries + head * WIDTH + lane
        pull_base = gradient + head * WIDTH + lane
        entry = head.to(tl.int64) * places
        for start in range(first, after, QUERIES):  # around the diagonal
            key_total, value_total = _add_to_keys(
                key, value, query_base, pull_base, normalizers + entry, dots + entry, place, start, end, log_scale,
                key_total, value_total, True, QUERIES, query_stride, HEADS * WIDTH,
            )  # fmt: skip
        for start in range(after, whole, QUERIES):
            key_total, value_total = _add_to_keys(
                key, value, query_base, pull_base, normalizers + entry, dots + entry, place, start, end, log_scale,
                key_total, value_total, False, QUERIES, query_stride, HEADS * WIDTH,
            )  # fmt: skip
        for start in range(whole, end, QUERIES):  # the last queries, fewer than a block
            key_total, value_total = _add_to_keys(
                key, value, query_base, pull_base, normalizers + entry, dots + entry, place, start, end, log_scale,
                key_total, value_total, True, QUERIES, query_stride, HEADS * WIDTH,
            )  # fmt: skip
    dtype = key_gradient.dtype.element_ty
    target = row * gradient_stride + kv_head * WIDTH + lane
    tl.store(key_gradient + target, (key_total * scale).to(dtype), mask=here)
    tl.store(value_gradient + target, value_total.to(dtype), mask=here)


def attend_backward(
    gradient: Tensor,  # [places, heads * width], of the mixed values, contiguous
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,  # what `attend` returned
    normalizers: Tensor,
    plan: Plan,
    targets: tuple[Tensor, Tensor, Tensor],  # for the gradients of queries, keys and values; equal distance of rows
    *,
    width: int,
    scale: float,
) -> None:
    """Write the gradients of queries, keys and values into the targets."""
    places, heads, group = _sizes(queries, keys, width)
    query_target, key_target, value_target = targets
    assert query_target.stride(0) == key_target.stride(0) == value_target.stride(0)
    dots = torch.empty_like(normalizers)
    numbers = (
        *(scale, scale * LOG2_E, queries.stride(0), keys.stride(0), values.stride(0), query_target.stride(0), places),
    )
    tile, blocks = plan.tiles.queries, plan.queries
    _query_gradient[(heads, len(blocks.table))](
        *(queries, keys, values, out, gradient, normalizers, dots, query_target, blocks.table, *numbers),
        HEADS=heads, GROUP=group, WIDTH=width, QUERIES=tile.queries, KEYS=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile, blocks = plan.tiles.keys, plan.keys
    _key_gradient[(heads // group, len(blocks.table))](
        *(queries, keys, values, gradient, normalizers, dots, key_target, value_target, blocks.table, *numbers),
        HEADS=heads, GROUP=group, WIDTH=width, QUERIES=tile.queries, KEYS=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _sizes(queries: Tensor, keys: Tensor, width: int) -> tuple[int, int, int]:
    """Places, query heads, and query heads per key head."""
    places, columns = queries.shape
    return places, columns // width, columns // keys.shape[1]
