"""The pairs of a mask as data on the device: a rule of positions, ids of documents, and an interval of keys.

Nothing is read back. What has to hold of the values, so that this is what the mask keeps, is told as truth values on
the device: `make_mask` reads them together, or has the device assert them where nothing can be read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.integrations.transformers.patterns import window
from gossamer.integrations.transformers.reading import FAR, Pairs, Same
from gossamer.patterns import Pattern
from gossamer.patterns.reach import Reach, rule
from gossamer.torch.structure import DocumentIds, Structure
from gossamer.torch.structure.base import Joined, Positions

# How often, and where, the lists of a mask's tiles are made.
ONCE, ON_DEVICE, ON_HOST = "once", "on the device", "on the host"


class Where(NamedTuple):
    """The pairs of one call: query row r is at position r + q_offset, key column c at c + kv_offset."""

    B: int
    Q: int
    K: int
    q_offset: int | Tensor  # of a static cache a tensor, which is not read
    kv_offset: int

    @property
    def offset(self) -> int | Tensor:
        """The position of query row 0 where key 0 is at 0."""
        return self.q_offset - self.kv_offset if self.kv_offset else self.q_offset

    @property
    def read_offset(self) -> int:
        """The same, on the host."""
        return int(self.offset)

    @property
    def inside(self) -> bool:
        """Whether every query has a key at its own position, as it has in a static cache."""
        offset = self.offset
        return isinstance(offset, Tensor) or (offset >= 0 and offset + self.Q <= self.K)


class Rules(NamedTuple):
    """Pairs by rules that a device has, in key coordinates."""

    reach: Reach  # without blocks, which begin at absolute positions: they are ids
    ids: tuple[Tensor, ...]  # (1 or B, K) integers: pairs of one run of equal ids

    @property
    def pattern(self) -> Pattern:
        """The reach alone."""
        return window(self.reach.left, self.reach.right)

    def structure(self, device: torch.device) -> Structure:
        """The structure that `attention` is given."""
        documents = tuple(DocumentIds(ids.to(device)) for ids in self.ids)
        seen = rule(self.reach)
        return Joined(documents, seen) if documents else Positions(seen)


class Read(NamedTuple):
    """A mask that has rules on the device."""

    rules: Rules
    keys: tuple[Tensor, ...]  # (1 or B, K) booleans that keys have to meet
    alike: tuple[Tensor, ...]  # 0-d booleans, of each of the ids: all are one document
    right: tuple[Tensor, ...]  # 0-d booleans, without which the rules are not what the mask keeps


class KeptPairs(NamedTuple):
    """The pairs of a mask, in key coordinates: key column 0 is at position 0."""

    what: Pattern | Rules
    starts: Tensor | None = None  # (B,) int32: the first key of each batch element
    lengths: Tensor | None = None  # (B,) int32: where its keys end
    planned: str = ONCE


class Ends(NamedTuple):
    """The keys that padding leaves, as an interval of each batch element."""

    starts: Tensor  # (B,) int32
    lengths: Tensor  # (B,) int32
    all: Tensor  # 0-d boolean: every key that a query can see is kept
    from_first: Tensor  # 0-d boolean: each interval begins at key 0
    whole: Tensor  # 0-d boolean: there is no hole


def reach_of(pairs: Pairs) -> Reach | None:
    """The distances, as a rule; None unless they are an interval around 0."""
    if len(pairs.spans) != 1 or not pairs.spans[0].first <= 0 <= pairs.spans[0].last:
        return None
    first, last = pairs.spans[0]
    return Reach(None if first == -FAR else -first, None if last == FAR else last)


def reach_by(pattern: Pattern) -> Reach | None:
    """The rule of a pattern that restricts a layer, where it is one interval of distances; else None."""
    rule = pattern.device_rule()
    reach = None if rule is None else rule.interval
    return None if reach is None or reach.first is not None else reach


def is_causal(pairs: Pairs) -> bool:
    """Whether it is certain that no query sees a key behind it."""
    return all(span.last <= 0 for span in pairs.spans)


def rules_of(pairs: Pairs, where: Where, device: torch.device | str) -> Read | None:
    """The rules of a mask; None where it has none on a device."""
    reach = reach_of(pairs)
    if reach is None or len(pairs.rows) + len(pairs.either) > 0:
        return None
    if len(pairs.same) > 0 and not where.inside:
        return None
    ids, alike, right = [], [], []
    for same in pairs.same:
        values = ids_of(same, where, device)
        if values is None:
            return None
        ids.append(values)
        alike.append((values == values[:, :1]).all())
        if same.values is not None:
            ordered = values.sort(1).values
            right.append((changes(values).sum(1) == changes(ordered).sum(1)).all())  # no id returns
    keys = []
    for condition in pairs.keys:
        kept = of_keys(condition.values, where) if condition.at is None else None
        if kept is None:
            return None
        keys.append(kept)
    for positions in pairs.packed:
        right.append(counts_on(positions, pairs.same))
    return Read(Rules(reach, tuple(ids)), tuple(keys), tuple(alike), tuple(right))


def of_keys(values: Tensor, where: Where) -> Tensor | None:
    """(1 or B, K), a copy: of values at absolute positions those of the keys; None where they do not reach so far."""
    first, last = where.kv_offset, where.kv_offset + where.K
    if values.shape[1] < last or values.shape[0] not in (1, where.B):
        return None
    return values[:, first:last].clone()


def ids_of(same: Same, where: Where, device: torch.device | str) -> Tensor | None:
    """(1 or B, K): the value of each key."""
    if same.values is not None:
        return of_keys(same.values, where) if same.at is None else None
    if same.at is None:
        position: Tensor | None = torch.arange(where.K, device=device)[None] + where.kv_offset
    else:
        position = of_keys(same.at, where)
    if position is None or same.shift is None:
        return None if position is None else position // same.block
    return (position - same.shift[:, None]) // same.block if same.shift.shape[0] in (1, where.B) else None


def changes(ids: Tensor) -> Tensor:
    """(B, K) booleans: where another id begins than that of the key before."""
    return F.pad(ids.diff(dim=1) != 0, (1, 0))


def counts_on(positions: Tensor, documents: tuple[Same, ...]) -> Tensor:
    """Whether packed positions count on by one wherever documents are not kept apart, so that distances are kept."""
    apart = positions.diff(dim=1) == 1
    for same in documents:
        if same.at is None and same.values is not None and same.values.shape[1] == positions.shape[1]:
            apart = apart | (same.values.diff(dim=1) != 0)
    return apart.all()


def ends_of(keys: Tensor, where: Where, causal: bool) -> Ends:
    """The interval of the keys (1 or B, K) that are kept; those that no causal query can see are not looked at."""
    place = torch.arange(where.K, dtype=torch.int32, device=keys.device)
    reached = place < where.offset + where.Q if causal else torch.ones_like(place, dtype=torch.bool)
    seen = keys & reached
    starts = torch.where(seen, place, where.K).amin(1).int()
    lengths = torch.where(seen, place + 1, 0).amax(1).int()
    number = seen.sum(1)
    return Ends(
        starts.expand(where.B), lengths.expand(where.B), (keys | ~reached).all(), (starts == 0).all(),
        (number == (lengths - starts).clamp(min=0)).all(),
    )  # fmt: skip


def padded(attention_mask: Tensor, where: Where) -> Tensor:
    """(B, K) booleans of the keys; those behind the end of the mask (B, seen) are padding."""
    given = attention_mask[:, where.kv_offset : where.kv_offset + where.K].bool()
    return F.pad(given, (0, where.K - given.shape[1]))


def at_numbers(where: Where) -> Where:
    """The same, with the offset of a static cache read."""
    return where._replace(q_offset=int(where.q_offset))
