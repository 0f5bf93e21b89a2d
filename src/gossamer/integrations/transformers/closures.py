"""A mask function of transformers, read into a pattern.

`mask_function(b, h, q, kv)` is a tree of closures over absolute positions. Each closure is known by its name, and its
variables say the rest; `READERS` is the whole table. What is read is checked against the function (`certificate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.integrations.transformers.patterns import Blocks, Chunks, Evaluated, Keys, both, either, window
from gossamer.patterns import Dense, Document, Local, Pattern, PerBatch
from gossamer.plan.problem import Unsupported

MaskFunction = Callable[..., Any]

# Pairs of a mask function that has no name here, which is asked for each of them.
EVALUATED_PAIRS = 2**26
_AT_ONCE = 2**24


class Where(NamedTuple):
    """The pairs of one call: query row r is at position r + q_offset, key column c at c + kv_offset."""

    B: int
    Q: int
    K: int
    q_offset: int
    kv_offset: int

    @property
    def offset(self) -> int:
        """The position of query row 0 where key 0 is at 0."""
        return self.q_offset - self.kv_offset

    @property
    def inside(self) -> bool:
        """Whether every query has a key at its own position."""
        return self.offset >= 0 and self.offset + self.Q <= self.K


class Reader(NamedTuple):
    """What the readers of a mask function share."""

    where: Where
    device: Any
    use_vmap: bool = False
    positions: np.ndarray | None = None  # (B, positions): what packed positions were mapped to
    packed: tuple[np.ndarray, ...] = ()  # ids (B, positions) of the documents that another term keeps apart

    def read(self, fn: MaskFunction) -> Pattern:
        """The pairs that a mask function keeps, as a pattern in key coordinates."""
        reader = READERS.get(name_of(fn))
        found = None if reader is None else reader(self, variables(fn))
        if found is None and is_constant(fn):
            index = [torch.zeros(1, dtype=torch.int64)] * 4
            found = Dense() if bool(fn(*index)) else None
        return self.evaluate(fn) if found is None else found

    def keys(self, values: np.ndarray) -> np.ndarray | None:
        """(B or 1, K): of values at absolute positions those of the keys; None where they do not reach so far."""
        if self.positions is not None:
            values = values if len(values) == len(self.positions) else np.repeat(values, len(self.positions), 0)
            if self.positions.min() < 0 or self.positions.max() >= values.shape[1]:
                return None
            values = np.take_along_axis(values, self.positions, 1)
        first, last = self.where.kv_offset, self.where.kv_offset + self.where.K
        if values.shape[1] < last or len(values) not in (1, self.where.B):
            return None
        return shared(values[:, first:last])

    def evaluate(self, fn: MaskFunction) -> Pattern:
        """A mask function that is not known, asked for every pair."""
        if self.positions is not None:
            inner, at = fn, torch.from_numpy(self.positions).to(self.device)

            def remapped(b: Any, h: Any, q: Any, kv: Any) -> Any:
                return inner(b, h, at[b, q], at[b, kv])

            fn = remapped
        w = self.where
        pairs = w.B * w.Q * w.K
        if pairs > EVALUATED_PAIRS:
            raise Unsupported(
                f"mask function {'.'.join(name_of(fn))} is not known to gossamer, and may be evaluated over at most "
                f"{EVALUATED_PAIRS} pairs; these are B x Q x K = {w.B} x {w.Q} x {w.K} = {pairs}"
            )
        kept = np.concatenate(list(self._rows(fn)), 1)
        if kept.all():
            return Dense()
        return Evaluated(shared(kept))

    def _rows(self, fn: MaskFunction) -> Iterator[np.ndarray]:
        w, device = self.where, self.device
        step = max(1, _AT_ONCE // (w.B * w.K))
        b, h = torch.arange(w.B, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        kv = torch.arange(w.K, device=device) + w.kv_offset
        for at in range(0, w.Q, step):
            q = torch.arange(at, min(w.Q, at + step), device=device) + w.q_offset
            if self.use_vmap:
                asked = fn
                for dims in (
                    (None, None, None, 0),
                    (None, None, 0, None),
                    (None, 0, None, None),
                    (0, None, None, None),
                ):
                    asked = torch.vmap(asked, in_dims=dims, out_dims=0)
                with scalars():
                    kept = asked(b, h, q, kv)
            else:
                kept = torch.as_tensor(fn(b[:, None, None, None], h[:, None, None], q[:, None], kv))
            yield kept.to(torch.bool).expand(w.B, 1, len(q), w.K)[:, 0].cpu().numpy()


def scalars() -> Any:
    """Lets a mask function under vmap read a tensor by an index without dimensions, as transformers does."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    except ImportError:
        return nullcontext()
    return TransformGetItemToIndex()


