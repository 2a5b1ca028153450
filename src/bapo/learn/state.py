"""What a checkpoint keeps of a learner: the weights that training changes, and the optimizer's state.

Every rank writes its shards, which are rows of the weights, into a safetensors file of its own. Laid one after the
other in the order of ranks, they are whole. A learner that is alone is one rank. So any number of ranks goes on from
what any other number wrote. Nothing is pickled, neither in files nor between ranks. Tensors have the names of
parameters, so a checkpoint does not depend on their order:

    weight.NAME                     the float32 weight (the master, where passes run in 16 bits)
    exp_avg.NAME, exp_avg_sq.NAME   AdamW's moments, and step.NAME, how many there were; absent before the first update
    buffer.NAME                     buffers that the model keeps
    reference.NAME                  the weight of a reference that moves (`reference.py`)
    entropy                         the weight of a bonus with a target, and the entropy of the last update
    drift                           what the brake knows of the last update, if it goes by that one
    frozen.fingerprint              of the weights that are not trained, if there are any

If most weights are frozen (low-rank additions), the frozen ones are read again from model.path. Their fingerprint shows
that additions are not applied to a model other than the one they were trained on.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from bapo.learn.health import check_state, mine
from bapo.learn.optimizer import Optimizer
from bapo.learn.ranks import Ranks, from_all_texts, summed

FINGERPRINT = "frozen.fingerprint"
_LARGE_PRIME = 1_000_003


def save_state(directory: Path, model: Any, optimizer: Optimizer, noted: dict[str, Tensor], ranks: Ranks) -> None:
    """Write this rank's shards, if everything is finite. `noted`: what else to keep, by name.

    All ranks must call this; an error on one of them is raised on all. The first rank also writes what all have whole.
    """
    state = _state(model, optimizer, ranks) | noted
    check_state(state, ranks)
    rank = 0 if ranks is None else ranks.rank()
    own = {name: mine(tensor) for name, tensor in state.items() if rank == 0 or isinstance(tensor, DTensor)}
    own = {name: shard for name, shard in own.items() if rank == 0 or shard.numel()}
    # All weights may have the same step, as one tensor.
    shards = {name: shard.contiguous() if shard.dim() else shard.clone() for name, shard in own.items()}
    file = directory / f"shard-{rank + 1:05d}.safetensors"
    _together(lambda: save_file(shards, file), ranks, OSError, f"write its shards to {directory}")


def load_state(directory: Path, model: Any, optimizer: Optimizer, noted: dict[str, Tensor], ranks: Ranks) -> None:
    """Restore what ranks wrote, however many there were. KeyError if it belongs to another model."""
    with ExitStack() as opened:
        held: dict[str, list[Any]] = {}  # the files that have a part of each tensor
        for path in sorted(directory.glob("shard-*.safetensors")):
            file = opened.enter_context(safe_open(path, "pt"))
            for name in file.keys():  # noqa: SIM118
                held.setdefault(name, []).append(file)
        _start_moments(optimizer, any(name.startswith("exp_avg.") for name in held))
        wanted = _state(model, optimizer, ranks) | noted
        unknown, missing = sorted(held.keys() - wanted.keys()), sorted(wanted.keys() - held.keys())
        if unknown or missing:
            raise KeyError(f"the weights {unknown} are unknown and {missing} are missing")
        frozen = wanted.get(FINGERPRINT, torch.zeros(0)).clone()

        def fill() -> None:
            for name, place in wanted.items():
                _fill(name, place, held[name])

        _together(fill, ranks, KeyError, f"read its shards from {directory}")
    if len(frozen) and not torch.equal(wanted[FINGERPRINT], frozen):
        raise KeyError("the frozen weights below the trained ones have changed: model.path holds another model now")
    optimizer.round()


@torch.no_grad()
def _fill(name: str, place: Tensor, files: list[Any]) -> None:
    """Copy a tensor to its place, or the rows of it that are this rank's to its shard."""
    if place.dim() == 0:
        place.copy_(files[0].get_tensor(name))
        return
    pieces = [file.get_slice(name) for file in files]
    shapes = [piece.get_shape() for piece in pieces]
    if [sum(rows for rows, *_ in shapes), *shapes[0][1:]] != list(place.shape):
        raise KeyError(f"the weight {name} has another shape")
    first, own, begin = _begin(place), mine(place), 0
    for piece, (rows, *_) in zip(pieces, shapes, strict=True):
        low, high = max(first, begin), min(first + len(own), begin + rows)
        if low < high:
            own[low - first : high - first].copy_(piece[low - begin : high - begin])
        begin += rows


def _begin(tensor: Tensor) -> int:
    """The row at which this rank's shard of a tensor begins. FSDP cuts rows into equal parts; the last may be less."""
    if not isinstance(tensor, DTensor):
        return 0
    assert tensor.placements == (Shard(0),), "FSDP cuts weights by rows"
    mesh = tensor.device_mesh
    return min(len(tensor), mesh.get_local_rank() * -(-len(tensor) // mesh.size()))


def frozen_weights(model: Any) -> dict[str, Tensor]:
    """The weights that training does not change."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}


@torch.no_grad()
def fingerprint(weights: Iterable[Tensor], ranks: Ranks = None) -> int:
    """One integer from all their bits; of shards, from those of all ranks, which must call this together.

    Integer sums wrap around, so device, order of addition and number of shards do not matter.
    """
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in weights]
    total = 0
    for count in summed(torch.stack(sums), ranks).tolist() if sums else []:
        total = (total * _LARGE_PRIME + count) % 2**63
    return total


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor, or of this rank's shard of it, as integers."""
    own = mine(tensor).contiguous()
    return own.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[own.element_size()])


def _together(work: Callable[[], None], ranks: Ranks, kind: type[Exception], what: str) -> None:
    """Let every rank do its part. An error of this kind is raised on all of them if one cannot."""
    if ranks is None:
        work()
        return
    failure, told = None, ""
    try:
        work()
    except Exception as error:
        failure, told = error, f"{type(error).__name__}: {error}"
    for rank, text in enumerate(from_all_texts(json.dumps(told).encode(), ranks)):
        if theirs := json.loads(text):
            raise kind(f"rank {rank} could not {what}: {theirs}") from failure


def _state(model: Any, optimizer: Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """Everything that must be saved, by name. These are not copies."""
    state: dict[str, Tensor] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for weight, master in zip(optimizer.weights, optimizer.masters, strict=True):
        name = names[id(weight)]
        state[f"weight.{name}"] = master.detach()
        state |= {f"{key}.{name}": value for key, value in optimizer.moments(master).items()}
    buffers = dict(model.named_buffers())
    state |= {f"buffer.{name}": buffers[name] for name in model.state_dict() if name in buffers}
    if frozen := frozen_weights(model):
        state[FINGERPRINT] = torch.tensor([fingerprint(frozen.values(), ranks)])
    return state


def _start_moments(optimizer: Optimizer, some: bool) -> None:
    optimizer.forget_moments()
    for master in optimizer.masters if some else ():
        optimizer.make_moments(master)
