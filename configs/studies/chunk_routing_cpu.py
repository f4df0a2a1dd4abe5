"""The pair of chunk_routing that matters most, small enough for a CPU: 0.1 million parameters.

Two layers of width 64, Gated DeltaNet and then softmax (with rotary positions or none), chunk
routing, or Gated DeltaNet again; recall of 16 pairs in documents of 64 bytes, and of 4 pairs in 16.

Run: python -m jhybrid.study --plan configs/studies/chunk_routing_cpu.py --workdir studies/cpu
"""

import dataclasses

from jhybrid.config import (
    AssociativeRecall,
    BlockConfig,
    ChunkRoutedConfig,
    DataConfig,
    Experiment,
    GatedDeltaNetConfig,
    ModelConfig,
    OptimizerConfig,
    SoftmaxConfig,
    SwiGLUConfig,
    TrainingConfig,
)
from jhybrid.study.plan import Cell, Evaluation, RecallMeasure, Study

LENGTH = 64
RECALL = AssociativeRecall(num_pairs=16, num_queries=16, length=LENGTH)
HEADS = {"num_heads": 2, "key_dim": 32, "value_dim": 32}
LINEAR = GatedDeltaNetConfig(**HEADS)
SOFTMAX = SoftmaxConfig(num_heads=2, num_kv_heads=2, head_dim=32)
MIXERS = {
    # mixer, layout: second layer, share of layers with full attention
    ("nats_l", "hybrid"): (ChunkRoutedConfig(**HEADS, num_softmax_heads=2, chunk_size=16), 0.0),
    ("gated_delta_net", "1:1"): (SOFTMAX, 0.5),
    ("gated_delta_net", "pure"): (LINEAR, 0.0),
    ("gated_delta_net_nope", "1:1"): (dataclasses.replace(SOFTMAX, rope_theta=None), 0.5),
}


def experiment(mixer) -> Experiment:
    channels = SwiGLUConfig(width=128)
    blocks = tuple(BlockConfig(mixer=m, channel_mixer=channels) for m in (LINEAR, mixer))
    return Experiment(
        name="chunk_routing_cpu",
        model=ModelConfig(
            vocab_size=257,
            dim=64,
            blocks=blocks,
            tied_head=True,
            compute_dtype="float32",
            remat="none",
            implementation="xla",
        ),
        data=DataConfig(
            sources=(
                RECALL,
                dataclasses.replace(RECALL, num_pairs=4, num_queries=4, length=16),
            ),
            tokenizer="bytes",
            sequence_length=LENGTH,
            batch_size=32,
            document_alignment=16,
        ),
        optimizer=OptimizerConfig(
            learning_rate=4e-3, warmup_steps=30, schedule="warmup_stable_decay", decay_steps=100
        ),
        training=TrainingConfig(steps=500, log_every_steps=50, checkpoint_every_steps=500),
    )


def study() -> Study:
    even = dataclasses.replace(RECALL, power=1.0)
    return Study(
        name="chunk_routing_cpu",
        cells=tuple(
            Cell(mixer=mixer, layout=layout, full_share=share, experiment=experiment(second))
            for (mixer, layout), (second, share) in MIXERS.items()
        ),
        evaluation=Evaluation(
            tasks=(),
            lengths=(),
            recall=(RecallMeasure(task=even, lengths=(64, 256, 1024), documents=64),),
        ),
    )
