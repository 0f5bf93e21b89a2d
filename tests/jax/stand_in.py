"""Kernels of numpy that stand for those for Hopper, called as these are: as targets of XLA, with flat memory.

They read the same items and lists, and write the same results. What only kernels tell one another is their own here:
how sums of dQ lie, and what the parts of a row hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gossamer.jax.kernels import recipes, targets
from gossamer.jax.kernels.targets import Driver
from gossamer.kernels.hopper.device.column_items import LISTS as OF_SEGMENTS
from gossamer.kernels.hopper.device.column_items import ColumnItem, Segment
from gossamer.kernels.hopper.device.merges import PartMerge
from gossamer.kernels.hopper.device.parameters import parameters
from gossamer.kernels.hopper.device.row_items import LISTS as OF_ROWS
from gossamer.kernels.hopper.device.row_items import RowItem

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int32": np.int32}
LOG2E = 1 / np.log(2)
Array = Any


CALLS: list[str] = []  # the kinds of kernels that were called


def function(kind: str, roles: tuple[Any, ...], *key: Any) -> Any:
    """What TVM-FFI calls for a kernel."""
    import tvm_ffi

    def call(*given: Any) -> None:
        CALLS.append(kind)
        KERNELS[kind](key, *_arguments(kind, roles, key, given))

    return tvm_ffi.convert(call)


def name(kind: str, roles: tuple[Any, ...], *key: Any) -> str:
    return f"stand_in_{kind}_{abs(hash((roles, key))):x}"


def use(patch: Any) -> list[str]:
    """Compute by these kernels what an H200 would, and tell which were called: `patch` is pytest's monkeypatch."""
    patch.setattr(targets, "driver", Driver("cpu", "cpu", function, name))
    patch.setattr(targets, "missing", list)
    patch.setattr(recipes, "chip", lambda: recipes.Chip(90, 132))
    CALLS.clear()
    return CALLS


def _memory(x: Any) -> Array:
    """The memory of an argument, to be written."""
    dtype, shape = np.dtype(TYPES[str(x.dtype)]), tuple(x.shape)
    size = int(np.prod(shape)) * dtype.itemsize
    if not size:
        return np.zeros(shape, dtype)
    address = x.__dlpack_address__() if hasattr(x, "__dlpack_address__") else x.data_ptr()
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


def _arguments(kind: str, roles: tuple[Any, ...], key: tuple[Any, ...], given: tuple[Any, ...]) -> list[Any]:
    """The arguments of a kernel from those of its target: see `device.flat`."""
    every = [p._replace(role=r) for p, r in zip(parameters(kind, *key), roles, strict=True)]
    config = key[0]
    read = "lengths" not in [p.name for p in every] or kind in ("forward", "gather") or config.lengths
    there = [p for p in every if read or p.name != "lengths"]
    inputs, results = [p for p in there if p.role != "made"], [p for p in there if p.role != "read"]
    memory = {p.name: _memory(x) for p, x in zip(inputs + results, given, strict=False)}
    kept = {p.name for p in inputs} & {p.name for p in results}
    for p, x in zip(inputs, given, strict=False):
        assert p.name not in kept or memory[p.name].ctypes.data == _memory(x).ctypes.data, f"{p.name} is not in place"
    numbers: Iterator[Any] = iter(given[len(inputs) + len(results) :])
    found: list[Any] = []
    for p in every:
        if p not in there:
            found.append(None)
            continue
        x = memory[p.name]
        if p.rank:
            offset, shape = next(numbers), [next(numbers) for _ in range(p.rank)]
            strides = [next(numbers) for _ in range(3)] + [1] * (p.rank == 4)
            last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            assert offset >= 0 and last < x.size, f"{p.name} is outside of its memory"
            x = np.lib.stride_tricks.as_strided(x[offset:], shape, [s * x.itemsize for s in strides])
        found.append(x)
    return [*found, *numbers]


class Lists(NamedTuple):
    """What items of tiles refer to."""

    lists: Array
    lo: Array
    hi: Array
    pool: Array

    def tiles(
        self, words: Any, places: dict[str, tuple[int, int]], lead: int, tile: int, rows: int, columns: int
    ) -> Iterator[tuple[int, Array]]:  # fmt: skip
        """(tile column, which pairs of the tile are kept) of a range of a tile row."""
        for kind, (first, count) in places.items():
            for at in range(words[first], words[first] + words[count]):
                column = int(self.lists[0, at])
                if kind == "full":
                    yield column, np.ones((rows, columns), bool)
                elif kind == "interval":
                    mine = slice(tile * rows, (tile + 1) * rows)
                    lo, hi = (np.resize(np.append(x[lead, mine], 0), rows) for x in (self.lo, self.hi))
                    there = np.arange(rows) < self.lo.shape[1] - tile * rows
                    j = column * columns + np.arange(columns)
                    yield column, (j >= lo[:, None]) & (j < hi[:, None]) & there[:, None]
                else:
                    entry = int(self.lists[1, at])
                    packed = np.ascontiguousarray(self.pool[entry * rows : (entry + 1) * rows]).view(np.uint8)
                    yield column, np.unpackbits(packed, axis=1, bitorder="little").astype(bool)


