"""The only sequential part: states between chunks, from each chunk's affine map of the state.

A chunk maps the state entering it to the state leaving it,

    S_next = through S - erase S + write,      through a scalar, erase [K, K], write [K, V].

The scalar is kept apart from `erase`, so that rounding `erase` to bf16 does not round the decay.
Where each step costs kernel launches, a row is cut into stretches of consecutive chunks: the maps
of the stretches are composed, all stretches at once; states pass over the stretches one by one; and
then through the chunks, again in all stretches at once. A step of each then works on many stretches
and the number of steps falls from N to 2 N / stretches + stretches.

The cotangent of the states runs backwards through the transposed maps,

    dS = through dS_next - erase^T dS_next + dwrite.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float

Product = Callable[[str, Array, Array], Array]  # an einsum with the op's operand types, fp32 result

_UNROLL = 8  # chunks per loop iteration; README, Measured


class AffineMap(NamedTuple):
    """S -> through S - erase S + write, of a chunk or of a stretch of chunks."""

    through: Float[Array, "*batch"]
    erase: Float[Array, "*batch K K"]
    write: Float[Array, "*batch K V"]


def compose(first: AffineMap, second: AffineMap, product: Product) -> AffineMap:
    """The map of `first` and then `second`, in the precision of `first`."""
    a1, a2 = first.through[..., None, None], second.through[..., None, None]
    erased_erase = product("...kw,...wv->...kv", second.erase, first.erase)
    erased_write = product("...kw,...wv->...kv", second.erase, first.write)
    return AffineMap(
        first.through * second.through,
        a2 * first.erase + a1 * second.erase - erased_erase,
        a2 * first.write + second.write - erased_write,
    )


def compose_all(maps: AffineMap, product: Product) -> AffineMap:
    """The composition along the leading axis of `maps`, in the precision of `through`."""
    identity = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], maps.through.dtype), maps)
    identity = identity._replace(through=jnp.ones_like(identity.through))
    return jax.lax.scan(
        lambda first, second: (compose(first, second, product), None),
        identity,
        maps,
        unroll=_UNROLL,
    )[0]


def pass_state(
    maps: AffineMap, state: Float[Array, "*batch K V"], product: Product, *, adjoint: bool = False
) -> tuple[Float[Array, "N *batch K V"], Float[Array, "*batch K V"]]:
    """The state before each map of the leading axis and the one after the last.

    With `adjoint` it runs through the transposed maps from the last to the first, so `state` is the
    cotangent of the state after the last map. What is kept per map has the type of `maps.erase`.
    """
    spec = "...wk,...wv->...kv" if adjoint else "...kw,...wv->...kv"

    def step(state, affine):
        erased = product(spec, affine.erase, state)
        after = affine.through[..., None, None] * state - erased + affine.write
        return after, state.astype(affine.erase.dtype)

    after, before = jax.lax.scan(step, state, maps, reverse=adjoint, unroll=_UNROLL)
    return before, after


def pass_decayed(
    through: Float[Array, "N ..."], write: Float[Array, "N *batch K V"], state: Array
) -> tuple[Float[Array, "N *batch K V"], Float[Array, "*batch K V"]]:
    """`pass_state` of maps without `erase`; `through` broadcasts against the state."""

    def step(state, affine):
        through, write = affine
        return through * state + write, state

    after, before = jax.lax.scan(step, state, (through, write), unroll=_UNROLL)
    return before, after


def entering_states(
    maps: AffineMap, initial: Float[Array, "*batch K V"], product: Product
) -> tuple[Float[Array, "N S *batch K V"], Float[Array, "*batch K V"], AffineMap]:
    """The state entering each chunk, the state after the last, and the maps of the stretches.

    `maps` has leading axes [chunks of a stretch, stretches].
    """
    if maps.through.shape[1] == 1:
        stretches = jax.tree.map(lambda x: x[:, 0], maps)
        entering, final = pass_state(stretches, initial, product)
        return entering[:, None], final, stretches
    stretches = compose_all(maps, product)
    starts, final = pass_state(stretches, initial, product)
    entering, _ = pass_state(maps, starts, product)
    return entering, final, stretches


def leaving_cotangents(
    maps: AffineMap, stretches: AffineMap, final: Float[Array, "*batch K V"], product: Product
) -> tuple[Float[Array, "N S *batch K V"], Float[Array, "*batch K V"]]:
    """The cotangent of the state leaving each chunk and that of the initial state.

    `maps.write` is what each chunk adds to the cotangent of the state entering it; `stretches` come
    from `entering_states`, and `final` is the cotangent of the state after the last chunk.
    """
    if maps.through.shape[1] == 1:
        one = jax.tree.map(lambda x: x[:, 0], maps)
        leaving, initial = pass_state(one, final, product, adjoint=True)
        return leaving[:, None], initial
    nothing = jnp.zeros_like(stretches.write)
    _, added = pass_state(maps, nothing, product, adjoint=True)
    ends, initial = pass_state(stretches._replace(write=added), final, product, adjoint=True)
    leaving, _ = pass_state(maps, ends, product, adjoint=True)
    return leaving, initial
