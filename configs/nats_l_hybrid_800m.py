"""NAtS-L Hybrid, 800M: the wider of the two published sizes. 793,144,956 parameters.

The recipe of this size is not public; this is the 380M one. 50B tokens, as published, are
`--set training.steps=95367`. Expected cost of those, as in nats_l_hybrid_380m: 2.4e20 FLOPs, 165
hours on one H200.

Run: python train.py --config configs/nats_l_hybrid_800m.py --workdir runs/nats_l_hybrid_800m
"""

import dataclasses

from configs import nats_l_hybrid_380m
from jhybrid.config import Experiment


def config() -> Experiment:
    return dataclasses.replace(
        nats_l_hybrid_380m.config(),
        name="nats_l_hybrid_800m",
        model=nats_l_hybrid_380m.model(
            dim=1536, width=4096, num_heads=6, key_dim=192, num_softmax_heads=18
        ),
    )
