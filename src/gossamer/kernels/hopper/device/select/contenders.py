"""A warpgroup's 64 rows: their bounds, and the contenders that are above them, in shared memory.

Every thread holds the scores of two rows, a quarter of the columns of each, and keeps those that are not under the
row's bound in places of its own: nothing is shared but within the four threads of a row, and the order is fixed. A
bound is found again when the places of a thread run out, from all contenders of the row, which are then dealt out anew.

Scores here are products without the scale, which is positive.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.device.common import ROWS as TILE
from gossamer.kernels.hopper.device.common import Opaque, Thread
from gossamer.kernels.hopper.device.instructions import ROWS, assembly, largest_of_row, over_quad, places
from gossamer.kernels.hopper.device.select.block import SelectBlock
from gossamer.kernels.hopper.device.select.configurations import CHUNK, GROUPS
from gossamer.kernels.hopper.device.select.configurations import ROWS as BLOCK_ROWS
from gossamer.kernels.hopper.device.select.rows import rows_of, sampled, tile_of
from gossamer.kernels.hopper.device.tiles import accumulator, first_factor, issue, product_of, second_factor

PLACE = 4 * 4 * TILE * GROUPS  # bytes from a thread's place to its next one
LOWEST = -3.4028234e38
BITS = (0x33333333, 0xCCCCCCCC - 2**32)  # of a chunk's scores, of each row
STEPS = 3  # of Newton's method
HALVINGS = 10  # of the interval of the k-th largest
MARGIN = 2e-5  # relative, of a bound: powers are approximate
FLAT = 0.02  # alpha - 1 under which no contender is left out by its weight


def flag(score: Any, bound: Any, bits: Any, bit: int) -> Any:
    """The bits, with one more where the score is not under the bound."""
    code = (
        "{ .reg .pred p; setp.geu.f32 p, $1, $2; mov.b32 $0, $3; "
        f"@p or.b32 $0, $3, {1 << bit if bit < 31 else -(2**31)}; }}"
    )
    return assembly(Int32, code, Float32(score), Float32(bound), Int32(bits), effects=False)


def lowest(bits: Any) -> Any:
    """The number of the lowest bit that is set."""
    return assembly(Int32, "{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", Int32(bits), effects=False)


def power(x: Any, y: Any) -> Any:
    """x^y, of x from 0 up."""
    return cute.math.exp2(cute.math.log2(x, fastmath=True) * y, fastmath=True)


def over_quad_sum(value: Any) -> Any:
    """The sum of the four threads that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


