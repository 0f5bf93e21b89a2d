"""Known calls with lengths, sinks and slopes, in parts, and with patterns made again compute what first ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.memo import forget_all
from gossamer.plan.table import available
from gossamer.torch import calls

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
B, H, G, D = 2, 4, 2, 64


def inputs(N: int, b: int = B, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(b, heads, N, D, device="cuda", dtype=dtype) for heads in (H, G, G, H)]


def terms(names: str, N: int, b: int = B) -> dict[str, Any]:
    """Fresh values of the score terms called `names`."""
    found: dict[str, Any] = {}
    if "lengths" in names:
        found["key_lengths"] = torch.randint(1, N + 1, (b,), device="cuda", dtype=torch.int32)
    if "long" in names:
        found["key_lengths"] = found["key_lengths"].long()
    if "sinks" in names:
        found["sink_logits"] = torch.randn(H, device="cuda", dtype=torch.float32 if "long" in names else torch.bfloat16)
    if "slopes" in names:
        found |= {"alibi_slopes": torch.rand(H, device="cuda"), "alibi_distance": "signed"}
    if "softcap" in names:
        found["softcap"] = 5.0
    return found


def run(x: list[Tensor], pattern: gs.Pattern, **options: Any) -> list[Tensor]:
    """out and lse without gradients, out with them, and every gradient."""
    q, k, v, dout = x
    with torch.no_grad():
        alone = gs.attention(q, k, v, pattern, return_lse=True, deterministic=True, **options)
    leaves = [y.detach().requires_grad_() for y in (q, k, v)]
    if "sink_logits" in options:
        options["sink_logits"] = options["sink_logits"].detach().requires_grad_()
        leaves.append(options["sink_logits"])
    out, lse = gs.attention(*leaves[:3], pattern, return_lse=True, deterministic=True, **options)
    dlse = torch.linspace(-1, 1, lse.numel(), device="cuda").view(lse.shape)
    found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return [*alone, out.detach(), *found, *torch.autograd.grad((out, lse), leaves, (dout, dlse))]


def assert_known_calls_are_right(N: int, pattern: gs.Pattern, names: str, b: int = B, **options: Any) -> None:
    forget_all()
    run(inputs(N, b), pattern, **terms(names, N, b), **options)
    assert len(calls.known) == 2
    x, more = inputs(N, b), terms(names, N, b)
    found = run(x, pattern, **more, **options)
    assert len(calls.known) == 2
    forget_all()
    want = run(x, pattern, **more, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("names", ["lengths", "sinks", "lengths long", "lengths sinks softcap", "slopes", "softcap"])
@pytest.mark.parametrize(
    ("name", "N", "pattern"),
    [
        ("small", 40, gs.Causal()),
        ("small", 40, gs.Dense()),
        ("hopper", 700, gs.SlidingWindow(100)),
        ("hopper", 1500, gs.Causal()),
        ("triton", 700, gs.SlidingWindow(100)),
        ("triton", 900, gs.PowerStrided(2)),
    ],
    ids=str,
)
def test_terms(name: str, N: int, pattern: gs.Pattern, names: str) -> None:
    if available(name) or (name == "hopper" and "slopes" in names):
        pytest.skip("; ".join(available(name)) or "does not compute slopes")
    assert_known_calls_are_right(N, pattern, names, implementation=name)


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("N", [4096, 4100])
@pytest.mark.parametrize(
    "pattern",
    [
        gs.Dilated(127, 0, 16),
        gs.PerHead([gs.SlidingWindow(63)] * 2 + [gs.Dilated(127, 0, 16)] * 2),
        gs.Longformer(64, (0,), dilation=8),
        gs.LongNet((1024, 4096), (4, 16), heads=H),
    ],
    ids=lambda x: type(x).__name__,
)
def test_parts(pattern: gs.Pattern, N: int, b: int) -> None:
    assert_known_calls_are_right(N, pattern, "", b)


def test_a_pattern_may_be_made_again() -> None:
    forget_all()
    q, k, v, _ = inputs(300)
    found = [gs.attention(q, k, v, gs.SlidingWindow(50) & gs.Local(100)) for _ in range(4)]
    assert len(calls.known) == 1 and all(torch.equal(x, found[0]) for x in found[1:])
