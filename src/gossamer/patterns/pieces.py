"""Patterns as disjoint pieces, some of which are plain patterns inside residue classes (see `layouts.residue`)."""

from __future__ import annotations

import math
from functools import reduce
from operator import or_
from typing import NamedTuple

from gossamer.patterns.base import Pattern
from gossamer.patterns.compose import Or
from gossamer.patterns.dense import Causal
from gossamer.patterns.dilated import Dilated, Strided
from gossamer.patterns.dilated_segments import LongNet
from gossamer.patterns.grid import Sizes
from gossamer.patterns.window import Local, Longformer, SlidingWindow


class Piece(NamedTuple):
    """The pairs kept inside each class modulo `dilation`, in positions of the class; 1: the pattern itself."""

    pattern: Pattern
    dilation: int = 1


def pieces(pattern: Pattern, sizes: Sizes) -> tuple[Piece, ...]:
    """Disjoint pieces whose union is a pattern of one head; the pattern itself where there is nothing dilated in it."""
    terms = _terms(pattern, sizes)
    dilated = sorted((t for t in terms if isinstance(t, Dilated) and t.dilation > 1), key=lambda t: t.dilation)
    if not dilated:
        return (Piece(pattern),)
    windows = [t for t in terms if isinstance(t, SlidingWindow)]
    others = [t for t in terms if t not in dilated and t not in windows]
    # A pair of two terms belongs to a window before a dilated one, and to these before any other.
    split = []
    for at, term in enumerate(dilated):
        inner: Pattern = SlidingWindow(term.left, term.right)
        for earlier in [*windows, *dilated[:at]]:
            inner = _without(inner, term.dilation, earlier)
        split.append(Piece(inner, term.dilation))
    rest: list[Pattern] = list(windows)
    for other in others:
        rest.append(reduce(lambda kept, term: kept & ~term, dilated, other))
    whole = [Piece(reduce(or_, rest))] if rest else []
    return (*split, *whole)


def _terms(pattern: Pattern, sizes: Sizes) -> list[Pattern]:
    """The terms of a union, lowered as far as they show a window."""
    if isinstance(pattern, Or):
        return [*_terms(pattern.left, sizes), *_terms(pattern.right, sizes)]
    if isinstance(pattern, Strided):
        # Of a class, all keys up to the last position that any query has.
        reach = max(0, (sizes.q_offset + sizes.Q) // pattern.stride)
        strided = Dilated(reach, 0, pattern.stride)
        return [SlidingWindow(pattern.local), strided] if pattern.local else [strided]
    if isinstance(pattern, (Longformer, SlidingWindow)):
        lower = pattern.lower(sizes)
        return [pattern] if lower is pattern else _terms(lower, sizes)
    return [pattern]


def _without(inner: Pattern, dilation: int, term: Pattern) -> Pattern:
    """`inner`, in the positions of classes modulo `dilation`, without the pairs that a window keeps, dilated or not."""
    assert isinstance(term, (Dilated, SlidingWindow)), "a window, dilated or not"
    left, right, other = term.left, term.right, term.dilation if isinstance(term, Dilated) else 1
    # i - j = dilation * m is a multiple of `other` when m is one of `step`.
    step = other // math.gcd(other, dilation)
    before, after = (None if n is None else n * other // (step * dilation) for n in (left, right))
    if step == 1:
        return inner & ~SlidingWindow(before, after)
    assert before is not None and after is not None, "a dilated window has two ends"
    return inner & ~Dilated(before, after, step)


def branch_pieces(pattern: LongNet) -> tuple[Piece, ...] | None:
    """Disjoint pieces of a LongNet mixture: head h keeps those of class h % dilation alone.

    None unless segments and dilations divide one another in one order, so that a branch meets the earlier ones in
    whole classes.
    """
    order = sorted(zip(pattern.dilations, pattern.segments, strict=True))
    split = []
    for at, (r, w) in enumerate(order):
        if w % r or any(r % other or segment % r for other, segment in order[:at]):
            return None
        inner: Pattern = Local(w // r)
        if pattern.causal:
            inner = inner & Causal()
        earlier = {segment for _, segment in order[:at]}
        for segment in sorted(earlier):
            if not any(other % segment == 0 for other in earlier - {segment}):  # else inside the other's segments
                inner = inner & ~Local(segment // r)
        split.append(Piece(inner, r))
    return tuple(split)
