"""Attention and recurrence ops with reference, XLA and Pallas implementations."""

from pallas_kernels.gated_delta_rule import gated_delta_rule as gated_delta_rule
