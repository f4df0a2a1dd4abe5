"""Three Gated DeltaNet layers, then one of softmax attention: NAtS-L's static baseline, 380M.

21 layers, softmax at 3, 7, 11, 15 and 19 with rotary positions, 16 heads of 64. 369,278,144
parameters; the recipe of nats_l_hybrid_380m. configs/gdn_hybrid_nope_380m.py is the control without
positions, which the published comparison lacks.

Expected cost, from the FLOP count, not run: 2.4e19 FLOPs, 17 hours on one H200 at 40 % MFU.

Run: python train.py --config configs/gdn_hybrid_380m.py --workdir runs/gdn_hybrid_380m
"""

import dataclasses

from configs import nats_l_hybrid_380m, transformer_380m
from jhybrid.config import Experiment, pattern


def config() -> Experiment:
    hybrid = nats_l_hybrid_380m.config()
    linear, softmax = hybrid.model.blocks[0], transformer_380m.config().model.blocks[0]
    blocks = pattern((linear, linear, linear, softmax), depth=21)
    return dataclasses.replace(
        hybrid, name="gdn_hybrid_380m", model=dataclasses.replace(hybrid.model, blocks=blocks)
    )
