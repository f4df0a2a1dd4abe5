"""A Transformer of NAtS-L's width, 380M: 24 layers of 16 heads of 64 with rotary positions.

373,867,520 parameters, with the three layers more than NAtS-L that bring it closest to 380M; the
recipe of nats_l_hybrid_380m.

Expected cost, from the FLOP count, not run: 2.9e19 FLOPs, 20 hours on one H200 at 40 % MFU.

Run: python train.py --config configs/transformer_380m.py --workdir runs/transformer_380m
"""

import dataclasses

from configs import nats_l_hybrid_380m
from jhybrid.config import BlockConfig, Experiment, SoftmaxConfig, SwiGLUConfig


def config() -> Experiment:
    hybrid = nats_l_hybrid_380m.config()
    softmax = BlockConfig(
        mixer=SoftmaxConfig(num_heads=16, num_kv_heads=16, head_dim=64),
        channel_mixer=SwiGLUConfig(width=2816),
    )
    return dataclasses.replace(
        hybrid,
        name="transformer_380m",
        model=dataclasses.replace(hybrid.model, blocks=(softmax,) * 24),
    )
