"""Hard decisions with gradients: chunks of tokens to softmax attention or to the recurrent state.

Pure functions of arrays. Each chunk of each head has two scores, index 0 for softmax and index 1
for the recurrent state. Forwards the decision is 0 or 1. Backwards a straight-through estimator
hands the scores the exact gradient of the chosen operation (NAtS-L, arXiv 2602.03681; released
code automl/NeuralAttentionSearchLinear): with p = softmax(scores) and d_a the derivative of the
loss with respect to operation a's multiplier, ds_a = p_a (d_a - sum_b p_b d_b).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jhybrid.config import SoftmaxBudget
from pallas_kernels.array_types import Array, Bool, Float, Int

SOFTMAX, RECURRENT = 0, 1  # index of each operation in the scores


class Decision(NamedTuple):
    """What each chunk of each head does. `slope` is 0 forwards and p's derivative backwards."""

    scores: Float[Array, "B N H 2"]
    softmax: Bool[Array, "B N H"]
    slope: Float[Array, "B N H 2"]


def chunk_means(
    x: Float[Array, "B T D"], valid: Bool[Array, "B T"], chunk_size: int
) -> Float[Array, "B N D"]:
    """Mean of the valid tokens of each chunk, in fp32; 0 where there are none."""
    B, T, D = x.shape
    N = -(-T // chunk_size)
    padding = N * chunk_size - T
    x = jnp.where(valid[..., None], x.astype(jnp.promote_types(x.dtype, jnp.float32)), 0)
    x = jnp.pad(x, ((0, 0), (0, padding), (0, 0)))
    count = count_by_chunk(valid, chunk_size)
    return x.reshape(B, N, chunk_size, D).sum(2) / jnp.maximum(count, 1)[..., None]


def count_by_chunk(valid: Bool[Array, "B T"], chunk_size: int) -> Int[Array, "B N"]:
    """Valid tokens in each chunk."""
    B, T = valid.shape
    padded = jnp.pad(valid, ((0, 0), (0, -T % chunk_size)))
    return padded.reshape(B, -1, chunk_size).sum(2)


def decide(
    scores: Float[Array, "B N H 2"],
    *,
    bias: float | Float[Array, "*H"] = 0.0,
    rng: Array | None = None,
    temperature: Float[Array, ""] | None = None,
    forced: Bool[Array, "B N H"] | None = None,
    is_forced: Bool[Array, "#B N 1"] | None = None,
) -> Decision:
    """The larger score wins, softmax on a tie; with `rng` after adding Gumbel noise to both.

    `bias` (one, or one per head) becomes part of the scores of softmax: lower keeps less.
    `temperature` divides the (noisy) scores inside p, which only the gradient sees. Where
    `is_forced` (everywhere when it is None), `forced` decides instead, True for softmax; a forced
    decision is a constant and gives its scores no gradient.
    """
    logits = scores = scores.at[..., SOFTMAX].add(bias)
    if rng is not None:
        logits += jax.random.gumbel(rng, scores.shape, scores.dtype)
    softmax = logits[..., SOFTMAX] >= logits[..., RECURRENT]
    p = jax.nn.softmax(logits if temperature is None else logits / temperature)
    slope = p - jax.lax.stop_gradient(p)
    if forced is not None:
        is_forced = jnp.ones_like(forced) if is_forced is None else is_forced
        softmax = jnp.where(is_forced, forced, softmax)
        slope = jnp.where(is_forced[..., None], 0, slope)
    return Decision(scores, softmax, slope)


def fixed(
    weight: Float[Array, "B N H"],
    threshold: float,
    *,
    mixes: bool,
    forced: Bool[Array, "B N H"] | None = None,
) -> Decision:
    """Decisions by weights of softmax in [0, 1] for which no token was read.

    A head is softmax where its weight exceeds `threshold`, or as `forced` says. If it `mixes` both
    operations instead, its `gate` is the weight.
    """
    softmax = weight > threshold if forced is None else forced
    slope = weight - softmax if mixes and forced is None else jnp.zeros_like(weight)
    return Decision(jnp.stack([weight, 1 - weight], -1), softmax, jnp.stack([slope, -slope], -1))


def gate(decision: Decision) -> Float[Array, "B N H"]:
    """Softmax's multiplier: 0 or 1 with the derivative of p; a weight where heads mix."""
    return decision.softmax + decision.slope[..., SOFTMAX]


def commit_heads(
    decision: Decision,
    mean: Float[Array, "B N H"],
    margin: float,
    free: Bool[Array, "B N 1"],
) -> Decision:
    """Heads whose `mean` score difference is below `margin` use the memory, in chunks not `free`.

    There softmax's multiplier is c a, with c the chunk's decision and a = [mean >= margin] the
    head's; backwards a has the derivative of sigmoid(mean - margin), as c has that of p.
    """
    head, p = mean >= margin, jax.nn.sigmoid(mean - margin)
    own = decision.slope[..., SOFTMAX]
    both = head * own + decision.softmax * (p - jax.lax.stop_gradient(p))
    slope = jnp.where(free[..., None], decision.slope, jnp.stack([both, -both], -1))
    return decision._replace(softmax=decision.softmax & (head | free), slope=slope)


def within_room(decision: Decision, room: Int[Array, "B H"]) -> Decision:
    """Only the first `room` chunks a head sends to softmax go there, the rest to the state."""
    chosen = jnp.cumsum(decision.softmax, 1)  # counting the chunk itself
    return decision._replace(softmax=decision.softmax & (chosen <= room[:, None]))


def next_bias(
    budget: SoftmaxBudget, bias: Float[Array, "*L H"], softmax_fraction: Float[Array, "*L H"]
) -> Float[Array, "*L H"]:
    """The bias of each head after a step in which it sent that fraction of chunks to softmax."""
    excess = jnp.nan_to_num(softmax_fraction - budget.fraction)  # no chunk, no reason to move
    after = bias - budget.rate * excess
    return jnp.minimum(after, 0) if budget.limit == "at_most" else after


def block_bias(decision: Decision) -> Float[Array, "B N H"]:
    """The logit bias of each chunk's keys: 0, with the score's gradient where softmax was chosen.

    A bias b on every logit of a chunk multiplies its exp by exp(b), so d/db at 0 is the derivative
    with respect to the chunk's multiplier.
    """
    return decision.softmax * decision.slope[..., SOFTMAX]


def write_mask(decision: Decision, *, counterfactual: bool = False) -> Float[Array, "B N H"]:
    """The weight of each chunk's write into the state: 1 where the state was chosen, else 0.

    The gradient is that of the chosen chunks only, or, with `counterfactual`, of all of them: what
    would change if an unchosen chunk's write were let in.
    """
    chosen = (~decision.softmax).astype(decision.slope.dtype)
    slope = decision.slope[..., RECURRENT]
    return chosen + (slope if counterfactual else chosen * slope)


def statistics(decision: Decision, counted: Bool[Array, "B N"]) -> dict[str, Array]:
    """Per head over the `counted` chunks: fraction sent to softmax and mean |score difference|.

    NaN when no chunk counts: there is no fraction of nothing.
    """
    weight = counted[..., None].astype(decision.scores.dtype)
    total = weight.sum((0, 1))
    margin = jnp.abs(decision.scores[..., SOFTMAX] - decision.scores[..., RECURRENT])
    return {
        "softmax_fraction": (decision.softmax * weight).sum((0, 1)) / total,
        "score_margin": (margin * weight).sum((0, 1)) / total,
        "decisions": decision.softmax,
        "counted": counted,
        "scores": decision.scores,
    }
