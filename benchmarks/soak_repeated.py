"""The family `repeated`: calls of one key after another, whose structure is made on the device of ever other numbers.

The first call of a key is recorded, and the others run what it wrote down (`gossamer.torch.recording`): so each must
read what is there now. A seed is one form, with fixed sizes and types; its 3 to 6 calls differ in what their tensors
hold, whether they are the same objects, what the call is made under, and when the gradients are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from threading import Barrier, Thread
from typing import Any, NamedTuple

import soak_oracle as oracle
import soak_structure
import torch
from soak_arguments import laid_out, unbatched, vector
from soak_attention import compared, in_layout
from soak_calls import FARTHEST, INTEGERS
from soak_oracle import Spec, Terms
from soak_outcomes import Outcome, begun, outcome_of
from soak_structure import Call, Profile, joined, kept_by, made, poisoned, rule
from torch import Tensor

import gossamer as gs

PROFILE = Profile(
    (
        "documents", "documents", "edges", "sequences", "varlen", "bounds", "bounds", "Indices", "Indices",
        "BlockIndices", "BlockIndices",
    ),
    (1, 2, 7, 16, 33, 64, 65, 100, 129, 200), 40_000, ("none",),
)  # fmt: skip
REFUSED = ("cannot compute this problem",)  # by a named implementation
WHEN = ("now", "now", "overwritten", "overwritten", "last")  # the gradients are asked for
Contents = dict[str, Tensor]


class Source(NamedTuple):
    """A tensor that says what is attended: its type, and what draws its numbers, int64 on the CPU."""

    dtype: torch.dtype
    fresh: Callable[[random.Random], Tensor]
    strided: bool = False


class Form(NamedTuple):
    """What all calls of a seed share."""

    sources: dict[str, Source]
    spec: Spec
    pattern: Callable[[Contents], Any]
    options: Callable[[Contents], dict[str, Any]]  # of `attention`
    kept: Callable[[Contents], Tensor]  # (B, H, Q, K) bool on the CPU, of the numbers
    alike: tuple[tuple[str, str], ...]  # which may be one object
    on_host: bool = False  # whether numbers are given as lists and arrays, some of which come again


class Made(NamedTuple):
    """One call, computed and not yet compared."""

    call: Call
    four: list[Tensor]
    leaves: list[Tensor]
    sinks: Tensor | None
    counts: Tensor
    results: tuple[Tensor, ...]
    text: str

    def wrong(self) -> str | None:
        """What is wrong with it."""
        c = self.call
        D, Q, K = c.shape[5], c.shape[3], c.shape[4]
        terms = Terms(float(D**-0.5 if c.scale is None else c.scale), K - Q, c.softcap, None, self.sinks, None)
        found = compared(c, self.four, self.leaves, self.sinks, self.counts, terms, self.results)  # type: ignore[arg-type]
        return None if found is None else f"{self.text}: {found}"


def draw(seed: int, device: str) -> Call:
    """The form of a seed, which is the same on every machine."""
    c = soak_structure.draw("repeated", PROFILE, seed, device)
    return c._replace(mistake=None, compiled=False, shared=False, turns=3 + seed % 4, poisoned=seed % 3 > 0)


def run(c: Call) -> Outcome:
    """Compute the calls of a form and compare each with the definition."""
    return outcome_of(begun("repeated", c), partial(_run, c), lambda error: soak_structure.refusal(c, error))


def _run(c: Call, outcome: Outcome) -> Outcome:
    r = random.Random(f"repeated {c.seed} told")
    form = form_of(c, r)
    said = [f"{c.description()}\n    {form.spec}, { ({name: x.dtype for name, x in form.sources.items()}) }"]
    tensors: Contents = {}
    waiting: list[Made] = []

    def found(wrong: str | None = None) -> Outcome:
        return outcome._replace(description="\n    ".join(said), wrong=wrong)

    for turn in range(c.turns):
        numbers, ties = fresh(form, r)
        tensors, how = held(form, r, tensors, numbers, ties, c.device)
        # In float64 operations of torch read a layout on the host.
        captured = not (form.on_host or c.dtype == torch.float64)
        way = r.choice([way for way in WAYS[c.device] if captured or way is not by_a_graph])
        said.append(f"call {turn + 1}: {how}, {way.__name__}, { ({n: x.tolist() for n, x in numbers.items()}) }"[:1500])
        try:
            every = way(c, form, r, tensors, numbers)
        except Exception as error:
            outcome = found()
            raise type(error)(f"call {turn + 1}: {error}") from error
        when = r.choice(WHEN)
        said.append(f"    compared {when}")
        if when == "overwritten":
            others, ties = fresh(form, r)
            for name, x in tensors.items():
                if not x.is_inference():
                    x.copy_(others[name])
        if when == "last":
            waiting += [x._replace(text=f"call {turn + 1}, {x.text}") for x in every]
            continue
        for one in every:
            wrong = one.wrong()
            if wrong is not None:
                return found(f"call {turn + 1}, {when}: {wrong}")
    return found("; ".join(x for x in (one.wrong() for one in waiting) if x is not None) or None)


# -- what the tensors hold ------------------------------------------------------------------------------------------


def fresh(form: Form, r: random.Random) -> tuple[Contents, dict[str, str]]:
    """Numbers of every source, and which of them are those of another one."""
    numbers = {name: x.fresh(r) for name, x in form.sources.items()}
    ties = {}
    for one, other in form.alike:
        if r.random() < 0.5:
            numbers[other], ties[other] = numbers[one], one
    return numbers, ties


def held(
    form: Form, r: random.Random, before: Contents, numbers: Contents, ties: dict[str, str], device: str
) -> tuple[Contents, str]:  # fmt: skip
    """The tensors that a call is given: those of the last one with other numbers, or new ones."""
    if before and r.random() < 0.5 and not any(x.is_inference() for x in before.values()):
        # Of two that are one object, the last that is written counts.
        for name, x in before.items():
            x.copy_(numbers[name])
        numbers |= {name: numbers_in(x) for name, x in before.items()}
        return before, "written"
    inference, one = r.random() < 0.05, r.random() < 0.3
    with torch.inference_mode(inference):
        tensors = {name: placed(x, numbers[name], r, device) for name, x in form.sources.items()}
    if one:
        tensors |= {name: tensors[of] for name, of in ties.items()}
    return tensors, f"{'new' if before else 'first'}, one object {sorted(ties) if one else []}, inference {inference}"


def numbers_in(x: Tensor) -> Tensor:
    """What a tensor holds now, in memory of its own."""
    return torch.tensor(x.tolist(), dtype=torch.int64).reshape(x.shape)


def placed(source: Source, x: Tensor, r: random.Random, device: str) -> Tensor:
    """Numbers in memory of the strides of a source, at any offset of it."""
    step, n = 1 + source.strided, x.numel()
    room = torch.full((32 + step * n,), 77, dtype=source.dtype, device=device)
    at = 1 if r.random() < 0.07 else r.choice([0, 16, 32])  # not at a multiple of 16 bytes it is of another key
    where = room[at : at + step * n : step].view(x.shape)
    return where.copy_(x)


def vectors_of(r: random.Random, values: list[int], device: str) -> torch.dtype:
    """A type that holds these numbers."""
    return r.choice([t for t in INTEGERS if torch.iinfo(t).min <= min(values) and max(values) <= torch.iinfo(t).max])


# -- forms ----------------------------------------------------------------------------------------------------------


def form_of(c: Call, r: random.Random) -> Form:
    """The form of a seed."""
    if c.kind in ("sequences", "varlen"):
        return _sequences(c, r)
    B, H, G, Q, K, _, _ = c.shape
    sources: dict[str, Source] = {}
    listed = c.kind in ("Indices", "BlockIndices")
    spec = rule(r, listed)
    block = 1 if c.kind == "Indices" else r.choice([64, 128])
    if c.kind == "edges":
        n = r.choice([1, 2, 4, 9])
        sources["edges"] = Source(vectors_of(r, [0, K], c.device), lambda r: ascending(r, n + 1, K, c.device))
    if c.kind == "documents" or (listed and r.random() < 0.3):
        rows = r.choice([(), (1,), (B,)])
        sources["ids"] = Source(r.choice(INTEGERS), lambda r: _ids(r, (*rows, K)), r.random() < 0.1)
    if listed:
        heads, batch = r.choice([1, G, G, H]), r.choice([1, B])
        n = r.choice([0, 1, 2, 5, 12, 40]) if block == 1 else r.choice([1, 2, 4])
        shape, entries = (batch, heads, -(-Q // block), n), -(-K // block)
        wide = r.choice([torch.int32, torch.int64])
        sources["index"] = Source(wide, lambda r: _index(r, shape, entries, wide))
        if r.random() < 0.4:
            sources["counts"] = Source(r.choice(INTEGERS), lambda r: _numbers(r, shape[:3], [0, 1, n, n + 2]))
    narrow = r.choice(INTEGERS)
    kind = r.choice([torch.int32, torch.int64, torch.int64, narrow])
    low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
    ends = [x for x in (0, 1, K // 2, K - 1, K, K + 3, -2, low, high) if low <= x <= high]
    if r.random() < (0.6 if c.kind == "bounds" else 0.25):
        some = [x for x in (0, 1, K - Q, 5, -3, -K, K, 2 * K, low, high) if low <= x <= high]
        shape_of = (B,) if c.kind == "bounds" or r.random() < 0.7 else ()
        sources["offset"] = Source(kind, lambda r: _numbers(r, shape_of, some), r.random() < 0.2 and shape_of == (B,))
    for name, often in (("starts", 0.3), ("lengths", 0.4)):
        if r.random() < often or (name == "starts" and c.kind == "bounds" and "offset" not in sources):
            sources[name] = Source(kind, lambda r: _numbers(r, (B,), ends), r.random() < 0.2)
    fixed = None if "offset" in sources or c.kind == "bounds" or r.random() < 0.8 else r.choice([0, 5, -3, K])
    names = {"offset": "q_offset", "starts": "key_starts", "lengths": "key_lengths"}
    order = r.random() < 0.3

    def options(t: Contents) -> dict[str, Any]:
        return {"q_offset": fixed} | {names[name]: x for name, x in t.items() if name in names}

    def pattern(t: Contents) -> Any:
        of_ids = gs.DocumentIds(t["ids"]) if "ids" in t else None
        of_lists: Any = None
        if listed:
            counts = t.get("counts")
            of_lists = gs.Indices(t["index"], counts) if block == 1 else gs.BlockIndices(t["index"], block, counts)
        if c.kind == "edges":
            of_ids = gs.DocumentIds.from_cu_seqlens(t["edges"], K)
        terms = [x for x in (of_lists, of_ids) if x is not None]
        if not terms:
            return made(spec, Q, K)
        structure = terms[0] if len(terms) == 1 else terms[1] & terms[0] if order else terms[0] & terms[1]
        return joined(random.Random(c.seed), structure, spec, Q, K)

    def kept(x: Contents) -> Tensor:
        most = FARTHEST - max(Q, K)
        offsets = [K - Q if fixed is None else fixed] * B
        if "offset" in x:
            offsets = [min(max(n, -most), most) for n in x["offset"].expand(B).tolist()]
        found = kept_by(spec, Q, K, offsets, "cpu") > 0
        i, j = torch.arange(Q) + torch.tensor(offsets)[:, None], torch.arange(K)
        for number in _documents(x, K):
            mine = number.expand(B, K)
            same = (mine.gather(1, i.clamp(0, K - 1))[:, :, None] == mine[:, None]) & ((i >= 0) & (i < K))[:, :, None]
            if "edges" in x:
                same = same & (mine >= 0)[:, None]
            found = found & same[:, None]
        if listed:
            found = found & _chosen(x, block, Q, K, H)
        if "starts" in x:
            found = found & (j >= x["starts"][:, None, None, None])
        if "lengths" in x:
            found = found & (j < x["lengths"][:, None, None, None])
        return found.expand(B, H, Q, K)

    same = [n for n in ("offset", "starts", "lengths") if n in sources and sources[n].fresh(r).shape == (B,)]
    same = [n for n in same if sources[n].strided == sources[same[0]].strided]
    return Form(sources, spec, pattern, options, kept, tuple((same[0], n) for n in same[1:]))


def _sequences(c: Call, r: random.Random) -> Form:
    _, H, _, Q, K, _, _ = c.shape
    n, dtype = r.choice([1, 1, 2, 3, 6]), vectors_of(r, [0, max(Q, K)], c.device)
    on_host = r.random() < 0.4

    def edges(most: int) -> Callable[[random.Random], Tensor]:
        def fresh(r: random.Random) -> Tensor:
            return ascending(random.Random(r.choice([1, 2])) if on_host else r, n + 1, most, c.device)

        return fresh

    def told(x: Tensor | None) -> Any:
        if x is None or not on_host:
            return x
        return x.tolist() if len(x) % 2 else x.cpu().numpy()

    sources = {"q": Source(dtype, edges(Q)), "k": Source(dtype, edges(K))}
    if r.random() < 0.4:
        sources["used"] = Source(torch.int64, lambda r: _numbers(r, (n,), [0, 1, 5, K, -1, 2**40]))
    shared = Q == K and r.random() < 0.3  # by one argument
    spec: Spec = r.choice([
        ("Dense",), ("Causal",), ("Causal",), ("Local", 1 + r.randrange(9)),
        ("SlidingWindow", r.randrange(20), r.choice([0, 2, None]), 0), ("SlidingWindow", r.randrange(9), 0, 2),
        ("Or", ("Local", 5), ("SlidingWindow", 3, 0, 0)),
    ])  # fmt: skip
    if shared:
        del sources["k"]
    the_pattern = None if spec == ("Dense",) else made(spec, Q, K)

    def pattern(t: Contents) -> Any:
        return gs.PackedSequences(
            told(t["q"]), told(t.get("k")), seqused_k=told(t.get("used")), pattern=the_pattern
        )  # fmt: skip

    def options(t: Contents) -> dict[str, Any]:
        if c.kind == "sequences":
            return {}
        lengths = {"cu_seq_q": t["q"], "cu_seq_k": t.get("k"), "seqused_k": t.get("used")}
        return {name: told(x) for name, x in lengths.items()} | {"pattern": the_pattern}

    def kept(x: Contents) -> Tensor:
        of_q, of_k = x["q"].tolist(), x.get("k", x["q"]).tolist()
        found = torch.zeros((Q, K), dtype=torch.bool)
        for s in range(n):
            (a, b), (first, end) = of_q[s : s + 2], of_k[s : s + 2]
            length = end - first if "used" not in x else min(end - first, max(0, int(x["used"][s])))
            if a < b and length:
                part = oracle.kept(spec, 1, 1, b - a, length, length - (b - a), "cpu")[0, 0] > 0
                found[a:b, first : first + length] |= part
        return found.expand(1, H, Q, K)

    alike = (("q", "k"),) if Q == K and not shared else ()
    return Form(sources, spec, pattern, options, kept, alike, on_host)


def ascending(r: random.Random, n: int, most: int, device: str) -> Tensor:
    """Edges: any, of empty documents, one for all, one behind the other."""
    some = [
        [r.randrange(most + 1) for _ in range(n)],
        [r.choice([0, most]) for _ in range(n)],
        [r.randrange(most + 1)] * n,
    ]
    edges = sorted(r.choice([some[0], *some]))
    if r.random() < 0.6:
        edges[0], edges[-1] = 0, most
    return torch.tensor(sorted(edges))


def _ids(r: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Ids: runs of any length, one document, one for each position."""
    rows = []
    for _ in range(shape[0] if len(shape) > 1 else 1):
        ends = {r.randrange(shape[-1] + 1) for _ in range(r.choice([0, 1, 3, 9]))}
        labels = r.choice([[0, 1], [5, 100, 7], list(range(100))])
        now, row = 0, []
        every = r.random() < 0.1
        for at in range(shape[-1]):
            now += at in ends or every
            row.append(labels[now % len(labels)])
        rows.append(row)
    return torch.tensor(rows).reshape(shape)