class Selector(Opaque):
    """The rows of a warpgroup. What changes is in tensors of registers, one number for each row of a thread."""

    def __init__(self, block: SelectBlock, thread: Thread) -> None:
        self.block, self.config, self.arguments, self.thread = block, block.config, block.arguments, thread
        c, dtype = block.config, block.s_q.element_type
        self.mma = product_of(dtype, c.step)
        self.q, self.k = first_factor(self.mma, block.s_q), second_factor(self.mma, block.s_k)
        self.rows = rows_of(block)
        self.quad = thread.lane % 4
        self.bound = cute.make_rmem_tensor((ROWS,), Float32)
        self.next = cute.make_rmem_tensor((ROWS,), Int32)  # addresses of the next free places
        self.lo = cute.make_rmem_tensor((ROWS,), Int32)
        self.hi = cute.make_rmem_tensor((ROWS,), Int32)
        self.given_up = cute.make_rmem_tensor((ROWS,), Int32)
        self.start = [block.s_scores.iterator.toint() + 4 * (4 * (thread.row + 8 * r) + self.quad) for r in range(ROWS)]
        # From the place of a score to that of its key.
        self.keys_behind = 4 * 4 * TILE * GROUPS * c.places
        self.room = c.places * PLACE
        self.chunk = block.s_chunk.iterator.toint() + 16 * (128 * thread.warpgroup + thread.thread)
        a = block.arguments.steepness[self.rows.head]
        self.a = a
        self.scale = block.arguments.scale
        self.flat = a < FLAT
        self.inverse = 1.0 / cute.arch.fmax(a, Float32(FLAT))  # how far under lam a weight is 0

    @cute.jit
    def run(self):
        """All tiles."""
        c, rows, thread = self.config, self.rows, self.thread
        Q = cute.size(self.arguments.q.tensor, mode=[0])
        K = cute.size(self.arguments.k.tensor, mode=[0])
        for r in cutlass.range_constexpr(ROWS):
            row = rows.tile * BLOCK_ROWS + thread.row + 8 * r
            lo, hi = Int32(0), Int32(K)
            if const_expr(c.bounds == "causal"):
                hi = cutlass.min(row + self.arguments.offset + 1, Int32(K))
            if row >= Q:
                hi = Int32(0)
            elif const_expr(c.bounds == "intervals"):
                lo, hi = self.arguments.lo[row], self.arguments.hi[row]
            self.lo[r], self.hi[r] = lo, hi
            self.bound[r] = Float32(LOWEST)
            self.next[r] = self.start[r]
            self.given_up[r] = Int32(0)
        # Of the rows of a warp: a tile outside of all is not looked at, and one inside of all has no mask.
        least_lo = cute.arch.warp_redux_sync(cutlass.min(self.lo[0], self.lo[1]), kind="min")
        most_lo = cute.arch.warp_redux_sync(cutlass.max(self.lo[0], self.lo[1]), kind="max")
        least_hi = cute.arch.warp_redux_sync(cutlass.min(self.hi[0], self.hi[1]), kind="min")
        most_hi = cute.arch.warp_redux_sync(cutlass.max(self.hi[0], self.hi[1]), kind="max")
        first = sampled(rows.tiles)
        self.block.q.wait_full(thread.warpgroup, 0)
        for step in cutlass.range(rows.tiles, unroll=1):
            stage = self.block.k.wait_full_at(step)
            scores = accumulator(self.mma, c.step)
            issue(self.mma, scores, self.q[None, None, None, thread.warpgroup], self.k[None, None, None, stage], False)
            key = (rows.begin + tile_of(step, rows.tiles)) * c.step
            warpgroup.wait_group(0)
            self.block.k.release(stage)
            if step == first:
                self.refresh()
            if key < most_hi and key + c.step > least_lo:
                if key + c.step > least_hi or key < most_lo:
                    self.mask(scores, key)
                if const_expr(c.weighed):  # noqa: SIM102
                    if step < first:
                        self.rise(scores)
                self.keep(scores, key)
        cute.arch.sync_warp()

    @cute.jit
    def mask(self, scores, key):
        """Scores of keys that a row does not see become -inf."""
        for i in places(scores):
            r = const_expr(i % 4 // 2)
            j = key + self.thread.quad + (8 * (i // 4) + i % 2)
            seen = j < self.hi[r]
            if const_expr(self.config.bounds == "intervals"):
                seen = seen and j >= self.lo[r]
            scores[i] = scores[i] if seen else -Float32.inf

    @cute.jit
    def rise(self, scores):
        """The largest score of a row bounds it."""
        for r in cutlass.range_constexpr(ROWS):
            found = self.under(largest_of_row(scores, r) * self.scale)
            # False where it is no number.
            self.bound[r] = found if found > self.bound[r] and self.given_up[r] == 0 else self.bound[r]

    @cute.jit
    def under(self, lam):
        """The product under which a weight is 0, of a number that lam is not under."""
        found = (lam - self.inverse - MARGIN * (cute.arch.fmax(lam, -lam) + self.inverse)) / self.scale
        return -Float32.inf if self.flat else found

    @cute.jit
    def keep(self, scores, key):
        """Append the contenders of a tile, in chunks: a bit for each score, then a loop over the bits that are set.

        The chunk lies in memory of the thread's own, since registers have no numbers that a loop could know. Score i
        of a chunk is of row i // 2 % 2 and column 8 (i // 4) + i % 2.
        """
        for chunk in cutlass.range_constexpr(self.config.step // CHUNK):
            first = const_expr(chunk * 2 * CHUNK // 4)
            for j in cutlass.range_constexpr(CHUNK // 8):
                four = [scores[first + 4 * j + n] for n in range(4)]
                code = f"st.shared.v4.f32 [$0 + {4096 * j}], {{$1, $2, $3, $4}};"
                assembly(None, code, Int32(self.chunk), *[Float32(x) for x in four])
            bits = self.flags(scores, first)
            if cute.arch.vote_any_sync(self.overfull(bits)):
                self.refresh()
                bits = self.flags(scores, first)
                for r in cutlass.range_constexpr(ROWS):
                    # All four threads of a row give it up together.
                    over = Int32(1) if self.needed(bits, r) > self.room else Int32(0)
                    if over_quad_sum(over) != 0:
                        self.given_up[r] = Int32(1)
                        self.bound[r] = Float32.inf
                        self.next[r] = self.start[r]
                        bits = bits & BITS[1 - r]
            number = key + chunk * CHUNK + self.thread.quad
            while cute.arch.vote_any_sync(bits != 0):
                if bits != 0:
                    i = lowest(bits)
                    bits = bits & (bits - 1)
                    at = self.chunk + (i >> 2) * 4096 + 4 * (i & 3)
                    score = assembly(Float32, "ld.shared.f32 $0, [$1];", Int32(at))
                    second = (i & 2) != 0
                    to = self.next[1] if second else self.next[0]
                    assembly(None, "st.shared.f32 [$0], $1;", Int32(to), Float32(score))
                    column = number + 8 * (i >> 2) + (i & 1)
                    assembly(None, f"st.shared.b32 [$0 + {self.keys_behind}], $1;", Int32(to), Int32(column))
                    self.next[0] = self.next[0] + (Int32(0) if second else Int32(PLACE))
                    self.next[1] = self.next[1] + (Int32(PLACE) if second else Int32(0))

    def flags(self, scores: Any, first: int) -> Any:
        """A bit for each score of a chunk that is not under the bound of its row."""
        parts = [Int32(0)] * 4
        for i in range(CHUNK // 2):
            parts[i % 4] = flag(scores[first + i], self.bound[i % 4 // 2], parts[i % 4], i)
        return (parts[0] | parts[1]) | (parts[2] | parts[3])

    def needed(self, bits: Any, r: int) -> Any:
        """The bytes between the places of a row, of those of a chunk as well."""
        return self.next[r] - self.start[r] + cute.arch.popc(bits & BITS[r]) * PLACE

    def overfull(self, bits: Any) -> Any:
        """Whether a row of this thread has no room for those of a chunk."""
        return cutlass.max(self.needed(bits, 0), self.needed(bits, 1)) > self.room

    def counts(self) -> list[Any]:
        """How many contenders this thread has of each of its rows."""
        return [(self.next[r] - self.start[r]) // PLACE for r in range(ROWS)]

    @cute.jit
    def read(self, r: cutlass.Constexpr, place, count, none: cutlass.Constexpr):
        """A contender's score, or `none` past the last."""
        score = assembly(Float32, "ld.shared.f32 $0, [$1];", Int32(self.start[r] + place * PLACE))
        return score if place < count else Float32(none)

    @cute.jit
    def refresh(self):
        """Find the bounds again from the contenders, and take out those that are under them."""
        c = self.config
        cute.arch.sync_warp()
        n = self.counts()
        most = cute.arch.warp_redux_sync(cutlass.max(n[0], n[1]), kind="max")
        top = cute.make_rmem_tensor((ROWS,), Float32)
        bottom = cute.make_rmem_tensor((ROWS,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            top[r], bottom[r] = -Float32.inf, Float32.inf
        for place in cutlass.range(most, unroll=2):
            for r in cutlass.range_constexpr(ROWS):
                score = self.read(r, place, n[r], float("nan"))
                top[r] = cute.arch.fmax(top[r], score)
                if const_expr(c.top):
                    bottom[r] = cute.arch.fmin(bottom[r], score)
        for r in cutlass.range_constexpr(ROWS):
            top[r] = over_quad(top[r])
            if const_expr(c.top):
                bottom[r] = -over_quad(-bottom[r])
        found = cute.make_rmem_tensor((ROWS,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            found[r] = self.bound[r]
        if const_expr(c.weighed):
            self.weigh(n, most, top, found)
        if const_expr(c.top):
            self.kth(n, most, top, bottom, found)
        for r in cutlass.range_constexpr(ROWS):
            self.bound[r] = found[r] if found[r] > self.bound[r] else self.bound[r]
        total = cute.make_rmem_tensor((ROWS,), Int32)
        total.fill(0)
        for place in cutlass.range(most, unroll=1):
            for r in cutlass.range_constexpr(ROWS):
                at = self.start[r] + place * PLACE
                score = assembly(Float32, "ld.shared.f32 $0, [$1];", Int32(at))
                key = assembly(Int32, f"ld.shared.b32 $0, [$1 + {self.keys_behind}];", Int32(at))
                kept = place < n[r] and not (score < self.bound[r])
                rank, more = self.rank(kept)
                rank = rank + total[r]
                cute.arch.sync_warp()
                if kept:
                    to = self.start[r] - 4 * self.quad + (rank >> 2) * PLACE + 4 * (rank & 3)
                    assembly(None, "st.shared.f32 [$0], $1;", Int32(to), Float32(score))
                    assembly(None, f"st.shared.b32 [$0 + {self.keys_behind}], $1;", Int32(to), Int32(key))
                total[r] = total[r] + more
        for r in cutlass.range_constexpr(ROWS):
            self.next[r] = self.start[r] + ((total[r] + 3 - self.quad) >> 2) * PLACE
        cute.arch.sync_warp()

    @cute.jit
    def rank(self, kept):
        """How many threads of the row with a lower number keep theirs, and how many do."""
        bits = cute.arch.vote_ballot_sync(kept)
        quad = (Int32(bits) >> (self.thread.lane & 28)) & 15
        return cute.arch.popc(quad & ((Int32(1) << self.quad) - 1)), cute.arch.popc(quad)

    @cute.jit
    def kth(self, n, most, top, bottom, found):
        """A bound that at least `keep` contenders are not under, of rows that have as many; `top` falls to it."""
        low = cute.make_rmem_tensor((ROWS,), Float32)
        enough = cute.make_rmem_tensor((ROWS,), Int32)
        for r in cutlass.range_constexpr(ROWS):
            low[r] = cute.arch.fmax(bottom[r], self.bound[r])
            enough[r] = Int32(1) if over_quad_sum(n[r]) >= self.arguments.keep else Int32(0)
        for _ in cutlass.range(HALVINGS, unroll=1):
            over = cute.make_rmem_tensor((ROWS,), Int32)
            middle = cute.make_rmem_tensor((ROWS,), Float32)
            for r in cutlass.range_constexpr(ROWS):
                over[r] = Int32(0)
                middle[r] = 0.5 * (low[r] + top[r])
            for place in cutlass.range(most, unroll=2):
                for r in cutlass.range_constexpr(ROWS):
                    score = self.read(r, place, n[r], -float("inf"))
                    over[r] = over[r] + (Int32(1) if score >= middle[r] else Int32(0))
            for r in cutlass.range_constexpr(ROWS):
                many = over_quad_sum(over[r]) >= self.arguments.keep
                low[r] = middle[r] if many else low[r]
                top[r] = top[r] if many else middle[r]
        for r in cutlass.range_constexpr(ROWS):
            found[r] = cute.arch.fmax(found[r], low[r]) if enough[r] != 0 else found[r]

    @cute.jit
    def weigh(self, n, most, top, found):
        """The bound by the weights of the contenders: lam rises to that of these alone."""
        same = self.config.same
        lam = cute.make_rmem_tensor((ROWS,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            # No row has a lam under its largest score, or under what its bound came from.
            lam[r] = cute.arch.fmax(self.bound[r] * self.scale + self.inverse, top[r] * self.scale)
        for _ in cutlass.range(STEPS, unroll=1):
            F = cute.make_rmem_tensor((ROWS,), Float32)
            U = cute.make_rmem_tensor((ROWS,), Float32)
            F.fill(0.0)
            U.fill(0.0)
            for place in cutlass.range(most, unroll=2):
                for r in cutlass.range_constexpr(ROWS):
                    w = self.read(r, place, n[r], -1e30) * (self.scale * self.a) + (1.0 - self.a * lam[r])
                    w = cute.arch.fmax(w, Float32(0.0))
                    if const_expr(same == 0.5):
                        F[r], U[r] = F[r] + w * w, U[r] + w
                    elif const_expr(same == 1.0):
                        F[r], U[r] = F[r] + w, U[r] + (Float32(1.0) if w > 0.0 else Float32(0.0))
                    else:
                        u = power(w, self.inverse - 1.0)
                        u = u if w > 0.0 else Float32(0.0)
                        F[r], U[r] = F[r] + u * w, U[r] + u
            for r in cutlass.range_constexpr(ROWS):
                total, slope = over_quad_sum(F[r]), over_quad_sum(U[r])
                if const_expr(same == 0.5):
                    root = cute.math.sqrt(total, fastmath=True)
                    move = 2.0 * root * (root - 1.0) / slope
                elif const_expr(same == 1.0):
                    move = (total - 1.0) / slope
                else:
                    part = power(total, 1.0 - self.a)
                    move = (total - part) * self.inverse / slope
                # It rises to the root, and stays where nothing is a number.
                lam[r] = lam[r] + move if move > 0.0 and move < 1e30 else lam[r]
        for r in cutlass.range_constexpr(ROWS):
            bound = self.under(lam[r])
            found[r] = bound if bound > found[r] else found[r]
