"""Linear attention with one scalar decay per head and token, without an erase term."""

from pallas_kernels.simple_linear_attention.api import (
    simple_linear_attention as simple_linear_attention,
)
