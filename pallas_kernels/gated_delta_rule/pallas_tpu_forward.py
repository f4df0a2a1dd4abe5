"""TPU kernel, forward: inverses, outputs and the state's pass in one sweep over a row's tiles.

A grid step takes one tile of a few heads; their states stay in VMEM from one tile to the next.
Notation: README.md beside this file.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_delta_rule.pallas_tpu_tiles import (
    BETA,
    INTO,
    NN,
    NT,
    TILE,
    Heads,
    Layout,
    for_heads,
    invert,
    lanes,
    positions,
    product,
    spread_gates,
)


class _Refs(NamedTuple):
    q: Any
    k: Any
    v: Any
    gates: Any
    initial: Any
    o: Any
    final: Any
    inverses: Any  # None where nothing is kept for a backward pass
    states: Any
    state: Any  # the rest is scratch: [heads, K, V] fp32
    columns: Any  # `Layout.columns`
    attention: Any  # [heads, C, C] scale Q K^T o D
    strict: Any  # [heads, C, C] fp32, L
    inverse: Any  # [heads, C, C] fp32, A


def _pairs(x: _Refs, heads: Heads, h: int) -> Iterator[None]:
    """What two tokens of the tile have to do with each other: attention and L."""
    layout = heads.layout
    spread_gates(layout, heads.own(x.gates.at[0, :, 0])[h], heads.own(x.columns).at[h])
    gates = heads.gates(x.gates, x.columns, h)
    k = heads.keys(x.k, h)[...]
    kq = jnp.concatenate([k, heads.keys(x.q, h)[...]], axis=0)
    scores = product(kq, k, NT, layout.dtype)
    yield
    pair = gates.weighted(gates.pair())
    attention = layout.scale * scores[TILE:] * pair
    heads.own(x.attention)[h] = attention.astype(layout.dtype)
    i, j = positions()
    strict = jnp.where(i > j, gates.column(BETA) * scores[:TILE] * pair, 0)
    heads.own(x.strict)[h] = strict
    yield


def _pass(x: _Refs, heads: Heads, h: int) -> Iterator[None]:
    """The tile's outputs and the state that leaves it."""
    layout = heads.layout
    dtype, scale = layout.dtype, layout.scale
    gates = heads.gates(x.gates, x.columns, h)
    state_ref, inverse = heads.own(x.state).at[h], heads.own(x.inverse)[h]
    if x.states is not None:
        heads.lanes(x.inverses, TILE)[:, lanes(h, TILE)] = inverse.astype(dtype)
        heads.own(x.states.at[0, :, 0])[h] = state_ref[...].astype(dtype)
    k = heads.keys(x.k, h)
    read = product(k[...], state_ref[...], NN, dtype)
    yield
    v = heads.lanes(x.v, layout.V)[:, lanes(h, layout.V)].astype(jnp.float32)
    left = v - gates.column(INTO, layout.V) * read
    new = product(inverse * gates.row(BETA), left, NN, dtype)
    yield
    read = product(heads.keys(x.q, h)[...], state_ref[...], NN, dtype)
    o = scale * gates.column(INTO, layout.V) * read + product(
        heads.own(x.attention)[h], new, NN, dtype
    )
    heads.lanes(x.o, layout.V)[:, lanes(h, layout.V)] = o.astype(dtype)
    yield
    state_ref[...] = gates.through * state_ref[...] + product(
        k[...].astype(jnp.float32).T * gates.out_row, new, NN, dtype
    )
    yield


def _kernel(*refs, layout: Layout, keep: bool):
    if not keep:
        refs = (*refs[:7], None, None, *refs[7:])
    x = _Refs(*refs)

    @pl.when(pl.program_id(2) == 0)
    def _enter():
        x.state[...] = x.initial[0]

    for_heads(layout, layout.side_by_side(2), functools.partial(_pairs, x))
    for_heads(
        layout,
        layout.heads,  # a chain of small products: all heads, to fill its waits
        lambda heads, h: invert(x.strict.at[h], x.inverse.at[h], layout.dtype),
    )
    for_heads(layout, layout.side_by_side(2), functools.partial(_pass, x))

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _leave():
        x.final[0] = x.state[...]


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
        functools.partial(_kernel, layout=layout, keep=keep),
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
            layout.columns(),
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
