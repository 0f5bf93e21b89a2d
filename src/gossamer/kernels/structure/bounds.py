"""The interval of keys of each row, from what the device knows: in one launch, and one before it for ids or edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.kernels.reaches import Reaching
from gossamer.kernels.relaunch import power
from gossamer.kernels.structure.bound_kernels import (
    BoundForm,
    BoundNumbers,
    bounds_kernel,
    edges_kernel,
    runs_kernel,
)
from gossamer.kernels.structure.told import DOCUMENTS, IDS, SEQUENCES

CHUNK = 512  # ids of a program, and rows: no more, so that their ids are in two chunks
SUMS = 256  # chunks that are looked at at a time
EDGES = 32, 1024  # that are sorted at a time: the fewest, and the most


def row_bounds(
    kind: int, told: Tensor | None, told_keys: Tensor | None, used: Tensor | None, offset: Tensor | None,
    key_starts: Tensor | None, key_lengths: Tensor | None, sizes: Sequence[int], reach: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """lo and hi (Bl, 1, Q) int32, as `torch.structure.inputs` defines them. Tensors are of any integers and strides.

    Args:
        kind: what is told, of `told.py`.
        told: ids (length,) or (Bl, length), edges of documents, or edges of the rows of sequences.
        told_keys, used: edges of the keys of sequences, and perhaps how many of each are there.
        offset: the position of the first row, one number or (B,), on the device of the others.
        sizes: Q; K; how many positions have ids or edges; the position of the first row where there is no offset; what
            an offset of either sign is at most.
        reach: of a row at i the keys from clip(i, least, most) + left on: least, most, left; likewise of their end; no
            key from `first` on; and the size of the block that the row's keys are in, or 0.
    """
    Q, K, length, position, most = sizes
    *_, block = reach
    vectors = offset, key_starts, key_lengths
    like, *_ = (x for x in (told, *vectors) if x is not None)
    new: dict[str, Any] = {"dtype": torch.int32, "device": like.device}
    leads = leads_of(kind, told, *vectors)
    lo, hi = (torch.empty((leads, 1, Q), **new) for _ in range(2))
    edges = runs = changes = lo  # a pointer that is not read still needs an array
    lines, n, chunks = 1, 0, 0
    if told is not None and kind == IDS:
        ids, chunks = told.reshape(-1, length), -(-length // CHUNK)
        lines, _ = ids.shape
        runs, changes = torch.empty((2, lines, length), **new), torch.empty((2, lines, chunks), **new)
        launch(
            runs_kernel, (lines * chunks,), ids, runs, changes, lines, length, chunks, *ids.stride(), CHUNK=CHUNK,
            num_warps=4,
        )  # fmt: skip
    elif told is not None:
        (n,), more = told.shape, told if told_keys is None else told_keys
        several = 1 if told_keys is None else 2
        edges = torch.empty((several, n), **new)
        launch(
            edges_kernel, (several,), told, more, edges, n, told.stride(0), more.stride(0),
            Q if kind == SEQUENCES else length, K, EDGES=power(n, *EDGES), num_warps=4,
        )  # fmt: skip
    T, read = -(-Q // CHUNK), (used, *vectors)
    steps = [0 if x is None or x.numel() == 1 else x.stride(0) for x in read]
    has_used, has_offsets, has_starts, has_lengths = (x is not None for x in read)
    form = BoundForm(
        kind == IDS, kind == DOCUMENTS, kind == SEQUENCES, has_used, has_offsets, has_starts, has_lengths, block > 0,
        CHUNK, SUMS,
    )  # fmt: skip
    launch(
        bounds_kernel, (leads * T,), lo, hi, edges, runs, changes, *(lo if x is None else x for x in read),
        BoundNumbers(Q, K, T, lines, length, n, n.bit_length(), chunks, position, most, int(lines > 1), *steps),
        Reaching(*reach), FORM=form, num_warps=4,
    )  # fmt: skip
    return lo, hi


def leads_of(kind: int, told: Tensor | None, *vectors: Tensor | None) -> int:
    """Batch elements that have bounds of their own, or 1."""
    ids = told.shape[0] if told is not None and kind == IDS and told.ndim == 2 else 1
    return max([ids, *(x.numel() for x in vectors if x is not None)])
