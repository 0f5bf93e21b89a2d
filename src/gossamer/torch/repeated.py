"""Calls whose structure is made on the device: one look-up, what the first call wrote down, and one run.

Of a structure that the host tells whole (`varlen` with lists of edges, and small tensors of a call on a CPU) the layout
is kept by its numbers when they come for the second time: the layers of a step share it, and a call that finds it
launches attention alone. Numbers that come once go the way of those on the device, since to bind a launch to a layout
takes as long as several calls.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.kernels.launch import NO_VECTORS, Vectors
from gossamer.memo import Memo
from gossamer.patterns import Pattern
from gossamer.patterns.handles import token_of
from gossamer.torch.arguments import BHND, AttentionOptions, four_dimensional, is_bshd, unbatched
from gossamer.torch.calls import call_of, known
from gossamer.torch.given_layouts import Given, layout_from
from gossamer.torch.key import Key, facts, key_of, places, plain
from gossamer.torch.memory import hold_for_graphs, outlasting
from gossamer.torch.planning import layout_bytes
from gossamer.torch.recording import Again
from gossamer.torch.request import DENSE, Request, asks_for_structure, request_of
from gossamer.torch.structure.base import Sizes, Structure


class Asked(NamedTuple):
    """What a call asks for."""

    key: Key
    pattern: Any  # a Structure, a Pattern or None
    given: list[Tensor]  # what its structure is made of
    numbers: Key | None  # the key with all numbers of these


class Repeated(NamedTuple):
    """What calls of one key do."""

    again: Again | None  # makes the arrays of their layout of what they are given; None: they go the usual way
    geometry: tuple[int, ...]  # of the layout
    call: Any  # computes them, from q, k and v of four dimensions
    sizes: Sizes
    dims: int
    bshd: bool
    alive: Any  # what the key names by a handle lives as long

    def made(self, pattern: Any, given: list[Tensor]) -> tuple[Tensor, ...]:
        """The memory of the arrays of a call's layout."""
        assert self.again is not None
        if isinstance(pattern, Structure):
            pattern.check_numbers(self.sizes)
        if given[0].is_cuda and is_current_stream_capturing():
            hold_for_graphs(self)
        return self.again.run(*given)


class Numbered(NamedTuple):
    """What calls of one key do whose structure has the same numbers."""

    layout: Given
    call: Any
    data: tuple[Tensor, ...]  # arrays of the layout, which it takes last
    dims: int
    bshd: bool


MOST_NUMBERED = 8  # structures whose layouts are kept: those of a few steps
MOST_READ_BYTES = 2**18  # of numbers in tensors: more take longer to look up than they may save

_numbered: Memo[Numbered] = Memo(MOST_NUMBERED)
_came: Memo[bool] = Memo()  # hashes of keys that came once, at least


