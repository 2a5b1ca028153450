"""Makes a small dump of logged batches, for trying `bapo diagnose` without a training run.

The dump holds several updates on one rollout batch, so every response is used several times. A small policy (a table
of logits) samples the responses. With every update the learner follows the policy gradient of the batch, and drifts at
random as well, as if it trained on other data too. Wrong responses are longer than right ones, as in reasoning, so
negative tokens dominate.

    python examples/make_dump.py OUT [--names bapo|trl|verl] [--updates 4] [--step 0.02] [--drift 0.12] [--longer 2.0]
                                 [--seed 0]
    bapo diagnose OUT
"""

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

STATES, VOCABULARY, GROUPS, RESPONSES, LENGTH = 256, 64, 16, 8, 40
NAMES = {
    "bapo": {},
    "trl": {
        "logprobs": "per_token_logps",
        "behavior_logprobs": "sampling_per_token_logps",
        "anchor": "old_per_token_logps",
        "mask": "completion_mask",
        "entropy": "entropies",
        "update": "global_step",
    },
    "verl": {
        "logprobs": "log_prob",
        "behavior_logprobs": "rollout_log_probs",
        "anchor": "old_log_probs",
        "mask": "response_mask",
        "entropy": "entropys",
        "update": "global_steps",
    },
}


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def make_updates(updates=4, step=0.02, drift=0.12, longer=2.0, seed=0, mismatch=0.004):
    """One dict per update, of arrays [sequences, tokens], [sequences], or of a single number."""
    random = np.random.default_rng(seed)
    sampler = random.normal(0, 2, (STATES, VOCABULARY))
    responses = GROUPS * RESPONSES

    right = random.random((GROUPS, RESPONSES)) < 0.4
    right[:, 0], right[:, 1] = True, False  # every group has both, as after filtering
    spread = right.std(1, keepdims=True, ddof=1)
    advantages = ((right - right.mean(1, keepdims=True)) / spread).reshape(-1)
    right = right.reshape(-1)
    lengths = random.poisson(np.where(right, LENGTH, LENGTH * longer)).clip(2)
    mask = np.arange(lengths.max()) < lengths[:, None]

    state = random.integers(0, STATES, mask.shape)
    noise = random.gumbel(size=(*mask.shape, VOCABULARY))
    token = (log_softmax(sampler)[state] + noise).argmax(-1)
    recomputed = log_softmax(sampler)[state, token]
    behavior = np.minimum(recomputed + random.normal(0, mismatch, mask.shape), 0.0)  # another engine rounds differently

    credit = np.zeros_like(sampler)  # the sum of advantages of each token in each state
    np.add.at(credit, (state, token), advantages[:, None] * mask)

    learner = sampler.copy()
    for update in range(updates):
        logprobs = log_softmax(learner)
        yield {
            "logprobs": logprobs[state, token].astype(np.float32) * mask,
            "behavior_logprobs": behavior.astype(np.float32) * mask,
            "anchor": recomputed.astype(np.float32) * mask,
            "entropy": -(np.exp(logprobs) * logprobs).sum(-1)[state].astype(np.float32) * mask,
            "mask": mask,
            "advantages": advantages.astype(np.float32),
            "rewards": right.astype(np.float32),
            "staleness": np.full(responses, update),
            "uses": np.full(responses, update),
            "update": np.array(update),
        }
        gradient = credit - np.exp(logprobs) * credit.sum(1, keepdims=True)
        learner = learner + step * gradient + random.normal(0, drift, learner.shape)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write to, one file per update")
    parser.add_argument("--names", choices=NAMES, default="bapo", help="whose names the arrays get")
    parser.add_argument("--updates", type=int, default=4, help="updates on the one rollout batch")
    parser.add_argument("--step", type=float, default=0.02, help="size of each update along the policy gradient")
    parser.add_argument("--drift", type=float, default=0.12, help="standard deviation of the noise in each update")
    parser.add_argument("--longer", type=float, default=2.0, help="how many times longer wrong responses are")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    names = NAMES[chosen.names]
    skipped = () if chosen.names == "bapo" else ("uses",)  # which TRL and verl do not log
    for update in make_updates(chosen.updates, chosen.step, chosen.drift, chosen.longer, chosen.seed):
        file = chosen.out / f"update_{int(update['update'])}.safetensors"
        arrays = {names.get(name, name): values for name, values in update.items() if name not in skipped}
        save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, file)
    print(f"wrote {chosen.updates} updates to {chosen.out}; read them with: bapo diagnose {chosen.out}")


if __name__ == "__main__":
    main()
