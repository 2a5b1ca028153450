"""verl's real actor update, on CPU and in two processes, does what the whole update through `bapo.policy_loss` does."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("verl")

from bapo import ClipSettings, policy_loss
from bapo.core.bounds import StopReason
from tests.adapters.launched import launched
from tests.adapters.verl import tiny

TARGET = 0.42
LOW_FIRST = ClipSettings.from_options("released-script", target_share=0.4)
ACTOR = "actor_rollout_ref.actor."
MICRO_BATCHES_OF_FOUR = f"{ACTOR}ppo_micro_batch_size_per_gpu=4"
DYNAMIC = [f"{ACTOR}use_dynamic_bsz=true", f"{ACTOR}ppo_max_token_len_per_gpu=24"]
CASES = {
    "update": {"overrides": tiny.bapo_options(target_share=TARGET)},
    "one micro-batch": {"overrides": [*tiny.bapo_options(target_share=TARGET), MICRO_BATCHES_OF_FOUR]},
    "dynamic": {"overrides": [*tiny.bapo_options(target_share=TARGET), *DYNAMIC]},
    "weighted": {"overrides": tiny.bapo_options(target_share=TARGET), "weighted": True},
    "sequences": {
        "overrides": [*tiny.bapo_options(target_share=TARGET), f"{ACTOR}loss_agg_mode=seq-mean-token-mean"],
    },
    "low first": {"overrides": tiny.bapo_options(preset="released-script", target_share=LOW_FIRST.target_share)},
    "two updates": {"overrides": tiny.bapo_options(target_share=TARGET), "updates": 2},
    "microbatch": {"overrides": tiny.bapo_options(target_share=TARGET, scope="microbatch")},
    "fixed": {"overrides": [*tiny.bapo_options(low="[0.8,0.8]", high="[1.2,1.2]", dual_clip=3.0)]},
    "verl": {"overrides": []},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def updates(model, out, processes, cases):
    return launched("tests.adapters.verl.actor_update", processes, out=out, model=str(model), cases=cases)


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    """Every case in two processes, two micro-batches of two sequences in each unless it says otherwise."""
    return updates(model, tmp_path_factory.mktemp("two") / "results.pt", 2, CASES)


@pytest.fixture(scope="module")
def one(model, tmp_path_factory):
    return updates(model, tmp_path_factory.mktemp("one") / "results.pt", 1, {"update": CASES["update"]})


def whole_update(model, tokens, **options):
    """The same update with transformers and `bapo.policy_loss` alone: bounds, loss, and the weights one SGD step on."""
    from transformers import LlamaForCausalLM

    network = LlamaForCausalLM.from_pretrained(model, attn_implementation="eager")
    logits = network(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits
    logprobs = logits.log_softmax(-1)[:, tiny.PROMPT - 1 : -1].gather(-1, tokens["responses"][..., None]).squeeze(-1)
    weights = tokens.get("rollout_is_weights", torch.ones(()))
    out = policy_loss(
        logprobs,
        tokens["old_log_probs"],
        tokens["advantages"] * weights,
        tokens["response_mask"].bool(),
        **{"settings": ClipSettings(target_share=TARGET), **options},
    )
    out.loss.backward()
    stepped = {name: (p - tiny.LEARNING_RATE * p.grad).detach() for name, p in network.named_parameters()}
    return out, stepped


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("update", {}),
        ("one micro-batch", {}),
        ("dynamic", {}),
        ("weighted", {}),
        ("sequences", {"reduction": "sequence_mean"}),
        ("low first", {"settings": LOW_FIRST}),
    ],
)
def test_bounds_loss_and_weights_are_those_of_the_whole_update(model, two, case, options):
    result = two[case]
    out, weights = whole_update(model, result["tokens"], **options)
    metrics = {name: values[0] for name, values in result["metrics"].items()}
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)  # a real search
    assert metrics["bapo/clip_low"] == out.bounds.low.item()
    assert metrics["bapo/clip_high"] == out.bounds.high.item()
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert metrics[f"bapo/stop/{StopReason(int(out.bounds.stop)).name.lower()}"] == 1
    assert metrics["actor/pg_loss"] == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(result["weights"], weights, rtol=0, atol=1e-6)


def test_one_collective_per_update(two):
    assert len(two["update"]["float64_all_reduces"]) == 1
    assert len(two["one micro-batch"]["float64_all_reduces"]) == 1
    assert len(two["two updates"]["float64_all_reduces"]) == 2
    assert two["microbatch"]["float64_all_reduces"] == []


def test_a_further_pass_only_where_bounds_need_it(two):
    assert two["update"]["forwards"] == [False, False, True, True]
    assert two["one micro-batch"]["forwards"] == [True]
    assert two["microbatch"]["forwards"] == [True, True]
    assert two["verl"]["forwards"] == [True, True]


def test_the_number_of_processes_does_not_matter(one, two):
    for name in ("bapo/clip_low", "bapo/clip_high"):
        assert one["update"]["metrics"][name] == two["update"]["metrics"][name]
    assert_close(one["update"]["weights"], two["update"]["weights"], rtol=0, atol=1e-6)


def test_the_second_update_solves_its_own_bounds(two):
    shares = two["two updates"]["metrics"]["bapo/share"]
    assert len(shares) == 2
    assert shares[0] != shares[1]


def test_bounds_per_micro_batch_are_other_bounds(two):
    assert two["microbatch"]["metrics"]["bapo/share"] != two["update"]["metrics"]["bapo/share"]


def test_fixed_bounds_are_verls_own_loss(two):
    """0.8, 1.2 and verl's dual clip of 3: the same step as its `vanilla` loss."""
    assert two["verl"]["metrics"]["actor/pg_clipfrac"][0] > 0
    assert_close(two["fixed"]["weights"], two["verl"]["weights"], rtol=0, atol=1e-7)
    for name in ("actor/pg_loss", "actor/ppo_kl", "grad_norm"):
        assert two["fixed"]["metrics"][name] == pytest.approx(two["verl"]["metrics"][name], abs=1e-6)
