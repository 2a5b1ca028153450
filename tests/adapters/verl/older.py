"""One call of the loss out of the registry of whatever verl is first on the path; what it returned, to a file."""

import importlib.resources
import json
import sys

import torch
import verl
from hydra import compose, initialize_config_dir
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

from tests.adapters.logged import logged


def main(out, options):
    loss = "actor_rollout_ref.actor.policy_loss."
    overrides = [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        f"{loss}_target_=bapo.adapters.verl.BapoPolicyLossConfig",
        f"{loss}loss_mode=bapo",
        *(f"+{loss}{name}={value}" for name, value in {"scope": "microbatch", **options}.items()),
    ]
    with initialize_config_dir(str(importlib.resources.files(verl) / "trainer" / "config"), version_base=None):
        config = omega_conf_to_dataclass(compose("ppo_trainer", overrides=overrides).actor_rollout_ref.actor)
    names = ("log_prob", "old_log_prob", "advantages", "response_mask")
    given = dict(zip(names, logged(), strict=True))
    returned = get_policy_loss_fn("bapo")(**given, loss_agg_mode="token-mean", config=config, rollout_is_weights=None)
    returned[0].backward()
    torch.save({"version": verl.__version__, "returned": returned, "gradient": given["log_prob"].grad}, out)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
