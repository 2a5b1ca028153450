"""Weights on their way to vLLM: shared memory, fingerprints, and what is said about weights that did not arrive.

None of this needs vLLM. tests/vllm has the engine itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bapo.demo import model_path
from bapo.rollout.vllm.buckets import (
    Bucket,
    batches,
    check_arrived,
    fingerprints,
    fitting,
    mapped,
    shared,
)
from bapo.rollout.vllm.engine import VllmEngine, check_temperature
from bapo.rollout.vllm.start import Settings, expected_weights
from tests.tiny.models import tiny

WEIGHTS = [
    ("a", torch.arange(7, dtype=torch.float32).reshape(7, 1)),
    ("b", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
    ("scalar", torch.tensor(3, dtype=torch.int64)),
    ("transposed", torch.arange(6.0).reshape(2, 3).T),
    ("empty", torch.zeros(0, 4)),
]
RECEIVER = """
import json, sys
from bapo.rollout.vllm.buckets import Bucket, fingerprints, mapped
print(json.dumps(fingerprints(list(mapped(Bucket(**json.loads(sys.argv[1])))))))
"""


def test_what_another_process_maps_has_the_same_fingerprints():
    with shared(WEIGHTS) as bucket:
        command = [sys.executable, "-c", RECEIVER, json.dumps(vars(bucket))]
        arrived = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert arrived == fingerprints(WEIGHTS)


def test_a_receiver_keeps_what_it_has_mapped_and_cannot_change_what_others_see():
    with shared(WEIGHTS) as bucket:
        first, second = dict(mapped(bucket)), dict(mapped(bucket))
        first["a"].fill_(9)
    assert not Path(bucket.path).exists()
    for name, tensor in WEIGHTS:
        assert second[name].dtype == tensor.dtype
        assert torch.equal(second[name], tensor)


def test_a_fingerprint_tells_name_dtype_shape_and_every_bit_apart():
    def of(name, tensor):
        return fingerprints([(name, tensor)])[name]

    tensor = torch.arange(8, dtype=torch.float32)
    flipped = tensor.clone()
    flipped.view(torch.int32)[3] ^= 1
    others = [
        of("x", tensor),
        of("y", tensor),
        of("x", tensor.view(2, 4)),
        of("x", tensor.view(torch.int32)),
        of("x", flipped),
    ]
    assert len(set(others)) == 5
    assert of("x", torch.tensor([0.0])) != of("x", torch.tensor([-0.0]))
    assert of("x", tensor.clone()) == others[0]


def test_weights_are_batched_in_order_by_size():
    sizes = [[name for name, _ in batch] for batch in batches(WEIGHTS, limit=28)]
    assert sizes == [["a"], ["b", "scalar", "transposed"], ["empty"]]  # 28; 4 + 8 + 24; 0 bytes


def test_the_memory_of_a_bucket_ends_with_its_sender():
    script = (
        "import os, signal, torch, bapo.rollout.vllm.buckets as b\n"
        "with b.shared([('w', torch.zeros(4))]) as bucket:\n"
        "    print(bucket.path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    assert not os.path.lexists(done.stdout.strip())


def test_the_model_says_which_weights_it_expects(tmp_path):
    tied = tiny("llama", tie_word_embeddings=True)
    tied.config.save_pretrained(tmp_path)
    assert expected_weights(str(tmp_path)) == {name: tuple(w.shape) for name, w in tied.named_parameters()}
    assert "lm_head.weight" not in expected_weights(str(tmp_path))
    assert "lm_head.weight" in expected_weights(str(model_path()))
    with pytest.raises(ValueError, match=r"is not a directory with a config\.json"):
        expected_weights("no/such/model")


def test_unknown_and_misshapen_weights_are_refused():
    expected = {"a": (7, 1), "b": (2,)}
    assert [name for name, _ in fitting(WEIGHTS[:2], expected)] == ["a", "b"]
    with pytest.raises(ValueError, match=r"no weight 'scalar'.* merge them"):
        list(fitting(WEIGHTS, expected))
    with pytest.raises(ValueError, match=r"'a' has shape \(7, 1\), but the engine's model has \(7,\)"):
        list(fitting(WEIGHTS, {"a": (7,)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"expected": {"a", "b", "c", "d"}}, r"\(not sent: 2, such as c\)"),
        ({"fingerprints": {"a": "1"}}, r"\(sent, but not arrived in a worker: b\)"),
        ({"fingerprints": {"a": "1", "b": "3"}}, r"\(arrived in a worker with other bits: b\)"),
        ({"not_loaded": ["norm"]}, r"\(in vLLM's model, but not loaded: norm\)"),
    ],
)
def test_what_did_not_arrive_in_one_of_the_workers_is_named(change, message):
    sent = {"a": "1", "b": "2"}
    good = {"fingerprints": dict(sent), "not_loaded": []}
    reports = [good, good | {key: value for key, value in change.items() if key in good}]
    expected = change.get("expected", {"a", "b"})
    if message is None:
        check_arrived(reports, sent, expected)
    else:
        with pytest.raises(ValueError, match=message):
            check_arrived(reports, sent, expected)


def test_temperatures_that_vllm_would_change_are_refused():
    for good in (0.0, 0.01, 0.7, 2.0):
        check_temperature(good)
    for bad in (0.001, 2.5, float("inf")):
        with pytest.raises(ValueError, match="is not one that vLLM samples at"):
            check_temperature(bad)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_says_what_to_install():
    with pytest.raises(ImportError, match=r"pip install 'bapo\[vllm\]'"):
        VllmEngine(Settings(str(model_path())))


def test_a_bucket_travels_as_plain_values():
    with shared(WEIGHTS) as bucket:
        assert Bucket(**json.loads(json.dumps(vars(bucket)))) == bucket
