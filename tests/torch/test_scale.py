"""A scale that is a tensor: against the definition in float64, with its gradient, read by nobody, in every function."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.torch import calls
from tests.support.definition import dense
from tests.support.exact import no_gpu
from tests.support.host_reads import nothing_waits
from tests.support.modes import NothingIsRead

B, H, G, N, D = 2, 4, 2, 40, 16
PATTERN = gs.SlidingWindow(9, 3)
MASK = torch.from_numpy(PATTERN.materialize(N, N))
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
Results = dict[str, Tensor]


def inputs(dtype: torch.dtype, device: str = "cpu", d: int = D) -> list[Tensor]:
    """q, k, v and dout."""
    g = torch.Generator().manual_seed(3)
    made = [torch.randn(B, heads, N, d, generator=g, dtype=torch.float64) for heads in (H, G, G, H)]
    return [x.to(device, dtype) for x in made]


def results(f: Callable[..., Tensor], x: list[Tensor], scale: Any) -> Results:
    """out, and all gradients: of the scale too, where it has one."""
    q, k, v, dout = x
    leaves = [y.detach().clone().requires_grad_() for y in (q, k, v)]
    out = f(*leaves, scale)
    learned = isinstance(scale, Tensor) and scale.requires_grad
    found = torch.autograd.grad(out, [*leaves, scale] if learned else leaves, dout)
    names = ("dq", "dk", "dv", "dscale") if learned else ("dq", "dk", "dv")
    return {"out": out.detach(), **dict(zip(names, found, strict=True))}


def by_definition(x: list[Tensor], scale: float, **terms: Any) -> Results:
    """`results` in float64."""
    learned = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    exact = [y.detach().double().cpu() for y in x]
    return results(lambda q, k, v, s: dense(q, k, v, MASK, scale=s, **terms)[0], exact, learned)


def size_of_gradient(x: list[Tensor], scale: float) -> float:
    """Of the terms that the scale's gradient is the sum of, the root of their squares: what their rounding comes to."""
    q, k, v, dout = (y.detach().double().cpu() for y in x)
    found = results(lambda q, k, v, _: dense(q, k, v, MASK, scale=1.0)[0], [q * scale, k, v, dout], None)
    return float((found["dq"] * q).norm())


