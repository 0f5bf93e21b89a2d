"""Random calls of `entmax_attention` that kernels compute, against the operations of torch in float64."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import gossamer as gs
from gossamer.entmax.api import EntmaxAux

LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def call(
    seed: int, device: str, dtypes: list[torch.dtype], sizes: list[int], form: int | None = None
) -> dict[str, Any]:
    """Everything that a user can pass, drawn.

    Args:
        form: from which all is drawn that kernels are compiled for, where it is not drawn from the seed.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    of_form = draw if form is None else random.Random(form)
    dtype = of_form.choice(dtypes)
    B, (H, G) = of_form.choice([1, 2]), of_form.choice([(1, 1), (2, 2), (4, 2), (3, 1)])
    Q, K = draw.choice(sizes), draw.choice(sizes)
    D, E = of_form.choice([8, 20, 64]), of_form.choice([8, 40, 64])
    size = draw.choice([0.1, 1.0, 4.0])

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    q, k, v, dout = size * randn(B, H, Q, D), randn(B, G, K, D), randn(B, G, K, E), randn(B, H, Q, E)
    if draw.random() < 0.3:  # views of (B, N, heads, size)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    alpha: Any = of_form.choice([1.0, 1.1, 1.25, 1.5, 1.5, 1.75, 2.0])
    if of_form.random() < 0.3:
        alpha = 1 + torch.rand(H, generator=generator, dtype=torch.float64).to(device)
    patterns = [None, gs.SlidingWindow(9), gs.Causal(), gs.Causal() & gs.SlidingWindow(30)]
    options = {
        "alpha": alpha, "top_k": of_form.choice([None, None, 1, 5, 40, 70]), "causal": of_form.random() < 0.5,
        "pattern": of_form.choice(patterns), "scale": draw.choice([None, None, 0.3, -0.2]),
        "save": draw.choice(["lists", "lists", "tau"]),
    }  # fmt: skip
    if of_form.random() < 0.3:
        options["q_positions"] = torch.randint(-2, K, (Q,), generator=generator).to(device)
        options["k_positions"] = torch.randint(0, K, (B, G, K), generator=generator).to(device)
    return {"q": q, "k": k, "v": v, "dout": dout, "options": options}


def results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
    """(out, aux, gradients) of a call."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    options = dict(options)
    inputs = [q, k, v]
    if isinstance(options["alpha"], Tensor):
        options["alpha"] = options["alpha"].detach().requires_grad_()
        inputs.append(options["alpha"])
    way: Any = "torch" if q.dtype == torch.float64 else "kernels"
    out, aux = gs.entmax_attention(q, k, v, options.pop("pattern"), **options, return_aux=True, implementation=way)
    return out, aux, torch.autograd.grad(out, inputs, dout)


def check(given: dict[str, Any]) -> None:
    """Numbers within rounding of those of the same inputs in float64."""
    options, tensors = given["options"], {name: x for name, x in given.items() if name != "options"}
    out, aux, found = results(**tensors, options=options)
    exact, of_exact, expected = results(**{name: x.double() for name, x in tensors.items()}, options=options)
    limit = LIMITS[out.dtype]
    q, k = given["q"].double(), given["k"].double().repeat_interleave(given["q"].shape[1] // given["k"].shape[1], 1)
    # Scores that are close to one another may change places: rows of which the support is another are left out.
    same = (aux.support == of_exact.support) & (aux.certified == of_exact.certified)
    assert same.double().mean() > 0.9
    near = (q @ k.mT).abs().max() * (1.0 if options["scale"] is None else abs(options["scale"]))
    noise = float(1e-6 * near)
    assert_close("out", out, exact, limit + noise)
    tau, wanted = (torch.where(x < torch.inf, x, 0.0).double() for x in (aux.tau, of_exact.tau))
    assert torch.equal(torch.isinf(aux.tau), torch.isinf(of_exact.tau))
    assert_close("tau", tau, wanted, 1e-5 + noise)
    for name, one, other in zip(("dq", "dk", "dv", "dalpha"), found, expected, strict=False):
        assert_close(name, one, other, 3 * (limit + noise))


def assert_close(name: str, found: Tensor, expected: Tensor, limit: float) -> None:
    """Euclidean, relative to the size of all; gradients that are exactly 0, as of one key a row, are so to rounding."""
    assert bool(torch.isfinite(found).all()), name
    error = (found.double() - expected.double()).norm() / (expected.double().norm() + 1e-3 * expected.numel() ** 0.5)
    assert error <= limit, (name, float(error), limit)


def aux_of(*arguments: Any, **options: Any) -> tuple[Tensor, EntmaxAux]:
    """A call of the kernels, with its aux."""
    return gs.entmax_attention(*arguments, **options, return_aux=True, implementation="kernels")
