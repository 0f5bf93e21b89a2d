"""NaN and infinities in what no kept pair has reach no result of a call: masks, lengths, starts, sequences, lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.testing.inputs import POISONS
from tests.support.exact import no_gpu

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]
Attend = Callable[..., tuple[Tensor, Tensor]]


def check(
    device: str, dtype: torch.dtype, kept: np.ndarray, attend: Attend, *, sink: bool = False, made: bool = False
) -> None:
    """Results and gradients of a call with zeros in what no kept pair has, and with NaN and infinities there.

    Args:
        kept: (B, H, Q, K), by the definition.
        attend: makes out and lse of q, k, v and sinks (or None).
        made: structure is made on the device, where Hopper's kernels for 16 bits clear the keys before the first that
            is kept and behind the last one (limits).
    """
    generator = torch.Generator().manual_seed(3)
    B, H, Q, K = kept.shape
    G = H // 2
    rows = torch.from_numpy(~kept.any(-1)).to(device)
    keys = torch.from_numpy(~kept.reshape(B, G, 2, Q, K).any((2, 3))).to(device)
    if made and device == "cuda" and dtype == torch.bfloat16:
        there = ~keys
        keys = (there.cumsum(-1) == 0) | (there.flip(-1).cumsum(-1).flip(-1) == 0)
    assert rows.any() or keys.any()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    given = [draw(B, H, Q, 32), draw(B, G, K, 32), draw(B, G, K, 32), draw(B, H, Q, 32)]
    dlse, sinks = draw(B, H, Q), draw(H).float() if sink else None

    def results(value: float) -> list[Tensor]:
        leaves = [x.masked_fill(m[..., None], value) for x, m in zip(given, (rows, keys, keys, rows), strict=True)]
        *qkv, dout = leaves
        leaves = [x.clone().requires_grad_() for x in (*qkv, sinks) if x is not None]
        out, lse = attend(*leaves[:3], leaves[3] if sink else None)
        of_lse = dlse.to(lse.dtype) if sink else dlse.to(lse.dtype).masked_fill(rows, value)
        return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [dout, of_lse])]

    zeros = results(0.0)
    assert all(x.isfinite().all() for x in (zeros[0], *zeros[2:]))
    assert (zeros[0][rows] == 0).all()
    for value in POISONS:
        for name, clean, found in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), zeros, results(value), strict=False):
            assert torch.equal(clean, found), f"{value} reaches {name}"


def causal(Q: int, K: int) -> np.ndarray:
    return np.tri(Q, K, K - Q, dtype=bool)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
class TestCalls:
    @pytest.mark.parametrize("sink", [False, True])
    def test_padding_on_both_sides(self, device: str, dtype: torch.dtype, sink: bool) -> None:
        starts, lengths = torch.tensor([0, 40, 90]), torch.tensor([140, 131, 90])
        j = np.arange(140)
        kept = causal(140, 140) & (j >= starts.numpy()[:, None, None]) & (j < lengths.numpy()[:, None, None])

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Any:
            at = {"key_starts": starts.to(device), "key_lengths": lengths.to(device)}
            return gs.attention(q, k, v, gs.Causal(), **at, sink_logits=sinks, return_lse=True)

        check(device, dtype, np.broadcast_to(kept[:, None], (3, 4, 140, 140)), attend, sink=sink)

    @pytest.mark.parametrize("sink", [False, True])
    def test_documents_with_lengths(self, device: str, dtype: torch.dtype, sink: bool) -> None:
        """Of more queries than positions: those before the first position and behind the last keep nothing."""
        ids, lengths = torch.tensor([0] * 50 + [1] * 30 + [2] * 40), torch.tensor([120, 61])
        i, j = np.arange(150) - 20, np.arange(120)
        inside = (i >= 0) & (i < 120)
        same = (ids.numpy()[i.clip(0, 119), None] == ids.numpy()) & inside[:, None] & (j <= i[:, None])
        kept = same & (j < lengths.numpy()[:, None, None])

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Any:
            pattern = gs.DocumentIds(ids.to(device)) & gs.Causal()
            more = {"q_offset": -20, "key_lengths": lengths.to(device)}
            return gs.attention(q, k, v, pattern, **more, sink_logits=sinks, return_lse=True)

        check(device, dtype, np.broadcast_to(kept[:, None], (2, 2, 150, 120)), attend, sink=sink, made=True)

    @pytest.mark.parametrize("pattern", [gs.Dense(), gs.Causal(), gs.SlidingWindow(9)], ids=str)
    def test_packed_sequences(self, device: str, dtype: torch.dtype, pattern: gs.Pattern) -> None:
        """Rows before the first sequence and past the last, a sequence without keys, and keys that are not there."""
        cu_q, cu_k, used = ([5, 40, 60, 61, 100], [3, 50, 50, 90, 120], [47, 0, 20, 21])
        kept = np.zeros((110, 150), bool)
        for n in range(4):
            first, last, key, count = cu_q[n], cu_q[n + 1], cu_k[n], used[n]
            rows = last - first
            keep = pattern.materialize(rows, count, count - rows) if count else np.zeros((rows, 0), bool)
            kept[first:last, key : key + count] = keep

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Any:
            at = [torch.tensor(x, device=device) for x in (cu_q, cu_k, used)]
            flat = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
            more = {"return_lse": True, "deterministic": True}  # or dQ is added in any order
            out, lse = gs.varlen(*flat, *at[:2], seqused_k=at[2], pattern=pattern, **more)
            return out.transpose(0, 1)[None], lse[None]

        check(device, dtype, np.broadcast_to(kept, (1, 4, 110, 150)), attend, made=True)

    @pytest.mark.parametrize("sink", [False, True])
    def test_lists_of_keys_and_of_blocks(self, device: str, dtype: torch.dtype, sink: bool) -> None:
        rng = np.random.default_rng(0)
        listed = np.where(rng.random((100, 7)) < 0.8, rng.integers(0, 60, (100, 7)), -1)
        listed[::3] = -1
        kept = (listed[:, :, None] == np.arange(130)).any(1)
        blocks = np.array([[1, -1, 3], [-1, -1, -1], [3, 3, 0]])
        of_blocks = (blocks[:, :, None] == np.arange(5)).any(1).repeat(64, 0).repeat(64, 1)[:150, :300]

        def attend(pattern: Any) -> Attend:
            return lambda q, k, v, sinks: gs.attention(q, k, v, pattern, sink_logits=sinks, return_lse=True)

        given = torch.from_numpy(listed)[None, None].to(device)
        if not (device == "cuda" and dtype == torch.float64):
            check(device, dtype, np.broadcast_to(kept, (1, 4, 100, 130)), attend(gs.Indices(given)), sink=sink)
        given = torch.from_numpy(blocks)[None, None].to(device)
        for rule in (gs.Dense(), gs.SlidingWindow(70, 5)):
            keep = np.broadcast_to(of_blocks & rule.materialize(150, 300), (1, 4, 150, 300))
            check(device, dtype, keep, attend(gs.BlockIndices(given, block_size=64) & rule), sink=sink)

    def test_masks(self, device: str, dtype: torch.dtype) -> None:
        kept = np.random.default_rng(1).random((2, 4, 90, 70)) < 0.3
        kept[:, :, ::4] = kept[..., 20:45] = kept[:, :2, :, ::3] = False
        mask = torch.from_numpy(kept).to(device)
        check(device, dtype, kept, lambda q, k, v, _: gs.attention(q, k, v, mask, return_lse=True))

    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_parts(self, device: str, dtype: torch.dtype, layout: str) -> None:
        """Residue classes, heads apart, and parts whose results are joined; rows before position 0 keep nothing."""
        by_head = gs.PerHead([gs.SlidingWindow(30), gs.Dilated(8, 0, 4), gs.Causal(), gs.Dilated(2, 2, 16)])
        for pattern in (gs.Dilated(6, 3, 5), by_head, gs.SlidingWindow(20, sinks=4)):
            kept = np.broadcast_to(pattern.materialize(160, 200, -50), (2, 4, 160, 200))

            def attend(q: Tensor, k: Tensor, v: Tensor, _: Any, pattern: gs.Pattern = pattern) -> Any:
                if layout == "bhsd":
                    return gs.attention(q, k, v, pattern, q_offset=-50, return_lse=True)
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                out, lse = gs.attention(q, k, v, pattern, q_offset=-50, return_lse=True, layout="bshd")
                return out.transpose(1, 2), lse

            check(device, dtype, kept, attend)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_that_grows(device: str, dtype: torch.dtype) -> None:
    """What is behind the keys of a cache, whatever it is, is in no result: neither by lengths nor by views of it."""
    cache = torch.randn(2, 1, 2, 400, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    q = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    results = []
    for value in (0.0, *POISONS):
        found = []
        for length in (1, 7, 130, 131, 200, 399):
            k, v = cache.clone()
            for x in (k, v):
                x[:, :, length:] = value
            found.append(gs.attention(q, k[:, :, :length], v[:, :, :length], gs.Causal()))
            found.append(gs.attention(q, k, v, gs.Dense(), key_lengths=[length]))
            found.append(gs.attention(q, k, v, gs.SlidingWindow(50), q_offset=length - 1))
        results.append(torch.stack(found))
    assert results[0].isfinite().all()
    assert all(torch.equal(results[0], x) for x in results[1:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_learned_scale(device: str, dtype: torch.dtype) -> None:
    """Its gradient is a sum over all queries."""
    lengths, found = torch.tensor([0, 50], device=device), []
    for value in (0.0, *POISONS):
        q, k, v = (torch.randn(2, 2, 60, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
        q[0], k[0], v[0] = value, value, value
        k[1, :, 50:], v[1, :, 50:] = value, value
        scale = torch.tensor(0.3, device=device, requires_grad=True)
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        out = gs.attention(q, k, v, key_lengths=lengths, scale=scale)
        (of_scale,) = torch.autograd.grad(out.float().sum(), [scale])
        found.append(torch.cat([out.detach().float().flatten(), of_scale[None]]))
    assert found[0].isfinite().all() and all(torch.equal(found[0], x) for x in found[1:])
