"""Ray's messages about deaths, as Ray 2.60 writes them, become a few words that say why."""

import pytest

from bapo.train.cluster.ray import why_it_died

FIELDS = "\n\tclass_name: RolloutHost\n\tactor_id: 0a1b\n\tpid: 4242\n\tnamespace: 77aa\n\tip: 10.0.0.2\n"
DIED = f"The actor died unexpectedly before finishing this task.{FIELDS}"
WORKER = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
KILLED = (
    f"{DIED}{WORKER}Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: "
    "(1) the process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) "
    "the worker crashed unexpectedly due to SIGSEGV or another unexpected error. If it was killed by the kernel "
    "OOM killer (verifiable by checking for OOM in dmesg of the OOMing node), consider provisioning more memory."
)
LOST = (
    f"{DIED}The actor died because its node has died. Node Id: 5c1f\n\tthe actor's node was terminated unexpectedly: "
    "health check failed due to missing too many heartbeats"
)
MEMORY = (
    "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: 5c1f) was "
    "61.2GB / 62.0GB (0.987). Refer to the documentation on how to address the out of memory issue: https://docs.ray.io"
)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (KILLED, "its process was killed (signal 9, as the kernel sends it when memory runs out) or crashed"),
        (LOST, "its machine was lost"),
        (LOST.replace("terminated unexpectedly", "preempted"), "its machine was taken away"),
        (MEMORY, "its machine ran out of memory, and Ray killed it"),
        (f"{DIED}{WORKER}Worker exits with an exit code 1.", "its process ended with exit code 1"),
        (f"{DIED}{WORKER}Worker exits unexpectedly by a signal. Signal: 11", "a signal ended its process"),
        (f"{DIED}The actor is dead because it was killed by `ray.kill`.", "it was ended with ray.kill"),
        (f"{DIED}The actor is dead because its owner has died. Owner Id: 01", "the process that started it has died"),
        ("The actor 0a1b is unavailable: The actor is temporarily unavailable: RpcError", "it cannot be reached"),
        (f"{DIED}Something new happened. It is described at length.", "Something new happened"),
        (DIED, "Ray does not say why"),
    ],
)
def test_a_death_is_told_in_a_few_words(told, why):
    assert why_it_died(told) == why
