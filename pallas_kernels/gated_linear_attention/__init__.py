"""Linear attention with one decay per key channel, with or without an erase term."""

from pallas_kernels.gated_linear_attention.api import (
    gated_linear_attention as gated_linear_attention,
)
