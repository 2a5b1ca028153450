"""Calls of verl's `TrainingWorker.train_mini_batch` in as many processes as were launched; what they did to a file."""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from tests.adapters.launched import Collectives
from tests.adapters.verl import tiny


def logprobs_now(worker, data):
    """Response log-probs of this rank's rows under the weights as they are, by verl's own inference pass."""
    prepared = tiny.prepared(data.clone())
    tu.assign_non_tensor(prepared, compute_loss=False, global_token_num=None)
    return no_padding_2_padding(worker.infer_batch(prepared.clone())["log_probs"], prepared)


def update(model, *, overrides, weighted=False, updates=1, epochs=1, shuffle=False):
    """The batch in `updates` optimizer steps, `epochs` times: everything a test wants to know of them."""
    worker = tiny.worker(model, tiny.actor_config(*overrides))
    forwards = []
    worker.engine.module.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    data = tiny.part_of(tiny.batch(weighted=weighted))
    data["old_log_probs"] = logprobs_now(worker, data) + data.pop("noise")
    tokens = {name: data[name].clone() for name in data.keys()}  # noqa: SIM118
    forwards.clear()
    with Collectives() as collectives, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        output = worker.train_mini_batch(tiny.prepared(data, updates=updates, epochs=epochs, shuffle=shuffle))
    parameters = worker.engine.module.named_parameters()
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, tokens)
    return {
        "metrics": {name: [float(value) for value in values] for name, values in tu.get(output, "metrics").items()},
        "weights": {name: getattr(value, "full_tensor", lambda v=value: v)().detach() for name, value in parameters},
        "tokens": {name: torch.cat([rank[name] for rank in ranks]) for name in tokens},
        "float64_all_reduces": collectives.sizes,
        "forwards": forwards,
        "warnings": [str(one.message) for one in said],
    }


def main(model, out, cases):
    tiny.on_cpu()
    dist.init_process_group("gloo")
    results = {name: update(model, **case) for name, case in cases.items()}
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
