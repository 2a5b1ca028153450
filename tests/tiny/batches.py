"""Flat batches of random sequences."""

from dataclasses import replace

import torch

from bapo.types import TokenBatch
from tests.tiny.models import VOCABULARY


def flat_batch(lengths, seed=0):
    """Random sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return batch_of([torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths], seed)


def on_cuda(batch):
    """The same batch on the GPU."""
    return replace(batch, **{name: x.cuda() for name, x in vars(batch).items() if torch.is_tensor(x)})


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
        uses=torch.zeros(tokens, dtype=torch.int64),
    )
