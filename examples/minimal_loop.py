"""The whole idea in one file: a toy policy, stale data, GRPO against BAPO.

A walker must stop on its target. Each prompt is a target, and each token is a step (-1, +1, +2, +3) or STOP. A response
gets reward 1 if it stops exactly on the target. A walker that misses its target wanders on, so wrong responses are
longer than right ones and negative tokens dominate: the imbalance that BAPO addresses. The policy is a table of logits,
so that only the method matters. Every rollout batch is used for many updates, so most updates are off-policy.

    python examples/minimal_loop.py [--updates 160] [--reuse 32] [--seeds 3]
"""

import argparse
import statistics

import torch
from torch import Tensor

from bapo import policy_loss
from bapo.core.advantages import grpo, to_tokens

STEPS = torch.tensor([-1, 1, 2, 3, 0])
STOP, MAX_LENGTH, FIRST_TARGET, LAST_TARGET = 4, 16, 5, 12
GROUPS, RESPONSES = 32, 8
COMPARED = {  # name: objective and its options; the last two fix the clip at the start and the end of BAPO's search
    "grpo": {"objective": "grpo"},
    "clip_higher": {"objective": "clip_higher"},
    "bapo": {"objective": "bapo"},
    "fixed 0.6/1.2": {"objective": "grpo", "low": 0.6, "high": 1.2},
    "fixed 0.9/3.0": {"objective": "grpo", "low": 0.9, "high": 3.0},
}


def initial_policy() -> Tensor:
    """Logits [target, position, action] of a random walk that stops on the target more often than elsewhere."""
    logits = torch.zeros(LAST_TARGET + 1, 3 * MAX_LENGTH + 1, len(STEPS))
    logits[..., STOP] = -2.5
    for target in range(FIRST_TARGET, LAST_TARGET + 1):
        logits[target, target, STOP] = 0.5
    return logits.requires_grad_()


@torch.no_grad()
def rollout(policy: Tensor, targets: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Sample responses, and keep the log-prob of every token under the policy that samples it."""
    position = torch.zeros_like(targets)
    running = torch.ones_like(targets, dtype=torch.bool)
    columns: dict[str, list[Tensor]] = {"positions": [], "actions": [], "behavior_logprobs": [], "mask": []}
    for _ in range(MAX_LENGTH):
        logprobs = policy[targets, position].log_softmax(-1)
        action = torch.multinomial(logprobs.exp(), 1, generator=generator).squeeze(1)
        chosen = logprobs.gather(1, action[:, None]).squeeze(1)
        for name, value in zip(columns, (position, action, chosen, running), strict=True):
            columns[name].append(value)
        position = torch.where(running, (position + STEPS[action]).clamp(0, 3 * MAX_LENGTH), position)
        running = running & (action != STOP)
    batch = {name: torch.stack(values, 1) for name, values in columns.items()}
    rewards = ((position == targets) & ~running).float()
    return batch | {"targets": targets, "rewards": rewards}


def new_batch(policy: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A rollout batch with group-normalised advantages, one per token."""
    prompts = torch.randint(FIRST_TARGET, LAST_TARGET + 1, (GROUPS,), generator=generator)
    batch = rollout(policy, prompts.repeat_interleave(RESPONSES), generator)
    groups = torch.arange(GROUPS).repeat_interleave(RESPONSES)
    batch["advantages"] = to_tokens(grpo(batch["rewards"], groups).advantages, batch["mask"])
    return batch


def train(choice: dict, *, updates: int, reuse: int, lr: float, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    policy = initial_policy()
    optimizer = torch.optim.Adam([policy], lr=lr)
    highs, shares, norms = [], [], []
    for update in range(updates):
        if update % reuse == 0:
            batch = new_batch(policy, generator)
        distribution = policy[batch["targets"][:, None], batch["positions"]].log_softmax(-1)
        logprobs = distribution.gather(2, batch["actions"][..., None]).squeeze(2)
        out = policy_loss(logprobs, batch["behavior_logprobs"], batch["advantages"], batch["mask"], **choice)
        optimizer.zero_grad()
        out.loss.backward()
        norms.append(policy.grad.norm().item())
        optimizer.step()
        highs.append(out.metrics["clip_high"].item())
        shares.append(out.metrics["share"].item())
    return evaluate(policy, generator) | {
        "share": statistics.mean(shares),
        "high bound": statistics.mean(highs),
        "max grad": max(norms),
    }


@torch.no_grad()
def evaluate(policy: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Success rate over all targets at temperature 1, and entropy per token."""
    targets = torch.arange(FIRST_TARGET, LAST_TARGET + 1).repeat_interleave(512)
    batch = rollout(policy, targets, generator)
    distribution = policy[targets[:, None], batch["positions"]].log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)[batch["mask"]].mean()
    return {
        "success": batch["rewards"].mean().item(),
        "entropy": entropy.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=160, help="optimizer steps per run")
    parser.add_argument("--reuse", type=int, default=32, help="updates per rollout batch; 1 is on-policy")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads only slow down tensors this small

    print(f"{arguments.updates} updates, each rollout batch used {arguments.reuse} times, {arguments.seeds} seeds")
    start = evaluate(initial_policy(), torch.Generator().manual_seed(0))
    columns = ["success", "entropy", "share", "high bound", "max grad"]
    print(f"\n{'':14}" + "".join(f"{name:>16}" for name in columns))
    print(f"{'before':14}" + "".join(f"{start[name]:>16.3f}" if name in start else f"{'':>16}" for name in columns))
    for name, choice in COMPARED.items():
        runs = [
            train(choice, updates=arguments.updates, reuse=arguments.reuse, lr=arguments.lr, seed=seed)
            for seed in range(arguments.seeds)
        ]
        cells = []
        for column in columns:
            values = [run[column] for run in runs]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):>8.3f} ± {spread:<5.3f}")
        print(f"{name:14}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    print("\nmean ± standard deviation over seeds; share: the positive tokens' share of the signal under each clip")


if __name__ == "__main__":
    main()
