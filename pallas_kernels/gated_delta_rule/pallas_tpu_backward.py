"""TPU kernel, backward: all gradients in one sweep from the last tile of a row to the first.

The gradient of the state stays in VMEM from one tile to the next. The formulas are README.md's, the
inverses and the states entering the tiles are `pallas_tpu_forward`'s; everything else is computed
again. Nothing is accumulated across grid steps but the state's gradient: the result does not depend
on the order of parallel steps.
"""

import functools
from collections.abc import Callable, Iterator
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
    OUT,
    TILE,
    TN,
    Gates,
    Heads,
    Layout,
    for_heads,
    lanes,
    positions,
    product,
    row_sums,
    spread_gates,
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
    columns: Any  # `Layout.columns`
    pair: Any  # [heads, C, C] fp32, D without the write mask
    scores: Any  # [heads, 2 C, C] fp32: K K^T above Q K^T
    left: Any  # [heads, C, V] fp32: V - into (K S)
    new: Any  # [heads, C, V] Vn
    outer: Any  # [heads, 2 C, V]: dO above dZ
    inner: Any  # [heads, 2 C, C]: the gradients of Q K^T above those of K K^T, symmetrised
    dkeys: Any  # [key heads, 2 C, K] fp32: sums over value heads


class _Head:
    """What the stages share: one head's gates and parts of the blocks and of the scratch memory."""

    def __init__(self, x: _Inputs, y: _Outputs, tmp: _Scratch, heads: Heads, h: int):
        layout = heads.layout
        self.layout, self.dtype, self.scale = layout, layout.dtype, layout.scale
        self.rows, self.columns = heads.own(x.gates.at[0, :, 0]).at[h], heads.own(tmp.columns).at[h]
        self.gates = Gates(self.rows[...], self.columns, layout)
        self.q, self.k = heads.keys(x.q, h), heads.keys(x.k, h)
        values = lanes(h, layout.V)
        self.v, self.do, self.dv = (
            heads.lanes(ref, layout.V).at[:, values] for ref in (x.v, x.do, y.dv)
        )
        self.inverse = heads.lanes(x.inverses, TILE).at[:, lanes(h, TILE)]
        self.state = heads.own(x.states.at[0, :, 0]).at[h]
        self.dgates = heads.own(y.dgates.at[0, :, 0]).at[h]
        if layout.group == 1:
            self.dq, self.dk = heads.keys(y.dq, h), heads.keys(y.dk, h)
        else:
            self.dkeys = tmp.dkeys.at[heads.key_head(h)]
        self.dstate, self.pair, self.scores, self.left, self.new, self.outer, self.inner = (
            heads.own(getattr(tmp, name)).at[h]
            for name in ("dstate", "pair", "scores", "left", "new", "outer", "inner")
        )

    def add(self, gate: int, row: Float[Array, "1 C"]) -> None:
        """To the gate's gradient."""
        self.dgates[gate : gate + 1, :] += row


def _replay(a: _Head) -> Iterator[None]:
    """What the forward pass had: scores, decays and new values."""
    spread_gates(a.layout, a.rows[...], a.columns)
    k = a.k[...]
    a.scores[...] = product(jnp.concatenate([k, a.q[...]], axis=0), k, NT, a.dtype)
    yield
    a.pair[...] = a.gates.pair()
    read = product(k, a.state[...], NN, a.dtype)
    yield
    left = a.v[...].astype(jnp.float32) - a.gates.column(INTO, a.layout.V) * read
    a.left[...] = left
    new = product(a.inverse[...] * a.gates.row(BETA), left, NN, a.dtype)
    a.new[...] = new.astype(a.dtype)
    yield


def _values(a: _Head) -> Iterator[None]:
    """Gradients of the new values, of Z and of V."""
    a.outer[:TILE] = a.do[...]
    attention = a.scale * a.scores[TILE:] * a.gates.weighted(a.pair[...])
    dnew = product(attention, a.do[...], TN, a.dtype)
    yield
    dnew += a.gates.out_column(a.layout.V) * product(a.k[...], a.dstate[...], NN, a.dtype)
    yield
    dz = product(a.inverse[...], dnew, TN, a.dtype)
    yield
    a.outer[TILE:] = dz.astype(a.dtype)
    a.dv[...] = (a.gates.column(BETA, a.layout.V) * dz).astype(a.dv.dtype)
    a.add(DBETA, row_sums(dz * a.left[...], a.dtype))
    yield