def _index(r: random.Random, shape: tuple[int, ...], entries: int, dtype: torch.dtype) -> Tensor:
    """Entries: any, one alone, unused ones, ones that do not exist."""
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    index = torch.randint(-1, entries, shape, generator=generator)
    kind = r.choice(["any", "any", "same", "none", "absent", "first"])
    if kind == "same" and shape[-1]:
        index = index[..., :1].expand(shape)
    elif kind == "none":
        index = torch.where(torch.rand((*shape[:3], 1), generator=generator) < 0.5, -1, index)
    elif kind == "absent":
        far = r.choice([entries, 2**31 - 1, 2**33 if dtype == torch.int64 else entries + 1])
        index = torch.where(torch.rand(shape, generator=generator) < 0.4, far, index)
    elif kind == "first":
        index = torch.zeros_like(index)
    return index.clone()


def _numbers(r: random.Random, shape: tuple[int, ...], among: list[int]) -> Tensor:
    n = torch.Size(shape).numel()
    return torch.tensor([r.choice(among) for _ in range(n)], dtype=torch.int64).reshape(shape)


def _documents(x: Contents, K: int) -> Iterator[Tensor]:
    """The number of the document at each position, (rows, K); negative for none."""
    if "ids" in x:
        ids = x["ids"].reshape(-1, K)
        yield torch.cat([torch.zeros_like(ids[:, :1]), (ids.diff() != 0).long()], 1).cumsum(1)
    if "edges" in x:
        position, edges = torch.arange(K), x["edges"]
        which = torch.searchsorted(edges, position, right=True) - 1
        yield torch.where((which >= 0) & (which < len(edges) - 1), which, -1 - position)[None]


