"""Brake and `used_low` in verl: several epochs of its real actor update are those of `bapo.policy_loss` with `uses`."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

pytest.importorskip("verl")

from bapo import ClipSettings, policy_loss
from bapo.adapters.verl import BapoPolicyLossConfig, _Epochs, bapo_policy_loss
from tests.adapters.logged import logged
from tests.adapters.verl import tiny
from tests.adapters.verl.test_actor_update import ACTOR, TARGET, updates

RANKS = 2
PUSH_ONCE = {"target_share": TARGET, "used_low": 1.0}
DELTA = 0.8
FIXED = {"low": "[0.8,0.8]", "high": "[1.2,1.2]"}
BALANCED = {"target_share": 0.9, "used_low": 1.0, "remainder": "weigh"}
EPOCHS = {"epochs": 3, "updates": 2}
CASES = {
    "push once": {"overrides": tiny.bapo_options(**PUSH_ONCE), **EPOCHS},
    "shuffled": {"overrides": tiny.bapo_options(**PUSH_ONCE), "shuffle": True, **EPOCHS},
    "weighed": {"overrides": tiny.bapo_options(**BALANCED), "epochs": 3},
    "one micro-batch": {
        "overrides": [*tiny.bapo_options(**PUSH_ONCE), f"{ACTOR}ppo_micro_batch_size_per_gpu=4"],
        "epochs": 3,
    },
    "microbatch": {"overrides": tiny.bapo_options(used_low=1.0, scope="microbatch", **FIXED), **EPOCHS},
    "brake": {"overrides": tiny.bapo_options(brake=DELTA), "epochs": 3},
    "brake, shuffled": {"overrides": tiny.bapo_options(objective="brake", brake=DELTA), "shuffle": True, **EPOCHS},
    "brake and search": {"overrides": tiny.bapo_options(target_share=TARGET, brake=DELTA), "epochs": 3},
    "brake on all": {"overrides": tiny.bapo_options(objective="brake_all", brake=DELTA), "epochs": 3},
    "grpo": {"overrides": tiny.bapo_options(objective="grpo")},
    "default": {"overrides": tiny.bapo_options()},
    "off": {"overrides": tiny.bapo_options(target_share=TARGET), **EPOCHS},
    "first epoch": {"overrides": tiny.bapo_options(**PUSH_ONCE), "updates": 2},
    "first epoch, off": {"overrides": tiny.bapo_options(target_share=TARGET), "updates": 2},
}
FIXED_PAIR = {"low": (0.8, 0.8), "high": (1.2, 1.2)}
SETTINGS = {
    "push once": ClipSettings(**PUSH_ONCE),
    "shuffled": ClipSettings(**PUSH_ONCE),
    "weighed": ClipSettings(**BALANCED),
    "one micro-batch": ClipSettings(**PUSH_ONCE),
    "microbatch": ClipSettings(used_low=1.0, **FIXED_PAIR),
    "brake": ClipSettings(brake=DELTA, **FIXED_PAIR),
    "brake, shuffled": ClipSettings(brake=DELTA, **FIXED_PAIR),
    "brake and search": ClipSettings(target_share=TARGET, brake=DELTA),
    "brake on all": ClipSettings(brake=DELTA, brake_on="all", **FIXED_PAIR),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    return updates(model, tmp_path_factory.mktemp("two") / "results.pt", RANKS, CASES)


def steps_of(epochs=1, updates=1, shuffle=False, **_):
    """The epoch and the rows of each optimizer step, over all ranks: verl seeds each rank's order by its number."""
    part = tiny.SEQUENCES // RANKS
    loaders = [
        DataLoader(
            torch.arange(part) + rank * part,
            batch_size=part // updates,
            collate_fn=torch.stack,
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(1 + rank),
        )
        for rank in range(RANKS)
    ]
    for epoch in range(epochs):
        for rows in zip(*loaders, strict=True):
            yield epoch, torch.cat(rows)


def trained(model, tokens, settings, case):
    """The same epochs in float64 with transformers, `bapo.policy_loss` and SGD: each step's result, the last weights,
    and the number of tokens that only `used_low` clips."""
    from transformers import LlamaForCausalLM

    network = LlamaForCausalLM.from_pretrained(model, attn_implementation="eager").double()
    results, stopped = [], 0
    for epoch, rows in steps_of(**case):
        now = {name: value[rows] for name, value in tokens.items()}
        logits = network(input_ids=now["input_ids"], attention_mask=now["attention_mask"]).logits
        logprobs = logits.log_softmax(-1)[:, tiny.PROMPT - 1 : -1].gather(-1, now["responses"][..., None]).squeeze(-1)
        mask, behavior = now["response_mask"].bool(), now["old_log_probs"].double()
        uses = torch.full_like(mask, epoch, dtype=torch.int64) if settings.rule_of_used else None
        out = policy_loss(logprobs, behavior, now["advantages"].double(), mask, settings=settings, uses=uses)
        network.zero_grad()
        out.loss.backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= tiny.LEARNING_RATE * parameter.grad
        ratio = (logprobs - behavior).exp()
        fixed_low = 0.8 if settings.brake_on == "all" else out.bounds.low
        stopped += int((mask & (now["advantages"] < 0) & (ratio > fixed_low) & ~out.retained).sum())
        results.append(out)
    return results, {name: value.detach() for name, value in network.named_parameters()}, stopped


