"""The exact gradient of chunk routing against the released one, on a CPU: 0.1 million parameters.

The released backward pass of NAtS-L drops the softmax pairs of a token's own chunk. Two layers as
in chunk_routing_cpu, the second chunk-routed, on recall of 16 pairs in 64 bytes and of 4 in 16, and
on prose in windows of 128 bytes: both gradients with the same three seeds.

Run: python -m jhybrid.study --plan configs/studies/chunk_gradient_cpu.py --workdir studies/gradient
"""

import dataclasses

from configs.studies import chunk_routing_cpu
from configs.studies.chunk_routing_cpu import HEADS, RECALL
from jhybrid.config import ChunkRoutedConfig, EmbeddedText, Experiment
from jhybrid.study.plan import Cell, Evaluation, RecallMeasure, Study

EXACT = ChunkRoutedConfig(**HEADS, num_softmax_heads=2, chunk_size=16)
MIXERS = {
    "exact": EXACT,
    "truncated": dataclasses.replace(EXACT, truncate_intra_softmax_grad=True),
}


def experiment(mixer: ChunkRoutedConfig) -> Experiment:
    base = chunk_routing_cpu.experiment(mixer)
    few = dataclasses.replace(RECALL, num_pairs=4, num_queries=4, length=16)
    sources = (  # weights are rows of a batch
        dataclasses.replace(RECALL, weight=7),
        dataclasses.replace(few, weight=6),
        EmbeddedText(weight=3),
    )
    return dataclasses.replace(
        base,
        name="chunk_gradient_cpu",
        data=dataclasses.replace(base.data, sources=sources, sequence_length=128, batch_size=16),
        training=dataclasses.replace(base.training, steps=600, checkpoint_every_steps=200),
    )


def study() -> Study:
    even = dataclasses.replace(RECALL, power=1.0)
    return Study(
        name="chunk_gradient_cpu",
        cells=tuple(
            Cell(mixer=name, layout="hybrid", full_share=0.0, experiment=experiment(mixer))
            for name, mixer in MIXERS.items()
        ),
        evaluation=Evaluation(
            lengths=(128,),
            recall=(RecallMeasure(task=even, lengths=(64, 256), documents=64),),
        ),
    )
