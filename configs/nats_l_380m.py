"""NAtS-L, 380M (arXiv 2602.03681): all 21 layers chunk-routed, rotary positions in their softmax.

380,535,932 parameters; the recipe of nats_l_hybrid_380m.

Expected cost, from the FLOP count with a quarter of the chunks in softmax, not run: 2.5e19 FLOPs,
17 hours on one H200 at 40 % MFU.

Run: python train.py --config configs/nats_l_380m.py --workdir runs/nats_l_380m
"""

import dataclasses

from configs import nats_l_hybrid_380m
from jhybrid.config import ChunkRoutedConfig, Experiment


def config() -> Experiment:
    hybrid = nats_l_hybrid_380m.config()
    routed = hybrid.model.blocks[-1]
    assert isinstance(routed.mixer, ChunkRoutedConfig)
    rotary = dataclasses.replace(routed.mixer, rope_theta=10_000.0)
    blocks = (dataclasses.replace(routed, mixer=rotary),) * 21
    return dataclasses.replace(
        hybrid, name="nats_l_380m", model=dataclasses.replace(hybrid.model, blocks=blocks)
    )
