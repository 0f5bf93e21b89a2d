"""SparseK attention by Triton kernels: lists of live keys, and both directions over them. Nothing is read back."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.sparse_k.launch.problem import Memory, Operands, Options, SparseKGradients
from gossamer.sparse_k.triton import forward as forward_kernel
from gossamer.sparse_k.triton import key_gradients as keys_kernel
from gossamer.sparse_k.triton import lists as lists_kernel
from gossamer.sparse_k.triton import query_gradient as query_kernel
from gossamer.sparse_k.triton.steps import Form

MOST_HEAD = 256
LITTLE = 160 * 2**10  # bytes of shared memory; GPUs of compute capability 8.6, 8.9 and 12.0 have less
LOG2E = math.log2(math.e)
RANGE = 8192  # queries of the first lists
CHUNK = 1024  # queries of the lists that are made from these
PLACES = 1024  # keys of a program of the kernels that list those that ever live
STREAMED = 2048  # keys of a list that are read at once


class LiveLists(NamedTuple):
    """The live keys of ranges of queries, as `live_lists` writes and reads them."""

    keys: Tensor  # (units, ranges, capacity) int32
    counts: (
        Tensor  # (units, ranges, n) int32, the last number the length of a list; n is 2 but for the list of all queries
    )
    size: int  # the queries of a range


class Tiles(NamedTuple):
    """The tile of a kernel, and how it is launched."""

    m: int
    n: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread at most

    @property
    def options(self) -> dict[str, int | None]:
        """Those of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def reasons(x: Operands, o: Options) -> list[str]:
    """The reasons for which these kernels do not compute a call."""
    refusals = []
    if x.q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        refusals.append(f"needs a GPU, not {x.q.device.type}")
    if x.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        refusals.append(f"has no kernels for {x.q.dtype}")
    if x.u.dtype != torch.float32:
        refusals.append(f"has no kernels for scores of {x.u.dtype}")
    if max(x.q.shape[3], x.v.shape[3]) > MOST_HEAD:
        refusals.append(f"head sizes are up to {MOST_HEAD}")
    if not o.causal:
        refusals.append("is causal")
    if x.q.shape[2] != x.u.shape[2]:
        refusals.append("has a query of every key: no prefix")
    if x.hidden is not None:
        refusals.append("takes no key_lengths")
    return refusals


def memory(x: Operands, o: Options) -> Memory:
    """The bytes of lists in int32, and of sums over chunks in float32."""
    (B, _, N, D), E, U = x.q.shape, x.v.shape[3], x.u.shape[1]

    def entries(size: int) -> int:
        return B * U * triton.cdiv(N, size) * min(N, o.live + size)

    levels = [size for size in (RANGE, CHUNK) if 2 * size <= N]
    list_bytes = 4 * (B * U * N + sum(map(entries, [*levels, tiles("forward", x).m])))
    chunk = chunk_size(o, N, tiles("query", x).m)
    return Memory(list_bytes, 4 * (D + E + 2) * entries(chunk))


def tiles(kernel: str, x: Operands) -> Tiles:
    """The tiles of a kernel for the sizes of a call: "forward", "query" (dQ), "entries" and "windows" (dK and dV)."""
    size = max(padded(x.q.shape[3]), padded(x.v.shape[3]))
    little = shared_memory(x.q.device) < LITTLE
    if x.q.dtype == torch.float32:
        return Tiles(64, 32, 4, 1) if size <= 64 else Tiles(32, 32, 4, 1)
    if size > 128 and little:
        return Tiles(32, 32, 4, 1)
    if size > 128:
        return Tiles(64, 64, 8, 2) if kernel == "forward" else Tiles(64, 32, 8, 1)
    if kernel == "forward" and little:
        return Tiles(64, 64, 4, 2)
    return {"forward": Tiles(128, 32, 8, 2, 128), "entries": Tiles(32, 64, 4, 2)}.get(kernel, Tiles(64, 64, 4, 2))


