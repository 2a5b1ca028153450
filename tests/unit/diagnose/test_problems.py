"""Sampler against trainer in dumps of ours, of TRL and of verl: tokens really sampled, and the cause of each gap."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from bapo.diagnose.dumps import read_dump
from bapo.diagnose.problems import find_problems

RESPONSES, TOKENS, VOCABULARY = 96, 30, 24
NAMES = {
    "TRL": {
        **{"behavior": "sampling_per_token_logps", "recomputed": "old_per_token_logps", "learner": "per_token_logps"},
        **{"mask": "completion_mask", "entropy": "entropies"},
    },
    "verl": {
        **{"behavior": "rollout_log_probs", "recomputed": "old_log_probs", "learner": "log_prob"},
        **{"mask": "response_mask", "entropy": "entropys"},
    },
}


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def sampled(of):
    """Tokens sampled from `of(logits)`. Log-probs of sampler and trainer, and the trainer's entropies, padded alike."""
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (RESPONSES, TOKENS, VOCABULARY))
    sampler, trainer = log_softmax(of(logits, random)), log_softmax(logits)
    tokens = (sampler + random.gumbel(size=logits.shape)).argmax(-1)[..., None]
    entropy = -(np.exp(trainer) * trainer).sum(-1)
    taken = [np.take_along_axis(table, tokens, -1)[..., 0] for table in (sampler, trainer)]
    return [values.astype(np.float32) for values in (*taken, entropy)]


def top(count):
    return lambda logits, random: np.where(logits >= np.sort(logits)[..., [-count]], logits, -np.inf)


def other_beginnings(logits, random):
    other = logits.copy()
    other[:, :4] = random.normal(0, 2, other[:, :4].shape)
    return other


FAULTS = {
    "temperature": (lambda logits, random: logits / 0.9, "about 0.9 times"),
    "truncation": (top(8), "never lower"),
    "prompt": (other_beginnings, "the first 4 tokens"),
    "rounding": (lambda logits, random: logits + random.normal(0, 0.06, logits.shape), "16-bit"),
    "weights": (lambda logits, random: logits + random.normal(0, 0.5, logits.shape), "has other weights"),
}


def advantages():
    return np.where(np.arange(RESPONSES) % 2, 1.0, -1.0).astype(np.float32)


def evidence(path, check):
    return [finding.evidence for finding in find_problems(read_dump([path]).updates) if finding.name == check]


@pytest.mark.parametrize("cause", FAULTS)
@pytest.mark.parametrize("framework", NAMES)
def test_the_mismatch_in_a_dump_of_another_trainer_has_its_cause(framework, cause, tmp_path):
    fault, words = FAULTS[cause]
    behavior, trainer, entropy = sampled(fault)
    names = NAMES[framework]
    columns = {"behavior": behavior, "recomputed": trainer, "learner": trainer, "entropy": entropy}
    dump = {names[role]: values for role, values in columns.items()} | {"advantages": advantages()}
    save_file(dump | {names["mask"]: np.ones_like(behavior)}, tmp_path / "1.safetensors")
    (told,) = evidence(tmp_path, "engine_mismatch")
    assert f"Likely cause: {cause};" in told
    assert words in told


def ours(behavior, learner, entropy, **more):
    flat = {"logprobs": learner, "behavior_logprobs": behavior, "entropy": entropy}
    return {
        **{name: values.reshape(-1) for name, values in flat.items()},
        "advantages": np.repeat(advantages(), TOKENS),
        "sequence_ids": np.repeat(np.arange(RESPONSES), TOKENS),
        **more,
    }


def test_fresh_tokens_of_ours_are_compared_and_older_ones_are_not(tmp_path):
    behavior, trainer, entropy = sampled(FAULTS["temperature"][0])
    versions = np.repeat(np.where(np.arange(RESPONSES) < 40, 7, 6), TOKENS)
    whole = ours(behavior, trainer, entropy, versions=versions, version=np.array(7), update=np.array(8))
    save_file(whole, tmp_path / "1.safetensors")
    (told,) = evidence(tmp_path, "fresh_mismatch")
    assert told.startswith(f"on {40 * TOKENS} fresh tokens")
    assert "Likely cause: temperature; " in told
    learner = np.where(versions.reshape(RESPONSES, TOKENS) == 7, behavior + np.float32(1e-5), trainer)
    save_file(whole | {"logprobs": learner.reshape(-1)}, tmp_path / "1.safetensors")
    assert evidence(tmp_path, "fresh_mismatch") == []  # what differs is older
    del whole["version"]  # the newest tokens are not known to be fresh
    save_file(whole, tmp_path / "1.safetensors")
    assert evidence(tmp_path, "fresh_mismatch") == []


def test_a_few_fresh_tokens_give_numbers_and_no_cause(tmp_path):
    behavior, trainer, entropy = sampled(FAULTS["weights"][0])
    staleness = np.ones(behavior.size, dtype=np.int64)
    staleness[:20] = 0
    save_file(ours(behavior, trainer, entropy, staleness=staleness), tmp_path / "1.safetensors")
    (told,) = evidence(tmp_path, "fresh_mismatch")
    assert told.startswith("on 20 fresh tokens")
    assert "cause" not in told
