"""The only sequential part: states between chunks, from each chunk's affine map of the state.

A chunk maps the state entering it to the state leaving it,

    S_next = through S - erase S + write,      through a scalar, erase [K, K], write [K, V].

The scalar is kept apart from `erase`, so that rounding `erase` to bf16 does not round the decay.
Maps compose: (a2, E2, B2) after (a1, E1, B1) is (a2 a1, a2 E1 + a1 E2 - E2 E1, a2 B1 - E2 B1 + B2).
The gradient of the loss with respect to the states runs backwards through the transposed maps,

    dS = through dS_next - erase^T dS_next + dwrite,

so both directions are computed from the same transitions (through, erase), by one of two
strategies: `scan`, chunk after chunk; or `tree`, which composes neighbouring maps up to a single
one and hands states down again: log2(N) steps of large batched products instead of N small ones.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float

Strategy = Literal["scan", "tree"]
Product = Callable[[str, Array, Array], Array]  # an einsum with the op's operand types, fp32 result

_UNROLL = 4


class Transition(NamedTuple):
    """The linear part of N consecutive affine maps; S -> through S - erase S."""

    through: Float[Array, "N *batch"]
    erase: Float[Array, "N *batch K K"]


def transition_levels(
    transition: Transition, product: Product, strategy: Strategy
) -> list[Transition]:
    """The chunks' transitions, and for `tree` those of stretches of 2, 4, 8 ... chunks.

    A chunk without a partner at some level is left out above it: only the state after the last
    chunk depends on it.
    """
    levels = [transition]
    while strategy == "tree" and len(levels[-1].through) >= 2:
        levels.append(_compose(levels[-1], product))
    return levels


def entering_states(
    levels: list[Transition],
    write: Float[Array, "N *batch K V"],
    initial: Float[Array, "*batch K V"],
    product: Product,
) -> tuple[Float[Array, "N *batch K V"], Float[Array, "*batch K V"]]:
    """The state entering each chunk and the state after the last one."""

    def leave(transition, state, write):
        erased = product("...kw,...wv->...kv", transition.erase, state)
        return transition.through[..., None, None] * state - erased + write

    def compose(first, second, write_first, write_second):
        return leave(second, write_first.astype(initial.dtype), write_second)

    if len(levels) == 1:

        def step(state, inputs):
            transition, write = inputs
            return leave(transition, state, write), state

        final, entering = jax.lax.scan(step, initial, (levels[0], write), unroll=_UNROLL)
        return entering, final

    pairs = len(write) // 2
    first, second = _pairs(levels[0])
    write_first, write_second = _pairs(write)
    entering_pairs, final = entering_states(
        levels[1:], compose(first, second, write_first, write_second), initial, product
    )
    middle = leave(first, entering_pairs, write_first)
    entering = _interleave(entering_pairs, middle)
    if len(write) > 2 * pairs:
        entering = jnp.concatenate([entering, final[None]])
        last = jax.tree.map(lambda x: x[-1], levels[0])
        final = leave(last, final, write[-1])
    return entering, final


def leaving_cotangents(
    levels: list[Transition],
    write: Float[Array, "N *batch K V"],
    final: Float[Array, "*batch K V"],
    product: Product,
) -> tuple[Float[Array, "N *batch K V"], Float[Array, "*batch K V"]]:
    """The cotangent of the state leaving each chunk and that of the initial state.

    `write` is what each chunk adds to the cotangent of the state entering it; `final` the cotangent
    of the state after the last chunk.
    """

    def enter(transition, state, write):
        erased = product("...wk,...wv->...kv", transition.erase, state)
        return transition.through[..., None, None] * state - erased + write

    if len(levels) == 1:

        def step(state, inputs):
            transition, write = inputs
            return enter(transition, state, write), state

        initial, leaving = jax.lax.scan(
            step, final, (levels[0], write), reverse=True, unroll=_UNROLL
        )
        return leaving, initial

    pairs = len(write) // 2
    odd = len(write) > 2 * pairs
    leaving_last = final
    if odd:
        last = jax.tree.map(lambda x: x[-1], levels[0])
        final = enter(last, final, write[-1])
    first, second = _pairs(levels[0])
    write_first, write_second = _pairs(write)
    composed = enter(first, write_second.astype(final.dtype), write_first)
    leaving_pairs, initial = leaving_cotangents(levels[1:], composed, final, product)
    middle = enter(second, leaving_pairs, write_second)
    leaving = _interleave(middle, leaving_pairs)
    if odd:
        leaving = jnp.concatenate([leaving, leaving_last[None]])
    return leaving, initial


def _compose(transition: Transition, product: Product) -> Transition:
    first, second = _pairs(transition)
    a1, a2 = (x.through[..., None, None] for x in (first, second))
    erase = a2 * first.erase + a1 * second.erase
    erase -= product("...kw,...wv->...kv", second.erase, first.erase)
    return Transition(first.through * second.through, erase)


def _pairs(tree):
    """Entries 0, 2, 4 ... and 1, 3, 5 ... of the leading axis; an unpaired last one is dropped."""

    def split(x):
        paired = x[: len(x) // 2 * 2].reshape(len(x) // 2, 2, *x.shape[1:])
        return paired[:, 0], paired[:, 1]

    leaves, structure = jax.tree.flatten(tree)
    halves = [split(x) for x in leaves]
    return tuple(structure.unflatten([half[side] for half in halves]) for side in (0, 1))


def _interleave(evens: Array, odds: Array) -> Array:
    return jnp.stack([evens, odds], axis=1).reshape(2 * len(evens), *evens.shape[1:])