def _chosen(x: Contents, block: int, Q: int, K: int, H: int) -> Tensor:
    index, entries = x["index"], -(-K // block)
    there = (index >= 0) & (index < entries)
    if "counts" in x:
        there = there & (torch.arange(index.shape[-1]) < x["counts"][..., None])
    chosen = torch.zeros((*index.shape[:3], entries + 1), dtype=torch.bool)
    chosen = chosen.scatter(-1, torch.where(there, index, entries), True)[..., :entries]
    chosen = chosen.repeat_interleave(block, 2)[:, :, :Q].repeat_interleave(block, 3)[..., :K]
    return chosen.repeat_interleave(H // index.shape[1], 1)


# -- ways to call ---------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What a call is computed of."""

    call: Call
    four: list[Tensor]
    leaves: list[Tensor]
    sinks: Tensor | None
    counts: Tensor
    options: dict[str, Any]


def inputs_of(c: Call, form: Form, r: random.Random, numbers: Contents) -> Inputs:
    """New q, k, v and sinks, and options of one call."""
    B, H, G, Q, K, D, E = c.shape
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    habit = random.Random(c.seed)  # most calls of a form are of one key
    chosen = r if r.random() < 0.1 else habit
    own = ("hopper", "triton") if c.device == "cuda" else ("blocked", "reference")
    implementation, deterministic = chosen.choice([None, None, None, *own]), chosen.choice([None, False, True])
    c = c._replace(seed=r.randrange(2**31), bshd=chosen.random() < 0.4, return_lse=r.random() < 0.7)
    shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, E)
    whole = [torch.randn(s, generator=generator, dtype=torch.float64).to(c.dtype).to(c.device) for s in shapes]
    four = [laid_out(where, x) for where, x in zip(c.places, whole, strict=True)]
    counts = form.kept(numbers).long().to(c.device)
    given = poisoned(c, four, counts) if c.poisoned else four
    leaves = [unbatched(x, c.dims).requires_grad_(name in c.wanted) for x, name in zip(given, "qkv", strict=True)]
    sinks = None if c.sinks is None else vector(c.sinks, c.device).requires_grad_("s" in c.wanted)
    options = {
        "scale": c.scale, "softcap": c.softcap, "sink_logits": sinks, "return_lse": c.return_lse,
        "deterministic": deterministic,
    }  # fmt: skip
    if c.kind != "varlen":
        options["layout"] = "bshd" if c.bshd and c.dims > 2 else "bhnd"
        options["implementation"] = implementation
    return Inputs(c, four, leaves, sinks, counts, options)


def computed(x: Inputs, form: Form, tensors: Contents, layout: Any = None) -> Made:
    """The results of a call; where the named implementation refuses it, of the one that is chosen."""
    try:
        return _computed(x, form, tensors, layout)
    except ValueError as error:
        if x.options.get("implementation") is None or not any(text in str(error) for text in REFUSED):
            raise
    return _computed(x._replace(options=x.options | {"implementation": None}), form, tensors, layout)


def _computed(x: Inputs, form: Form, tensors: Contents, layout: Any) -> Made:
    c = x.call
    told = form.options(tensors)
    if c.kind == "varlen":
        found = gs.varlen(*[y[0].transpose(0, 1) for y in x.leaves], **told, **x.options)
        out, *more = found if c.return_lse else (found,)
        results = (out.transpose(0, 1)[None], *(y[None] for y in more))
    else:
        inputs = [in_layout(c, y) for y in x.leaves]
        given = (form.pattern(tensors), told) if layout is None else (layout, {})
        found = soak_structure.attention(*inputs, given[0], **given[1], **x.options)
        out, *more = found if c.return_lse else (found,)
        results = (in_layout(c, out), *more)
    said = {name: y for name, y in x.options.items() if not isinstance(y, Tensor)}  # whose numbers a graph has not
    text = f"{said}, dims {c.dims}"
    return Made(c, x.four, x.leaves, x.sinks, x.counts, results, text)


def plainly(c: Call, form: Form, r: random.Random, tensors: Contents, numbers: Contents) -> list[Made]:
    """With the gradients that the form wants."""
    return [computed(inputs_of(c, form, r, numbers), form, tensors)]


def without_gradients(c: Call, form: Form, r: random.Random, tensors: Contents, numbers: Contents) -> list[Made]:
    """Under no_grad, or in inference mode, from tensors that want gradients or not."""
    x = inputs_of(c, form, r, numbers)
    with r.choice([torch.no_grad, torch.inference_mode])():
        made = computed(x, form, tensors)
    return [made._replace(call=made.call._replace(wanted=""))]


def under_autocast(c: Call, form: Form, r: random.Random, tensors: Contents, numbers: Contents) -> list[Made]:
    """In bfloat16; not of float16, in which gradients of bfloat16 may be 0."""
    x = inputs_of(c, form, r, numbers)
    if c.dtype in (torch.float64, torch.float16):
        return [computed(x, form, tensors)]
    with torch.autocast(c.device, torch.bfloat16):
        made = computed(x, form, tensors)
    return [made._replace(call=made.call._replace(dtype=torch.bfloat16), four=[y.bfloat16() for y in x.four])]


def under_hooks(c: Call, form: Form, r: random.Random, tensors: Contents, numbers: Contents) -> list[Made]:
    """Saved tensors come back as others, with other strides."""
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda y: y.clone(memory_format=torch.contiguous_format), lambda y: y
    )
    with hooks:
        return [computed(inputs_of(c, form, r, numbers), form, tensors)]