def by_structure(
    q: Any, k: Any, v: Any, pattern: Any, options: AttentionOptions, vectors: Vectors | tuple[()]
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(out, lse) of a call whose structure is made on the device; None where it goes the usual way.

    Args:
        vectors: key_lengths, sink_logits and alibi_slopes as `vectors_of` makes them, or nothing.
    """
    asked = _asked_or_numbered(q, k, v, pattern, options, vectors, MOST_READ_BYTES)
    if asked is None:
        return None
    found: Any = asked
    if isinstance(asked, Numbered):
        data = asked.data
    else:
        found = known.get(asked.key)
        if found is None:
            request = request_of(q, k, v, asked.pattern, options, vectors, repeats=True)
            a, call = request.arguments, call_of(request)
            _keep(asked, request, call)
            out, lse = call(a.q, a.k, a.v, *request.more)
            return unbatched(out, lse, a.dims, a.bshd)
        if found.again is None:
            return None
        data = found.made(asked.pattern, asked.given)
    _, sinks, slopes = vectors or NO_VECTORS
    if found.dims == 4 and not found.bshd:
        out, lse = found.call(q, k, v, None, sinks, slopes, *data)
        return out, lse
    out, lse = found.call(*four_dimensional(q, k, v, found.bshd), None, sinks, slopes, *data)
    return unbatched(out, lse, found.dims, found.bshd)


def layout_by_structure(
    q: Any, k: Any, v: Any, pattern: Any, options: AttentionOptions, vectors: Vectors | tuple[()],
    by_numbers: bool = True,
) -> Given:  # fmt: skip
    """The layout of such a call, made on its device, or kept by its numbers where these may be asked for."""
    # What a layout of tensors holds may be written to by whoever asked for it.
    look_up = partial(_asked_or_numbered, read=0) if by_numbers else partial(_asked, by_numbers=False)
    asked = look_up(q, k, v, pattern, options, vectors)
    if isinstance(asked, Numbered):
        return asked.layout
    found: Any = None if asked is None else known.get(("layout", asked.key))
    if asked is not None and found is not None and found.again is not None:
        # Made in inference mode it could not be used in training later.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            return layout_from([*found.again.parts(found.made(asked.pattern, asked.given))], found.geometry)
    request = request_of(q, k, v, pattern, options, vectors, repeats=asked is not None and found is None)
    if asked is not None and found is None:
        _keep(asked._replace(key=("layout", asked.key)), request, None)
    made: Given = request.attended.alive
    return made


def _asked_or_numbered(
    q: Any, k: Any, v: Any, pattern: Any, options: AttentionOptions, vectors: Vectors | tuple[()], read: int
) -> Asked | Numbered | None:  # fmt: skip
    """What is kept by the numbers of a call, or what the call asks for; None for one that has no key as it is."""
    asked = _asked(q, k, v, pattern, options, vectors, read)
    if asked is None:
        return None
    numbered = None if asked.numbers is None else _of_numbers(asked, q, k, v, options, vectors)
    if numbered is not None:
        return numbered
    if all(x.device == q.device for x in asked.given):
        return asked
    return _asked(q, k, v, pattern, options, vectors, by_numbers=False)


def _of_numbers(
    asked: Asked, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, vectors: Vectors | tuple[()]
) -> Numbered | None:  # fmt: skip
    """The layout of a structure by its numbers, and what computes its calls; None for the first of them."""
    assert asked.numbers is not None
    found = _numbered.get(asked.numbers)
    if found is not None:
        return found
    once = hash(asked.numbers)  # of two with one hash the second counts as one that came before, which is no harm
    if _came.get(once) is None:
        _came.put(once, True)
        return None
    # Its kernels run on the stream of the calls that find it, and its memory is of that one.
    stream, recorded = torch.cuda.current_stream(q.device) if q.is_cuda else None, torch.is_grad_enabled()

    def make() -> Given:
        with torch.cuda.stream(stream), torch.set_grad_enabled(recorded):
            return layout_by_structure(q, k, v, asked.pattern, options, vectors, by_numbers=False)

    layout = outlasting(q.device, make)
    request = request_of(q, k, v, layout, options, vectors)
    a = request.arguments
    made = Numbered(layout, call_of(request), request.attended.data, a.dims, a.bshd)
    return _numbered.put(asked.numbers, made, layout_bytes(layout))


def _keep(asked: Asked, request: Request, call: Any) -> None:
    """Keep how calls like one are repeated. What a captured graph makes is not recorded: the next call is."""
    a, attended, *_ = request
    if a.q.is_cuda and is_current_stream_capturing():
        return
    (B, H, Q, _), (_, G, K, _) = a.q.shape, a.k.shape
    alive = token_of(asked.pattern.handle) if isinstance(asked.pattern, Pattern) else None
    again = attended.again
    held = 0 if again is None else again.held
    found = Repeated(again, attended.geometry, call, Sizes(B, H, G, Q, K), a.dims, a.bshd, alive)
    known.put(asked.key, found, held)


def _asked(
    q: Any, k: Any, v: Any, pattern: Any, o: AttentionOptions, vectors: Vectors | tuple[()], read: int = 0,
    by_numbers: bool = True,
) -> Asked | None:  # fmt: skip
    """What a call asks for, with the key that tells such calls apart; None for one that has no key as it is.

    Args:
        read: bytes of tensors on q's device, a CPU, up to which their numbers are those of a structure that the host
            tells whole.
        by_numbers: whether there may be a key of these; without, the structure is brought to q's device.
    """
    if not asks_for_structure(pattern, o.q_offset, o.key_starts):
        return None
    offset = o.q_offset if isinstance(o.q_offset, Tensor) else None
    lengths, _, slopes = vectors or NO_VECTORS
    given = [x for x in (offset, o.key_starts, lengths) if x is not None]
    if isinstance(pattern, Structure):
        if not by_numbers and isinstance(q, Tensor):
            pattern = pattern.placed(q.device)
        alone = by_numbers and not given and o.q_offset is slopes is None
        given, which = [*pattern.tensors, *given], pattern.facts
    elif pattern is None or isinstance(pattern, Pattern):
        which, alone = (DENSE if pattern is None else pattern).handle, False
    else:
        return None  # which is refused
    told = facts(*given) if all(isinstance(x, Tensor) for x in given) and plain(*given) else None
    if told is None or (offset is not None and slopes is not None):
        return None
    bshd = o.layout is not BHND and is_bshd(o.layout)
    key = key_of(
        q, k, v, DENSE, o.scale, None if offset is not None else o.q_offset, o.softcap, o.implementation,
        o.deterministic, vectors, bshd, o.alibi_distance,
    )  # fmt: skip
    if key is None or (q.ndim == 4 and not q.shape[0] == k.shape[0] == v.shape[0]):
        return None
    key = *key, which, told, places(*given), offset is None, o.key_starts is None
    numbers = None
    if alone and not (q.is_cuda and is_current_stream_capturing()):
        numbers = pattern.numbers(read if q.is_cpu else 0)
    if numbers is None:
        return Asked(key, pattern, given, None)
    stream = torch._C._cuda_getCurrentRawStream(q.device.index) if q.is_cuda else 0
    return Asked(key, pattern, given, (*key, numbers, stream))