def forward(x: Operands, o: Options) -> tuple[Tensor, Tensor]:
    """out (B, H, N, E), in q's type, and lse (B, H, N)."""
    x = _rows_contiguous(x)
    (B, H, N, _), (G, E), U = x.q.shape, (x.v.shape[1], x.v.shape[3]), x.u.shape[1]
    t = tiles("forward", x)
    tile_lists = lists(x.last, o, t.m, live_keys(x.last, o))
    out, lse = x.q.new_empty(B, H, N, E), x.u.new_empty(B, H, N)
    grid = (triton.cdiv(N, t.m), B * H)
    launch(forward_kernel.gated_forward, grid,
        x.q, x.k, x.v, x.u, x.tau, x.last, tile_lists.keys, tile_lists.counts, out, lse,
        *_strides(x.q, x.k, x.v), H, G, U, N, o.window, tile_lists.keys.shape[1], tile_lists.keys.shape[2],
        o.scale * LOG2E, FORM=_form(x, o, t, FOLD=o.scale > 0 and o.gate in ("v", None)), **t.options,
    )  # fmt: skip
    return out, lse


def backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, x: Operands, o: Options) -> SparseKGradients:
    """The gradients; those of u and tau are zero where no gate has one."""
    x = _rows_contiguous(x)
    dout = _last_contiguous(dout)
    dlse = None if dlse is None else dlse.contiguous()
    out, lse = out.contiguous(), lse.contiguous()
    (B, H, N, _), (G, E), U = x.q.shape, (x.v.shape[1], x.v.shape[3]), x.u.shape[1]
    delta = x.u.new_empty(B, H, N)
    launch(query_kernel.row_sums, (triton.cdiv(N, 64), B * H),
        dout, out, dlse, delta, *dout.stride()[:3], H, N, E=E, HAS_DLSE=dlse is not None, SIZE_E=padded(E), BLOCK=64,
    )  # fmt: skip
    t = tiles("query", x)
    chunk = chunk_size(o, N, t.m)
    every = live_keys(x.last_gated, o)
    chunk_lists = lists(x.last_gated, o, chunk, every)
    tile_lists = lists(x.last_gated, o, t.m, chunk_lists)
    strides = (*_strides(x.q, x.k, x.v), *dout.stride()[:3])
    dq, dtau = torch.empty(x.q.shape, dtype=x.q.dtype, device=x.q.device), x.u.new_empty(B, H, N)
    launch(query_kernel.gated_query_gradient, (triton.cdiv(N, t.m), B * H),
        x.q, x.k, x.v, x.u, x.tau, x.last, x.last_gated, tile_lists.keys, tile_lists.counts, dout, lse, delta, dq, dtau,
        *strides, H, G, U, N, o.window, tile_lists.keys.shape[1], tile_lists.keys.shape[2], o.scale,
        FORM=_form(x, o, t, STRAIGHT=o.straight), **t.options,
    )  # fmt: skip
    dtau = dtau.view(B, U, -1, N).sum(2)
    dk, dv, du = _key_gradients(x, o, every, chunk_lists, dout, lse, delta, strides)
    return SparseKGradients(dq, dk, dv, du, dtau)


