"""AdamW as an optax chain over the trainable parameters, and the learning rate over time."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jhybrid.config import OptimizerConfig
from pallas_kernels.array_types import Array, Float, Int

Schedule = Callable[[Any], Any]  # updates applied so far -> learning rate, both scalars


def learning_rate(config: OptimizerConfig, steps: int) -> Schedule:
    """Learning rate of update n = 0, 1, ..., steps - 1, with n updates already applied.

    Warm-up: peak * (n + 1) / warmup_steps. Then with f = final_fraction and p from 0 to 1,
      cosine                p over all later updates       peak * (f + (1 - f) (1 + cos(pi p)) / 2)
      warmup_stable_decay   p over the last decay_steps    peak * (1 - (1 - f) p)
    so that the last update of a decaying run has the rate f * peak.
    """
    peak, final = config.learning_rate, config.final_fraction

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        done = jnp.asarray(count, jnp.float32) + 1.0
        warm = jnp.minimum(1.0, done / max(config.warmup_steps, 1))
        if config.schedule == "cosine":
            length = max(steps - config.warmup_steps, 1)
            p = jnp.clip((done - config.warmup_steps) / length, 0.0, 1.0)
            decay = final + (1.0 - final) * (1.0 + jnp.cos(jnp.pi * p)) / 2.0
        else:
            start = steps - config.decay_steps
            p = jnp.clip((done - start) / max(config.decay_steps, 1), 0.0, 1.0)
            decay = 1.0 - (1.0 - final) * p if config.decay_steps else jnp.ones_like(p)
        return peak * warm * decay

    return schedule


def adamw(
    config: OptimizerConfig, schedule: Schedule, matrices: Collection[str]
) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) over a dict of parameters by path, moments in fp32.

    update = -rate * (m_hat / (sqrt(v_hat) + eps) + weight_decay * parameter), gradients first
    scaled to a global norm of at most clip_norm. Weight decay reaches every parameter with
    `decay_all`, else those whose path is in `matrices`.
    """

    def decayed(parameters: dict) -> dict:
        return {path: config.decay_all or path in matrices for path in parameters}

    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(schedule),
    )

    def init(params: Any) -> optax.OptState:
        return chain.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))

    return optax.GradientTransformation(init, chain.update)


def ascent(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    """AdamW that climbs, for multipliers: parameter + rate * (m_hat / (sqrt(v_hat) + eps)
    - weight_decay * parameter)."""
    return optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps),
        optax.add_decayed_weights(-config.weight_decay),
        optax.scale_by_learning_rate(schedule, flip_sign=False),
    )
