"""Six mixers in four layouts and the Transformer, small enough for a few minutes of one GPU.

25 cells of three seeds: hybrid_ratio's models over bytes, 10 to 11 M parameters, and 4.9 M tokens a
run of a mixture that much smaller models learned to recall from (docs/experiments.md, chunk routing
on a CPU). In pieces, the same command until it says that nothing is left:
python -m jhybrid.study --plan configs/studies/mini.py --workdir studies/mini --minutes 7.5
"""

import dataclasses

from configs.studies import hybrid_ratio
from jhybrid.config import (
    AssociativeRecall,
    EmbeddedText,
    Experiment,
    OptimizerConfig,
    TrainingConfig,
)
from jhybrid.study.plan import Evaluation, RecallMeasure, Study, grid

LENGTH = 256
MIXERS = hybrid_ratio.MIXERS[:6]
LAYOUTS = hybrid_ratio.LAYOUTS
RECALL = AssociativeRecall(weight=5, num_pairs=16, num_queries=16, length=64)
SOURCES = (  # weights are rows of a batch
    dataclasses.replace(RECALL, weight=3, length=LENGTH),
    RECALL,
    dataclasses.replace(RECALL, num_pairs=4, num_queries=4, length=16),
    EmbeddedText(weight=3),
)


def experiment() -> Experiment:
    base = hybrid_ratio.experiment()
    return dataclasses.replace(
        base,
        name="mini",
        model=dataclasses.replace(base.model, vocab_size=264),  # bytes, end of text, 8 * 33
        data=dataclasses.replace(
            base.data,
            tokenizer="bytes",
            sources=SOURCES,
            sequence_length=LENGTH,
            batch_size=16,
            document_alignment=16,
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=100),
        training=TrainingConfig(steps=1200, log_every_steps=50, checkpoint_every_steps=1200),
    )


def evaluation() -> Evaluation:
    even = dataclasses.replace(RECALL, power=1.0)
    return Evaluation(
        lengths=(LENGTH, 4 * LENGTH),
        recall=(RecallMeasure(task=even, lengths=(64, LENGTH, 4 * LENGTH), documents=128),),
    )


def study() -> Study:
    return Study(
        name="mini",
        cells=grid(MIXERS, LAYOUTS, experiment(), depth=hybrid_ratio.DEPTH),
        evaluation=evaluation(),
    )
