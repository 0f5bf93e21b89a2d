"""Plain kernels that stand for those of a Hopper backward on a CPU, and read the documented arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

SHARED = ("work", "segments", "lists", "lo", "hi", "pool", "part_dk", "part_dv", "lengths", "tile_counter")
NUMBERS = ("before", "exponent", "factor", "items", "blocks")


def tile_mask(a: dict[str, Any], kind: int, at: int, lead: int, tile: int, rows: int, columns: int) -> Tensor:
    """Which pairs of a listed tile are kept: rows x columns, positions of `tile` and of the list's tile column."""
    if kind == 0:
        return torch.ones(rows, columns, dtype=torch.bool)
    if kind == 2:
        words = a["pool"][: len(a["pool"]) // rows * rows].view(-1, rows, columns // 32)[a["lists"][1, at]]
        return (words[..., None] >> torch.arange(32) & 1).bool().flatten(1)
    positions = (tile * rows + torch.arange(rows)).clamp(max=a["lo"].shape[1] - 1)
    column = a["lists"][0, at] * columns + torch.arange(columns)
    return (a["lo"][lead, positions][:, None] <= column) & (column < a["hi"][lead, positions][:, None])


def attended(a: dict[str, Any], batch: int, keys: slice) -> Tensor:
    """Which of the keys come before the end of those of a batch element."""
    assert (a["lengths"] is not None) == a["has_lengths"]
    positions = torch.arange(keys.start, keys.stop)
    return positions < (a["lengths"][batch] if a["has_lengths"] else keys.stop)


def padded(x: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[-2] % rows))


