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

from gossamer.cute.column_items import LISTS as OF_SEGMENTS
from gossamer.cute.column_items import ColumnItem, Segment
from gossamer.cute.merges import PartMerge
from gossamer.cute.row_items import LISTS as OF_ROWS
from gossamer.cute.row_items import RowItem
from gossamer.jax.kernels import targets
from gossamer.jax.kernels.targets import Driver
from gossamer.kernels.hopper.device.parameters import parameters
from gossamer.kernels.launch import Kernel
from tests.jax.stand_in_rows import rows

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int32": np.int32}
LOG2E = 1 / np.log(2)
GATHERED = 64  # columns of a step
Array = Any


CALLS: list[str] = []  # the kinds of kernels that were called


def function(kernel: Kernel, roles: tuple[Any, ...]) -> Any:
    """What TVM-FFI calls for a kernel."""
    import tvm_ffi

    kind, key = kernel.name, kernel.key

    def call(*given: Any) -> None:
        CALLS.append(kind)
        KERNELS[kind](key, *_arguments(kind, roles, key, given))

    return tvm_ffi.convert(call)


def name(kernel: Kernel, roles: tuple[Any, ...]) -> str:
    return f"stand_in_{kernel.name}_{abs(hash((roles, kernel.key))):x}"


def use(patch: Any) -> list[str]:
    """Compute by these kernels what an H200 would, and tell which were called: `patch` is pytest's monkeypatch."""
    patch.setattr(targets, "driver", Driver("cpu", "cpu", function, name))
    patch.setattr(targets, "missing", list)
    patch.setattr(targets, "chip", lambda: targets.Chip(90, 132))
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
    """The arguments of a kernel from those of its target: see `cute.flat`."""
    every = [p._replace(role=r) for p, r in zip(parameters(kind, *key), roles, strict=True)]
    config = key[0]
    read = "lengths" not in [p.name for p in every] or kind in ("forward", "gather", "rows") or config.lengths
    there = [p for p in every if (read or p.name != "lengths") and (p.name != "ds" or kind == "kept" or config.keeps)]
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
            rows = p.rank != 3  # whose last stride is 1
            strides = [next(numbers) for _ in range(p.rank - rows)] + [1] * rows
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


class Keys(NamedTuple):
    """Some keys that a tile of queries is given: their rows, and which pairs are kept."""

    k: Array
    v: Array
    keep: Array  # (queries, keys)
    columns: Array  # of the keys, -1 where there is none


class Blocks(NamedTuple):
    """Tiles of keys by the lists of a block layout."""

    known: Lists
    block_q: int
    block_kv: int

    def of(self, item: Any, k: Array, v: Array) -> Iterator[Keys]:
        """Of an item of rows; k and v are those of its head, in whole tiles."""
        at = item[RowItem.LEAD], item[RowItem.TILE], self.block_q, self.block_kv
        for column, keep in self.known.tiles(item, OF_ROWS, *at):
            mine = slice(column * self.block_kv, (column + 1) * self.block_kv)
            yield Keys(k[mine], v[mine], keep, np.arange(mine.start, mine.stop))


class Gathered(NamedTuple):
    """Keys by lists of columns, as many at a time as a tile has."""

    indices: Array
    bits: Array

    def of(self, item: Any, k: Array, v: Array) -> Iterator[Keys]:
        for step in range(item[RowItem.BITS_START], item[RowItem.BITS_START] + item[RowItem.BITS_COUNT]):
            columns = self.indices[step * GATHERED : (step + 1) * GATHERED]
            keep = self.pairs(step).T & (columns >= 0)
            keep[:, step * GATHERED + np.arange(GATHERED) >= item[RowItem.FIRST_COLUMN]] = False
            yield Keys(k[columns], v[columns], keep, columns)

    def pairs(self, step: int) -> Array:
        """(columns, rows) of a step: whether a row keeps a column."""
        words = np.ascontiguousarray(self.bits[2 * step : 2 * step + 2]).view(np.uint32)
        return ((words[:, None] >> np.arange(32, dtype=np.uint32)[:, None]) & 1).astype(bool).reshape(GATHERED, -1)


