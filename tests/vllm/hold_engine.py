"""Starts an engine with the embedded model, samples, says that it is ready, and waits to be killed."""

import time

from bapo.demo import model_path
from bapo.rollout.engine import Request, Sampling
from tests.vllm.engines import made, policy

if __name__ == "__main__":
    engine = made(str(model_path()))
    engine.load(policy(str(model_path())).named_parameters(), version=0)
    engine.submit([Request([5, 6], 0, seed, 120, id=seed) for seed in range(400)], Sampling(1.0))
    engine.collect(0.5)
    print("ready", flush=True)
    time.sleep(600)
