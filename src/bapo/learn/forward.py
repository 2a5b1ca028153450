"""Two ways to run a transformers model on the same flat batch.

    padded    one row per sequence, filled up to the longest, with an attention mask. Works everywhere and is the
              reference: CPU, float32, any model.
    packed    one row for all sequences, as they lie in the batch. Positions start again at 0 with each sequence;
              attention gets the offsets and keeps sequences apart (FlashAttention for variable lengths). Needs no
              padding and no mask, but CUDA and float16 or bfloat16.

Both give the hidden state at every place. `can_pack` finds out once whether a model can be packed, by running both ways
on two short sequences. Models with another kind of attention (soft-capping, sinks, state besides keys and values) are
padded.

The packed way needs another attention function. It is set for the duration of a pass, and the model's own function is
put back afterwards, because the sampler runs the same model. Activation checkpointing and compilation are also set per
pass. So are the fused layers, where a packed model has them (`fused/layer.py`); they need no attention function. With
activation checkpointing each layer keeps only its input and runs again in the backward pass, with the same attention
function as the first time. transformers has its own switch for this, but it works in training mode only, and
the learner stays in eval mode.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from bapo.types import TokenBatch

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]
VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn is not None else frozenset()
"""The options that this version of torch accepts."""

PACKED_ATTENTION = "bapo_packed"
AGREEMENT = 0.05
"""Largest relative difference between the two ways. 16-bit rounding causes about 0.02, wrong attention over 0.1."""


def hidden_states(
    model: Any,
    batch: TokenBatch,
    *,
    packed: bool,
    recompute: bool = False,
    forwards: Sequence[Callable[..., Any]] | None = None,
) -> Tensor:
    """The last hidden state at every place of the batch, [places, width].

    `recompute`: layers keep only their inputs for the backward pass. `forwards`: the forward pass of each layer, if not
    its own (`compiled_layers`, `fused/layer.py`).
    """
    layers = layers_of(model)
    forwards = list(forwards) if forwards is not None else [layer.forward for layer in layers]
    if recompute and torch.is_grad_enabled():
        forwards = [recomputed(forward, model) for forward in forwards]
    with exchanged(layers, forwards):
        return _packed(model, batch) if packed else _padded(model, batch)


def _padded(model: Any, batch: TokenBatch) -> Tensor:
    rows = len(batch.offsets) - 1
    lengths = batch.offsets.diff()
    row_of_place = torch.arange(rows, device=lengths.device).repeat_interleave(
        lengths, output_size=len(batch.input_ids)
    )
    index = row_of_place * batch.longest + batch.position_ids
    input_ids = batch.input_ids.new_zeros(rows * batch.longest)
    attention_mask = torch.zeros_like(input_ids)
    input_ids[index] = batch.input_ids
    attention_mask[index] = 1
    output = model.base_model(
        input_ids=input_ids.view(rows, -1), attention_mask=attention_mask.view(rows, -1), use_cache=False
    )
    states: Tensor = output.last_hidden_state
    return states.flatten(0, 1).index_select(0, index)


def _packed(model: Any, batch: TokenBatch) -> Tensor:
    with attention(model, PACKED_ATTENTION):
        output = model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            cu_seq_lens_q=batch.offsets,
            cu_seq_lens_k=batch.offsets,
            max_length_q=batch.longest,
            max_length_k=batch.longest,
        )
    states: Tensor = output.last_hidden_state
    return states[0]


def can_pack(model: Any, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> bool:
    """Whether packed passes are possible and agree with padded ones. On a GPU, a warning says why they are not.

    `device`, `dtype`: where and in which precision it will run, if not as it is now.
    """
    device, dtype = device or model.device, dtype or model.dtype
    if device.type != "cuda":
        return False
    reason = None
    if dtype not in (torch.float16, torch.bfloat16):
        reason = f"its weights are {dtype}, but FlashAttention needs 16-bit weights"
    elif varlen_attn is None:
        reason = "this version of torch has no attention for variable lengths; use 2.10 or later"
    else:
        reason = disagreement(model)
    if reason is not None:
        logging.getLogger(__name__).warning(
            "%s is trained on padded batches: %s. Results are the same, but training needs more memory and time.",
            type(model).__name__,
            reason,
        )
    return reason is None


@torch.no_grad()
def disagreement(model: Any) -> str | None:
    """What is wrong with the packed way; None if both ways give the same states for two short sequences."""
    batch = _two_short_sequences(model)
    padded = _padded(model, batch).float()
    try:
        packed = _packed(model, batch).float()
    except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"its attention function cannot be replaced ({str(error).splitlines()[0]})"
    difference = float((packed - padded).norm() / padded.norm())
    if difference <= AGREEMENT:
        return None
    return f"packed hidden states differ from padded ones by {difference:.2g}"


def _two_short_sequences(model: Any) -> TokenBatch:
    position_ids = torch.cat([torch.arange(7), torch.arange(5)]).to(model.device)
    ids = torch.arange(12, device=model.device) % model.config.get_text_config().vocab_size
    offsets = torch.tensor([0, 7, 12], dtype=torch.int32, device=model.device)
    nothing = ids.new_zeros(0)
    return TokenBatch(ids, position_ids, offsets, 7, *[nothing] * 7)


@torch.no_grad()
def can_fuse(model: Any) -> bool:
    """Whether the layers of a model that can be packed can be replaced by the fused ones, with the same states."""
    if importlib.util.find_spec("triton") is None:
        return False
    from bapo.learn.fused.layer import fused_forwards, try_attention, unsupported

    if unsupported(model) is not None or model.device.type != "cuda":
        return False
    batch = _two_short_sequences(model)
    padded = _padded(model, batch).float()
    try:
        try_attention(model)
        fused = hidden_states(model, batch, packed=True, forwards=fused_forwards(model, batch)).float()
    except Exception as error:  # Triton has many, such as a GPU with too little shared memory
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    else:
        difference = float((fused - padded).norm() / padded.norm())
        if difference <= AGREEMENT:
            return True
        reason = f"its states differ from those of transformers by {difference:.2g}"
    logging.getLogger(__name__).warning(
        "%s is trained with transformers' own layers, which are slower: %s.", type(model).__name__, reason
    )
    return False


@contextmanager
def attention(model: Any, implementation: str) -> Iterator[None]:
    """Inside, the model's layers use this attention function. They look it up at every call."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def packed_attention(
    module: Any,
    query: Tensor,  # [1, heads, places, width]
    key: Tensor,  # [1, key heads, places, width]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:  # [1, places, heads, width]
    """Causal attention within each sequence, with the signature that transformers calls.

    o_i = sum_j softmax_j(scaling q_i k_j) v_j,   start(i) <= j <= i
    """
    if softcap is not None or s_aux is not None or attention_mask is not None or query.shape[-1] != value.shape[-1]:
        raise ValueError("packing does not support soft-capping, attention sinks, masks or values of another width")
    if sliding_window is not None:
        raise ValueError("it has a sliding window, and FlashAttention's backward pass gives NaN for some windows")
    if query.shape[-1] % 8:
        raise ValueError(f"FlashAttention needs heads whose width is a multiple of 8, not {query.shape[-1]}")
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("the model did not pass the offsets of the sequences on to its layers")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [places, heads, width]
    attend = attend_at_once if query.is_cuda else attend_one_by_one
    return attend(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None


def attend_at_once(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scaling: float) -> Tensor:
    """Attend within all sequences in one call of FlashAttention, making up for options the installed version lacks."""
    assert varlen_attn is not None
    heads, width = query.shape[1:]
    options: dict[str, Any] = {}
    if key.shape[1] != heads:
        if "enable_gqa" in VARLEN_OPTIONS:
            options["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if "scale" in VARLEN_OPTIONS:
        options["scale"] = scaling
    elif not math.isclose(scaling, width**-0.5):
        query = query * (scaling * width**0.5)
    causal = {"window_size": (-1, 0)} if "window_size" in VARLEN_OPTIONS else {"is_causal": True}
    options |= causal  # a window is (tokens to the left, tokens to the right), -1 for all
    output: Any = varlen_attn(query, key, value, offsets, offsets, longest, longest, **options)
    return cast(Tensor, output)


def attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scaling: float
) -> Tensor:
    """The same in plain torch, one sequence at a time: for CPU, and as a reference."""
    del longest
    outputs = []
    repeats = query.shape[1] // key.shape[1]
    ends = offsets.tolist()
    for begin, end in pairwise(ends):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(repeats, dim=0) for x in (k, v))
        output = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scaling)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def layers_of(model: Any) -> list[GradientCheckpointingLayer]:
    """The layers that activation checkpointing runs again."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compiled_layers(model: Any) -> list[Callable[..., Any]]:
    """The forward pass of each layer, compiled at its first call; one compilation serves all layers and lengths."""
    return [torch.compile(layer.forward, dynamic=True) for layer in layers_of(model)]


def recomputed(forward: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """A layer's forward pass that keeps only its inputs and runs again in the backward pass."""
    contexts = partial(_same_attention_again, model)
    # Nothing here is random, so there is no generator state to keep.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


@contextmanager
def exchanged(layers: Sequence[Any], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Inside, each layer has this forward pass."""
    before = [vars(layer).get("forward") for layer in layers]
    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = forward
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own


def _same_attention_again(model: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first run and of the second one, which comes after the old attention was put back."""
    return nullcontext(), attention(model, model.config.get_text_config()._attn_implementation)


def allow_deterministic_products() -> None:
    """Set the variable that deterministic matrix products need. Some versions of torch read it only once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Inside, CUDA operations add in a fixed order. FlashAttention's backward pass would not, by default.

    The switch holds for the whole process, so it is on no longer than needed. An operation without a deterministic form
    raises an error.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it helps debugging only, and costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filling
