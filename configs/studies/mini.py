"""A part of hybrid_ratio for minutes of one GPU: six mixers, pure and at two ratios.

Run: python -m jhybrid.study --plan configs/studies/mini.py --workdir studies/mini
"""

from configs.studies import hybrid_ratio
from jhybrid.study.plan import Study, grid

MIXERS = hybrid_ratio.MIXERS[:6]
LAYOUTS = ("pure", "6-1", "3-1")


def study() -> Study:
    return Study(
        name="mini",
        cells=grid(MIXERS, LAYOUTS, hybrid_ratio.experiment(), depth=hybrid_ratio.DEPTH),
        evaluation=hybrid_ratio.evaluation(),
    )
