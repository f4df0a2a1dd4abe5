"""The two Hopper kernels of decode attention: a worker's parts of its lists, and their merging.

Registers of a thread at V = 128: 64 output, 32 logits, 16 probabilities (bf16 pairs). Only rows of
queries that there are come from and go to device memory.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.decode_attention.pallas_gpu import ROWS, STEP, Shares
from pallas_kernels.decode_attention.parts import Lists, Logits
from pallas_kernels.pallas_gpu_hopper import WGMMA, over_rows, products, swizzled, tile, vector
from pallas_kernels.pallas_gpu_rows import load_first, store_first

_AT_ONCE = 64  # parts that are merged at a time
_LOG2E = 1 / math.log(2)

Ref = Any  # a reference to memory inside a kernel


def parts(
    logits: Logits,
    stages: int,
    workers: int,
    interpret: Any,
    ends: Int[Array, "L"],
    given: Lists,
    positions: Int[Array, "B t"],
    q: Float[Array, "L r K"],
    k_pages: Float[Array, "P C K"],
    v_pages: Float[Array, "P C V"],
) -> tuple[Float[Array, "Q r V"], Float[Array, "Q r"]]:
    """o and base-2 lse of each worker's part of each list, at `Shares`' places, in fp32.

    `ends` are those of the lists' steps in the queue; places that nobody writes hold anything.
    """
    (L, N), (C, K), (rows, V) = given.pages.shape, k_pages.shape[1:], (q.shape[1], v_pages.shape[2])
    size, pieces, cuts = min(C, STEP), max(1, STEP // C), max(1, C // STEP)  # of a step, of a page
    (B, t), interpreted = positions.shape, interpret is not None
    G, group = L // B, rows // t
    shape = (ROWS, STEP)

    def kernel(ends, pages, starts, positions, q, k, v, o, lse, *shared):
        held, keys, values, k_loaded, v_loaded = shared
        worker = lax.axis_index("worker")
        shares = Shares.of(ends[L - 1], workers)
        low = worker * shares.size
        high = low + shares.size

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
            row = lax.div(line, jnp.int32(G))
            newest = load_first(interpreted, positions.at[row], t, (ROWS,), repeat=group)
            return jnp.where(position <= over_rows(newest, shape), scores, -jnp.inf)

        def exponents(scores):
            """Logits in units of log 2."""
            if logits.softcap is None:
                return scores * (logits.scale * _LOG2E)
            inner = jnp.exp2(scores * (2 * _LOG2E * logits.scale / logits.softcap))
            return (1.0 - 2.0 / (1.0 + inner)) * (logits.softcap * _LOG2E)  # tanh

        def begin_of(line):
            return _begin(ends, line)

        first = _count(L, lambda n: shares.last(begin_of(n), ends[n]) < worker)
        stop = _count(L, lambda n: shares.first(begin_of(n)) <= worker)

        @pl.loop(first, stop)
        def _list(line):
            begin, end = begin_of(line), ends[line]
            base = lax.max(low, begin) - begin  # of this list's steps, the first of this worker
            steps = lax.max(lax.min(end, high) - begin - base, jnp.int32(0))
            for step in range(stages):

                @pl.when(step < steps)
                def _(step=step):
                    load(pages_of(line, base + step), base + step, step)

            held[...] = load_first(interpreted, q.at[line], rows, (ROWS, K))
            plgpu.commit_smem()
            row = lax.div(line, jnp.int32(G))
            earliest = lax.fori_loop(
                1, t, lambda n, x: jnp.minimum(x, positions[row, n]), positions[row, 0]
            )

            def one(step, carry):
                (total, largest, weight), begins, ahead = carry
                # read long before they are used: the next iteration's
                next_begins = begins_of(line, base + step + 1)
                next_ahead = pages_of(line, base + step + 1 + stages)
                slot = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(k_loaded.at[slot])
                ((scores,), _) = products(
                    interpreted, ([(held, keys.at[slot].transpose((1, 0)))], None)
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
                ((total,), _) = products(interpreted, ([(p, values.at[slot])], total))
                pl.when(step + stages < steps)(
                    functools.partial(load, ahead, base + step + stages, slot)
                )
                return (total, raised, weight), next_begins, next_ahead

            nothing = tile((ROWS, V)), vector(ROWS, -jnp.inf), vector(ROWS, 0.0)
            start = nothing, begins_of(line, base), pages_of(line, base + stages)
            (total, largest, weight), _, _ = lax.fori_loop(0, steps, one, start)
            some = weight > 0
            weight = jnp.where(some, weight, 1.0)
            total = total * over_rows(1.0 / weight, total.shape)
            store_first(interpreted, o.at[line + worker], total)
            log = jnp.where(some, largest + jnp.log2(weight), -jnp.inf)
            store_first(interpreted, lse.at[line + worker], log)

    loaded = functools.partial(plgpu.Barrier, num_arrivals=pieces, num_barriers=stages)
    places = L + workers - 1 + (_AT_ONCE if interpreted else 0)
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((places, rows, V), jnp.float32),
            jax.ShapeDtypeStruct((places, rows), jnp.float32),
        ),
        scratch_types=[
            swizzled(ROWS, K),
            swizzled(stages, STEP, K),
            swizzled(stages, STEP, V),
            loaded(),
            loaded(),
        ],
        grid=(workers,),
        grid_names=("worker",),
        kernel_name="decode_attention_parts",
        # no sum crosses warps
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(ends, given.pages, given.starts, positions, q, k_pages, v_pages)


def merged(
    ends: Int[Array, "L"],
    o: Float[Array, "Q r V"],
    lse: Float[Array, "Q r"],
    workers: int,
    dtype: Any,
    interpret: Any,
) -> tuple[Float[Array, "L r V"], Float[Array, "L r"]]:
    """o and natural lse of each list from its parts, which are the rows of a tile."""
    L, (rows, V), interpreted = ends.shape[0], o.shape[1:], interpret is not None
    shape = (_AT_ONCE, V)

    def kernel(ends, parts, logs, o, lse):
        line, row = lax.axis_index("list"), lax.axis_index("row")
        begin, end = _begin(ends, line), ends[line]
        shares = Shares.of(ends[L - 1], workers)
        first = shares.first(begin)
        count = shares.last(begin, end) - first + 1
        number = plgpu.broadcasted_iota(jnp.int32, (_AT_ONCE,), 0, layout=WGMMA.reduce(1))

        def some(n, carry):
            total, largest, weight = carry
            entry = n * _AT_ONCE
            left = jnp.minimum(count - entry, _AT_ONCE)
            places = pl.ds(line + first + entry, _AT_ONCE)
            log = load_first(interpreted, logs.at[places, row], left, (_AT_ONCE,))
            log = jnp.where(number < left, log, -jnp.inf)
            raised = jnp.maximum(largest, log.max())
            base = jnp.where(raised == -jnp.inf, 0.0, raised)
            share = jnp.exp2(log - base)
            part = load_first(interpreted, parts.at[places, row], left, shape)
            if interpreted:
                part = jnp.where(number[:, None] < left, part, 0.0)
            shrink = jnp.exp2(largest - base)
            total = total * shrink + (over_rows(share, shape) * part).sum(axis=0)
            return total, raised, weight * shrink + share.sum()

        nothing = plgpu.layout_cast(jnp.zeros((V,), jnp.float32), WGMMA.reduce(0))
        groups = lax.div(count + (_AT_ONCE - 1), jnp.int32(_AT_ONCE))
        empty = nothing, jnp.float32(-jnp.inf), jnp.float32(0.0)
        total, largest, weight = lax.fori_loop(0, groups, some, empty)
        seen = weight > 0
        weight = jnp.where(seen, weight, 1.0)
        o.at[line, row][...] = (total * (1.0 / weight)).astype(dtype)
        natural = (largest + jnp.log2(weight)) * math.log(2)
        lse[line, row] = jnp.where(seen, natural, -jnp.inf)

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((L, rows, V), dtype),
            jax.ShapeDtypeStruct((L, rows), jnp.float32),
        ),
        grid=(L, rows),
        grid_names=("list", "row"),
        kernel_name="decode_attention_merged",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(ends, o, lse)


def _begin(ends: Ref, line: Array) -> Array:
    """The first step of a list in the queue."""
    return jnp.where(line > 0, ends[jnp.maximum(line - 1, 0)], 0)


def _count(most: int, holds: Callable[[Array], Array]) -> Array:
    """How many of 0 .. most - 1 fulfil a condition that holds for the smallest of them alone."""

    def halve(_, found):
        low, high = found
        middle = jnp.minimum(lax.div(low + high, jnp.int32(2)), most - 1)
        inside = (low < high) & holds(middle)
        return jnp.where(inside, middle + 1, low), jnp.where(
            inside, high, jnp.minimum(middle, high)
        )

    return lax.fori_loop(0, most.bit_length(), halve, (jnp.int32(0), jnp.int32(most)))[0]
