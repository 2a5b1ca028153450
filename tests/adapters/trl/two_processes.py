"""Train for a few updates on completions that depend on the row alone, in as many processes as were launched."""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOConfig, GRPOTrainer

from bapo.adapters.trl import BapoTrainer
from tests.adapters.trl.tiny import FIXED, log_of, prompts, tokenizer, trained, weights


def rollout(texts, trainer):
    """Random completions, drawn for each row of the whole batch by its number."""
    tokens = tokenizer()
    first = trainer.accelerator.process_index * len(texts)
    completions = []
    for row in range(first, first + len(texts)):
        generator = torch.Generator().manual_seed(1000 * trainer.state.global_step + row)
        length = int(torch.randint(2, 7, (1,), generator=generator))
        completions.append(torch.randint(4, len(tokens), (length,), generator=generator).tolist())
    return {
        "prompt_ids": [tokens(text)["input_ids"] for text in texts],
        "completion_ids": completions,
        "logprobs": [[0.0] * len(ids) for ids in completions],
    }


class Collectives(TorchDispatchMode):
    """Counts what torch.distributed is asked to do."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


class Counting(BapoTrainer):
    """Counts the collectives of each solve, forward passes included."""

    collectives = []  # noqa: RUF012

    def _solve(self, tables):
        with Collectives() as communication:
            bounds = super()._solve(tables)
        self.collectives.append(communication.count)
        return bounds


def main(out):
    from accelerate import PartialState

    processes = PartialState(cpu=True).num_processes
    options = {
        "arguments": {"rollout_func": rollout, "train_dataset": prompts().select(range(16))},
        "per_device_train_batch_size": 4 // processes,
        "shuffle_dataset": False,
        "optim": "sgd",
        "max_steps": 6,
    }
    run = trained(f"{out}.run", Counting, bapo_target_share=0.55, bapo_high=[1.1, 3.0], **options)
    brake = trained(f"{out}.brake", bapo_brake=0.1, **options)
    options["learning_rate"] = 1.0  # so that fixed bounds clip
    fixed = [trained(f"{out}.grpo", GRPOTrainer, GRPOConfig, **options)]
    fixed += [trained(f"{out}.{scope}", bapo_scope=scope, **FIXED, **options) for scope in ("update", "microbatch")]
    if run.accelerator.is_main_process:
        logs = {name: log_of(run, f"bapo/{name}") for name in ("clip_low", "clip_high", "share")}
        logs |= {name: log_of(brake, f"bapo/{name}") for name in ("drift", "used_low")}
        state = {name.removeprefix("module."): value for name, value in weights(run).items()}
        same = [(log_of(one, "loss"), log_of(one, "grad_norm"), weights(one)) for one in fixed]
        clipped = log_of(fixed[0], "clip_ratio/region_mean")
        seen = {"processes": processes, "collectives": run.collectives, "fixed": same, "clipped": clipped}
        torch.save({**logs, "weights": state, **seen}, out)


if __name__ == "__main__":
    main(sys.argv[1])