class Rows(NamedTuple):
    """A tile of queries of an item, in float64."""

    batch: int
    head: int
    group: int
    tile: int
    slot: int

    @classmethod
    def of(cls, item: Any, H: int, G: int) -> Rows:
        batch, head, tile, slot = (item[w] for w in (RowItem.BATCH, RowItem.HEAD, RowItem.TILE, RowItem.SLOT))
        return cls(batch, head, head * G // H, tile, slot)


def _whole(x: Array, batch: int, head: int, block: int) -> Array:
    """All rows of a head in float64, in whole tiles."""
    n = -(-x.shape[2] // block)
    return np.concatenate([_rows(x, batch, head, tile, block) for tile in range(max(n, 1))])


def forward_of(c: Any, q: Array, k: Array, v: Array, out: Array, lse: Array, work: Array, walk: Any, sinks: Array,
               part_out: Array, part_lse: Array, lengths: Array, score: Score, has_sinks: int) -> None:  # fmt: skip
    """out and lse of every item, or its parts."""
    for item in work.tolist():
        at = Rows.of(item, q.shape[1], k.shape[1])
        rows = _rows(q, at.batch, at.head, at.tile, c.block_q)
        keys = [_whole(x, at.batch, at.group, c.block_kv) for x in (k, v)]
        scores, values = [np.full((c.block_q, 1), -np.inf)], [np.zeros((1, v.shape[3]))]
        for step in walk.of(item, *keys):
            s, _ = score(rows @ step.k.T)
            there = step.columns < (lengths[at.batch] if c.lengths else k.shape[2])
            scores.append(np.where(step.keep & there, s, -np.inf))
            values.append(step.v)
        sink = sinks[at.head] if has_sinks and at.slot < 0 else -np.inf
        o, total = _softmax(np.concatenate(scores, 1), np.concatenate(values), sink)
        if at.slot < 0:
            _write(out, at.batch, at.head, at.tile, c.block_q, o)
            _write(lse, at.batch, at.head, at.tile, c.block_q, total)
        else:
            part_out[at.slot] = 0.0  # its memory may hold what no conversion takes
            part_out[at.slot, :, : o.shape[1]], part_lse[at.slot] = o, total


def merge(key: Any, out: Array, lse: Array, part_out: Array, part_lse: Array, merges: Array, sinks: Array,
          has_sinks: int) -> None:  # fmt: skip
    """out and lse of the rows that are cut."""
    size = part_lse.shape[1]
    for words in merges.tolist():
        batch, head, tile, slot, count = (words[w] for w in PartMerge)
        parts = part_lse[slot : slot + count].astype(np.float64).T
        values = part_out[slot : slot + count].transpose(1, 0, 2).astype(np.float64)
        o, total = _softmax(parts, values, sinks[head] if has_sinks else -np.inf)
        _write(out, batch, head, tile, size, o)
        _write(lse, batch, head, tile, size, total)


def forward(key: Any, *a: Any) -> None:
    (q, k, v, out, lse, work, lists, lo, hi, pool, sinks, part_out, part_lse, merges, lengths, counter, before,
     exponent, items, has_sinks, _, cut) = a  # fmt: skip
    (c,) = key
    assert items == len(work) and not counter.any() and q.shape[2] == out.shape[2] == lse.shape[2]
    walk, score = (
        Blocks(Lists(lists, lo, hi, pool), c.block_q, c.block_kv),
        Score(c.score == "softcap", before, exponent),
    )
    forward_of(c, q, k, v, out, lse, work, walk, sinks, part_out, part_lse, lengths, score, has_sinks)
    if cut:
        merge(None, out, lse, part_out, part_lse, merges, sinks, has_sinks)


def _softmax(s: Array, v: Array, sink: float) -> tuple[Array, Array]:
    """Softmax of rows over values, (n, E) or (rows, n, E), and the logarithm of the denominators with a sink."""
    m = np.maximum(s.max(1), sink)
    m = np.where(np.isinf(m), 0.0, m)
    p = np.exp(s - m[:, None])
    total = p.sum(1) + np.exp(sink - m)
    o = np.einsum("rn,ne->re" if v.ndim == 2 else "rn,rne->re", p, v)
    with np.errstate(divide="ignore"):
        return o / np.where(total > 0, total, 1.0)[:, None], m + np.log(total)


def preprocess(key: Any, *a: Any) -> None:
    out, dout, lse, dlse, terms, dq_sum, sinks, has_dlse, has_sinks = a
    (*_, zeroed), Q = key, out.shape[2]
    terms[0], terms[1] = np.inf, 0.0
    sink = sinks[:, None] if has_sinks else np.full((1, 1), -np.inf)
    with np.errstate(invalid="ignore"):
        near = np.abs(lse - sink) <= 2.0**-20 * np.maximum(np.abs(sink), 1.0)
    under_sink = near & (out == 0).all(-1) & np.isfinite(sink)
    terms[0][:, :, :Q] = np.where((lse == -np.inf) | under_sink, np.inf, lse * LOG2E)
    delta = np.where(under_sink, 0.0, (out.astype(np.float64) * dout.astype(np.float64)).sum(-1))
    delta = delta - (dlse if has_dlse else 0.0)
    terms[1][:, :, :Q] = np.where(lse == -np.inf, 0.0, delta)
    if zeroed:
        dq_sum[...] = 0.0


class Pairs(NamedTuple):
    """P and dS of some queries and keys."""

    p: Array
    ds: Array


class Queries(NamedTuple):
    """Some queries, and what a backward reads of them."""

    q: Array
    dout: Array
    lse: Array  # in base 2
    delta: Array

    @classmethod
    def of(cls, q: Array, dout: Array, terms: Array, batch: int, head: int, block: int) -> Queries:
        """All of a head, in whole tiles; what is behind them has no probability."""
        q, dout = (_whole(x, batch, head, block) for x in (q, dout))
        more = max(0, len(q) - terms.shape[3])
        lse, delta = (np.append(x[batch, head].astype(np.float64), [pad] * more)[: len(q)]
                      for x, pad in zip(terms, (np.inf, 0.0), strict=True))  # fmt: skip
        return cls(q, dout, lse, delta)

    def at(self, places: Any) -> Queries:
        return Queries(*(x[places] for x in self))

    def pairs(self, score: Score, k: Array, v: Array, keep: Array) -> Pairs:
        s, slope = score(self.q @ k.T)
        with np.errstate(over="ignore", invalid="ignore"):
            p = np.where(keep, np.exp2(s * LOG2E - self.lse[:, None]), 0.0)
        return Pairs(p, p * (self.dout @ v.T - self.delta[:, None]) * slope)


def columns_of(c: Any, q: Array, k: Array, v: Array, dout: Array, terms: Array, dq_sum: Array | None, dk: Array,
               dv: Array, work: Array, segments: Array, walk: Any, part_dk: Array, part_dv: Array,
               lengths: Array | None, score: Score, factor: float, put: Any = None) -> None:  # fmt: skip
    """dk and dv of every item, or its parts; dq_sum is added to, where there is one; `put` keeps dS."""
    ratio, block = q.shape[1] // k.shape[1], c.block_kv
    for item in work.tolist():
        words = ColumnItem.BATCH, ColumnItem.GROUP, ColumnItem.TILE, ColumnItem.SLOT
        batch, group, tile, slot = (item[w] for w in words)
        first, count = item[ColumnItem.SEGMENT_START], item[ColumnItem.SEGMENT_COUNT]
        kt, vt = _rows(k, batch, group, tile, block), _rows(v, batch, group, tile, block)
        sums = np.zeros((block, k.shape[3])), np.zeros((block, v.shape[3]))
        there = tile * block + np.arange(block) < (k.shape[2] if lengths is None else min(lengths[batch], k.shape[2]))
        for segment in segments[first : first + count].tolist():
            head = group * ratio + segment[Segment.HEAD]
            every = Queries.of(q, dout, terms, batch, head, c.block_q)
            for number, (places, keep) in enumerate(walk(segment, tile)):
                mine = every.at(places)
                pairs = mine.pairs(score, kt, vt, keep.T & there)
                for total, more in zip(sums, (pairs.ds.T @ mine.q, pairs.p.T @ mine.dout), strict=True):
                    total += more
                if put is not None:
                    put(item, segment, number, pairs.ds)
                if dq_sum is not None:
                    rows = dq_sum[batch, head].reshape(-1, dq_sum.shape[3] // 64)[places]
                    rows[:, : q.shape[3]] += (pairs.ds @ kt)[: len(rows)]
        if slot < 0:
            _write(dk, batch, group, tile, block, sums[0] * factor)
            _write(dv, batch, group, tile, block, sums[1])
        else:
            part_dk[slot], part_dv[slot] = 0.0, 0.0
            part_dk[slot, :, : k.shape[3]], part_dv[slot, :, : v.shape[3]] = sums


def backward(key: Any, *a: Any) -> None:
    (q, k, v, dout, terms, dq_sum, kept_ds, dk, dv, work, segments, lists, lo, hi, pool, part_dk, part_dv, lengths,
     counter, before, exponent, factor, items, _) = a  # fmt: skip
    (c,) = key
    assert items == len(work) and not counter.any()
    known = Lists(lists, lo, hi, pool)

    def put(item: Any, segment: Any, number: int, ds: Array) -> None:
        place = lists[2, _entries(segment, OF_SEGMENTS)[number]]
        place += item[ColumnItem.PLACE] + item[ColumnItem.NEXT_PLACE] * segment[Segment.HEAD]
        _pair(kept_ds, place, *ds.shape)[...] = 0.0
        _pair(kept_ds, place, *ds.shape)[: len(ds)] = ds

    def walk(segment: Any, tile: int) -> Iterator[tuple[Any, Array]]:
        for column, keep in known.tiles(segment, OF_SEGMENTS, segment[Segment.LEAD], tile, c.block_kv, c.block_q):
            yield slice(column * c.block_q, (column + 1) * c.block_q), keep

    score, sums = Score(c.score == "softcap", before, exponent), dq_sum if c.with_dq else None
    columns_of(c, q, k, v, dout, terms, sums, dk, dv, work, segments, walk, part_dk, part_dv, lengths, score, factor,
               put if c.keeps else None)  # fmt: skip


def _entries(words: Any, places: dict[str, tuple[int, int]]) -> list[int]:
    """The entries of the lists that an item or a segment walks."""
    return [at for first, count in places.values() for at in range(words[first], words[first] + words[count])]


def _pair(ds: Array, place: int, queries: int, keys: int) -> Array:
    """dS of a pair of tiles; how it lies is their own."""
    each = queries * keys // 64**2
    return ds[place * each : (place + 1) * each].reshape(queries, keys)


def kept(key: Any, ds: Array, k: Array, dq: Array, work: Array, lists: Array, part_dq: Array, lengths: Array | None,
         counter: Array, factor: float, items: int, _: int) -> None:  # fmt: skip
    (c,) = key
    assert items == len(work) and not counter.any()
    for item in work.tolist():
        at = Rows.of(item, dq.shape[1], k.shape[1])
        keys, end = _whole(k, at.batch, at.group, c.block_kv), k.shape[2] if lengths is None else lengths[at.batch]
        total = np.zeros((c.block_q, dq.shape[3]))
        for entry in _entries(item, OF_ROWS):
            first = lists[0, entry] * c.block_kv
            if first < end:
                pair = _pair(ds, item[RowItem.PLACE] + entry, c.block_q, c.block_kv).astype(np.float64)
                total += pair @ keys[first : first + c.block_kv]
        if at.slot < 0:
            _write(dq, at.batch, at.head, at.tile, c.block_q, total * factor)
        else:
            part_dq[at.slot] = 0.0
            part_dq[at.slot, :, : dq.shape[3]] = total


def rows_of(c: Any, q: Array, k: Array, v: Array, dout: Array, terms: Array, dq: Array, work: Array, walk: Any,
            part_dq: Array, lengths: Array | None, score: Score, factor: float) -> None:  # fmt: skip
    """dq of every item, or its parts."""
    for item in work.tolist():
        at = Rows.of(item, q.shape[1], k.shape[1])
        every = Queries.of(q, dout, terms, at.batch, at.head, c.block_q)
        mine = every.at(slice(at.tile * c.block_q, (at.tile + 1) * c.block_q))
        total = np.zeros((c.block_q, q.shape[3]))
        keys = [_whole(x, at.batch, at.group, c.block_kv) for x in (k, v)]
        for step in walk.of(item, *keys):
            there = step.columns < (k.shape[2] if lengths is None else lengths[at.batch])
            total += mine.pairs(score, step.k, step.v, step.keep & there).ds @ step.k
        if at.slot < 0:
            _write(dq, at.batch, at.head, at.tile, c.block_q, total * factor)
        else:
            part_dq[at.slot] = 0.0
            part_dq[at.slot, :, : q.shape[3]] = total


def query_gradient(key: Any, *a: Any) -> None:
    (q, k, v, dout, terms, dq, work, lists, lo, hi, pool, part_dq, lengths, counter, before, exponent, factor, items,
     _) = a  # fmt: skip
    (c,) = key
    assert items == len(work) and not counter.any()
    walk, score = (
        Blocks(Lists(lists, lo, hi, pool), c.block_q, c.block_kv),
        Score(c.score == "softcap", before, exponent),
    )
    rows_of(c, q, k, v, dout, terms, dq, work, walk, part_dq, lengths, score, factor)


def gather(key: Any, *a: Any) -> None:
    (c,) = key
    if c.direction == "forward":
        (q, k, v, out, lse, work, indices, bits, sinks, part_out, part_lse, lengths, counter, before, exponent, items,
         has_sinks, _) = a  # fmt: skip
        walk, score = Gathered(indices, bits), Score(c.score == "softcap", before, exponent)
        forward_of(c, q, k, v, out, lse, work, walk, sinks, part_out, part_lse, lengths, score, has_sinks)
    elif c.direction == "query":
        (q, k, v, dout, terms, dq, work, indices, bits, part_dq, lengths, counter, before, exponent, factor, items,
         _) = a  # fmt: skip
        walk, score = Gathered(indices, bits), Score(c.score == "softcap", before, exponent)
        rows_of(c, q, k, v, dout, terms, dq, work, walk, part_dq, lengths if c.lengths else None, score, factor)
    else:
        (q, k, v, dout, terms, dk, dv, work, segments, indices, bits, part_dk, part_dv, lengths, counter, before,
         exponent, factor, items, _) = a  # fmt: skip
        score, of_steps = Score(c.score == "softcap", before, exponent), Gathered(indices, bits)

        def columns(segment: Any, tile: int) -> Iterator[tuple[Any, Array]]:
            start, count = segment[Segment.BITS_START], segment[Segment.BITS_COUNT]
            for step in range(start, start + count):
                places = indices[step * GATHERED : (step + 1) * GATHERED]
                yield places, of_steps.pairs(step).T & (places >= 0)

        columns_of(c, q, k, v, dout, terms, None, dk, dv, work, segments, columns, part_dk, part_dv,
                   lengths if c.lengths else None, score, factor)  # fmt: skip
    assert items == len(work) and not counter.any()


def postprocess(key: Any, dq_sum: Array, dq: Array, factor: float) -> None:
    B, H, Q, D = dq.shape
    dq[...] = dq_sum.reshape(B, H, -1, dq_sum.shape[3] // 64)[:, :, :Q, :D] * factor


def sum_parts(key: Any, result: Array, parts: Array, merges: Array, factor: float) -> None:
    for words in merges.tolist():
        batch, head, tile, slot, count = (words[w] for w in PartMerge)
        _write(result, batch, head, tile, parts.shape[1], parts[slot : slot + count].sum(0) * factor)


KERNELS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (forward, merge, preprocess, backward, query_gradient, kept, gather, rows, postprocess, sum_parts)
}
