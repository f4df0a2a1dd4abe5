"""The small modules every mixer and block is made of; none of them lets tokens see each other
except ShortConv and token_before.

Parameters are created as N(0, 0.02) (norm scales as 1, biases as 0) in `param_dtype` and carry
logical axis names. Matrices multiply in `dtype`; norms and the convolution compute in fp32 and
return the dtype they were given. "fp32" means float64 for float64 inputs, so that everything can be
checked there.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.config import RopeScaling, SwiGLUConfig
from pallas_kernels.array_types import Array, Float, Int

INIT_STD = 0.02


def upcast(x: Array) -> Array:
    """x in at least fp32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: str) -> Array:
    """N(0, 0.02), drawn in fp32."""
    return (INIT_STD * jax.random.normal(rngs.params(), shape)).astype(dtype)


def rms_normalise(
    x: Float[Array, "*batch K"], weight: Float[Array, "K"], eps: float
) -> Float[Array, "*batch K"]:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, in fp32 and returned so."""
    x = upcast(x)
    return weight * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def layer_normalise(
    x: Float[Array, "*batch K"], weight: Float[Array, "K"], bias: Float[Array, "K"], eps: float
) -> Float[Array, "*batch K"]:
    """weight * (x - mean) / sqrt(variance + eps) + bias over the last axis, in fp32, returned so.

    `weight` and `bias` may have leading axes that broadcast against x: one set per head.
    """
    centred = upcast(x)
    centred -= jnp.mean(centred, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)
    return weight * centred * scale + bias


def l2_normalise(x: Float[Array, "*batch K"], eps: float = 1e-6) -> Float[Array, "*batch K"]:
    """x / sqrt(sum(x^2) + eps) over the last axis, computed in fp32."""
    wide = upcast(x)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + eps)).astype(x.dtype)


def rotary_frequencies(
    half: int, theta: float, scaling: RopeScaling | None, dtype: jnp.dtype
) -> Float[Array, "half"]:
    """Radians per token of each channel pair: f_i = theta^(-i/half).

    With `scaling`, Llama 3.1's: a pair that makes n = original_length f / 2 pi turns within the
    length it was trained on gets f (s + (1 - s) / factor), with s = (n - low) / (high - low) cut
    to [0, 1] (arXiv 2407.21783; rule as in the released code).
    """
    frequency = theta ** (-jnp.arange(half, dtype=dtype) / half)
    if scaling is None:
        return frequency
    turns = scaling.original_length * frequency / (2 * jnp.pi)
    kept = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
    kept = jnp.clip(kept, 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rotate(
    x: Float[Array, "B T H K"],
    positions: Int[Array, "B T"],
    theta: float,
    scaling: RopeScaling | None = None,
) -> Float[Array, "B T H K"]:
    """Rotary position embedding, half-split: pairs (i, i + K/2) turn by position * f_i.

    RoFormer, arXiv 2104.09864, in GPT-NeoX's layout. Angles are fp32.
    """
    half = x.shape[-1] // 2
    wide = upcast(x)
    frequency = rotary_frequencies(half, theta, scaling, wide.dtype)
    angle = positions[:, :, None, None].astype(wide.dtype) * frequency
    first, second = wide[..., :half], wide[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(x.dtype)


def product(
    x: Float[Array, "*batch D"], weight: Float[Array, "D F"], out_dtype: jnp.dtype
) -> Float[Array, "*batch F"]:
    """x W, accumulated in `out_dtype` or wider.

    A single row gets a row of zeros beside it: of one row XLA makes a matrix of products and then
    its sums, which on an H200 is seventeen times slower than two rows (docs/speed.md).
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 1:
        y = jnp.matmul(jnp.pad(rows, ((0, 1), (0, 0))), weight, preferred_element_type=out_dtype)
        return y[:1].reshape(*x.shape[:-1], -1)
    return jnp.matmul(x, weight, preferred_element_type=out_dtype)


