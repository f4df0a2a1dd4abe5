"""Softmax attention whose visible key blocks depend on the input, per head: see README.md."""

from pallas_kernels.block_sparse_attention.api import (
    block_sparse_attention as block_sparse_attention,
)
from pallas_kernels.block_sparse_attention.api import (
    block_sparse_attention_output as block_sparse_attention_output,
)
from pallas_kernels.block_sparse_attention.block_mask import BlockMask as BlockMask
from pallas_kernels.block_sparse_attention.xattention import (
    xattention_select as xattention_select,
)
