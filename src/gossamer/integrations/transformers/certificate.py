"""The proof by samples that a pattern says what the mask function of the model says."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gossamer.integrations.transformers.device import KeptPairs, Rules, Where, at_numbers, padded
from gossamer.integrations.transformers.host import name_of, scalars
from gossamer.integrations.transformers.reading import MaskFunction, Pairs
from gossamer.plan.problem import Unsupported
from gossamer.torch.structure.base import Sizes

PAIRS, DRAWS = 2048, 8
REMEMBERED = 4096  # forms; sizes of a mask function may change in every step
NEAR = 40


class Making(Protocol):
    """A mask function that was read, and what is kept by each way that there is."""

    @property
    def pairs(self) -> Pairs | None: ...

    def every(self) -> list[KeptPairs]: ...


# Of a mask function, a place, a device, whether under vmap, and the keys that are no padding.
Read = Callable[[MaskFunction, Where, str, bool, Tensor | None], Making]

_certified: set[tuple[Any, ...]] = set()


def forget() -> None:
    """Certify everything again."""
    _certified.clear()


def certify(fn: MaskFunction, where: Where, padding: Tensor | None, use_vmap: bool, making_of: Read) -> None:
    """Compare what is kept with the mask function on 2048 pairs, once for each structure, on copies on the CPU.

    What is kept by rules of the device and what is planned on the host are compared both. The first draw has the sizes,
    offsets and padding of the call, the others have some of their own. A mask function that symbols do not read was
    evaluated for its own call, which is all that is compared.

    Args:
        padding: boolean (B, seen), at absolute positions; False where a key is padding.
        making_of: what reads a mask function.

    Raises:
        Unsupported: they differ.
    """
    key = (structure(fn), padding is not None, use_vmap)
    if key in _certified:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            f"mask function {name_of(fn)} is new, and is not compared with what was read of it while a CUDA graph is "
            "captured: run the model once before"
        )
    fn, random_ = on_cpu(fn), random.Random(0)
    numbers, reach, edges = sorted(_numbers(fn)), _reach(fn), _edges(fn)
    draws = [(at_numbers(where), None if padding is None else padding.detach().cpu().bool())]
    if making_of(fn, where, "cpu", use_vmap, None).pairs is not None:
        draws += [_draw(random_, where.B, numbers, reach, padding is not None) for _ in range(DRAWS - 1)]
    for at, seen in draws:
        making = making_of(fn, at, "cpu", use_vmap, None if seen is None else padded(seen, at))
        pairs = _pairs(random_, at, numbers, edges, PAIRS // len(draws))
        wanted = _asked(fn, use_vmap, seen, at, pairs)
        for kept in making.every():
            _compare(fn, at, kept, pairs, wanted)
    if len(_certified) >= REMEMBERED:
        _certified.clear()
    _certified.add(key)


def _asked(fn: MaskFunction, use_vmap: bool, seen: Tensor | None, where: Where, pairs: np.ndarray) -> np.ndarray:
    """The values of mask function and padding at pairs (3, n): batch element, query and key, in key coordinates."""
    b, i, j = pairs
    index = [torch.from_numpy(x) for x in (b, np.zeros_like(b), i + where.kv_offset, j + where.kv_offset)]
    if use_vmap:
        with scalars():
            answers = torch.vmap(fn)(*index)
    else:
        answers = torch.as_tensor(fn(*index), device="cpu").expand(len(b))
    wanted = answers.to(torch.bool).numpy()
    return wanted if seen is None else wanted & padded(seen, where).numpy()[b, j]


def _compare(fn: MaskFunction, where: Where, kept: KeptPairs, pairs: np.ndarray, wanted: np.ndarray) -> None:
    """Raise where what is kept is not what is wanted of pairs."""
    b, i, j = pairs
    actual = pairs_kept(kept, where, pairs)
    wrong = np.nonzero(actual != wanted)[0]
    if len(wrong):
        n = wrong[0]
        raise Unsupported(
            f"mask function {name_of(fn)} was read as {kept.what!r}, which is not what it says: of query "
            f"{i[n] + where.kv_offset} and key {j[n] + where.kv_offset} of batch element {b[n]} it says {wanted[n]} "
            f"({len(wrong)} of {len(b)} pairs differ). This is a mistake of gossamer or a change in transformers; use "
            'attn_implementation="sdpa" until it is mended'
        )


def pairs_kept(kept: KeptPairs, where: Where, pairs: np.ndarray) -> np.ndarray:
    """Whether pairs (3, n) are kept: batch element, query and key, in key coordinates."""
    b, i, j = pairs
    if isinstance(kept.what, Rules):
        sizes = Sizes(where.B, 1, 1, len(i), where.K)
        position = torch.from_numpy(i).int()[None, None]
        structure = kept.what.structure(torch.device("cpu"))
        keeps = np.ones(len(j), dtype=bool)
        for bounds in (structure.reached(kept.what.reach, position, sizes), structure.bounds(position, sizes)):
            if bounds is not None:
                lo, hi = (x.expand(where.B, 1, -1).numpy()[b, 0, np.arange(len(b))] for x in bounds)
                keeps &= (lo <= j) & (j < hi)
    else:
        keeps = kept.what.keep(i, j, where.Q, where.K, where.read_offset)
        if kept.what.lead != (1, 1):
            keeps = keeps[np.minimum(b, kept.what.lead[0] - 1), 0, np.arange(len(b))]
    if kept.starts is not None:
        keeps = keeps & (j >= kept.starts.numpy()[b])
    return keeps if kept.lengths is None else keeps & (j < kept.lengths.numpy()[b])


def _numbers(fn: MaskFunction) -> set[int]:
    """Every size that a mask function holds, and half of it: T5Gemma 2 has a window's half on each side."""
    sizes = {x for x in _leaves(fn) if isinstance(x, int) and not isinstance(x, bool)}
    return sizes | {x // 2 for x in sizes}


def _edges(fn: MaskFunction) -> list[int]:
    """Positions at which its tensors begin to say something else: documents, images."""
    edges: set[int] = set()
    for x in _leaves(fn):
        if isinstance(x, Tensor) and x.ndim == 2:
            at = np.unique(np.nonzero(np.diff(x.numpy(), axis=1) != 0)[1] + 1)
            edges.update(at[:: max(1, len(at) // PAIRS)].tolist())
    return sorted(edges)


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
) -> tuple[Where, Tensor | None]:
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
    return where, torch.from_numpy(seen)


def _pairs(rng: random.Random, where: Where, numbers: list[int], edges: list[int], n: int) -> np.ndarray:
    """(3, n): half of them near the diagonal, the others at distances and positions where a mask may be off by one."""
    pairs = []
    first, last = where.read_offset, where.read_offset + where.Q - 1
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
        pairs.append((rng.randrange(where.B), i, j))
    return np.array(pairs, dtype=np.int64).T


def variables(fn: MaskFunction) -> dict[str, Any]:
    """The variables of a closure, by name."""
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None)
    if code is None or not cells:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def structure(fn: MaskFunction) -> tuple[Any, ...]:
    """The structure that two equally read mask functions share: names, numbers, and ranks of tensors."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return "tensor", value.ndim
        if isinstance(value, (tuple, list)):
            return tuple(of(x) for x in value)
        return structure(value) if callable(value) else repr(value)

    return (name_of(fn), *((name, of(value)) for name, value in sorted(variables(fn).items())))


def on_cpu(fn: MaskFunction) -> MaskFunction:
    """The same mask function over copies of its tensors on the CPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().cpu()
        if isinstance(value, tuple):
            return tuple(moved(x) for x in value)
        return on_cpu(value) if isinstance(value, types.FunctionType) else value

    if not isinstance(fn, types.FunctionType) or not fn.__closure__:
        return fn
    cells = tuple(types.CellType(moved(cell.cell_contents)) for cell in fn.__closure__)
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    copy.__qualname__, copy.__module__, copy.__kwdefaults__ = fn.__qualname__, fn.__module__, fn.__kwdefaults__
    return copy
