"""AReaL's `PPOActor.ppo_update` with its FSDP engine, in as many processes as were launched; what it did to a file."""

import json
import sys

import areal.engine
import torch
import torch.distributed as dist
from areal.api import FinetuneSpec
from areal.api.alloc_mode import ModelAllocation
from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, PPOActorConfig
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils import stats_tracker

from tests.adapters.areal import bapo_actor
from tests.adapters.launched import Collectives

SEQUENCES, PROMPT, RESPONSE, VOCABULARY = 8, 3, 8, 24
LEARNING_RATE = 0.05
AREALS_OWN = areal.engine.FSDPPPOActor


def config(model, **options):
    """As AReaL's launcher would build it; one sequence per micro-batch, because sdpa cannot keep packed ones apart."""
    plain = OptimizerConfig(
        type="sgd",
        lr=LEARNING_RATE,
        weight_decay=0.0,
        gradient_clipping=1e9,
        lr_scheduler_type="constant",
        warmup_steps_proportion=0.0,
    )
    return PPOActorConfig(
        **{
            "experiment_name": "bapo",
            "trial_name": "test",
            "path": model,
            "backend": f"fsdp:d{dist.get_world_size()}",
            "dtype": "float32",
            "attn_impl": "sdpa",
            "optimizer": plain,
            "mb_spec": MicroBatchSpec(n_mbs=SEQUENCES // dist.get_world_size()),
            "ppo_n_minibatches": 1,
            "use_decoupled_loss": False,
            "recompute_logprob": False,
            "adv_norm": None,
            "kl_ctl": 0.0,
            **options,
        }
    )


def rollouts(actor):
    """This rank's rows as a rollout leaves them, their log-probs stale by noise."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(2, RESPONSE + 1, (SEQUENCES,), generator=generator)
    response = (torch.arange(RESPONSE) < lengths[:, None]).long()
    zeros = torch.zeros(SEQUENCES, PROMPT, dtype=torch.long)
    rows = {
        "input_ids": torch.randint(0, VOCABULARY, (SEQUENCES, PROMPT + RESPONSE), generator=generator),
        "attention_mask": torch.cat([torch.ones_like(zeros), response], 1),
        "loss_mask": torch.cat([zeros, response], 1),
        "rewards": torch.where(torch.arange(SEQUENCES) % 3 == 0, 1.0, -0.8),
        "noise": 0.6 * torch.randn(SEQUENCES, PROMPT + RESPONSE, generator=generator),
    }
    part = SEQUENCES // dist.get_world_size()
    mine = {name: value[dist.get_rank() * part :][:part] for name, value in rows.items()}
    data = [{name: value[i : i + 1] for name, value in mine.items()} for i in range(part)]
    for row, now in zip(data, actor.compute_logp(data), strict=True):
        stale = torch.roll(now.reshape(1, -1), 1, -1) + row.pop("noise")  # AReaL rolls what a sampler returned
        row["logprobs"] = torch.where(row["loss_mask"].bool(), stale.clamp(max=-0.01), 0.0)
    return data


def update(model, actor_class, passes=(None,), **options):
    """An optimizer step for each pass, by the engine that AReaL's trainer makes; everything a test wants to know of it.

    A pass says how often even and odd rows were trained on before it. None: nobody says.
    """
    areal.engine.FSDPPPOActor = actor_class
    settings = config(model, **options)
    actor = PPOTrainer._create_train_engine(None, settings, ModelAllocation.from_str(settings.backend))
    assert type(actor) is actor_class
    actor.initialize(None, FinetuneSpec(1, 64, SEQUENCES))
    data = actor.compute_advantages(rollouts(actor))
    names = ("input_ids", "attention_mask", "loss_mask", "advantages", "logprobs")
    tokens = {name: torch.cat([row[name] for row in data]).clone() for name in names}
    forwards = []
    actor.model.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    stats_tracker.export_all(reduce_group=actor.data_parallel_group)
    stats = []
    with Collectives() as collectives:
        for uses in passes:
            for i, row in enumerate(data if uses is not None else ()):
                row["uses"] = torch.full_like(row["loss_mask"], uses[i % 2], dtype=torch.int64)
            actor.ppo_update(data)
            exported = stats_tracker.export_all(reduce_group=actor.data_parallel_group)
            stats.append({name: float(value) for name, value in exported.items()})
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, tokens)
    parameters = actor.model.named_parameters()
    return {
        "stats": stats[0],
        "later stats": stats[1:],
        "weights": {name: getattr(value, "full_tensor", lambda v=value: v)().detach() for name, value in parameters},
        "tokens": {name: torch.cat([rank[name] for rank in ranks]) for name in tokens},
        "float64_all_reduces": collectives.sizes,
        "forwards": forwards,
    }


def main(model, out):
    dist.init_process_group("gloo")
    results = {
        "bapo": update(model, bapo_actor.BapoActor),
        "fixed": update(model, bapo_actor.Fixed),
        "areal": update(model, AREALS_OWN),
        "push once": update(model, bapo_actor.PushOnce, passes=[(0, 1), (1, 2), (2, 3)]),
        "brake": update(model, bapo_actor.Brake, passes=[(0, 1), (1, 2), (2, 3)]),
        "first pass": update(model, bapo_actor.PushOnce, passes=[(0, 0)]),
        "off": update(model, bapo_actor.BapoActor, passes=[None] * 3),
    }
    refused = {}
    for name, options in {
        "epsilon": {"eps_clip": 0.3},
        "uses without the rule": {"passes": [(0, 0)]},
        "the rule without uses": {"actor_class": bapo_actor.PushOnce},
        "decoupled": {"use_decoupled_loss": True},
        "sequence": {"importance_sampling_level": "sequence"},
    }.items():
        try:
            update(model, **{"actor_class": bapo_actor.BapoActor, **options})
        except ValueError as error:
            refused[name] = str(error)
    if dist.get_rank() == 0:
        torch.save({**results, "refused": refused}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
