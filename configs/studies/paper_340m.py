"""The published study at 340M: six mixers in five layouts, and the Transformer (arXiv 2507.06457).

31 runs of 20B tokens, 24 layers of width 1024, each one of train.py's; the paper trained 36 and
does not say which. The recipe is that of configs/hybrid_340m.py. Expected cost, from the FLOP
count, not run: 31 x 4.1e19 to 5.3e19 FLOPs, 29 to 37 hours of one H200 each at 40 % MFU.

Run, after writing records with `python -m jhybrid.data.prepare`; one array task per cell:
sbatch --array=0-30 --wrap='python -m jhybrid.study --plan configs/studies/paper_340m.py
--workdir studies/paper_340m --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT'
"""

import dataclasses

from configs import hybrid_340m
from jhybrid.config import AssociativeRecall, Experiment, Needle
from jhybrid.study.plan import Evaluation, RecallMeasure, Study, grid

DEPTH = 24
MIXERS = ("hgrn", "hgrn2", "retnet", "gla", "delta_net", "gated_delta_net")
LAYOUTS = ("pure", "24-1", "12-1", "6-1", "3-1")
RECALL = AssociativeRecall(num_pairs=64, num_queries=64, length=4096, power=1.0)


def evaluation() -> Evaluation:
    """The paper's language tasks (extra `eval`), RULER in the training window, recall beyond it."""
    return Evaluation(
        tasks=(
            "perplexity",
            *(f"ruler:{name}" for name in RULER),
            *(f"lm:{name}" for name in LANGUAGE),
        ),
        lengths=(4096,),
        num_samples=500,
        recall=(
            RecallMeasure(task=RECALL, lengths=(4096, 16_384)),
            RecallMeasure(task=Needle(length=4096), lengths=(4096, 16_384)),
        ),
    )


LANGUAGE = ("arc_challenge", "arc_easy", "hellaswag", "lambada_openai", "openbookqa", "piqa")
RULER = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
)


def plan(name: str, experiment: Experiment) -> Study:
    return Study(
        name=name,
        cells=grid(MIXERS, LAYOUTS, experiment, depth=DEPTH),
        seeds=(0,),
        evaluation=evaluation(),
        seeds_together=False,
    )


def study() -> Study:
    return plan("paper_340m", dataclasses.replace(hybrid_340m.config(), name="paper_340m"))
