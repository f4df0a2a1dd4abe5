"""Attention and recurrence ops with reference, XLA and Pallas implementations."""

from pallas_kernels.block_sparse_attention import BlockMask as BlockMask
from pallas_kernels.block_sparse_attention import block_sparse_attention as block_sparse_attention
from pallas_kernels.block_sparse_attention import (
    block_sparse_attention_output as block_sparse_attention_output,
)
from pallas_kernels.block_sparse_attention import xattention_select as xattention_select
from pallas_kernels.decode_attention import decode_attention as decode_attention
from pallas_kernels.gated_delta_rule import StretchMap as StretchMap
from pallas_kernels.gated_delta_rule import gated_delta_rule as gated_delta_rule
from pallas_kernels.gated_delta_rule import gated_delta_rule_map as gated_delta_rule_map
from pallas_kernels.gated_delta_step import gated_delta_step as gated_delta_step
from pallas_kernels.gated_linear_attention import (
    gated_linear_attention as gated_linear_attention,
)
from pallas_kernels.simple_linear_attention import (
    simple_linear_attention as simple_linear_attention,
)
