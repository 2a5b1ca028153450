"""The rotation of queries and keys on their way into the cache, in one launch. Norm and gate are in `core/kernels`.

Every intermediate is rounded to the model's dtype where transformers rounds it, so that a sampled token's log-prob
equals the learner's up to the order of sums inside matrix products and attention.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


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
    qkv,
    slots,
    positions,
    cos_table,
    sin_table,
    query_gain,
    key_gain,
    keys,
    values,
    table,
    eps,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
):
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
        qkv,
        slots,
        positions,
        cos,
        sin,
        query_gain,
        key_gain,
        keys,
        values,
        table,
        eps,
        table.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        HEADS_BLOCK=triton.next_power_of_2(heads),
        KV_BLOCK=triton.next_power_of_2(kv_heads),
        HALF_BLOCK=triton.next_power_of_2(width // 2),
        PAGE=page,
        NORM=gains is not None,
        num_warps=4,
    )
