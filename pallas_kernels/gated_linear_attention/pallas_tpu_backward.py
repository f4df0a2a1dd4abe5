"""TPU kernel, backward: all gradients in one sweep from the last tile of a row to the first.

The gradient of the state stays in VMEM from one tile to the next; the states entering the tiles are
`pallas_tpu_forward`'s, everything else is computed again. What is summed over grid steps, the
gradients of the state and of the bonus, is summed in the order of the tiles: deterministic.
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
    TN,
    Heads,
    for_heads,
    lanes,
    positions,
    product,
)
from pallas_kernels.gated_linear_attention.pallas_tpu_levels import (
    LEVELS,
    Layout,
    decayed_on_the_way,
    differing_bits,
    levels,
    sums,
)


class _Refs(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    do: Any
    decayed: Any  # `decayed_on_the_way`
    bonus: Any  # None where a token reads itself as it reads the others
    states: Any
    dfinal: Any
    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dbonus: Any
    dinitial: Any
    dstate: Any  # scratch: [heads, V, K] fp32


def _tile(x: _Refs, heads: Heads, h: int) -> Iterator[None]:
    layout = heads.layout
    assert isinstance(layout, Layout)
    dtype, scale, K, V = layout.dtype, layout.scale, layout.K, layout.V
    q, k, g = (heads.lanes(ref, K)[:, lanes(h, K)].astype(jnp.float32) for ref in (x.q, x.k, x.g))
    v, do = (heads.lanes(ref, V)[:, lanes(h, V)] for ref in (x.v, x.do))
    state, dstate_ref = heads.own(x.states.at[0, :, 0])[h], heads.own(x.dstate).at[h]
    i, j = positions()

    dattention = scale * product(do, v, NT, dtype)
    # Both halves hold the gradient of the pair: a level's product then serves queries and keys.
    dpairs = jnp.where(i > j, dattention, scale * product(v, do, NT, dtype))
    downs = jnp.where(i == j, dattention, 0)
    yield
    weight = 1.0 if x.bonus is None else heads.own(x.bonus)[h]
    attention = jnp.where(i == j, product(weight * q, k, NT, dtype), 0)
    dq_own = product(downs, k, NN, dtype)  # without the weight
    dq, dk = weight * dq_own, product(downs, weight * q, NN, dtype)
    if x.bonus is not None:
        heads.own(x.dbonus.at[0])[h] += (dq_own * q).sum(0, keepdims=True)
    dg = jnp.zeros_like(g)
    yield
    differing, later = (differing_bits(both_orders=x) for x in (True, False))
    for n, level in enumerate(levels(g, layout.exclusive)):
        if level.through is not None:
            break
        operand = level.choose(level.into * q, level.out * k)
        scores = product(operand, operand, NT, dtype)
        doperand = product(jnp.where(level.meeting(differing), dpairs, 0), operand, NN, dtype)
        yield
        attention = jnp.where(level.latest(later), scores, attention)  # until the next one
        zero = jnp.zeros_like(doperand)
        dq += level.choose(level.into * doperand, zero)
        dk += level.choose(zero, level.out * doperand)
        dg += sums(x.decayed[n], operand * doperand, dtype)
        yield
    else:
        raise AssertionError("the last level is the tile")

    reading, writing = level.into * q, level.out * k
    dreading = scale * product(do, state, NN, dtype)
    dwriting = product(v, dstate_ref[...], NN, dtype)
    dv = scale * product(attention, do, TN, dtype) + product(writing, dstate_ref[...], NT, dtype)
    heads.lanes(x.dv, V)[:, lanes(h, V)] = dv.astype(dtype)
    yield
    dg += sums(x.decayed[LEVELS], reading * dreading, dtype)
    dg += sums(x.decayed[LEVELS + 1], writing * dwriting, dtype)
    through = level.through * dstate_ref[...]
    dg += (through * state).sum(0, keepdims=True)
    heads.lanes(x.dg, K)[:, lanes(h, K)] = dg
    heads.lanes(x.dq, K)[:, lanes(h, K)] = (dq + level.into * dreading).astype(dtype)
    heads.lanes(x.dk, K)[:, lanes(h, K)] = (dk + level.out * dwriting).astype(dtype)
    yield
    dstate_ref[...] = through + scale * product(do, reading, TN, dtype)
    yield


def _kernel(*refs, layout: Layout, bonus: bool):
    refs = list(refs)
    if not bonus:
        refs.insert(6, None)
        refs.insert(13, None)
    x = _Refs(*refs)

    @pl.when(pl.program_id(2) == 0)
    def _enter():
        x.dstate[...] = x.dfinal[0]
        if bonus:
            x.dbonus[...] = jnp.zeros_like(x.dbonus)

    for_heads(layout, layout.side_by_side(4), functools.partial(_tile, x))

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _leave():
        x.dinitial[0] = x.dstate[...]


def backward(
    layout: Layout,
    q: Float[Array, "B T H*K"],
    k: Float[Array, "B T H*K"],
    v: Float[Array, "B T H*V"],
    g: Float[Array, "B T H*K"],
    do: Float[Array, "B T H*V"],
    bonus: Float[Array, "H 1 K"] | None,
    states: Float[Array, "B H N V K"],
    dfinal: Float[Array, "B H V K"],
    *,
    interpret=False,
) -> tuple[Array, Array, Array, Array, Array | None, Array]:
    """dq, dk, dv, dg, dbonus [B, H, 1, K] of each row, and the initial state's gradient."""
    assert layout.reverse
    B, H, K, V = layout.B, layout.H, layout.K, layout.V
    keys, values = layout.tokens(layout.heads * K), layout.tokens(layout.heads * V)
    inputs = [(q, keys), (k, keys), (v, values), (g, keys), (do, values)]
    decayed = decayed_on_the_way(layout.exclusive)
    inputs.append((decayed, pl.BlockSpec(decayed.shape, lambda b, h, n: (0, 0, 0))))
    if bonus is not None:
        inputs.append((bonus, layout.bonus()))
    inputs += [(states, layout.states()), (dfinal, layout.state())]
    outputs: list = [(q, keys), (k, keys), (v, values), (g, keys)]
    if bonus is not None:
        spec = pl.BlockSpec((1, layout.heads, 1, K), lambda b, h, n: (b, h, 0, 0))
        outputs.append((jax.ShapeDtypeStruct((B, H, 1, K), jnp.float32), spec))
    outputs.append((dfinal, layout.state()))
    arrays, in_specs = zip(*inputs, strict=True)
    likes, out_specs = zip(*outputs, strict=True)
    results = pl.pallas_call(
        functools.partial(_kernel, layout=layout, bonus=bonus is not None),
        grid=layout.grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in likes],
        scratch_shapes=[pltpu.VMEM((layout.heads, V, K), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name="linear_attention_backward",
        interpret=interpret,
    )(*arrays)
    dq, dk, dv, dg, *dbonus, dinitial = results
    return dq, dk, dv, dg, dbonus[0] if dbonus else None, dinitial
