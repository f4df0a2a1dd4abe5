"""The step as what it is: the token recurrence of `gated_delta_rule` over a row of one token."""

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gated_delta_rule.reference import gated_delta_rule


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
    o, state = gated_delta_rule(
        *(x[:, None] for x in (q, k, v, g, beta)),
        initial_state=state,
        write_mask=None,
        segment_ids=None,
        scale=scale,
        chunk_size=1,
    )
    return o[:, 0], state
