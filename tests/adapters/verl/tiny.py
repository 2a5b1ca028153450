"""verl's real actor on CPU: a platform for verl's own registry of them, its configuration files, a one-layer Llama."""

import importlib.resources
import os
import types
from functools import partial

os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")

import torch
import torch.distributed as dist
import verl
from tensordict import TensorDict
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from tests.tiny.models import ONE_LAYER, tiny

TARGET = "bapo.adapters.verl.BapoPolicyLossConfig"
SEQUENCES, PROMPT, RESPONSE, VOCABULARY = 8, 3, 8, 24
LEARNING_RATE = 0.05


class PlatformCPU(PlatformCUDA):
    """What verl asks of a device, answered by the CPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = types.SimpleNamespace(
        **{
            name: getattr(torch.cpu, name) for name in ("synchronize", "is_available", "current_device", "device_count")
        },
        is_initialized=lambda: False,
        max_memory_allocated=lambda: 0,
        max_memory_reserved=lambda: 0,
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        empty_cache=lambda: None,
        mem_get_info=lambda: (1, 1),
        get_device_name=lambda: "CPU",
    )

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def communication_backend_name(self):
        return "gloo"

    def synchronize(self, device_index=None):
        pass

    def empty_cache(self):
        pass


def on_cpu():
    """Let verl's engines run on CPU."""
    set_platform(PlatformCPU())
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)


def save_model(path):
    tiny(vocab_size=VOCABULARY, initializer_range=0.5, **ONE_LAYER).save_pretrained(path)
    return path


def actor_config(*overrides):
    """verl's ActorConfig from verl's own ppo_trainer.yaml, as its command line would build it."""
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass

    actor = "actor_rollout_ref.actor."
    with initialize_config_dir(str(importlib.resources.files(verl) / "trainer" / "config"), version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"{actor}ppo_micro_batch_size_per_gpu=2",
                f"{actor}use_torch_compile=false",
                f"{actor}optim.lr={LEARNING_RATE}",
                f"{actor}optim.total_training_steps=10",
                f"{actor}optim.optimizer=SGD",
                f"{actor}optim.clip_grad=1e9",
                f"{actor}optim.weight_decay=0",
                f"+{actor}fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32}}",
                *overrides,
            ],
        )
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def bapo_options(**options):
    """The command line of docs/adapters/verl.md."""
    loss = "actor_rollout_ref.actor.policy_loss."
    return [
        f"{loss}_target_={TARGET}",
        f"{loss}loss_mode=bapo",
        *(f"+{loss}{name}={value}" for name, value in options.items()),
    ]


def batch(*, weighted=False):
    """A padded batch as verl's trainer sends it to its workers; `noise` is how stale its log-probs shall be."""
    generator = torch.Generator().manual_seed(7)
    length = PROMPT + RESPONSE
    lengths = torch.randint(2, RESPONSE + 1, (SEQUENCES,), generator=generator)
    response_mask = (torch.arange(RESPONSE) < lengths[:, None]).long()
    input_ids = torch.randint(0, VOCABULARY, (SEQUENCES, length), generator=generator)
    signs = torch.where(torch.arange(SEQUENCES) % 3 == 0, 1.0, -0.8)
    columns = {
        "input_ids": input_ids,
        "prompts": input_ids[:, :PROMPT],
        "responses": input_ids[:, PROMPT:],
        "attention_mask": torch.cat([torch.ones(SEQUENCES, PROMPT, dtype=torch.long), response_mask], 1),
        "position_ids": torch.arange(length).expand(SEQUENCES, length).contiguous(),
        "response_mask": response_mask,
        "advantages": signs[:, None] * response_mask,
        "noise": 0.6 * torch.randn(SEQUENCES, RESPONSE, generator=generator),
    }
    if weighted:
        columns["rollout_is_weights"] = 0.5 + torch.rand(SEQUENCES, RESPONSE, generator=generator)
    return TensorDict(columns, batch_size=[SEQUENCES])


def worker(model, config):
    """verl's TrainingWorker with its loss, as `ActorRolloutRefWorker.init_model` puts it together."""
    from verl.workers.config import HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    engine = config.engine
    object.__setattr__(engine, "strategy", "fsdp2")
    engine.use_dynamic_bsz = config.use_dynamic_bsz
    engine.micro_batch_size_per_gpu = engine.infer_micro_batch_size_per_gpu = config.ppo_micro_batch_size_per_gpu
    engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = config.ppo_max_token_len_per_gpu
    model_config = HFModelConfig(
        path=str(model),
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config,
            engine_config=engine,
            optimizer_config=config.optim,
            checkpoint_config=config.checkpoint,
        )
    )
    made.reset()
    made.set_loss_fn(partial(ppo_loss, config=config))
    return made


def part_of(data):
    """This rank's rows of the batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = len(data) // world
    return data[rank * rows : (rank + 1) * rows].clone()


def prepared(data, updates=1, epochs=1, shuffle=False):
    """What verl's trainer adds before it calls `update_actor`."""
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=False,
        global_batch_size=SEQUENCES // updates,
        mini_batch_size=SEQUENCES // updates,
        epochs=epochs,
        seed=1,
        dataloader_kwargs={"shuffle": shuffle},
        compute_loss=True,
    )
    return data
