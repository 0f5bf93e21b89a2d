"""The mask object that a model's layers share: its pattern, made once in each forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from gossamer.integrations.transformers.certificate import certify
from gossamer.integrations.transformers.closures import (
    MaskFunction,
    Reader,
    Where,
    documents,
    host,
    packed_ids,
    shared,
)  # fmt: skip
from gossamer.integrations.transformers.patterns import Keys, KeysFrom, Shifted, both, is_causal, of_distances
from gossamer.patterns import Pattern
from gossamer.patterns.validate import show
from gossamer.plan.problem import Unsupported


class Mask(BlockMask):
    """What `make_mask` gives a model for its `attention_mask`: no tensor, and no N x N pairs anywhere.

    A `BlockMask` by class alone, for this is what transformers hands on as it is. It offers what `generate` and hooks
    ask of a mask: `.shape`, `.to`, `.contiguous`. All that a cache changes later was copied when it was made.
    """

    def __init__(
        self, mask_function: MaskFunction, where: Where, pattern: Pattern, lengths: Tensor | None, padded: bool
    ) -> None:
        self.mask_function = mask_function
        self.where = where
        self.pattern = pattern  # in key coordinates: key column 0 is at position 0
        self.lengths = lengths  # (B,) int32: where the keys of a right-padded batch element end
        self.padded = padded  # whether an attention_mask was given
        self._restricted: dict[int, tuple[Pattern, Pattern]] = {}
        self._moved: dict[tuple[int, torch.device], Tensor] = {}
        self._names_documents = packed_ids(mask_function) is not None
        self._ids: np.ndarray | None = None  # of the documents in packed positions (1 or B, Q)
        self._ends: list[int] | None = None  # of the same, where they begin in B x Q, and the end
        self._compared: dict[int, tuple[Tensor, bool]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, 1, Q, K)."""
        return self.where.B, 1, self.where.Q, self.where.K

    @property
    def ndim(self) -> int:
        """4: (B, 1, Q, K)."""
        return len(self.shape)

    def dim(self) -> int:
        """4: (B, 1, Q, K)."""
        return len(self.shape)

    def size(self, axis: int | None = None) -> Any:
        """(B, 1, Q, K), or one of them."""
        return self.shape if axis is None else self.shape[axis]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """No operation of torch knows what a mask without pairs is."""
        raise Unsupported(
            f"attention_mask, a mask of gossamer, cannot be used by {getattr(function, '__name__', function)}: this "
            'model computes with its mask itself; use attn_implementation="eager"'
        )

    def __add__(self, other: Any) -> Any:
        return self.__torch_function__("+", ())

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __add__

    def to(self, *device: Any, **options: Any) -> Mask:
        """Itself: the layers' devices are minded when they ask for lengths."""
        return self

    def contiguous(self) -> Mask:
        """Itself."""
        return self

    def __getitem__(self, index: Any) -> Mask:
        whole = index if isinstance(index, tuple) else (index,)
        for at, n in zip(whole, self.shape, strict=False):
            if not isinstance(at, slice) or range(*at.indices(n)) != range(n):
                raise Unsupported(
                    f"attention_mask, a mask of gossamer for (Q, K) = {self.shape[2:]}, cannot be cut as this model "
                    f'does, by {show(index)}; use attn_implementation="sdpa"'
                )
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"attention_mask, a mask of gossamer, has no {name!r}, which this model or code asks for; "
            'use attn_implementation="sdpa"'
        )

    def __repr__(self) -> str:
        return f"Mask{self.shape} of {self.pattern!r}, q_offset {self.where.offset}"

    __str__ = __repr__

    def key_lengths(self, B: int, device: torch.device) -> Tensor | None:
        """(B,) int32 on a layer's device, or None where no keys are cut off; a mask of one is for all."""
        if self.lengths is None or (self.lengths.device == device and len(self.lengths) == B):
            return self.lengths
        if (B, device) not in self._moved:
            self._moved[B, device] = self.lengths.to(device).expand(B).contiguous()
        return self._moved[B, device]

    def restricted(self, by: Pattern | None) -> Pattern:
        """The pattern, intersected with another one of absolute positions."""
        if by is None:
            return self.pattern
        found = self._restricted.get(by.handle)
        if found is None:
            first = self.where.kv_offset
            here = by if not first or of_distances(by) else Shifted(by, first)
            found = self._restricted[by.handle] = (both(self.pattern, here), by)
        return found[0]

    def separate(self, positions: Tensor) -> None:
        """Keep the documents of packed positions (1 or B, Q) apart, where the mask function was not told of them.

        As transformers finds them: a step other than 1 begins a document. A mask with padding or a past says itself
        what its positions are. Read once in a forward.
        """
        w = self.where
        if self.padded or self._names_documents or w.Q != w.K or w.offset or w.kv_offset or w.Q == 1:
            return
        if positions.ndim != 2 or positions.shape[1] != w.Q or positions.shape[0] not in (1, w.B):
            return
        if self._ids is not None or not is_causal(self.pattern):
            return
        steps = np.diff(host(positions), axis=1) != 1
        self._ids = shared(np.concatenate([np.zeros((len(steps), 1), np.int64), np.cumsum(steps, 1)], 1))
        self.pattern = both(documents(self._ids), self.pattern)
        self._restricted.clear()

    def has_documents(self, cu_seq_lens: Tensor) -> bool:
        """Whether the documents that are kept apart begin and end where `cu_seq_lens` (documents + 1,) says."""
        ids = self._ids
        if ids is None and not self.padded:
            found = packed_ids(self.mask_function)
            ids = self._ids = None if found is None else host(found)
        if self._ends is None and ids is not None:
            ids = np.broadcast_to(ids, (self.where.B, ids.shape[1]))
            first = np.concatenate([np.ones((len(ids), 1), bool), np.diff(ids, axis=1) != 0], 1)
            self._ends = [*np.nonzero(first.ravel())[0].tolist(), first.size]
        if self._ends is None:
            return False
        known = self._compared.get(id(cu_seq_lens))
        if known is None or known[0] is not cu_seq_lens:
            known = self._compared[id(cu_seq_lens)] = (cu_seq_lens, host(cu_seq_lens).tolist() == self._ends)
        return known[1]