def _pairs(a: _Head) -> Iterator[None]:
    """Gradients of what two tokens of the tile have to do with each other."""
    dpairs = product(a.outer[...], a.new[...], NT, a.dtype)  # dO Vn^T above dZ Vn^T
    yield
    i, j = positions()
    pair, similarity = a.pair[...], a.scores[:TILE]
    weighted = a.gates.weighted(pair)
    dattention = a.scale * dpairs[:TILE]
    dstrict = jnp.where(i > j, -dpairs[TILE:], 0)
    a.add(DBETA, row_sums(dstrict * weighted * similarity, a.dtype))
    dstrict = a.gates.column(BETA) * dstrict
    dfactor = dattention * a.scores[TILE:] + dstrict * similarity  # of `weighted`
    crossing = a.gates.crossing()
    if crossing is not None:
        row = jnp.where(crossing, dfactor * pair, 0).sum(0, keepdims=True)
        a.add(CROSSING, row)
    passing = jnp.where(i > j, dfactor * weighted, 0)
    a.add(BALANCE, row_sums(passing, a.dtype) - passing.sum(0, keepdims=True))
    a.inner[:TILE] = (dattention * weighted).astype(a.dtype)
    dstrict *= weighted
    a.inner[TILE:] = (dstrict + dstrict.T).astype(a.dtype)
    yield


def _keys(a: _Head) -> Iterator[None]:
    """Gradients of Q and K."""
    k, q, K = a.k[...], a.q[...], a.layout.K
    into = a.gates.column(INTO, K)
    dread = product(a.outer[...], a.state[...], NT, a.dtype)  # dO S^T above dZ S^T
    yield
    dq, dk = a.scale * dread[:TILE], -a.gates.column(BETA, K) * dread[TILE:]
    a.add(BALANCE, a.gates.row(INTO) * row_sums(dq * q + dk * k, a.dtype))
    inner = product(a.inner[...], k, NN, a.dtype)
    dq, dk = into * dq + inner[:TILE], into * dk + inner[TILE:]
    yield
    dwritten = product(a.new[...], a.dstate[...], NT, a.dtype)
    a.add(WRITTEN, a.gates.row(OUT) * row_sums(dwritten * k, a.dtype))
    yield
    dk += a.gates.out_column(K) * dwritten + product(a.inner[:TILE], q, TN, a.dtype)
    if a.layout.group == 1:
        a.dq[...] = dq.astype(a.dq.dtype)
        a.dk[...] = dk.astype(a.dk.dtype)
    else:
        a.dkeys[...] += jnp.concatenate([dq, dk], axis=0)
    yield


def _states(a: _Head) -> Iterator[None]:
    """The gradient of the state that enters the tile."""
    K = a.layout.K
    into = a.gates.column(INTO, K)
    reading = [a.scale * into * a.q[...], -into * a.gates.column(BETA, K) * a.k[...]]
    reading = jnp.concatenate(reading).astype(a.dtype)
    added = product(reading, a.outer[...], TN, a.dtype)
    yield
    through = a.gates.through * a.dstate[...]
    passed = (through * a.state[...]).sum(0, keepdims=True).sum(1, keepdims=True)
    a.add(PASSED, jnp.broadcast_to(passed, (1, TILE)))
    a.dstate[...] = through + added
    yield


def _kernel(*refs, layout: Layout):
    x = _Inputs(*refs[: len(_Inputs._fields)])
    y = _Outputs(*refs[len(x) : len(x) + len(_Outputs._fields)])
    tmp = _Scratch(*refs[len(x) + len(y) :])

    @pl.when(pl.program_id(2) == 0)
    def _enter():
        tmp.dstate[...] = x.dfinal[0]

    def stage(compute: Callable[[_Head], Iterator[None]], least: int):
        size = layout.side_by_side(least)
        for_heads(layout, size, lambda heads, h: compute(_Head(x, y, tmp, heads, h)))

    y.dgates[...] = jnp.zeros_like(y.dgates)
    if layout.group > 1:
        tmp.dkeys[...] = jnp.zeros_like(tmp.dkeys)
    # The first two are chains of products, which more heads fill; the next two fill registers.
    stage(_replay, 4)
    stage(_values, 4)
    stage(_pairs, 1)
    stage(_keys, 1)
    stage(_states, 2)
    if layout.group > 1:
        for key_head in range(layout.key_heads):
            keys = (0, slice(None), lanes(key_head, layout.K))
            y.dq[keys] = tmp.dkeys[key_head, :TILE].astype(y.dq.dtype)
            y.dk[keys] = tmp.dkeys[key_head, TILE:].astype(y.dk.dtype)

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
                columns=layout.columns(),
                pair=pltpu.VMEM(square, jnp.float32),
                scores=pltpu.VMEM((heads, 2 * TILE, TILE), jnp.float32),
                left=pltpu.VMEM((heads, TILE, V), jnp.float32),
                new=pltpu.VMEM((heads, TILE, V), dtype),
                outer=pltpu.VMEM((heads, 2 * TILE, V), dtype),
                inner=pltpu.VMEM((heads, 2 * TILE, TILE), dtype),
                dkeys=pltpu.VMEM((key_heads, 2 * TILE, K), jnp.float32),
            )
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name="delta_rule_backward",
        interpret=interpret,
    )(q, k, v, do, gates, inverses, states, dfinal)
