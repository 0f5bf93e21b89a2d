"""The shell of persistent kernels around their roles: shared memory, barriers, registers of a warpgroup, the launch."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from gossamer.cute.common import Block, Ring
from gossamer.cute.row_items import ITEM
from gossamer.cute.tiles import Tma
from gossamer.cute.work import ItemRing


def barriers(**stages: int) -> dict[str, Any]:
    """Shared memory for the barriers of rings of so many stages."""
    return {
        f"{name}_{state}": cute.struct.MemRange[cutlass.Int64, n]
        for name, n in stages.items()
        for state in ("full", "empty")
    }


def ring_of(memory: Any, name: str, stages: int, fillers: int, readers: int, kind: Any = Ring, *more: Any) -> Any:
    """A ring whose stages become full by so many arrivals, and empty by so many; `more`: other fields of its kind."""
    full, empty = [getattr(memory, f"{name}_{state}").data_ptr() for state in ("full", "empty")]
    return kind(full, empty, stages, fillers, readers, *more)


def items_of(memory: Any, name: str, stages: int, readers: int) -> ItemRing:
    """A ring of descriptions of items, in the member `item` of shared memory; one thread fills a stage."""
    return ring_of(memory, name, stages, 1, readers, ItemRing, words(memory.item, ITEM, stages))


def array(dtype: Any, size: int, align: int = 0) -> Any:
    """Shared memory for `size` numbers; `align` in bytes."""
    memory = cute.struct.MemRange[dtype, size]
    return cute.struct.Align[memory, align] if align else memory


def tile_memory(dtype: Any, layout: Any) -> Any:
    """Shared memory for tiles that products read or TMA copies."""
    return array(dtype, cute.cosize(layout), 1024)


def words(memory: Any, *shape: int) -> Any:
    """An array in shared memory as a tensor, its first mode the fastest."""
    return cute.make_tensor(memory.data_ptr(), cute.make_layout(shape if len(shape) > 1 else shape[0]))


def tiles(memory: Any, layout: Any) -> Any:
    """Tiles in shared memory as a tensor."""
    return memory.get_tensor(layout.outer, swizzle=layout.inner)


class Shell:
    """A kernel of blocks that take items of work until there are none.

    The first warpgroup of a block serves: its warps load, gather and store. The others compute. A kernel says what is
    in shared memory (`memory`), makes of it and of its arguments what roles share (`block`), and who does what.
    """

    threads: int
    registers: tuple[int, int]  # of a thread of the first warpgroup, and of those that compute
    blocks: int = 1  # that share a multiprocessor
    # Shared memory's part of the cache, in percent. For two blocks the compiler would otherwise ask the driver, which
    # need not be there.
    carveout: int | None = 100

    def memory(self) -> dict[str, Any]:
        """The members of shared memory, in order."""
        raise NotImplementedError

    def block(self, arguments: Any, memory: Any) -> Block:
        """The memory and values that the roles of a block share."""
        raise NotImplementedError

    def prepared(self, block: Any) -> Block:
        """The block with what all of its warps compute before their roles begin."""
        return block

    def launch(self, arguments: Any, blocks: Int32, stream: Any) -> None:
        """Start so many blocks. `arguments` is a named tuple; the kernel's parameters are its fields, in order."""
        self.kernel(arguments).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=self.carveout,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in [x for x in arguments if isinstance(x, Tma)]:
                cpasync.prefetch_descriptor(tma.atom)
        shared = cute.struct(type("Shared", (), {"__annotations__": self.memory()}))
        block = self.block(arguments, SmemAllocator().allocate(shared))
        if warp == 0:
            with cute.arch.elect_one():
                for rings in block.rings:
                    init_rings(rings)
        cute.arch.mbarrier_init_fence()
        block = self.prepared(block)
        serving, computing = self.registers
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(serving)
            self.serve(block, warp)
        else:
            cute.arch.setmaxregister_increase(computing)
            self.compute(block)

    def serve(self, block: Any, warp: Any) -> None:
        """Run a warp of the first warpgroup."""
        raise NotImplementedError

    def compute(self, block: Any) -> None:
        """Run the other warpgroups."""
        raise NotImplementedError


@cute.jit
def init_rings(rings: Any) -> None:
    """Set up the barriers of rings of as many stages."""
    for stage in cutlass.range_constexpr(rings[0].stages):
        for one in rings:
            one.init(stage)
