"""What a checkpoint keeps of a learner: the weights that training changes, and the optimizer's state.

A learner that is alone writes two files: its weights, each tied weight once, and the tensors of its optimizer. If most
weights are frozen (low-rank additions), the frozen ones are read again from model.path. The checkpoint keeps a
fingerprint of them, so that additions are never applied to a model other than the one they were trained on.

A sharded learner writes torch's distributed checkpoints (DCP), which any number of ranks can read. Every rank writes
its shards into a safetensors file of its own, which also notes where each shard belongs. Nothing is pickled, neither in
files nor between ranks. Tensors have the names of parameters, so a checkpoint does not depend on their order:

    weight.NAME                     the float32 weight (the master, where passes run in 16 bits)
    exp_avg.NAME, exp_avg_sq.NAME   AdamW's moments, and step.NAME, how many there were; absent before the first update
    buffer.NAME                     buffers that the model keeps
    reference.NAME                  the weight of a reference that moves (`reference.py`)
    entropy                         the weight of a bonus with a target, and the entropy of the last update
    drift                           what the brake knows of the last update, if it goes by that one
    frozen.fingerprint              of the weights that are not trained, if there are any

A learner that is alone reads these files as well, and a sharded learner reads the two files of one that was alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor

from bapo.learn.health import check_state, mine
from bapo.learn.optimizer import Optimizer
from bapo.learn.ranks import Ranks, from_all_texts, summed

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
FINGERPRINT = "frozen.fingerprint"
CHANGED = "the frozen weights below the trained ones have changed: model.path holds another model now"
_LARGE_PRIME = 1_000_003


def save_state(directory: Path, model: Any, optimizer: Optimizer, noted: dict[str, Tensor]) -> None:
    """Write the two files of a learner that is alone, if everything is finite. `noted`: what else to keep, by name."""
    weights, others = trained_weights(model), optimizer.tensors() | noted
    check_state(weights | others)
    save_file(weights, directory / MODEL_FILE)
    save_file(others, directory / OPTIMIZER_FILE)


def load_state(directory: Path, model: Any, optimizer: Optimizer, noted: dict[str, Tensor], ranks: Ranks) -> None:
    """Restore what a learner wrote, on any number of ranks. KeyError if it belongs to another model."""
    if any(directory.glob("shard-*.safetensors")):
        load_sharded(directory, model, optimizer, noted, ranks)
    elif ranks is not None:
        _load_whole(directory, model, optimizer, noted, ranks)
    else:
        restore_weights(model, load_file(directory / MODEL_FILE))
        tensors = load_file(directory / OPTIMIZER_FILE)
        for name, place in noted.items():
            if name not in tensors:
                raise KeyError(f"it does not say what {name} was")
            place.copy_(tensors.pop(name))
        optimizer.load_tensors(tensors)


def trained_weights(model: Any) -> dict[str, Tensor]:
    """Every trained parameter and every buffer, once, and the fingerprint of the frozen weights if there are any."""
    frozen = frozen_weights(model)
    seen = {tensor.data_ptr() for tensor in frozen.values()}
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
    return weights | ({FINGERPRINT: torch.tensor([fingerprint(frozen.values())])} if frozen else {})


def restore_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """Restore what `trained_weights` returned. Raises KeyError if it belongs to another model."""
    expected = trained_weights(model)
    shapes = ({name: list(tensor.shape) for name, tensor in these.items()} for these in (expected, weights))
    _check_fits(*shapes)
    if FINGERPRINT in expected and not torch.equal(weights[FINGERPRINT], expected[FINGERPRINT]):
        raise KeyError(CHANGED)
    model.load_state_dict({name: tensor for name, tensor in weights.items() if name != FINGERPRINT}, strict=False)


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


def save_sharded(directory: Path, model: Any, optimizer: Optimizer, noted: dict[str, Tensor], ranks: Ranks) -> None:
    """Write this rank's shards. All ranks must call this; an error on one of them is raised on all.

    The first rank also writes what all of them have whole.
    """
    state = _state(model, optimizer, ranks) | noted
    check_state(state, ranks)
    rank = 0 if ranks is None else ranks.rank()
    parts = {name: tensor for name, tensor in state.items() if rank == 0 or isinstance(tensor, DTensor)}
    shards, places = {}, {}
    for item in create_default_local_save_plan(parts, is_coordinator=rank == 0).items:
        name, shard = item.index.fqn, mine(parts[item.index.fqn])
        if rank == 0 or shard.numel():
            shards[name], places[name] = shard.contiguous(), {"saved_offsets": list(item.index.offset or ())}
    file = directory / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    notes = {"DCP_SHARDING_INFO": json.dumps(places)}  # safetensors would write several in a random order
    _together(lambda: save_file(shards, file, notes), ranks, OSError, f"write its shards to {directory}")


def _together(work: Callable[[], None], ranks: Ranks, kind: type[Exception], what: str) -> None:
    """Let every rank do its part. An error of this kind is raised on all of them if one cannot.

    They tell each other in bytes. What DCP has for several ranks exchanges pickles.
    """
    failure, told = None, ""
    try:
        work()
    except Exception as error:
        failure, told = error, f"{type(error).__name__}: {error}"
    said = json.dumps(told).encode()
    for rank, text in enumerate([said] if ranks is None else from_all_texts(said, ranks)):
        if theirs := json.loads(text):
            raise kind(f"rank {rank} could not {what}: {theirs}") from failure


def load_sharded(directory: Path, model: Any, optimizer: Optimizer, noted: dict[str, Tensor], ranks: Ranks) -> None:
    """Restore what `save_sharded` wrote, on whatever number of ranks. KeyError if it belongs to another model."""
    reader = HuggingFaceStorageReader(str(directory))
    metadata = reader.read_metadata().state_dict_metadata
    found = {name: list(kept.size) for name, kept in metadata.items() if isinstance(kept, TensorStorageMetadata)}
    _start_moments(optimizer, any(name.startswith("exp_avg.") for name in found))
    wanted = _state(model, optimizer, ranks) | noted
    _check_fits({name: list(tensor.shape) for name, tensor in wanted.items()}, found)
    expected = wanted.get(FINGERPRINT, torch.zeros(0)).clone()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        _together(lambda: load(wanted, storage_reader=reader, no_dist=True), ranks, RuntimeError, f"read {directory}")
    if len(expected) and not torch.equal(wanted[FINGERPRINT], expected):
        raise KeyError(CHANGED)
    optimizer.round()


def _load_whole(directory: Path, model: Any, optimizer: Optimizer, noted: dict[str, Tensor], ranks: Ranks) -> None:
    """Restore the shards of this rank from the checkpoint of a learner that was alone."""
    with ExitStack() as files:
        weights, others = (
            files.enter_context(safe_open(directory / file, "pt")) for file in (MODEL_FILE, OPTIMIZER_FILE)
        )
        for name, place in noted.items():
            _fill(place, _tensor(others, name))
        saved = {(name.split(".", 1)[0], name.split(".", 1)[1]) for name in others.keys() if "." in name}  # noqa: SIM118
        _start_moments(optimizer, any(key == "exp_avg" for _, key in saved))
        wanted = _state(model, optimizer, ranks)
        index_of = {name: str(index) for index, name in enumerate(_names(model, optimizer))}
        for name, place in wanted.items():
            kind, _, owner = name.partition(".")
            if name == FINGERPRINT:
                if not torch.equal(weights.get_tensor(name), place):
                    raise KeyError(CHANGED)
            elif kind == "buffer" or (kind == "weight" and (index_of[owner], "master") not in saved):
                _fill(place, _tensor(weights, owner))
            else:
                _fill(place, _tensor(others, f"{index_of[owner]}.{'master' if kind == 'weight' else kind}"))


def _names(model: Any, optimizer: Optimizer) -> list[str]:
    """The names of the trained weights, in the order of the optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(weight)] for weight in optimizer.weights]


