"""One query of each sequence whose first and last key the device alone knows: one kernel, and no structure."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.torch import calls, request
from tests.support.host_reads import nothing_waits
from tests.support.processes import INTERPRETING, compiled, in_interpreter, triton_on_a_cpu
from tests.support.thorough import more

pytest.importorskip("triton")

RULES = {
    "window": gs.SlidingWindow(49), "both sides": gs.SlidingWindow(20, 7), "last": gs.SlidingWindow(0),
    "behind": gs.SlidingWindow(30, -5), "wide": gs.SlidingWindow(2**31 - 1, 0), "ahead": gs.SlidingWindow(3, 2**31 - 1),
    "all": None, "causal": gs.Causal(), "joined": gs.SlidingWindow(60) & gs.SlidingWindow(40, 3),
}  # fmt: skip
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


CASES = 12  # of a rule in the interpreter
# Of kernels each type is another compilation: the rules take them in turn.
TYPES = torch.bfloat16, torch.float16, torch.float32
IN_TURN = list(zip(RULES, cycle(TYPES), strict=False))
OTHERS = [each for each in product(RULES, TYPES) if each not in IN_TURN]


def made() -> int:
    """Launches that calls of one query share."""
    return sum(key[0] == "seen by one query" for key in calls.known._entries)


def vector(draw: random.Random, B: int, K: int) -> Tensor:
    """Integers of each sequence: near the keys, at their ends, and as far as the type has them."""
    dtype = draw.choice(INTEGERS)
    limits = torch.iinfo(dtype)
    near = [0, 1, K - 1, K, K + 3, -1, -40, draw.randint(0, K), draw.randint(0, K), limits.max, limits.min]
    values = torch.tensor([max(limits.min, min(limits.max, draw.choice(near))) for _ in range(B)], dtype=dtype)
    return torch.stack([values, torch.full_like(values, 7)], 1)[:, 0] if draw.random() < 0.3 else values


def drawn(draw: random.Random, name: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v, and the options of a call; keys that nobody sees are NaN."""
    K, G, D, E = draw.choice([1, 33, 170]), draw.choice([1, 2]), draw.choice([16, 40]), draw.choice([16, 24])
    B, H = draw.choice([1, 3]), G * draw.choice([1, 3, 4, 20])
    generator = torch.Generator().manual_seed(draw.randint(0, 10**6))
    shapes = (B, H, 1, D), (B, G, K, D), (B, G, K, E)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    options: dict[str, Any] = {}
    starts = lengths = None
    if name in ("all", "causal") or draw.random() < 0.3:
        options["key_starts"] = starts = vector(draw, B, K)
    if draw.random() < 0.5:
        options["key_lengths"] = lengths = vector(draw, B, K)
    if starts is None or draw.random() < 0.5:
        options["q_offset"] = vector(draw, B, K)
    elif draw.random() < 0.5:
        options["q_offset"] = draw.choice([0, K // 2, K + 5, -3])
    if draw.random() < 0.4:
        options["sink_logits"] = torch.randn(H, generator=generator)
    if draw.random() < 0.4:
        options["softcap"] = 3.0
    if draw.random() < 0.4:
        options["scale"] = draw.choice([0.3, -0.2, 0.0])
    at = options.get("q_offset", K - 1)
    at = at.long() if isinstance(at, Tensor) else torch.full((B,), at)
    at = at.clamp(-(2**31 - 2**16 - K), 2**31 - 2**16 - K)
    j = torch.arange(K)
    kept = torch.ones(B, K, dtype=torch.bool)
    rule = (gs.Dense() if RULES[name] is None else RULES[name]).device_rule().interval
    if rule.left is not None:
        kept &= j >= (at - rule.left)[:, None]
    if rule.right is not None:
        kept &= j <= (at + rule.right)[:, None]
    if starts is not None:
        kept &= j >= starts.long()[:, None]
    if lengths is not None:
        kept &= j < lengths.long()[:, None]
    for x in (k, v):
        x.masked_fill_(~kept[:, None, :, None], math.nan)
    moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
    moved["expected"] = kept
    return [x.to(device) for x in (q, k, v)], moved


def expected(x: list[Tensor], kept: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, by the mask of what is kept."""
    terms = {n: options[n] for n in ("scale", "softcap") if n in options}
    if "sink_logits" in options:
        terms["sink_logits"] = options["sink_logits"].double().cpu()
    q, k, v = (y.double().cpu() for y in x)
    clean = [y.nan_to_num() for y in (k, v)]
    return gs.attention(q, *clean, kept[:, None, None], implementation="reference", return_lse=True, **terms)


def check(name: str, device: str, dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    x, options = drawn(draw, name, device, dtype)
    kept, bshd = options.pop("expected"), draw.random() < 0.5
    given = [y.transpose(1, 2).contiguous() for y in x] if bshd else x
    layout = "bshd" if bshd else "bhnd"
    out, lse = gs.attention(*given, RULES[name], layout=layout, return_lse=True, **options)
    assert out.is_contiguous() and out.dtype == dtype
    out = out.transpose(1, 2) if bshd else out
    wanted_out, wanted_lse = expected(x, kept, options)
    close = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double().cpu(), wanted_out, atol=close, rtol=0)
    torch.testing.assert_close(lse.double().cpu(), wanted_lse, atol=1e-3 if device == "cuda" else 2e-5, rtol=0)


if INTERPRETING:

    @pytest.fixture
    def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The kernels of Triton compute calls on a CPU, and structure is not made."""
        yield from triton_on_a_cpu(monkeypatch, request, "structured")

    @pytest.mark.parametrize("name", RULES)
    def test_what_is_seen(on_a_cpu: None, name: str) -> None:
        for seed in range(CASES):
            check(name, "cpu", torch.float16 if seed % 4 == 0 else torch.float32, seed)
        assert made()

    @pytest.mark.parametrize("parts", [1, 2, 4])
    def test_parts_are_merged(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
        """Some of them empty, and the sink once."""
        from gossamer.kernels.triton.one_query import launch_one_query as launch

        counts = []

        def cut(most: int, columns: int, lists: int, blocks: int, given: int | None) -> tuple[int, int]:
            found = whole(most, 16, lists, blocks, parts)
            counts.append(found[1])
            return found

        whole = launch._cut
        monkeypatch.setattr(launch, "_cut", cut)
        monkeypatch.setattr(launch, "MOST_COLUMNS", 16)
        for name in ("window", "all", "both sides"):
            for seed in range(4):
                check(name, "cpu", torch.float32, 100 + seed)
        assert max(counts) == parts

    def test_ends_are_those_of_array_operations() -> None:
        from gossamer.kernels.triton.one_query.launch_one_query import ends_of

        draw = random.Random(0)
        for _ in range(40):
            B, K, behind = draw.choice([1, 5, 130]), draw.choice([1, 7, 300]), draw.choice([1, 0, -9, 40, 2**29])
            offset, lengths = vector(draw, B, K), draw.choice([None, vector(draw, B, K)])
            most = 2**31 - 2**16 - K
            wanted = (offset.long().clamp(-most, most) + behind).clamp(0, K)
            if lengths is not None:
                wanted = torch.minimum(wanted, lengths.long().clamp(0, K))
            ends = ends_of(offset, lengths, behind, K)
            assert ends.dtype == torch.int32 and torch.equal(ends.long(), wanted)

    def test_what_goes_the_usual_way(on_a_cpu: None) -> None:
        q, k, v = (torch.randn(2, 2, n, 16) for n in (1, 40, 40))
        at, window = torch.tensor([3, 30]), gs.SlidingWindow(9)
        usual: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((q, k, v, gs.SlidingWindow(9, sinks=4)), {"q_offset": at}),
            ((q, k, v, gs.Local(8)), {"q_offset": at}),
            ((q, k, v, gs.Dilated(3, 0, 2)), {"q_offset": at}),
            ((q.expand(2, 2, 2, 16), k, v, window), {"q_offset": at}),
            ((q, k, v, window), {"q_offset": at, "implementation": "triton"}),
            ((q, k, v, window), {"key_starts": [1, 2]}),
            ((q.clone().requires_grad_(), k, v, window), {"q_offset": at}),
            ((q, k[:1], v[:1], window), {"q_offset": at}),
            ((q[0], k[0], v[0], window), {"key_starts": at[:1]}),
            ((q.double(), k.double(), v.double(), window), {"q_offset": at}),
        ]
        for args, options in usual:
            with pytest.raises((AssertionError, gs.Unsupported), match=r"structure was made|cannot|no implementation"):
                gs.attention(*args, **options)
            assert not made()

    def test_calls_are_told_apart(on_a_cpu: None) -> None:
        q, k, v = (torch.randn(2, 2, n, 16) for n in (1, 40, 40))
        at, window = torch.tensor([3, 30]), gs.SlidingWindow(9)
        first = gs.attention(q, k, v, window, q_offset=at)
        at.copy_(torch.tensor([39, 0]))
        second = gs.attention(q, k, v, gs.SlidingWindow(9), q_offset=at)
        assert made() == 1 and not torch.equal(first, second)
        variants: list[tuple[Any, dict[str, Any]]] = [
            (gs.SlidingWindow(8), {"q_offset": at}), (window, {"q_offset": at.int()}), (window, {"key_starts": at}),
            (window, {"q_offset": at, "key_lengths": at}), (window, {"q_offset": 20, "key_starts": at}),
            (window, {"q_offset": 21, "key_starts": at}), (window, {"q_offset": at, "key_starts": at}),
            (window, {"q_offset": at, "sink_logits": torch.zeros(2)}), (window, {"q_offset": at, "softcap": 2.0}),
            (window, {"q_offset": at, "scale": 1}), (window, {"q_offset": at, "scale": 0.5}),
        ]  # fmt: skip
        for n, (pattern, options) in enumerate(variants, 2):
            for _ in range(2):
                gs.attention(q, k, v, pattern, **options)
            assert made() == n

    def test_explained(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        from gossamer.kernels.triton import IMPLEMENTATION

        q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((8, 1), (2, 400), (2, 400)))
        at, window = torch.tensor([300, 30]), gs.SlidingWindow(99)
        monkeypatch.undo()  # structure is made to count pairs
        limits = dataclasses.replace(type(IMPLEMENTATION).capability, devices=frozenset({"cpu"}), min_sm=None)
        monkeypatch.setattr(type(IMPLEMENTATION), "capability", limits)
        for scale in (0.2, torch.tensor(0.2)):
            found = gs.explain(q, k, v, window, q_offset=at, scale=scale)
            assert (found.implementation, found.structure, found.layout_bytes) == ("triton", None, 0)
            assert found.useful_flops == found.executed_flops == 2.0 * (16 + 16) * 8 * (100 + 31)
            assert found.reasons["blocked"] == ["reads no first key of each sequence"]
        found = gs.explain(q, k, v, window, q_offset=at, implementation="triton")
        assert found.structure is not None and found.executed_flops > found.useful_flops

    def test_errors_stay_what_they_are(on_a_cpu: None) -> None:
        q, k, v = (torch.randn(2, 2, n, 16) for n in (1, 40, 40))
        at, window = torch.tensor([3, 30]), gs.SlidingWindow(9)
        wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("v must", (q, k, v[:, :, :-1], window), {"q_offset": at}),
            ("k must", (q, k.half(), v, window), {"q_offset": at}),
            ("heads", (q[:, :1], k, v, window), {"q_offset": at}),
            ("softcap must", (q, k, v, window), {"q_offset": at, "softcap": -1.0}),
            ("sink_logits must", (q, k, v, window), {"q_offset": at, "sink_logits": torch.zeros(3)}),
            ("q_offset must", (q, k, v, window), {"q_offset": 2**31, "key_starts": at}),
        ]
        for message, args, options in wrong:
            for _ in range(2):
                with pytest.raises(ValueError, match=message):
                    gs.attention(*args, **options)

else:

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        in_interpreter(
            __file__, "test_what_is_seen", "test_parts_are_merged", "test_ends_are_those_of_array_operations",
            "test_what_goes_the_usual_way", "test_calls_are_told_apart", "test_explained",
            "test_errors_stay_what_they_are",
        )  # fmt: skip


COMPILE = """
import sys
import torch
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Operand, compact
from gossamer.kernels.relaunch import PLAIN, Pointer, compiled_for, parameters
from gossamer.kernels.triton import KERNELS
from gossamer.kernels.triton.config import SHARED_MEMORY
from gossamer.kernels.triton.one_query.kernels import ends_kernel
from gossamer.kernels.triton.one_query.launch_one_query import Seen, forward
from gossamer.plan.problem import Problem
sm = int(sys.argv[1])
sizes = [("bfloat16", 4, 128, 128, None), ("float16", 64, 256, 256, 3), ("float32", 1, 256, 256, 3)]
for dtype, heads, D, E, parts in sizes + [("bfloat16", 3, 72, 40, 3), ("float32", 8, 64, 64, 3)]:
    types = {"q_offset": "int64", "key_starts": "int8", "key_lengths": "int32"}
    shapes = {"q": (2, heads, 1, D), "k": (2, 1, 8192, D), "v": (2, 1, 8192, E)}
    shapes |= dict.fromkeys(types, (2,)) | {"sink_logits": (heads,)}
    types |= dict.fromkeys("qkv", dtype) | {"sink_logits": "float32"}
    operands = {name: Operand(types[name], shape, compact(shape)) for name, shape in shapes.items()}
    problem = Problem(2, heads, 1, 1, 8192, D, E, dtype, "cuda", sm=sm, processors=132)
    seen = Seen(1023, 0, None, 8191)
    launch = forward(problem, seen, Scoring(0.1, 0), operands, torch.device("cpu"), parts=parts).launch
    assert len(launch.steps) == 2
    for step in launch.steps:
        _, options, signature = step.kernel.key
        shared = compiled_for(KERNELS[step.kernel.name], signature, dict(options), sm).metadata.shared
        assert shared <= SHARED_MEMORY[sm], (dtype, D, E, step.kernel.name, shared)
for dtype in ("int64", "int32", "uint8"):
    facts = {"offsets": Pointer(dtype, True), "lengths": Pointer(dtype, True), "ends": Pointer("int32", True)}
    facts |= {"LENGTHS": True, "SIZE": 128}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    compiled_for(ends_kernel, [facts.get(name, PLAIN) for name in parameters(ends_kernel)], options, sm)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [89, *more(80, 90, 100)])
def test_kernels_compile(sm: int, tmp_path: Path) -> None:
    compiled(COMPILE, sm, cache=tmp_path)


def test_parts_follow_the_width_of_the_window() -> None:
    from gossamer.kernels.triton.one_query.launch_one_query import Seen, _cut

    assert Seen(1023, 0, None, 0).most(8192) == 1024
    assert Seen(1023, 0, 100, 0).most(8192) == 100
    assert Seen(None, 0, None, 0).most(8192) == 8192
    assert Seen(5, -9, None, 0).most(8192) == 0
    assert _cut(0, 64, 8, 264, None) == (64, 1)
    for most in (1, 64, 1000, 1024, 8192, 10**6):
        for lists in (1, 8, 256, 10**5):
            chunk, parts = _cut(most, 64, lists, 264, None)
            assert chunk % 64 == 0 and chunk * (parts - 1) < most <= chunk * parts
    assert _cut(1024, 64, 8, 264, None)[1] > 1  # few sequences leave multiprocessors idle
    assert _cut(1024, 64, 10**5, 264, None)[1] == 1


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("name", "dtype"), [*IN_TURN, *more(*OTHERS)], ids=str)
def test_what_is_seen_on_a_gpu(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def structured(*_: Any) -> Any:
        raise AssertionError("structure was made")

    monkeypatch.setattr(request, "structured", structured)
    for seed in range(6):
        check(name, "cuda", dtype, seed)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", ["window", "causal"])
def test_a_captured_step_follows_its_lengths(name: str) -> None:
    """Nothing waits for the device; a replay reads what offsets and lengths are then."""
    q, k, v = (torch.randn(4, heads, n, 128, device="cuda").bfloat16() for heads, n in ((8, 1), (2, 4096), (2, 4096)))
    lengths = torch.tensor([4096, 100, 1, 2000], device="cuda")
    at = lengths - 1

    def run() -> Tensor:
        return gs.attention(q, k, v, RULES[name], q_offset=at, key_lengths=lengths)

    run()
    with nothing_waits():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for new in ([1, 2, 3, 4], [4096, 0, 700, 64]):
        lengths.copy_(torch.tensor(new))
        at.copy_(lengths - 1)
        graph.replay()
        assert torch.equal(captured, run())
        for b, n in enumerate(new):
            own = [x[b : b + 1, :, :n].double() for x in (k, v)]
            wanted = gs.attention(q[b : b + 1].double(), *own, RULES[name], implementation="reference")
            torch.testing.assert_close(captured[b : b + 1].double(), wanted, atol=2e-2, rtol=0)
