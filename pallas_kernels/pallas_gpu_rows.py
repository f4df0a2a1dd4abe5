"""The rows that there are of a tile, where a warpgroup multiplies 64: from device memory and to it.

Tiles have layout WGMMA, vectors WGMMA.reduce(1). Mosaic GPU is experimental: modules that other JAX
versions import must import this one late.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from pallas_kernels.pallas_gpu_hopper import WGMMA


def load_first(interpret: bool, ref, count, shape: tuple[int, ...], repeat: int = 1):
    """A tile (a vector) whose row i is row i // repeat in device memory, of rows 0 .. count - 1.

    After those the last of them is repeated, and nothing behind it is read, but by the interpreter.
    """
    if interpret:
        row = lax.div(jnp.arange(shape[0]), repeat)
        return ref[...][jnp.minimum(row, count - 1)]
    layout = WGMMA if len(shape) == 2 else WGMMA.reduce(1)
    signed = True if jnp.issubdtype(ref.dtype, jnp.integer) else None
    kinds = plgpu.RefType(), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=kinds, return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout)
    )
    def load(_, ref, count):
        index = ir.IndexType.get()
        last = arith.subi(arith.index_cast(index, count.registers.item()), mgpu.c(1, index))
        given = layout.to_mgpu()
        kind = ir.VectorType.get((given.vector_length,), ir.MemRefType(ref.type).element_type)
        registers = np.empty(given.registers_shape(shape), dtype=object)
        for n, (row, *column) in enumerate(_places(given, shape)):
            row = arith.minui(arith.divui(row, mgpu.c(repeat, index)), last)
            registers.flat[n] = vector.load(kind, ref, [row, *column])
        return mgpu.FragmentedArray(_registers=registers, _layout=given, _is_signed=signed)

    return load(ref, jnp.asarray(count, jnp.int32))


def store_first(interpret: bool, ref, x) -> None:
    """The first rows of a tile (a vector), as many as `ref` in device memory has."""
    rows = ref.shape[0]
    if interpret:
        ref[...] = x[:rows]
        return
    layout = WGMMA if len(x.shape) == 2 else WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(_, ref, x):
        index = ir.IndexType.get()
        places = _places(x.layout, x.shape)
        for value, (row, *column) in zip(x.registers.flat, places, strict=True):
            inside = arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.c(rows, index))
            branch = scf.IfOp(inside)
            with ir.InsertionPoint(branch.then_block):
                vector.store(value, ref, [row, *column])
                scf.yield_([])

    store(ref, x)


def _places(layout, shape: tuple[int, ...]):
    """Where the registers of a thread lie in a tile (a vector), in their order.

    All of a row are one address and constants: computed one by one they would fill registers.
    """
    if len(shape) == 1:
        return [place for (*place,) in layout.thread_idxs(shape)]
    index = ir.IndexType.get()
    halves = list(layout.thread_idxs((shape[0], 8)))
    assert len(halves) == 2
    return [
        [row, arith.addi(column, mgpu.c(8 * panel, index))]
        for panel in range(shape[1] // 8)
        for row, column in halves
    ]
