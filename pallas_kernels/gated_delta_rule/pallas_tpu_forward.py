"""TPU kernel, forward: inverses, outputs and the state's pass in one sweep over a row's tiles.

A grid step takes one tile of a few heads; their states stay in VMEM from one tile to the next.
Notation: README.md beside this file.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_delta_rule.pallas_tpu_tiles import (
    BETA,
    GATES,
    INTO,
    NN,
    NT,
    TILE,
    TN,
    Gates,
    Layout,
    interleave,
    invert,
    lanes,
    positions,
    product,
)


def _head(
    h: int, layout: Layout, q_ref, k_ref, v_ref, gates_ref, o_ref, kept, state_ref, columns_ref,
    attention_ref, strict_ref, inverse_ref,
) -> Iterator[None]:  # fmt: skip
    """One tile of one head, up to each point where another head's work should come first."""
    dtype, scale = layout.dtype, layout.scale
    values = (0, slice(None), lanes(h, layout.V))
    gates = Gates(gates_ref[0, h, 0], columns_ref[:, lanes(h, GATES)], layout)
    k = k_ref[0, :, layout.key_lanes(h)]
    kq = jnp.concatenate([k, q_ref[0, :, layout.key_lanes(h)]], axis=0)
    scores = product(kq, k, NT, dtype)
    yield
    pair = gates.weighted(gates.pair())
    i, j = positions()
    attention_ref[h] = (scale * scores[TILE:] * pair).astype(dtype)
    strict_ref[h] = jnp.where(i > j, gates.column(BETA) * scores[:TILE] * pair, 0)
    yield
    yield from invert(strict_ref.at[h], inverse_ref.at[h], dtype)
    state = state_ref[h]
    read = product(kq, state, NN, dtype)
    yield
    values_left = v_ref[values].astype(jnp.float32) - gates.column(INTO) * read[:TILE]
    z = (gates.column(BETA) * values_left).astype(dtype)
    inverse = inverse_ref[h].astype(dtype)
    new = product(inverse, z, NN, dtype)
    yield
    o = scale * gates.column(INTO) * read[TILE:] + product(attention_ref[h], new, NN, dtype)
    o_ref[values] = o.astype(o_ref.dtype)
    yield
    state_ref[h] = gates.through * state + product(k, gates.out * new, TN, dtype)
    if kept:
        inverses_ref, states_ref = kept
        inverses_ref[0, :, lanes(h, TILE)] = inverse
        states_ref[0, h, 0] = state.astype(dtype)
    yield


def _kernel(q_ref, k_ref, v_ref, gates_ref, initial_ref, o_ref, final_ref, *rest, layout: Layout):
    *kept, state_ref, columns_ref, attention_ref, strict_ref, inverse_ref = rest

    @pl.when(pl.program_id(2) == 0)
    def _enter():
        state_ref[...] = initial_ref[0]

    columns_ref[...] = gates_ref[0, :, 0].reshape(layout.heads * GATES, TILE).T
    inputs = q_ref, k_ref, v_ref, gates_ref
    scratch = state_ref, columns_ref, attention_ref, strict_ref, inverse_ref
    interleave(_head(h, layout, *inputs, o_ref, kept, *scratch) for h in range(layout.heads))

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _leave():
        final_ref[0] = state_ref[...]


def forward(
    layout: Layout,
    q: Float[Array, "B T Hk*K"],
    k: Float[Array, "B T Hk*K"],
    v: Float[Array, "B T H*V"],
    gates: Float[Array, "B H N 8 C"],
    initial: Float[Array, "B H K V"],
    *,
    keep: bool,
    interpret=False,
) -> tuple[Array, ...]:
    """Outputs [B, T, H*V] and final state; with `keep`, for the backward pass also the inverses
    [B, T, H*C] and the state entering every tile, [B, H, N, K, V]."""
    B, N, H, K, V = layout.B, layout.N, layout.H, layout.K, layout.V
    heads, dtype = layout.heads, layout.dtype
    outputs = [
        (jax.ShapeDtypeStruct((B, N * TILE, H * V), dtype), layout.tokens(heads * V)),
        (jax.ShapeDtypeStruct((B, H, K, V), jnp.float32), layout.state()),
    ]
    if keep:
        outputs += [
            (jax.ShapeDtypeStruct((B, N * TILE, H * TILE), dtype), layout.tokens(heads * TILE)),
            (jax.ShapeDtypeStruct((B, H, N, K, V), dtype), layout.states()),
        ]
    shapes, specs = zip(*outputs, strict=True)
    square = (heads, TILE, TILE)
    return pl.pallas_call(
        functools.partial(_kernel, layout=layout),
        grid=layout.grid,
        in_specs=[
            layout.keys(),
            layout.keys(),
            layout.tokens(heads * V),
            layout.gates(),
            layout.state(),
        ],
        out_specs=specs,
        out_shape=shapes,
        scratch_shapes=[
            pltpu.VMEM((heads, K, V), jnp.float32),
            pltpu.VMEM((TILE, heads * GATES), jnp.float32),
            pltpu.VMEM(square, dtype),
            pltpu.VMEM(square, jnp.float32),
            pltpu.VMEM(square, jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name="delta_rule_forward",
        interpret=interpret,
    )(q, k, v, gates, initial)
