"""Hopper kernel: the pass over tiles that carries the state, forwards or backwards.

With S the state entering a tile, R the scaled queries and W the keys that `tile_factors` leaves,
a the decay through the tile and M the attention inside it:

    O = R S + M V ;   S <- a o S + W^T V                forwards
    dS <- a o dS + R^T dO                               backwards, last tile first

Both are one kernel: (V, W) or (dO, R), with or without outputs, which may keep the state that each
tile begins with. A warpgroup owns 64 value columns and holds S^T [64, K] in fp32 accumulators; one
more warpgroup issues the copies.

Rows are split into stretches so that few heads fill the chip. The decay through a stretch is one
number a channel, so the split is exact and cheap: a pass over all stretches from zero states finds
what each adds, `join` chains them, and the pass proper runs all stretches at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_linear_attention.pallas_gpu_levels import TILE
from pallas_kernels.pallas_gpu_hopper import (
    READ_ONLY_SMEM,
    WGMMA,
    copy_ahead,
    over_columns,
    product,
    swizzled,
)

_MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form
_STAGES = 3


def stretches(batch: int, heads: int, tiles: int, value_width: int) -> int:
    """How many stretches to split each row into: the least modelled time, in tiles of a block.

    A pass takes as many rounds as its blocks need on the multiprocessors; a split pays a second
    pass, of half the cost, and chaining in proportion to the stretches.
    """

    def cost(pieces: int) -> float:
        blocks = batch * heads * -(-value_width // (2 * TILE)) * pieces
        whole = -(-blocks // _MULTIPROCESSORS) * -(-tiles // pieces)
        return whole if pieces == 1 else 1.5 * whole + pieces + 10

    choices = [p for p in range(1, min(tiles, 16) + 1) if (p - 1) * -(-tiles // p) < tiles]
    return min(choices, key=cost)


def _kernel(
    v_ref, w_ref, through_ref, state_ref, *refs,
    outputs, keep, reverse, workers, stretch, tiles, pieces, interpret,
):  # fmt: skip
    refs = list(refs)
    r_ref, a_ref = (refs.pop(0), refs.pop(0)) if outputs else (None, None)
    o_ref = refs.pop(0) if outputs else None
    kept_ref = refs.pop(0) if keep else None
    final_ref, v, w, through, *refs = refs
    r, a, o = (refs.pop(0), refs.pop(0), refs.pop(0)) if outputs else (None, None, None)
    kept = refs.pop(0) if keep else None
    loaded, consumed = refs
    row, head, pane, piece = (lax.axis_index(name) for name in ("row", "head", "pane", "piece"))
    worker = lax.axis_index("worker")
    # Backwards, stretches are counted from the end of the row.
    first = (pieces - 1 - piece if reverse else piece) * stretch
    count = jnp.minimum(stretch, tiles - first)

    def tile_of(step):
        return first + (count - 1 - step if reverse else step)

    def load(step, slot):
        tile, barrier = tile_of(step), loaded.at[slot]
        tokens = pl.ds(tile * TILE, TILE)
        plgpu.copy_gmem_to_smem(w_ref.at[row, tokens, head], w.at[slot], barrier)
        for n in range(workers):
            panel = pl.ds((pane * workers + n) * TILE, TILE)
            plgpu.copy_gmem_to_smem(v_ref.at[row, tokens, head, panel], v.at[slot, n], barrier)
        plgpu.copy_gmem_to_smem(through_ref.at[row, head, tile], through.at[slot], barrier)
        if outputs:
            plgpu.copy_gmem_to_smem(r_ref.at[row, tokens, head], r.at[slot], barrier)
            plgpu.copy_gmem_to_smem(a_ref.at[row, head, tile], a.at[slot], barrier)

    @pl.when(worker == workers)
    def _copies():
        if workers == 2:
            plgpu.set_max_registers(40, action="decrease")
        copy_ahead(load, count, _STAGES, consumed)

    @pl.when(worker < workers)
    def _states():
        if workers == 2:
            plgpu.set_max_registers(232, action="increase")
        panel = pl.ds((pane * workers + worker) * TILE, TILE)

        def step_through(step, state):
            slot = lax.rem(step, jnp.int32(_STAGES))
            tile = tile_of(step)
            tokens = pl.ds(tile * TILE, TILE)
            plgpu.barrier_wait(loaded.at[slot])
            values = plgpu.load(v.at[slot, worker].transpose((1, 0)), layout=WGMMA)
            half = state.astype(jnp.bfloat16)
            if outputs or keep:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if outputs:
                read = product(interpret, half, r.at[slot].transpose((1, 0)))
                read = product(interpret, values, a.at[slot].transpose((1, 0)), read)
                o.at[worker].transpose((1, 0))[...] = read.astype(jnp.bfloat16)
            if keep:
                kept[worker] = half
            if outputs or keep:
                plgpu.commit_smem()
            if outputs:
                plgpu.copy_smem_to_gmem(o.at[worker], o_ref.at[row, tokens, head, panel])
            if keep:
                plgpu.copy_smem_to_gmem(kept.at[worker], kept_ref.at[row, head, tile, panel])
            state *= over_columns(through.at[slot], (TILE, w.shape[-1]))
            state = product(interpret, values, w.at[slot], state)

            @pl.when(step + _STAGES < count)  # otherwise nobody waits for the slot
            def _release():
                plgpu.barrier_arrive(consumed.at[slot])

            return state

        here = state_ref.at[row, head, piece, panel]
        state = plgpu.load(here, layout=WGMMA, optimized=False)
        state = lax.fori_loop(0, count, step_through, state)
        final_ref.at[row, head, piece, panel][...] = state
        plgpu.wait_smem_to_gmem(0)


def pass_states(
    v: Float[Array, "B T H V"],
    w: Float[Array, "B T H K"],
    through: Float[Array, "B H N K"],
    states: Float[Array, "B H P V K"],
    reading: tuple[Float[Array, "B T H K"], Float[Array, "B H N C C"]] | None = None,
    *,
    keep: bool = False,
    reverse: bool = False,
    interpret=None,
) -> tuple[Array, ...]:
    """With `reading` (R, M) the outputs [B, T, H, V]; with `keep` the state each tile begins with
    [B, H, N, V, K], bf16; and the states that leave the P stretches, whose first are `states`.

    States are transposed. With `reverse` stretches are counted from the end of the row.
    """
    batch, _, heads, value_width = v.shape
    tiles, width = through.shape[2:]
    pieces = states.shape[2]
    workers = 2 if value_width % (2 * TILE) == 0 else 1
    outputs = reading is not None
    out_type, scratch = [], []
    if outputs:
        out_type.append(jax.ShapeDtypeStruct(v.shape, v.dtype))
        scratch += [swizzled(_STAGES, TILE, width), swizzled(_STAGES, TILE, TILE)]
        scratch.append(swizzled(workers, TILE, TILE))
    if keep:
        shape = (batch, heads, tiles, value_width, width)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
        scratch.append(swizzled(workers, TILE, width))
    return plgpu.kernel(
        functools.partial(
            _kernel,
            outputs=outputs,
            keep=keep,
            reverse=reverse,
            workers=workers,
            stretch=-(-tiles // pieces),
            tiles=tiles,
            pieces=pieces,
            interpret=interpret is not None,
        ),
        out_type=(*out_type, jax.ShapeDtypeStruct(states.shape, jnp.float32)),
        scratch_types=[
            swizzled(_STAGES, workers, TILE, TILE),
            swizzled(_STAGES, TILE, width),
            plgpu.SMEM((_STAGES, width), jnp.float32),
            *scratch,
            plgpu.Barrier(num_arrivals=(4 if outputs else 2) + workers, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=workers, num_barriers=_STAGES),
        ],
        grid=(value_width // (TILE * workers), pieces, heads, batch),
        grid_names=("pane", "piece", "head", "row"),
        num_threads=workers + 1,
        thread_name="worker",
        kernel_name="linear_attention_pass",
        compiler_params=READ_ONLY_SMEM,
        interpret=interpret,
    )(v, w, through, states, *(reading or ()))


def entering(
    v: Array, w: Array, through: Array, first: Array, pieces: int, *, reverse=False, interpret=None
) -> Float[Array, "B H P V K"]:
    """The state each of `pieces` stretches begins with, from that of the row, [B, H, V, K]."""
    if pieces == 1:
        return first[:, :, None]
    nothing = jnp.zeros((*first.shape[:2], pieces, *first.shape[2:]), jnp.float32)
    added = pass_states(v, w, through, nothing, reverse=reverse, interpret=interpret)[-1]
    batch, heads, tiles, width = through.shape
    stretch = -(-tiles // pieces)
    whole = jnp.pad(
        through, ((0, 0), (0, 0), (0, pieces * stretch - tiles), (0, 0)), constant_values=1.0
    )
    decay = whole.reshape(batch, heads, pieces, stretch, 1, width).prod(3)
    if reverse:
        decay = jnp.flip(decay, 2)
    states = [first]
    for piece in range(pieces - 1):
        states.append(decay[:, :, piece] * states[-1] + added[:, :, piece])
    return jnp.stack(states, 2)
