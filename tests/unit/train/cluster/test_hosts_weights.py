"""Weights travel as bytes and arrive bit for bit, and a changed bit changes the fingerprint."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bapo.models.bits import BLOCK, fingerprint, unpacked
from bapo.train.cluster.hosts import Published, pack


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (7, 3), "norm": (3,), "scalar": (), "head.weight": (5, 2)}
    return [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_bit_for_bit(dtype):
    sent = weights(dtype)
    for (name, tensor), (other, arrived) in zip(sent, map(unpacked, pack(sent, None)), strict=True):
        assert name == other
        assert tensor.dtype == arrived.dtype
        assert torch.equal(tensor, arrived)


def test_weights_are_rounded_where_the_engine_wants_it():
    parcel = pack(weights(), torch.bfloat16)
    assert {packed.dtype for packed in parcel} == {"bfloat16"}
    for (_, tensor), (_, arrived) in zip(weights(), map(unpacked, parcel), strict=True):
        assert torch.equal(tensor.to(torch.bfloat16), arrived)


def test_a_transposed_weight_is_packed_as_it_reads():
    tensor = torch.arange(6.0).view(2, 3).T
    assert torch.equal(unpacked(pack([("t", tensor)], None)[0])[1], tensor)


def changed(parcel, place, **fields):
    return [*parcel[:place], replace(parcel[place], **fields), *parcel[place + 1 :]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_change_changes_the_fingerprint(dtype):
    parcel = pack(weights(dtype), None)
    known = fingerprint(parcel)
    assert fingerprint(pack(weights(dtype), None)) == known
    assert fingerprint(parcel[:-1]) != known
    assert fingerprint(parcel[::-1]) != known
    assert fingerprint(changed(parcel, 0, name="e")) != known
    assert fingerprint(changed(parcel, 0, shape=(3, 7))) != known
    for place, packed in enumerate(parcel):
        for byte in range(len(packed.data)):
            data = packed.data.copy()
            data[byte] ^= np.uint8(1)
            assert fingerprint(changed(parcel, place, data=data)) != known, (place, byte)


def test_a_large_weight_is_read_to_its_last_bit():
    parcel = pack([("large", torch.arange(3 * 2 * BLOCK + 5.0))], None)  # three blocks, two words and a half
    known = fingerprint(parcel)
    data = parcel[0].data
    for byte in (0, 8 * BLOCK - 1, 8 * BLOCK, 16 * BLOCK + 7, 24 * BLOCK, len(data) - 1):
        other = data.copy()
        other[byte] ^= np.uint8(128)
        assert fingerprint(changed(parcel, 0, data=other)) != known, byte
    swapped = np.concatenate([data[8 * BLOCK : 16 * BLOCK], data[: 8 * BLOCK], data[16 * BLOCK :]])
    assert fingerprint(changed(parcel, 0, data=swapped)) != known


def test_published_weights_cannot_be_taken_for_tensors():
    with pytest.raises(TypeError, match="fleet"):
        list(Published(3, None, "", None))