def plain(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """What a model has that multiplies its queries itself: attention of torch, in the type of its inputs."""
    k, v = (y.repeat_interleave(H // G, 1) for y in (k, v))
    s = ((q * scale.to(q.dtype)) @ k.mT).masked_fill(~MASK.to(q.device), -math.inf)
    return s.softmax(-1) @ v


def assert_near(found: Results, x: list[Tensor], learned: Tensor, name: str | None = None) -> None:
    """At most twice the error of plain attention, or of the call with the number, and a rounding."""
    value = float(learned.detach())
    by_number = results(lambda q, k, v, s: gs.attention(q, k, v, PATTERN, scale=s, implementation=name), x, value)
    low = results(plain, x, learned)
    for part, want in by_definition(x, value).items():
        error, of_plain = (float((y[part].double().cpu() - want).abs().max()) for y in (found, low))
        if part == "dscale":  # of one number, plain attention's error may be none by chance
            of_number, size = 0.0, 4 * (1 + abs(value)) * size_of_gradient(x, value)
        else:
            of_number, size = float((by_number[part].double() - want).abs().max()), max(1.0, float(want.abs().max()))
        allowed = 2 * max(of_plain, of_number) + 4 * torch.finfo(x[0].dtype).eps * size
        assert error <= allowed, (part, error, of_plain, of_number)


SCALES = (0.25, 0.3, -0.7, 0.0, 1e-6, 25.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", [None, "reference", "blocked"])
def test_against_the_definition(dtype: torch.dtype, scale: float, name: str | None) -> None:
    """Of a Parameter in the type of the model, and of one in float32 beside it; bits of a parameter have a value."""
    x = inputs(dtype)
    for of in {dtype, torch.float32}:
        learned = torch.nn.Parameter(torch.tensor(scale, dtype=of))
        found = results(lambda q, k, v, s: gs.attention(q, k, v, PATTERN, scale=s, implementation=name), x, learned)
        assert found["dscale"].dtype == of and found["dscale"].shape == ()
        assert_near(found, x, learned, name)


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e30, 1e-30, -1e-37])
def test_scales_far_from_one(scale: float) -> None:
    """In float32 and bfloat16, which hold such products; huge ones leave one key a row, tiny ones weigh all alike."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = inputs(dtype)
        learned = torch.nn.Parameter(torch.tensor(scale, dtype=torch.float64))
        q, k, _, _ = (y.double() for y in x)
        s = (q @ k.repeat_interleave(H // G, 1).mT).masked_fill(~MASK, -math.inf) * (1 if scale > 0 else -1)
        found = results(lambda q, k, v, s: gs.attention(q, k, v, PATTERN, scale=s), x, learned)
        assert all(y.isfinite().all() for y in found.values())
        if abs(scale) < 1:
            assert_near(found, x, learned)
            continue
        s = s.masked_fill(~MASK, -math.inf)
        best = x[2].repeat_interleave(H // G, 1).gather(2, s.argmax(-1, keepdim=True).expand(-1, -1, -1, D))
        top = s.topk(2).values
        clear = (top[..., 0] - top[..., 1]) > 0.2  # of the others a rounding of q chooses
        assert clear.float().mean() > 0.6
        torch.testing.assert_close(found["out"][clear], best[clear], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 7, 16, 64, 96])
def test_powers_of_two_have_the_bits_of_numbers(dtype: torch.dtype, d: int) -> None:
    for scale in (2.0**-5, 0.5, 1.0, -2.0):
        x, learned = inputs(dtype, d=d), torch.nn.Parameter(torch.tensor(scale))
        found, wanted = (
            results(lambda q, k, v, s: gs.attention(q, k, v, PATTERN, scale=s, implementation="reference"), x, s)
            for s in (learned, scale)
        )
        for name in ("out", "dk", "dv", "dq"):  # but where float16 underflows
            near = 2e-3 if dtype == torch.float16 else 0
            torch.testing.assert_close(found[name], wanted[name], rtol=near, atol=near)


def test_float64_keeps_its_digits() -> None:
    x, scale = inputs(torch.float64), torch.nn.Parameter(torch.tensor(1 / 3, dtype=torch.float64))
    found = results(lambda q, k, v, s: gs.attention(q, k, v, PATTERN, scale=s), x, scale)
    for name, want in by_definition(x, 1 / 3).items():
        torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-12)


def test_a_softcap_is_of_the_scaled_score() -> None:
    x, scale = inputs(torch.float64), torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    found = results(lambda q, k, v, s: gs.attention(q, k, v, PATTERN, scale=s, softcap=2.0), x, scale)
    for name, want in by_definition(x, 1.5, softcap=2.0).items():
        torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_on_the_cpu_without_a_gradient_is_the_number(dtype: torch.dtype) -> None:
    """The same call, which is not made anew, and the same bits."""
    q, k, v, _ = inputs(dtype)
    calls.known.clear()
    wanted = gs.attention(q, k, v, PATTERN, scale=float(torch.tensor(0.3)))
    assert len(calls.known) == 1
    for scale in (torch.tensor(0.3), torch.tensor(0.3).double()):
        assert torch.equal(gs.attention(q, k, v, PATTERN, scale=scale), wanted)
    assert len(calls.known) == 1


def test_a_repeated_call_is_looked_up() -> None:
    """Another value of a Parameter is another number of nothing that is kept."""
    x, every = inputs(torch.float32), [torch.nn.Parameter(torch.tensor(value)) for value in (0.1, 0.2, 3.0)]
    calls.known.clear()
    found = [results(lambda q, k, v, s: gs.attention(q, k, v, PATTERN, scale=s), x, one) for one in every]
    assert len(calls.known) == 1
    for one, learned in zip(found, every, strict=True):
        assert_near(one, x, learned)


U = torch.randn(B, G, N, generator=torch.Generator().manual_seed(1))
EDGES, STARTS = torch.tensor([0, 9, N * B]), torch.tensor([3, 0])
ALONE = gs.LongNet((16, 40), (2, 4), heads=H)


CONSTANTS = {"MASK": MASK, "U": U, "EDGES": EDGES, "STARTS": STARTS}
ON_GPU: dict[str, Tensor] = {}  # the same: a call that moved one would wait


def placed(name: str, device: torch.device) -> Tensor:
    return CONSTANTS[name] if device.type == "cpu" else ON_GPU[name]


@pytest.fixture
def on_a_gpu() -> None:
    ON_GPU.update({name: x.cuda() for name, x in CONSTANTS.items()})


def packed(q: Tensor, k: Tensor, v: Tensor, s: Any) -> Tensor:
    flat = [y.transpose(1, 2).flatten(0, 1) for y in (q, k, v)]
    found = gs.varlen(*flat, placed("EDGES", q.device), pattern=gs.Causal(), scale=s)
    return found.unflatten(0, (B, N)).transpose(1, 2)


def in_bshd(q: Tensor, k: Tensor, v: Tensor, s: Any) -> Tensor:
    turned = [y.transpose(1, 2) for y in (q, k, v)]
    return gs.attention(*turned, PATTERN, scale=s, layout="bshd").transpose(1, 2)


def by_module(q: Tensor, k: Tensor, v: Tensor, s: Any) -> Tensor:
    return gs.nn.SplashAttention(q.shape[-1], k_keep=None, sm_scale=s)(q, k, v)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "attention": lambda q, k, v, s: gs.attention(q, k, v, PATTERN, scale=s),
    "a mask": lambda q, k, v, s: gs.attention(q, k, v, placed("MASK", q.device), scale=s),
    "a structure": lambda q, k, v, s: gs.attention(
        q, k, v, gs.Causal(), scale=s, key_starts=placed("STARTS", q.device)
    ),
    "parts": lambda q, k, v, s: gs.attention(q, k, v, gs.Dilated(9, 0, 4), scale=s),
    "merge": lambda q, k, v, s: gs.attention(q, k, v, gs.Local(8) | gs.Causal(), scale=s, merge="lse"),
    "bshd": in_bshd,
    "one query": lambda q, k, v, s: gs.attention(q, k, v, scale=s)[:, :, :1].expand(q.shape),
    "varlen": packed,
    "entmax": lambda q, k, v, s: gs.entmax_attention(q, k, v, PATTERN, scale=s),
    "SplashAttention": by_module,
    "sparsek": lambda q, k, v, s: gs.sparsek_attention(q, k, v, placed("U", q.device), k_keep=5, window=7, scale=s),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_function_takes_one(name: str, dtype: torch.dtype) -> None:
    """As with the number; the gradient of the scale is that of q, times q, over the scale."""
    x, scale = inputs(dtype), torch.nn.Parameter(torch.tensor(0.3, dtype=dtype))
    found, wanted = (results(FUNCTIONS[name], x, s) for s in (scale, float(scale.detach())))
    near = 1e-5 if dtype == torch.float32 else 1e-11
    for part in wanted:
        torch.testing.assert_close(found[part], wanted[part], rtol=near, atol=near)
    share = (wanted["dq"].double() * x[0].double()).sum() / scale.detach().double()
    torch.testing.assert_close(found["dscale"].double(), share, rtol=100 * near, atol=100 * near)


@pytest.mark.parametrize("name", ["attention", "bshd", "varlen", "a structure", "sparsek"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_is_read(name: str, dtype: torch.dtype) -> None:
    x, scale = inputs(dtype), torch.nn.Parameter(torch.tensor(0.3))
    results(FUNCTIONS[name], x, scale)
    with NothingIsRead():
        results(FUNCTIONS[name], x, scale)


@pytest.mark.parametrize("name", ["attention", "a mask", "varlen", "entmax", "sparsek", "bshd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_a_compiled_function(name: str, dtype: torch.dtype) -> None:
    """One graph for every value, whose gradients are those of the eager function."""
    torch._dynamo.reset()
    graphs = 0

    def counted(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend=counted)
    for value in (0.3, -0.1, 2.0):
        x, scale = inputs(dtype), torch.nn.Parameter(torch.tensor(value))
        found, wanted = (results(f, x, scale) for f in (compiled, FUNCTIONS[name]))
        near = 2e-2 if dtype == torch.bfloat16 else 1e-5
        for part in wanted:
            size = max(1.0, float(wanted[part].abs().max()))
            torch.testing.assert_close(found[part], wanted[part], rtol=0, atol=near * size)
    assert graphs == 1


def test_memory_of_16_bits() -> None:
    """q is kept as it was given and as it is multiplied, not in float32."""
    q, k, v, _ = inputs(torch.bfloat16)
    q = q.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        gs.attention(q, k, v, PATTERN, scale=torch.nn.Parameter(torch.tensor(0.3)))
    assert not [y for y in kept if y.shape == q.shape and y.dtype == torch.float32]


def test_topk_blocks_and_topk_keys() -> None:
    """The choice of the scaled scores; a negative scale chooses the others."""
    q, k = (torch.randn(1, 2, 256, D) for _ in range(2))
    for value in (0.3, -0.3):
        scale = torch.nn.Parameter(torch.tensor(value))
        keys = gs.topk_keys(q, k, k_keep=5, scale=scale)
        assert torch.equal(keys, gs.topk_keys(q, k, k_keep=5, scale=value)) and not keys.requires_grad
        one, other = (
            gs.topk_blocks(q, k, topk=1, block_size=64, local=0, causal=False, scale=s) for s in (scale, value)
        )
        assert torch.equal(one.indices, other.indices)


def test_explain() -> None:
    q, k, v, _ = inputs(torch.float32)
    scale = torch.nn.Parameter(torch.tensor(0.3))
    told = gs.explain(q, k, v, PATTERN, scale=scale)
    assert told.copies == {"q": "scale, a tensor, is multiplied into it"} and told.backward == "blocked"
    assert gs.explain(q, k, v, PATTERN, scale=torch.tensor(0.3)).copies == {}


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (torch.ones(1), r"scale must be a number, a tensor of floating point of shape \(\) or None; got shape \(1,\)"),
        (torch.ones(H), r"shape \(4,\)"),
        (torch.tensor(1), r"got shape \(\), int64"),
        (torch.tensor(True), r"got shape \(\), bool"),
        (torch.tensor(1j), r"got shape \(\), complex64"),
        (torch.ones((), device="meta"), "on q's device, cpu, or one on the CPU without a gradient"),
    ],
)
@pytest.mark.parametrize("name", ["attention", "varlen", "entmax", "sparsek"])
def test_errors(scale: Tensor, says: str, name: str) -> None:
    q, k, v, _ = inputs(torch.float32)
    with pytest.raises(ValueError, match=says):
        FUNCTIONS[name](q, k, v, scale)


def test_errors_of_the_module_and_of_other_arguments() -> None:
    with pytest.raises(ValueError, match=r"sm_scale must be a finite number, a tensor .* got shape \(2,\)"):
        gs.nn.SplashAttention(8, sm_scale=torch.ones(2))
    layer = gs.nn.SplashAttention(8, sm_scale=torch.nn.Parameter(torch.ones(())))
    assert [name for name, _ in layer.named_parameters()] == ["sm_scale"] and "sm_scale=tensor ()" in repr(layer)
    assert "sm_scale" in dict(gs.nn.SplashAttention(8, sm_scale=torch.ones(())).named_buffers())
    scale = torch.nn.Parameter(torch.tensor(0.3))
    for bad in (None, 3, torch.ones(()), torch.ones(4, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="q"):
            gs.attention(bad, torch.ones(4, 4), torch.ones(4, 4), scale=scale)  # type: ignore[arg-type]


def test_transforms_are_refused_as_ever() -> None:
    q, k, v, _ = inputs(torch.float32)

    def f(s: Tensor) -> Tensor:
        return gs.attention(q, k, v, PATTERN, scale=s).sum()

    with pytest.raises(ValueError, match=r"no derivative inside torch\.func"):
        torch.func.grad(f)(torch.tensor(0.3))
    with pytest.raises(ValueError, match=r"cannot be mapped by torch\.func\.vmap"):
        torch.func.vmap(f)(torch.tensor([0.3, 0.4]))
    with pytest.raises(ValueError, match="differentiated once"):
        scale = torch.nn.Parameter(torch.tensor(0.3))
        (first,) = torch.autograd.grad(f(scale), scale, create_graph=True)
        first.backward()


@pytest.mark.gpu
@no_gpu
# In float32, and in either type of 16 bits in turn, each of which has kernels of its own.
@pytest.mark.parametrize(
    ("dtype", "name"),
    [*((torch.float32, name) for name in FUNCTIONS), *zip(cycle([torch.bfloat16, torch.float16]), FUNCTIONS)],
    ids=str,
)
def test_on_a_gpu(name: str, dtype: torch.dtype, on_a_gpu: None) -> None:
    """Nothing waits, and the numbers are those of float64 on the CPU."""
    x = inputs(dtype, "cuda", 64)
    scale = torch.nn.Parameter(torch.tensor(0.2, device="cuda"))
    found = results(FUNCTIONS[name], x, scale)
    if name not in ("entmax", "SplashAttention"):  # whose supports are read on the way of torch
        with nothing_waits():
            found = results(FUNCTIONS[name], x, scale)
    exact = [y.double().cpu() for y in x]
    wanted = results(FUNCTIONS[name], exact, torch.nn.Parameter(scale.detach().double().cpu()))
    near = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}[dtype]
    for part, want in wanted.items():
        size = max(1.0, float(want.abs().max()))
        assert (found[part].double().cpu() - want).abs().max() <= 4 * near * size, part


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("name", ["attention", "varlen", "sparsek", "parts"])
def test_a_captured_graph_reads_it_again(name: str, on_a_gpu: None) -> None:
    q, k, v, dout = inputs(torch.bfloat16, "cuda", 64)
    leaves = [y.requires_grad_() for y in (q, k, v)]
    scale = torch.nn.Parameter(torch.tensor(0.2, device="cuda"))

    def step() -> tuple[Tensor, ...]:
        out = FUNCTIONS[name](*leaves, scale)
        return (out.detach(), *torch.autograd.grad(out, [*leaves, scale], dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for value in (0.2, -0.4, 1.0):
        with torch.no_grad():
            scale.fill_(value)
        wanted = step()
        graph.replay()
        for a, b in zip(captured, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * max(1.0, float(b.abs().max())))
