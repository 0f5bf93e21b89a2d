"""Keys and values of a cache in pages: which pages each sequence has, by a table on the device."""

from __future__ import annotations

from copy import copy
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gossamer.checks import boolean
from gossamer.torch.arguments import INTEGERS, describe, known, whole
from gossamer.torch.structure.base import OF_INTEGERS, Edges, is_read, narrow, vector_of

PageLayout = Literal["pshd", "phsd"]  # of k: (pages, page_size, G, D), or (pages, G, page_size, D)
MOST_SLOTS = 2**31 - 2**16  # of a sequence: positions are int32


class Pages:
    """Where a cache in pages holds the keys of each sequence, as engines that serve models keep it.

    k is (P, page_size, G, D), or with page_layout="phsd" (P, G, page_size, D), and v likewise, of any strides whose
    last is 1: halves of one tensor, or padded pages. Key j of sequence r lies in the page
    `block_table[r, j // page_size]`, in its slot `j % page_size`. Sequences may share pages. It is given to
    `PackedSequences` as its `pages`.

    What no query sees is not used: entries of the table behind `seqused_k` or left of all windows, and the pages that
    they name, may hold anything, and so may slots behind `seqused_k` (NaN too).

    Args:
        block_table: (R, n) integers on q's device, or a numpy array; or (R, G, n), a table for each key head, as where
            each chooses pages of its own.
        seqused_k: (R,) integers likewise, or a list: the keys of each sequence, those of this step included; with
            (R, G, n) a tensor (R, G). On a CPU one outside of [0, n * page_size] raises, on a GPU it is clamped.
        page_size: slots of a page.
        page_layout: "pshd" or "phsd", for page, slot, head and dimension.
        batch_invariant: a sequence's results have the same bits whatever other sequences are in the call: its keys are
            cut by their own number alone. By the kernel that reads the table, on a GPU (docs/limits.md), else refused.
        check: raise ValueError for wrong lengths, and for pages that do not exist, on a GPU too, where their keys are
            else left out; this waits for it, and cannot be compiled.

    Raises:
        ValueError: an argument is none of these.

    Examples:
        >>> k, v = torch.randn(5, 16, 2, 8), torch.randn(5, 16, 2, 8)  # five pages of 16 slots
        >>> pages = gs.Pages(torch.tensor([[3, 0], [4, -1]]), [20, 7], page_size=16)
        >>> packed = gs.PackedSequences([0, 3, 4], pages=pages, pattern=gs.Causal())
        >>> q = torch.randn(4, 4, 8)  # three tokens of the first sequence, one of the second
        >>> step = gs.device_layout(q, k, v, packed, layout="bshd")  # once for all layers
        >>> out = gs.attention(q, k, v, step, layout="bshd")
        >>> keys = torch.cat([k[3], k[0]])[:20], torch.cat([v[3], v[0]])[:20]
        >>> torch.allclose(out[:3], gs.attention(q[:3], *keys, gs.Causal(), layout="bshd"), atol=1e-6)
        True
    """

    def __init__(
        self, block_table: Tensor | np.ndarray, seqused_k: Edges, page_size: int, *,
        page_layout: PageLayout = "pshd", batch_invariant: bool = False, check: bool = False,
    ) -> None:  # fmt: skip
        table: Any = block_table
        if isinstance(table, np.ndarray) and table.dtype.kind in "iu":
            table = torch.from_numpy(table.astype(np.int64))
        if not isinstance(table, Tensor) or table.is_nested or table.dtype not in INTEGERS or table.ndim not in (2, 3):
            raise ValueError(
                "block_table must be a tensor (sequences, pages of each), or (sequences, key heads, pages of each), of "
                f"{OF_INTEGERS}; got {describe(block_table)}"
            )
        size = whole(page_size)
        if size is None or not known(size >= 1):
            raise ValueError(f"page_size must be a positive integer; got {describe(page_size)}")
        if not isinstance(page_layout, str) or page_layout not in ("pshd", "phsd"):
            raise ValueError(
                'page_layout must be "pshd", of k (P, page_size, G, D), or "phsd", of k (P, G, page_size, D); '
                f"got {describe(page_layout)}"
            )
        self.block_table = table
        if table.ndim == 2:
            self.seqused_k = vector_of("seqused_k", seqused_k, table.shape[0])
        else:
            used: Any = seqused_k
            right = isinstance(used, Tensor) and not used.is_nested and used.dtype in INTEGERS
            if not right or known(used.shape != table.shape[:2]):
                raise ValueError(
                    f"seqused_k must be a tensor (sequences, key heads) = {tuple(table.shape[:2])} of {OF_INTEGERS} "
                    f"with a table for each key head; got {describe(seqused_k)}"
                )
            self.seqused_k = used
        self.page_size: int = size
        self.page_layout: PageLayout = page_layout
        self.batch_invariant, self.checked = boolean("batch_invariant", batch_invariant), boolean("check", check)
        if known(table.shape[-1] * size > MOST_SLOTS):
            raise ValueError(
                f"block_table must have room for at most 2**31 - 2**16 keys of a sequence; got {table.shape[-1]} pages "
                f"of {size}"
            )
        given = {"block_table": block_table, "seqused_k": seqused_k}
        self._of_host = [name for name, x in given.items() if not isinstance(x, Tensor)]

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.block_table.shape))
        return f"Pages({shape}, {self.page_size}, {self.page_layout})"

    @property
    def by_head(self) -> bool:
        """Whether each key head has a table of its own."""
        return self.block_table.ndim == 3

    def of_head(self, head: int) -> Pages:
        """The pages of one key head."""
        made = copy(self)
        made.block_table, made.seqused_k = self.block_table[:, head], self.seqused_k[:, head]
        return made

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All that it reads."""
        return self.block_table, self.seqused_k

    def placed(self, device: torch.device) -> Pages:
        """These pages with what was given on the host on a device."""
        if not self._of_host:
            return self
        made = copy(self)
        for name in self._of_host:
            setattr(made, name, getattr(self, name).to(device))
        return made

    def held(self) -> Pages:
        """These pages as they are now, whatever is written to their tensors later."""
        made = copy(self)
        made.block_table, made.seqused_k, made._of_host = self.block_table.clone(), self.seqused_k.clone(), []
        return made

    def up_to(self, keys: int) -> Pages:
        """These pages where no sequence has more keys than that: of the table that is all that is looked at."""
        made = copy(self)
        made.block_table = self.block_table[..., : -(-keys // self.page_size)]
        return made

    def read(self) -> bool:
        """Whether the numbers are looked at before a call.

        Raises:
            ValueError: `check` is asked for in a compiled function.
        """
        return all(is_read("Pages", self.checked, x) for x in self.tensors)

    def check_numbers(self, seen: Tensor, pages: int) -> None:
        """Raise ValueError for lengths over the room of the table, and for seen pages that do not exist; it reads.

        Args:
            seen: (R, n), whether queries see a key of each entry.
            pages: that there are.
        """
        most = self.block_table.shape[1] * self.page_size
        used = self.seqused_k
        if used.numel() and (int(used.min()) < 0 or int(used.max()) > most):
            raise ValueError(
                f"seqused_k must be in [0, {most}], the room of block_table; got {int(used.min())} to {int(used.max())}"
            )
        number = narrow(self.block_table, -1, pages)
        wrong = seen & ((number < 0) | (number >= pages))
        if bool(wrong.any()):
            first, *_ = self.block_table[wrong].tolist()
            raise ValueError(f"block_table must name pages in [0, {pages}) where keys are seen; got {first}")
