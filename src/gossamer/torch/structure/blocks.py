"""Key blocks that are chosen on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.torch.structure.base import OF_INTEGERS, Lists, Sizes, Structure, narrow
from gossamer.torch.validate import INTEGERS, describe, number

BLOCKS = (64, 128)  # sizes of blocks that are selected: tiles that every implementation walks


class BlockIndices(Structure):
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
        wide = (torch.int32, torch.int64)
        if not isinstance(indices, Tensor) or indices.is_nested or indices.dtype not in wide or indices.ndim < 2:
            raise ValueError(f"indices must be a tensor (B, H, rows, n) of int32 or int64; got {describe(indices)}")
        if indices.ndim > 4:
            raise ValueError(f"indices must be a tensor (B, H, rows, n), of 4 dimensions; got {describe(indices)}")
        block_size = number(block_size)
        if type(block_size) is not int or block_size not in BLOCKS:
            raise ValueError(f"block_size must be 64 or 128; got {describe(block_size)}")
        if counts is not None:
            right = isinstance(counts, Tensor) and not counts.is_nested and counts.dtype in INTEGERS
            if not right or counts.shape != indices.shape[:-1]:
                raise ValueError(
                    f"counts must be a tensor of {OF_INTEGERS}, of shape {tuple(indices.shape[:-1])}, as indices have "
                    f"lists; got {describe(counts)}"
                )
        if not isinstance(check, bool):
            raise ValueError(f"check must be True or False; got {describe(check)}")
        self.indices, self.block_size, self.counts, self.checked = indices, block_size, counts, check

    def __repr__(self) -> str:
        return f"BlockIndices({tuple(self.indices.shape)}, {self.block_size})"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.indices,) if self.counts is None else (self.indices, self.counts)

    @property
    def block(self) -> int:
        return self.block_size

    def check(self, sizes: Sizes) -> None:
        B, H, T, _ = self._four().shape
        wanted = -(-sizes.Q // self.block_size)
        if B not in (1, sizes.B) or H not in (1, sizes.G, sizes.H) or wanted != T:
            raise ValueError(
                f"indices of BlockIndices must have shape (B, heads, rows, n), B=1 or {sizes.B}, heads 1, "
                f"G={sizes.G} or H={sizes.H}, rows = ceil(Q / {self.block_size}) = {wanted}; "
                f"got {describe(self.indices)}"
            )
        if self.checked and not self.indices.is_meta:
            self._check_values(-(-sizes.K // self.block_size))

    def _check_values(self, blocks: int) -> None:
        if torch.compiler.is_compiling():
            raise ValueError("check of BlockIndices must be False in a compiled function: it reads the indices")
        wrong = (self.indices < -1) | (self.indices >= blocks)
        if self.counts is not None:
            wrong &= torch.arange(wrong.shape[-1], device=wrong.device) < self.counts[..., None]
        if wrong.any():
            found = next(iter(self.indices[wrong].tolist()))
            raise ValueError(f"indices of BlockIndices must be in [0, {blocks}), or -1 where unused; got {found}")

    def _four(self) -> Tensor:
        shape = self.indices.shape
        return self.indices.reshape((1,) * (4 - len(shape)) + tuple(shape))

    def lists(self, sizes: Sizes) -> Lists:
        indices, n = self._four(), self.indices.shape[-1]
        counts = None if self.counts is None else narrow(self.counts, 0, n).reshape(indices.shape[:3])
        return Lists(narrow(indices, -1, -(-sizes.K // self.block_size)), counts)
