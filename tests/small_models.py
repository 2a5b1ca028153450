"""Small models with attention that matters, and flat batches for them."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bapo.types import TokenBatch

SIZES = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # attention that matters: at 0.02 a leak between sequences would go unseen
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}


def windowed():
    """Its last two layers see three tokens: attention that is not packed."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    return Qwen2ForCausalLM(config).eval()


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def flat_batch(lengths, seed=0, vocabulary=30):
    """Random sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return batch_of([torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths], seed)


def batch_of(sequences, seed=0):
    """Every place but the first of each sequence is a response token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(x) for x in sequences])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    tokens = int((lengths - 1).sum())
    return TokenBatch(
        input_ids=torch.cat(sequences),
        position_ids=torch.cat([torch.arange(len(x)) for x in sequences]),
        offsets=offsets.int(),
        longest=int(lengths.max()),
        predicts=torch.cat(
            [torch.arange(end - len(x), end - 1) for x, end in zip(sequences, offsets[1:], strict=True)]
        ),
        targets=torch.cat([x[1:] for x in sequences]),
        sequence_ids=torch.arange(len(sequences)).repeat_interleave(lengths - 1),
        behavior_logprobs=-torch.rand(tokens, generator=generator) - 2,
        advantages=torch.randn(tokens, generator=generator),
        versions=torch.zeros(tokens, dtype=torch.int64),
    )