def shared(values: np.ndarray) -> np.ndarray:
    """One row where all batch elements have the same."""
    return values[:1] if (values[1:] == values[:1]).all() else values


def host(values: Tensor) -> np.ndarray:
    """A tensor of integers or booleans as integers, on the host: a copy, whatever becomes of the tensor."""
    return np.array(values.detach().cpu().numpy(), dtype=np.int64)


def name_of(fn: MaskFunction) -> tuple[str, str]:
    """The module of a mask function, and its name there."""
    return str(getattr(fn, "__module__", None)), str(getattr(fn, "__qualname__", type(fn).__name__))


def variables(fn: MaskFunction) -> dict[str, Any]:
    """What a closure holds, by name."""
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None)
    if code is None or not cells:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def is_constant(fn: MaskFunction) -> bool:
    """Whether a function takes `*args` alone and holds nothing: `lambda *args: torch.tensor(True)` in transformers."""
    code = getattr(fn, "__code__", None)
    if code is None or code.co_argcount or code.co_freevars or not name_of(fn)[0].startswith("transformers."):
        return False
    return (
        bool(code.co_flags & 0x04) and set(code.co_names) <= {"torch", "tensor", "bool"} and "args" not in code.co_names
    )


def _causal(reader: Reader, closure: dict[str, Any]) -> Pattern:
    return window(None, 0)


def _bidirectional(reader: Reader, closure: dict[str, Any]) -> Pattern:
    return window(None, None)


