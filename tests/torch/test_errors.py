"""What is wrong raises a ValueError that names the argument, and nothing else ever comes out."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gossamer as gs
from gossamer.layouts import BlockLayout, TileList, from_dense

q = torch.zeros(2, 4, 8, 16)
kv = torch.zeros(2, 2, 8, 16)
bad = torch.zeros
mask = torch.ones(8, 8, dtype=torch.bool)


def layout(**changes: Any) -> BlockLayout:
    """A layout for Q = K = 40 whose rows are changed."""
    made = from_dense(np.tril(np.ones((40, 40), dtype=bool)), block_q=32, block_kv=32).to("cpu")
    rows = made.rows
    lists = {name: changes.pop(name) for name in ("full", "interval", "bits") if name in changes}
    for name, fields in lists.items():
        object.__setattr__(rows, name, getattr(rows, name)._replace(**fields))
    for name, value in changes.items():
        object.__setattr__(rows, name, value)
    return made


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CALLS = {
    "q is no tensor": ((np.zeros((2, 2)), kv, kv), {}, "q must be a torch tensor; got.*from_numpy"),
    "rank 1": ((bad(8), bad(8), bad(8)), {}, r"q, k and v must all have 2, 3 or 4 dimensions.*\(8,\)"),
    "rank 5": ((bad(1, 1, 1, 8, 8),) * 3, {}, "q, k and v must all have 2, 3 or 4 dimensions"),
    "ranks differ": ((q, kv[0], kv), {}, "q, k and v must all have"),
    "integers": ((q.int(), kv.int(), kv.int()), {}, "q must be a tensor of float16.*got shape .*int32"),
    "dtypes differ": ((q, kv.double(), kv), {}, "k must be a tensor of q's dtype, float32; got .*float64"),
    "devices differ": ((q, kv, kv.to("meta")), {}, "v must be a tensor on q's device, cpu; got .*meta"),
    "batches differ": ((q, kv[[0, 1, 1]], kv), {}, "k must have B=2 batch elements, as q has, or 1; got"),
    "sizes differ": ((q, kv[..., :8], kv), {}, "k must have the head size of q, D=16; got shape"),
    "k and v differ": ((q, kv, kv[:, :, :7]), {}, "v must have the heads and positions of k"),
    "heads do not divide": ((q, bad(2, 3, 8, 16), bad(2, 3, 8, 16)), {}, "k must have a number of heads G that"),
    "no features": ((q[..., :0], kv[..., :0], kv), {}, "q must have a head size D of at least 1; got shape"),
    "no columns": ((q, kv, kv[..., :0]), {}, "v must have a head size E of at least 1; got shape"),
    "no key heads": ((q, kv[:, :0], kv[:, :0]), {}, "k must have a number of heads G that divides q's H=4; got G=0"),
    "huge head": ((bad(1, 5000),) * 3, {}, "q and v must have head sizes D, E up to 4096"),
    "sparse q": ((bad(8, 8).to_sparse_coo(),) * 3, {}, "q must be a strided tensor"),
    "scale nan": ((q, kv, kv), {"scale": float("nan")}, "scale must be a finite number.*nan"),
    "scale inf": ((q, kv, kv), {"scale": float("inf")}, "scale must be a finite number.*inf"),
    "scale text": ((q, kv, kv), {"scale": "1"}, "scale must be a number, a tensor of shape .* or None"),
    "scale huge": ((q, kv, kv), {"scale": 10**400}, "scale must be a number"),
    "softcap 0": ((q, kv, kv), {"softcap": 0.0}, "softcap must be a finite number over 0"),
    "softcap bool": ((q, kv, kv), {"softcap": True}, "softcap must be a number or None"),
    "offset float": ((q, kv, kv), {"q_offset": 1.0}, "q_offset must be an int, a 0-d integer tensor or None"),
    "offset huge": ((q, kv, kv), {"q_offset": 2**70}, "q_offset must be an integer over"),
    "offset tensor": ((q, kv, kv), {"q_offset": ints(1, 2, 3)}, "q_offset must be an int or a 0-d integer tensor"),
    "offset tensor float": ((q, kv, kv), {"q_offset": torch.tensor(1.0)}, "q_offset must be an int or a 0-d integer"),
    "lengths in a list": ((q, kv, kv), {"key_lengths": [1]}, r"a list, must hold B=2 integers.*got \[1\] \(list\)"),
    "lengths of one sequence": ((q[0], kv[0], kv[0]), {"key_lengths": [1, 2]}, "must hold B=1 integers"),
    "lengths of bools": ((q, kv, kv), {"key_lengths": [1, True]}, r"must hold B=2 int.*it holds True \(bool\)"),
    "lengths of floats": ((q, kv, kv), {"key_lengths": [1.0, 2]}, r"must hold B=2 int.*it holds 1.0 \(float\)"),
    "lengths unread": ((q, kv, kv), {"key_lengths": [ints(1)[0].to("meta"), 2]}, r"it holds shape \(\)"),
    "length": ((q, kv, kv), {"key_lengths": 3}, "must be a torch tensor, a list of integers or None; got 3"),
    "lengths shape": ((q, kv, kv), {"key_lengths": ints(1)}, r"key_lengths must have shape \(B,\) = \(2,\); got shape"),
    "lengths float": ((q, kv, kv), {"key_lengths": bad(2)}, "key_lengths must be integers: int8, .*; got .*float32"),
    "sink shape": ((q, kv, kv), {"sink_logits": bad(2)}, r"sink_logits must have shape \(H,\) = \(4,\)"),
    "sink integers": ((q, kv, kv), {"sink_logits": ints(1, 2, 3, 4)}, "sink_logits must be float16"),
    "alibi shape": ((q, kv, kv), {"alibi_slopes": bad(4, 1)}, "alibi_slopes must have shape"),
    "alibi grad": ((q, kv, kv), {"alibi_slopes": bad(4).requires_grad_()}, "alibi_slopes must be a constant"),
    "lengths of a reordered graph": (
        (q, q, q, gs.CSR.from_edge_index([[1], [2]], 8).reordered()), {"key_lengths": ints(1, 2)},
        "key_lengths must be None with a reordered pattern",
    ),
    "merge": ((q, kv, kv, gs.Causal()), {"merge": "lse"}, "pattern must be a union|merge must be None: each term of C"),
    "implementation": ((q, kv, kv), {"implementation": "cuda"}, "must be None or one of small, hopper, triton, block"),
    "implementation type": ((q, kv, kv), {"implementation": 3}, "implementation must be a name or None"),
    "return_lse": ((q, kv, kv), {"return_lse": 1}, "return_lse must be True or False"),
    "return_lse with merge": (
        (q, kv, kv, gs.Causal() | gs.Local(3)), {"return_lse": 1, "merge": "lse"}, "return_lse must be True or False",
    ),
    "layout": ((q, kv, kv), {"layout": "bnhd"}, r'layout must be "bhnd".*or "bshd".*got .bnhd. \(str\)'),
    "tensor as layout": ((q, kv, kv), {"layout": q}, 'layout must be "bhnd"'),
    "layout of others": ((q, kv[0], kv), {"layout": "bshd"}, r"dimensions: \(N, D\), \(N, H, D\) or \(B, N, H, D\);"),
    "deterministic": ((q, kv, kv), {"deterministic": "yes"}, "deterministic must be True, False or None"),
    "pattern text": ((q, kv, kv, "causal"), {}, "pattern must be None, a Pattern or its handle.*got 'causal'"),
    "causality": ((q, kv, kv, True), {}, r"pattern must be None.*got True \(bool\); causal attention is Causal\(\)"),
    "pattern class": ((q, kv, kv, gs.Causal), {}, r"pattern must be None, a Pattern.*a class, Causal\(...\) is a pat"),
    "patterns": ((q, kv, kv, [gs.Causal()] * 4), {}, r"pattern must be None.*; PerHead\(patterns\) gives each"),
    "function": ((q, kv, kv, lambda b, h, i, j: i >= j), {}, r"pattern must be None.*; Predicate\(fn\) takes a func"),
    "scipy": ((q, kv, kv, scipy.sparse.eye(8)), {}, r"got dia_matrix of shape \(8, 8\).*; CSR.from_scipy\(matrix"),
    "edges": ((q, kv, kv, torch.zeros(2, 9).int()), {}, r"pattern must be None.*; CSR.from_edge_index\(edges, num_n"),
    "batch of matrices": ((q, kv, kv, torch.ones(2, 8, 8).to_sparse_coo()), {}, r"None.*; of a batch give PerBatch"),
    "coo": ((q, kv, kv, torch.eye(8).to_sparse()), {}, r"pattern must be None.*; CSR.from_torch\(tensor\) takes"),
    "mask of floats": ((q, kv, kv, bad(8, 8)), {}, "pattern must be .*boolean mask.*float32.*; of an additive mask"),
    "mask of integers": ((q, kv, kv, mask.int()), {}, "pattern must be .*boolean mask.*int32.*; of a mask of integers"),
    "numpy mask": ((q, kv, kv, mask.numpy()), {}, "pattern must be .*boolean mask.*; a mask is given as a tensor"),
    "mask of keys": ((q, kv, kv, mask[:2]), {}, r"a dense mask, must be.*; a mask of keys \(B, K\) is given as"),
    "mask shape": ((q, kv, kv, mask[:7]), {}, r"pattern, a dense mask, must .*\(2, 4, 8, 8\); got shape \(7, 8\)"),
    "mask rank": ((q, kv, kv, mask[None, None, None]), {}, "pattern, a dense mask, must be boolean"),
    "mask scalar": ((q, kv, kv, mask[0, 0]), {}, "pattern, a dense mask, must be boolean"),
    "sizes of the pattern": ((q, kv, kv, gs.BlockMask(np.ones((3, 3), bool), 8)), {}, "BlockMask must have 1 x 1"),
    "heads of the pattern": ((q, kv, kv, gs.PerHead([gs.Causal()] * 3)), {}, "3 query heads, the inputs have 4"),
    "batch of the pattern": ((q, kv, kv, gs.Document(np.zeros((3, 8), int))), {}, "3 batch elements"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_attention_and_explain(call: str) -> None:
    args, options, message = CALLS[call]
    with pytest.raises(ValueError, match=message):
        gs.attention(*args, **options)
    with pytest.raises(ValueError, match=message):
        gs.explain(*args, **options)


long, long_kv = bad(2, 40, 4, 16), bad(2, 32, 2, 16)  # (B, N, heads, D)
OTHER = {
    "heads": ((long, long_kv, long_kv), {}),
    "k and v": ((long, bad(2, 40, 2, 16), bad(2, 40, 4, 16)), {}),
    "sinks": ((long, long, long), {"sink_logits": bad(4)}),
    "slopes": ((long, long, long), {"alibi_slopes": bad(4), "alibi_distance": "signed"}),
    "pattern": ((long, long, long, gs.Document(np.zeros(40, int))), {}),
    "heads of the pattern": ((long, long, long, gs.PerHead([gs.Causal()] * 4)), {}),
    "mask": ((long, long, long, torch.ones(40, 40, dtype=torch.bool)), {}),
    "layout": ((long, long, long, layout()), {}),
}


@pytest.mark.parametrize("name", OTHER)
def test_inputs_of_the_other_layout(name: str) -> None:
    """What is wrong as (B, H, N, D) and right as (B, N, H, D), or the other way round, says so; all else does not."""
    args, options = OTHER[name]
    fits = "must" if name == "k and v" else 'sizes fit in the other layout: .*layout="bshd"'
    turned = tuple(x.transpose(1, 2) for x in args[:3])
    for function in (gs.attention, gs.explain):
        for made, right, wrong in ((args, "bshd", "bhnd"), ((*turned, *args[3:]), "bhnd", "bshd")):
            with pytest.raises(ValueError, match=fits) as raised:
                function(*made, **options, layout=wrong)
            if fits != "must":
                function(*made, **options, layout=right)
            else:
                assert "layout" not in str(raised.value)
    with pytest.raises(ValueError, match="q must have a head size") as raised:  # wrong in both
        gs.attention(long[..., :0], long[..., :0], long)
    assert "layout" not in str(raised.value)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
    NESTED = torch.nested.nested_tensor([torch.zeros(2, 16), torch.zeros(3, 16)])
SAID_OF_NESTED = {
    "q": ((NESTED, kv, kv), {}, "q must be a tensor of one shape; got a nested tensor, float32, cpu; pack sequences"),
    "v": ((q, kv, NESTED), {}, "v must be a tensor of one shape; got a nested tensor"),
    "pattern": ((q, kv, kv, NESTED), {}, "pattern must be None.*; got a nested tensor"),
    "key_lengths": ((q, kv, kv), {"key_lengths": NESTED}, "key_lengths must be a tensor of one shape; got a nested"),
    "q_offset": ((q, kv, kv), {"q_offset": NESTED}, "q_offset must be a tensor of one shape; got a nested tensor"),
}


@pytest.mark.parametrize("call", SAID_OF_NESTED)
def test_nested_tensors(call: str) -> None:
    args, options, message = SAID_OF_NESTED[call]
    for function in (gs.attention, gs.explain):
        with pytest.raises(ValueError, match=message):
            function(*args, **options)


@pytest.mark.parametrize("name", ["implementation", "merge", "deterministic", "pattern", "return_lse"])
def test_long_values_are_shortened(name: str) -> None:
    for value in ("x" * 10**6, [0] * 10**6, 10**5000):
        with pytest.raises(ValueError, match=name) as raised:
            gs.attention(q, kv, kv, **{name: value})
        assert len(str(raised.value)) < 600


def test_a_block_mask_of_another_size_is_called_one() -> None:
    with pytest.raises(ValueError, match=r"BlockMask, must have \(Q, K\) of the inputs"):
        gs.attention(q, kv, kv, gs.to_flex(gs.Causal(), 300, 300))


LAYOUTS = {
    "sizes": (lambda: gs.Causal().layout(8, 40, block_q=32, block_kv=32), r"\(Q, K\) of the inputs, \(40, 40\)"),
    "index": (lambda: layout(bits={"indices": ints(0, 7)}), r"bits.indices in \[0, 2\); got 7"),
    "negative index": (lambda: layout(bits={"indices": ints(0, -1)}), "bits.indices in"),
    "count": (lambda: layout(full={"counts": ints(0, 9).view(1, 1, 2)}), "full.starts and counts within its"),
    "start": (lambda: layout(bits={"starts": ints(0, -3).view(1, 1, 2)}), "bits.starts and counts within its"),
    "pool entry": (lambda: layout(pool_index=ints(0, 9)), r"pool_index in \[0,"),
    "ragged full tile": (
        lambda: layout(full={"counts": ints(0, 1).view(1, 1, 2), "indices": ints(1, 1)}),
        "full.indices no tile that reaches past the last key",
    ),
    "twice": (lambda: layout(bits={"indices": ints(0, 0)}), "no tile listed twice; got one that is listed twice$"),
    "shape of counts": (lambda: layout(full={"counts": ints(0, 1, 2).view(1, 1, 3)}), "full.(starts|counts) of shape"),
    "pool shape": (lambda: layout(pool=torch.zeros(3, 32, 2, dtype=torch.int32)), r"pool \(P, 32, 1\)"),
    "dtype": (lambda: layout(pool_index=torch.zeros(2, dtype=torch.int64)), "of int32 on cpu"),
    "missing": (lambda: layout(pool_index=None), "array 11 is None"),
    "block": (lambda: layout(block_rows=33), "block_q a multiple of 32"),
    "intervals without bounds": (
        lambda: layout(interval=TileList(*layout().rows.bits)._asdict(), bits=layout().rows.interval._asdict(),
                       pool_index=torch.zeros(0, dtype=torch.int32)),
        "lo of shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_users_layout(name: str) -> None:
    make, message = LAYOUTS[name]
    x = torch.zeros(1, 1, 40, 16)
    assert gs.attention(x, x, x, layout()).shape == x.shape
    with pytest.raises(ValueError, match=message):
        gs.attention(x[:, :, :40], x, x, make())


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(), st.floats(), st.text(max_size=3),
    st.sampled_from([np.int64(3), np.float32(2), np.bool_(True), object, torch.tensor(3), "causal"]),
)  # fmt: skip
arrays = st.one_of(
    st.lists(st.integers(-2, 9), max_size=9),
    st.lists(st.lists(st.booleans(), max_size=4), max_size=4),
    st.builds(lambda shape, kind: np.ones(shape, kind), st.lists(st.integers(0, 4), max_size=5),
              st.sampled_from(["bool", "int8", "uint64", "float32", "U3", "object"])),
    st.builds(lambda shape: torch.ones(shape, dtype=torch.int32), st.lists(st.integers(0, 3), max_size=3)),
)  # fmt: skip
ids = gs.DocumentIds(torch.zeros(5, dtype=torch.int32))
anything = st.one_of(scalars, arrays, st.sampled_from([gs.Causal(), gs.PerHead([gs.Causal(), gs.Dense()]), ids]))
pattern_lists = st.lists(st.one_of(st.sampled_from([gs.Causal(), gs.PerHead([gs.Causal()])]), scalars), max_size=3)

CONSTRUCTORS: dict[str, tuple[Any, int]] = {
    "SlidingWindow": (gs.SlidingWindow, 3),
    "Local": (gs.Local, 1),
    "BlockMask": (gs.BlockMask, 2),
    "BigBird": (gs.BigBird, 6),
    "Longformer": (gs.Longformer, 3),
    "Dilated": (gs.Dilated, 3),
    "Strided": (gs.Strided, 2),
    "Neighborhood": (gs.Neighborhood, 2),
    "PowerStrided": (gs.PowerStrided, 2),
    "Document": (gs.Document, 1),
    "Document.from_cu_seqlens": (gs.Document.from_cu_seqlens, 1),
    "DocumentIds": (gs.DocumentIds, 1),
    "DocumentIds.from_cu_seqlens": (gs.DocumentIds.from_cu_seqlens, 2),
    "BlockIndices": (gs.BlockIndices, 3),
    "CSR": (gs.CSR, 3),
    "CSR.from_scipy": (gs.CSR.from_scipy, 1),
    "CSR.from_torch": (gs.CSR.from_torch, 1),
    "CSR.from_edge_index": (gs.CSR.from_edge_index, 2),
    "Predicate": (gs.Predicate, 1),
    "PerHead": (gs.PerHead, 1),
    "PerBatch": (gs.PerBatch, 1),
}
relaxed = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(data=st.data())
def test_malformed_constructors(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CONSTRUCTORS)))
    make, most = CONSTRUCTORS[name]
    first = st.one_of(anything, pattern_lists) if name in ("PerHead", "PerBatch") else anything
    least = {"BigBird": 0, "BlockIndices": 1, "BlockMask": 2, "CSR": 3, "Dilated": 3}.get(name, most)
    args = [data.draw(first if i == 0 else anything) for i in range(max(least, 1))]
    try:
        pattern = make(*args)
    except ValueError:
        return
    try:
        x = torch.zeros(1, 2, 9, 4)
        assert gs.attention(x, x, x, pattern).shape == x.shape
    except ValueError:
        return


tensors = st.builds(
    lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
    st.one_of(st.just([1, 2, 5, 4]), st.just([5, 4]), st.lists(st.integers(0, 5), max_size=5)),
    st.sampled_from([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.bool,
                     torch.complex64, torch.float8_e4m3fn]),
    st.sampled_from(["cpu", "cpu", "cpu", "cpu", "meta"]),
)  # fmt: skip
masks = st.builds(lambda shape: torch.ones(shape, dtype=torch.bool), st.lists(st.sampled_from([1, 2, 5]), max_size=5))
patterns = st.one_of(
    anything, masks, st.just(gs.SlidingWindow(2)), st.just(layout()), st.builds(lambda: gs.CSR([0, 1], [0], 1))
)
KEYWORDS = (
    "scale", "q_offset", "key_starts", "key_lengths", "softcap", "sink_logits", "alibi_slopes", "alibi_distance",
    "return_lse", "implementation", "deterministic", "layout",
)  # fmt: skip


@relaxed
@given(data=st.data())
def test_malformed_calls(data: st.DataObject) -> None:
    good = torch.zeros(1, 2, 5, 4)
    qkv = [data.draw(st.one_of(st.just(good), st.just(good), tensors, scalars)) for _ in range(3)]
    names = data.draw(st.lists(st.sampled_from(KEYWORDS), max_size=2, unique=True))
    options = {name: data.draw(st.one_of(anything, tensors)) for name in names}
    pattern = data.draw(st.one_of(st.none(), patterns))
    try:
        gs.attention(*qkv, pattern, **options)
        gs.explain(*qkv, pattern, **options)
    except ValueError:
        return
