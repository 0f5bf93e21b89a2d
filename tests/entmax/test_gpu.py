"""The kernels of entmax on a GPU, against operations of torch in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.memo import forget_all
from tests.support import entmax_oracle as oracle
from tests.support.entmax_cases import LIMITS, assert_close, aux_of, call, check, results
from tests.support.host_reads import nothing_waits
from tests.support.thorough import more

pytest.importorskip("triton")
from gossamer.entmax.launch import selection

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("form", [0, 5, 7, *more(1, 6)])
def test_random_calls(form: int) -> None:
    """Kernels are compiled once for all calls of a form.

    These have every type and head size, alpha of 1, of other numbers and of each head, long, short and no top_k,
    windows, causal calls and others, and positions.
    """
    for seed in range(100 * form, 100 * form + 5):
        check(call(seed, "cuda", [torch.float16, torch.bfloat16, torch.float32], [1, 70, 300, 1000], form))


def test_calls_as_they_are_computed_by_default() -> None:
    """entmax-1.5, causal, in bfloat16, where lists hold all supports, some and none."""
    for N, size in itertools.product((300, 2000), (0.1, 1.0, 4.0)):
        generator = torch.Generator().manual_seed(N)
        q, k, v, dout = (torch.randn(1, n, N, 64, generator=generator).cuda() for n in (2, 1, 1, 2))
        x = {"q": (size * q).bfloat16(), "k": k.bfloat16(), "v": v.bfloat16(), "dout": dout.bfloat16()}
        for save in ("lists", "tau"):
            inputs = [x[name].detach().requires_grad_() for name in "qkv"]
            out = gs.entmax_attention(*inputs, causal=True, save=save)
            found = torch.autograd.grad(out, inputs, x["dout"])
            exact = [t.detach().double().requires_grad_() for t in inputs]
            wide = gs.entmax_attention(*exact, causal=True)
            expected = torch.autograd.grad(wide, exact, x["dout"].double())
            for name, one, other in zip(("out", "dq", "dk", "dv"), (out, *found), (wide, *expected), strict=True):
                assert_close(name, one, other, LIMITS[torch.bfloat16])


def test_nothing_is_read_and_bits_are_the_same() -> None:
    given = call(3, "cuda", [torch.bfloat16], [1000])
    for options in ({"top_k": None}, {"top_k": 8}, {"top_k": None, "save": "tau"}):
        given["options"] |= {"alpha": 1.5, "pattern": None, "causal": True} | options
        first = results(**given)
        with nothing_waits():
            for _ in range(50):
                again = results(**given)
        for one, other in zip((first[0], *first[1], *first[2]), (again[0], *again[1], *again[2]), strict=True):
            assert torch.equal(one, other)


# In every type and of every padded head size; patterns and sizes take turns.
FLAT = list(
    zip(
        [1.0, 1.25, 1.3, 1.5, 2.0, "heads"],
        itertools.cycle([gs.Causal(), gs.SlidingWindow(300), None]),
        itertools.cycle([
            (64, 40, torch.bfloat16, 900, 1000), (128, 128, torch.float16, 700, 700), (32, 32, torch.float32, 500, 501),
            (256, 256, torch.bfloat16, 300, 600), (256, 128, torch.float32, 200, 200),
        ]),
        strict=False,
    )
)  # fmt: skip


@pytest.mark.parametrize(("alpha", "pattern", "form"), FLAT)
def test_rows_without_a_list(alpha: float | str, pattern: gs.Pattern | None, form: tuple[Any, ...]) -> None:
    """Flat scores, whose supports no list holds."""
    D, E, dtype, Q, K = form
    g = torch.Generator().manual_seed(D)
    shapes = (4, Q, D), (2, K, D), (2, K, E), (4, Q, E)
    q, k, v, dout = ((0.2 if i == 0 else 1.0) * torch.randn(1, *x, generator=g) for i, x in enumerate(shapes))
    of_heads = torch.tensor([1.02, 1.2, 1.6, 1.95], dtype=torch.float64).cuda() if alpha == "heads" else alpha
    options = {"alpha": of_heads, "pattern": pattern, "scale": None}
    given = {"q": q, "k": k, "v": v + 1, "dout": dout}
    check({name: x.to(dtype).cuda() for name, x in given.items()} | {"options": options})


def test_a_key_of_every_row() -> None:
    """One key has a weight in every row, so that its gradients are sums of parts."""
    g = torch.Generator().manual_seed(2)
    q, k, v, dout = (torch.randn(1, 2, n, 64, generator=g) for n in (3000, 400, 400, 3000))
    q[..., :4] += 2
    k[:, :, 7, :4] += 8
    given = {name: x.bfloat16().cuda() for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items()}
    for top_k in (None, 8):
        check(given | {"options": {"alpha": 1.5, "top_k": top_k, "scale": None, "pattern": None}})


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # by the package's backward, in a thread of torch
@pytest.mark.parametrize("implementation", [None, "kernels"])
@pytest.mark.parametrize("causal", [False, True])
def test_at_most_twice_the_error_of_the_package(causal: bool, implementation: str | None) -> None:
    """Of `entmax`, in float32 on the same device, with an alpha for each head.

    By kernels, whose logarithms and powers of two are approximate, four times.
    """
    package = pytest.importorskip("tests.entmax.test_package")
    mask = package.MASKS[causal].cuda()

    def theirs(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        s = (q.shape[-1] ** -0.5 * (q @ k.mT)).masked_fill(~mask, -torch.inf)
        return package.by_bisection(s, alpha) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        return gs.entmax_attention(q, k, v, alpha=alpha, causal=causal, implementation=implementation)

    most = 2 if implementation is None else 4
    for alpha, size in itertools.product((1.05, 1.25, 1.5, 1.75, 2.0), (1.0, 8.0)):
        found = package.medians({"entmax": theirs, "gossamer": ours}, alpha, size, causal, "cuda")
        ratios = {name: found["gossamer"][name] / other for name, other in found["entmax"].items()}
        print(alpha, size, {name: round(ratio, 2) for name, ratio in ratios.items()})
        assert all(ratio <= most for ratio in ratios.values()), (alpha, size, ratios)


@pytest.mark.parametrize("options", [{"alpha": 1.5}, {"top_k": 16}], ids=str)
def test_a_small_buffer_changes_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 4, 1500, 64, generator=g).cuda() for _ in range(3))
    found = []
    for size in (128, 8):
        forget_all()
        monkeypatch.setattr(selection, "BUFFER", size)
        out, aux, gradients = results(q, k, v, v, {"pattern": gs.Causal(), "alpha": 1.5} | options)
        found.append((aux.support, aux.certified, out, *gradients))
    (size_, sure, *one), (other_size, other_sure, *other) = found
    assert torch.equal(size_, other_size)
    assert torch.equal(sure, other_sure)
    for x, y in zip(one, other, strict=True):
        assert_close("small buffer", x, y, 2e-6)


@pytest.mark.parametrize("rising", [False, True], ids=["any order", "rising scores"])
@pytest.mark.parametrize("options", [{"alpha": 1.5}, {"alpha": 1.5, "top_k": 16}], ids=str)
def test_few_places_change_nothing(options: dict[str, Any], rising: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the Hopper kernel: threads run out of places in most tiles, the more so where each key is over the last."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 4, 1500, 64, generator=g) for _ in range(3))
    if rising:
        q[..., 0], k[..., 0] = 4.0, torch.linspace(-8, 8, 1500)
    q, k, v = (x.bfloat16().cuda() for x in (q, k, v))
    configured, found = selection.support_config, []
    for places in (29, 6):

        def few(*given: Any, places: int = places) -> Any:
            config = configured(*given)
            assert config is not None
            return replace(config, places=places)

        forget_all()
        monkeypatch.setattr(selection, "support_config", few)
        out, aux, gradients = results(q, k, v, v, {"pattern": gs.Causal()} | options)
        found.append((aux, out, *gradients))
    (aux, *one), (other_aux, *other) = found
    same = (aux.support == other_aux.support) & (aux.certified == other_aux.certified)
    assert same.float().mean() >= (1.0 if "top_k" in options else 0.999)
    for x, y in zip(one, other, strict=True):
        assert_close("few places", x, y, LIMITS[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_topk_against_a_stable_sort(dtype: torch.dtype) -> None:
    """10,000 rows and more of small integers, whose scores are exact: ties, inf, rows that see few keys or none."""
    rows, draws = 0, ((1, 8, 1.0), (40, 64, 1.0), (3, 200, 1.0), (3, 64, 0.125), (2, 8, -2.0))
    for seed, (span, keep, scale) in enumerate(draws):
        g = torch.Generator().manual_seed(seed)
        q, k = (torch.randint(-span, span + 1, (1, 3, n, 16), generator=g).to(dtype).cuda() for n in (700, 1000))
        seen = torch.ones(700, 1000, dtype=torch.bool, device="cuda").tril(300).expand(1, 3, 700, 1000)
        options: dict[str, object] = {"causal": True}
        if seed == 3:
            q, k[:, :, 50::97] = q.abs() + 1, torch.inf
        if seed in (0, 2) and dtype != torch.bfloat16:
            tile_sizes = (-5, 700), (0, 1000)
            of_q, of_k = (torch.randint(low, 1000, (1, 3, n), generator=g).cuda() for low, n in tile_sizes)
            seen, options = of_k[:, :, None] <= of_q[..., None], {"q_positions": of_q, "k_positions": of_k}
        found = gs.topk_keys(q, k, k_keep=keep, scale=scale, implementation="kernels", **options)
        s = torch.where(seen, scale * (q.double() @ k.double().mT), -torch.inf)
        order = s.sort(dim=-1, descending=True, stable=True).indices[..., :keep]
        expected = torch.where(seen.gather(-1, order), order, 1000).sort(-1).values
        assert torch.equal(found, torch.where(expected == 1000, -1, expected).int()), (span, keep, scale)
        rows += found[..., 0].numel()
    assert rows >= 10_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_certificate_is_exact(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randint(-2, 3, (1, 8, 700, 4), generator=g).to(dtype).cuda() for _ in range(2))
    alpha = torch.tensor([1.0, 1.25, 1.5, 2.0]).repeat(2).cuda()
    _, full = aux_of(q, k, k, alpha=alpha, causal=True, scale=0.25)
    for n in (2, 40):
        _, aux = aux_of(q, k, k, alpha=alpha, top_k=n, causal=True, scale=0.25)
        assert torch.equal(aux.certified, full.support <= n)


def test_the_module_of_the_mission() -> None:
    g = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(2, 8, 512, 64, generator=g) for _ in range(3))
    index = torch.arange(512).expand(2, 8, 512)
    layer = gs.nn.SplashAttention(head_dim=64, alpha=1.5, k_keep=8, sm_scale=0.125)
    mask = torch.ones(512, 512, dtype=torch.bool).tril().numpy()
    expected = torch.as_tensor(oracle.attention(Q, K, V, mask, alpha=1.5, top_k=8, scale=0.125).out)
    for device in ("cpu", "cuda"):
        out = layer(*(x.to(device) for x in (Q, K, V, index, index)))
        assert float((out.cpu() - expected).abs().max()) < 5e-6
