"""The study's grid at 12 layers of width 256: eight mixers in four layouts, and the Transformer.

arXiv 2507.06457 at 10 to 15 million parameters, on associative recall, needles and prose, three
seeds. 33 cells; configs/studies/mini.py has most of its models on smaller tasks.

Run: python -m jhybrid.study --plan configs/studies/hybrid_ratio.py --workdir studies/hybrid_ratio
"""

import dataclasses

from jhybrid.config import (
    AssociativeRecall,
    BlockConfig,
    DataConfig,
    EmbeddedText,
    Experiment,
    ModelConfig,
    Needle,
    OptimizerConfig,
    SoftmaxConfig,
    TrainingConfig,
)
from jhybrid.study.plan import Evaluation, RecallMeasure, Study, grid

DEPTH = 12
LENGTH = 512
MIXERS = (
    "gated_delta_net",
    "hgrn2",
    "gla",
    "delta_net",
    "retnet",
    "hgrn",
    "mamba2",
    "kda",
)
LAYOUTS = ("pure", "12-1", "6-1", "3-1")
RECALL = AssociativeRecall(weight=11, num_pairs=64, num_queries=64, length=LENGTH)
NEEDLE = Needle(weight=3, length=LENGTH, answer_only=True)
SOURCES = (  # weights are rows of a batch
    RECALL,
    dataclasses.replace(RECALL, weight=8, num_pairs=32, num_queries=32, length=128),
    dataclasses.replace(RECALL, weight=8, num_pairs=8, num_queries=8, length=32),
    NEEDLE,
    EmbeddedText(weight=2),
)


def experiment() -> Experiment:
    placeholder = SoftmaxConfig(num_heads=4, num_kv_heads=4, head_dim=64)  # grid sets the blocks
    return Experiment(
        name="hybrid_ratio",
        model=ModelConfig(
            vocab_size=4096,
            dim=256,
            blocks=(BlockConfig(mixer=placeholder, channel_mixer=None),),
            tied_head=True,
            remat="none",
            loss_chunk_tokens=1 << 15,
            implementation="xla",  # the kernels do not know a seed axis
        ),
        data=DataConfig(
            sources=SOURCES,
            sequence_length=LENGTH,
            batch_size=32,
            document_alignment=32,
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
        training=TrainingConfig(steps=1200, log_every_steps=50, checkpoint_every_steps=400),
    )


def evaluation() -> Evaluation:
    even = dataclasses.replace(RECALL, power=1.0)
    lengths = (LENGTH, 4 * LENGTH)
    return Evaluation(
        lengths=lengths,
        recall=(
            RecallMeasure(task=even, lengths=lengths, documents=64),
            RecallMeasure(task=NEEDLE, lengths=lengths, documents=64),
        ),
    )


def study() -> Study:
    return Study(
        name="hybrid_ratio",
        cells=grid(MIXERS, LAYOUTS, experiment(), depth=DEPTH),
        evaluation=evaluation(),
    )
