"""The anchor check: sound updates are never reported, and each real fault is reported with its own cause."""

import copy
from functools import cache, partial

import pytest
import torch

from bapo.core.anchor import Pairs, likely_cause, positions_of
from bapo.learn.health import anchor_metrics, fresh_tokens
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.packing import pack
from bapo.models.layers import LoraSettings
from bapo.models.loading import load_policy
from bapo.rollout.engine import Sampling
from bapo.rollout.local.engine import LocalEngine
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.tasks.countdown import Countdown
from bapo.types import Group, Problem, Status, Trajectory
from tests.eight_bits import sampled_in_eight_bits
from tests.rounding import logprob_limit
from tests.tiny.models import tiny

CPU = torch.device("cpu")
PROMPTS, TOKENS = 16, 20


@cache
def policy():
    return load_policy("demo", dtype="float32", device="cpu")


@cache
def prompts():
    task = Countdown(train_size=PROMPTS, test_size=1)
    return [policy().encode(problem.prompt) for problem in task.train]


def model():
    return copy.deepcopy(policy().model)


def changed(scale, only=""):
    """The model with noise of this size, in units of each tensor's own deviation, on the weights with these names."""
    other, generator = model(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if only in name:
                weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    return other


def scored(groups):
    for group in groups:
        for index, trajectory in enumerate(group.trajectories):
            trajectory.reward = float(index % 2)
    return groups


def sampled(sampler, *, temperature=1.0, version=0, contexts=None, top_p=1.0):
    """Responses of the engine, two for each prompt."""
    stop = frozenset({policy().tokenizer.eos_token_id})
    scheduler = Scheduler(Sampling(temperature, stop, top_p), max_response_tokens=TOKENS)
    for number, context in enumerate(contexts or prompts()):
        group = new_group(number, Problem(str(number), "", None), list(context), responses=2, seed=5)
        scheduler.admit([group])
    engine = LocalEngine(sampler, slots=2 * PROMPTS)
    engine.load(sampler.named_parameters(), version=version)
    return scored(scheduler.run(engine).groups)


@torch.no_grad()
def truncated(sampler, keep):
    """Responses from what `keep` leaves of each distribution, with their log-probs after renormalisation."""
    generator, groups = torch.Generator().manual_seed(3), []
    rows = torch.nn.utils.rnn.pad_sequence
    contexts = [list(p) for p in prompts() for _ in range(2)]
    found = [Trajectory(prompt=list(c), seed=0, status=Status.TRUNCATED) for c in contexts]
    for _ in range(TOKENS):
        lengths = torch.tensor([len(c) for c in contexts])
        ids = rows([torch.tensor(c) for c in contexts], batch_first=True)
        seen = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        last = sampler(ids, attention_mask=seen).logits[torch.arange(len(ids)), lengths - 1].float()
        left = torch.where(keep(last.softmax(-1)), last, -torch.inf).log_softmax(-1)
        tokens = torch.multinomial(left.exp(), 1, generator=generator)[:, 0]
        for row, token in enumerate(tokens.tolist()):
            contexts[row].append(token)
            found[row].tokens.append(token)
            found[row].behavior_logprobs.append(float(left[row, token]))
            found[row].entropies.append(0.0)
            found[row].versions.append(0)
    for number in range(PROMPTS):
        groups.append(Group(number, Problem(str(number), "", None), found[2 * number : 2 * number + 2]))
    return scored(groups)


def top_p(mass):
    def keep(probabilities):
        ordered, places = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        return torch.zeros_like(before, dtype=torch.bool).scatter(1, places, before < mass)

    return keep


def top_k(count):
    return lambda probabilities: probabilities >= probabilities.topk(count).values[:, -1:]


def learner(trained=None, **settings):
    return Learner(model() if trained is None else trained, LearnerSettings(**{"objective": "grpo", **settings}))


def other_prompts(groups):
    """The same responses, behind prompts without their last token, as another template gives them."""
    for trajectory in (t for group in groups for t in group.trajectories):
        trajectory.prompt = trajectory.prompt[:-1]
    return groups


FAULTS = {
    "a lower temperature": (lambda: sampled(model(), temperature=0.6), "temperature", "at about 0.6"),
    "a higher temperature": (lambda: sampled(model(), temperature=1.5), "temperature", "at about 1.5"),
    "top-p": (lambda: truncated(model(), top_p(0.9)), "truncation", "kept as little as 0.90"),
    "top-k": (lambda: truncated(model(), top_k(2)), "truncation", "never lower"),
    "greedy": (lambda: truncated(model(), top_k(1)), "truncation", "higher in the mean"),
    "another prompt": (lambda: other_prompts(sampled(model())), "prompt", "the first 4 tokens"),
    "another head": (lambda: sampled(changed(0.2, "lm_head")), "head", "output head"),
    "other weights": (lambda: sampled(changed(0.2)), "weights", "has other weights"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_reported_with_its_cause(fault):
    make, cause, evidence = FAULTS[fault]
    update = learner().step(make())
    assert f"Likely cause: {cause};" in update.drift
    assert evidence in update.drift
    assert update.skipped is None  # there is no limit here


@pytest.mark.parametrize("fault", ["another prompt", "other weights", "greedy"])
def test_beyond_the_limit_no_weight_changes_and_the_batch_is_kept(fault):
    groups, ours = FAULTS[fault][0](), learner(anchor_limit=0.2)
    before = [weight.clone() for weight in ours.model.parameters()]
    update = ours.step(groups)
    assert update.skipped is not None
    assert update.skipped.drifted
    assert update.metrics["anchor_gap"] > 0.2
    assert all(torch.equal(old, new) for old, new in zip(before, ours.model.parameters(), strict=True))
    assert (update.version, ours.version) == (1, 1)
    kept = update.skipped.tokens
    gaps = (kept["behavior_logprobs"].double() - kept["logprobs"].double()).abs()
    assert float(gaps.mean()) == pytest.approx(update.metrics["anchor_gap"], rel=1e-6)
    assert sorted(kept["targets"].tolist()) == sorted(x for g in groups for t in g.trajectories for x in t.tokens)


def rounding_gap(ours, groups, *, size=torch.max):
    """What rounding alone may make of the gap between sampler and learner."""
    return logprob_limit(ours, pack(groups, estimator="grpo", micro_tokens=16384, device=CPU), size=size)


@pytest.mark.numeric
@pytest.mark.parametrize(("temperature", "micro_tokens"), [(0.6, 400), (1.0, 16384)])
def test_sound_updates_in_float32_are_never_reported(temperature, micro_tokens):
    """Of the updates on one rollout, only the first has fresh tokens."""
    ours = learner(objective="bapo", temperature=temperature, micro_tokens=micro_tokens, lr=1e-3)
    groups = sampled(ours.model, temperature=temperature)
    limit = rounding_gap(ours, groups)
    first, second = ours.step(groups), ours.step(groups)
    tokens = sum(len(t.tokens) for group in groups for t in group.trajectories)
    assert first.metrics["anchor_tokens"] == tokens
    assert first.metrics["anchor_gap_max"] < limit < 1e-3
    assert abs(first.metrics["anchor_bias"]) <= first.metrics["anchor_gap"] <= first.metrics["anchor_gap_max"]
    assert not any(name.startswith("anchor_") for name in second.metrics)
    assert second.metrics["kl"] > 1e-4  # the policy has moved, and that is no drift
    fresh = sampled(ours.model, temperature=temperature, version=2)
    limit = rounding_gap(ours, fresh)
    again = ours.step(groups + fresh)  # old and fresh ones together
    assert again.metrics["anchor_tokens"] < again.metrics["tokens"]
    assert again.metrics["anchor_gap_max"] < limit < 1e-3
    assert first.drift == second.drift == again.drift == ""


@pytest.mark.numeric
@pytest.mark.parametrize("sensor", ["update", "previous"])
def test_known_truncation_is_neither_a_gap_nor_a_drift(sensor):
    """Nothing has moved: ratios begin at the mass that was kept, and neither anchor nor brake takes it for a move."""
    settings = {"objective": "brake", "sensor": sensor, "lr": 1e-3}
    ours = learner(**settings)
    groups = sampled(ours.model, top_p=0.7)
    limit = 2 * rounding_gap(ours, groups)  # of the sampler's two numbers and the learner's one
    for group in groups:
        group.uses = 1
    (batch,) = pack(groups, estimator="grpo", micro_tokens=16384, device=CPU)
    kept = batch.log_kept[batch.advantages < 0].double()
    assert float(kept.mean()) < -0.05
    update = ours.step(groups)
    assert update.drift == ""
    assert update.metrics["anchor_gap_max"] < limit < 1e-3
    assert abs(update.metrics["drift"]) < limit
    assert update.metrics["used_low"] == pytest.approx(0.8, abs=limit / ours.settings.clip.brake)
    median = batch.log_kept.exp().sort().values[round((len(batch.log_kept) - 1) / 2)]
    assert update.metrics["ratio_p50"] == pytest.approx(float(median), abs=limit)

    for trajectory in (t for group in groups for t in group.trajectories):
        trajectory.log_kept = []
    unknowing = learner(**settings).step(groups)
    assert "truncation" in unknowing.drift
    assert unknowing.metrics["drift"] == pytest.approx(-float(kept.mean()), abs=limit)


@pytest.mark.numeric
def test_sound_updates_of_low_rank_additions_are_never_reported():
    ours = learner(load_policy("demo", dtype="float32", device="cpu", lora=LoraSettings(2)).model, lr=1e-2)
    for version in range(2):
        groups = sampled(ours.model, version=version)
        limit = rounding_gap(ours, groups)
        update = ours.step(groups)
        assert 0 < update.metrics["anchor_gap_max"] < limit < 1e-3
        assert update.drift == ""


CONTEXTS = [[4 + number, 5 + number, 6] for number in range(8)]


@pytest.mark.numeric
def test_sound_updates_in_bfloat16_are_never_reported():
    ours = learner(tiny().bfloat16(), lr=1e-3)
    assert ours.precision == torch.bfloat16
    for version in range(2):
        groups = sampled(ours.model, version=version, contexts=CONTEXTS)
        limit = rounding_gap(ours, groups, size=torch.mean)
        update = ours.step(groups)
        assert 0 < update.metrics["anchor_gap"] < limit < 0.2
        assert update.drift == ""


def test_in_bfloat16_a_temperature_shows_below_what_rounding_explains():
    ours = learner(tiny().bfloat16())
    few = learner(tiny().bfloat16()).step(sampled(ours.model, temperature=0.94, contexts=CONTEXTS))
    assert few.drift == ""  # 255 tokens prove nothing about so small a gap
    contexts = [[4 + number % 8, 5 + number % 6, 6 + number % 5] for number in range(48)]
    update = ours.step(sampled(ours.model, temperature=0.94, contexts=contexts))
    assert update.metrics["anchor_tokens"] > 1000
    assert update.metrics["anchor_gap"] < 0.1
    assert "Likely cause: temperature;" in update.drift
    assert "at about 0.9" in update.drift


@pytest.mark.parametrize("precision", ["fp8", "fp8-weights"])
def test_eight_bits_are_no_drift_where_they_are_known_and_broken_weights_are(precision):
    in_eight_bits = partial(sampled_in_eight_bits, states=precision == "fp8")
    groups = sampled(in_eight_bits(model()))
    update = learner(sampler_precision=precision).step(groups)
    assert 2e-3 < update.metrics["anchor_gap"] < 0.1
    assert update.drift == ""
    assert "float32 explains 0.001" in learner().step(groups).drift
    broken = learner(sampler_precision=precision).step(sampled(in_eight_bits(changed(0.6))))
    assert f"{precision} explains 0.5. Likely cause: weights;" in broken.drift


def test_a_sampler_of_16_bits_is_told_from_other_weights():
    update = learner(tiny()).step(sampled(tiny().bfloat16(), contexts=CONTEXTS))
    assert "Likely cause: rounding;" in update.drift
    assert "16-bit weights" in update.drift


def test_weights_that_stay_behind_are_told_from_those_that_never_fit():
    """The sampler keeps the first weights, and says that it has the newest ones."""
    ours, stale = learner(lr=3e-3), model()
    first = ours.step(sampled(stale, version=0))
    assert first.drift == ""
    second = ours.step(sampled(stale, version=1))
    assert "Likely cause: weights;" in second.drift
    assert f"have grown from {first.metrics['anchor_gap']:.2g} at the first comparison" in second.drift


def test_fresh_tokens_and_their_gaps_by_hand():
    """The tail of a continued response is fresh, unless it goes on with keys and values of older weights."""

    def response(versions, logprobs, reward):
        count = len(versions)
        return Trajectory([5, 6], 0, [7] * count, logprobs, [0.5] * count, versions, Status.STOPPED, reward)

    long = response([2, 2, 3, 3], [-1.0, -1.0, -2.0, -2.5], 1.0)
    short = response([3, 3], [-0.5, -1.5], 0.0)
    (batch,) = pack([Group(0, Problem("p", "", None), [long, short])], estimator="grpo", micro_tokens=99, device=CPU)
    fresh = fresh_tokens([batch], version=3, kept_caches=False)
    assert fresh.tolist() == [False, False, True, True, True, True]
    assert fresh_tokens([batch], version=3, kept_caches=True).tolist() == [False] * 4 + [True] * 2
    learners = torch.tensor([0.0, 0.0, -2.25, -2.0, -0.5, -2.5])
    found = {name: float(value) for name, value in anchor_metrics(batch.behavior_logprobs, learners, fresh).items()}
    # gaps: 0.25, -0.5, 0, 1
    assert found == {"anchor_tokens": 4, "anchor_gap": 1.75 / 4, "anchor_gap_max": 1.0, "anchor_bias": 0.75 / 4}
    assert positions_of(torch.tensor([0, 0, 0, 4, 4, 2])).tolist() == [0, 1, 2, 0, 1, 0]


def test_a_few_tokens_prove_nothing():
    groups = other_prompts(sampled(model()))[:1]
    update = learner(anchor_limit=0.2).step(groups)
    assert update.metrics["anchor_tokens"] < 64
    assert update.metrics["anchor_gap"] > 0.2
    assert (update.drift, update.skipped) == ("", None)


def test_the_temperature_of_a_softmax_is_found_by_its_signature():
    """Against logits in float64, tempered exactly."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 30, generator=generator, dtype=torch.float64)
    learners = logits.log_softmax(-1)
    entropy = -(learners.exp() * learners).sum(-1)
    for temperature in (0.8, 1.25):
        samplers = (logits / temperature).log_softmax(-1)
        tokens = torch.multinomial(samplers.exp(), 1, generator=generator)
        pairs = Pairs(samplers.gather(1, tokens)[:, 0], learners.gather(1, tokens)[:, 0], entropy)
        cause = likely_cause(pairs, noise=1e-3)
        assert cause.name == "temperature"
        assert f"at about {temperature:.2g} times" in cause.words


def test_gaps_that_are_independent_of_the_token_are_not_the_heads():
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        tokens = torch.multinomial(1 / torch.arange(1.0, 501), 1000, replacement=True, generator=generator)
        logprobs = -torch.log(tokens + 1.0) - 2 * torch.rand(1000, generator=generator)
        gaps = 0.5 * torch.randn(1000, generator=generator) * (tokens + 1.0).log()  # rare tokens have larger ones
        pairs = Pairs(logprobs + gaps, logprobs, None, None, tokens)
        assert likely_cause(pairs, noise=1e-3).name != "head"
