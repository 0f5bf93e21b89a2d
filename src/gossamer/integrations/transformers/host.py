"""The pairs of a mask as a pattern that is planned on the host: for masks that have no rules on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.integrations.transformers.device import Where, reach_of
from gossamer.integrations.transformers.patterns import Blocks, Evaluated, Keys, both, either, window
from gossamer.integrations.transformers.reading import MaskFunction, Pairs, Same, Unreadable
from gossamer.patterns import Dense, Document, Pattern
from gossamer.plan.problem import Unsupported

# Pairs of a mask function that symbols do not read, which is asked for each of them.
EVALUATED_PAIRS = 2**26
_AT_ONCE = 2**24


def pattern_of(pairs: Pairs, where: Where, around: tuple[Same, ...] = ()) -> Pattern:
    """The pattern of a mask, in key coordinates; its tensors are read.

    Args:
        where: with offsets that are integers.
        around: documents that are kept apart by what the mask is part of.

    Raises:
        Unreadable: it has none.
    """
    around = (*around, *pairs.same)
    for positions in pairs.packed:
        _check_packed(host(positions), around)
    reach = reach_of(pairs)
    if reach is None:
        raise Unreadable("it keeps no window around a query")
    pattern = window(reach.left, reach.right)
    images = [rows for rows in pairs.rows if any(rows.values is same.values for same in pairs.same)]
    for same in pairs.same:
        ids = _key_values(_values(same, where), where)
        image = any(rows.values is same.values for rows in images)
        pattern = both(pattern, Blocks(ids) if image else documents(ids))
    for rows in pairs.rows:
        if not any(rows is image for image in images) and (host(rows.values) < 0).any():
            raise Unreadable("it keeps queries by a tensor")
    for keys in pairs.keys:
        kept = _key_values(_mapped(host(keys.values), keys.at), where) != 0
        pattern = pattern if kept.all() else both(pattern, Keys(kept))
    for one, other in pairs.either:
        pattern = both(pattern, either(pattern_of(one, where, around), pattern_of(other, where, around)))
    return pattern


def _check_packed(positions: np.ndarray, documents_of: tuple[Same, ...]) -> None:
    """Raise unless distances are those of absolute positions, in each document that is kept apart."""
    apart = np.diff(positions, axis=1) == 1
    for same in documents_of:
        if same.values is None or same.at is not None:
            continue
        change = np.diff(host(same.values), axis=1)
        if change.shape[1] == apart.shape[1] and (change >= 0).all():
            apart = apart | (change != 0)
    if not apart.all():
        raise Unreadable("its packed positions do not count on")


def _values(same: Same, where: Where) -> np.ndarray:
    """(1 or B, positions)."""
    if not where.inside:
        raise Unreadable("queries are at positions without keys")
    if same.values is not None:
        return _mapped(host(same.values), same.at)
    position = np.arange(where.kv_offset + where.K)[None] if same.at is None else host(same.at)
    if same.shift is not None:
        position = position - host(same.shift)[:, None]
    return position // same.block


def _mapped(values: np.ndarray, at: Tensor | None) -> np.ndarray:
    if at is None:
        return values
    places = host(at)
    values = values if len(values) == len(places) else np.repeat(values, len(places), 0)
    if len(values) != len(places) or places.min() < 0 or places.max() >= values.shape[1]:
        raise Unreadable("its packed positions are outside of a tensor")
    return np.take_along_axis(values, places, 1)


def _key_values(values: np.ndarray, where: Where) -> np.ndarray:
    """(B or 1, K): of values at absolute positions those of the keys."""
    first, last = where.kv_offset, where.kv_offset + where.K
    if values.shape[1] < last or len(values) not in (1, where.B):
        raise Unreadable("a tensor of it has not the positions of all keys")
    return shared(values[:, first:last])


def documents(ids: np.ndarray) -> Pattern:
    """Pairs of the same id, (B or 1, K)."""
    if (ids == ids[:, :1]).all():
        return Dense()
    return Document(ids[0] if len(ids) == 1 else ids)


def evaluate(fn: MaskFunction, where: Where, device: Any, use_vmap: bool) -> Pattern:
    """A mask function that is not read, asked for every pair.

    Raises:
        Unsupported: there are too many.
    """
    w = where
    pairs = w.B * w.Q * w.K
    if pairs > EVALUATED_PAIRS:
        raise Unsupported(
            f"mask function {name_of(fn)} is not known to gossamer, and may be evaluated over at most "
            f"{EVALUATED_PAIRS} pairs; these are B x Q x K = {w.B} x {w.Q} x {w.K} = {pairs}"
        )
    kept = np.concatenate(list(_rows(fn, w, device, use_vmap)), 1)
    return Dense() if kept.all() else Evaluated(shared(kept))


def _rows(fn: MaskFunction, w: Where, device: Any, use_vmap: bool) -> Iterator[np.ndarray]:
    step = max(1, _AT_ONCE // (w.B * w.K))
    b, h = torch.arange(w.B, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    kv = torch.arange(w.K, device=device) + w.kv_offset
    for at in range(0, w.Q, step):
        q = torch.arange(at, min(w.Q, at + step), device=device) + w.q_offset
        if use_vmap:
            asked = fn
            for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
                asked = torch.vmap(asked, in_dims=dims, out_dims=0)
            with scalars():
                kept = asked(b, h, q, kv)
        else:
            kept = torch.as_tensor(fn(b[:, None, None, None], h[:, None, None], q[:, None], kv), device=device)
        yield kept.to(torch.bool).expand(w.B, 1, len(q), w.K)[:, 0].cpu().numpy()


def scalars() -> Any:
    """Lets a mask function under vmap read a tensor by an index without dimensions, as transformers does."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    except ImportError:
        return nullcontext()
    return TransformGetItemToIndex()


def name_of(fn: MaskFunction) -> str:
    """The module of a mask function, and its name there."""
    return f"{fn.__module__}.{fn.__qualname__}" if isinstance(fn, FunctionType) else type(fn).__name__


def shared(values: np.ndarray) -> np.ndarray:
    """One row where all batch elements have the same."""
    return values[:1] if (values[1:] == values[:1]).all() else values


def host(values: Tensor) -> np.ndarray:
    """A tensor of integers or booleans as integers, on the host: a copy, whatever becomes of the tensor."""
    return np.array(values.detach().cpu().numpy(), dtype=np.int64)
