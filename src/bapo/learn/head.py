"""The model as the learner runs it: everything that reads its weights in a pass happens inside `WholeModel.forward`.

A sharded model has its weights only while a module is called (`fsdp.py`): those of a layer while the layer runs, and
the rest, embedding, last norm and head, while the whole runs. So no other code may read them.

The output head takes hidden states in and gives log-probs and entropies of given tokens out, without full logits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear

from bapo.core.logprobs import CHUNK_LOGITS, token_logprobs
from bapo.core.wide import wide_linear
from bapo.learn.forward import can_fuse, compiled_layers, deterministic, hidden_states, layers_of
from bapo.learn.learner_settings import LearnerSettings
from bapo.types import TokenBatch

Read = TypeVar("Read")


class Predicted(NamedTuple):
    """What the head predicts from each state."""

    logprobs: Tensor  # [tokens] log-prob of the target
    entropies: Tensor  # [tokens] entropy of the distribution
    best: Tensor | None = None  # [tokens] the most likely token, if asked for


class TokenHead(Module):
    """A model's output head. It owns no weights: the linear layer belongs to the model."""

    def __init__(self, linear: Linear, *, float32: bool = False) -> None:
        """`float32`: do not round the logits of 16-bit weights to 16 bits."""
        super().__init__()
        self.linear, self.float32 = linear, float32

    def forward(
        self,
        states: Tensor,  # [tokens, width] the state that predicts each target
        targets: Tensor,  # [tokens]
        *,
        temperature: float = 1.0,
        best: bool = False,
    ) -> Predicted:
        """Log-prob of each target and entropy of its distribution, at this temperature."""
        weight, bias = self.linear.weight, self.linear.bias
        logprobs, entropies = token_logprobs(
            states, weight, targets, bias=bias, temperature=temperature, float32_logits=self.float32
        )
        return Predicted(logprobs, entropies, self._most_likely(states) if best else None)

    def next_logprobs(self, states: Tensor, *, temperature: float) -> Tensor:  # [states, vocabulary] float32
        """Log-prob of every token after each state, at this temperature."""
        return torch.log_softmax(self._logits(states).float() / temperature, dim=-1)

    def _most_likely(self, states: Tensor) -> Tensor:
        """The most likely token after each state, [tokens]. Logits are held for one chunk of states at a time."""
        chunk = max(1, CHUNK_LOGITS // self.linear.weight.shape[0])
        return torch.cat([self._logits(part).argmax(1) for part in torch.split(states, chunk)])

    def _logits(self, states: Tensor) -> Tensor:
        multiply = wide_linear if self.float32 else linear
        return multiply(states, self.linear.weight, self.linear.bias)


@torch.no_grad()
def head_of(model: Any, *, float32: bool = False) -> TokenHead:
    """The model's head, after a check that nothing else stands between hidden states and logits."""
    config = model.config.get_text_config()
    ids = torch.arange(4, device=model.device)[None] % config.vocab_size
    head = model.get_output_embeddings()
    if type(head) is not Linear:
        raise ValueError(
            f"the output head of {type(model).__name__} is a {type(head).__name__}, but the learner multiplies by a "
            "plain Linear and would leave out what that adds. Keep adapters off the head."
        )
    cap = getattr(config, "final_logit_softcapping", None)  # the comparison below would miss it
    if cap is not None:
        raise ValueError(
            f"{type(model).__name__} soft-caps its logits after the output head (final_logit_softcapping={cap:g}), so "
            "the learner's log-probs would differ from the sampler's. Use a model without soft-capping: Gemma 2 has "
            "it, Gemma 3 does not."
        )
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    ours = head(states).float()
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output head (scaling or soft-capping), by up to "
            f"{float((ours - theirs).abs().max()):.3g}, so the learner's log-probs would differ from the sampler's. "
            "Use a model without logit scaling or soft-capping."
        )
    return TokenHead(head, float32=float32)


class WholeModel(Module):
    """A model as the learner runs it."""

    def __init__(self, model: Any, settings: LearnerSettings, *, packed: bool) -> None:
        """`packed`: whether passes do without padding (`forward.py`)."""
        super().__init__()
        _check_layers(model, settings)
        self.model = model.eval()
        self.head = head_of(model, float32=settings.float32_head)
        self.packed = packed
        self.recompute = settings.activation_checkpointing
        self.compiled = compiled_layers(model) if settings.compile else None
        self.fused = packed and not settings.compile and can_fuse(model)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    def forward(self, batch: TokenBatch, read: Callable[[Tensor], Read]) -> Read:
        """What `read` makes of the states that predict the response tokens, [tokens, width]."""
        with deterministic(self.device):  # compiled layers must see the same switch as in the backward pass
            states = hidden_states(
                self.model, batch, packed=self.packed, recompute=self.recompute, forwards=self._forwards(batch)
            )
        return read(states.index_select(0, batch.predicts))

    def _forwards(self, batch: TokenBatch) -> Sequence[Callable[..., Any]] | None:
        """The forward passes of the layers, where they are not transformers' own."""
        if self.fused:
            from bapo.learn.fused.layer import fused_forwards  # needs Triton

            return fused_forwards(self.model, batch)
        return self.compiled


def _check_layers(model: Any, settings: LearnerSettings) -> None:
    """Refuse settings that need layers of transformers if the model has none."""
    if layers_of(model):
        return
    name = type(model).__name__
    if settings.activation_checkpointing:
        raise ValueError(
            f"learn.activation_checkpointing=True, but {name} has no layers that transformers can checkpoint. Set it "
            "to False and lower learn.micro_tokens to save memory."
        )
    if settings.compile:
        raise ValueError(f"learn.compile=True, but {name} has no layers to compile. Set it to False.")
