"""The step on Hopper GPUs: one kernel, the state read once and written once, in place.

A block of 128 threads takes all K rows of some value columns of one head's state at a time, from
shared memory into registers, where both sums over K and the update are made. The copy engine brings
the next ones and takes away the last one meanwhile. It is bound by memory: 8 bytes and 4
multiply-adds a number of the state.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array, Float
from pallas_kernels.dispatch import Target
from pallas_kernels.gated_delta_rule.pallas_gpu import JAX_VERSION

_CHIPS = ("H100", "H200")
_MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form
_SHARED_BYTES = 224 * 1024  # of a multiprocessor
_COLUMNS = 32  # of the values a part; narrower ones cannot be swizzled
_STAGES = 3  # parts of the state in a block's shared memory
_KEY_WIDTHS = (64, 128, 192, 256)


def unsupported(problem: Any, target: Target) -> str | None:
    """Why the Hopper kernel cannot take `problem` on `target`, or None."""
    if target.platform != "gpu" or not any(chip in target.device_kind for chip in _CHIPS):
        return f"needs an NVIDIA {' or '.join(_CHIPS)}, not {target.device_kind!r}"
    if jax.__version__ != JAX_VERSION:
        return f"its kernel is written for JAX {JAX_VERSION}, not {jax.__version__}"
    if problem.dtype not in ("bfloat16", "float32"):
        return f"q, k and v must be bfloat16 or float32, not {problem.dtype}"
    if problem.K not in _KEY_WIDTHS:
        return f"K must be one of {_KEY_WIDTHS}, not {problem.K}"
    if problem.V % 64:
        return f"V must be a multiple of 64, not {problem.V}"
    return None


def blocks_of(parts: int, width: int) -> int:
    """Three blocks a multiprocessor, or two where shared memory holds no more."""
    fitting = _SHARED_BYTES // (_STAGES * width * _COLUMNS * 4)
    return min(parts, _MULTIPROCESSORS * min(3, fitting))


def step(
    scale: float,
    q: Float[Array, "B Hk K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
    *,
    columns: int = _COLUMNS,
    blocks: int | None = None,
    interpret=None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """See `api.gated_delta_step`; `columns` of the values are a part, `blocks_of` says how many."""
    # Mosaic GPU is experimental: other JAX versions must be able to import this module.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, heads, width, value_width = state.shape
    panes = value_width // columns
    parts = batch * heads * panes
    blocks = min(parts, blocks or blocks_of(parts, width))
    group = heads // k.shape[1]
    layout = plgpu.Layout.WGMMA
    shape = (width, columns)

    def over(axis, vector):
        """A vector in registers over one axis of a part of the state."""
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), layout)

    def kernel(q_ref, k_ref, v_ref, g_ref, beta_ref, state_ref, o_ref, held, loaded):
        block = lax.axis_index("block")
        count = lax.div(parts - 1 - block, jnp.int32(blocks)) + 1
        load_vector = functools.partial(plgpu.load, optimized=False)

        def place(step):
            """Row, head and columns of the block's part number `step`."""
            index = block + step * blocks
            line = lax.div(index, jnp.int32(panes))
            row, head = lax.div(line, jnp.int32(heads)), lax.rem(line, jnp.int32(heads))
            return row, head, pl.ds(lax.rem(index, jnp.int32(panes)) * columns, columns)

        def load(step):
            row, head, mine = place(step)
            slot = lax.rem(step, jnp.int32(_STAGES))
            source = state_ref.at[row, head, :, mine]
            plgpu.copy_gmem_to_smem(source, held.at[slot], loaded.at[slot])

        for step in range(_STAGES):
            pl.when(step < count)(functools.partial(load, jnp.int32(step)))

        @pl.loop(0, count)
        def _part(step):
            row, head, mine = place(step)
            slot = lax.rem(step, jnp.int32(_STAGES))
            key_head = lax.div(head, jnp.int32(group))
            q, k = (
                load_vector(ref.at[row, key_head], layout=layout.reduce(1)).astype(jnp.float32)
                for ref in (q_ref, k_ref)
            )
            v = load_vector(v_ref.at[row, head, mine], layout=layout.reduce(0)).astype(jnp.float32)
            decay, strength = jnp.exp(g_ref[row, head]), beta_ref[row, head]
            plgpu.barrier_wait(loaded.at[slot])
            state = plgpu.load(held.at[slot], layout=layout) * decay
            written = strength * (v - jnp.sum(state * over(0, k), axis=0))
            state = state + over(0, k) * over(1, written)
            o = scale * jnp.sum(state * over(0, q), axis=0)
            o_ref.at[row, head, mine][...] = o.astype(o_ref.dtype)
            held[slot] = state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(held.at[slot], state_ref.at[row, head, :, mine])

            # The part before this one has left its place by now: the next but one comes there.
            following = step - 1 + _STAGES
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            pl.when((step > 0) & (following < count))(functools.partial(load, following))

        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scratch_types=[
            plgpu.SMEM(
                (_STAGES, *shape),
                jnp.float32,
                transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
            ),
            plgpu.Barrier(num_barriers=_STAGES),
        ],
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="gated_delta_step",
        interpret=interpret,
    )
    updated = jax.new_ref(state)
    o = run(q, k, v, g, beta, updated)
    return o, jax.freeze(updated)
