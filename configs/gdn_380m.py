"""Gated DeltaNet alone, 21 layers: the linear baseline of NAtS-L, 380M (arXiv 2602.03681).

379,888,124 parameters; the recipe of nats_l_hybrid_380m.

Expected cost, from the FLOP count, not run: 2.3e19 FLOPs, 16 hours on one H200 at 40 % MFU.

Run: python train.py --config configs/gdn_380m.py --workdir runs/gdn_380m
"""

import dataclasses

from configs import nats_l_hybrid_380m
from jhybrid.config import Experiment


def config() -> Experiment:
    hybrid = nats_l_hybrid_380m.config()
    blocks = hybrid.model.blocks[:1] * 21
    return dataclasses.replace(
        hybrid, name="gdn_380m", model=dataclasses.replace(hybrid.model, blocks=blocks)
    )
