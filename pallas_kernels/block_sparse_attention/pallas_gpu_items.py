"""Which tile a block of threads takes next: it claims one row of items while it loads the last.

Rows lie in device memory in the order of `pallas_gpu_plan.order`. Block b starts with row b and
claims further ones by adding to a counter, so that blocks whose tiles were short take more. Only
the copying warpgroup claims; the row reaches all through a ring of two slots. What is computed for
a tile does not depend on who takes it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas_kernels.block_sparse_attention.pallas_gpu_plan import (
    ITEM_WORDS,
    LANE_WORDS,
    Item,
    Plan,
)

Ref = Any  # a reference to memory inside a kernel
_SLOTS = 2


class Ring(NamedTuple):
    """Shared memory and barriers of a block; the counter is in device memory, one a block."""

    rows: Ref  # [slots + 1, ITEM_WORDS]; the claiming warpgroup shares a number in the last
    loaded: Ref
    free: Ref
    counter: Ref | None  # None in the interpreter, which has none: rows are dealt out in turn


def scratch(plan: Plan, interpret: bool) -> Ring:
    """Types of `Ring`."""
    return Ring(
        rows=plgpu.SMEM((_SLOTS + 1, ITEM_WORDS), jnp.int32),
        loaded=plgpu.Barrier(num_arrivals=1, num_barriers=_SLOTS),
        free=plgpu.Barrier(num_arrivals=plan.workers, num_barriers=_SLOTS),
        counter=None if interpret else plgpu.SemaphoreType.REGULAR,
    )


def deal(plan: Plan, items: Ref, ring: Ring, copy: Callable[[list[Item], Any], Any], done) -> Any:
    """Claims rows until there are none left; done -> copy(items of the lanes, done) for each."""
    last, blocks = items.shape[0] - 1, min(plan.blocks, items.shape[0] - 1)
    block = lax.axis_index("block")

    def fetch(row, round_):
        slot = lax.rem(round_, jnp.int32(_SLOTS))
        pl.when(round_ >= _SLOTS)(lambda: plgpu.barrier_wait(ring.free.at[slot]))
        source = items.at[jnp.minimum(row, last)]
        plgpu.copy_gmem_to_smem(source, ring.rows.at[slot], ring.loaded.at[slot])

    def received(round_):
        slot = lax.rem(round_, jnp.int32(_SLOTS))
        plgpu.barrier_wait(ring.loaded.at[slot])
        return [_read(ring, slot, lane) for lane in range(plan.lanes)]

    def one(carry):
        round_, here, done = carry
        if ring.counter is None:
            claimed = block + blocks * (round_ + 1)
        else:
            claimed = blocks + _add_one(ring.counter, ring.rows, block)
        fetch(claimed, round_ + 1)
        done = copy(here, done)
        return round_ + 1, received(round_ + 1), done

    first = jnp.int32(0)
    fetch(block, first)
    start = first, received(first), done
    rounds, _, done = lax.while_loop(lambda carry: carry[1][0].tile >= 0, one, start)
    for slot in range(_SLOTS):  # every barrier is waited for
        pl.when(slot <= rounds)(functools.partial(plgpu.barrier_wait, ring.free.at[slot]))
    return done


def take(ring: Ring, lane, compute: Callable[[Item, Any], Any], done) -> None:
    """done -> compute(item, done) for each item of this warpgroup's lane."""

    def received(round_):
        slot = lax.rem(round_, jnp.int32(_SLOTS))
        plgpu.barrier_wait(ring.loaded.at[slot])
        some = _read(ring, slot, 0).tile >= 0
        item = _read(ring, slot, lane)
        plgpu.barrier_arrive(ring.free.at[slot])
        return some, item

    def one(carry):
        round_, (_, item), done = carry
        done = compute(item, done)
        return round_ + 1, received(round_ + 1), done

    first = jnp.int32(0)
    lax.while_loop(lambda carry: carry[1][0], one, (first, received(first), done))


def _read(ring: Ring, slot, lane) -> Item:
    return Item(*(ring.rows[slot, lane * LANE_WORDS + n] for n in range(len(Item._fields))))


def _add_one(counter: Ref, rows: Ref, block) -> Any:
    """The value of block 0's counter before 1 is added to it.

    There is a counter for each block, in their order, and all are 0 when a kernel starts. (One for
    all would be shared by the launches that vmap makes one of.)
    """
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT)
    kinds = plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=kinds, return_type=scalar)
    def add(_, counter, rows, block):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        one = arith.constant(i32, 1)
        place = [arith.constant(index, _SLOTS), arith.constant(index, 0)]
        own = mgpu.utils.memref_ptr(counter)
        back = arith.muli(block.registers.item(), arith.constant(i32, -1))
        address = mgpu.utils.getelementptr(own, [back], i32)
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            adding, unordered = llvm.AtomicBinOp.add, llvm.AtomicOrdering.monotonic
            before = llvm.atomicrmw(adding, address, one, unordered, syncscope="device")
            memref.store(before, rows, place)
        mgpu.utils.warpgroup_barrier()
        found = memref.load(rows, place)
        mgpu.utils.warpgroup_barrier()
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return add(counter, rows, block)
