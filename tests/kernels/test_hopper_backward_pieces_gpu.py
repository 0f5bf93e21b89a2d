"""The kernels around the column kernel of the Hopper backward, each alone, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.launch.arguments import LOG2E
from gossamer.kernels.hopper.launch.backward import query_gradient
from gossamer.kernels.launch import Builder, operand_of
from gossamer.kernels.row_formulas import row_terms
from gossamer.patterns import BigBird, Causal, SlidingWindow
from gossamer.testing import tolerance
from gossamer.torch.bind import bind
from tests.support.hopper_backward_cases import ON_HOPPER, TYPES, Call, build, prepare, scattered, small
from tests.support.launches import forward

pytestmark = ON_HOPPER


class TestPieces:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("E", [1, 33, 64, 96, 128, 200, 256])
    def test_row_terms(self, E: int, dtype: torch.dtype) -> None:
        from gossamer.kernels.hopper import compiled
        from gossamer.kernels.hopper.choice import padded

        B, H, Q = 2, 3, 300
        whole = -(-E // 8) * 8  # rows are padded to 16 bytes
        out, dout = (
            torch.randn(B, Q, H, whole, device="cuda").to(dtype).transpose(1, 2)[..., :E] for _ in range(2)
        )  # fmt: skip
        lse, dlse = (
            torch.randn(B, Q, H, device="cuda").transpose(1, 2),
            torch.randn(B, H, 2 * Q, device="cuda")[..., ::2],
        )
        lse[:, 1, 5:9], dout[:, 1, 5:9] = -torch.inf, torch.nan
        sinks = torch.tensor([-3.0, 0.1, 700.0], device="cuda")
        # Rows that keep nothing under a sink; those with the lse of a sink alone, and with an out of 0 alone.
        lse[:, :, 20:40], out[:, :, 20:40] = sinks[:, None], 0.0
        lse[:, :, 50:60], out[:, :, 50:60], out[:, :, 60:70] = sinks[:, None], 1.0, 0.0
        for zeroed, given, has_sinks in ((0, None, 0), (padded(E), dlse, 0), (0, dlse, 1)):
            dout[:, :, 20:40] = torch.inf if has_sinks else 1.0
            under_sink = torch.zeros(B, H, Q, dtype=torch.bool, device="cuda")
            under_sink[:, :, 20:40] = bool(has_sinks)
            rows = torch.empty(2, B, H, 384, device="cuda")
            sums = torch.empty(B, H, 6, 64 * max(1, zeroed), device="cuda")
            compiled.preprocess(str(dtype)[6:], padded(E), zeroed)(
                out, dout, lse, lse if given is None else given, rows, sums, sinks, int(given is not None), has_sinks
            )
            delta = torch.where(under_sink, 0.0, (out.double() * dout.double()).sum(-1))
            delta = delta - (0.0 if given is None else given)
            empty = lse == -torch.inf
            want = torch.where(empty | under_sink, torch.inf, lse * 1.4426950408889634)
            torch.testing.assert_close(rows[0, :, :, :Q], want)
            torch.testing.assert_close(rows[1, :, :, :Q], torch.where(empty, 0.0, delta).float(), rtol=1e-5, atol=1e-4)
            assert (rows[0, :, :, Q:] == torch.inf).all() and (rows[1, :, :, Q:] == 0).all()
            assert not zeroed or (sums == 0).all()

    @pytest.mark.parametrize("D", [1, 33, 64, 96, 128, 192, 256])
    def test_dq_from_its_sums(self, D: int) -> None:
        from gossamer.kernels.hopper import compiled
        from gossamer.kernels.hopper.choice import padded

        B, H, Q, size = 2, 3, 300, padded(D)
        plain = torch.randn(B, H, 384, size, device="cuda")
        # (tile, warp, r, row, j, quad, c) to (tile, j, warp, row, quad, r, c): a warpgroup's accumulator.
        sums = plain.reshape(B, H, 6, 4, 2, 8, size // 8, 4, 2).permute(0, 1, 2, 6, 3, 5, 7, 4, 8)
        dq = torch.empty((B, H, Q, -(-D // 8) * 8), dtype=torch.bfloat16, device="cuda")[..., :D]
        compiled.postprocess("bfloat16", size)(sums.reshape(B, H, 6, 64 * size).contiguous(), dq, 0.3)
        assert torch.equal(dq, (plain[:, :, :Q, :D] * 0.3).bfloat16())

    @pytest.mark.parametrize("D", [64, 128, 192])
    def test_parts_are_added_in_slot_order(self, D: int) -> None:
        from gossamer.kernels.hopper import compiled

        # Tiles 0 and 2 of two heads, of 128 rows each, are split into 3 and 6 parts.
        parts = torch.randn(2 * 9, 128, D, device="cuda")
        split = [(head, tile, 9 * head + at, n) for head in range(2) for tile, at, n in ((0, 0, 3), (2, 3, 6))]
        merges = torch.tensor([(0, *fields, 0, 0, 0) for fields in split], dtype=torch.int32, device="cuda")
        result = torch.zeros(1, 2, 300, D, dtype=torch.bfloat16, device="cuda")
        compiled.sum_parts("bfloat16", D, 128)(result, parts, merges, 0.5)
        want = torch.zeros(1, 2, 384, D, device="cuda")
        for head, tile, first, count in split:
            for slot in range(first, first + count):
                want[0, head, 128 * tile : 128 * tile + 128] += parts[slot]
        assert torch.equal(result, (0.5 * want[:, :, :300]).bfloat16())

    @pytest.mark.parametrize(("D", "dtype"), TYPES, ids=str)
    def test_dq_by_rows(self, D: int, dtype: torch.dtype) -> None:
        for layout, *heads in small(D):
            self.by_rows(prepare(layout, *heads, D, dtype=dtype, with_dlse=True))

    @pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 64), (192, 128)], ids=str)
    def test_dq_by_rows_of_other_tiles(self, tile: tuple[int, int]) -> None:
        """The forward is Triton's: it walks any tile."""
        from gossamer.kernels.triton.block import launch_block as triton

        for D in (64, 128):
            for pattern in (SlidingWindow(150, 40), BigBird(32), Causal()):
                call = prepare(build(pattern, 700, 700, D), 1, 4, 2, D)
                layout = pattern.layout(700, 700, block_q=tile[0], block_kv=tile[1]).to("cuda")
                out, lse = forward(triton, call.problem, layout, call.terms, call.q, call.k, call.v)
                self.by_rows(call._replace(layout=layout, out=out, lse=lse))

    def by_rows(self, call: Call, split: int | None = None) -> None:
        delta, lse = row_terms(call.dout, call.dlse, call.out, call.lse, torch.float32)
        given = {name: getattr(call, name) for name in ("q", "k", "v", "dout")}
        given["terms"] = torch.stack([lse * LOG2E, delta]).contiguous()
        b = Builder({name: operand_of(x) for name, x in given.items()})
        b.array("dq", call.problem.dtype, tuple(call.q.shape))
        scoring = Scoring(call.terms.scale, call.terms.q_offset, call.terms.softcap)
        query_gradient(b, call.problem, call.layout, scoring, tuple(given), None, "dq", split=split)
        (dq,) = bind(b.done("dq"), call.q.device, tuple(given))(*given.values())
        tolerance.check("dq", dq, call.exact[0], call.low[0])

    @pytest.mark.parametrize("split", [1, 3])
    def test_dq_by_split_rows(self, split: int) -> None:
        self.by_rows(prepare(scattered((1, 1, 640, 1664), 0.2), 2, 4, 2, 128), split)
        self.by_rows(prepare(build(Causal(), 5, 3000, 64), 2, 4, 2, 64), split)

    def test_dq_by_rows_of_score_terms(self) -> None:
        layout = build(Causal(), 500, 500)
        for more in ({"softcap": 5.0}, {"scale": -0.1}, {"scale": 0.0}, {"scale": 1.0}):
            self.by_rows(prepare(layout, 1, 2, 2, 128, **more))
