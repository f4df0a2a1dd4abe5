"""Token mixers behind one signature, chosen by the class of their config."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jhybrid.config import (
    ChunkRoutedConfig,
    GatedDeltaNetConfig,
    MixerConfig,
    ModelConfig,
    SoftmaxConfig,
)
from jhybrid.mixers.chunk_routed import ChunkRouted
from jhybrid.mixers.context import Context, Mixer, Report, State
from jhybrid.mixers.gated_delta_net import GatedDeltaNet
from jhybrid.mixers.softmax import Softmax

MIXERS: Mapping[type, Any] = {
    SoftmaxConfig: Softmax,
    GatedDeltaNetConfig: GatedDeltaNet,
    ChunkRoutedConfig: ChunkRouted,
}


def build_mixer(config: MixerConfig, model: ModelConfig, *, rngs: nnx.Rngs) -> Mixer:
    """The mixer `config` describes, with fresh parameters."""
    return MIXERS[type(config)](config, model, rngs=rngs)


__all__ = ["MIXERS", "Context", "Mixer", "Report", "State", "build_mixer"]
