"""TPU kernel, forward: outputs and the state's pass in one sweep over a row's tiles.

A grid step takes one tile of a few heads; their states stay in VMEM from one tile to the next.
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
    NN,
    NT,
    TILE,
    TN,
    Heads,
    for_heads,
    lanes,
    positions,
    product,
)
from pallas_kernels.gated_linear_attention.pallas_tpu_levels import (
    Layout,
    differing_bits,
    levels,
)


class _Refs(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    bonus: Any  # None where a token reads itself as it reads the others
    initial: Any
    o: Any
    final: Any
    states: Any  # None where nothing is kept for a backward pass
    state: Any  # scratch: [heads, V, K] fp32


def _tile(x: _Refs, heads: Heads, h: int) -> Iterator[None]:
    layout = heads.layout
    assert isinstance(layout, Layout)
    dtype, K, V = layout.dtype, layout.K, layout.V
    q, k, g = (heads.lanes(ref, K)[:, lanes(h, K)].astype(jnp.float32) for ref in (x.q, x.k, x.g))
    v = heads.lanes(x.v, V)[:, lanes(h, V)]
    state_ref = heads.own(x.state).at[h]
    i, j = positions()
    own = q if x.bonus is None else q * heads.own(x.bonus)[h]
    attention = jnp.where(i == j, product(own, k, NT, dtype), 0)
    differing = differing_bits(both_orders=False)
    yield
    for level in levels(g, layout.exclusive):
        if level.through is not None:
            break
        operand = level.choose(level.into * q, level.out * k).astype(dtype)
        scores = product(operand, operand, NT, dtype)
        yield
        attention = jnp.where(level.latest(differing), scores, attention)  # until the next one
    else:
        raise AssertionError("the last level is the tile")
    if x.states is not None:
        heads.own(x.states.at[0, :, 0])[h] = state_ref[...].astype(dtype)
    o = product(attention, v, NN, dtype)
    o += product(level.into * q, state_ref[...], NT, dtype)
    heads.lanes(x.o, V)[:, lanes(h, V)] = (layout.scale * o).astype(dtype)
    yield
    written = product(v, level.out * k, TN, dtype)
    state_ref[...] = level.through * state_ref[...] + written
    yield


def _kernel(*refs, layout: Layout, bonus: bool, keep: bool):
    refs = list(refs)
    if not bonus:
        refs.insert(4, None)
    if not keep:
        refs.insert(8, None)
    x = _Refs(*refs)

    @pl.when(pl.program_id(2) == 0)
    def _enter():
        x.state[...] = x.initial[0]

    for_heads(layout, layout.side_by_side(4), functools.partial(_tile, x))

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _leave():
        x.final[0] = x.state[...]


def forward(
    layout: Layout,
    q: Float[Array, "B T H*K"],
    k: Float[Array, "B T H*K"],
    v: Float[Array, "B T H*V"],
    g: Float[Array, "B T H*K"],
    bonus: Float[Array, "H 1 K"] | None,
    initial: Float[Array, "B H V K"],
    *,
    keep: bool,
    interpret=False,
) -> tuple[Array, ...]:
    """Outputs [B, T, H*V] and final state; with `keep` also the state entering every tile,
    [B, H, N, V, K]. States are transposed."""
    B, N, H, K, V = layout.B, layout.N, layout.H, layout.K, layout.V
    dtype = layout.dtype
    keys, values = layout.tokens(layout.heads * K), layout.tokens(layout.heads * V)
    inputs = [(q, keys), (k, keys), (v, values), (g, keys)]
    if bonus is not None:
        inputs.append((bonus, layout.bonus()))
    inputs.append((initial, layout.state()))
    outputs = [
        (jax.ShapeDtypeStruct((B, N * TILE, H * V), dtype), values),
        (jax.ShapeDtypeStruct((B, H, V, K), jnp.float32), layout.state()),
    ]
    if keep:
        outputs.append((jax.ShapeDtypeStruct((B, H, N, V, K), dtype), layout.states()))
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)
    return pl.pallas_call(
        functools.partial(_kernel, layout=layout, bonus=bonus is not None, keep=keep),
        grid=layout.grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes,
        scratch_shapes=[pltpu.VMEM((layout.heads, V, K), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name="linear_attention_forward",
        interpret=interpret,
    )(*arrays)