def _key_gradients(
    x: Operands, o: Options, every: LiveLists, chunk_lists: LiveLists, dout: Tensor, lse: Tensor, delta: Tensor,
    strides: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (B, H, N, D), (G, E), U = x.q.shape, (x.v.shape[1], x.v.shape[3]), x.u.shape[1]
    of_entries, of_windows = tiles("entries", x), tiles("windows", x)
    units, chunks, capacity = chunk_lists.keys.shape
    over = not o.certain
    CHUNKS = triton.next_power_of_2(chunks) if over else 1
    part_dk, part_dv, part_du = (
        x.u.new_empty(units, chunks, capacity, *size) for size in ((D,), (E,), ())
    )  # fmt: skip
    sizes = H, G, U, N, o.window, chunk_lists.size, chunks, capacity, o.scale
    launch(keys_kernel.entry_gradients, (triton.cdiv(capacity, of_entries.n), chunks, units),
        x.q, x.k, x.v, x.u, x.tau, x.last, x.last_gated, chunk_lists.keys, chunk_lists.counts, dout, lse, delta,
        part_dk, part_dv, part_du, *strides, *sizes,
        FORM=_form(x, o, of_entries, STRAIGHT=o.straight, OVER=over, CHUNKS=CHUNKS), **of_entries.options,
    )  # fmt: skip
    after = torch.empty_like(chunk_lists.keys)
    home = torch.empty_like(x.last_gated)
    launch(keys_kernel.link_entries, (triton.cdiv(capacity, 256), chunks, units),
        x.last_gated, chunk_lists.keys, chunk_lists.counts, after, home, N, o.window, chunk_lists.size, chunks,
        capacity, OVER=over, CHUNKS=CHUNKS, STEPS=capacity.bit_length(), BLOCK=256,
    )  # fmt: skip
    launch(keys_kernel.add_entries, (triton.cdiv(N, 16), units),
        every.keys, every.counts, every.counts.shape[2], chunk_lists.counts, after, home, part_dk, part_dv, part_du,
        N, chunks, capacity, D=D, E=E, OVER=over, CHUNKS=CHUNKS, SIZE_D=padded(D), SIZE_E=padded(E), BLOCK=16,
    )  # fmt: skip
    dk, dv, du = (x.k.new_empty(B, G, N, D), x.v.new_empty(B, G, N, E), torch.empty_like(x.u))
    launch(keys_kernel.gated_key_gradients, (triton.cdiv(N, of_windows.n), B * G),
        x.q, x.k, x.v, x.u, x.tau, x.last, x.last_gated, chunk_lists.counts, home, dout, lse, delta, part_dk, part_dv,
        part_du, dk, dv, du, *strides, *sizes,
        FORM=_form(x, o, of_windows, STRAIGHT=o.straight, OVER=over, CHUNKS=CHUNKS), **of_windows.options,
    )  # fmt: skip
    return dk, dv, du


def chunk_size(o: Options, N: int, tile: int) -> int:
    """Queries of the lists over which dK and dV are summed: about as many as keys live, so that few leave."""
    return max(tile, 256, min(triton.next_power_of_2(o.live), RANGE))


def live_keys(last: Tensor, o: Options) -> LiveLists:
    """The list of all queries: the keys that are kept past their window at any step, ascending."""
    B, U, N = last.shape
    blocks = triton.cdiv(N, PLACES)
    counts = last.new_empty(B * U, blocks)
    keys = last.new_empty(B * U, 1, N)
    grid = (blocks, B * U)
    launch(lists_kernel.count_live, grid, last, counts, N, o.window, blocks, BLOCK=PLACES)
    ends = counts.cumsum(1, dtype=torch.int32)
    launch(lists_kernel.write_live, grid, last, ends, keys, N, o.window, blocks, BLOCK=PLACES)
    return LiveLists(keys, ends[:, None], N)


def lists(last: Tensor, o: Options, size: int, parent: LiveLists, ordered: bool = True) -> LiveLists:
    """The lists of ranges of `size` queries, by way of ranges between these and those of `parent`."""
    B, U, N = last.shape
    for between in (RANGE, CHUNK):
        if 2 * size <= between and 2 * between <= parent.size:
            parent = lists(last, o, between, parent, ordered=False)
    ranges, capacity = triton.cdiv(N, size), min(N, o.live + size)
    keys = last.new_empty(B * U, ranges, capacity)
    counts = last.new_empty(B * U, ranges, 2)
    block = min(STREAMED, triton.next_power_of_2(parent.keys.shape[2]))
    launch(lists_kernel.live_lists, (ranges, B * U),
        last, parent.keys, parent.counts, keys, counts, N, o.window, size, ranges, parent.size, parent.keys.shape[1],
        parent.keys.shape[2], parent.counts.shape[2], capacity, ORDERED=ordered, BLOCK=block,
        num_warps=8 if block > 1024 else 4,
    )  # fmt: skip
    return LiveLists(keys, counts, size)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return LITTLE
    facts: Any = torch.cuda.get_device_properties(device)  # of which torch's types do not know this one
    return int(facts.shared_memory_per_block_optin)


def padded(size: int) -> int:
    """The power of two, at least 16, that holds a head size."""
    return max(16, triton.next_power_of_2(size))


def _form(
    x: Operands, o: Options, t: Tiles, *, FOLD: bool = False, STRAIGHT: bool = False, OVER: bool = False,
    CHUNKS: int = 1,
) -> Form:  # fmt: skip
    """What a kernel is compiled for."""
    D, E, precision = x.q.shape[3], x.v.shape[3], "ieee" if x.q.dtype == torch.float32 else "tf32"
    return Form(D, E, padded(D), padded(E), o.gate or "none", precision, t.m, t.n, FOLD, STRAIGHT, OVER, CHUNKS)


def _rows_contiguous(x: Operands) -> Operands:
    q, k, v = (_last_contiguous(t) for t in (x.q, x.k, x.v))
    return Operands(q, k, v, *(t.contiguous() for t in (x.u, x.tau, x.last, x.last_gated)))


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])
