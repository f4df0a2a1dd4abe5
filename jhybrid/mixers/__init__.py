"""Token mixers behind one signature, chosen by the class of their config."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jhybrid.config import (
    ChunkRoutedConfig,
    GatedDeltaNetConfig,
    HeadRoutedConfig,
    MixerConfig,
    ModelConfig,
    SoftmaxConfig,
)
from jhybrid.mixers.chunk_routed import ChunkRouted
from jhybrid.mixers.context import Context, Mixer, Report, State
from jhybrid.mixers.delta_net import DeltaNet
from jhybrid.mixers.gated_delta_net import GatedDeltaNet
from jhybrid.mixers.gla import GLA
from jhybrid.mixers.head_routed import HeadRouted
from jhybrid.mixers.hgrn import HGRN
from jhybrid.mixers.hgrn2 import HGRN2
from jhybrid.mixers.kda import KDA
from jhybrid.mixers.lightning import Lightning
from jhybrid.mixers.mamba2 import Mamba2
from jhybrid.mixers.retnet import RetNet
from jhybrid.mixers.rwkv6 import RWKV6, RWKV6Channel
from jhybrid.mixers.softmax import Softmax
from jhybrid.recurrent_config import (
    DeltaNetConfig,
    GLAConfig,
    HGRN2Config,
    HGRNConfig,
    KDAConfig,
    LightningConfig,
    Mamba2Config,
    RetNetConfig,
    RWKV6ChannelConfig,
    RWKV6Config,
)

MIXERS: Mapping[type, Any] = {
    SoftmaxConfig: Softmax,
    GatedDeltaNetConfig: GatedDeltaNet,
    ChunkRoutedConfig: ChunkRouted,
    HeadRoutedConfig: HeadRouted,
    HGRNConfig: HGRN,
    HGRN2Config: HGRN2,
    RetNetConfig: RetNet,
    LightningConfig: Lightning,
    Mamba2Config: Mamba2,
    GLAConfig: GLA,
    RWKV6Config: RWKV6,
    RWKV6ChannelConfig: RWKV6Channel,
    DeltaNetConfig: DeltaNet,
    KDAConfig: KDA,
}


def build_mixer(config: MixerConfig, model: ModelConfig, *, rngs: nnx.Rngs) -> Mixer:
    """The mixer `config` describes, with fresh parameters."""
    return MIXERS[type(config)](config, model, rngs=rngs)


__all__ = ["MIXERS", "Context", "Mixer", "Report", "State", "build_mixer"]
