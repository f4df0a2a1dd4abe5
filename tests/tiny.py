"""A chunk-routed hybrid small enough that compiling it takes seconds, and random batches for it."""

import dataclasses

import numpy as np

from jhybrid.config import (
    BlockConfig,
    ChunkRoutedConfig,
    DataConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    SoftmaxConfig,
    SwiGLUConfig,
    TrainingConfig,
)


def config() -> Experiment:
    channels = SwiGLUConfig(width=32)
    softmax = SoftmaxConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    routed = ChunkRoutedConfig(
        num_heads=2, key_dim=8, value_dim=8, num_softmax_heads=2, chunk_size=16
    )
    return Experiment(
        name="tiny",
        model=ModelConfig(
            vocab_size=256 + 16,
            dim=16,
            blocks=(
                BlockConfig(mixer=softmax, channel_mixer=channels),
                BlockConfig(mixer=routed, channel_mixer=channels),
            ),
            remat="none",
            compute_dtype="float32",
        ),
        data=DataConfig(tokenizer="bytes", sequence_length=64, batch_size=4, document_alignment=16),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        training=TrainingConfig(
            steps=6,
            log_every_steps=1,
            eval_every_steps=0,
            eval_batches=2,
            checkpoint_every_steps=2,
        ),
    )


def change(experiment: Experiment, **sections: dict) -> Experiment:
    """`experiment` with fields of its sections replaced: change(e, data={"batch_size": 8})."""
    replaced = {
        name: dataclasses.replace(getattr(experiment, name), **fields)
        for name, fields in sections.items()
    }
    return dataclasses.replace(experiment, **replaced)


def batch(experiment: Experiment, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens: one document per row, its last quarter padding in every second row."""
    random = np.random.default_rng(seed)
    rows, length = experiment.data.batch_size, experiment.data.sequence_length
    tokens = random.integers(0, 256, (rows, length + 1), dtype=np.int32)
    segment_ids = np.zeros((rows, length), np.int32)
    targets = tokens[:, 1:].copy()
    padding = np.s_[1::2, -length // 4 :]
    segment_ids[padding], targets[padding] = -1, -1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return {
        "tokens": tokens[:, :-1],
        "targets": targets,
        "segment_ids": segment_ids,
        "positions": positions,
    }
