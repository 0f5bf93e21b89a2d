"""Lists of neighbours and attention over them from torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gossamer as gs
from gossamer import particles as gp
from gossamer.particles import attend_torch
from gossamer.particles.attend import Attending
from gossamer.particles.geometry import nearest
from tests.particles import oracle

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("N", "d", "radius", "kind"), [(1, 3, 0.2, "uniform"), (700, 3, 0.2, "clustered"), (90, 2, 0.5, "coincident")]
)
def test_lists_and_the_pattern_that_they_are(N: int, d: int, radius: float, kind: str, device: str) -> None:
    x = oracle.cloud(np.random.default_rng(), N, d, kind)
    neighbors = gp.Neighbors.allocate(torch.as_tensor(x, device=device), radius, 1.0)
    s = oracle.pairs(oracle.wrapped(x, (1.0,) * d).astype(np.float32), (1.0,) * d).s
    indices, unsure = neighbors.indices.cpu().numpy(), np.abs(s / radius**2 - 1) < 1e-6
    found = np.zeros((N, N + 1), dtype=int)
    np.add.at(found, (np.arange(N)[:, None], indices), 1)
    assert ((found[:, :N] == (s <= radius**2)) | unsure).all()
    assert (found[:, :N].sum(1) == neighbors.counts.cpu().numpy()).all() and not neighbors.overflow
    q, k, v = (torch.randn(N, 4, 16, device=device) for _ in range(3))
    out = gp.neighbor_attention(q, k, v, neighbors)
    given = (one.transpose(0, 1) for one in (q, k, v))
    same = gs.attention(*given, gs.Indices(neighbors.indices))
    torch.testing.assert_close(out, same.transpose(0, 1), rtol=2e-3, atol=2e-3)
    assert neighbors.update(neighbors.cells.x.flip(0)).counts.equal(neighbors.counts.flip(0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", ["dot", "gaussian", "dot+gaussian"])
def test_attention_and_its_gradients(kernel: str, device: str) -> None:
    """In float64 against the definition and differences, on a CPU; float32 of each device against that."""
    products = {"scale": 0.6} if kernel != "gaussian" else {}
    gaussian = {"bandwidth": 0.2} if kernel != "dot" else {}
    D = 4 if device == "cpu" else 16
    x = torch.rand(20, 3, dtype=torch.float64)
    q, k, v = (torch.randn(20, 2, D, dtype=torch.float64) for _ in range(3))

    def attend(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        neighbors = gp.Neighbors.allocate(x, 0.3, (1.0, None, 1.0), 32)
        q, k = (q, k) if products else (None, None)
        return gp.neighbor_attention(q, k, v, neighbors, kernel=kernel, **products, **gaussian, return_residual=True)

    inputs = [one.requires_grad_() for one in (x, q, k, v)]
    out, lse = attend(*inputs)
    exact = oracle.pairs(x.detach().numpy(), (1.0, None, 1.0))
    wanted = oracle.attention(
        exact.s,
        0.3,
        *(one.detach().numpy() for one in (q, k, v)),
        0.6 if products else 0.0,
        0.2 if gaussian else np.inf,
    )
    np.testing.assert_allclose(out.detach(), wanted.out, atol=1e-6)
    np.testing.assert_allclose(lse.detach(), wanted.lse, atol=1e-6)
    used = [one for one, needed in zip(inputs, (gaussian, products, products, True), strict=True) if needed]
    weights = torch.randn_like(out), torch.randn_like(lse)
    right = torch.autograd.grad((out, lse), used, weights)
    if device == "cpu":
        assert torch.autograd.gradcheck(lambda *given: attend(*given), inputs, eps=1e-7, atol=1e-3, rtol=1e-3)
    low = [one.detach().to(device, torch.float32).requires_grad_() for one in inputs]
    found = attend(*low)
    used = [one for one, needed in zip(low, (gaussian, products, products, True), strict=True) if needed]
    got = torch.autograd.grad(found, used, [one.to(device, torch.float32) for one in weights])
    for a, b in zip([*found, *got], [out, lse, *right], strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-3, atol=2e-3 * b.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
def test_lists_that_are_cut_give_no_numbers(device: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(300, 3, device=device)
    cut, full = gp.Neighbors.allocate(x, 0.3, 1.0, 32), gp.Neighbors.allocate(x, 0.3, 1.0)
    q, k, v = (torch.randn(300, 2, 16, device=device, requires_grad=True) for _ in range(3))
    out = gp.neighbor_attention(q, k, v, cut)
    over, absent = full.counts > 32, out.isnan().all(-1).all(-1)
    assert cut.overflow and 0 < over.sum() < 300
    assert absent[over].all()
    if device == "cpu":  # on a GPU the lists of groups of particles are cut as well
        assert torch.equal(absent, over)
    whole = gp.neighbor_attention(q, k, v, full)
    torch.testing.assert_close(out[~absent], whole[~absent], rtol=2e-3, atol=2e-3)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    right = torch.autograd.grad(whole.sum(), (q, k, v))
    for a, b in zip(got, right, strict=True):
        assert a[over].isnan().any(-1).all()
        sure = ~a.isnan()
        torch.testing.assert_close(a[sure], b[sure], rtol=2e-3, atol=2e-3)
    x.requires_grad_()  # positions are in no score: nothing that is not a number reaches their gradient
    out = gp.neighbor_attention(q, k, v, gp.Neighbors.allocate(x, 0.3, 1.0, 32))
    (dx,) = torch.autograd.grad(out.sum(), x, allow_unused=True)
    assert dx is None or not dx.any()


@pytest.mark.parametrize("by", ["chunks", "products"])
def test_gradients_of_keys_that_cut_lists_leave_out(by: str) -> None:
    """Few neighbours: a key may be in no cut list, and yet lack what a cut row would have given it. Also no room."""
    for seed in range(10):
        torch.manual_seed(seed)
        N, capacity = int(torch.randint(20, 120, (1,))), int(torch.randint(2, 6, (1,))) * (seed > 0)
        x = torch.rand(N, 2)
        cut, full = gp.Neighbors.allocate(x, 0.12, 1.0, capacity), gp.Neighbors.allocate(x, 0.12, 1.0)
        q, k, v = (torch.randn(N, 2, 8, requires_grad=True) for _ in range(3))
        dout = torch.randn(N, 2, 8)

        def gradients(lists: gp.Neighbors) -> tuple[torch.Tensor, ...]:
            if by == "chunks":
                out = gp.neighbor_attention(q, k, v, lists, scale=0.3)  # noqa: B023
            else:  # as it is computed in float32 on a GPU
                order, back = attend_torch._moves(lists)
                moved = (one[order].transpose(0, 1)[None] for one in (q, k, v))  # noqa: B023
                out = attend_torch._products(Attending(0.3, None, (1.0, 1.0)), lists, *moved).out[back]
            return torch.autograd.grad(out, (q, k, v), dout)  # noqa: B023

        over = full.counts > capacity
        for found, right in zip(gradients(cut), gradients(full), strict=True):
            assert found[over].isnan().all()
            sure = ~found.isnan()
            torch.testing.assert_close(found[sure], right[sure], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("N", "d", "box", "radius", "kind", "capacity"),
    [
        (1, 3, (1.0,) * 3, 0.2, "uniform", None),
        (64, 2, (1.0, None), 0.2, "uniform", None),
        (300, 1, (1.0,), 0.5, "coincident", None),
        (1000, 3, (1.0, None, 0.9), 0.2, "clustered", None),
        (3000, 3, (None,) * 3, 0.1, "far outside", None),
        (2500, 2, (1.0, 1.0), 0.05, "uniform", None),
        (3000, 3, (1.0,) * 3, 0.15, "clustered", 40),
        (500, 3, (1.0,) * 3, 0.1, "one place", None),
    ],
)
def test_lists_of_the_kernel_are_those_of_float32(
    N: int, d: int, box: tuple[float | None, ...], radius: float, kind: str, capacity: int | None
) -> None:
    """To the bit: r^2 is a sum of rounded products, and a pair is kept from both sides or from none."""
    x = oracle.cloud(np.random.default_rng(), N, d, kind)
    neighbors = gp.Neighbors.allocate(torch.as_tensor(x, device="cuda"), radius, box, capacity)
    groups, M = neighbors.groups, neighbors.capacity
    if groups is None:
        pytest.skip("kernels list for compute capability 9.0")
    points = neighbors.cells.runs.points.cpu().numpy().reshape(d, -1)[:, :N]
    s = np.zeros((N, N), np.float32)
    for one, size in zip(points, neighbors.cells.sizes, strict=True):
        step = nearest(one, one[:, None], size and np.float32(size), np)
        s = s + step * step
    keep = s <= np.float32(neighbors.cells.reach**2)
    T, C = -(-N // 64), groups.room
    columns, counts = groups.columns.cpu().numpy().reshape(T, C), groups.counts.cpu().numpy()
    words = groups.bits.cpu().numpy().view(np.uint32).reshape(T, C // 32, 64)
    for t in range(T):
        rows = keep[64 * t : 64 * t + 64]
        union = np.flatnonzero(rows.any(0))
        listed = union[:C]
        padded = -(-len(listed) // 64) * 64
        assert counts[t] == len(union)
        assert (columns[t, :padded] == np.pad(listed, (0, padded - len(listed)), constant_values=-1)).all()
        bits = (words[t, : padded // 32, :, None] >> np.arange(32, dtype=np.uint32)) & 1
        wanted = np.zeros((64, padded), bool)
        wanted[: len(rows), : len(listed)] = rows[:, listed]
        assert (bits.swapaxes(0, 1).reshape(64, -1) == wanted).all()
    places = neighbors.places.cpu().numpy()
    for i in range(N):
        wanted = np.flatnonzero(keep[i])[:M]
        assert (places[i] == np.pad(wanted, (0, M - len(wanted)), constant_values=N)).all()
    assert (neighbors.sizes.cpu().numpy() == keep.sum(1)).all()
    assert bool(neighbors.overflow) == bool((keep.sum(1) > M).any() or (counts > C).any())


def apart_from(radius: float, rng: np.random.Generator, N: int, box: tuple[float | None, ...]) -> np.ndarray:
    """Positions of which no pair is at the radius but for rounding in float32: either answer would be right."""
    while True:
        x = oracle.cloud(rng, N, 3, "uniform")
        there = oracle.wrapped(x, box)
        steps = there - there[:, None]
        folds = np.array([size or 1e30 for size in box])
        s = np.square(steps - folds * (steps / folds).round()).sum(-1)
        if np.abs(np.sqrt(s) - radius).min() > 2**-22:
            return x


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("N", [130, 1200])
@pytest.mark.parametrize(("D", "E"), [(64, 64), (20, 48), (128, 64)])
@pytest.mark.parametrize("kernel", ["dot", "gaussian", "dot+gaussian"])
def test_attention_in_16_bits(kernel: str, D: int, E: int, N: int) -> None:
    """Values and gradients against float64; 130 particles are so few that no frame holds their nearest images."""
    rng, H, box, radius = np.random.default_rng(), 2, (1.0, None, 0.9), 0.25
    x = apart_from(radius, rng, N, box)
    dtype = torch.float16 if D == 20 else torch.bfloat16
    limit = 2e-3 if D == 20 else 2e-2
    places = torch.as_tensor(x, device="cuda").requires_grad_()
    neighbors = gp.Neighbors.allocate(places, radius, box)
    q, k = (torch.randn(N, H, D, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    v = torch.randn(N, H, E, device="cuda").to(dtype).requires_grad_()
    products, bandwidth = kernel != "gaussian", None if kernel == "dot" else 0.1
    pair = (q, k) if products else (None, None)
    found = gp.neighbor_attention(*pair, v, neighbors, kernel=kernel, bandwidth=bandwidth, return_residual=True)
    exact = [one.detach().double().cpu().requires_grad_() for one in (q, k, v)]
    there = torch.as_tensor(oracle.wrapped(x, box), dtype=torch.float64).requires_grad_()
    steps = there - there[:, None]
    folds = torch.tensor([size or np.inf for size in box], dtype=torch.float64)
    s = (steps - (folds * (steps.detach() / folds).round()).nan_to_num()).square().sum(-1)
    scores = D**-0.5 * torch.einsum("ihd,jhd->hij", *exact[:2]) if products else torch.zeros(H, N, N, dtype=s.dtype)
    scores = scores - s / (2 * bandwidth**2) if bandwidth else scores
    scores = scores.masked_fill(s.detach() > radius**2, -float("inf"))
    wanted = torch.einsum("hij,jhe->ihe", scores.softmax(-1), exact[2]), scores.logsumexp(-1).T
    for one, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double().cpu(), right.detach(), rtol=limit, atol=limit)
    again = gp.neighbor_attention(*pair, v, neighbors, kernel=kernel, bandwidth=bandwidth)
    assert again.equal(found[0])
    weights = torch.randn_like(found[0])
    used = slice(0 if products else 2, 4 if bandwidth else 3)
    got = torch.autograd.grad(found, (q, k, v, places)[used], (weights, torch.ones_like(found[1])))
    right = torch.autograd.grad(wanted, [*exact, there][used], (weights.double().cpu(), torch.ones_like(wanted[1])))
    for one, other in zip(got, right, strict=True):
        assert (one.double().cpu() - other).abs().max() <= limit * other.abs().max()


def test_positions_that_are_not_finite() -> None:
    """What is near them nobody knows: nothing is a number."""
    x = torch.rand(80, 3)
    x[3, 1] = float("nan")
    cells = gp.Cells.build(x, 0.3)
    assert gp.radial_sum(cells, 1.0, gp.Gaussian(0.1)).isnan().all()
    assert gp.radial_force(cells, 1.0, gp.ShortRangeGravity(0.05, 0.01)).isnan().all()
    neighbors = gp.Neighbors.allocate(x, 0.3, capacity=80)
    q = torch.randn(80, 8)
    assert neighbors.overflow and gp.neighbor_attention(q, q, q, neighbors).isnan().all()
    with pytest.raises(ValueError, match="x must be finite"):
        gp.Neighbors.allocate(x, 0.3)
    everywhere = gp.Cells.build(torch.full((31, 2), -float("inf")), 0.3)  # in a box that is near none, itself neither
    assert gp.radial_sum(everywhere, 1.0, gp.Gaussian(0.1)).isnan().all()
    assert gp.radial_force(everywhere, 1.0, gp.ShortRangeGravity(0.05, 0.01)).isnan().all()


@pytest.mark.parametrize("kernel", ["dot", "gaussian", "dot+gaussian"])
def test_no_particles(kernel: str) -> None:
    """Results without elements, and gradients of all inputs."""
    x, q, k, v = (torch.zeros(0, *n, requires_grad=True) for n in ((3,), (2, 8), (2, 8), (2, 5)))
    neighbors = gp.Neighbors.allocate(x, 0.3, 1.0)
    pair, given = ((None, None), (x, v)) if kernel == "gaussian" else ((q, k), (q, k, v))
    bandwidth = None if kernel == "dot" else 0.1
    out, lse = gp.neighbor_attention(
        *pair, v, neighbors, kernel=kernel, bandwidth=bandwidth, return_residual=True
    )  # fmt: skip
    assert out.shape == (0, 2, 5) and lse.shape == (0, 2)
    for one in (out.sum(), lse.sum(), out.sum() + lse.sum()):
        for d, inputs in zip(torch.autograd.grad(one, given, retain_graph=True), given, strict=True):
            assert d.shape == inputs.shape


def test_types_of_neighbor_attention() -> None:
    x = torch.rand(40, 3)
    neighbors = gp.Neighbors.allocate(x, 0.3)
    for given in ((x.int(), x.int(), x.int()), (x, x.half(), x), (None, x, x), (x[:, :0], x[:, :0], x)):
        with pytest.raises(ValueError, match=r"must be of|q and k"):
            gp.neighbor_attention(*given, neighbors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_features_at_any_address_and_of_any_type(dtype: torch.dtype, device: str) -> None:
    """Positions in float32 beside features of another type; tensors that begin within a line of memory."""
    torch.manual_seed(0)
    x = torch.rand(130, 3, device=device, requires_grad=True)
    neighbors = gp.Neighbors.allocate(x, 0.3, 1.0)
    plain = [torch.randn(130, 2, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    moved = []
    for one in plain:
        room = torch.empty(one.numel() + 1, device=device, dtype=dtype)
        room[1:] = one.detach().flatten()
        moved.append(room[1:].view(one.shape).requires_grad_())
        assert moved[-1].data_ptr() % 16
    found, wanted = (gp.neighbor_attention(*given, neighbors) for given in (moved, plain))
    assert found.dtype == dtype and torch.equal(found, wanted)
    results = zip(
        torch.autograd.grad(found.sum(), [*moved, x]), torch.autograd.grad(wanted.sum(), [*plain, x]), strict=True
    )
    near = 2e-2 if dtype == torch.bfloat16 else 1e-4  # kernels add in any order
    for one, other in results:
        torch.testing.assert_close(one, other, rtol=near, atol=near)
