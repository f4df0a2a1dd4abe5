"""The step on TPUs: one kernel, the state read once and written once, in place.

A grid step holds the states of some heads of one row. Of each head it makes both sums over K and
the update on the vector unit in fp32: keys and queries are transposed, all heads at once, so that
each is a column along the sublanes, as K is; the rest are rows of lanes. It is bound by memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.dispatch import Target

_CHIPS = ("TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU7x")
_LANES = 128
_SUBLANES = 8
_STATE_BYTES = 2**20  # of a grid step; it is in VMEM four times, coming in and going out


def unsupported(problem: Any, target: Target) -> str | None:
    """Why the TPU kernel cannot take `problem` on `target`, or None."""
    if target.platform != "tpu" or target.device_kind not in _CHIPS:
        return f"needs one of {_CHIPS}, not {target.device_kind!r}"
    if problem.dtype not in ("bfloat16", "float32"):
        return f"q, k and v must be bfloat16 or float32, not {problem.dtype}"
    if problem.K % _SUBLANES:
        return f"K must be a multiple of {_SUBLANES}, not {problem.K}"
    if problem.V % _LANES:
        return f"V must be a multiple of {_LANES}, not {problem.V}"
    return None


def heads_per_step(heads: int, state_bytes: int) -> int:
    """As many as `_STATE_BYTES` hold, in whole registers of rows; all, where they are few."""
    choices = [n for n in range(_SUBLANES, heads, _SUBLANES) if heads % n == 0]
    fitting = [n for n in (*choices, heads) if n * state_bytes <= _STATE_BYTES]
    return max(fitting, default=min((*choices, heads)))


def step(
    scale: float,
    q: Float[Array, "B Hk K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """See `api.gated_delta_step`."""
    B, H, K, V = state.shape
    heads = heads_per_step(H, K * V * 4)
    q, k = (jnp.repeat(x.astype(jnp.float32), H // x.shape[1], axis=1) for x in (q, k))
    # Scalars of a head are rows of lanes: next to the state, what they add is 2 / K of its bytes.
    decay, beta = (jnp.broadcast_to(x[..., None], v.shape) for x in (jnp.exp(g), beta))

    def kernel(q_ref, k_ref, v_ref, decay_ref, beta_ref, state_ref, o_ref, new_ref):
        queries, keys = (ref[0].T for ref in (q_ref, k_ref))  # [K, heads]
        values, decays, strengths = v_ref[0], decay_ref[0], beta_ref[0]  # [heads, V]
        rows = []
        for h in range(heads):
            query, key = queries[:, h : h + 1], keys[:, h : h + 1]
            decayed = decays[h : h + 1] * state_ref[0, h]
            recalled = jnp.sum(decayed * key, axis=0, keepdims=True)
            written = strengths[h : h + 1] * (values[h : h + 1] - recalled)
            new = decayed + key * written
            new_ref[0, h] = new
            rows.append(scale * jnp.sum(new * query, axis=0, keepdims=True))
        o_ref[0] = jnp.concatenate(rows)

    def of_heads(width):
        return pl.BlockSpec((1, heads, width), lambda b, h: (b, h, 0))

    states = pl.BlockSpec((1, heads, K, V), lambda b, h: (b, h, 0, 0))
    o, state = pl.pallas_call(
        kernel,
        grid=(B, H // heads),
        in_specs=[of_heads(K), of_heads(K), *(of_heads(V),) * 3, states],
        out_specs=[of_heads(V), states],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        input_output_aliases={5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="gated_delta_step",
    )(q, k, v.astype(jnp.float32), decay, beta, state)
    return o.astype(v.dtype), state
