"""gdn_hybrid_380m without positions in its softmax layers, as in nats_l_hybrid_380m.

Tells whether the NAtS-L hybrid extrapolates by its routing or by having no rotary positions. Cost
and parameters as gdn_hybrid_380m.

Run: python train.py --config configs/gdn_hybrid_nope_380m.py --workdir runs/gdn_hybrid_nope_380m
"""

import dataclasses

from configs import gdn_hybrid_380m
from jhybrid.config import Experiment
from jhybrid.serialization import override


def config() -> Experiment:
    rotary = gdn_hybrid_380m.config()
    without = override(rotary, ["model.blocks.*.mixer.rope_theta=None"])
    return dataclasses.replace(without, name="gdn_hybrid_nope_380m")
