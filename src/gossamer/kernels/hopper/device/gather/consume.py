"""The consumer warpgroup of the forward over gathered columns."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.kernels.hopper.device.common import ring
from gossamer.kernels.hopper.device.forward.consume import Consumer
from gossamer.kernels.hopper.device.gather.produce import step_words
from gossamer.kernels.hopper.device.row_items import BITS, BITSES, FIRST


class RowConsumer(Consumer):
    """The consumer warpgroup of the forward kernel: 64 query rows, with one list of gathered columns."""

    config: Any
    asks = True  # K is waited for there

    @cute.jit
    def words(self, env, words, at, i):
        """The mask words of step `i` of the list from step `at` on, shifted to this thread's columns.

        They come with K. Every step asks for its own once, in their order, before its products: so this is where K of
        the step is waited for and made visible to the products. V of the step before is there too: a thread that
        gathers arrives when all that it has copied so far is complete.
        """
        c = self.config
        count = env.item.count[0]
        stage, phase = ring(count, c.stages)
        cute.arch.mbarrier_wait(env.bars.k_full + stage, phase)
        cute.arch.fence_view_async_shared()
        step_words(env, words, ring(count, 2 * c.stages)[0], at + i, c.lengths)
        env.item.count[0] = count + 1

    @cute.jit
    def key(self, env, stage, phase):
        """K is there since the words are."""

    @cute.jit
    def value(self, env, stage, phase):
        """V is there since the words of the step after it are."""

    @cute.jit
    def last(self, env, kv):
        """The P V of an item's last step."""
        stage, phase = ring(kv - 1, self.config.stages)
        cute.arch.mbarrier_wait(env.bars.v_full + stage, phase)
        cute.arch.fence_view_async_shared()
        Consumer.last(self, env, kv)

    @cute.jit
    def prepare(self, env, stage):
        """Load what masks the first step of an item."""
        env.start_words.fill(0)
        env.start[5] = Int32(1)
        if const_expr(self.config.lengths):  # lists ascend: what is below the length comes first
            env.length[0] = env.item[FIRST, stage] - env.quad
        if env.item[BITSES, stage] > 0:
            self.words(env, env.start_words, env.item[BITS, stage], Int32(0))

    @cute.jit
    def start_mask(self, env):
        """Words of an item's first step."""
        return env.start_words

    @cute.jit
    def second_words(self, env, words, stage):
        """The mask words of an item's second step."""
        self.words(env, words, env.item[BITS, stage], Int32(1))
        return cutlass.Boolean(True)

    @cute.jit
    def steps(self, env, stage, kv, started):
        """All steps of an item but the first; `started`: that one was done together with the item before."""
        at, count = env.item[BITS, stage], env.item[BITSES, stage]
        buffer = stage * self.groups + env.me
        done = Int32(1)
        if started != 0 and count > 1:
            self.step(env, "second", buffer, kv, stage, 1)
            kv += 1
            done = Int32(2)
        for i in cutlass.range(done, count, unroll=1):
            self.step(env, "bits", buffer, kv, at, i)
            kv += 1
        return kv
