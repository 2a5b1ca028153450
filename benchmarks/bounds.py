"""What choosing the bounds costs: the whole loss, forward and backward, against the textbook loss with fixed bounds.

    fixed clip     the textbook loss, -min(r A, clip(r) A) with token-mean and given bounds; this column is a time, and
                   the others are multiples of it
    ours           the same loss with bounds from solve_bounds: one pass over the tokens, for both measures
    torch only     the same without kernels, for the gradient measure (CUDA only)
    step search    the same, but the share is measured again after every step of a bound, with one host read per step,
                   as in the released code
    policy_loss    our own loss, with its checks and metrics, with fixed bounds (grpo) and with solved ones (bapo)
    bapo/grpo      the time of the second over that of the first
    used           the same two losses with a lower bound of 1 for tokens that were trained on before (half of them),
                   over the losses without it
    brake          the brake alone over grpo, and bapo with the brake over bapo without

Every ratio compares times of the same round of one run.

    python benchmarks/bounds.py [--device cuda] [--rounds 15]
"""

import argparse
import statistics

import torch
from timing import interleaved, ratio, table
from torch import Tensor

from bapo import ClipBounds, ClipSettings, policy_loss, solve_bounds
from bapo.core.bounds import first_to_reach, grids_of
from bapo.core.entropy_rule import positive_share
from bapo.core.sums import DEVICE_CHUNK, Chunk, compared_sums

PUSH_ONCE, BRAKE = ClipSettings(used_low=1.0), ClipSettings(brake=0.03)


def header(device: str) -> list[str]:
    """The header of the columns that `measure` fills."""
    kernels = ["torch only"] if device == "cuda" else []
    ours = ["ours, gradient", "ours, surrogate", *kernels]
    losses = ["policy_loss grpo", "policy_loss bapo", "bapo/grpo", "grpo, used", "bapo, used", "brake", "bapo, brake"]
    return ["tokens", "fixed clip", *ours, "step search", *losses]