def _rows(x: Array, batch: int, head: int, tile: int, size: int) -> Array:
    """A tile of rows in float64, padded with zeros."""
    part = x[batch, head, tile * size : (tile + 1) * size].astype(np.float64)
    return np.concatenate([part, np.zeros((size - len(part), *part.shape[1:]))])


def _write(x: Array, batch: int, head: int, tile: int, size: int, value: Array) -> None:
    part = x[batch, head, tile * size : (tile + 1) * size]
    part[...] = value[tuple(slice(0, n) for n in part.shape)]


class Score(NamedTuple):
    """How products become scores."""

    softcap: bool
    before: float
    exponent: float

    def __call__(self, s: Array) -> tuple[Array, Array]:
        """Scores, and their derivatives by the product over the factor that gradients have."""
        x = s * self.before
        if not self.softcap:
            return x * self.exponent / LOG2E, np.ones_like(s)
        t = np.tanh(x)
        return t * self.exponent / LOG2E, 1 - t * t


def forward(key: Any, *a: Any) -> None:
    (q, k, v, out, lse, work, lists, lo, hi, pool, sinks, part_out, part_lse, merges, lengths, counter, before, exponent,
     items, has_sinks, _, cut) = a  # fmt: skip
    (c,) = key
    assert items == len(work) and not counter.any() and q.shape[2] == out.shape[2] == lse.shape[2]
    known = Lists(lists, lo, hi, pool)
    for item in work.tolist():
        batch, head, tile, slot = (item[w] for w in (RowItem.BATCH, RowItem.HEAD, RowItem.TILE, RowItem.SLOT))
        group, rows = head * k.shape[1] // q.shape[1], _rows(q, batch, head, tile, c.block_q)
        scores, values = [np.full((c.block_q, 1), -np.inf)], [np.zeros((1, v.shape[3]))]
        for column, keep in known.tiles(item, OF_ROWS, item[RowItem.LEAD], tile, c.block_q, c.block_kv):
            s, _ = Score(c.score == "softcap", before, exponent)(rows @ _rows(k, batch, group, column, c.block_kv).T)
            j = column * c.block_kv + np.arange(c.block_kv)
            keep = keep & (j < (lengths[batch] if c.lengths else k.shape[2]))
            scores.append(np.where(keep, s, -np.inf))
            values.append(_rows(v, batch, group, column, c.block_kv))
        sink = sinks[head] if has_sinks and slot < 0 else -np.inf
        o, total = _softmax(np.concatenate(scores, 1), np.concatenate(values), sink)
        if slot < 0:
            _write(out, batch, head, tile, c.block_q, o)
            _write(lse, batch, head, tile, c.block_q, total)
        else:
            part_out[slot, :, : o.shape[1]], part_lse[slot] = o, total
    if cut:
        for words in merges.tolist():
            batch, head, tile, slot, count = (words[w] for w in PartMerge)
            parts = part_lse[slot : slot + count].astype(np.float64).T
            values = part_out[slot : slot + count].transpose(1, 0, 2).astype(np.float64)
            o, total = _softmax(parts, values, sinks[head] if has_sinks else -np.inf)
            _write(out, batch, head, tile, c.block_q, o)
            _write(lse, batch, head, tile, c.block_q, total)


def _softmax(s: Array, v: Array, sink: float) -> tuple[Array, Array]:
    """Softmax of rows over values, (n, E) or (rows, n, E), and the logarithm of the denominators with a sink."""
    m = np.maximum(s.max(1), sink)
    m = np.where(np.isinf(m), 0.0, m)
    p = np.exp(s - m[:, None])
    total = p.sum(1) + np.exp(sink - m)
    o = np.einsum("rn,ne->re" if v.ndim == 2 else "rn,rne->re", p, v)
    with np.errstate(divide="ignore"):
        return o / np.where(total > 0, total, 1.0)[:, None], m + np.log(total)


def preprocess(
    key: Any, out: Array, dout: Array, lse: Array, dlse: Array, terms: Array, dq_sum: Array, has: int
) -> None:
    *_, zeroed = key
    Q = out.shape[2]
    terms[0], terms[1] = np.inf, 0.0
    terms[0][:, :, :Q] = np.where(lse == -np.inf, np.inf, lse * LOG2E)
    delta = (out.astype(np.float64) * dout.astype(np.float64)).sum(-1) - (dlse if has else 0.0)
    terms[1][:, :, :Q] = np.where(lse == -np.inf, 0.0, delta)
    if zeroed:
        dq_sum[...] = 0.0


class Pairs(NamedTuple):
    """P and dS of a tile of queries and one of keys."""

    p: Array
    ds: Array


def _pairs(
    c: Any, score: Score, q: Array, k: Array, v: Array, do: Array, lse: Array, delta: Array, keep: Array
) -> Pairs:  # fmt: skip
    s, slope = score(q @ k.T)
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.where(keep, np.exp2(s * LOG2E - lse[:, None]), 0.0)
    return Pairs(p, p * (do @ v.T - delta[:, None]) * slope)


