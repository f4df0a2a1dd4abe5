"""TPU kernel, backward: all gradients in one sweep from the last tile of a row to the first.

The gradient of the state stays in VMEM from one tile to the next. The formulas are README.md's, the
inverses and the states entering the tiles are `pallas_tpu_forward`'s; everything else is computed
again. Nothing is accumulated across grid steps but the state's gradient: the result does not depend
on the order of parallel steps.
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
    GATES,
    INTO,
    NN,
    NT,
    OUT,
    TILE,
    TN,
    Gates,
    Layout,
    interleave,
    lanes,
    positions,
    product,
)

# Rows of the gradients of a tile's gates. BALANCE, WRITTEN and PASSED are, for the log decays, what
# `decays.log_decay_gradient` accumulates over the tile: factors times their gradients.
BALANCE, WRITTEN, PASSED, DBETA, CROSSING = range(5)


class _Inputs(NamedTuple):  # references in the kernel, block specs outside, as the next two
    q: Any
    k: Any
    v: Any
    do: Any
    gates: Any
    inverses: Any
    states: Any
    dfinal: Any


class _Outputs(NamedTuple):
    dq: Any
    dk: Any
    dv: Any
    dgates: Any
    dinitial: Any


class _Scratch(NamedTuple):
    dstate: Any  # [heads, K, V] fp32
    columns: Any  # [C, heads * 8] the gates, tokens along the sublanes
    dcolumns: Any  # [C, heads * 8] their gradients
    pair: Any  # [heads, C, C] fp32, without the write mask
    scores: Any  # [heads, 2 C, C] fp32: K K^T above Q K^T
    left: Any  # [heads, C, V] fp32: V - into (K S)
    dkeys: Any  # [key heads, 2 C, K] fp32: sums over value heads


def _head(h: int, layout: Layout, x: _Inputs, y: _Outputs, tmp: _Scratch) -> Iterator[None]:
    """One tile of one head, up to each point where another head's work should come first."""
    dtype, scale = layout.dtype, layout.scale
    keys, values = layout.key_lanes(h), lanes(h, layout.V)
    gates = Gates(x.gates[0, h, 0], tmp.columns[:, lanes(h, GATES)], layout)
    i, j = positions()

    def put(gate: int, column: Float[Array, "C 1"]):
        tmp.dcolumns[:, h * GATES + gate : h * GATES + gate + 1] = column

    k, q, do = x.k[0, :, keys], x.q[0, :, keys], x.do[0, :, values]
    tmp.scores[h] = product(jnp.concatenate([k, q], axis=0), k, NT, dtype)
    yield
    tmp.pair[h] = gates.pair()
    state = x.states[0, h, 0]
    read = product(k, state, NN, dtype)
    yield
    left = x.v[0, :, values].astype(jnp.float32) - gates.column(INTO) * read
    tmp.left[h] = left
    inverse = x.inverses[0, :, lanes(h, TILE)]
    new = product(inverse, gates.column(BETA) * left, NN, dtype).astype(dtype)
    yield
    dstate = tmp.dstate[h].astype(dtype)
    attention = scale * tmp.scores[h, TILE:] * gates.weighted(tmp.pair[h])
    dnew = product(attention, do, TN, dtype) + gates.out * product(k, dstate, NN, dtype)
    yield
    dz = product(inverse, dnew, TN, dtype)
    yield
    y.dv[0, :, values] = (gates.column(BETA) * dz).astype(y.dv.dtype)
    dbeta = (dz * tmp.left[h]).sum(1, keepdims=True)
    outer = jnp.concatenate([do, dz.astype(dtype)], axis=0)
    dpairs = product(outer, new, NT, dtype)  # dO Vn^T above dZ Vn^T
    yield
    pair = tmp.pair[h]
    weighted = gates.weighted(pair)
    similarity = tmp.scores[h, :TILE]
    dattention = scale * dpairs[:TILE]
    dstrict = jnp.where(i > j, -dpairs[TILE:], 0)
    put(DBETA, dbeta + (dstrict * weighted * similarity).sum(1, keepdims=True))
    dstrict = gates.column(BETA) * dstrict
    dfactor = dattention * tmp.scores[h, TILE:] + dstrict * similarity  # of `weighted`
    crossing = gates.crossing()
    if crossing is not None:
        row = jnp.where(crossing, dfactor * pair, 0).sum(0, keepdims=True)
        y.dgates[0, h, 0, CROSSING : CROSSING + 1, :] = row
    passing = jnp.where(i > j, dfactor * weighted, 0)
    # The rows of BALANCE come with the columns at the end of the step.
    y.dgates[0, h, 0, BALANCE : BALANCE + 1, :] = -passing.sum(0, keepdims=True)
    balance = passing.sum(1, keepdims=True)
    dattention, dstrict = dattention * weighted, dstrict * weighted
    yield
    dsimilarity = dstrict + dstrict.T
    dread = product(outer, state, NT, dtype)  # dO S^T above dZ S^T
    yield
    dwritten = product(new, dstate, NT, dtype)
    yield
    dq_read, dk_read = scale * dread[:TILE], gates.column(BETA) * dread[TILE:]
    read_by = (dq_read * q - dk_read * k).sum(1, keepdims=True)
    put(BALANCE, balance + gates.column(INTO) * read_by)
    put(WRITTEN, gates.column(OUT) * (dwritten * k).sum(1, keepdims=True))
    inner = product(jnp.concatenate([dattention, dsimilarity], axis=0), k, NN, dtype)
    yield
    dq = gates.column(INTO) * dq_read + inner[:TILE]
    dk = inner[TILE:] - gates.column(INTO) * dk_read + gates.out * dwritten
    dk += product(dattention, q, TN, dtype)
    _add_keys(h, layout, y, tmp, dq, dk)
    yield
    into = gates.column(INTO)
    reading = jnp.concatenate(
        [(scale * into * q).astype(dtype), (-into * gates.column(BETA) * k).astype(dtype)], axis=0
    )
    through = gates.through * tmp.dstate[h]
    passed = (through * state).sum(0, keepdims=True).sum(1, keepdims=True)
    y.dgates[0, h, 0, PASSED : PASSED + 1, :] = jnp.broadcast_to(passed, (1, TILE))
    tmp.dstate[h] = through + product(reading, outer, TN, dtype)
    yield


