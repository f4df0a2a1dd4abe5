"""NAtS-L Hybrid, 380M (arXiv 2602.03681): pure Gated DeltaNet but for six chunk-routed layers.

Released recipe: FineWeb-Edu, 20,480 steps of 128 x 4,096 tokens (10.7B). 380,073,212 parameters.

Expected cost, from the FLOP count with a quarter of the chunks in softmax, not run: 2.4e19 FLOPs,
17 hours on one H200 at 40 % MFU.

Run, after writing records with `python -m jhybrid.data.prepare`:
python train.py --config configs/nats_l_hybrid_380m.py --workdir runs/nats_l_hybrid_380m
"""

from jhybrid.config import (
    BlockConfig,
    ChunkRoutedConfig,
    DataConfig,
    Experiment,
    GatedDeltaNetConfig,
    ModelConfig,
    OptimizerConfig,
    SwiGLUConfig,
    TokenRecords,
    TrainingConfig,
    pattern,
)


def model(
    *, dim: int, width: int, num_heads: int, key_dim: int, num_softmax_heads: int
) -> ModelConfig:
    """21 layers, routed at 3, 7, 11, 15, 19 and 20; values are twice as wide as keys."""
    heads = {"num_heads": num_heads, "key_dim": key_dim, "value_dim": 2 * key_dim}
    channels = SwiGLUConfig(width=width)
    linear = BlockConfig(mixer=GatedDeltaNetConfig(**heads), channel_mixer=channels)
    routed = BlockConfig(
        mixer=ChunkRoutedConfig(**heads, num_softmax_heads=num_softmax_heads, chunk_size=64),
        channel_mixer=channels,
    )
    blocks = (*pattern((linear, linear, linear, routed), depth=20), routed)
    return ModelConfig(
        vocab_size=32_000, dim=dim, blocks=blocks, norm_eps=1e-6, remat="dots_and_mixer_outputs"
    )


def config() -> Experiment:
    return Experiment(
        name="nats_l_hybrid_380m",
        model=model(dim=1024, width=2816, num_heads=6, key_dim=128, num_softmax_heads=12),
        data=DataConfig(
            sources=(TokenRecords(paths=("data/fineweb_edu",)),),
            tokenizer="data/fineweb_edu/tokenizer.json",
            sequence_length=4096,
            batch_size=128,
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-4,
            final_fraction=0.1,
            schedule="cosine",
            warmup_steps=1024,
            beta1=0.9,
            beta2=0.95,
            eps=1e-15,
            weight_decay=0.1,
            decay_all=True,
            clip_norm=1.0,
            accumulation_steps=16,  # 8 rows at a time on one device; fewer with a larger mesh
        ),
        training=TrainingConfig(
            steps=20_480, eval_every_steps=1024, checkpoint_every_steps=512, log_every_steps=16
        ),
    )
