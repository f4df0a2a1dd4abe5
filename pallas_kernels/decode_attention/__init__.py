"""Softmax attention of a few new queries over a cache of pages: see README.md."""

from pallas_kernels.decode_attention.api import decode_attention as decode_attention
