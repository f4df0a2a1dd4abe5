"""Hybrid-attention language models in JAX."""