def by_a_layout(c: Call, form: Form, r: random.Random, tensors: Contents, numbers: Contents) -> list[Made]:
    """Itself, and by the layout that is made of it once, for other q, k and v, after the structure was written to."""
    if c.kind == "varlen":
        return plainly(c, form, r, tensors, numbers)
    x = inputs_of(c, form, r, numbers)
    names = ("softcap", "sink_logits", "layout", "deterministic")
    inputs = [in_layout(x.call, y) for y in x.leaves]
    layout = gs.device_layout(
        *inputs, form.pattern(tensors), **form.options(tensors), **{name: x.options[name] for name in names}
    )
    one = computed(x, form, tensors)
    if not any(y.is_inference() for y in tensors.values()):
        others, _ = fresh(form, r)
        for name, y in tensors.items():
            y.copy_(others[name])
    other = inputs_of(c, form, r, numbers)
    same = {name: x.options[name] for name in (*names, "return_lse")} | {"implementation": None}
    other = other._replace(
        call=other.call._replace(bshd=x.call.bshd, return_lse=x.call.return_lse),
        options=other.options | same | {"sink_logits": other.sinks},
    )
    return [one, computed(other, form, tensors, layout)]


def by_threads(c: Call, form: Form, r: random.Random, tensors: Contents, numbers: Contents) -> list[Made]:
    """Two threads at the same time, with different numbers of one key."""
    others, _ = fresh(form, r)
    lies = {name: placed(x, others[name], random.Random(0), c.device) for name, x in form.sources.items()}
    seed = r.randrange(2**31)  # of one key, but for the numbers
    inputs = [inputs_of(c, form, random.Random(seed), x) for x in (numbers, others)]
    barrier = Barrier(2)
    found: list[Made] = []
    failed: list[BaseException] = []

    def compute(x: Inputs, given: Contents) -> None:
        try:
            barrier.wait()
            found.append(computed(x, form, given))
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=compute, args=pair) for pair in zip(inputs, (tensors, lies), strict=True)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for error in failed:
        raise error
    return found


