"""The gated delta rule on TPUs: which problems it takes, and how they become the kernels' arrays.

`pallas_tpu_forward` and `pallas_tpu_backward` are one kernel each, and all that touches q, k, v and
o; sums of log decays along a tile, and their gradients, are XLA's. TPU.md says how it works.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import cdiv, narrow_chunks, pad_to_multiple, widen_chunks
from pallas_kernels.dispatch import KEPT, Target
from pallas_kernels.gated_delta_rule import pallas_tpu_backward as kernel_backward
from pallas_kernels.gated_delta_rule.decays import accumulate
from pallas_kernels.gated_delta_rule.pallas_tpu_backward import backward
from pallas_kernels.gated_delta_rule.pallas_tpu_forward import forward
from pallas_kernels.gated_delta_rule.pallas_tpu_tiles import MASK, TILE, Layout, pack_gates

_CHIPS = ("TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU7x")
_KEY_WIDTHS = (64, 128, 192, 256)
_VALUE_WIDTHS = (64, 128, 256, 384, 512)
_MOST_HEADS = 16  # of a grid step; more take minutes to compile


def unsupported(problem: Any, target: Target) -> str | None:
    """Why the TPU kernels cannot take `problem` on `target`, or None."""
    if target.platform != "tpu" or target.device_kind not in _CHIPS:
        return f"needs one of {_CHIPS}, not {target.device_kind!r}"
    if problem.dtype not in ("bfloat16", "float32"):
        return f"q, k and v must be bfloat16 or float32, not {problem.dtype}"
    if problem.K not in _KEY_WIDTHS:
        return f"K must be one of {_KEY_WIDTHS}, not {problem.K}"
    if problem.V not in _VALUE_WIDTHS:
        return f"V must be one of {_VALUE_WIDTHS}, not {problem.V}"
    if problem.write_mask and _unit(problem.T, problem.chunk_size) is None:
        return f"a write_mask needs a chunk_size of at most {TILE}, not {problem.chunk_size}"
    sizes = (problem.Hk, problem.H, problem.K, problem.V)
    if heads_per_step(*with_dead_heads(*sizes)) > _MOST_HEADS:
        return f"{problem.H} value heads over {problem.Hk} key heads of {problem.K} need too many"
    return None


def _unit(T: int, chunk_size: int) -> int | None:
    """The divisor of a tile that a chunk of the write mask fits in, None where it fits in none."""
    if min(chunk_size, TILE) >= T:
        return TILE
    return 1 << (chunk_size - 1).bit_length() if chunk_size <= TILE else None


def heads_per_step(Hk: int, H: int, K: int, V: int) -> int:
    """Value heads computed side by side: whole registers of lanes, and enough to fill waits."""
    group = H // Hk

    def fits(heads: int) -> bool:
        whole_groups = heads % group == 0 or group % heads == 0
        aligned = heads * V % TILE == 0 and max(1, heads // group) * K % TILE == 0
        return H % heads == 0 and whole_groups and (aligned or heads == H)

    choices = [heads for heads in range(1, H + 1) if fits(heads)]
    wanted = max(1, 4 * TILE * TILE // (K * V))
    return max((x for x in choices if x <= wanted), default=choices[0])


def with_dead_heads(Hk: int, H: int, K: int, V: int) -> tuple[int, int, int, int]:
    """The sizes with one more key head where an odd number of narrow ones fills no registers."""
    more = (Hk + 1, H // Hk * (Hk + 1), K, V)
    return more if heads_per_step(*more) < heads_per_step(Hk, H, K, V) > 4 else (Hk, H, K, V)


def gated_delta_rule(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    *,
    initial_state: Float[Array, "B H K V"],
    write_mask: Float[Array, "B N H"] | None,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
    chunk_size: int,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """The op's contract (`api.gated_delta_rule`) for problems that `unsupported` lets through."""
    del precision  # fp32 inputs: always the highest
    B, T, Hk, K = q.shape
    H, V = v.shape[2:]
    unit = None if write_mask is None else _unit(T, chunk_size)
    if unit is not None and chunk_size < min(unit, T):
        # Chunks that fill no divisor of a tile get tokens that change nothing: g = 0, beta = 0.
        widen = functools.partial(widen_chunks, chunk_size=chunk_size, width=unit)
        if segment_ids is not None:
            segment_ids = widen(segment_ids, repeat_last=True)
        o, state = gated_delta_rule(
            *map(widen, (q, k, v, g, beta)),
            initial_state=initial_state,
            write_mask=write_mask,
            segment_ids=segment_ids,
            scale=scale,
            chunk_size=unit,
        )
        return narrow_chunks(o, chunk_size, unit, T), state
    sizes = with_dead_heads(Hk, H, K, V)

    def pad(x, axis, missing):
        return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])

    if sizes[0] != Hk:
        q, k = pad(q, 2, sizes[0] - Hk), pad(k, 2, sizes[0] - Hk)
        v, g, beta = (pad(x, 2, sizes[1] - H) for x in (v, g, beta))
        initial_state = pad(initial_state, 1, sizes[1] - H)
        write_mask = None if write_mask is None else pad(write_mask, 2, sizes[1] - H)
    layout = Layout(
        B,
        cdiv(T, TILE),
        *sizes,
        heads=heads_per_step(*sizes),
        dtype=q.dtype,
        scale=scale,
        segments=segment_ids is not None,
        unit=unit,
    )

    def lanes(x):  # [B, T, H, width] -> [B, N * C, H * width]
        return pad_to_multiple(x, TILE, 1).reshape(B, layout.N * TILE, -1)

    o, state = _rule(
        layout, lanes(q), lanes(k), lanes(v), g, beta, initial_state, write_mask, segment_ids
    )
    return o.reshape(B, -1, sizes[1], V)[:, :T, :H], state[:, :H]


