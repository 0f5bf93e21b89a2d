"""Few queries of each sequence over pages by the kernel that reads the table itself, against the definition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.torch import calls, paged, paged_kernel
from gossamer.torch.explain import BY_TABLE
from tests.support.processes import INTERPRETING, compiled, in_interpreter, triton_on_a_cpu
from tests.support.thorough import more
from tests.torch.test_device_structure import RULES
from tests.torch.test_pages import LAYOUTS, RIGHT, WRONG, Case, check, cu, drawn, kv, mixed, packed, q, run

pytest.importorskip("triton")

from gossamer.kernels.triton.paged import launch_paged

make_layout = paged.paged_layout

LENGTHS = [(1, 200), (3, 65), (1, 64), (0, 90), (2, 0), (9, 70)]


REACHES = {name: (gs.Dense() if one is None else one).device_rule().reaches for name, (one, _) in RULES.items()}
ABLE = [name for name, reaches in REACHES.items() if len(reaches) <= 2 and all(len(x.blocks) < 2 for x in reaches)]


def made() -> int:
    """Launches that calls share."""
    return sum(key[0] == "by table" for key in calls.known._entries)


def few(draw: random.Random, most: int) -> list[tuple[int, int]]:
    """(queries, keys) of sequences, few queries of each on average."""
    lengths = mixed(draw, most)
    return [*lengths, (1, 5), *[(0, 5)] * max(0, -(-sum(n for n, _ in lengths) // 8) - len(lengths))]


def usual_few(draw: random.Random, **more: Any) -> Case:
    """Decode, drafts, the last tokens of a prompt."""
    return drawn(draw, "causal", page=64, lengths=LENGTHS, heads=(6, 2), sizes=(8, 16), **more)


if INTERPRETING:

    @pytest.fixture
    def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The kernels of Triton compute calls on a CPU, and structure is not made."""
        yield from triton_on_a_cpu(monkeypatch, paged, "paged_layout")

    def narrow(case: Case, dtype: torch.dtype = torch.float32) -> Case:
        return case._replace(q=case.q.to(dtype), k=case.k.to(dtype), v=case.v.to(dtype))

    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("name", ABLE)
    def test_rules(on_a_cpu: None, name: str, seed: int) -> None:
        draw = random.Random(f"{name} {seed}")
        page, most = draw.choice([(1, 9), (2, 20), (8, 40), (16, 70), (16, 150), (24, 70), (64, 150), (128, 300)])
        case = drawn(
            draw, name, page=page, lengths=few(draw, most), heads=draw.choice([(1, 1), (4, 1), (6, 2)]),
            sinks=draw.random() < 0.4, softcap=draw.choice([None, 2.0]), shared=draw.random() < 0.3,
        )  # fmt: skip
        check(case, run(narrow(case), RULES[name][0], draw.choice(LAYOUTS)), 3e-5)
        assert made() == 1

    @pytest.fixture
    def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        """Keys are cut into four parts of 16 keys and more; how many each call had."""
        counts: list[int] = []

        def of_four(call: Any, *_: int) -> launch_paged.Cut:
            counts.append(4)
            return launch_paged.Cut(4, 4, 16)

        monkeypatch.setattr(launch_paged, "cut_of", of_four)
        monkeypatch.setattr(launch_paged, "MOST_COLUMNS", 16)
        return counts

    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("name", ["none", "causal", "sinks", "both sides", "past sinks", "union", "strided"])
    def test_parts_are_merged(on_a_cpu: None, cut: list[int], name: str, seed: int) -> None:
        """Some of them empty, and the sink once."""
        draw = random.Random(f"parts {name} {seed}")
        case = drawn(
            draw, name, page=draw.choice([1, 16, 64]), lengths=few(draw, 130), heads=draw.choice([(4, 1), (6, 2)]),
            sinks=seed > 0, softcap=draw.choice([None, 2.0]),
        )  # fmt: skip
        check(case, run(narrow(case), RULES[name][0], draw.choice(LAYOUTS)), 3e-5)
        assert cut == [4]

    @pytest.mark.parametrize("name", ["causal", "sinks", "window"])
    def test_bits_of_a_sequence_are_its_own(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        """Alone, in a batch, beside a prompt, and in a wider table."""
        monkeypatch.setattr(launch_paged, "INVARIANT_KEYS", 32)
        case = narrow(
            drawn(random.Random(name), name, page=16, lengths=[(1, 90), (3, 200), (40, 45), (1, 33)], heads=(4, 2))
        )
        out, lse = run(case, RULES[name][0], batch_invariant=True)
        check(case, (out, lse), 3e-5)
        for r in range(len(case.used)):
            first, end = case.cu[r : r + 2]
            n = -(-case.used[r] // 16)
            one, its_lse = gs.varlen(
                case.q[first:end], case.k, case.v, [0, end - first], seqused_k=[case.used[r]],
                block_table=case.table[r : r + 1, :n], pattern=RULES[name][0], batch_invariant=True, return_lse=True,
            )  # fmt: skip
            assert torch.equal(one, out[first:end]) and torch.equal(its_lse, lse[:, first:end])

    def test_what_is_given_is_written_and_lengths_are_read_again(on_a_cpu: None) -> None:
        case = narrow(usual_few(random.Random(0)))
        cu, used, table = torch.tensor(case.cu), torch.tensor(case.used), case.table.clone()
        for into in (torch.full_like(case.out, torch.nan).float(), torch.empty(len(case.out), 6, 2, 16)[:, :, 1]):
            found, lse = gs.varlen(
                case.q, case.k, case.v, cu, seqused_k=used, block_table=table, pattern=gs.Causal(), out=into,
                return_lse=True,
            )  # fmt: skip
            assert found is into
            check(case, (into, lse), 3e-5)
        order = torch.randperm(len(case.k), generator=torch.Generator().manual_seed(0))
        inside, to = (table >= 0) & (table < len(order)), order.argsort()
        table.copy_(torch.where(inside, to[table.clamp(0, len(to) - 1)], table))
        k, v = (x[order].clone() for x in (case.k, case.v))
        found = gs.varlen(
            case.q, k, v, cu, seqused_k=used, block_table=table, pattern=gs.Causal(), out=into, return_lse=True
        )
        check(case, found, 3e-5)
        assert made() == 2  # of either `out`

    @pytest.mark.parametrize("sinks", [False, True])
    def test_layers_share_sequences_as_they_were(on_a_cpu: None, sinks: bool) -> None:
        case = narrow(usual_few(random.Random(1), sinks=sinks))
        sequences = packed(case)
        terms = {"sink_logits": None if case.sinks is None else case.sinks.float(), "return_lse": True}
        shared = gs.device_layout(case.q, case.k, case.v, sequences, layout="bshd")
        for x in (sequences.cu_seq_q, *sequences.pages.tensors):
            x.fill_(-1)
        for turn in (1, 2):
            out, lse = gs.attention(case.q, case.k, case.v * turn, shared, layout="bshd", **terms)
            check(case._replace(out=case.out * turn), (out, lse), 6e-5)
        turned = [case.q.transpose(0, 1), out.transpose(0, 1), lse]
        for q, *wanted in (turned, [x[None] for x in turned]):
            found = gs.attention(q, case.k, case.v * 2, shared, **terms)
            assert found[0].is_contiguous() and all(map(torch.equal, found, wanted))

    def test_what_goes_the_usual_way(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paged_kernel, "MORE", 16)
        case = narrow(usual_few(random.Random(2)))
        usual = [
            (case, gs.Causal(), {"check": True}),
            (case._replace(q=case.q.double(), k=case.k.double(), v=case.v.double()), gs.Causal(), {}),
            (case, gs.Strided(4, 2) | gs.SlidingWindow(5, 5, 2), {}),
            (narrow(drawn(random.Random(0), "causal", page=16, lengths=[(40, 40)])), gs.Causal(), {}),
        ]  # fmt: skip
        for of, pattern, more in usual:
            with pytest.raises(AssertionError, match="structure was made"):
                gs.attention(of.q, of.k, of.v, packed(of, pattern, **more), layout="bshd")
            assert not made()

    def test_errors_stay_what_they_are(on_a_cpu: None) -> None:
        for changes, message in WRONG.values():
            if message.startswith(("seqused_k must be in", "block_table must name")):
                continue  # numbers, which are not read
            given: dict[str, Any] = {"k": kv, "v": kv, **RIGHT, **changes}
            k, v, edges = given.pop("k"), given.pop("v"), given.pop("cu_seq_q", cu)
            for _ in range(2):
                with pytest.raises(ValueError, match=message):
                    gs.varlen(q, k, v, edges, **given)

    def test_pages_that_do_not_exist_are_left_out(on_a_cpu: None) -> None:
        case = narrow(drawn(random.Random(3), "causal", page=16, lengths=[(1, 40)]))
        table = case.table.clone()
        table[0, 1] = 10**6
        out, lse = gs.varlen(
            case.q, case.k, case.v, case.cu, seqused_k=[40], block_table=table, pattern=gs.Causal(), return_lse=True
        )
        keys, values = (x[case.table[0, :3]].flatten(0, 1)[[*range(16), *range(32, 40)]] for x in (case.k, case.v))
        wanted = gs.attention(case.q[:1], keys, values, layout="bshd", return_lse=True)
        torch.testing.assert_close(out[:1], wanted[0])
        torch.testing.assert_close(lse[:, :1], wanted[1])

    def test_explained(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paged, "paged_layout", make_layout)  # structure is made to count pairs
        case = narrow(usual_few(random.Random(5)))
        for invariant in (False, True):
            found = gs.explain(case.q, case.k, case.v, packed(case, batch_invariant=invariant), layout="bshd")
            assert found.implementation == "triton" and BY_TABLE in str(found) and found.layout_bytes == 0
            assert found.reasons["blocked"] == ["reads no table of pages"]

else:

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        in_interpreter(
            __file__, "test_rules", "test_parts_are_merged", "test_bits_of_a_sequence_are_its_own",
            "test_what_is_given_is_written_and_lengths_are_read_again", "test_layers_share_sequences_as_they_were",
            "test_what_goes_the_usual_way", "test_errors_stay_what_they_are",
            "test_pages_that_do_not_exist_are_left_out", "test_explained",
        )  # fmt: skip


COMPILE = """
import sys
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Operand, compact
from gossamer.kernels.reaches import Reaching
from gossamer.kernels.relaunch import compiled_for
from gossamer.kernels.triton import KERNELS
from gossamer.kernels.triton.config import SHARED_MEMORY
from gossamer.kernels.triton.paged.launch_paged import Cut, PagedCall, forward
from gossamer.plan.problem import Problem
sm = int(sys.argv[1])
one = Reaching(0, 0, 0, 0, 0, 4096, 4096, 0)
calls = [("bfloat16", 32, 8, 128, 128, 64, 32, (one,), (1,)), ("float16", 64, 1, 256, 256, 16, 4, (one, one), (1, 3))]
calls += [("float32", 8, 1, 256, 256, 1, 100, (one, one._replace(block=4)), (1, 1))]
calls += [("bfloat16", 6, 2, 72, 40, 24, 1, (one,), (2,)), ("float32", 4, 4, 64, 64, 256, 2, (one,), (1,))]
for dtype, H, G, D, E, page, n, reaches, steps in calls:
    shapes = {"q": (n, H, D), "k": (99, page, G, D), "v": (99, page, G, E), "cu_seq_q": (n + 1,)}
    shapes |= {"block_table": (n, 4096 // page), "seqused_k": (n,), "sink_logits": (H,)}
    types = dict.fromkeys("qkv", dtype) | dict.fromkeys(shapes, "int32") | dict.fromkeys("qkv", dtype)
    types |= {"sink_logits": "float32", "seqused_k": "int64"}
    operands = {name: Operand(types[name], shape, compact(shape)) for name, shape in shapes.items()}
    problem = Problem(1, H, G, n, 4096, D, E, dtype, "cuda", sm=sm, processors=132)
    call = PagedCall(reaches, steps, 4096, page, True, n == 1, False)
    scoring = Scoring(0.1, 0, softcap=5.0 if page in (64, 1) else None)
    launch = forward(problem, call, scoring, operands, cut=Cut(3, 3, 512)).launch
    assert len(launch.steps) == 2
    for step in launch.steps:
        _, options, signature = step.kernel.key
        shared = compiled_for(KERNELS[step.kernel.name], signature, dict(options), sm).metadata.shared
        assert shared <= SHARED_MEMORY[sm], (dtype, D, E, step.kernel.name, shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [89, *more(80, 90, 100)])
def test_kernels_compile(sm: int, tmp_path: Path) -> None:
    compiled(COMPILE, sm, cache=tmp_path)