def cleared(config: Any, x: tuple[Tensor, ...], row: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    """q, k, v and dout of a tile, and zeros in rows that keep nothing and in keys that none of them attends."""
    if not config.clears:
        return x
    rows, keys = (row[0] == torch.inf)[:, None], ~keep.any(0)[:, None]
    return tuple(y.masked_fill(of, 0.0) for y, of in zip(x, (rows, keys, keys, rows), strict=True))


def gradients(a: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, row: Tensor, keep: Tensor) -> Any:
    """(P, dS) of a tile of queries and keys; `row` (2, queries)."""
    s = q @ k.T * a["before"]
    slope = torch.ones_like(s)
    if a["score"] == "softcap":
        s = torch.tanh(s)
        slope = 1 - s * s
    p = torch.where(keep, torch.exp2(s * a["exponent"] - row[0][:, None]), 0.0)
    return p, p * slope * (dout @ v.T - row[1][:, None])


def columns(config: Any, block_kv: int) -> Callable[..., None]:
    """The kernel of dK and dV, and of dQ's sums where the configuration has them, or of dS."""
    names = ("q", "k", "v", "dout", "terms", "dq_sum", "ds", "dk", "dv", *SHARED, *NUMBERS)

    def run(*given: Any) -> None:
        a = dict(zip(names, given, strict=True)) | {"score": config.score, "has_lengths": config.lengths}
        a |= {name: torch.from_dlpack(a[name]) for name in SHARED[:6]}
        q, dout = padded(a["q"], config.block_q), padded(a["dout"], config.block_q)
        k, v = padded(a["k"], block_kv), padded(a["v"], block_kv)
        rows = torch.nn.functional.pad(a["terms"], (0, -a["terms"].shape[-1] % config.block_q), value=torch.inf)
        rows[1] = rows[1].nan_to_num(posinf=0.0)
        ratio = q.shape[1] // k.shape[1]
        assert a["work"].shape[0] == a["items"]
        for item in a["work"].tolist():
            b, g, tile, slot = item[:4]
            keys = slice(tile * block_kv, (tile + 1) * block_kv)
            dk, dv = torch.zeros(block_kv, config.D), torch.zeros(block_kv, config.E)
            for head, lead, *ranges in a["segments"][item[4] : item[4] + item[5]].tolist():
                h = g * ratio + head
                for kind in range(3):
                    for at in range(ranges[2 * kind], ranges[2 * kind] + ranges[2 * kind + 1]):
                        first = int(a["lists"][0, at]) * config.block_q
                        queries = slice(first, first + config.block_q)
                        keep = tile_mask(a, kind, at, lead, tile, block_kv, config.block_q).T & attended(a, b, keys)
                        x = q[b, h, queries], k[b, g, keys], v[b, g, keys], dout[b, h, queries]
                        x = cleared(config, x, rows[:, b, h, queries], keep)
                        p, ds = gradients(a, *x, rows[:, b, h, queries], keep)
                        dv[:, : v.shape[-1]] += p.T @ x[3]
                        dk[:, : k.shape[-1]] += ds.T @ x[0]
                        if getattr(config, "with_dq", False):
                            add(a["dq_sum"][b, h], first, ds @ x[1], config.D)
                        if config.keeps:
                            pairs(a["ds"], item[8] + item[9] * head + int(a["lists"][2, at]), *ds.shape)[:] = ds
            if slot < 0:
                some = a["dk"][b, g, keys], a["dv"][b, g, keys]
                some[0].copy_(dk[: len(some[0]), : k.shape[-1]] * a["factor"])
                some[1].copy_(dv[: len(some[1]), : v.shape[-1]])
            else:
                a["part_dk"][slot] = dk
                a["part_dv"][slot] = dv

    return run


def pairs(ds: Tensor, place: int, queries: int, keys: int) -> Tensor:
    """dS of a pair of tiles, plain here: what matters is where it lies."""
    each = queries * keys // 64**2
    return ds[place * each : (place + 1) * each].view(queries, keys)


def kept(config: Any) -> Callable[..., None]:
    """The kernel of dQ from dS that is kept."""
    names = ("ds", "k", "dq", "work", "lists", "part_dq", "lengths", "tile_counter", "factor", "items", "blocks")

    def run(*given: Any) -> None:
        a = dict(zip(names, given, strict=True)) | {"has_lengths": config.lengths}
        a |= {name: torch.from_dlpack(a[name]) for name in ("work", "lists")}
        block_q, block_kv, k = config.block_q, config.block_kv, padded(a["k"], config.block_kv)
        ratio = a["dq"].shape[1] // k.shape[1]
        assert a["work"].shape[0] == a["items"]
        for item in a["work"].tolist():
            b, h, tile, slot = item[:4]
            dq = torch.zeros(block_q, config.D)
            for at in (at for n in (4, 6, 8) for at in range(item[n], item[n] + item[n + 1])):
                first = int(a["lists"][0, at]) * block_kv
                keys = slice(first, first + block_kv)
                there = attended(a, b, keys)
                if there.any():  # else nothing is kept there
                    ds = pairs(a["ds"], item[14] + at, block_q, block_kv).float()
                    dq[:, : k.shape[-1]] += ds @ k[b, h // ratio, keys].masked_fill(~there[:, None], 0.0)
            if slot < 0:
                some = a["dq"][b, h, tile * block_q : (tile + 1) * block_q]
                some.copy_(dq[: len(some), : k.shape[-1]] * a["factor"])
            else:
                a["part_dq"][slot] = dq

    return run


def add(sums: Tensor, first: int, dq: Tensor, D: int) -> None:
    """Add rows of dQ to tiles of 64, plain here: what matters is which tile they go to."""
    for i in range(0, len(dq), 64):
        if (first + i) // 64 < len(sums):
            sums[(first + i) // 64].view(64, D)[:, : dq.shape[1]] += dq[i : i + 64]


def by_rows(config: Any) -> Callable[..., None]:
    """The kernel of dQ by rows."""
    arrays = ("work", "lists", "lo", "hi", "pool")
    names = ("q", "k", "v", "dout", "terms", "dq", *arrays, "part_dq", "lengths", "tile_counter", *NUMBERS)

    def run(*given: Any) -> None:
        a = dict(zip(names, given, strict=True)) | {"score": config.score, "has_lengths": config.lengths}
        a |= {name: torch.from_dlpack(a[name]) for name in arrays}
        block_q, block_kv = config.block_q, config.block_kv
        k, v = padded(a["k"], block_kv), padded(a["v"], block_kv)
        q, dout = padded(a["q"], block_q), padded(a["dout"], block_q)
        rows = torch.nn.functional.pad(a["terms"], (0, -a["terms"].shape[-1] % block_q), value=torch.inf)
        rows[1] = rows[1].nan_to_num(posinf=0.0)
        ratio = q.shape[1] // k.shape[1]
        for item in a["work"].tolist():
            b, h, tile, slot = item[:4]
            queries = slice(tile * block_q, (tile + 1) * block_q)
            dq = torch.zeros(block_q, config.D)
            for kind in range(3):
                for at in range(item[4 + 2 * kind], item[4 + 2 * kind] + item[5 + 2 * kind]):
                    first = int(a["lists"][0, at]) * block_kv
                    keys = slice(first, first + block_kv)
                    keep = tile_mask(a, kind, at, item[10], tile, block_q, block_kv) & attended(a, b, keys)
                    x = q[b, h, queries], k[b, h // ratio, keys], v[b, h // ratio, keys], dout[b, h, queries]
                    x = cleared(config, x, rows[:, b, h, queries], keep)
                    dq[:, : q.shape[-1]] += gradients(a, *x, rows[:, b, h, queries], keep)[1] @ x[1]
            if slot < 0:
                some = a["dq"][b, h, queries]
                some.copy_(dq[: len(some), : q.shape[-1]] * a["factor"])
            else:
                a["part_dq"][slot] = dq

    return run


def preprocess(dtype: str, E: int, zeroed: int) -> Callable[..., None]:
    def run(
        out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor, rows: Tensor, sums: Tensor, sinks: Tensor, has_dlse: int,
        has_sinks: int,
    ) -> None:  # fmt: skip
        Q, empty = out.shape[2], lse == -torch.inf
        under_sink = torch.zeros_like(empty)
        if has_sinks:
            near = (lse - sinks[:, None]).abs() <= 2.0**-20 * sinks[:, None].abs().clamp_min(1.0)
            under_sink = near & (out == 0).all(-1)
        delta = torch.where(under_sink, 0.0, (out.float() * dout.float()).sum(-1)) - (dlse if has_dlse else 0.0)
        rows[0], rows[1] = torch.inf, 0.0
        rows[0, :, :, :Q] = torch.where(empty | under_sink, torch.inf, lse * 1.4426950408889634)
        rows[1, :, :, :Q] = torch.where(empty, 0.0, delta)
        if zeroed:
            assert sums.shape == (*lse.shape[:2], rows.shape[-1] // 64, 64 * zeroed)
            sums.zero_()

    return run


def postprocess(dtype: str, D: int) -> Callable[..., None]:
    def run(sums: Tensor, dq: Tensor, factor: float) -> None:
        plain = sums.view(*sums.shape[:2], -1, D)
        dq.copy_(plain[:, :, : dq.shape[2], : dq.shape[3]] * factor)

    return run


def sum_parts(dtype: str, size: int, block: int) -> Callable[..., None]:
    def run(result: Tensor, parts: Tensor, merges: Any, factor: float) -> None:
        assert parts.shape[1:] == (block, size)
        for b, h, tile, first, count, *_ in torch.from_dlpack(merges).tolist():
            some = result[b, h, tile * block : (tile + 1) * block]
            total = parts[first : first + count].sum(0) * factor
            some.copy_(total[: len(some), : some.shape[1]])

    return run


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compute by these kernels; returns the module of the launch."""
    from gossamer.kernels.hopper import compiled
    from gossamer.kernels.hopper.launch import backward as module

    kernels = {
        "preprocess": preprocess,
        "postprocess": postprocess,
        "sum_parts": sum_parts,
        "backward": lambda config: columns(config, config.block_kv),
        "wide": lambda config: columns(config, config.tile_kv),
        "query_gradient": by_rows,
        "kept": kept,
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(compiled, name, kernel)
    return module
