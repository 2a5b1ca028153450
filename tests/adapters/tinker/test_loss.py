"""The loss through Tinker's real `TrainingClient.forward_backward_custom`, with a tiny model in the server's place."""

import asyncio

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("tinker")

from tinker import types
from tinker.lib.public_interfaces.training_client import TrainingClient

from bapo import ClipSettings, policy_loss
from bapo.adapters.tinker import bapo_loss
from bapo.core.bounds import StopReason

VOCABULARY, LENGTHS = 7, (6, 9, 4, 8, 11)


class Done:
    """A result that is there already."""

    def __init__(self, value):
        self.value = value

    async def result_async(self, timeout=None):
        return self.value


class LocalClient(TrainingClient):
    """Tinker's client with its two requests to the server answered here, by a table of next-token logits."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.holder = None
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator).requires_grad_()

    def logprobs(self, datum):
        rows = self.table[torch.tensor(datum.model_input.to_ints())].log_softmax(-1)
        return rows.gather(-1, datum.loss_fn_inputs["target_tokens"].to_torch()[:, None]).squeeze(-1)

    async def forward_async(self, data, loss_fn, loss_fn_config=None):
        assert all(set(datum.loss_fn_inputs) == {"target_tokens", "weights"} for datum in data)
        outputs = [{"logprobs": types.TensorData.from_torch(self.logprobs(datum).detach())} for datum in data]
        return Done(types.ForwardBackwardOutput("ArrayRecord", outputs, {}))

    async def forward_backward_async(self, data, loss_fn, loss_fn_config=None):
        assert loss_fn == "cross_entropy"
        loss = sum(-(self.logprobs(datum) * datum.loss_fn_inputs["weights"].to_torch()).sum() for datum in data)
        loss.backward()
        return Done(types.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": loss.item()}))

    def step(self, data, loss):
        async def call():
            return await (await self.forward_backward_custom_async(data, loss)).result_async()

        return asyncio.run(call())


@pytest.fixture
def client():
    return LocalClient()


def sampled(client, seed=6):
    """Data as a rollout leaves it: targets, the sampler's log-probs, advantages, and which tokens were sampled."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i, length in enumerate(LENGTHS):
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
        inputs = {"target_tokens": types.TensorData.from_torch(tokens[1:])}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
        stale = (client.logprobs(datum).detach() + 0.5 * torch.randn(length, generator=generator)).clamp(max=-0.01)
        columns = {
            "logprobs": stale,
            "advantages": torch.full((length,), (1.0, -0.8, 0.9, -1.1, -0.7)[i]),
            "mask": (torch.arange(length) > 1).float(),
        }
        inputs = datum.loss_fn_inputs | {name: types.TensorData.from_torch(x) for name, x in columns.items()}
        data.append(types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs))
    return data


def whole_update(client, data, uses=None, **options):
    """The same batch through `bapo.policy_loss` and the same model: what it computed, and the model's gradient."""
    columns = (
        torch.cat([datum.loss_fn_inputs[name].to_torch() for datum in data])
        for name in ("logprobs", "advantages", "mask")
    )
    behavior, advantages, mask = columns
    logprobs = torch.cat([client.logprobs(datum) for datum in data])
    out = policy_loss(logprobs, behavior, advantages, mask.bool(), uses=uses, **options)
    [gradient] = torch.autograd.grad(out.loss, client.table)
    return out, gradient


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({"target_share": 0.17}, {"settings": ClipSettings(target_share=0.17)}),
        ({"preset": "weak-model", "denominator": 100.0}, {"settings": "weak-model", "denominator": 100.0}),
        ({"preset": "released-script", "dual_clip": 3.0}, {"settings": "released-script", "dual_clip": 3.0}),
    ],
)
def test_bounds_loss_and_the_models_gradient_are_the_cores(client, made, expected):
    data = sampled(client)
    if isinstance(expected["settings"], str):
        expected = {**expected, "settings": ClipSettings.preset(expected["settings"])}
    result = client.step(data, bapo_loss(**made))
    out, gradient = whole_update(client, data, **expected)
    assert result.metrics["loss:sum"] == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(client.table.grad, gradient, rtol=0, atol=1e-6)
    for name in ("clip_low", "clip_high", "share", "clip_fraction"):
        assert result.metrics[f"bapo/{name}"] == pytest.approx(out.metrics[name].item(), abs=1e-6)


