"""The mask object that a model's layers share: what it keeps is said by rules of the device, made once in a forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from gossamer.checks import show
from gossamer.integrations.transformers.certificate import certify
from gossamer.integrations.transformers.device import (
    ON_DEVICE,
    ON_HOST,
    ONCE,
    Ends,
    KeptPairs,
    Read,
    Rules,
    Where,
    at_numbers,
    ends_of,
    is_causal,
    padded,
    reach_by,
    rules_of,
)
from gossamer.integrations.transformers.host import evaluate, host, name_of, pattern_of, shared
from gossamer.integrations.transformers.patterns import Keys, Shifted, both, of_distances
from gossamer.integrations.transformers.reading import MaskFunction, Pairs, Same, Unreadable, read
from gossamer.layouts import BlockLayout, GatherLayout
from gossamer.patterns import Pattern
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import describe
from gossamer.torch.device_layout import device_layout
from gossamer.torch.key import differentiable
from gossamer.torch.structure import Structure

# What a device asserts where nothing can be read.
WRONG = (
    "attention_mask must have no hole between two keys, and ids of documents must not return, in a compiled function "
    "and while a CUDA graph is captured: gossamer reads nothing there"
)
NO_RULES = (
    "what it keeps has no rules on a device (docs/models/transformers.md), and is read on the host, which cannot be in "
    "a compiled function or while a CUDA graph is captured. torch.compile(fullgraph=False) breaks its graph there"
)


class Making(NamedTuple):
    """A mask function and the keys of one call: from it follows what is kept."""

    fn: MaskFunction
    where: Where
    device: torch.device | str
    use_vmap: bool
    pairs: Pairs | None  # None: symbols do not read it
    keys: Tensor | None  # (1 or B, K) booleans: those that are no padding
    documents: tuple[Same, ...] = ()  # kept apart beside what the mask function says

    def kept(self) -> KeptPairs:
        """By rules of the device where it has them, else by a pattern that is planned on the host.

        Where values can be read, a few truths about them are, together, once: a mask without padding and documents is
        a pattern of numbers, of which one plan serves every forward.

        Raises:
            Unsupported: values cannot be read, and there are no rules.
        """
        unread = blind()
        if not unread and self.keys is not None and self.keys.all():
            return self._replace(keys=None).kept()
        proposal = self.rules()
        if proposal is None:
            if unread:
                raise Unsupported(f"mask function {name_of(self.fn)}: {NO_RULES}")
            return self.on_host()
        rules, ends = proposal.read.rules, proposal.ends
        needed = proposal.read.right if ends is None else (*proposal.read.right, ends.whole)
        if unread:
            if len(needed) > 0:
                torch._assert_async(torch.stack(needed).all(), WRONG)
            return self.kept_by(rules, *proposal.interval)
        ends_of_keys = () if ends is None else (ends.all, ends.from_first)
        truths = iter(truths_of([*needed, *proposal.read.alike, *ends_of_keys]))
        right, alike = ([next(truths) for _ in some] for some in (needed, proposal.read.alike))
        every, from_first = truths if ends is not None else (True, True)
        if not all(right):
            return self.on_host()
        rules = Rules(rules.reach, tuple(ids for ids, one in zip(rules.ids, alike, strict=True) if not one))
        starts, lengths = proposal.interval
        return self.kept_by(rules, None if from_first or every else starts, None if every else lengths)

    def kept_by(self, rules: Rules, starts: Tensor | None, lengths: Tensor | None) -> KeptPairs:
        """The pairs that rules keep of an interval of keys, without data of one plan."""
        reads_data = len(rules.ids) > 0 or starts is not None or isinstance(self.where.q_offset, Tensor)
        return KeptPairs(rules, starts, lengths, ON_DEVICE if reads_data else ONCE)

    def rules(self) -> Proposal | None:
        """The pairs that rules of the device keep, and the conditions for that."""
        if self.pairs is None:
            return None
        pairs = self.pairs & Pairs(same=self.documents)
        rules = rules_of(pairs, self.where, self.device)
        if rules is None:
            return None
        keys = self.keys
        for more in rules.keys:
            keys = more if keys is None else keys & more
        return Proposal(rules, None if keys is None else ends_of(keys, self.where, is_causal(pairs)))

    def on_host(self) -> KeptPairs:
        """The kept pairs, by a pattern that is planned on the host."""
        where, pattern = at_numbers(self.where), None
        if self.pairs is not None:
            try:
                pattern = pattern_of(self.pairs & Pairs(same=self.documents), where)
            except Unreadable:
                pattern = None
        if pattern is None:
            pattern = evaluate(self.fn, where, self.device, self.use_vmap)
            pattern = both(pattern, pattern_of(Pairs(same=self.documents), where))
        keys = None if self.keys is None else host(self.keys) != 0
        pattern = pattern if keys is None or keys.all() else both(pattern, Keys(shared(keys)))
        return KeptPairs(pattern, planned=ON_HOST)

    def every(self) -> list[KeptPairs]:
        """The kept pairs by every way that there is, for offsets that are integers."""
        proposal, ways = self.rules(), [self.on_host()]
        if proposal is not None:
            ends = proposal.ends
            truths = truths_of([*proposal.read.right, *([] if ends is None else [ends.whole])])
            ways += [self.kept_by(proposal.read.rules, *proposal.interval)] * all(truths)
        return ways


class Proposal(NamedTuple):
    """The pairs that rules would keep, and where the keys begin and end."""

    read: Read
    ends: Ends | None

    @property
    def interval(self) -> tuple[Tensor | None, Tensor | None]:
        """(starts, lengths)."""
        return (None, None) if self.ends is None else (self.ends.starts, self.ends.lengths)


def truths_of(truths: list[Tensor]) -> list[bool]:
    """0-d booleans, read together."""
    return torch.stack(truths).tolist() if truths else []


def blind() -> bool:
    """Whether no value can be read: in a compiled function, and while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Attended(NamedTuple):
    """The arguments that a layer gives `attention`."""

    pattern: Pattern | Structure
    options: dict[str, Any]  # q_offset, key_starts, key_lengths
    planned: str


