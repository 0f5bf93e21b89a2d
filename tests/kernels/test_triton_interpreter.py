"""The Triton kernels in Triton's interpreter, on the CPU, against float64.

The interpreter is chosen when triton is imported, so the cases run in processes of their own, a part in each.
"""

from __future__ import annotations

import pytest

from tests.support.processes import INTERPRETING, in_interpreter

PARTS = 4

triton = pytest.importorskip("triton")

if INTERPRETING:
    from tests.support.launches import backward, forward
    from tests.support.triton_cases import CASES, Case, check, compare, make

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_case(case: Case) -> None:
        check(case, "cpu")

    def test_same_bits_with_and_without_work_items() -> None:
        import torch

        from gossamer.kernels.triton.block import launch_block as launch
        from gossamer.layouts import BlockLayout

        case = next(case for case in CASES if case.name == "window-both-sides-batch")
        problem, layout, _, terms, (q, k, v, dout, dlse) = make(case, "cpu")
        results = []
        for walked in (layout, BlockLayout(layout.rows)):
            out, lse = forward(launch, problem, walked, terms, q, k, v)
            results.append([out, lse, *backward(launch, problem, walked, terms, dout, dlse, q, k, v, out, lse)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_into_given_tensors() -> None:
        import torch

        from gossamer.kernels.triton.block import launch_block as launch
        from tests.support.exact import within_nan

        for name in ("window-both-sides-batch", "causal-split", "sink-split", "every-term"):
            case = next(case for case in CASES if case.name == name)
            problem, layout, _, terms, (q, k, v, dout, dlse) = make(case, "cpu")
            limit = {"limit": case.limit}
            out, lse = forward(launch, problem, layout, terms, q, k, v, **limit)
            gradients = backward(launch, problem, layout, terms, dout, dlse, q, k, v, out, lse, **limit)
            plain = [out, lse, *gradients[:3]]
            room, found = zip(*(within_nan(x) for x in plain), strict=True)
            dlse = within_nan(dlse)[1].copy_(dlse)
            forward(launch, problem, layout, terms, q, k, v, into=found[:2], **limit)
            backward(launch, problem, layout, terms, dout, dlse, q, k, v, *found[:2], into=found[2:], **limit)
            for x, given, around in zip(plain, found, room, strict=True):
                assert torch.equal(given, x)
                assert int(around.isnan().sum()) == around.numel() - x.numel()

    def test_operands_of_any_strides_and_results_in_float32() -> None:
        """Copies where strides are not readable, vectors at a stride, lengths of every integer type, wider results."""
        import torch

        from gossamer.kernels.triton.block import launch_block as launch
        from tests.support.exact import within_nan

        case = next(case for case in CASES if case.name == "every-term")
        problem, layout, mask, terms, inputs = make(case, "cpu")
        inputs = [x.mT.contiguous().mT if x.ndim == 4 else x for x in inputs]
        q, k, v, dout, dlse = inputs
        for lengths in (torch.int8, torch.uint8, torch.int32, torch.int64):
            vectors = {
                name: torch.stack([x, torch.full_like(x, 77)], 1)[:, 0]
                for name in ("key_lengths", "sink_logits", "alibi_slopes")
                if (x := getattr(terms, name)) is not None
            }
            vectors["key_lengths"] = (vectors["key_lengths"] - 50).to(lengths)
            given = terms._replace(**vectors)
            shapes = [x.shape for x in (dout, dlse, q, k, v)]
            room, into = zip(*(within_nan(torch.empty(shape)) for shape in shapes), strict=True)
            out, lse = forward(launch, problem, layout, given, q, k, v, into=into[:2])
            results = backward(launch, problem, layout, given, dout, dlse, q, k, v, out, lse, into=into[2:])
            assert all(x is y for x, y in zip((out, lse, *results[:3]), into, strict=True))
            assert all(int(r.isnan().sum()) == r.numel() - x.numel() for r, x in zip(room, into, strict=True))
            compare(case, mask, given, inputs, (out, lse, *results))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_results_of_two_parts_join(dtype: str) -> None:
        import torch

        from gossamer.kernels.launch import Builder, operand_of
        from gossamer.kernels.triton.combine_results import combine_results
        from gossamer.torch.bind import bind
        from tests.support.exact import within_nan

        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        outs = [torch.randn(2, 3, 45, 20).to(kind) for _ in range(2)]
        lses = [3 * torch.randn(2, 3, 45) for _ in range(2)]
        for n, empty in enumerate(([0, 7], [0, 9])):
            lses[n][:, :, empty] = -torch.inf
            outs[n][:, :, empty] = 0
        rooms, (out, lse) = zip(*(within_nan(x) for x in (outs[0], lses[0])), strict=True)
        out.copy_(outs[0])
        lse.copy_(lses[0])
        given = {"out": out, "lse": lse, "part_out": outs[1], "part_lse": lses[1]}
        b = Builder({name: operand_of(x) for name, x in given.items()})
        combine_results(b, *given)
        bind(b.done(), torch.device("cpu"), tuple(given))(*given.values())
        weight = torch.softmax(torch.stack(lses).double(), 0).nan_to_num()[..., None]
        exact = weight[0] * outs[0].double() + weight[1] * outs[1].double()
        # The interpreter cuts bfloat16 where a GPU rounds it: one unit of the last place.
        torch.testing.assert_close(out.double(), exact, rtol=0 if dtype == "float32" else 2**-7, atol=2e-6)
        torch.testing.assert_close(lse, torch.logaddexp(*lses))
        assert all(int(r.isnan().sum()) == r.numel() - x.numel() for r, x in zip(rooms, (out, lse), strict=True))

    def test_parts_of_a_call(always: list, monkeypatch: pytest.MonkeyPatch) -> None:
        """Calls in parts, as the GPU tests make them."""
        from dataclasses import replace

        from gossamer.kernels.triton import IMPLEMENTATION
        from tests.support import parts_cases

        on_cpu = replace(IMPLEMENTATION.capability, devices=frozenset({"cpu"}))
        monkeypatch.setattr(type(IMPLEMENTATION), "capability", on_cpu)
        for name in ("few_keys", "longformer_sinks"):
            always.clear()
            case = next(case for case in parts_cases.CASES if case.name == name)
            parts_cases.check("triton", "cpu", "float32", case, always)

    @pytest.mark.parametrize("columns", [32, 64])
    @pytest.mark.parametrize("rows", [16, 64])
    def test_every_step_size_gives_the_same_rows(rows: int, columns: int) -> None:
        from gossamer.kernels.triton.block.config import TileConfig

        check(next(case for case in CASES if case.name == "every-term"), "cpu", tiles=TileConfig(rows, columns, 4, 1))

    def test_descriptors_give_the_same_numbers() -> None:
        from gossamer.kernels.triton.block.config import TileConfig

        for name in ("bigbird", "window-half", "random", "large-heads", "strided"):
            check(next(case for case in CASES if case.name == name), "cpu", tiles=TileConfig(64, 64, 4, 1, tma=True))

else:

    @pytest.mark.slow
    @pytest.mark.parametrize("part", range(PARTS))
    def test_in_the_interpreter(part: int) -> None:
        from tests.support.triton_cases import CASES

        names = [case.name for case in CASES][part::PARTS]
        tests = [f"test_case[{name}]" for name in names]
        if part == 0:
            tests.append("test_same_bits_with_and_without_work_items")
            tests.append("test_descriptors_give_the_same_numbers")
            tests.append("test_into_given_tensors")
            tests.append("test_operands_of_any_strides_and_results_in_float32")
        if part == 2:
            tests += ["test_parts_of_a_call", "test_results_of_two_parts_join"]
        if part == 1:
            tests.append("test_every_step_size_gives_the_same_rows")
        in_interpreter(__file__, *tests)