def _state(model: Any, optimizer: Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """Everything that must be saved, by name. These are not copies."""
    state: dict[str, Tensor] = {}
    for name, master in zip(_names(model, optimizer), optimizer.masters, strict=True):
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


def _check_fits(wanted: Mapping[str, list[int]], found: Mapping[str, list[int]]) -> None:
    unknown, missing = sorted(found.keys() - wanted.keys()), sorted(wanted.keys() - found.keys())
    if unknown or missing:
        raise KeyError(f"the weights {unknown} are unknown and {missing} are missing")
    other = [name for name, shape in wanted.items() if shape != found[name]]
    if other:
        raise KeyError(f"the weights {other} have other shapes")


def _tensor(file: Any, name: str) -> Tensor:
    if name not in file.keys():  # noqa: SIM118
        raise KeyError(f"the weights {[name]} are missing")
    tensor: Tensor = file.get_tensor(name)
    return tensor


@torch.no_grad()
def _fill(place: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor to its place, or this rank's part of it to its shard."""
    if place.shape != whole.shape:
        raise KeyError(f"a weight has shape {tuple(whole.shape)} instead of {tuple(place.shape)}")
    if isinstance(place, DTensor):
        whole = whole.to(place.device)
        mine = distribute_tensor(whole, place.device_mesh, place.placements, src_data_rank=None)  # without the others
        place.to_local().copy_(mine.to_local())
    else:
        place.copy_(whole)