def test_the_search_of_the_parity_test_is_a_real_one(client):
    out, _ = whole_update(client, sampled(client), settings=ClipSettings(target_share=0.17))
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)


def with_uses(data, counts):
    """The data, each with how often it was trained on before."""
    return [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={
                **datum.loss_fn_inputs,
                "uses": types.TensorData.from_torch(torch.full((length,), count, dtype=torch.int64)),
            },
        )
        for datum, length, count in zip(data, LENGTHS, counts, strict=True)
    ]


@pytest.mark.parametrize("rule", [{"used_low": 1.0}, {"brake": 0.3}], ids=str)
def test_several_passes_are_those_of_the_core(client, rule):
    """The first three responses are used again in every pass; the last two count as fresh each time."""
    data, loss = sampled(client), bapo_loss(target_share=0.17, **rule)
    settings, differs = ClipSettings(target_share=0.17, **rule), []
    for step in range(3):
        counts = [step, step, step, 0, 0]
        uses = torch.tensor(counts).repeat_interleave(torch.tensor(LENGTHS))
        out, gradient = whole_update(client, data, uses, settings=settings)
        _, without = whole_update(client, data, settings=ClipSettings(target_share=0.17))
        client.table.grad = None
        result = client.step(with_uses(data, counts), loss)
        assert result.metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
        assert result.metrics["loss:sum"] == pytest.approx(out.loss.item(), abs=1e-6)
        assert_close(client.table.grad, gradient, rtol=0, atol=1e-6)
        differs.append(not torch.equal(gradient, without))
        with torch.no_grad():
            client.table -= 0.5 * client.table.grad
    assert differs == [False, True, True]


def test_says_what_is_wrong_with_the_uses(client):
    data, loss = sampled(client), bapo_loss(used_low=1.0)
    with pytest.raises(ValueError, match=r"data\[0\].loss_fn_inputs has no 'uses', which brake and used_low need"):
        client.step(data, loss)
    counted = with_uses(data, [0, 1, 0, -1, 0])
    with pytest.raises(ValueError, match="uses holds -1, but a token cannot have been trained on less than 0 times"):
        client.step(counted, loss)
    with pytest.raises(ValueError, match="uses= is given, but nothing asks for it"):
        client.step(with_uses(data, [1, 1, 1, 1, 1]), bapo_loss())


def test_says_which_input_is_missing(client):
    data = sampled(client)
    del data[2].loss_fn_inputs["mask"]
    with pytest.raises(ValueError, match=r"data\[2\].loss_fn_inputs has no 'mask'"):
        client.step(data, bapo_loss())


def test_says_which_datum_has_too_many_values_even_if_the_total_is_right(client):
    data = sampled(client)
    for i, change in ((1, 1), (3, -1)):
        values = torch.zeros(LENGTHS[i] + change)
        data[i].loss_fn_inputs["advantages"] = types.TensorData.from_torch(values)
    with pytest.raises(ValueError, match=r"data\[1\].loss_fn_inputs\['advantages'\] has the shape \(10,\).* 9 target"):
        client.step(data, bapo_loss())


def test_a_mask_is_not_a_weight(client):
    data = sampled(client)
    data[4].loss_fn_inputs["mask"] = types.TensorData.from_torch(torch.full((LENGTHS[4],), 0.5))
    with pytest.raises(ValueError, match="mask holds values other than 0 and 1"):
        client.step(data, bapo_loss())