class Linear(nnx.Module):
    """y = x W, or x W + b, with W [in, out]; `wide` keeps the fp32 accumulator as the result."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        axes: tuple[str | None, str | None],
        dtype: str,
        param_dtype: str,
        rngs: nnx.Rngs,
        bias: bool = False,
        wide: bool = False,
    ):
        self.weight = nnx.Param(normal(rngs, (in_dim, out_dim), param_dtype), axes=axes)
        zeros = jnp.zeros((out_dim,), param_dtype)
        self.bias = nnx.Param(zeros, axes=axes[1:]) if bias else None
        self.dtype = jnp.dtype(dtype)
        self.out_dtype = jnp.promote_types(dtype, jnp.float32) if wide else self.dtype

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        weight = self.weight[...].astype(self.dtype)
        y = product(x.astype(self.dtype), weight, self.out_dtype)
        return y if self.bias is None else y + self.bias[...].astype(self.out_dtype)


class LowRank(nnx.Module):
    """y = up(activation(down(x))), or with a bias, through `rank` channels."""

    def __init__(
        self,
        in_dim: int,
        rank: int,
        out_dim: int,
        *,
        activation: Callable[[Array], Array] = lambda x: x,
        dtype: str,
        param_dtype: str,
        rngs: nnx.Rngs,
        bias: bool = False,
        wide: bool = False,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.down = linear(in_dim, rank, axes=("embed", None))
        self.up = linear(rank, out_dim, axes=(None, "heads"), bias=bias, wide=wide)
        self.activation = activation

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        return self.up(self.activation(self.down(x)))


class RMSNorm(nnx.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis."""

    def __init__(self, dim: int, *, eps: float, param_dtype: str):
        self.weight = nnx.Param(jnp.ones((dim,), param_dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_normalise(x, self.weight[...], self.eps).astype(x.dtype)


class LayerNorm(nnx.Module):
    """weight * (x - mean) / sqrt(variance + eps) + bias over the last axis."""

    def __init__(self, dim: int, *, eps: float, param_dtype: str):
        self.weight = nnx.Param(jnp.ones((dim,), param_dtype), axes=(None,))
        self.bias = nnx.Param(jnp.zeros((dim,), param_dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return layer_normalise(x, self.weight[...], self.bias[...], self.eps).astype(x.dtype)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)); arXiv 2002.05202, without biases."""

    def __init__(
        self,
        config: SwiGLUConfig,
        dim: int,
        *,
        dtype: str,
        param_dtype: str,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate_proj = linear(dim, config.width, axes=("embed", "mlp"))
        self.up_proj = linear(dim, config.width, axes=("embed", "mlp"))
        self.down_proj = linear(config.width, dim, axes=("mlp", "embed"))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((jax.nn.silu(upcast(gate)) * up).astype(gate.dtype))


class ShortConv(nnx.Module):
    """Causal depthwise convolution: y_t = silu(sum_j weight_j * x_{t - (W-1) + j}, plus a bias).

    Without a width y_t = silu(x_t, plus a bias). Inputs before the row's first token are zero, or
    `tail`: the last W - 1 inputs of an earlier call. With `segment_ids` a token never sees the
    inputs of another segment.
    """

    def __init__(
        self,
        channels: int,
        width: int | None,
        *,
        param_dtype: str,
        rngs: nnx.Rngs,
        bias: bool = False,
    ):
        self.weight = (
            None
            if width is None
            else nnx.Param(normal(rngs, (width, channels), param_dtype), axes=(None, "heads"))
        )
        zeros = jnp.zeros((channels,), param_dtype)
        self.bias = nnx.Param(zeros, axes=("heads",)) if bias else None
        self.channels = channels
        self.width = width or 1

    def empty_tail(self, batch: int, dtype: str | jnp.dtype) -> Float[Array, "B tail F"]:
        return jnp.zeros((batch, self.width - 1, self.channels), dtype)

    def __call__(
        self,
        x: Float[Array, "B T F"],
        tail: Float[Array, "B tail F"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T F"]:
        T = x.shape[1]
        weight = jnp.ones((1, 1)) if self.weight is None else upcast(self.weight[...])
        y = weight[-1] * upcast(x)
        for distance in range(1, self.width):
            tap = weight[self.width - 1 - distance]
            if segment_ids is not None:
                # not a `where`: a scan over layers would keep its masks and zeros, as wide as x
                theirs = jnp.pad(segment_ids, ((0, 0), (distance, 0)), mode="edge")[:, :T]
                tap = (theirs == segment_ids)[..., None] * tap
            y += tap * upcast(_delayed(x, tail, distance))
        if self.bias is not None:
            y += self.bias[...]
        return jax.nn.silu(_narrow_gradient(x.dtype, y)).astype(x.dtype)

    def tail_after(
        self,
        tail: Float[Array, "B tail F"],
        x: Float[Array, "B T F"],
        count: Int[Array, "B"],
    ) -> Float[Array, "B tail F"]:
        """The tail once the first `count` tokens of each row of x have gone through."""
        return last_inputs(tail, x, count)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow_gradient(dtype: jnp.dtype, y: Array) -> Array:
    """y, whose gradient is rounded to `dtype`.

    For gradients that several passes over memory read: by itself XLA keeps them in fp32, and does
    so as well where a rounding is at once undone; hence the barrier.
    """
    return y


def _narrow_forward(dtype: jnp.dtype, y: Array) -> tuple[Array, None]:
    return y, None


def _narrow_backward(dtype: jnp.dtype, _: None, cotangent: Array) -> tuple[Array]:
    if cotangent.dtype == dtype:
        return (cotangent,)
    return (jax.lax.optimization_barrier(cotangent.astype(dtype)).astype(cotangent.dtype),)


_narrow_gradient.defvjp(_narrow_forward, _narrow_backward)


def _delayed(
    x: Float[Array, "B T F"], tail: Float[Array, "B tail F"] | None, distance: int
) -> Float[Array, "B T F"]:
    """x_{t - distance}; before the row's first token the end of `tail`, or zeros."""
    T = x.shape[1]
    before, rest = min(distance, T), x[:, : max(T - distance, 0)]
    if tail is None:
        return jnp.pad(rest, ((0, 0), (before, 0), (0, 0)))
    start = tail.shape[1] - distance
    return jnp.concatenate([tail[:, start : start + before], rest], 1)


def last_inputs(
    tail: Float[Array, "B W F"], x: Float[Array, "B T F"], count: Int[Array, "B"]
) -> Float[Array, "B W F"]:
    """The last W inputs once the first `count` tokens of each row of x have followed `tail`."""
    index = count[:, None] + jnp.arange(tail.shape[1])
    return jnp.take_along_axis(jnp.concatenate([tail, x], 1), index[..., None], 1)


def token_before(
    x: Float[Array, "B T F"],
    last: Float[Array, "B 1 F"] | None,
    segment_ids: Int[Array, "B T"] | None,
) -> Float[Array, "B T F"]:
    """x_{t-1}: `last` or zeros before the row's first token, zeros before a segment's first."""
    if last is None:
        last = jnp.zeros_like(x[:, :1])
    before = jnp.concatenate([last, x[:, :-1]], 1)
    if segment_ids is None:
        return before
    theirs = jnp.pad(segment_ids, ((0, 0), (1, 0)), mode="edge")[:, :-1]
    return jnp.where((theirs == segment_ids)[..., None], before, 0)
