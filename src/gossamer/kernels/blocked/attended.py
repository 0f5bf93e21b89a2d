"""The queries and keys that the pairs of a layout read: the rest may hold anything, and is cleared."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.row_formulas import Attended
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.kept import kept_of
from gossamer.plan.problem import Problem


class Readable:
    """The rows and keys of a layout that are read, and the part of them that lengths leave."""

    def __init__(self, layout: BlockLayout, problem: Problem) -> None:
        kept = kept_of(layout)
        keys, none, device = kept.keys, ~kept.rows, layout.rows.lo.device
        if keys.shape[1] > 1:
            keys = np.logical_or.reduce(keys.reshape(len(keys), problem.G, -1, problem.K), axis=2)
        # No length is over that of a row that keeps nothing.
        first = np.where(none, np.iinfo(np.int32).max, kept.first).astype(np.int32)
        self.first = torch.from_numpy(first).to(device)
        self.keys = None if keys.all() else torch.from_numpy(keys[..., None]).to(device)
        self.positions = torch.arange(problem.K, device=device)
        self.rows = torch.from_numpy(~none[..., None]).to(device) if none.any() else None

    def attended(self, key_lengths: Tensor | None) -> Attended:
        """The rows and keys that are read where batch elements have so many keys."""
        if key_lengths is None:
            return Attended(self.rows, self.keys)
        lengths = key_lengths.to(self.first.device)[:, None, None]
        below = (self.positions < lengths)[..., None]
        return Attended((self.first < lengths)[..., None], below if self.keys is None else below & self.keys)
