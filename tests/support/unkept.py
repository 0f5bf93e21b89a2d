"""What no kept pair has reaches no result: the same call with zeros there, and with NaN and infinities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gossamer.testing.inputs import POISONS, Unkept
from tests.support.exact import NAMES

Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Sequence[Tensor]]


def check_unkept(
    run: Run, there: Unkept, given: Sequence[Tensor], *, sinks: bool, poisons: Sequence[float] = POISONS
) -> None:
    """Raise AssertionError where a value in queries that keep nothing, or in keys that nobody keeps, changes a bit.

    Args:
        run: makes out, lse and gradients of q, k, v, dout and dlse.
        given: those, of any values.
        poisons: the values.
        sinks: whether there are any: the lse of a row that keeps nothing is its sink then, a result like others.
    """
    q, k, v, dout, dlse = given

    def results(value: float) -> Sequence[Tensor]:
        rows = [there.with_rows(x, value) for x in (q, dout)]
        keys = [there.with_keys(x, value) for x in (k, v)]
        with np.errstate(invalid="ignore", over="ignore"):  # of Triton's interpreter
            return run(rows[0], *keys, rows[1], dlse if sinks else there.with_rows(dlse, value))

    zeros = results(0.0)
    assert zeros[0].isfinite().all() and not zeros[1].isnan().any()
    for value in poisons:
        for name, clean, found in zip(NAMES, zeros, results(value), strict=False):
            assert torch.equal(clean, found), f"{value} reaches {name}"