def backward(key: Any, *a: Any) -> None:
    (q, k, v, dout, terms, dq_sum, dk, dv, work, segments, lists, lo, hi, pool, part_dk, part_dv, lengths, counter,
     before, exponent, factor, items, _) = a  # fmt: skip
    (c,) = key
    assert items == len(work) and not counter.any()
    known, score, ratio = (
        Lists(lists, lo, hi, pool),
        Score(c.score == "softcap", before, exponent),
        len(q[0]) // len(k[0]),
    )
    for item in work.tolist():
        batch, group, tile, slot = (
            item[w] for w in (ColumnItem.BATCH, ColumnItem.GROUP, ColumnItem.TILE, ColumnItem.SLOT)
        )
        first, count = item[ColumnItem.SEGMENT_START], item[ColumnItem.SEGMENT_COUNT]
        kt, vt = _rows(k, batch, group, tile, c.block_kv), _rows(v, batch, group, tile, c.block_kv)
        sums = np.zeros((c.block_kv, k.shape[3])), np.zeros((c.block_kv, v.shape[3]))
        j = tile * c.block_kv + np.arange(c.block_kv)
        there = j < (k.shape[2] if lengths is None else min(lengths[batch], k.shape[2]))
        for words in segments[first : first + count].tolist():
            head = group * ratio + words[Segment.HEAD]
            for column, keep in known.tiles(words, OF_SEGMENTS, words[Segment.LEAD], tile, c.block_kv, c.block_q):
                qt, do = _rows(q, batch, head, column, c.block_q), _rows(dout, batch, head, column, c.block_q)
                mine = slice(column * c.block_q, (column + 1) * c.block_q)
                lse, delta = (np.resize(np.append(x[batch, head, mine], pad), c.block_q) if len(x[batch, head, mine])
                              < c.block_q else x[batch, head, mine] for x, pad in ((terms[0], np.inf), (terms[1], 0.0)))  # fmt: skip
                pairs = _pairs(c, score, qt, kt, vt, do, lse, delta, keep.T & there)
                sums[0][...] += pairs.ds.T @ qt
                sums[1][...] += pairs.p.T @ do
                if getattr(c, "with_dq", False):
                    rows = dq_sum[batch, head].reshape(-1, dq_sum.shape[3] // 64)[mine]
                    rows[:, : q.shape[3]] += (pairs.ds @ kt)[: len(rows)]
        if slot < 0:
            _write(dk, batch, group, tile, c.block_kv, sums[0] * factor)
            _write(dv, batch, group, tile, c.block_kv, sums[1])
        else:
            part_dk[slot], part_dv[slot] = 0.0, 0.0
            part_dk[slot, :, : k.shape[3]], part_dv[slot, :, : v.shape[3]] = sums


def query_gradient(key: Any, *a: Any) -> None:
    (q, k, v, dout, terms, dq, work, lists, lo, hi, pool, part_dq, lengths, counter, before, exponent, factor, items,
     _) = a  # fmt: skip
    (c,) = key
    assert items == len(work) and not counter.any()
    known, score = Lists(lists, lo, hi, pool), Score(c.score == "softcap", before, exponent)
    for item in work.tolist():
        batch, head, tile, slot = (item[w] for w in (RowItem.BATCH, RowItem.HEAD, RowItem.TILE, RowItem.SLOT))
        group = head * k.shape[1] // q.shape[1]
        qt, do = _rows(q, batch, head, tile, c.block_q), _rows(dout, batch, head, tile, c.block_q)
        lse, delta = (_rows(x[..., None], batch, head, tile, c.block_q)[:, 0] for x in terms)
        total = np.zeros((c.block_q, q.shape[3]))
        for column, keep in known.tiles(item, OF_ROWS, item[RowItem.LEAD], tile, c.block_q, c.block_kv):
            j = column * c.block_kv + np.arange(c.block_kv)
            keep = keep & (j < (k.shape[2] if lengths is None else lengths[batch]))
            kt, vt = (_rows(x, batch, group, column, c.block_kv) for x in (k, v))
            total += _pairs(c, score, qt, kt, vt, do, lse, delta, keep).ds @ kt
        if slot < 0:
            _write(dq, batch, head, tile, c.block_q, total * factor)
        else:
            part_dq[slot] = 0.0
            part_dq[slot, :, : q.shape[3]] = total


def postprocess(key: Any, dq_sum: Array, dq: Array, factor: float) -> None:
    B, H, Q, D = dq.shape
    dq[...] = dq_sum.reshape(B, H, -1, dq_sum.shape[3] // 64)[:, :, :Q, :D] * factor


def sum_parts(key: Any, result: Array, parts: Array, merges: Array, factor: float) -> None:
    for words in merges.tolist():
        batch, head, tile, slot, count = (words[w] for w in PartMerge)
        _write(result, batch, head, tile, parts.shape[1], parts[slot : slot + count].sum(0) * factor)


KERNELS: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (forward, preprocess, backward, query_gradient, postprocess, sum_parts)
}