class Mask(BlockMask):
    """The `attention_mask` of a model by `make_mask`: no tensor, and no N x N pairs anywhere.

    A `BlockMask` by class alone, for this is what transformers hands on as it is. It offers what `generate` and hooks
    ask of a mask: `.shape`, `.to`, `.contiguous`. All that a cache changes later was copied when it was made.
    """

    def __init__(self, making: Making) -> None:
        self.making = making
        self.where = making.where
        self.kept = making.kept()
        self._layouts: list[tuple[Any, BlockLayout | GatherLayout]] = []
        self._restricted: list[tuple[Pattern, KeptPairs]] = []
        self._compared: list[Tensor] = []

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, 1, Q, K)."""
        return self.where.B, 1, self.where.Q, self.where.K

    @property
    def ndim(self) -> int:
        """4: (B, 1, Q, K)."""
        return 4

    def dim(self) -> int:
        """4: (B, 1, Q, K)."""
        return 4

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
        """The mask itself: the devices of layers count when they ask for their pairs."""
        return self

    def contiguous(self) -> Mask:
        """The mask itself."""
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
        return f"Mask{self.shape} of {self.kept.what!r}"

    __str__ = __repr__

    def attended(self, by: Pattern | None, B: int, device: torch.device) -> Attended:
        """The pattern and structure that the layers of a batch on a device attend to.

        Args:
            by: a pattern of absolute positions that restricts them.
        """
        kept, where = self.kept if by is None else self._restricted_by(by), self.where
        starts, lengths = (None if x is None else x.to(device).expand(B) for x in (kept.starts, kept.lengths))
        options: dict[str, Any] = {"q_offset": where.offset, "key_starts": starts, "key_lengths": lengths}
        what = kept.what
        if isinstance(what, Rules):
            if kept.planned == ON_DEVICE or torch.compiler.is_compiling():
                return Attended(what.structure(device), options, ON_DEVICE)
            what = what.pattern
        options["q_offset"] = None if where.read_offset == where.K - where.Q else where.read_offset
        return Attended(what, options, kept.planned)

    def layout(
        self, attended: Attended, by: Pattern | None, q: Tensor, k: Tensor, v: Tensor, softcap: float | None,
        sink_logits: Tensor | None,
    ) -> BlockLayout | GatherLayout:  # fmt: skip
        """The structure of a layer, made once for all layers that are alike."""
        # A compiled function has one tile for all numbers of heads, and lists of keys whether it trains or not.
        eager = not torch.compiler.is_compiling()
        heads = (q.shape[0], q.shape[1], k.shape[1]) if eager else None
        gradient = eager and differentiable(q, k, v, sink_logits)
        alike = (
            None if by is None else reach_by(by), q.device, q.dtype, torch.is_autocast_enabled(q.device.type),
            gradient, heads, q.shape[3], v.shape[3], softcap is None, sink_logits is None,
        )  # fmt: skip
        for known, layout in self._layouts:
            if known == alike:
                return layout
        made = device_layout(q, k, v, attended.pattern, **attended.options, softcap=softcap, sink_logits=sink_logits)
        assert isinstance(made, (BlockLayout, GatherLayout))  # of no pages
        self._layouts.append((alike, made))
        return made

    def foresee(self, config: Any, dtype: torch.dtype) -> None:
        """Make the structure that the layers of a model probably ask for, while a function is compiled.

        A layer whose activations are checkpointed may keep nothing there. What nobody asks for is no part of the graph.
        """
        heads = getattr(config, "num_attention_heads", None)
        D = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
        if not D or not self.has_rules(None):
            return
        w, device = self.where, torch.device(self.making.device)
        x = torch.empty(w.B, 1, w.Q, D, device=device, dtype=dtype)
        y = torch.empty(w.B, 1, w.K, D, device=device, dtype=dtype)
        softcap = getattr(config, "attn_logit_softcapping", None)
        self.layout(self.attended(None, w.B, device), None, x, y, y, softcap, None)

    def has_rules(self, by: Pattern | None) -> bool:
        """Whether what is kept of another pattern, too, is said by rules of the device."""
        return isinstance(self.kept.what, Rules) and (by is None or reach_by(by) is not None)

    def _restricted_by(self, by: Pattern) -> KeptPairs:
        """The pairs that another pattern keeps as well."""
        kept, where, reach = self.kept, self.where, reach_by(by)
        compiling = torch.compiler.is_compiling()
        if isinstance(kept.what, Rules) and reach is not None and (compiling or kept.planned == ON_DEVICE):
            ids = kept.what.ids
            for block in reach.blocks:  # they are of absolute positions
                position = torch.arange(where.K, device=self.making.device)[None] + where.kv_offset
                ids = (*ids, position // block)
            return kept._replace(what=Rules(kept.what.reach.both(reach._replace(blocks=())), ids))
        if kept.planned != ONCE and blind():
            raise Unsupported(f"restrict={by!r}: {NO_RULES}")
        for known, restricted in self._restricted:
            if known is by:
                return restricted
        if isinstance(kept.what, Rules):
            kept = self.making.on_host() if kept.planned == ON_DEVICE else kept._replace(what=kept.what.pattern)
        here = by if not where.kv_offset or of_distances(by) else Shifted(by, where.kv_offset)
        assert isinstance(kept.what, Pattern)
        restricted = kept._replace(what=both(kept.what, here))
        self._restricted.append((by, restricted))
        return restricted

    def separate(self, positions: Tensor) -> None:
        """Keep the documents of packed positions (1 or B, Q) apart, where the mask function was not told of them.

        As transformers finds them: a step other than 1 begins a document. A mask with padding or a past says itself
        what its positions are.
        """
        making, w = self.making, self.where
        if making.pairs is None or making.keys is not None or w.Q != w.K or w.Q == 1 or w.kv_offset:
            return
        if len(making.pairs.same) + len(making.documents) > 0 or not is_causal(making.pairs):
            return
        if not isinstance(w.q_offset, Tensor) and w.q_offset:
            return
        if positions.ndim != 2 or positions.shape[1] != w.Q or positions.shape[0] not in (1, w.B):
            return
        ids = F.pad(positions.diff(dim=1) != 1, (1, 0)).cumsum(1)
        self.making = making._replace(documents=(Same(ids),))
        self.kept = self.making.kept()
        self._layouts, self._restricted = [], []

    def check_documents(self, name: str, cu_seq_lens: Tensor) -> None:
        """Raise unless the documents that are kept apart begin and end where `cu_seq_lens` (documents + 1,) says."""
        if any(known is cu_seq_lens for known in self._compared):
            return
        making = self.making
        every = making.documents if making.pairs is None else (*making.pairs.same, *making.documents)
        ids = [same.values for same in every if same.values is not None and same.at is None]
        wrong = (
            f"{name} must be None, or have the documents of packed position_ids in a causal model, where "
            f"attention_mask is None and use_cache is False; got {describe(cu_seq_lens)}"
        )
        if not ids or making.keys is not None or cu_seq_lens.ndim != 1:
            raise Unsupported(wrong)
        right = same_documents(ids[0].expand(self.where.B, -1), cu_seq_lens)
        if blind():
            torch._assert_async(right, wrong)
        elif not right:
            raise Unsupported(wrong)
        self._compared.append(cu_seq_lens)


def same_documents(ids: Tensor, cu_seq_lens: Tensor) -> Tensor:
    """Whether the runs of ids (B, K), row behind row, are [cu_seq_lens[n], cu_seq_lens[n + 1]): a 0-d boolean."""
    first = F.pad(ids.diff(dim=1) != 0, (1, 0), value=True).flatten()
    edges = cu_seq_lens.to(ids.device, torch.int64)
    place = torch.arange(first.numel(), device=ids.device)
    number = torch.searchsorted(edges, place, right=True)
    ends = (edges[:1] == 0) & (edges[-1:] == first.numel()) & (edges.diff() > 0).all()
    return ends.all() & (number == first.cumsum(0)).all()


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
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **others: Any,
) -> Mask:
    """The mask object of one forward, as `AttentionMaskInterface` asks for it.

    Args:
        q_offset, kv_offset: positions of the first query and key. A static cache gives the tensor in which it counts
            and adds to it before attention runs, so it is copied here; it is not read.
        mask_function: mask_function(b, h, q, kv) of absolute positions.
        attention_mask: boolean (B, seen), True where a key is no padding; keys behind its end are.
        use_vmap: whether the function may be asked for one pair at a time only, under vmap.
        dtype, config: of the model.
        others: what a mask of another implementation needs: whether it may be left out.

    Raises:
        ValueError: the mask function cannot be read or evaluated, or is not what its pattern says.
    """
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()
    if isinstance(kv_offset, Tensor):
        kv_offset = int(kv_offset)
    where = Where(batch_size, q_length, kv_length, q_offset, kv_offset)
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[0] != where.B):
        raise ValueError(
            f"attention_mask must be (B, positions) or (B, 1 or H, Q, K) with B = {where.B}; got shape "
            f"{tuple(attention_mask.shape)}"
        )
    if not torch.compiler.is_compiling():
        certify(mask_function, where, attention_mask, use_vmap, making_of)
    keys = None if attention_mask is None else padded(attention_mask, where)
    making = making_of(mask_function, where, device, use_vmap, keys)
    if torch.compiler.is_compiling() and making.rules() is None:
        return outside(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device
        )
    mask = Mask(making)
    if torch.compiler.is_compiling():
        mask.foresee(config, dtype)
    return mask


def making_of(
    fn: MaskFunction, where: Where, device: torch.device | str, use_vmap: bool, keys: Tensor | None
) -> Making:
    """A mask function, read."""
    try:
        pairs = read(fn)
    except Exception:  # whatever a function of somebody else does with symbols
        pairs = None
    return Making(fn, where, device, use_vmap, pairs, keys)


outside = torch.compiler.disable(make_mask, reason=NO_RULES)