def _window_before(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    W = closure["sliding_window"]
    return window(W - 1, None) if isinstance(W, int) and W > 0 else None


def _window_within(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    W = closure["sliding_window"]
    return window(W, W) if isinstance(W, int) and W >= 0 else None


def _window_below(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    W = closure["sliding_window"]
    return window(W - 1, W - 1) if isinstance(W, int) and W > 0 else None


def _window_sides(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    left, right = closure["sliding_window"]
    if not isinstance(left, int) or not isinstance(right, int) or left < 1:
        return None
    return window(left - 1, max(right - 1, 0))


def _window_halves(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    W = closure["sliding_window"]
    sides = (W, 0) if closure["is_causal"] else ((W + 1) // 2, W // 2 + 1)
    return _window_sides(reader, {"sliding_window": sides})


def _chunks(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    size, padding = closure["chunk_size"], host(closure["left_padding"])
    if len(padding) not in (1, reader.where.B):
        return None
    if reader.positions is not None:
        ids = reader._replace(positions=None).keys((reader.positions - padding[:, None]) // size)
        return None if ids is None or not reader.where.inside else documents(ids)
    shifts = [int(x) % size for x in reader.where.kv_offset - padding]
    each: list[Pattern] = [Chunks(size, shift) if shift else Local(size) for shift in shifts]
    return each[0] if len(set(shifts)) == 1 else PerBatch(each)


def _packed(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    ids = reader.keys(host(closure["packed_sequence_mask"]))
    return None if ids is None or not reader.where.inside else documents(ids)


def documents(ids: np.ndarray) -> Pattern:
    """Pairs of the same id, (B or 1, K)."""
    if (ids == ids[:, :1]).all():
        return Dense()
    return Document(ids[0] if len(ids) == 1 else ids)


def _blockwise(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    ids = reader.keys(host(closure["block_sequence_ids"]))
    return None if ids is None or not reader.where.inside else Blocks(ids)


def _padding(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    kept = reader.keys(host(closure["padding_mask"]))
    return None if kept is None else Dense() if kept.all() else Keys(kept != 0)


def _remapped(reader: Reader, closure: dict[str, Any]) -> Pattern | None:
    """Distances stay what they were where positions count on within each document that another term keeps apart."""
    positions = host(closure["position_ids"])
    apart = np.zeros((1, positions.shape[1] - 1), dtype=bool)
    for ids in reader.packed:
        change = np.diff(ids, axis=1)
        if change.shape[1] != apart.shape[1] or (change < 0).any():
            return None
        apart = apart | (change != 0)
    if reader.positions is not None or ((np.diff(positions, axis=1) != 1) & ~apart).any():
        return None
    return reader._replace(positions=positions).read(closure["mask_function"])


def _and(reader: Reader, closure: dict[str, Any]) -> Pattern:
    functions = closure["mask_functions"]
    if reader.positions is None:
        ids = [host(variables(fn)["packed_sequence_mask"]) for fn in functions if name_of(fn) == PACKED]
        reader = reader._replace(packed=(*reader.packed, *ids))
    found: Pattern = Dense()
    for fn in functions:
        found = both(found, reader.read(fn))
    return found


def _or(reader: Reader, closure: dict[str, Any]) -> Pattern:
    first, *rest = closure["mask_functions"]
    found = reader.read(first)
    for fn in rest:
        found = either(found, reader.read(fn))
    return found


_HOME = "transformers.masking_utils"
_MODELS = "transformers.models."
AND = (_HOME, "and_masks.<locals>.and_mask")
PACKED = (_HOME, "packed_sequence_mask_function.<locals>.inner_mask")
REMAPPED = (_HOME, "remap_positions_for_packed_sequence.<locals>.inner_mask")
_SIDES = "sliding_window_mask_function.<locals>.inner_mask"
_BELOW = "_bidirectional_window_overlay.<locals>.inner_mask"

# (module, name) of each closure that is known: how it is read. None says that these variables are not.
READERS: dict[tuple[str, str], Callable[[Reader, dict[str, Any]], Pattern | None]] = {
    (_HOME, "causal_mask_function"): _causal,
    (_HOME, "bidirectional_mask_function"): _bidirectional,
    AND: _and,
    (_HOME, "or_masks.<locals>.or_mask"): _or,
    (_HOME, "sliding_window_overlay.<locals>.inner_mask"): _window_before,
    (_HOME, "sliding_window_bidirectional_overlay.<locals>.inner_mask"): _window_within,
    (_HOME, "chunked_overlay.<locals>.inner_mask"): _chunks,
    (_HOME, "blockwise_overlay.<locals>.inner_mask"): _blockwise,
    (_HOME, "padding_mask_function.<locals>.inner_mask"): _padding,
    PACKED: _packed,
    REMAPPED: _remapped,
    (f"{_MODELS}gemma3.modeling_gemma3", _BELOW): _window_below,
    (f"{_MODELS}step3p7.modeling_step3p7", _BELOW): _window_below,
    (f"{_MODELS}gemma4.modeling_gemma4", _SIDES): _window_sides,
    (f"{_MODELS}moonshine_streaming.modeling_moonshine_streaming", _SIDES): _window_sides,
    (f"{_MODELS}t5gemma2.modeling_t5gemma2", _SIDES): _window_halves,
}


def unknown(fn: MaskFunction) -> bool:
    """Whether some part of a mask function has no reader."""
    inner = [x for value in variables(fn).values() for x in (value if isinstance(value, tuple) else (value,))]
    mine = name_of(fn) not in READERS and not is_constant(fn)
    return mine or any(unknown(x) for x in inner if callable(x) and not isinstance(x, Tensor))


def structure(fn: MaskFunction) -> tuple[Any, ...]:
    """What two mask functions have in common that are read alike: names, numbers, and ranks of tensors."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return "tensor", value.ndim
        if isinstance(value, (tuple, list)):
            return tuple(of(x) for x in value)
        return structure(value) if callable(value) else repr(value)

    return (*name_of(fn), *((name, of(value)) for name, value in sorted(variables(fn).items())))


def on_cpu(fn: MaskFunction) -> MaskFunction:
    """The same mask function over copies of its tensors on the CPU."""
    import types

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


def packed_ids(fn: MaskFunction) -> Tensor | None:
    """The document of each position (B, positions), where a mask function holds them as a term of its own."""
    closure = variables(fn)
    if name_of(fn) == PACKED:
        return closure["packed_sequence_mask"]
    functions = closure["mask_functions"] if name_of(fn) == AND else ()
    return next((ids for ids in map(packed_ids, functions) if ids is not None), None)
