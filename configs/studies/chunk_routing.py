"""Chunk routing against static hybrids on recall, 10.3 million parameters, rows of 256 bytes.

Twelve layers of width 256, every fourth one softmax or routed in the hybrids, on the mixture of
`mini` (recall and a fifth of prose), where a static 3:1 hybrid has learned to recall. Asks whether
chunk routing (NAtS-L, arXiv 2602.03681) recalls like attention at a fraction of its keys and values
and extrapolates where a hybrid with rotary positions does not; with the control without positions,
which the published comparison lacks, and with the authors' released gradient, which drops
same-chunk softmax pairs, beside the exact one.

Run: python -m jhybrid.study --plan configs/studies/chunk_routing.py --workdir studies/chunk_routing
"""

import dataclasses

from configs.studies import mini
from configs.studies.mini import LENGTH, RECALL
from jhybrid.config import (
    BlockConfig,
    ChunkRoutedConfig,
    Experiment,
    GatedDeltaNetConfig,
    SoftmaxConfig,
    SwiGLUConfig,
)
from jhybrid.study.plan import Cell, Evaluation, RecallMeasure, Study

LENGTHS = (LENGTH, 4 * LENGTH, 16 * LENGTH)
STEPS, DECAY_STEPS = 1200, 200
REPEATS = 3

CHANNELS = SwiGLUConfig(width=768)
HEADS = {"num_heads": 4, "key_dim": 32, "value_dim": 64}
ROPE = 10_000.0


def block(mixer) -> BlockConfig:
    return BlockConfig(mixer=mixer, channel_mixer=CHANNELS)


LINEAR = block(GatedDeltaNetConfig(**HEADS))
ROUTED = ChunkRoutedConfig(**HEADS, num_softmax_heads=4, chunk_size=16)
SOFTMAX = SoftmaxConfig(num_heads=4, num_kv_heads=4, head_dim=64, rope_theta=ROPE)
TRUNCATED = dataclasses.replace(ROUTED, truncate_intra_softmax_grad=True)


def hybrid(mixer) -> tuple[BlockConfig, ...]:
    return (LINEAR, LINEAR, LINEAR, block(mixer)) * REPEATS


STACKS = {
    # mixer, layout: blocks, share of layers with full attention
    ("nats_l", "hybrid"): (hybrid(ROUTED), 0.0),
    ("gated_delta_net", "3:1"): (hybrid(SOFTMAX), 0.25),
    ("nats_l_truncated", "hybrid"): (hybrid(TRUNCATED), 0.0),
    ("gated_delta_net_nope", "3:1"): (
        hybrid(dataclasses.replace(SOFTMAX, rope_theta=None)),
        0.25,
    ),
    ("gated_delta_net", "pure"): ((LINEAR,) * 4 * REPEATS, 0.0),
    ("softmax", "full"): ((block(SOFTMAX),) * 4 * REPEATS, 1.0),
    ("nats_l", "pure"): (
        (block(dataclasses.replace(ROUTED, rope_theta=ROPE)),) * 4 * REPEATS,
        0.0,
    ),
}


def experiment(blocks: tuple[BlockConfig, ...]) -> Experiment:
    base = mini.experiment()  # the same tasks and batches
    return dataclasses.replace(
        base,
        name="chunk_routing",
        model=dataclasses.replace(base.model, blocks=blocks),
        optimizer=dataclasses.replace(
            base.optimizer, schedule="warmup_stable_decay", decay_steps=DECAY_STEPS
        ),
        training=dataclasses.replace(base.training, steps=STEPS, checkpoint_every_steps=200),
    )


def study() -> Study:
    even = dataclasses.replace(RECALL, power=1.0)
    return Study(
        name="chunk_routing",
        cells=tuple(
            Cell(mixer=mixer, layout=layout, full_share=share, experiment=experiment(blocks))
            for (mixer, layout), (blocks, share) in STACKS.items()
        ),
        evaluation=Evaluation(
            lengths=(LENGTH, 16 * LENGTH),
            recall=(RecallMeasure(task=even, lengths=(64, *LENGTHS), documents=64),),
        ),
    )
