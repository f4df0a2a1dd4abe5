"""What a mixer is told besides its input, and the signature all mixers share."""

import dataclasses
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Float, Int

State = Any  # a mixer's own pytree of arrays: one row per batch row, shapes fixed at creation
Report = dict[str, Array]  # statistics of one call; empty for mixers that decide nothing


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "positions",
        "segment_ids",
        "lengths",
        "prompt",
        "rng",
        "temperature",
        "softmax_bias",
        "routes",
        "depth",
        "lower_bound",
    ),
    meta_fields=("decided",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Per-call facts about the tokens and the routing. None: the plain case of each.

    Documents packed into a row start at multiples of the chunk size, so that the row's chunks are
    the document's.
    """

    positions: Int[Array, "B T"]  # from the start of the token's own document or prompt
    segment_ids: Int[Array, "B T"] | None = None  # packed documents; negative is padding
    lengths: Int[Array, "B"] | None = None  # valid tokens of each right-padded row in this call
    prompt: Bool[Array, "B T"] | None = None  # what routers of heads may read; all tokens if None
    rng: Array | None = None  # key of stochastic routing; without it routing is deterministic
    temperature: Float[Array, ""] | None = None  # of the router's softmax
    # of every router, instead of the configured one; static head masks add it to their weights
    softmax_bias: Float[Array, ""] | None = None
    # decisions by chunk of the row; a model also takes them by block: [L, B, N, H]
    routes: Bool[Array, "B N H"] | None = None
    decided: bool = False  # with a state: every row has read its prompt, which routes its heads
    depth: Float[Array, ""] | None = None  # blocks below this one, over all blocks
    lower_bound: Float[Array, "F"] | None = None  # of this mixer's forget gates, in [0, 1)

    def valid(self) -> Bool[Array, "B T"]:
        """Which tokens are not padding."""
        valid = jnp.ones(self.positions.shape, bool)
        if self.segment_ids is not None:
            valid &= self.segment_ids >= 0
        if self.lengths is not None:
            valid &= jnp.arange(valid.shape[1]) < self.lengths[:, None]
        return valid

    def router_tokens(self) -> Bool[Array, "B T"]:
        """Which tokens decide how the heads of their document attend."""
        return self.valid() if self.prompt is None else self.valid() & self.prompt

    def counts(self) -> Int[Array, "B"]:
        """Valid tokens per row, as `lengths` says."""
        B, T = self.positions.shape
        return jnp.full((B,), T, jnp.int32) if self.lengths is None else self.lengths

    def require_one_document(self) -> None:
        """Raises ValueError for packed rows: a state belongs to one document per row."""
        if self.segment_ids is not None:
            raise ValueError("segment_ids: packed documents cannot be continued from a state")


@runtime_checkable
class Mixer(Protocol):
    """Lets tokens see earlier tokens: y_t depends on x_0..x_t of the token's own document.

    One class serves three uses. `state` None: whole rows from nothing, as in training; None comes
    back. With a state: the next T tokens of every row, however the row was cut before, T == 1
    being decoding. Tokens past `context.lengths` leave the state alone and their y means nothing.
    """

    def initial_state(self, batch: int, max_length: int) -> State:
        """The state before any token, with room for `max_length` tokens per row and no more."""
        ...

    def __call__(
        self, x: Float[Array, "B T D"], state: State | None, context: Context
    ) -> tuple[Float[Array, "B T D"], State | None, Report]: ...
