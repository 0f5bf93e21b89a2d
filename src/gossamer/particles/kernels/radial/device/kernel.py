"""Sums over neighbours: a warp owns consecutive queries, and its lanes are candidates.

Particles are in the order of Hilbert's curve; clusters of 8 have boxes, 32 clusters one box, 32 of these one, as do
all queries of a warp. A warp compares 32 boxes at once with its own and descends where they are near enough. Clusters
that are near go to a queue in shared memory; of eight at a time the particles are compared with the queries' box, two
in each lane, and those that are near it go to a queue of candidates: of some 2,350 particles in near clusters 1,390
with 747 neighbours. 32 candidates at a time are evaluated, one in each lane against every query in registers. The order
of summation is fixed by the particles' order alone.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from gossamer.cute.common import Opaque
from gossamer.particles.kernels.radial.configurations import CLUSTER, FAN, FAR, RadialConfig
from gossamer.particles.kernels.radial.device.terms import TERMS, select

WARPS = 4
LANES = 32
PARTS = 2  # particles that a lane compares at once: their loads are in flight together
STEP = PARTS * LANES // CLUSTER  # clusters that are taken from the queue at once
QUEUE = STEP + LANES  # clusters: those that wait, and those of a block
ROOM = (1 + PARTS) * LANES  # candidates likewise
CARVEOUT = 25  # percent of the memory of a multiprocessor that is shared: the rest is cache
FOUR = 4  # numbers of an access
BOX = 8  # numbers of a box: its centre, one more, its half widths, one more


@cute.jit
def wide(row: cute.Tensor, size: cutlass.Constexpr):
    """A row in registers, 16 bytes an access."""
    registers = cute.make_rmem_tensor((size,), Float32)
    cute.autovec_copy(row, registers)
    return registers


class Images(Enum):
    """The differences that are taken to nearest images."""

    NONE = 0
    OF_CANDIDATES = 1  # in a frame of the queries, which holds nearest images
    OF_PAIRS = 2


class RadialArguments(NamedTuple):
    """The parameters."""

    particles: Any  # (P, width): positions, and payloads, in order; P a multiple of 256
    clusters: Any  # (P / 8, 8)
    blocks: Any  # (P / 256, 8)
    groups: Any  # (G, 8): of 32 blocks each
    order: Any  # (N,)
    known: Any  # (1,): 1, or NaN if any position is not finite: then all sums are
    out: Any  # (N, outputs)
    sizes: Any  # three numbers
    square: Any  # of the radius
    factor: Any  # of all sums, a power of two
    numbers: Any  # of the law


class RadialSums:
    """The kernel of one configuration."""

    def __init__(self, config: RadialConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self, particles: cute.Tensor, clusters: cute.Tensor, blocks: cute.Tensor, groups: cute.Tensor,
        order: cute.Tensor, known: cute.Tensor, out: cute.Tensor, size_x: Float32, size_y: Float32, size_z: Float32,
        square: Float32, factor: Float32, n0: Float32, n1: Float32, n2: Float32, n3: Float32, n4: Float32, n5: Float32,
        n6: Float32, n7: Float32, n8: Float32, n9: Float32, n10: Float32, stream: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel; the parameters are those of `RadialArguments`, n0 to n10 the law's numbers."""
        each = WARPS * self.config.queries
        self.kernel(
            particles, clusters, blocks, groups, order, known, out, size_x, size_y, size_z, square, factor, n0, n1, n2,
            n3, n4, n5, n6, n7, n8, n9, n10,
        ).launch(
            grid=((cute.size(order, mode=[0]) + each - 1) // each, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream,
            min_blocks_per_mp=self.config.blocks, preferred_smem_carveout=CARVEOUT,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, particles: cute.Tensor, clusters: cute.Tensor, blocks: cute.Tensor, groups: cute.Tensor,
        order: cute.Tensor, known: cute.Tensor, out: cute.Tensor, size_x: Float32, size_y: Float32, size_z: Float32,
        square: Float32, factor: Float32, n0: Float32, n1: Float32, n2: Float32, n3: Float32, n4: Float32, n5: Float32,
        n6: Float32, n7: Float32, n8: Float32, n9: Float32, n10: Float32,
    ) -> None:  # fmt: skip
        arguments = RadialArguments(
            particles, clusters, blocks, groups, order, known, out, (size_x, size_y, size_z), square, factor,
            (n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10),
        )  # fmt: skip
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.warp_idx()
        smem = SmemAllocator()
        queue = smem.allocate_tensor(Int32, cute.make_layout((QUEUE, WARPS)), 16)
        planes = self.config.width // FOUR
        candidates = smem.allocate_tensor(Float32, cute.make_layout((FOUR, ROOM, planes, WARPS)), 16)
        first = (block * WARPS + warp) * self.config.queries
        if first < cute.size(order, mode=[0]):
            Queries(self.config, arguments, queue[None, warp], candidates[None, None, None, warp], first).run()


class Queries(Opaque):
    """The queries of a warp. What changes is in tensors of registers."""

    def __init__(
        self, config: RadialConfig, arguments: RadialArguments, queue: Any, candidates: Any, first: Any
    ) -> None:
        c, a = config, arguments
        self.config, self.arguments, self.first = config, arguments, first
        self.queue, self.candidates = queue, candidates
        self.lane = cute.arch.lane_idx()
        self.term = TERMS[c.term](c, a.numbers)
        self.mine = [wide(a.particles[first + k, None], c.width) for k in range(c.queries)]
        self.sizes = a.sizes
        self.square = a.square + self.term.start
        self.total = cute.make_rmem_tensor((c.outputs * c.queries,), Float32)
        self.total.fill(0.0)
        self.own = self.box()
        self.reach = a.square * 1.00002  # rounding never leaves out a cluster, nor a candidate
        self.half = [self.own[FOUR + axis] for axis in range(3)]
        # Queries that are far apart may each see another image of one candidate; those far inside see no other. Of the
        # rest the places before the seam lose the box's size: those of queries near its end, and of candidates over a
        # place that is half the size away from the queries. A place in the upper half does so without rounding, and
        # others are not moved: so a difference of positions is that of `nearest`, rounded once, whatever is near it.
        self.far, self.inside = Boolean(False), Boolean(True)
        self.seam, shifts = [], []
        radius = cute.math.sqrt(a.square)
        for axis in range(3):
            size, centre, half = a.sizes[axis], self.own[axis], self.own[4 + axis]
            extent = half * 1.0001 + radius * 1.0001
            self.far = self.far | (2.0 * (extent + half) > size)
            inside = ((centre > extent) & (centre + extent < size)) | (size > 1e38)
            self.inside = self.inside & inside
            upper = (centre > 0.5 * size) & ~inside
            self.far = self.far | (upper & (centre - extent < 0.5 * size))
            seam = select(upper, centre - 0.5 * size, centre + 0.5 * size)
            self.seam.append(select(inside, Float32(3e38), seam))
            shifts.append(select(upper, size, Float32(0.0)))
        # Queries and the middle of their box in that frame. These are results of arithmetic also where it moves
        # nothing: numbers that are loaded would lie in uniform registers, of which there are too few.
        shifts = [select(self.far, Float32(0.0), shift) for shift in shifts]
        self.at = [[row[axis] - shifts[axis] for axis in range(3)] for row in self.mine]
        self.centre = [self.own[axis] - shifts[axis] for axis in range(3)]

    def box(self) -> list[Any]:
        """The box of the queries."""
        clusters = self.arguments.clusters
        box = wide(clusters[self.first // CLUSTER, None], BOX)
        corners = [box[i] for i in range(BOX)]
        if self.config.queries > CLUSTER:
            other = wide(clusters[self.first // CLUSTER + 1, None], BOX)
            for axis in range(3):
                low = cute.arch.fmin(box[axis] - box[4 + axis], other[axis] - other[4 + axis])
                high = cute.arch.fmax(box[axis] + box[4 + axis], other[axis] + other[4 + axis])
                corners[axis] = 0.5 * (low + high)
                # Both are rounded to a place of a position, which may be far larger than the box.
                most = cute.arch.fmax(cute.arch.fmax(low, -low), cute.arch.fmax(high, -high))
                corners[4 + axis] = cute.arch.fmax(high - corners[axis], corners[axis] - low) + most * 2.0**-23
        return corners

    @cute.jit
    def run(self):
        """Visit all neighbours, then write the sums. Each form of images has a loop of its own."""
        if const_expr(not self.config.periodic):
            self.walk(Images.NONE)
        elif self.far:
            self.walk(Images.OF_PAIRS)
        elif self.inside:
            self.walk(Images.NONE)
        else:
            self.walk(Images.OF_CANDIDATES)
        self.write()

    @cute.jit
    def walk(self, images: cutlass.Constexpr):
        """Every cluster that is near."""
        a = self.arguments
        clusters, candidates = Int32(0), Int32(0)  # that wait
        for start in cutlass.range(0, cute.size(a.groups, mode=[0]), LANES, unroll=1):
            near_groups = cute.arch.vote_ballot_sync(self.near(a.groups, start + self.lane, images))
            while near_groups != 0:
                group = start + lowest(near_groups)
                near_groups = near_groups & (near_groups - 1)
                near_blocks = cute.arch.vote_ballot_sync(self.near(a.blocks, group * FAN + self.lane, images))
                while near_blocks != 0:
                    cluster = (group * FAN + lowest(near_blocks)) * FAN + self.lane
                    near_blocks = near_blocks & (near_blocks - 1)
                    hit = self.near(a.clusters, cluster, images)
                    bits = cute.arch.vote_ballot_sync(hit)
                    if hit:
                        self.queue[clusters + self.rank(bits)] = cluster
                    clusters = clusters + cute.arch.popc(bits)
                    cute.arch.sync_warp()
                    while clusters >= STEP:
                        clusters = clusters - STEP
                        candidates = self.admit(clusters, Int32(STEP), candidates, images)
                        while candidates >= LANES:
                            candidates = candidates - LANES
                            self.evaluate(candidates, Int32(LANES), images)
                    cute.arch.sync_warp()
        if clusters > 0:
            candidates = self.admit(Int32(0), clusters, candidates, images)
        while candidates > 0:
            some = cutlass.min(candidates, LANES)
            candidates = candidates - some
            self.evaluate(candidates, some, images)

    def rank(self, bits: Any) -> Any:
        """The number of lanes before this one whose bit is set."""
        return cute.arch.popc(bits & ((Int32(1) << self.lane) - 1))

    @cute.jit
    def near(self, boxes: cute.Tensor, place: Int32, images: cutlass.Constexpr):
        """Whether a box is within reach of the queries' own."""
        n, sizes = cute.size(boxes, mode=[0]), self.arguments.sizes
        box = wide(boxes[cutlass.min(place, n - 1), None], BOX)
        total = Float32(0.0)
        for axis in cutlass.range_constexpr(3):
            apart = box[axis] - self.own[axis]
            apart = cute.arch.fmax(apart, -apart)
            if const_expr(images is not Images.NONE):
                apart = cute.arch.fmin(apart, sizes[axis] - apart)
            gap = cute.arch.fmax(apart - (box[4 + axis] + self.own[4 + axis]), Float32(0.0))
            total = total + gap * gap
        return total <= self.reach and place < n

    @cute.jit
    def admit(self, first: Int32, some: Int32, candidates: Int32, images: cutlass.Constexpr):
        """Admit particles of some queued clusters that are near the queries' box; returns the number of candidates."""
        c, a = self.config, self.arguments
        records, there = [], []
        for part in cutlass.range_constexpr(PARTS):
            place = part * LANES // CLUSTER + self.lane // CLUSTER
            there.append(place < some)
            cluster = self.queue[first + cutlass.min(place, some - 1)]
            records.append(wide(a.particles[cluster * CLUSTER + self.lane % CLUSTER, None], c.width))
        cute.arch.sync_warp()
        for part in cutlass.range_constexpr(PARTS):
            theirs, total = records[part], Float32(0.0)
            for axis in cutlass.range_constexpr(3):
                x = theirs[axis]
                if const_expr(images is Images.OF_CANDIDATES):
                    x = select(x > self.seam[axis], x - self.sizes[axis], x)
                theirs[axis] = x
                apart = x - self.centre[axis]
                gap = cute.arch.fmax(cute.arch.fmax(apart, -apart) - self.half[axis], Float32(0.0))
                total = total + gap * gap
            passes = there[part]
            if const_expr(images is not Images.OF_PAIRS):
                passes = passes and total <= self.reach
            bits = cute.arch.vote_ballot_sync(passes)
            if passes:
                place = candidates + self.rank(bits)
                for plane in cutlass.range_constexpr(c.width // FOUR):
                    numbers = cute.make_rmem_tensor((FOUR,), Float32)
                    for i in cutlass.range_constexpr(FOUR):
                        numbers[i] = theirs[plane * FOUR + i]
                    cute.autovec_copy(numbers, self.candidates[None, place, plane])
            candidates = candidates + cute.arch.popc(bits)
        cute.arch.sync_warp()
        return candidates

    @cute.jit
    def evaluate(self, first: Int32, some: Int32, images: cutlass.Constexpr):
        """A candidate in each lane, against every query."""
        c = self.config
        place = first + cutlass.min(self.lane, some - 1)
        planes = [wide(self.candidates[None, place, plane], FOUR) for plane in range(c.width // FOUR)]
        theirs = [numbers[i] for numbers in planes for i in range(FOUR)]
        x = [select(self.lane < some, theirs[0], Float32(FAR)), theirs[1], theirs[2]]
        brought = theirs[3 : 3 + c.payload]
        for k in cutlass.range_constexpr(c.queries):
            step = [x[axis] - self.at[k][axis] for axis in range(3)]
            if const_expr(images is Images.OF_PAIRS):
                step = [nearest(x[axis], self.at[k][axis], self.sizes[axis]) for axis in range(3)]
            s = step[2] * step[2] + (step[1] * step[1] + (step[0] * step[0] + self.term.start))
            mine = [self.mine[k][3 + i] for i in range(c.payload)]
            self.term.add(self.total, k, step, s, s <= self.square, mine, brought)

    @cute.jit
    def write(self):
        """Sums over lanes, in an order that is fixed: each step halves the queries that a lane holds."""
        c, a, lane = self.config, self.arguments, self.lane
        factor = a.known[0] * a.factor
        for output in cutlass.range_constexpr(c.outputs):
            value, query = over_lanes([self.total[output * c.queries + k] for k in range(c.queries)], lane)
            row = self.first + query
            if lane < c.queries and row < cute.size(a.order, mode=[0]):
                a.out[a.order[row], output] = self.term.scaled(value, output) * factor


def nearest(x: Any, y: Any, size: Any) -> Any:
    """x - y to the nearest image, as `particles.geometry.nearest` has it."""
    step = x - y
    return select(step > 0.5 * size, x - size, x) - select(step < -0.5 * size, y - size, y)


def over_lanes(held: list[Any], lane: Any) -> tuple[Any, Any]:
    """(sum over all lanes, number of the query that it is of) of as many values as there are queries."""
    query, bit = Int32(0), 1
    while len(held) > 1:
        half = len(held) // 2
        side = (lane // bit) % 2
        upper = side == 1
        sends = [select(upper, held[k], held[k + half]) for k in range(half)]
        keeps = [select(upper, held[k + half], held[k]) for k in range(half)]
        held = [keep + cute.arch.shuffle_sync_bfly(send, offset=bit) for keep, send in zip(keeps, sends, strict=True)]
        query, bit = query + half * side, 2 * bit
    (value,) = held
    while bit < LANES:
        value, bit = value + cute.arch.shuffle_sync_bfly(value, offset=bit), 2 * bit
    return value, query


def lowest(bits: Any) -> Any:
    """The place of the lowest bit that is set."""
    return cute.arch.popc((bits & -bits) - 1)