def _add_keys(h: int, layout: Layout, y: _Outputs, tmp: _Scratch, dq: Array, dk: Array) -> None:
    """Adds the value head's part to its key head's; the last of them writes the block."""
    key_head, member = divmod(h, layout.group)
    if layout.group > 1:
        both = jnp.concatenate([dq, dk], axis=0)
        if member:
            both += tmp.dkeys[key_head]
        tmp.dkeys[key_head] = both
        dq, dk = both[:TILE], both[TILE:]
    if member == layout.group - 1:
        y.dq[0, :, layout.key_lanes(h)] = dq.astype(y.dq.dtype)
        y.dk[0, :, layout.key_lanes(h)] = dk.astype(y.dk.dtype)


def _kernel(*refs, layout: Layout):
    x = _Inputs(*refs[: len(_Inputs._fields)])
    y = _Outputs(*refs[len(x) : len(x) + len(_Outputs._fields)])
    tmp = _Scratch(*refs[len(x) + len(y) :])

    @pl.when(pl.program_id(2) == 0)
    def _enter():
        tmp.dstate[...] = x.dfinal[0]

    rows = (layout.heads, GATES, TILE)
    tmp.columns[...] = x.gates[0, :, 0].reshape(-1, TILE).T
    tmp.dcolumns[...] = jnp.zeros_like(tmp.dcolumns)
    y.dgates[0, :, 0] = jnp.zeros(rows, jnp.float32)
    interleave(_head(h, layout, x, y, tmp) for h in range(layout.heads))
    y.dgates[0, :, 0] += tmp.dcolumns[...].T.reshape(rows)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _leave():
        y.dinitial[0] = tmp.dstate[...]


def backward(
    layout: Layout,
    q: Float[Array, "B T Hk*K"],
    k: Float[Array, "B T Hk*K"],
    v: Float[Array, "B T H*V"],
    do: Float[Array, "B T H*V"],
    gates: Float[Array, "B H N 8 C"],
    inverses: Float[Array, "B T H*C"],
    states: Float[Array, "B H N K V"],
    dfinal: Float[Array, "B H K V"],
    *,
    interpret=False,
) -> tuple[Array, Array, Array, Array, Array]:
    """dq, dk [B, T, P*K], dv [B, T, H*V], gradients of the gates and of the initial state.

    P is Hk, and dq and dk in the dtype of q; or, where the value heads of a key head do not fit one
    grid step, one part in fp32 for each step.
    """
    assert layout.reverse
    B, N, H, K, V = layout.B, layout.N, layout.H, layout.K, layout.V
    heads, key_heads, dtype = layout.heads, layout.key_heads, layout.dtype
    parts = H // heads * key_heads
    dkeys = jax.ShapeDtypeStruct(
        (B, N * TILE, parts * K), dtype if parts == layout.Hk else jnp.float32
    )
    values, square = layout.tokens(heads * V), (heads, TILE, TILE)
    return pl.pallas_call(
        functools.partial(_kernel, layout=layout),
        grid=layout.grid,
        in_specs=tuple(
            _Inputs(
                q=layout.keys(),
                k=layout.keys(),
                v=values,
                do=values,
                gates=layout.gates(),
                inverses=layout.tokens(heads * TILE),
                states=layout.states(),
                dfinal=layout.state(),
            )
        ),
        out_specs=tuple(
            _Outputs(
                dq=layout.tokens(key_heads * K),
                dk=layout.tokens(key_heads * K),
                dv=values,
                dgates=layout.gates(),
                dinitial=layout.state(),
            )
        ),
        out_shape=tuple(
            _Outputs(
                dq=dkeys,
                dk=dkeys,
                dv=jax.ShapeDtypeStruct(v.shape, dtype),
                dgates=jax.ShapeDtypeStruct(gates.shape, jnp.float32),
                dinitial=jax.ShapeDtypeStruct(dfinal.shape, jnp.float32),
            )
        ),
        scratch_shapes=tuple(
            _Scratch(
                dstate=pltpu.VMEM((heads, K, V), jnp.float32),
                columns=pltpu.VMEM((TILE, heads * GATES), jnp.float32),
                dcolumns=pltpu.VMEM((TILE, heads * GATES), jnp.float32),
                pair=pltpu.VMEM(square, jnp.float32),
                scores=pltpu.VMEM((heads, 2 * TILE, TILE), jnp.float32),
                left=pltpu.VMEM((heads, TILE, V), jnp.float32),
                dkeys=pltpu.VMEM((key_heads, 2 * TILE, K), jnp.float32),
            )
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name="delta_rule_backward",
        interpret=interpret,
    )(q, k, v, do, gates, inverses, states, dfinal)
