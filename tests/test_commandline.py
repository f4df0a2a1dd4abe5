"""What the commands share."""

import jax
import jax.numpy as jnp

from jhybrid import commandline

DRAWN_BY_KERNEL = "jax_threefry_gpu_kernel_lowering"


def test_random_numbers_of_a_gpu_can_be_drawn_by_a_kernel():
    def lowered() -> str:
        draw = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (8,)))
        return draw.trace(jnp.uint32(0)).lower(lowering_platforms=("cuda",)).as_text()

    before = getattr(jax.config, DRAWN_BY_KERNEL)
    try:
        jax.config.update(DRAWN_BY_KERNEL, False)
        assert "cu_threefry2x32" not in lowered()
        commandline.draw_by_kernel()
        assert "cu_threefry2x32" in lowered()
    finally:
        jax.config.update(DRAWN_BY_KERNEL, before)
