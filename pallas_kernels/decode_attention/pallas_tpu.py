"""Decode attention on TPUs: every core walks a share of each list, page copies always in flight.

The grid is (parts, lists): part p of a list is the p-th share of its pages, one part a core, so one
row fills the chip whatever the lists' lengths are. A step is as many pages as `_STEP_BYTES` hold;
the next step's, of the next list where this one ends, are copied while it is computed. It is bound
by memory. Compiled ahead of time and interpreted; it has not run on a TPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import pad_to_multiple
from pallas_kernels.decode_attention.parts import (
    Lists,
    Logits,
    by_head,
    by_list,
    merge,
)
from pallas_kernels.dispatch import Target

_CHIPS = ("TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU7x")
_TWO_CORES = ("TPU v5", "TPU v5p")  # share the grid's parallel axis
_WIDTHS = (64, 128, 256)
_STEP_BYTES = 2**20  # of keys and values; they are in VMEM twice
_MOST_PAGES = 32  # of a step
_ROWS = 16  # of a packed bf16 register
_MOST_ROWS = 256  # queries of a list

Ref = Any  # a reference to memory inside a kernel


def unsupported(problem: Any, target: Target) -> str | None:
    """Why the TPU kernel cannot take `problem` on `target`, or None."""
    if target.platform != "tpu" or target.device_kind not in _CHIPS:
        return f"needs one of {_CHIPS}, not {target.device_kind!r}"
    if problem.dtype not in ("bfloat16", "float32"):
        return f"q and the pages must be bfloat16 or float32, not {problem.dtype}"
    for name in ("K", "V"):
        if getattr(problem, name) not in _WIDTHS:
            return f"{name} must be one of {_WIDTHS}, not {getattr(problem, name)}"
    if problem.C % _ROWS:
        return f"pages must be multiples of {_ROWS} tokens, not {problem.C}"
    queries = problem.t * problem.H // problem.G
    if queries > _MOST_ROWS:
        return f"{queries} queries share a list, at most {_MOST_ROWS} do"
    return None


def cores_of(target: Target) -> int:
    """Cores of what JAX calls a device."""
    return 2 if target.device_kind in _TWO_CORES else 1


def pages_of_a_step(N: int, page_bytes: int) -> int:
    """Of a list of N pages whose keys and values are `page_bytes` each."""
    return max(1, min(_STEP_BYTES // page_bytes, _MOST_PAGES, N))


def attend(
    logits: Logits,
    q: Float[Array, "B t H K"],
    k_pages: Float[Array, "P C K"],
    v_pages: Float[Array, "P C V"],
    pages: Int[Array, "B G N"],
    starts: Int[Array, "B G N"],
    positions: Int[Array, "B t"],
    *,
    parts: int | None = None,
) -> tuple[Float[Array, "B t H V"], Float[Array, "B H t"]]:
    """See `api.decode_attention`; each list is cut into `parts`, the chip's cores by default."""
    (B, t, H, K), (G, N), (_, C, V) = q.shape, pages.shape[1:], v_pages.shape
    parts = parts or cores_of(Target.current())
    per_step = pages_of_a_step(N, C * (K + V) * q.dtype.itemsize)
    lists, rows = B * G, t * H // G

    queries = pad_to_multiple(by_list(q, G), _ROWS, axis=1)
    given = Lists.of(pages, starts, positions, group=H // G, entries=per_step, rows=_ROWS)
    listed, placed = (x[:, None] for x in given[:2])

    def of_list(array, next_one=0):
        shape = (1, *array.shape[1:])
        index = lambda p, l: (jnp.minimum(l + next_one, lists - 1), 0, 0)  # noqa: E731
        return pl.BlockSpec(shape, index, memory_space=pltpu.SMEM)

    whole = pl.BlockSpec(memory_space=pltpu.SMEM)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    padded = queries.shape[1]
    o, lse = pl.pallas_call(
        functools.partial(_kernel, logits, per_step),
        grid=(parts, lists),
        in_specs=[
            whole,
            whole,
            of_list(listed),
            of_list(listed, next_one=1),
            of_list(placed),
            pl.BlockSpec((1, padded, K), lambda p, l: (l, 0, 0)),
            pl.BlockSpec((1, padded, 1), lambda p, l: (l // G, 0, 0)),
            in_hbm,
            in_hbm,
        ],
        out_specs=[
            pl.BlockSpec((1, 1, padded, V), lambda p, l: (p, l, 0, 0)),
            pl.BlockSpec((1, 1, padded, 1), lambda p, l: (p, l, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((parts, lists, padded, V), jnp.float32),
            jax.ShapeDtypeStruct((parts, lists, padded, 1), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.VMEM((2, per_step * C, K), k_pages.dtype),
            pltpu.VMEM((2, per_step * C, V), v_pages.dtype),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="decode_attention",
    )(
        given.lengths,
        given.lowest,
        listed,
        listed,
        placed,
        queries,
        given.positions[..., None],
        k_pages,
        v_pages,
    )
    o, lse = merge(o[:, :, :rows], lse[:, :, :rows, 0])
    return by_head(o.astype(v_pages.dtype), lse, B, t)


def _kernel(
    logits: Logits,
    per_step: int,
    entries: Ref,
    lowest: Ref,
    pages: Ref,
    next_pages: Ref,
    starts: Ref,
    q: Ref,
    positions: Ref,
    k: Ref,
    v: Ref,
    o: Ref,
    lse: Ref,
    parity: Ref,
    semaphores: Ref,
    keys: Ref,
    values: Ref,
):
    (part, line), (parts, lists) = map(pl.program_id, (0, 1)), map(pl.num_programs, (0, 1))
    G, N, C = lists // lowest.shape[0], pages.shape[2], k.shape[1]

    def share(line):
        """First step of this part of a list, and how many it has."""
        steps = (entries[line] + per_step - 1) // per_step
        size = (steps + parts - 1) // parts
        first = jnp.minimum(part * size, steps)
        return first, jnp.minimum(size, steps - first)

    def entry_of(step):
        """The first entry of a step of a list; of its last step where it has none."""
        return jnp.minimum(step, N // per_step - 1) * per_step

    def begin(listed, step, slot):
        first = entry_of(step)
        for j in range(per_step):
            page, tokens = listed[0, 0, first + j], pl.ds(j * C, C)
            for source, target in ((k, keys), (v, values)):
                copy = pltpu.make_async_copy(
                    source.at[page], target.at[slot, tokens], semaphores.at[slot]
                )
                copy.start()

    first, count = share(line)
    following = jnp.minimum(line + 1, lists - 1)

    @pl.when(line == 0)
    def _():
        parity[0] = 0
        begin(pages, first, 0)

    def masked(x, begins, there):
        position = lax.broadcasted_iota(jnp.int32, (1, per_step * C), 1)
        base = jnp.full_like(position, begins[0])
        for j in range(1, per_step):
            base = jnp.where(position >= j * C, begins[j] - j * C, base)
        visible = (base + position <= positions[0]) & there
        return jnp.where(visible, x, -jnp.inf)

    def step(n, carry):
        largest, weight, total = carry
        slot = (parity[0] + n) % 2

        @pl.when(n + 1 < count)
        def _():
            begin(pages, first + n + 1, 1 - slot)

        @pl.when((n + 1 >= count) & (line + 1 < lists))
        def _():
            begin(next_pages, share(following)[0], 1 - slot)

        for buffer in (keys, values):  # a semaphore counts bytes: one wait for all copies to a slot
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], semaphores.at[slot]).wait()
        entry = entry_of(first + n)
        begins = [starts[0, 0, entry + j] for j in range(per_step)]
        x = logits.scale * _dot(q[0], keys[slot], (1, 1))
        if logits.softcap is not None:
            x = logits.softcap * jnp.tanh(x / logits.softcap)
        latest = functools.reduce(jnp.maximum, begins) + (C - 1)
        complete = (latest <= lowest[line // G]) & (n < count)
        x = lax.cond(complete, lambda x: x, lambda x: masked(x, begins, n < count), x)
        raised = jnp.maximum(largest, x.max(1, keepdims=True))
        # a query that has seen nothing yet has no largest logit; 0 keeps the exponents numbers
        base = jnp.where(raised == -jnp.inf, 0, raised)
        p, shrink = jnp.exp(x - base), jnp.exp(largest - base)
        total = total * shrink + _dot(p.astype(values.dtype), values[slot], (1, 0))
        return raised, weight * shrink + p.sum(1, keepdims=True), total

    rows, V = o.shape[2:]
    empty = jnp.full((rows, 1), -jnp.inf, jnp.float32), jnp.zeros((rows, 1), jnp.float32)
    steps = jnp.maximum(count, 1)  # an empty part passes the copies on
    largest, weight, total = lax.fori_loop(
        0, steps, step, (*empty, jnp.zeros((rows, V), jnp.float32))
    )
    parity[0] = (parity[0] + steps) % 2
    some = weight > 0
    weight = jnp.where(some, weight, 1)
    o[0, 0] = total / weight
    lse[0, 0] = jnp.where(some, largest + jnp.log(weight), -jnp.inf)


def _dot(a: Array, b: Array, contracted: tuple[int, int]) -> Float[Array, "m n"]:
    return lax.dot_general(
        a,
        b,
        (((contracted[0],), (contracted[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
