"""Keys, and blocks of keys, that are chosen on the device: lists that are data."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from gossamer.plan.arguments import BLOCKS
from gossamer.torch.arguments import INTEGERS, describe, whole
from gossamer.torch.structure.base import OF_INTEGERS, Lists, Sizes, Structure


class Chosen(Structure):
    """What both kinds of lists share. An entry stands for `block` keys, and a list is that of so many queries."""

    indices: Tensor
    counts: Tensor | None

    def _take(self, indices: Any, counts: Any, check: Any) -> None:
        form, wide = self._form, (torch.int32, torch.int64)
        if not isinstance(indices, Tensor) or indices.is_nested or indices.dtype not in wide or indices.ndim < 2:
            raise ValueError(f"indices must be a tensor {form} of int32 or int64; got {describe(indices)}")
        if indices.ndim > 4:
            raise ValueError(f"indices must be a tensor {form}, of 4 dimensions; got {describe(indices)}")
        if counts is not None:
            right = isinstance(counts, Tensor) and not counts.is_nested and counts.dtype in INTEGERS
            if not right or counts.shape != indices.shape[:-1]:
                raise ValueError(
                    f"counts must be a tensor of {OF_INTEGERS}, of shape {tuple(indices.shape[:-1])}, as indices have "
                    f"lists; got {describe(counts)}"
                )
        if not isinstance(check, bool):
            raise ValueError(f"check must be True or False; got {describe(check)}")
        self.indices, self.counts, self.checked = indices, counts, check

    @property
    @abstractmethod
    def block(self) -> int:
        """Keys of an entry."""

    @property
    @abstractmethod
    def _form(self) -> str:
        """The dimensions of indices."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.indices,) if self.counts is None else (self.indices, self.counts)

    @property
    def list_heads(self) -> int:
        return self.indices.shape[-3] if self.indices.ndim > 2 else 1

    def check(self, sizes: Sizes, placed: bool = False) -> None:
        B, H, rows, _ = self._four().shape
        wanted = -(-sizes.Q // self.block)
        if B not in (1, sizes.B) or H not in (1, sizes.G, sizes.H) or rows != wanted:
            of_rows = "Q" if self.block == 1 else f"rows = ceil(Q / {self.block})"
            raise ValueError(
                f"indices of {type(self).__name__} must have shape {self._form}, B=1 or {sizes.B}, heads 1, "
                f"G={sizes.G} or H={sizes.H}, {of_rows} = {wanted}; got {describe(self.indices)}"
            )

    def check_numbers(self, sizes: Sizes) -> None:
        if not self.checked or self.indices.is_meta:
            return
        name, entries = type(self).__name__, -(-sizes.K // self.block)
        if torch.compiler.is_compiling():
            raise ValueError(f"check of {name} must be False in a compiled function: it reads the indices")
        wrong = (self.indices < -1) | (self.indices >= entries)
        if self.counts is not None:
            wrong &= torch.arange(wrong.shape[-1], device=wrong.device) < self.counts[..., None]
        if wrong.any():
            found = next(iter(self.indices[wrong].tolist()))
            raise ValueError(f"indices of {name} must be in [0, {entries}), or -1 where unused; got {found}")

    def _four(self) -> Tensor:
        shape = self.indices.shape
        return self.indices.reshape((1,) * (4 - len(shape)) + tuple(shape))

    def lists(self, sizes: Sizes) -> Lists:
        indices = self._four()
        return Lists(indices, None if self.counts is None else self.counts.reshape(indices.shape[:3]))


class BlockIndices(Chosen):
    """Key blocks that are chosen on the device: for each query block and head a list of them, in any order.

    Query block t holds the rows [t * block_size, (t + 1) * block_size), key block c the keys likewise: rows count from
    0, whatever `q_offset` is. Entries of -1 are unused, a block that is listed twice counts once, and one that does not
    exist is left out. It joins what `DocumentIds` joins by `&`, and `DocumentIds`.

    Args:
        indices: (B, H, rows, n) int32 or int64 on q's device, rows = ceil(Q / block_size); 1 in the place of B or H is
            shared, and G key heads are those of their query heads. Leading dimensions that are left out are shared:
            (H, rows, n) by batch elements, (rows, n) by all.
        block_size: 64 or 128.
        counts: (B, H, rows) integers, with the leading dimensions of `indices`: only so many entries of a list count.
        check: raise ValueError in `attention` where an entry is no block of the keys and not -1; this reads the
            indices, which waits for the device, and cannot be compiled. On `meta` there is nothing to read.

    Raises:
        ValueError: an argument is none of these; `attention` raises where shapes do not fit q and k.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 256, 8) for _ in range(3))
        >>> chosen = torch.tensor([[0, -1], [0, 1], [2, 0], [3, 3]])[None, None]  # for all heads
        >>> out = gs.attention(q, k, v, gs.BlockIndices(chosen) & gs.Causal())
        >>> blocks = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], dtype=bool)
        >>> torch.allclose(out, gs.attention(q, k, v, gs.BlockMask(blocks, 64) & gs.Causal()), atol=1e-6)
        True
    """

    def __init__(
        self, indices: Tensor, block_size: int = 64, counts: Tensor | None = None, *, check: bool = False
    ) -> None:
        block = whole(block_size)
        if block not in BLOCKS:
            raise ValueError(f"block_size must be 64 or 128; got {describe(block_size)}")
        self.block_size = block
        self._take(indices, counts, check)

    def __repr__(self) -> str:
        return f"BlockIndices({tuple(self.indices.shape)}, {self.block_size})"

    @property
    def block(self) -> int:
        return self.block_size

    @property
    def _form(self) -> str:
        return "(B, H, rows, n)"


class Indices(Chosen):
    """Keys that are chosen on the device: for each query and key head a list of them, in any order.

    The query heads of a key head share its lists. A key is named by its number j, whatever `q_offset` and `key_starts`
    are. Entries of -1 are unused, a key that is listed twice counts once, and one that does not exist is left out. It
    joins what `DocumentIds` joins by `&`, and `DocumentIds`.

    Args:
        indices: (B, G, Q, n) int32 or int64 on q's device; 1 in the place of B or G is shared, and lists of H query
            heads are their own. Leading dimensions that q has not may be left out.
        counts: (B, G, Q) integers, with the leading dimensions of `indices`: only so many entries of a list count.
        check: raise ValueError in `attention` where an entry is no key and not -1; this reads the indices, which waits
            for the device, and cannot be compiled.

    Raises:
        ValueError: an argument is none of these; `attention` raises where shapes do not fit q and k.

    Examples:
        >>> q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
        >>> chosen = torch.tensor([[0, -1], [4, 1], [3, 3]]).expand(1, 2, 3, 2)  # of each key head, the same here
        >>> out = gs.attention(q, k, v, gs.Indices(chosen))
        >>> kept = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 1, 0]], dtype=torch.bool)
        >>> torch.allclose(out, gs.attention(q, k, v, kept), atol=1e-6)
        True
    """

    def __init__(self, indices: Tensor, counts: Tensor | None = None, *, check: bool = False) -> None:
        self._take(indices, counts, check)

    def __repr__(self) -> str:
        return f"Indices({tuple(self.indices.shape)})"

    @property
    def block(self) -> int:
        return 1

    @property
    def _form(self) -> str:
        return "(B, G, Q, n)"
