"""The two Hopper kernels of decode attention: a worker's parts of its lists, and their merging.

Registers of a thread at V = 128: 64 output, 32 logits, 16 probabilities (bf16 pairs).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import cdiv
from pallas_kernels.decode_attention.pallas_gpu import STEP, Shares
from pallas_kernels.decode_attention.parts import Lists, Logits
from pallas_kernels.pallas_gpu_hopper import WGMMA, over_rows, products, swizzled

_COLUMNS, _AT_ONCE = 32, 4  # of the values a block merges, and parts that it reads at a time
_LOG2E = 1 / math.log(2)

Ref = Any  # a reference to memory inside a kernel


def parts(
    logits: Logits,
    stages: int,
    interpret: Any,
    dealt: Shares,
    given: Lists,
    q: Float[Array, "L r K"],
    k_pages: Float[Array, "P C K"],
    v_pages: Float[Array, "P C V"],
) -> tuple[Float[Array, "Q r V"], Float[Array, "Q r"]]:
    """o and base-2 lse of each worker's part of each list, at `Shares`' places, in fp32."""
    (L, N), (C, K), (rows, V) = given.pages.shape, k_pages.shape[1:], (q.shape[1], v_pages.shape[2])
    size, pieces, cuts = min(C, STEP), max(1, STEP // C), max(1, C // STEP)  # of a step, of a page
    G, workers = L // given.lowest.shape[0], dealt.workers.shape[0]
    shape = (rows, STEP)

    def kernel(*refs):
        (table, spans), (pages, starts, _, lowest, positions) = refs[:2], refs[2:7]
        q, k, v, o, lse, held, keys, values, q_loaded, k_loaded, v_loaded = refs[7:]
        worker = lax.axis_index("worker")
        first, count, low, high = (table[worker, n] for n in range(4))

        def entries(step):
            """Places in a list of the pages of its step `step`, some place where it has none."""
            entry = step * pieces if cuts == 1 else lax.div(step, jnp.int32(cuts))
            return [jnp.minimum(entry + piece, N - 1) for piece in range(pieces)]

        def offset(step):
            return lax.rem(step, jnp.int32(cuts)) * STEP

        def pages_of(line, step):
            return [pages[line, entry] for entry in entries(step)]

        def begins_of(line, step):
            """Position of the first token of each piece."""
            return [starts[line, entry] + offset(step) for entry in entries(step)]

        def load(found, step, slot):
            tokens = pl.ds(offset(step), size)
            for source, target, loaded in ((k, keys, k_loaded), (v, values, v_loaded)):
                for piece, page in enumerate(found):
                    place = target.at[slot, pl.ds(piece * size, size)]
                    plgpu.copy_gmem_to_smem(source.at[page, tokens], place, loaded.at[slot])

        def masked(line, begins, scores):
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
            position = column + begins[0]
            for piece in range(1, pieces):
                inside = column >= piece * size
                position = jnp.where(inside, column + (begins[piece] - piece * size), position)
            row = positions.at[lax.div(line, jnp.int32(G))]
            return jnp.where(position <= over_rows(_rows(row), shape), scores, -jnp.inf)

        def exponents(scores):
            """Logits in units of log 2."""
            if logits.softcap is None:
                return scores * (logits.scale * _LOG2E)
            inner = jnp.exp2(scores * (2 * _LOG2E * logits.scale / logits.softcap))
            return (1.0 - 2.0 / (1.0 + inner)) * (logits.softcap * _LOG2E)  # tanh

        @pl.loop(0, count)
        def _list(n):
            line = first + n
            begin, end = spans[line, 0], spans[line, 1]
            base = lax.max(low, begin) - begin  # of this list's steps, the first of this worker
            steps = lax.max(lax.min(end, high) - begin - base, jnp.int32(0))
            plgpu.copy_gmem_to_smem(q.at[line], held, q_loaded)
            for step in range(stages):

                @pl.when(step < steps)
                def _(step=step):
                    load(pages_of(line, base + step), base + step, step)

            plgpu.barrier_wait(q_loaded)
            earliest = lowest[lax.div(line, jnp.int32(G))]

            def one(step, carry):
                (total, largest, weight), begins, ahead = carry
                # read long before they are used: the next iteration's
                next_begins = begins_of(line, base + step + 1)
                next_ahead = pages_of(line, base + step + 1 + stages)
                slot = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(k_loaded.at[slot])
                ((scores,), _) = products(
                    interpret is not None, ([(held, keys.at[slot].transpose((1, 0)))], None)
                )
                latest = functools.reduce(jnp.maximum, begins) + (size - 1)
                hide = functools.partial(masked, line, begins)
                x = lax.cond(latest <= earliest, lambda x: x, hide, exponents(scores))
                raised = jnp.maximum(largest, x.max(axis=1))
                # a query that has seen nothing yet has no largest logit; 0 keeps exponents numbers
                safe = jnp.where(raised == -jnp.inf, 0.0, raised)
                shrink = jnp.exp2(largest - safe)
                p = jnp.exp2(x - over_rows(safe, shape))
                total *= over_rows(shrink, total.shape)
                weight = weight * shrink + p.sum(axis=1)
                p = p.astype(v.dtype)
                total, raised, weight, p = lax.optimization_barrier((total, raised, weight, p))
                plgpu.barrier_wait(v_loaded.at[slot])
                ((total,), _) = products(interpret is not None, ([(p, values.at[slot])], total))
                pl.when(step + stages < steps)(
                    functools.partial(load, ahead, base + step + stages, slot)
                )
                return (total, raised, weight), next_begins, next_ahead

            nothing = _tile((rows, V)), _vector(rows, -jnp.inf), _vector(rows, 0.0)
            start = nothing, begins_of(line, base), pages_of(line, base + stages)
            (total, largest, weight), _, _ = lax.fori_loop(0, steps, one, start)
            some = weight > 0
            weight = jnp.where(some, weight, 1.0)
            o.at[line + worker][...] = total * over_rows(1.0 / weight, total.shape)
            lse.at[line + worker][...] = jnp.where(some, largest + jnp.log2(weight), -jnp.inf)

    loaded = functools.partial(plgpu.Barrier, num_arrivals=pieces, num_barriers=stages)
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((L + workers - 1, rows, V), jnp.float32),
            jax.ShapeDtypeStruct((L + workers - 1, rows), jnp.float32),
        ),
        scratch_types=[
            swizzled(rows, K),
            swizzled(stages, STEP, K),
            swizzled(stages, STEP, V),
            plgpu.Barrier(),
            loaded(),
            loaded(),
        ],
        grid=(workers,),
        grid_names=("worker",),
        kernel_name="decode_attention_parts",
        # no sum crosses warps
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*dealt, *given, q, k_pages, v_pages)


def merged(
    spans: Int[Array, "L 4"],
    o: Float[Array, "Q r V"],
    lse: Float[Array, "Q r"],
    dtype: Any,
    interpret: Any,
) -> tuple[Float[Array, "L r V"], Float[Array, "L r"]]:
    """o and natural lse of each list from its parts."""
    L, (rows, V) = spans.shape[0], o.shape[1:]
    shape = (rows, _COLUMNS)

    def kernel(spans, parts, logs, o, lse):
        line, pane = lax.axis_index("list"), lax.axis_index("columns")
        first, last = spans[line, 2], spans[line, 3]
        columns = pl.ds(pane * _COLUMNS, _COLUMNS)
        count = last - first + 1

        def some(n, carry):
            total, largest, weight = carry
            found = []
            for m in range(_AT_ONCE):
                entry = n * _AT_ONCE + m
                place = line + first + lax.min(entry, count - 1)
                part = plgpu.load(
                    parts.at[place, pl.ds(0, rows), columns], layout=WGMMA, optimized=False
                )
                none = jnp.where(entry < count, 0.0, -jnp.inf)
                found.append((part, _rows(logs.at[place]) + none))
            raised = functools.reduce(jnp.maximum, [log for _, log in found], largest)
            base = jnp.where(raised == -jnp.inf, 0.0, raised)
            shrink = jnp.exp2(largest - base)
            total, weight = total * over_rows(shrink, shape), weight * shrink
            for part, log in found:
                share = jnp.exp2(log - base)
                total, weight = total + over_rows(share, shape) * part, weight + share
            return total, raised, weight

        empty = _tile(shape), _vector(rows, -jnp.inf), _vector(rows, 0.0)
        groups = lax.div(count + (_AT_ONCE - 1), jnp.int32(_AT_ONCE))
        total, largest, weight = lax.fori_loop(0, groups, some, empty)
        seen = weight > 0
        weight = jnp.where(seen, weight, 1.0)
        result = total * over_rows(1.0 / weight, shape)
        o.at[line, pl.ds(0, rows), columns][...] = result.astype(dtype)

        @pl.when(pane == 0)
        def _():
            natural = (largest + jnp.log2(weight)) * math.log(2)
            lse.at[line][...] = jnp.where(seen, natural, -jnp.inf)

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((L, rows, V), dtype),
            jax.ShapeDtypeStruct((L, rows), jnp.float32),
        ),
        grid=(L, cdiv(V, _COLUMNS)),
        grid_names=("list", "columns"),
        kernel_name="decode_attention_merged",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(spans, o, lse)


def _rows(ref: Ref) -> Array:
    """One number for each row of a warpgroup, from device memory."""
    return plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)


def _vector(rows: int, value: float) -> Array:
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), WGMMA.reduce(1))


def _tile(shape: tuple[int, int]) -> Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)
