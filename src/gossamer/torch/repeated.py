"""Calls whose structure is made on the device: one look-up, what the first call wrote down, and one run."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.kernels.launch import NO_VECTORS, Vectors
from gossamer.patterns import Pattern
from gossamer.patterns.handles import token_of
from gossamer.torch.arguments import AttentionOptions, four_dimensional, is_bshd, unbatched
from gossamer.torch.calls import call_of, known
from gossamer.torch.key import Key, alignment, facts, firsts, key_of, plain
from gossamer.torch.memory import hold_for_graphs
from gossamer.torch.recording import Remade
from gossamer.torch.request import DENSE, asks_for_structure, request_of
from gossamer.torch.structure.base import Sizes, Structure


class Repeated(NamedTuple):
    """What calls of one key do."""

    again: Remade  # the arrays of their layout, of the structure's tensors and the vectors
    call: Any  # computes them, from q, k and v of four dimensions
    sizes: Sizes
    dims: int
    bshd: bool
    alive: Any  # what the key names by a handle lives as long


NOT_REPEATED = object()  # kept for a key whose calls go the usual way


def by_structure(
    q: Any, k: Any, v: Any, pattern: Any, options: AttentionOptions, vectors: Vectors | tuple[()]
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(out, lse) of a call whose structure is made on the device; None where it goes the usual way.

    Args:
        vectors: key_lengths, sink_logits and alibi_slopes as `vectors_of` makes them, or nothing.
    """
    o = options
    if not asks_for_structure(pattern, o.q_offset, o.key_starts):
        return None
    structure = pattern if isinstance(pattern, Structure) else None
    if structure is not None and structure.on_host and isinstance(q, Tensor):
        structure = pattern = structure.placed(q.device)
    lengths, sinks, slopes = vectors or NO_VECTORS
    offset = o.q_offset if isinstance(o.q_offset, Tensor) else None
    given = [x for x in (offset, o.key_starts, lengths) if x is not None]
    if structure is not None:
        given = [*structure.tensors, *given]
    key = _key(q, k, v, structure or pattern, o, vectors, offset, given)
    if key is None:
        return None
    found: Any = known.get(key)
    if found is None:
        request = request_of(q, k, v, pattern, o, vectors, repeats=True)
        a, attended, *_ = request
        call = call_of(request)
        if attended.again is None:
            known.put(key, NOT_REPEATED)
        else:
            (B, H, Q, _), (_, G, K, _) = a.q.shape, a.k.shape
            alive = token_of(pattern.handle) if isinstance(pattern, Pattern) else None
            known.put(key, Repeated(attended.again, call, Sizes(B, H, G, Q, K), a.dims, a.bshd, alive))
        out, lse = call(a.q, a.k, a.v, *request.more)
        return unbatched(out, lse, a.dims, a.bshd)
    if found is NOT_REPEATED:
        return None
    if structure is not None:
        structure.check_numbers(found.sizes)
    if q.is_cuda and is_current_stream_capturing():
        hold_for_graphs(found)
    turned = found.dims != 4 or found.bshd
    if turned:
        q, k, v = four_dimensional(q, k, v, found.bshd)
    out, lse = found.call(q, k, v, None, sinks, slopes, *found.again(*given))
    return unbatched(out, lse, found.dims, found.bshd) if turned else (out, lse)


def _key(
    q: Any, k: Any, v: Any, pattern: Any, o: AttentionOptions, vectors: Vectors | tuple[()], offset: Tensor | None,
    given: list[Any],
) -> Key | None:  # fmt: skip
    """What tells such calls apart; None for one that has no key as it is.

    Args:
        given: what the structure is made of.
    """
    if not all(isinstance(x, Tensor) for x in given) or not plain(*given):
        return None
    told = facts(*given)
    bshd = is_bshd(o.layout)
    at = None if offset is not None else o.q_offset
    key = key_of(
        q, k, v, DENSE, o.scale, at, o.softcap, o.implementation, o.deterministic, vectors, bshd, o.alibi_distance
    )
    if key is None or told is None or (q.ndim == 4 and not q.shape[0] == k.shape[0] == v.shape[0]):
        return None
    if offset is not None and vectors and vectors.alibi_slopes is not None:  # counted by the kernel, from a number
        return None
    which = pattern.facts if isinstance(pattern, Structure) else (pattern.handle if pattern is not None else None)
    return (*key, which, told, firsts(*given), alignment(*given), offset is None, o.key_starts is None)