def stale_update(tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens as in a stale update: most ratios near 1, heavy tails, wrong responses longer than right ones."""
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(tokens, generator=generator).mul_(8).pow_(2).div_(16)
    drift = torch.randn(tokens, generator=generator) * (0.02 + 0.4 * torch.rand(tokens, generator=generator).pow(3))
    advantages = torch.where(torch.rand(tokens, generator=generator) < 0.33, 1.0, -1.0)
    mask = torch.rand(tokens, generator=generator) < 0.95
    logprobs = (behavior + drift).clamp(max=0)
    return tuple(x.to(device) for x in (logprobs, behavior, advantages, mask))  # type: ignore[return-value]


def step_search(ratio: Tensor, advantages: Tensor, mask: Tensor, settings: ClipSettings) -> tuple[float, float]:
    """The literal loop over tensors: measure, compare on the host, move one bound, repeat."""
    signal = torch.where(mask, advantages, 0.0)
    for low, high in settings.path:
        bounds = settings.low_grid[low], settings.high_grid[high]
        if positive_share(ratio, signal, *bounds, settings.measure).item() >= settings.target_share:
            break
    return bounds


def torch_only(ratio: Tensor, advantages: Tensor, mask: Tensor, settings: ClipSettings) -> tuple[Tensor, Tensor]:
    """The solver in plain torch operations, as it runs on an accelerator without Triton."""
    grids = grids_of(settings, ratio.dtype, ratio.device)
    columns = torch.where(mask, ratio, 0.0).split(DEVICE_CHUNK), torch.where(mask, advantages, 0.0).split(DEVICE_CHUNK)
    chunks = (Chunk(ratios, ratios, signal) for ratios, signal in zip(*columns, strict=True))
    table = compared_sums(chunks, grids.low, grids.high, grids.thresholds, surrogate=settings.measure == "surrogate")
    bounds = first_to_reach(table, settings, ratio.dtype)
    return bounds.low, bounds.high


def loss(logprobs: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor, bounds_of) -> None:
    logprobs.grad = None
    ratio = (logprobs - behavior).exp()
    low, high = bounds_of(ratio.detach(), advantages, mask)
    per_token = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    (torch.where(mask, per_token, 0.0).sum() / mask.sum()).backward()


def our_loss(
    logprobs: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor, objective: str, **options: object
) -> None:
    logprobs.grad = None
    policy_loss(logprobs, behavior, advantages, mask, objective=objective, **options).loss.backward()


def measure(tokens: int, device: str, rounds: int) -> list[str]:
    logprobs, behavior, advantages, mask = stale_update(tokens, device)
    logprobs.requires_grad_()
    settings = {m: ClipSettings(measure=m, target_share=0.4) for m in ("gradient", "surrogate")}

    def ours(measure: str):
        def solve(ratio: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            bounds: ClipBounds = solve_bounds(ratio, advantages, mask, settings[measure])
            return bounds.low, bounds.high

        return solve

    def search(ratio: Tensor, advantages: Tensor, mask: Tensor) -> tuple[float, float]:
        return step_search(ratio, advantages, mask, settings["gradient"])

    ratio_now = (logprobs - behavior).exp().detach()
    solved, searched = ours("gradient")(ratio_now, advantages, mask), search(ratio_now, advantages, mask)
    assert all(abs(a.item() - b) < 1e-6 for a, b in zip(solved, searched, strict=True)), (solved, searched)

    tensors = (logprobs, behavior, advantages, mask)
    uses = torch.randint(0, 2, mask.shape, generator=torch.Generator().manual_seed(1)).to(device)
    cuda_only = {"torch": lambda: loss(*tensors, lambda *x: torch_only(*x, settings["gradient"]))}
    times = interleaved(
        {
            "fixed": lambda: loss(*tensors, lambda *_: (0.8, 1.2)),
            "gradient": lambda: loss(*tensors, ours("gradient")),
            "surrogate": lambda: loss(*tensors, ours("surrogate")),
            "search": lambda: loss(*tensors, search),
            "policy_loss grpo": lambda: our_loss(*tensors, "grpo"),
            "policy_loss bapo": lambda: our_loss(*tensors, "bapo"),
            "grpo, used": lambda: our_loss(*tensors, "grpo", uses=uses, used_low=1.0),
            "bapo, used": lambda: our_loss(*tensors, "bapo", uses=uses, settings=PUSH_ONCE),
            "brake": lambda: our_loss(*tensors, "brake", uses=uses),
            "bapo, brake": lambda: our_loss(*tensors, "bapo", uses=uses, settings=BRAKE),
            **(cuda_only if device == "cuda" else {}),
        },
        device=device,
        rounds=rounds,
    )
    return [
        f"2^{tokens.bit_length() - 1}",
        f"{statistics.median(times['fixed']):.2f} ms",
        *(
            f"{ratio(times, name, 'fixed'):.2f}x"
            for name in ("gradient", "surrogate", "torch", "search", "policy_loss grpo", "policy_loss bapo")
            if name in times
        ),
        f"{ratio(times, 'policy_loss bapo', 'policy_loss grpo'):.2f}x",
        f"{ratio(times, 'grpo, used', 'policy_loss grpo'):.2f}x",
        f"{ratio(times, 'bapo, used', 'policy_loss bapo'):.2f}x",
        f"{ratio(times, 'brake', 'policy_loss grpo'):.2f}x",
        f"{ratio(times, 'bapo, brake', 'policy_loss bapo'):.2f}x",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds per size")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"Loss forward + backward on {name}; ratios to the fixed clip.\n")
    rows = [measure(tokens, arguments.device, arguments.rounds) for tokens in (2**16, 2**19, 2**21)]
    print(table(header(arguments.device), rows))


if __name__ == "__main__":
    main()
