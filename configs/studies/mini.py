"""A part of hybrid_ratio for about 90 minutes of one GPU: six mixers in four layouts.

With the Transformer 25 cells of three seeds. In pieces, the same command until it says that nothing
is left:
python -m jhybrid.study --plan configs/studies/mini.py --workdir studies/mini --minutes 7.5
"""

from configs.studies import hybrid_ratio
from jhybrid.study.plan import Study, grid

MIXERS = hybrid_ratio.MIXERS[:6]
LAYOUTS = hybrid_ratio.LAYOUTS


def study() -> Study:
    return Study(
        name="mini",
        cells=grid(MIXERS, LAYOUTS, hybrid_ratio.experiment(), depth=hybrid_ratio.DEPTH),
        evaluation=hybrid_ratio.evaluation(),
    )