@pytest.mark.parametrize("case", SETTINGS)
def test_several_epochs_are_those_of_the_core(model, two, case):
    result = two[case]
    steps, weights, stopped = trained(model, result["tokens"], SETTINGS[case], CASES[case])
    assert stopped > 2
    for name in ("clip_low", "clip_high", "share", "drift", "used_low") if case != "microbatch" else ():
        expected = [out.metrics[name].item() for out in steps if name in out.metrics]
        logged = result["metrics"].get(f"bapo/{name}", [])
        assert len(logged) == len(expected)
        first_epoch = {"brake": 1, "brake, shuffled": 2}  # where the share is that of each micro-batch
        start = first_epoch.get(case, 0) if name == "share" else 0
        assert logged[start:] == pytest.approx(expected[start:], abs=1e-5)
    if "brake" in case:
        lows = result["metrics"]["bapo/clip_low" if case == "brake on all" else "bapo/used_low"]
        assert any(SETTINGS[case].low[0] + 0.01 < low < 1 for low in lows)
    assert result["metrics"]["actor/pg_loss"] == pytest.approx([out.loss.item() for out in steps], abs=1e-5)
    assert_close({name: value.double() for name, value in result["weights"].items()}, weights, rtol=0, atol=1e-5)


def test_the_first_epoch_is_the_one_without_the_rule_bit_for_bit(two):
    once, off = two["first epoch"], two["first epoch, off"]
    assert all(torch.equal(once["weights"][name], off["weights"][name]) for name in off["weights"])
    assert {name: once["metrics"][name] for name in once["metrics"] if "bapo" in name or "actor" in name} == {
        name: off["metrics"][name] for name in off["metrics"] if "bapo" in name or "actor" in name
    }
    several, plain = two["push once"]["weights"], two["off"]["weights"]
    assert any(not torch.equal(several[name], plain[name]) for name in plain)


def test_the_brake_needs_no_further_pass_in_the_first_epoch_and_is_grpo_there(two):
    """Two micro-batches in a step."""
    assert two["brake"]["forwards"] == [True, True] + [False, False, True, True] * 2
    assert len(two["brake"]["float64_all_reduces"]) == 2
    assert two["brake on all"]["forwards"] == [False, False, True, True] * 3
    assert two["grpo"]["forwards"] == two["default"]["forwards"] == [True, True]
    grpo, default = two["grpo"]["weights"], two["default"]["weights"]
    assert all(torch.equal(default[name], grpo[name]) for name in grpo)
    assert two["default"]["metrics"]["bapo/drift"] == [0.0]


def test_a_rule_for_used_tokens_without_a_second_epoch_is_pointed_out(two):
    said = {case: [line for line in result["warnings"] if "policy_loss." in line] for case, result in two.items()}
    for case, rule in (("first epoch", "used_low=1.0"), ("default", "brake=0.03")):
        assert said[case][0].startswith(f"policy_loss.{rule} ")
        assert "does nothing with actor.ppo_epochs=1" in said[case][0]
    assert {case for case in said if said[case]} == {"first epoch", "default"}


def test_rows_are_counted_epoch_by_epoch():
    epochs = _Epochs(rows=6)
    assert [epochs.start_step(rows) for rows in (2, 4, 3, 3, 6, 1)] == [0, 0, 1, 1, 2, 3]
    with pytest.raises(AssertionError, match="the end of an epoch and the next one"):
        epochs.start_step(6)


def test_a_loss_outside_the_worker_does_not_guess():
    names = ("log_prob", "old_log_prob", "advantages", "response_mask")
    given = dict(zip(names, logged(), strict=True))
    for scope in ("update", "microbatch"):
        for options, rule in (({"used_low": 1.0}, r"used_low=1\.0"), ({}, r"brake=0\.03")):
            config = tiny.actor_config(*tiny.bapo_options(scope=scope, **options))
            with pytest.raises(ValueError, match=rf"policy_loss\.{rule} needs the epoch.*called from elsewhere"):
                bapo_policy_loss(**given, config=config)
    with pytest.raises(ValueError, match=r"policy_loss: used_low=1\.5 must be a number between 0 and 1"):
        BapoPolicyLossConfig(used_low=1.5)
