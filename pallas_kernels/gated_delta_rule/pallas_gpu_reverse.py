"""Hopper kernels: dS, the gradient of the state, from the last tile of a row to the first.

With dS the gradient of the state leaving a tile, e = CARRY_IN, w = CARRY_OUT and
M = [s (Q K^T) o D diag(beta)]_tril:
  dX = M^T dO + w o (K dS) ;  dV = A^T dX ;  dS <- e_last dS + s (e o Q)^T dO - (e o K)^T dV
dX is the gradient of the errors X of `pallas_gpu_scan` by where they go. A warpgroup holds dS^T of
64 value columns, as forwards.

Rows are split as forwards (`pallas_gpu_split`): a stretch maps dS_out to T^T dS_out + R, with T of
the forward pass, which has it of every stretch but the last. `summarise_reversed` runs every
stretch but the first from dS = 0 (R) and, without dO, the last one from dS = I (T^T); `join` chains
them; `reverse` then runs all stretches at once. Stretches are counted from the end of the row
throughout.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_delta_rule.pallas_gpu_scan import workers_of
from pallas_kernels.gated_delta_rule.pallas_gpu_split import Halves, map_shapes, store_map
from pallas_kernels.gated_delta_rule.pallas_gpu_tiles import (
    BETA,
    CARRY_IN,
    CARRY_OUT,
    READ_ONLY_SMEM,
    TILE,
    WGMMA,
    columns,
    decay_tile,
    left_operand,
    product,
    swizzled,
    wide,
)

_STAGES = 2


def _stretch(
    q_ref, k_ref, do_ref, a_ref, gates_ref, kq, do, a, gates, m, loaded, attended, consumed, used,
    *, pane, piece, group, workers, stretch, tiles, pieces, scale, segmented, interpret,
    begin, round_state, keep, finish,
):  # fmt: skip
    """One stretch. `begin(panel)` gives dS^T [64, K] of 64 columns, and what to multiply dO with;
    `round_state(tile, panel, dS)` gives dS in bf16, in registers or shared memory, `keep(tile,
    panel, that, dV)` takes what a tile leaves behind, `finish(panel, dS)` the last dS."""
    row, head = (lax.axis_index(name) for name in ("row", "head"))
    key_head = lax.div(head, jnp.int32(group))
    worker = lax.axis_index("worker")
    only_one = m.shape[0] == 1  # tile M in shared memory, not one a stage

    def attention(step):
        return m.at[lax.rem(step, jnp.int32(m.shape[0]))]

    first = (pieces - 1 - piece) * stretch
    count = jnp.minimum(stretch, tiles - first)

    def load(step, slot):
        tile = first + count - 1 - step
        tokens = pl.ds(tile * TILE, TILE)
        barrier = loaded.at[slot]
        keys, queries = kq.at[slot, pl.ds(0, TILE)], kq.at[slot, pl.ds(TILE, TILE)]
        plgpu.copy_gmem_to_smem(k_ref.at[row, tokens, key_head], keys, barrier)
        plgpu.copy_gmem_to_smem(q_ref.at[row, tokens, key_head], queries, barrier)
        for w in range(workers):
            # Panels past V carry T^T, not R: any dO will do, it is multiplied by zero.
            last = do_ref.shape[-1] // TILE - 1
            panel = pl.ds(jnp.minimum(pane * workers + w, last) * TILE, TILE)
            plgpu.copy_gmem_to_smem(do_ref.at[row, tokens, head, panel], do.at[slot, w], barrier)
        plgpu.copy_gmem_to_smem(a_ref.at[row, head, tile], a.at[slot], barrier)
        plgpu.copy_gmem_to_smem(gates_ref.at[row, head, tile], gates.at[slot], barrier)

    @pl.when(worker == workers)
    def _copies_and_attention():
        if workers == 2:
            plgpu.set_max_registers(88, action="decrease")
        for step in range(_STAGES):
            pl.when(step < count)(functools.partial(load, step, step))

        @pl.loop(0, count)
        def _tile(step):
            slot = lax.rem(step, jnp.int32(_STAGES))
            plgpu.barrier_wait(loaded.at[slot])
            keys, queries = kq.at[slot, pl.ds(0, TILE)], kq.at[slot, pl.ds(TILE, TILE)]
            scores = product(interpret, queries, keys.transpose((1, 0)))
            scores = scores * decay_tile(gates.at[slot], segmented, strict=False)
            scores = scores * (columns(gates.at[slot, BETA]) * scale)
            if only_one:
                pl.when(step > 0)(lambda: plgpu.barrier_wait(used))
            attention(step)[...] = scores.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(attended.at[slot])

            @pl.when((step > 0) & (step - 1 + _STAGES < count))
            def _refill():
                free = lax.rem(step - 1, jnp.int32(_STAGES))
                plgpu.barrier_wait(consumed.at[free])
                load(step - 1 + _STAGES, free)

    @pl.when(worker < workers)
    def _gradients():
        if workers == 2:
            plgpu.set_max_registers(208, action="increase")
        panel = (pane * workers + worker) * TILE
        dstate, weight = begin(panel)

        def tile_step(step, dstate):
            slot = lax.rem(step, jnp.int32(_STAGES))
            plgpu.barrier_wait(loaded.at[slot])
            keys, queries = kq.at[slot, pl.ds(0, TILE)], kq.at[slot, pl.ds(TILE, TILE)]
            tile = first + count - 1 - step
            half = round_state(tile, panel, dstate)
            derrors = product(interpret, half, keys.transpose((1, 0)))
            derrors = derrors * columns(gates.at[slot, CARRY_OUT])
            dout = plgpu.load(do.at[slot, worker].transpose((1, 0)), layout=WGMMA)
            if weight is not None:
                dout = (dout.astype(jnp.float32) * weight).astype(jnp.bfloat16)
            plgpu.barrier_wait(attended.at[slot])
            derrors = product(interpret, dout, attention(step), derrors)
            if only_one:
                pl.when(step + 1 < count)(lambda: plgpu.barrier_arrive(used))
            dv = product(interpret, derrors.astype(jnp.bfloat16), a.at[slot])
            carry_in = columns(gates.at[slot, CARRY_IN])
            dstate = dstate * gates[slot, CARRY_IN, TILE - 1]
            read = (dout.astype(jnp.float32) * (carry_in * scale)).astype(jnp.bfloat16)
            dstate = product(interpret, read, queries, dstate)
            dstate = product(interpret, (-dv * carry_in).astype(jnp.bfloat16), keys, dstate)

            @pl.when(step + _STAGES < count)  # otherwise nobody waits for the slot
            def _release():
                plgpu.barrier_arrive(consumed.at[slot])

            keep(tile, panel, half, dv)
            return dstate

        finish(panel, lax.fori_loop(0, count, tile_step, dstate))


def _scratch(workers, width, vectors):
    """The shared memory and barriers of `_stretch`."""
    return [
        swizzled(_STAGES, 2 * TILE, width),
        swizzled(_STAGES, workers, TILE, TILE),
        swizzled(_STAGES, TILE, TILE),
        plgpu.SMEM((_STAGES, vectors, TILE), jnp.float32),
        swizzled(1 if wide(width) else _STAGES, TILE, TILE),
        plgpu.Barrier(num_arrivals=4 + workers, num_barriers=_STAGES),
        plgpu.Barrier(num_barriers=_STAGES),
        plgpu.Barrier(num_arrivals=workers, num_barriers=_STAGES),
        plgpu.Barrier(num_arrivals=workers),
    ]


def _summarise_kernel(
    q_ref, k_ref, do_ref, a_ref, gates_ref, r_high_ref, r_low_ref, t_high_ref, t_low_ref,
    *scratch, **sizes,
):  # fmt: skip
    row, head, block = (lax.axis_index(name) for name in ("row", "head", "block"))
    value_width, width = do_ref.shape[-1], q_ref.shape[-1]
    if wide(width):
        *scratch, copies = scratch
    # First the panes of R, stretch by stretch, then those of the last stretch's transition.
    panes = value_width // (TILE * sizes["workers"])
    behind = block - panes * (sizes["pieces"] - 1)
    piece = jnp.where(behind < 0, lax.div(block, jnp.int32(panes)), 0)
    pane = jnp.where(behind < 0, lax.rem(block, jnp.int32(panes)), panes + behind)

    def begin(panel):
        i = plgpu.broadcasted_iota(jnp.int32, (TILE, width), 0, layout=WGMMA)
        j = plgpu.broadcasted_iota(jnp.int32, (TILE, width), 1, layout=WGMMA)
        dstate = jnp.where(i + (panel - value_width) == j, 1.0, 0.0)
        return dstate, (panel < value_width).astype(jnp.float32)

    def round_state(tile, panel, dstate):
        return left_operand(dstate, copies.at[lax.axis_index("worker")] if wide(width) else None)

    def keep(tile, panel, dstate, dv):
        pass

    def finish(panel, dstate):
        maps = (r_high_ref, r_low_ref), (t_high_ref, t_low_ref)
        store_map(*maps, (row, head, piece), panel, dstate)

    _stretch(q_ref, k_ref, do_ref, a_ref, gates_ref, *scratch, pane=pane, piece=piece, **sizes,
             begin=begin, round_state=round_state, keep=keep, finish=finish)  # fmt: skip


def _reverse_kernel(
    q_ref, k_ref, do_ref, a_ref, gates_ref, dstate_ref, dstates_ref, dv_ref, dfirst_ref,
    kept, out, *scratch, **sizes,
):  # fmt: skip
    row, head, pane, piece = (lax.axis_index(name) for name in ("row", "head", "pane", "piece"))
    worker = lax.axis_index("worker")

    def begin(panel):
        here = dstate_ref.at[row, head, piece, pl.ds(panel, TILE)]
        return plgpu.load(here, layout=WGMMA, optimized=False), None

    # A wide dS goes to the product by the shared memory it leaves the kernel from.
    early = wide(q_ref.shape[-1])

    def copy_state(tile, panel):
        target = dstates_ref.at[row, head, tile, pl.ds(panel, TILE)]
        plgpu.copy_smem_to_gmem(kept.at[worker], target)

    def round_state(tile, panel, dstate):
        if not early:
            return left_operand(dstate)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # dV may be under way yet
        half = left_operand(dstate, kept.at[worker])
        copy_state(tile, panel)
        return half

    def keep(tile, panel, dstate, dv):
        plgpu.wait_smem_to_gmem(int(early), wait_read_only=True)
        if not early:
            kept[worker] = dstate
        out.at[worker].transpose((1, 0))[...] = dv.astype(jnp.bfloat16)
        plgpu.commit_smem()
        if not early:
            copy_state(tile, panel)
        tokens, columns_of = pl.ds(tile * TILE, TILE), pl.ds(panel, TILE)
        plgpu.copy_smem_to_gmem(out.at[worker], dv_ref.at[row, tokens, head, columns_of])

    def finish(panel, dstate):
        dfirst_ref.at[row, head, piece, pl.ds(panel, TILE)][...] = dstate
        plgpu.wait_smem_to_gmem(0)

    _stretch(q_ref, k_ref, do_ref, a_ref, gates_ref, *scratch, pane=pane, piece=piece, **sizes,
             begin=begin, round_state=round_state, keep=keep, finish=finish)  # fmt: skip


def summarise_reversed(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    do: Float[Array, "B T H V"],
    a: Float[Array, "B H N C C"],
    gates: Float[Array, "B H N R C"],
    transitions: Halves,
    *,
    scale: float,
    interpret=None,
) -> tuple[Halves, Halves]:
    """R^T and T of every stretch but the first, from the last to the second, as leading and
    trailing bits; `transitions` are T^T of every stretch but the last, by `summarise`."""
    batch, _, heads, value_width = do.shape
    tiles, vectors = gates.shape[2:4]
    width = k.shape[-1]
    pieces = transitions[0].shape[2] + 1
    workers = min(workers_of(width, value_width), workers_of(width, width))
    out_type = map_shapes(batch, heads, pieces - 1, value_width, width)[:2]
    out_type += map_shapes(batch, heads, 1, value_width, width)[2:]
    *r, high, low = plgpu.kernel(
        functools.partial(
            _summarise_kernel,
            group=heads // k.shape[2],
            workers=workers,
            stretch=-(-tiles // pieces),
            tiles=tiles,
            pieces=pieces,
            scale=scale,
            segmented=vectors == 5,
            interpret=interpret is not None,
        ),
        out_type=out_type,
        scratch_types=[
            *_scratch(workers, width, vectors),
            *([swizzled(workers, TILE, width)] if wide(width) else []),
        ],
        grid=(((pieces - 1) * value_width + width) // (TILE * workers), heads, batch),
        grid_names=("block", "head", "row"),
        num_threads=workers + 1,
        thread_name="worker",
        kernel_name="delta_rule_summarise_reversed",
        compiler_params=READ_ONLY_SMEM,
        interpret=interpret,
    )(q, k, do, a, gates)

    def all_but_first(last, transposed):
        earlier = jnp.flip(transposed[:, :, 1:], axis=2).swapaxes(3, 4)
        return jnp.concatenate([last, earlier], axis=2)

    return tuple(r), tuple(map(all_but_first, (high, low), transitions))


def reverse(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    do: Float[Array, "B T H V"],
    a: Float[Array, "B H N C C"],
    gates: Float[Array, "B H N R C"],
    dstates: Float[Array, "B H P V K"],
    *,
    scale: float,
    interpret=None,
) -> tuple[Float[Array, "B H N V K"], Float[Array, "B T H V"], Float[Array, "B H P V K"]]:
    """dS (transposed, bf16) leaving every tile, dV, and dS entering each of the P stretches.

    `dstates` are those leaving the stretches; both from the last stretch to the first.
    """
    batch, _, heads, value_width = do.shape
    tiles, vectors = gates.shape[2:4]
    width = k.shape[-1]
    pieces = dstates.shape[2]
    workers = workers_of(width, value_width)
    return plgpu.kernel(
        functools.partial(
            _reverse_kernel,
            group=heads // k.shape[2],
            workers=workers,
            stretch=-(-tiles // pieces),
            tiles=tiles,
            pieces=pieces,
            scale=scale,
            segmented=vectors == 5,
            interpret=interpret is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, tiles, value_width, width), jnp.bfloat16),
            jax.ShapeDtypeStruct(do.shape, do.dtype),
            jax.ShapeDtypeStruct(dstates.shape, jnp.float32),
        ),
        scratch_types=[
            swizzled(workers, TILE, width),
            swizzled(workers, TILE, TILE),
            *_scratch(workers, width, vectors),
        ],
        grid=(value_width // (TILE * workers), pieces, heads, batch),
        grid_names=("pane", "piece", "head", "row"),
        num_threads=workers + 1,
        thread_name="worker",
        kernel_name="delta_rule_reverse",
        compiler_params=READ_ONLY_SMEM,
        interpret=interpret,
    )(q, k, do, a, gates, dstates)
