"""Settings of softmax attention: the same for every token, or routed by head. Imports no JAX."""

import dataclasses
from typing import Literal

from jhybrid.config_fields import frozen, require, require_multiple, require_positive


@frozen
class RopeScaling:
    """Llama 3.1's stretching of slow rotations; see `layers.rotary_frequencies`."""

    factor: float
    low_turns: float  # slower than this in original_length: turns factor times slower
    high_turns: float  # faster than this: as trained; between them, between both
    original_length: int  # tokens

    def __post_init__(self):
        require_positive("rope_scaling", self, "factor", "low_turns", "original_length")
        require(
            self.high_turns > self.low_turns,
            f"rope_scaling.high_turns={self.high_turns} must exceed low_turns={self.low_turns}",
        )


@frozen
class SoftmaxConfig:
    """Causal softmax attention with grouped key/value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float | None = 10_000.0  # None: no position encoding
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False  # of the q, k and v projections
    qk_norm: bool = False
    window: int | None = None  # keys each query sees, itself included

    def __post_init__(self):
        require_positive("mixer", self, "num_heads", "head_dim", "rope_theta", "window")
        require_multiple("mixer.num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        require(self.head_dim % 2 == 0 or self.rope_theta is None, "mixer.head_dim must be even")
        require(
            self.rope_scaling is None or self.rope_theta is not None,
            "mixer.rope_scaling needs mixer.rope_theta",
        )

    def mixing_flops(self, length: int, softmax_fraction: float) -> float:
        """2 H (K + V) n per token, n = (T + 1) / 2: the mean of min(i, window) for a window."""
        window = min(self.window or length, length)
        seen = (window * (window + 1) / 2 + window * (length - window)) / length
        return 4 * self.num_heads * self.head_dim * seen


@frozen
class HeadRoutedConfig:
    """Elastic Attention (arXiv 2601.17367): each sample's key/value heads attend fully or sparsely.

    The letters before the dash are what retrieval heads do, those after it what sparse heads do:
    FA full attention, XA XAttention (arXiv 2503.16428), SSA sink and local blocks.
    """

    attention: SoftmaxConfig  # the backbone's
    mode: Literal["FA-SSA", "FA-XA", "XA-SSA"] = "FA-SSA"
    # What decides: a router that reads each sample's keys; a parameter of each head, the same for
    # every sample ("alpha" as in DuoAttention, "hard_concrete" as in PruLong); or nothing, all
    # heads being "retrieval" heads or "sparse" ones.
    route: Literal["router", "alpha", "hard_concrete", "retrieval", "sparse"] = "router"
    route_threshold: float = 0.5  # of a parameter's weight in [0, 1]: retrieval heads exceed it
    block_size: int = 128  # tokens
    sink_blocks: int = 1  # SSA: first blocks every query sees
    local_blocks: int = 16  # SSA: latest blocks, the query's own included
    stride: int = 16  # XA: tokens per scored tile
    threshold: float = 0.9  # XA: mass that the kept blocks reach
    softmax_bias: float = 0.0  # added to the router's scores of the full mode; lower: sparser
    pool_tokens: int = 100  # the router reads the mean key of the first and of the last so many
    # With a state: "trimmed" keeps the sinks and a ring for SSA heads; "full" lets every head see
    # all after the prompt, as the authors' release does.
    decode: Literal["trimmed", "full"] = "trimmed"
    # Trimmed only; the share of heads for which there is room to keep every token. Retrieval heads
    # without room: "sparse" makes them SSA heads, "error" makes generation fail.
    kv_capacity: float = 1.0
    kv_overflow: Literal["error", "sparse"] = "error"

    def __post_init__(self):
        sizes = ("block_size", "local_blocks", "stride", "threshold", "pool_tokens", "kv_capacity")
        require_positive("mixer", self, *sizes)
        require(self.sink_blocks >= 0, f"mixer.sink_blocks={self.sink_blocks} must be >= 0")
        require(
            0 <= self.route_threshold < 1,
            f"mixer.route_threshold={self.route_threshold} must lie in [0, 1)",
        )
        require(self.attention.window is None, "mixer.attention.window must be None")
        require_multiple("mixer.block_size", self.block_size, "stride", self.stride)
        for name in ("threshold", "kv_capacity"):
            value = getattr(self, name)
            require(value <= 1, f"mixer.{name}={value} must lie in (0, 1]")

    @property
    def trims(self) -> bool:
        """Whether sparse heads forget keys while decoding."""
        return self.decode == "trimmed" and self.mode != "FA-XA"

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether a prompt is read at once: to decide by it, or to rank blocks for XAttention."""
        return self.route == "router" or "XA" in self.mode

    def mixing_flops(self, length: int, softmax_fraction: float) -> float:
        """As for softmax attention; SSA heads, 1 - softmax_fraction of all, see sinks and window.

        XAttention heads count as full: what they keep depends on the text.
        """
        everything = self.attention.mixing_flops(length, 1.0)
        if self.mode == "FA-XA":
            return everything
        window = (self.sink_blocks + self.local_blocks) * self.block_size
        sparse = dataclasses.replace(self.attention, window=window).mixing_flops(length, 1.0)
        return softmax_fraction * everything + (1 - softmax_fraction) * sparse
