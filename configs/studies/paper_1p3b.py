"""The published study at 1.3B: as paper_340m, 24 layers of width 2048, 100B tokens.

Expected cost, from the FLOP count, not run: 31 x 7.5e20 to 9e20 FLOPs, 22 to 26 days of one H200
each at 40 % MFU; set `mesh` for several.

Run: python -m jhybrid.study --plan configs/studies/paper_1p3b.py --workdir studies/paper_1p3b
"""

import dataclasses

from configs import hybrid_340m
from configs.studies import paper_340m
from jhybrid.study.plan import Study

STEPS = 190_735  # of 128 x 4,096 tokens: 100B


def study() -> Study:
    small = hybrid_340m.config()
    experiment = dataclasses.replace(
        small,
        name="paper_1p3b",
        model=dataclasses.replace(small.model, dim=2048),
        training=dataclasses.replace(small.training, steps=STEPS),
    )
    return paper_340m.plan("paper_1p3b", experiment)
