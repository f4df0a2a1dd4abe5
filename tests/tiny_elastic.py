"""The recipe for SmolLM2's head routers on the backbone of `gguf_cases`, a few steps of it."""

import dataclasses

import gguf_cases
import tiny

from configs import elastic_smollm2_135m
from jhybrid.config import BlockConfig, Experiment, HeadRoutedConfig, SoftmaxConfig, SwiGLUConfig

LENGTH = 1024  # its tokens are characters


def config() -> Experiment:
    recipe = elastic_smollm2_135m.config()
    attention = SoftmaxConfig(
        num_heads=gguf_cases.HEADS,
        num_kv_heads=gguf_cases.KV_HEADS,
        head_dim=gguf_cases.HEAD,
        rope_theta=gguf_cases.METADATA["llama.rope.freq_base"],
    )
    mixer = HeadRoutedConfig(attention=attention, block_size=32, local_blocks=4, pool_tokens=100)
    block = BlockConfig(mixer=mixer, channel_mixer=SwiGLUConfig(width=gguf_cases.WIDTH))
    sources = tuple(dataclasses.replace(s, length=LENGTH) for s in recipe.data.sources)
    return dataclasses.replace(
        tiny.change(
            recipe,
            model={
                "vocab_size": len(gguf_cases.VOCAB),
                "dim": gguf_cases.DIM,
                "blocks": (block,) * gguf_cases.DEPTH,
            },
            data={"sources": sources, "sequence_length": LENGTH},
            training={"steps": 3, "checkpoint_every_steps": 3},
        ),
        name="tiny_elastic",
    )
