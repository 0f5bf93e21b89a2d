"""The launches of a backward."""

from __future__ import annotations

from typing import NamedTuple

import triton

from gossamer.entmax.launch.calls import KernelCall, ListNames, hopper_here, readable, row_options, value_of
from gossamer.entmax.launch.forward import made
from gossamer.entmax.launch.kernels import step
from gossamer.entmax.launch.overflow_rows import LISTING_STEP, OverflowRows, long_rows_backward, rows_of
from gossamer.entmax.triton.columns import HALF, LONG, columns_kernel
from gossamer.entmax.triton.gather import gather_dq_kernel
from gossamer.entmax.triton.transpose import SEGMENTS, count_kernel, order_kernel, order_keys_kernel, place_kernel
from gossamer.kernels.launch import Prepared
from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton.gather.config import piece

CHUNK = 256  # keys that are put in order together
MOST_PROGRAMS = 4 * 1056  # of parts of keys


def prepare(c: KernelCall, with_alpha: bool) -> Prepared:
    """A backward: dq, dk and dv, and the gradient of alpha of each row (B, H, Q) `with_alpha`.

    From the lists, and for rows without one from their normalisers. The caller also gives lam (B H Q,), dout, and
    the lists, which are made again where they are not given.
    """
    b = c.b
    given = ListNames("list_keys", "list_weights", "list_counts")
    lists = given if given.keys in b else made(c, "lists", True, False)
    dout = readable(b, "dout")
    for name, x in (("dq", c.q), ("dk", c.k), ("dv", c.v)):
        b.array(name, c.dtype, b[x].shape)
    b.array("alpha_terms", "float32", (c.B, c.H, c.Q) if with_alpha else (1, 1, 1))
    # p and dS of each pair lie side by side, where the sums of a key read both.
    b.array("gradients", "float32", (c.rows, c.listed, 2))
    bits = 16 if c.half else 32
    sizes = {"D": c.D, "E": c.E, "SD": piece(c.D, bits), "SE": piece(c.E, bits)}
    options, heads = row_options(c, "dq", c.D, c.E), c.B * c.H
    # What starts at 0: the tiles that kernels take, and the sums of chunks of keys.
    chunks = -(-c.K // CHUNK)
    rows = rows_of(c, 4 + 2 * c.B * c.G * chunks)
    of_k, of_v, of_dout = c.strides(c.k, c.v, dout)
    step(
        b, gather_dq_kernel, (heads + -(-c.rows // options["RP"]),),
        (
            c.k, c.v, dout, "steepness", ("dq", "gradients", "alpha_terms"), lists, rows,
            (*of_k[:2], *of_v[:2], of_dout), c.H, (b[rows.zeros].shape[0], heads, c.rows, c.Q, c.scale),
        ),
        {"L": c.listed, **sizes, "STREAMED": (of_k.n, of_v.n), "VECTOR": min(32, padded(c.listed)), "GROUP": c.group,
         "A": value_of(c.same), "WITH_ALPHA": with_alpha, "STEP": LISTING_STEP} | options,
    )  # fmt: skip
    columns(c, key_lists(c, lists, rows, chunks), rows, dout, sizes)
    if c.top_k is None:
        long_rows_backward(c, rows, dout, with_alpha)
    return b.done("dq", "dk", "dv", *("alpha_terms",) * with_alpha)


class KeyLists(NamedTuple):
    """The names of the pairs of each key in a fixed order, and of what `order_keys_kernel` writes of keys (B G K,)."""

    names: str  # (pairs,) int32
    begins: str
    numbers: str
    part_ends: str
    arrived: str
    order: str


def key_lists(c: KernelCall, lists: ListNames, rows: OverflowRows, chunks: int) -> KeyLists:
    """The lists of keys from those of rows."""
    b, L, n_keys = c.b, c.listed, c.B * c.G * c.K
    names = b.array("names", "int32", (c.rows * L,))
    # One allocation, of arrays at multiples of 16 bytes.
    apart = -(-n_keys // 4) * 4
    b.array("of_keys", "int32", (5 * apart,))
    of_keys = [b.view(name, "of_keys", (n_keys,), (1,), i * apart) for i, name in enumerate(KeyLists._fields[1:])]
    begins, *_ = of_keys
    by_hopper = hopper_here(c.device)
    cells = b.array("cells", "int32", (c.B * c.G * SEGMENTS * c.K,), None if by_hopper else 0)
    sums = b.view("sums", rows.zeros, (2 * c.B * c.G * chunks,), (1,), 4)
    vector, by_rows = min(32, padded(L)), (lists.keys, lists.counts)
    grid = -(-c.rows // 16), -(-L // vector)
    sizes = c.Q, c.K, c.rows
    options = {"L": L, "RP": 16, "VECTOR": vector, "GROUP": c.group, "SEGMENTS": SEGMENTS, "num_warps": 4}
    form = min(max(1024, triton.next_power_of_2(c.K)), 16384), -(-L // 32)
    if by_hopper:  # of the names of keys it reads and writes none
        b.step(c.hopper("column_lists", *form, False), *by_rows, cells, begins, names, c.K, c.group * c.Q)
    else:
        step(b, count_kernel, grid, (*by_rows, cells, *sizes), options)
    step(
        b, order_keys_kernel, (chunks, c.B * c.G),
        (cells, rows.pair_counts, sums, *of_keys, c.K, c.group * c.Q * L),
        {"GROUP": c.group, "SEGMENTS": SEGMENTS, "LONG": LONG, "HALF": HALF, "STEP": CHUNK, "num_warps": 4},
    )  # fmt: skip
    if by_hopper:
        b.step(c.hopper("column_lists", *form, True), *by_rows, cells, begins, names, c.K, c.group * c.Q)
        return KeyLists(names, *of_keys)
    in_order = b.array("names_in_order", "int32", (c.rows * L,))
    step(b, place_kernel, grid, (*by_rows, begins, cells, names, *sizes), options)
    step(b, order_kernel, grid, (*by_rows, begins, cells, names, in_order, *sizes), options)
    return KeyLists(in_order, *of_keys)


def columns(c: KernelCall, keys: KeyLists, rows: OverflowRows, dout: str, sizes: dict[str, int]) -> None:
    """dK and dV of the pairs in lists."""
    b, n_keys, heads = c.b, c.B * c.G * c.K, c.B * c.G
    # Of a key that has as many pairs as its head has rows, in parts of LONG or more.
    places = min(-(-2 * HALF // heads), 2 * c.group * c.Q * c.listed // LONG) if c.group * c.Q > LONG else 0
    programs = min(places, max(1, MOST_PROGRAMS // heads))
    for name, size in (("part_dk", c.D), ("part_dv", c.E)):
        b.array(name, "float32", (heads * max(places, 1), size))
    gather = row_options(c, "dkdv", c.D, c.E)
    step(
        b, columns_kernel, (heads * programs + -(-n_keys // gather["RP"]),),
        (
            c.q, dout, keys, rows.pair_counts, "gradients", ("dk", "dv", "part_dk", "part_dv"), c.strides(c.q, dout),
            c.H, (c.Q, c.K, n_keys, c.K.bit_length(), programs, places, c.scale),
        ),
        {"L": c.listed, **sizes, "GROUP": c.group, "LONG": LONG, "HALF": HALF} | gather,
    )  # fmt: skip