def _outputs(
    layout, q, k, v, g, beta, initial_state, write_mask, segment_ids
) -> tuple[Array, Array]:
    gates = pack_gates(g, beta, write_mask, segment_ids, layout.unit)
    o, final_state = forward(layout, q, k, v, gates, initial_state, keep=False)
    return o, final_state


_rule = jax.custom_vjp(_outputs, nondiff_argnums=(0,))


def _rule_forward(layout, q, k, v, g, beta, initial_state, write_mask, segment_ids):
    gates = pack_gates(g, beta, write_mask, segment_ids, layout.unit)
    results = forward(layout, q, k, v, gates, initial_state, keep=True)
    o, final_state, *kept = checkpoint_name(results, KEPT)
    return (o, final_state), (q, k, v, g, beta, write_mask, segment_ids, *kept)


def _rule_backward(layout, residuals, cotangents):
    q, k, v, g, beta, write_mask, segment_ids, inverses, states = residuals
    do, dfinal = cotangents
    gates = pack_gates(g, beta, write_mask, segment_ids, layout.unit)
    dq, dk, dv, dgates, dinitial = backward(
        layout.reversed(), q, k, v, do, gates, inverses, states, dfinal
    )
    dq, dk = _over_steps(layout, dq), _over_steps(layout, dk)
    row = {
        name: dgates[..., getattr(kernel_backward, name), :]
        for name in ("BALANCE", "WRITTEN", "PASSED", "DBETA", "CROSSING")
    }
    T = g.shape[1]

    def tokens(x):  # [B, H, N, C] -> [B, T, H]
        return x.reshape(layout.B, layout.H, -1).swapaxes(1, 2)[:, :T]

    dg = accumulate(row["BALANCE"], row["WRITTEN"] * gates[..., MASK, :], row["PASSED"])
    dmask = None
    if write_mask is not None:
        weights = row["WRITTEN"] + row["CROSSING"]
        by_chunk = weights.reshape(layout.B, layout.H, -1, layout.unit).sum(-1)
        dmask = by_chunk.swapaxes(1, 2)[:, : write_mask.shape[1]]
    return dq, dk, dv, tokens(dg), tokens(row["DBETA"]), dinitial, dmask, None


def _over_steps(layout: Layout, dx: Array) -> Array:
    """[B, T, parts * K] -> [B, T, Hk * K]: the sum over the grid steps that share a key head."""
    B, T, width = dx.shape
    parts = width // (layout.Hk * layout.K)
    whole = dx.reshape(B, T, layout.Hk, parts, layout.K).sum(3)
    return whole.reshape(B, T, -1).astype(layout.dtype)


_rule.defvjp(_rule_forward, _rule_backward)
