"""A small chunk-routed hybrid on embedded prose and synthetic recall; minutes on two CPU cores.

Run: python train.py
"""

from jhybrid.config import (
    AssociativeRecall,
    BlockConfig,
    ChunkRoutedConfig,
    DataConfig,
    EmbeddedText,
    Experiment,
    GatedDeltaNetConfig,
    ModelConfig,
    OptimizerConfig,
    SoftmaxBudget,
    SwiGLUConfig,
    TrainingConfig,
    pattern,
)


def config() -> Experiment:
    channels = SwiGLUConfig(width=384)
    linear = BlockConfig(
        mixer=GatedDeltaNetConfig(num_heads=2, key_dim=32, value_dim=64), channel_mixer=channels
    )
    routed = BlockConfig(
        mixer=ChunkRoutedConfig(
            num_heads=2,
            key_dim=32,
            value_dim=64,
            num_softmax_heads=4,
            chunk_size=32,
            softmax_budget=SoftmaxBudget(fraction=0.5),
        ),
        channel_mixer=channels,
    )
    return Experiment(
        name="default",
        model=ModelConfig(
            vocab_size=4096,
            dim=128,
            blocks=pattern((linear, routed), depth=4),
            compute_dtype="float32",
            remat="none",
        ),
        data=DataConfig(
            sources=(EmbeddedText(weight=0.9), AssociativeRecall(weight=0.1)),
            sequence_length=512,
            batch_size=4,
        ),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=30),
        training=TrainingConfig(steps=300, eval_every_steps=100, checkpoint_every_steps=100),
    )
