"""Lists of the particles that any of 64 consecutive queries has within the radius, and bits that say which of them has.

A warp owns a group of queries, whose positions are in shared memory, and descends the boxes as `radial.device.kernel`
does. Of the clusters that are near each lane has a candidate, which it compares with every query: 64 bits. Candidates
with any bit wait in shared memory until there are 32, whose bits are turned over, from a word pair of each candidate
to a word of each query, by a ballot for each query. Lists ascend along the curve.

r^2 is (dx^2 + dy^2) + dz^2, each product rounded: what numpy computes from float32 positions, to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from gossamer.cute.common import Opaque
from gossamer.particles.kernels.neighbors.configurations import POINT, ROWS, STEP, WORD, ListsConfig
from gossamer.particles.kernels.radial.configurations import CLUSTER, FAN, FAR
from gossamer.particles.kernels.radial.device.kernel import BOX, lowest, nearest, wide
from gossamer.particles.kernels.radial.device.terms import assembly, select

WARPS = 4
LANES = 32
AT_ONCE = LANES // CLUSTER  # clusters that are evaluated together
QUEUE = 2 * LANES
WAITING = 2 * LANES  # candidates
HALVES = ROWS // LANES


class ListsArguments(NamedTuple):
    """The parameters: N particles, T groups, lists with room for C columns each."""

    particles: Any  # (P, 4): positions in order, P a multiple of 256; behind the last one they are far away
    clusters: Any  # (P / 8, 8)
    blocks: Any  # (P / 256, 8)
    groups: Any  # (G, 8): of 32 blocks each
    columns: Any  # (T C,) int32: the places that a group lists, -1 behind the last one
    bits: Any  # (T C / 32, 64) int32: bit c of word [w, r]: row r has column 32 w + c
    theirs: Any  # (T C, 4): positions of columns in the group's frame
    mine: Any  # (64 T, 4): those of its queries
    counts: Any  # (T,) int32: columns of a group, of which C are listed
    far: Any  # (T,) int32: 1 where queries are so far apart that frames hold no nearest images
    sizes: Any  # (N,) int32: neighbours of a particle
    places: Any  # (N, M) int32: the first of them, N behind the last one
    box: Any  # three numbers
    square: Any  # of the radius


class ListsKernel:
    """The kernel of lists."""

    def __init__(self, config: ListsConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self, particles: cute.Tensor, clusters: cute.Tensor, blocks: cute.Tensor, groups: cute.Tensor,
        columns: cute.Tensor, bits: cute.Tensor, theirs: cute.Tensor, mine: cute.Tensor, counts: cute.Tensor,
        far: cute.Tensor, sizes: cute.Tensor, places: cute.Tensor, size_x: Float32, size_y: Float32, size_z: Float32,
        square: Float32, stream: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel; the parameters are those of `ListsArguments`."""
        self.kernel(
            particles, clusters, blocks, groups, columns, bits, theirs, mine, counts, far, sizes, places,
            size_x, size_y, size_z, square,
        ).launch(
            grid=((cute.size(counts) + WARPS - 1) // WARPS, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, particles: cute.Tensor, clusters: cute.Tensor, blocks: cute.Tensor, groups: cute.Tensor,
        columns: cute.Tensor, bits: cute.Tensor, theirs: cute.Tensor, mine: cute.Tensor, counts: cute.Tensor,
        far: cute.Tensor, sizes: cute.Tensor, places: cute.Tensor, size_x: Float32, size_y: Float32, size_z: Float32,
        square: Float32,
    ) -> None:  # fmt: skip
        a = ListsArguments(
            particles, clusters, blocks, groups, columns, bits, theirs, mine, counts, far, sizes, places,
            (size_x, size_y, size_z), square,
        )  # fmt: skip
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.warp_idx()
        allocator = SmemAllocator()
        queries = allocator.allocate_tensor(Float32, cute.make_layout((POINT, ROWS, WARPS)), 16)
        points = allocator.allocate_tensor(Float32, cute.make_layout((POINT, WAITING, WARPS)), 16)
        queue = allocator.allocate_tensor(Int32, cute.make_layout((QUEUE, WARPS)), 16)
        waiting = allocator.allocate_tensor(Int32, cute.make_layout((WAITING, 1 + HALVES, WARPS)), 16)
        group = block * WARPS + warp
        if group < cute.size(counts):
            shared = queries[None, None, warp], points[None, None, warp], queue[None, warp], waiting[None, None, warp]
            Group(self.config, a, shared, group).run()


class Group(Opaque):
    """The queries of a warp. What changes is in tensors of registers."""

    def __init__(self, config: ListsConfig, arguments: ListsArguments, shared: Any, group: Any) -> None:
        self.config, self.arguments, self.group = config, arguments, group
        self.queries, self.points, self.queue, self.waiting = shared
        self.lane = cute.arch.lane_idx()
        self.N, self.first = cute.size(arguments.sizes), group * ROWS
        self.room = cute.size(arguments.columns) // cute.size(arguments.counts)
        self.M = cute.size(arguments.places, mode=[1])
        self.state = cute.make_rmem_tensor((2,), Int32)  # candidates that wait, and columns that are listed
        self.state.fill(0)
        self.counted = cute.make_rmem_tensor((HALVES,), Int32)  # neighbours of this lane's queries
        self.counted.fill(0)
        self.read_queries()
        # Rounding never leaves out a cluster: of distances, and of the positions that they are differences of.
        radius, far = cute.math.sqrt(arguments.square), Float32(0.0)
        for centre, half in zip(self.centre, self.half, strict=True):
            far = cute.arch.fmax(far, cute.arch.fmax(centre, -centre) + half + radius)
        self.reach = (radius * 1.00001 + far * 5e-7) * (radius * 1.00001 + far * 5e-7)

    def read_queries(self) -> None:
        """Positions to shared memory, and their box; the frame's origin is its middle."""
        a, lane = self.arguments, self.lane
        low, high = [Float32(3e38)] * 3, [Float32(-3e38)] * 3
        rows = []
        for half in range(HALVES):
            place = self.first + half * LANES + lane
            row = wide(a.particles[place, None], POINT)
            rows.append(row)
            for axis in range(3):
                self.queries[axis, half * LANES + lane] = row[axis]
                low[axis] = cute.arch.fmin(low[axis], select(place < self.N, row[axis], Float32(3e38)))
                high[axis] = cute.arch.fmax(high[axis], select(place < self.N, row[axis], Float32(-3e38)))
        self.centre, self.half, self.far = [], [], Boolean(False)
        radius = cute.math.sqrt(a.square)
        for axis in range(3):
            lo, hi = low[axis], high[axis]
            for bit in (1, 2, 4, 8, 16):
                lo = cute.arch.fmin(lo, cute.arch.shuffle_sync_bfly(lo, offset=bit))
                hi = cute.arch.fmax(hi, cute.arch.shuffle_sync_bfly(hi, offset=bit))
            centre = 0.5 * (lo + hi)
            half = cute.arch.fmax(hi - centre, centre - lo) * 1.000001
            self.centre.append(centre)
            self.half.append(half)
            # Queries that are far apart may each see another image of one candidate.
            self.far = self.far | (2.0001 * (2.0 * half + radius) > a.box[axis])
        for half, row in enumerate(rows):
            place = self.first + half * LANES + lane
            for axis in range(3):
                a.mine[place, axis] = row[axis] - self.centre[axis]
            a.mine[place, 3] = Float32(0.0)
        cute.arch.sync_warp()

    @cute.jit
    def run(self):
        """Write all columns, then the counts."""
        if const_expr(not self.config.periodic):
            self.walk(False)
        elif self.far:
            self.walk(True)
        else:
            self.walk(False)
        self.finish()

    @cute.jit
    def walk(self, by_pairs: cutlass.Constexpr):
        """Every cluster that is near; `by_pairs`: images differ by pairs."""
        a = self.arguments
        count = Int32(0)
        for start in cutlass.range(0, cute.size(a.groups, mode=[0]), LANES, unroll=1):
            near_groups = cute.arch.vote_ballot_sync(self.near(a.groups, start + self.lane))
            while near_groups != 0:
                group = start + lowest(near_groups)
                near_groups = near_groups & (near_groups - 1)
                near_blocks = cute.arch.vote_ballot_sync(self.near(a.blocks, group * FAN + self.lane))
                while near_blocks != 0:
                    cluster = (group * FAN + lowest(near_blocks)) * FAN + self.lane
                    near_blocks = near_blocks & (near_blocks - 1)
                    hit = self.near(a.clusters, cluster)
                    bits = cute.arch.vote_ballot_sync(hit)
                    if hit:
                        before = cute.arch.popc(bits & ((Int32(1) << self.lane) - 1))
                        self.queue[count + before] = cluster
                    count = count + cute.arch.popc(bits)
                    cute.arch.sync_warp()
                    at = Int32(0)
                    while count - at >= AT_ONCE:
                        self.evaluate(self.queue[at + self.lane // CLUSTER], Boolean(True), by_pairs)
                        at = at + AT_ONCE
                    rest = count - at
                    left = self.queue[at + self.lane] if self.lane < rest else Int32(0)
                    cute.arch.sync_warp()
                    if self.lane < rest:
                        self.queue[self.lane] = left
                    count = rest
                    cute.arch.sync_warp()
        if count > 0:
            there = self.lane // CLUSTER < count
            self.evaluate(self.queue[self.lane // CLUSTER] if there else Int32(0), there, by_pairs)
        if self.state[0] > 0:
            self.flush(self.state[0])

    @cute.jit
    def near(self, boxes: cute.Tensor, place: Int32):
        """Whether a box is within reach of the queries' own."""
        n, sizes = cute.size(boxes, mode=[0]), self.arguments.box
        box = wide(boxes[cutlass.min(place, n - 1), None], BOX)
        total = Float32(0.0)
        for axis in cutlass.range_constexpr(3):
            apart = box[axis] - self.centre[axis]
            apart = cute.arch.fmax(apart, -apart)
            if const_expr(self.config.periodic):
                apart = cute.arch.fmin(apart, sizes[axis] - apart)
            gap = cute.arch.fmax(apart - (box[4 + axis] + self.half[axis]), Float32(0.0))
            total = total + gap * gap
        return total <= self.reach and place < n

    @cute.jit
    def evaluate(self, cluster: Int32, there: Boolean, by_pairs: cutlass.Constexpr):
        """A candidate in each lane, against every query."""
        a = self.arguments
        place = cluster * CLUSTER + self.lane % CLUSTER
        row = wide(a.particles[place, None], POINT)
        there = there & (place < self.N)
        x, moved, framed = [], [], []
        for axis in cutlass.range_constexpr(3):
            theirs, size, centre = row[axis], a.box[axis], self.centre[axis]
            shift = Float32(0.0)  # of the queries
            if const_expr(self.config.periodic and not by_pairs):
                apart = theirs - centre
                shift = select(apart < -0.5 * size, size, Float32(0.0))
                theirs = select(apart > 0.5 * size, theirs - size, theirs)
            x.append(theirs)
            moved.append(shift)
            framed.append(theirs - (centre - shift))
        first, *others = x
        x = [select(there, first, Float32(FAR)), *others]
        words = []
        for half in cutlass.range_constexpr(HALVES):
            word = Int32(0)
            for k in cutlass.range(LANES, unroll=4 if const_expr(by_pairs) else LANES):
                query = wide(self.queries[None, half * LANES + k], POINT)
                steps = []
                for axis in cutlass.range_constexpr(3):
                    mine = query[axis]
                    if const_expr(by_pairs):
                        steps.append(nearest(x[axis], mine, a.box[axis]))
                    elif const_expr(self.config.periodic):
                        steps.append(x[axis] - (mine - moved[axis]))
                    else:
                        steps.append(x[axis] - mine)
                s = square(steps[0]) + square(steps[1]) + square(steps[2])
                word = word | (select(s <= a.square, Int32(1), Int32(0)) << k)
            words.append(select(there, word, Int32(0)))
        hit = (words[0] | words[1]) != 0
        hits = cute.arch.vote_ballot_sync(hit)
        count = self.state[0]
        if hit:
            at = count + cute.arch.popc(hits & ((Int32(1) << self.lane) - 1))
            self.waiting[at, 0] = place
            for half in cutlass.range_constexpr(HALVES):
                self.waiting[at, 1 + half] = words[half]
            for axis in cutlass.range_constexpr(3):
                self.points[axis, at] = framed[axis]
        count = count + cute.arch.popc(hits)
        cute.arch.sync_warp()
        if count >= LANES:
            self.flush(Int32(LANES))
            count = count - LANES
            left = [self.waiting[LANES + self.lane, i] for i in range(1 + HALVES)]
            parts = [self.points[axis, LANES + self.lane] for axis in range(3)]
            cute.arch.sync_warp()
            if self.lane < count:
                for i in cutlass.range_constexpr(1 + HALVES):
                    self.waiting[self.lane, i] = left[i]
                for axis in cutlass.range_constexpr(3):
                    self.points[axis, self.lane] = parts[axis]
            cute.arch.sync_warp()
        self.state[0] = count

    @cute.jit
    def flush(self, valid: Int32):
        """List the first 32 columns that wait, of which so many are there."""
        a, lane = self.arguments, self.lane
        there = lane < valid
        place = self.waiting[lane, 0] if there else Int32(-1)
        written = self.state[1]
        listed = written < self.room
        at = self.group * self.room + written + lane
        if listed:
            a.columns[at] = place
            for axis in cutlass.range_constexpr(3):
                a.theirs[at, axis] = self.points[axis, lane] if there else Float32(0.0)
            a.theirs[at, 3] = Float32(0.0)
        for half in cutlass.range_constexpr(HALVES):
            mine = self.waiting[lane, 1 + half] if there else Int32(0)
            own = Int32(0)
            for k in cutlass.range(LANES, unroll=4):
                kept = (mine >> k) & 1
                word = cute.arch.vote_ballot_sync(kept != 0)
                before = cute.arch.shuffle_sync(self.counted[half], k)
                own = word if lane == k else own
                row = self.first + half * LANES + k
                if kept != 0 and row < self.N:
                    rank = before + cute.arch.popc(word & ((Int32(1) << lane) - 1))
                    if rank < self.M:
                        a.places[row, rank] = place
            self.counted[half] = self.counted[half] + cute.arch.popc(own)
            if listed:
                a.bits[self.group * (self.room // WORD) + written // WORD, half * LANES + lane] = own
        self.state[1] = written + LANES

    @cute.jit
    def finish(self):
        """Fill up the last step of 64 columns; counts, and the rest of the lists."""
        a, lane, written = self.arguments, self.lane, self.state[1]
        waiting = self.state[0]
        total = written - LANES + waiting if waiting > 0 else written
        if written % STEP != 0 and written < self.room:
            at = self.group * self.room + written + lane
            a.columns[at] = Int32(-1)
            for axis in cutlass.range_constexpr(POINT):
                a.theirs[at, axis] = Float32(0.0)
            for half in cutlass.range_constexpr(HALVES):
                a.bits[self.group * (self.room // WORD) + written // WORD, half * LANES + lane] = Int32(0)
        if lane == 0:
            a.counts[self.group] = total
            a.far[self.group] = Int32(1) if self.far else Int32(0)
        for half in cutlass.range_constexpr(HALVES):
            if self.first + half * LANES + lane < self.N:
                a.sizes[self.first + half * LANES + lane] = self.counted[half]
            for k in cutlass.range(LANES, unroll=1):
                row = self.first + half * LANES + k
                start = cute.arch.shuffle_sync(self.counted[half], k)
                if row < self.N:
                    for rank in cutlass.range(start + lane, self.M, LANES, unroll=1):
                        a.places[row, rank] = self.N


def square(x: Any) -> Any:
    """Its square, rounded: not part of a fused addition."""
    return assembly("mul.rn.f32 $0, $1, $2;", x, x)