def kept_keys(pattern: Pattern, where: Where, seen: np.ndarray | None) -> tuple[Pattern, np.ndarray | None]:
    """The pattern without padding keys, and where the keys of each batch element end, if that is needed.

    Padding on the right is an end, which is data; on the left it is a first key, and with holes a mask of keys: those
    are patterns. Keys that no query of a causal pattern can see are not looked at.

    Args:
        seen: boolean (B, seen) at absolute positions; keys behind its end are padding.
    """
    if seen is None:
        return pattern, None
    last = min(where.K, max(where.offset + where.Q, 1)) if is_causal(pattern) else where.K
    keys = np.zeros((len(seen), last), dtype=bool)
    given = seen[:, where.kv_offset : where.kv_offset + last]
    keys[:, : given.shape[1]] = given
    if keys.all():
        return pattern, None
    some = keys.any(1)
    first = np.where(some, keys.argmax(1), 0)
    end = np.where(some, last - keys[:, ::-1].argmax(1), 0)
    if (keys.sum(1) != end - first).any():
        kept = np.zeros((len(seen), where.K), dtype=bool)
        kept[:, :last] = keys
        return both(pattern, Keys(shared(kept))), None
    if first.any():
        starts = (int(first[0]),) if (first == first[0]).all() else tuple(int(x) for x in first)
        pattern = both(pattern, KeysFrom(starts))
    return pattern, end.astype(np.int32) if (end < last).any() else None


@torch.compiler.disable
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    mask_function: MaskFunction,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Mask:
    """The mask object of one forward, as `AttentionMaskInterface` asks for it.

    Args:
        q_offset, kv_offset: positions of the first query and key. A static cache gives the tensor in which it counts
            and adds to it before attention runs, so it is read here.
        mask_function: mask_function(b, h, q, kv) of absolute positions.
        attention_mask: boolean (B, seen), True where a key is no padding; keys behind its end are.
        use_vmap: whether the function may be asked for one pair at a time only, under vmap.
        others: what a mask of another implementation needs: dtype, config, whether it may be left out.

    Raises:
        ValueError: the mask function cannot be read or evaluated, or is not what its pattern says.
    """
    where = Where(int(batch_size), int(q_length), int(kv_length), int(q_offset), int(kv_offset))
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[0] != where.B):
        raise ValueError(
            f"attention_mask must be (B, positions) or (B, 1 or H, Q, K) with B = {where.B}; got shape "
            f"{tuple(attention_mask.shape)}"
        )

    def making(fn: MaskFunction, at: Where, seen: np.ndarray | None) -> tuple[Pattern, np.ndarray | None]:
        return kept_keys(Reader(at, "cpu", use_vmap).read(fn), at, seen)

    certify(mask_function, where, attention_mask, use_vmap, making)
    seen = None if attention_mask is None else attention_mask.detach().cpu().numpy().astype(bool)
    pattern, ends = kept_keys(Reader(where, device, use_vmap).read(mask_function), where, seen)
    lengths = None if ends is None else torch.from_numpy(ends).to(device)
    return Mask(mask_function, where, pattern, lengths, attention_mask is not None)
