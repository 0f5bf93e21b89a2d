"""The proof by samples that a pattern says what the mask function of the model says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.integrations.transformers.closures import (
    MaskFunction,
    Where,
    name_of,
    on_cpu,
    scalars,
    structure,
    unknown,
    variables,
)  # fmt: skip
from gossamer.patterns import Pattern
from gossamer.plan.problem import Unsupported

PAIRS, DRAWS = 2048, 8
REMEMBERED = 4096  # forms; sizes of a mask function may change in every step
NEAR = 40

# Of a mask function and the keys of each batch element that are no padding: the pattern, and the end of the keys.
Making = Callable[[MaskFunction, Where, np.ndarray | None], tuple[Pattern, np.ndarray | None]]

_certified: set[tuple[Any, ...]] = set()


def forget() -> None:
    """Certify everything again."""
    _certified.clear()


def certify(fn: MaskFunction, where: Where, padding: Tensor | None, use_vmap: bool, making: Making) -> None:
    """Compare pattern and mask function on 2048 pairs, once for each structure, on copies on the CPU.

    The first draw has the sizes, offsets and padding of the call, the others have some of their own. A mask function
    with a part that has no reader was evaluated for its own call, which is all that is compared.

    Args:
        padding: boolean (B, seen), at absolute positions; False where a key is padding.
        making: what makes a pattern of a mask function.

    Raises:
        Unsupported: they differ.
    """
    key = (structure(fn), padding is not None, use_vmap)
    if key in _certified:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            f"mask function {'.'.join(name_of(fn))} is new, and is not compared with its pattern while a CUDA graph is "
            "captured: run the model once before"
        )
    fn, random_ = on_cpu(fn), random.Random(0)
    given = None if padding is None else padding.detach().cpu().numpy().astype(bool)
    numbers, reach, edges = sorted(_numbers(fn)), _reach(fn), _edges(fn)
    draws = [(where, given)]
    if not unknown(fn):
        draws += [_draw(random_, where.B, numbers, reach, padding is not None) for _ in range(DRAWS - 1)]
    for at, seen in draws:
        pattern, lengths = making(fn, at, seen)
        _compare(fn, use_vmap, at, seen, pattern, lengths, _pairs(random_, at, numbers, edges, PAIRS // len(draws)))
    if len(_certified) >= REMEMBERED:
        _certified.clear()
    _certified.add(key)


def _compare(
    fn: MaskFunction, use_vmap: bool, where: Where, seen: np.ndarray | None, pattern: Pattern,
    lengths: np.ndarray | None, pairs: np.ndarray,
) -> None:  # fmt: skip
    """Raise where the two differ; pairs (3, n): batch element, query and key, in key coordinates."""
    b, i, j = pairs
    kept = pattern.keep(i, j, where.Q, where.K, where.offset)
    if pattern.lead != (1, 1):
        kept = kept[np.minimum(b, pattern.lead[0] - 1), 0, np.arange(len(b))]
    if lengths is not None:
        kept = kept & (j < lengths[b])
    index = [torch.from_numpy(x) for x in (b, np.zeros_like(b), i + where.kv_offset, j + where.kv_offset)]
    if use_vmap:
        with scalars():
            answers = torch.vmap(fn)(*index)
    else:
        answers = torch.as_tensor(fn(*index)).expand(len(b))
    wanted = answers.to(torch.bool).numpy()
    if seen is not None:
        at = j + where.kv_offset
        wanted = wanted & np.where(at < seen.shape[1], seen[b, np.minimum(at, seen.shape[1] - 1)], False)
    wrong = np.nonzero(kept != wanted)[0]
    if len(wrong):
        n = wrong[0]
        raise Unsupported(
            f"mask function {'.'.join(name_of(fn))} was read as {pattern!r}, which is not what it says: of query "
            f"{i[n] + where.kv_offset} and key {j[n] + where.kv_offset} of batch element {b[n]} it says {wanted[n]} "
            f"({len(wrong)} of {len(b)} pairs differ). This is a mistake of gossamer or a change in transformers; use "
            'attn_implementation="sdpa" until it is mended'
        )


def _numbers(fn: MaskFunction) -> set[int]:
    """Every size that a mask function holds, and half of it: T5Gemma 2 has a window's half on each side."""
    sizes = {x for x in _leaves(fn) if isinstance(x, int) and not isinstance(x, bool)}
    return sizes | {x // 2 for x in sizes}


def _edges(fn: MaskFunction) -> list[int]:
    """Positions at which its tensors begin to say something else: documents, images."""
    found: set[int] = set()
    for x in _leaves(fn):
        if isinstance(x, Tensor) and x.ndim == 2:
            at = np.unique(np.nonzero(np.diff(x.numpy(), axis=1) != 0)[1] + 1)
            found.update(at[:: max(1, len(at) // PAIRS)].tolist())
    return sorted(found)


def _reach(fn: MaskFunction) -> int | None:
    """How many positions its tensors tell; None where any position may be asked for."""
    return min((x.shape[1] for x in _leaves(fn) if isinstance(x, Tensor) and x.ndim > 1), default=None)


def _leaves(value: Any) -> Iterator[Any]:
    inner = value if isinstance(value, (tuple, list)) else variables(value).values() if callable(value) else None
    if inner is None or isinstance(value, Tensor):
        yield value
        return
    for x in inner:
        yield from _leaves(x)


def _draw(
    rng: random.Random, B: int, numbers: list[int], reach: int | None, padded: bool
) -> tuple[Where, np.ndarray | None]:
    """Sizes, offsets and padding at random; every query at the position of a key, as in every model's call."""
    most = min(max(numbers, default=0), 2**20)
    kv_offset = rng.randrange(2 * most + 64) if reach is None else rng.randrange(reach)
    K = 1 + rng.randrange(3 * most + 64) if reach is None else 1 + rng.randrange(reach - kv_offset)
    Q = 1 + rng.randrange(K)
    where = Where(B, Q, K, kv_offset + rng.randrange(K - Q + 1), kv_offset)
    if not padded:
        return where, None
    seen = np.ones((B, kv_offset + K - rng.randrange(2) * rng.randrange(K)), dtype=bool)
    for row in seen:
        kind, n = rng.randrange(5), len(row)
        if kind in (0, 2):
            row[: rng.randrange(n)] = False
        if kind in (1, 2):
            row[rng.randrange(n) :] = False
        if kind == 3:
            row[[rng.randrange(n) for _ in range(1 + n // 4)]] = False
    return where, seen


def _pairs(rng: random.Random, where: Where, numbers: list[int], edges: list[int], n: int) -> np.ndarray:
    """(3, n): half of them near the diagonal, the others at distances and positions where a mask may be off by one."""
    found = []
    first, last = where.offset, where.offset + where.Q - 1
    for at in range(n):
        i = rng.randint(first, last)
        kind = at % 8
        size = max(1, rng.choice(numbers)) if numbers else NEAR
        if kind < 4:
            j = i + rng.randint(-NEAR, NEAR)
        elif kind < 6 and numbers:
            j = i + rng.choice((-1, 1)) * (size + rng.randint(-2, 2))
        elif kind < 7:
            if edges and (not numbers or at % 16 < 8):
                edge = rng.choice(edges)
            else:
                edge = rng.randrange(1 + (where.kv_offset + where.K) // size) * size
            i = min(max(edge - where.kv_offset + rng.randint(-3, 3), first), last)
            j = i + rng.randint(-3, 3)
        else:
            j = rng.randrange(where.K)
        j = j if 0 <= j < where.K else rng.randrange(where.K)
        found.append((rng.randrange(where.B), i, j))
    return np.array(found, dtype=np.int64).T