def on_a_stream(c: Call, form: Form, r: random.Random, tensors: Contents, numbers: Contents) -> list[Made]:
    """On a stream of its own."""
    x, stream = inputs_of(c, form, r, numbers), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = computed(x, form, tensors)
    torch.cuda.current_stream().wait_stream(stream)
    return [made]


def by_a_graph(c: Call, form: Form, r: random.Random, tensors: Contents, numbers: Contents) -> list[Made]:
    """Captured once, and replayed over other numbers."""
    if any(y.is_inference() for y in tensors.values()):
        return plainly(c, form, r, tensors, numbers)
    # What the first numbers do not keep, others may: nothing of it is NaN.
    x, every = inputs_of(c._replace(wanted="", poisoned=False), form, r, numbers), list[Made]()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        computed(x, form, tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        made = computed(x, form, tensors)
    for _ in range(3):
        now, _ = fresh(form, r)
        for name, y in tensors.items():
            y.copy_(now[name])
        now = {name: numbers_in(tensors[name]) for name in now}
        graph.replay()
        results = tuple(y.clone() for y in made.results)
        every.append(made._replace(results=results, counts=form.kept(now).long().to(c.device), text="replayed"))
    return every


ON_CPU = (
    plainly, plainly, plainly, without_gradients, without_gradients, under_autocast, under_hooks, by_a_layout,
    by_threads,
)  # fmt: skip
WAYS = {"cpu": ON_CPU, "cuda": (*ON_CPU, on_a_stream, by_a_graph)}
