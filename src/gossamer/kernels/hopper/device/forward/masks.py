"""What masks the steps of an item: bounds and words of its rows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import BOUNDS, FAR, WARPGROUP, within_keys
from gossamer.kernels.hopper.device.configurations import ForwardConfig
from gossamer.kernels.hopper.device.row_items import BATCH, BITS, BITSES, FIRST, FULL, FULLS, INTERVAL, INTERVALS, START


class Masks:
    """A word holds 32 columns of a row, shifted to a thread's first; a step has words for the two rows of a thread."""

    config: ForwardConfig
    parts: int

    @cute.jit
    def column(self, env, at, i):
        """The first column of step `i` of a list."""
        return env.lists[0, at + i // self.parts] * self.config.block_kv + i % self.parts * self.config.step

    @cute.jit
    def prepare(self, env, stage):
        """Load what masks the first step of an item: column, bounds and words of its rows."""
        item = env.item
        fulls, intervals = item[FULLS, stage], item[INTERVALS, stage]
        env.start_words.fill(-1)
        cute.arch.barrier(barrier_id=BOUNDS + env.me, number_of_threads=WARPGROUP + 32)
        env.start[0] = item[START, stage]
        if const_expr(self.config.lengths):
            env.start[0] = item[FIRST, stage]
            env.length[0] = within_keys(env.lengths[item[BATCH, stage]]) - env.quad
        lo, hi = self.row_bounds(env, stage)
        masked = fulls == 0 and intervals > 0
        for r in cutlass.range_constexpr(instructions.ROWS):
            end = env.length[0] if const_expr(self.config.lengths) else Int32(FAR)
            env.start[1 + r] = lo[r] if masked else -FAR
            env.start[3 + r] = hi[r] if masked else end
        env.start[5] = Int32(1) if fulls == 0 or self.config.lengths else Int32(0)
        if fulls + intervals == 0:  # noqa: SIM102
            if item[BITSES, stage] > 0:
                self.words(env, env.start_words, item[BITS, stage], Int32(0))

    @cute.jit
    def row_bounds(self, env, stage):
        """The bounds of this thread's rows of the item in `stage`, shifted to its first column."""
        lo, hi = cute.make_rmem_tensor((instructions.ROWS,), Int32), cute.make_rmem_tensor((instructions.ROWS,), Int32)
        for r in cutlass.range_constexpr(instructions.ROWS):
            lo[r] = env.bounds[env.my_row + 8 * r, 0, stage] - env.quad
            hi[r] = env.bounds[env.my_row + 8 * r, 1, stage] - env.quad
            if const_expr(self.config.lengths):
                hi[r] = cutlass.min(hi[r], env.length[0])
        return lo, hi

    @cute.jit
    def words(self, env, words, at, i):
        """The mask words of step `i` of a list of bits tiles, shifted to this thread's columns."""
        c = self.config
        entry, part = env.lists[1, at + i // self.parts], i % self.parts
        for r in cutlass.range_constexpr(instructions.ROWS):
            row = env.pool[entry * c.block_q + env.my_row + 8 * r, None]
            for n in cutlass.range_constexpr(cute.size(words, mode=[1])):
                words[r, n] = Int32(cutlass.Uint32(row[part * (c.step // 32) + n]) >> cutlass.Uint32(env.quad))
        if const_expr(c.lengths):
            first = env.lists[0, at + i // self.parts] * c.block_kv + part * c.step
            for n in cutlass.range_constexpr(cute.size(words, mode=[1])):
                within = instructions.below(env.length[0] - first - 32 * n)
                for r in cutlass.range_constexpr(instructions.ROWS):
                    words[r, n] = words[r, n] & within

    @cute.jit
    def edge_words(self, env, words, at, i):
        """The mask words of step `i` of a list of full tiles that holds the end of the keys."""
        first = self.column(env, at, i)
        for n in cutlass.range_constexpr(cute.size(words, mode=[1])):
            for r in cutlass.range_constexpr(instructions.ROWS):
                words[r, n] = instructions.below(env.length[0] - first - 32 * n)

    @cute.jit
    def second_words(self, env, words, stage):
        """The mask words of an item's second step, of whatever kind; returns whether it has any."""
        item, parts = env.item, self.parts
        fulls, intervals = item[FULLS, stage] * parts, item[INTERVALS, stage] * parts
        masked = fulls < 2
        words.fill(-1)
        if fulls < 2:
            if fulls + intervals >= 2:
                first = self.column(env, item[INTERVAL, stage], 1 - fulls)
                lo, hi = self.row_bounds(env, stage)
                instructions.interval_words(words, lo, hi, first)
            else:
                self.words(env, words, item[BITS, stage], 1 - fulls - intervals)
        elif const_expr(self.config.lengths):
            self.edge_words(env, words, item[FULL, stage], 1)
            masked = fulls >= 2
        return masked

    @cute.jit
    def start_mask(self, env):
        """Words of an item's first step; all ones when its tile is full."""
        lo, hi = cute.make_rmem_tensor((instructions.ROWS,), Int32), cute.make_rmem_tensor((instructions.ROWS,), Int32)
        for r in cutlass.range_constexpr(instructions.ROWS):
            lo[r], hi[r] = env.start[1 + r], env.start[3 + r]
        words = cute.make_rmem_tensor((instructions.ROWS, self.config.step // 32), Int32)
        instructions.interval_words(words, lo, hi, env.start[0])
        for r in cutlass.range_constexpr(instructions.ROWS):
            for n in cutlass.range_constexpr(self.config.step // 32):
                words[r, n] = words[r, n] & env.start_words[r, n]
        return words
