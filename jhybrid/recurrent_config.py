"""The mixers whose memory of the past has one size whatever its length. Imports no JAX."""

from jhybrid.config_fields import frozen, require, require_multiple, require_positive


@frozen
class _MatrixState:
    """One [key_dim, value_dim] matrix per head, written as k v^T and read as S^T q."""

    num_heads: int
    key_dim: int  # per head
    value_dim: int  # per head

    def __post_init__(self):
        require_positive("mixer", self, "num_heads", "key_dim", "value_dim")

    def mixing_flops(self, length: int, softmax_fraction: float) -> float:
        """4 H K V per token: write k v^T, read S^T q; the decay is not counted."""
        return 4 * self.num_heads * self.key_dim * self.value_dim


@frozen
class RetNetConfig(_MatrixState):
    """RetNet (arXiv 2307.08621): head h decays by 1 - 2^(-5 - h) at every token."""

    rope_theta: float = 10_000.0  # of q and k

    def __post_init__(self):
        _MatrixState.__post_init__(self)
        require_positive("mixer", self, "rope_theta")
        require(self.key_dim % 2 == 0, f"mixer.key_dim={self.key_dim} must be even for rope_theta")


@frozen
class LightningConfig(_MatrixState):
    """Lightning attention (arXiv 2401.04658): head h decays by exp(-8 h / H (1 - depth))."""


@frozen
class Mamba2Config(_MatrixState):
    """Mamba-2 (arXiv 2405.21060): key_dim is its state size, value_dim its head dim."""

    num_groups: int = 1  # key heads (B and C), each shared by num_heads / num_groups heads
    conv_width: int = 4

    def __post_init__(self):
        _MatrixState.__post_init__(self)
        require_positive("mixer", self, "num_groups", "conv_width")
        require_multiple("mixer.num_heads", self.num_heads, "num_groups", self.num_groups)


@frozen
class GLAConfig(_MatrixState):
    """Gated linear attention (arXiv 2312.06635): a decay per key channel from a low-rank gate."""

    gate_rank: int = 16
    gate_divisor: float = 16.0  # of the gate's log sigmoid: the larger, the slower the decay

    def __post_init__(self):
        _MatrixState.__post_init__(self)
        require_positive("mixer", self, "gate_rank", "gate_divisor")


@frozen
class HGRN2Config(_MatrixState):
    """HGRN-2 (arXiv 2404.07904): the forget gate decays a channel, its rest is the key."""

    lower_bound: bool = True  # of the forget gate, learned, rising with depth

    @property
    def gate_width(self) -> int:
        return self.num_heads * self.key_dim


@frozen
class HGRNConfig:
    """HGRN (arXiv 2311.04823): an elementwise gated recurrence of `width` channels."""

    width: int
    lower_bound: bool = True  # of the forget gate, learned, rising with depth

    def __post_init__(self):
        require_positive("mixer", self, "width")

    @property
    def gate_width(self) -> int:
        return self.width

    def mixing_flops(self, length: int, softmax_fraction: float) -> float:
        """2 per channel: add and multiply."""
        return 2 * self.width


@frozen
class RWKV6Config(_MatrixState):
    """RWKV-6's time mixing (arXiv 2404.05892); its norms are "layer"."""

    shift_rank: int = 32  # of the five data-dependent mixes with the token before
    decay_rank: int = 64

    def __post_init__(self):
        _MatrixState.__post_init__(self)
        require_positive("mixer", self, "shift_rank", "decay_rank")


@frozen
class RWKV6ChannelConfig:
    """RWKV-6's channel mixing, which sees the token before: in a block of its own."""

    width: int

    def __post_init__(self):
        require_positive("mixer", self, "width")

    def mixing_flops(self, length: int, softmax_fraction: float) -> float:
        return 0.0


@frozen
class DeltaNetConfig(_MatrixState):
    """DeltaNet (arXiv 2406.06484): delta-rule writes without decay or output gate."""

    conv_width: int = 4
    negative_eigenvalues: bool = False  # beta in (0, 2) instead of (0, 1)

    def __post_init__(self):
        _MatrixState.__post_init__(self)
        require_positive("mixer", self, "conv_width")

    def mixing_flops(self, length: int, softmax_fraction: float) -> float:
        """6 H K V per token: read S^T k, write k u^T, read S^T q."""
        return 6 * self.num_heads * self.key_dim * self.value_dim


@frozen
class KDAConfig(DeltaNetConfig):
    """Kimi delta attention (arXiv 2510.26692): delta-rule writes, a decay per key channel."""


@frozen
class GatedDeltaNetConfig:
    """Gated DeltaNet (arXiv 2412.06464): a recurrent state with decay and delta-rule writes."""

    num_heads: int  # query/key heads
    key_dim: int  # per head
    value_dim: int  # per head
    num_value_heads: int | None = None  # None: num_heads
    conv_width: int = 4
    negative_eigenvalues: bool = False  # beta in (0, 2) instead of (0, 1)

    def __post_init__(self):
        sizes = ("num_heads", "num_value_heads", "key_dim", "value_dim", "conv_width")
        require_positive("mixer", self, *sizes)
        require_multiple("mixer.num_value_heads", self.value_heads, "num_heads", self.num_heads)

    @property
    def value_heads(self) -> int:
        return self.num_value_heads or self.num_heads

    def mixing_flops(self, length: int, softmax_fraction: float) -> float:
        """6 H K V per token: read S^T k, write k u^T, read S^T q; the decay is not counted."""
        return 6 * self.value_heads * self.key_dim * self.value_dim


RecurrentConfig = (
    RetNetConfig
    | LightningConfig
    | Mamba2Config
    | GLAConfig
    | HGRN2Config
    | HGRNConfig
    | RWKV6Config
    | RWKV6ChannelConfig
    | DeltaNetConfig
    | KDAConfig
    | GatedDeltaNetConfig
)
