"""What kernels for Hopper share: shared-memory layouts, products, vectors laid over a tile, and
copies that run ahead of the warpgroups that use them.

Mosaic GPU is experimental: modules that other JAX versions import must import this one late.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA

_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

# For kernels whose threads never read shared memory that threads of theirs wrote: all they read
# was copied in, all they write is copied out or feeds a product, so barriers and fences suffice.
READ_ONLY_SMEM = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def swizzled(*shape: int, dtype=jnp.bfloat16):
    """Shared memory that wgmma and the bulk copy engine read without bank conflicts."""
    return plgpu.SMEM(shape, dtype, transforms=_SWIZZLED)


def product(interpret: bool, a, b, acc=None, meanwhile=None):
    """acc + a @ b in fp32; a in registers or shared memory, b in shared memory.

    With `meanwhile`, a function run while the product is in flight, also what it returns.
    """
    assert acc is None or meanwhile is None
    (out,), beside = products(interpret, ([(a, b)], acc), meanwhile=meanwhile)
    return out if meanwhile is None else (out, beside)


def products(interpret: bool, *terms, meanwhile=None):
    """([acc + sum of a @ b over pairs, for (pairs, acc) in terms], meanwhile()), all in flight.

    acc is None or fp32. What `meanwhile` returns is passed on only where no term has an acc.
    """
    if interpret:  # the interpreter knows neither left operands in registers nor run_state
        found = []
        for pairs, acc in terms:
            for a, b in pairs:
                a = a if isinstance(a, jax.Array) else a[...]
                out = jnp.dot(a, b[...], preferred_element_type=jnp.float32)
                acc = out if acc is None else acc + out
            found.append(acc)
        return found, None if meanwhile is None else meanwhile()

    def start(refs):
        for ref, (pairs, _) in zip(refs, terms, strict=True):
            for a, b in pairs:
                plgpu.wgmma(ref, a, b)
        return None if meanwhile is None else meanwhile()

    shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs, _ in terms]
    if all(acc is None for _, acc in terms):

        def fresh(*refs):
            beside = start(refs)
            return [ref[...] for ref in refs], beside

        accumulators = [plgpu.ACC(shape, jnp.float32) for shape in shapes]
        found, beside = pl.run_scoped(fresh, *accumulators)
    else:

        def accumulated(refs):
            start(refs)

        given = [
            plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA) if acc is None else acc
            for (_, acc), shape in zip(terms, shapes, strict=True)
        ]
        found = pl.run_state(accumulated)([plgpu.ACC.init(x) for x in given])
        beside = None
    # Nothing ties the result to the wait that precedes it: without this the compiler reads it
    # early, and the assembler answers by running the matrix instructions one at a time.
    return lax.optimization_barrier(found), beside


def over_rows(vector, shape: tuple[int, int]):
    """A vector in registers (layout WGMMA.reduce(1)) over the rows of a tile: out_ij = vector_i."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (0,)), WGMMA)


def over_columns(vector, shape: tuple[int, int]):
    """A vector in memory over the columns of a tile: out_ij = vector_j."""
    # Loads that differ in nothing but layout are merged by the compiler, which then finds no
    # layout for both: `optimized` keeps this one apart from loads over rows and changes nothing
    # else.
    loaded = plgpu.load(vector, layout=WGMMA.reduce(0), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(loaded, shape, (1,)), WGMMA)


def copy_ahead(load, steps, stages: int, consumed):
    """load(step, slot) of every step, in turn into `stages` slots: what a copying warpgroup does.

    A slot is filled again when those who use it have arrived at its barrier of `consumed`; for the
    last `stages` steps nobody waits.
    """
    for step in range(stages):
        pl.when(step < steps)(functools.partial(load, step, step))

    @pl.loop(0, jnp.maximum(steps - stages, 0))
    def _refill(step):
        slot = lax.rem(step, jnp.int32(stages))
        plgpu.barrier_wait(consumed.at[slot])
        load(step + stages, slot)


def tile(shape: tuple[int, int]):
    """Zeros in accumulators."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def vector(rows: int, value: float):
    """One number for each row of a tile."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), WGMMA.reduce(1))
