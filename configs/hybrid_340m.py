"""HGRN-2 with one softmax layer in six, 340M: the study's best small model (arXiv 2507.06457).

Another family or layout is another argument of `hybrid`. The study trained on 20B tokens of
FineWeb-Edu in a context of 4,096 with flame; the rest of its recipe is not published, and this is
flame's (github.com/fla-org/flame, March 2025) with half a million tokens per step.

Run, after writing records with `python -m jhybrid.data.prepare`:
python train.py --config configs/hybrid_340m.py --workdir runs/hybrid_340m
"""

from jhybrid.config import (
    DataConfig,
    Experiment,
    OptimizerConfig,
    TokenRecords,
    TrainingConfig,
)
from jhybrid.model_families import hybrid


def config() -> Experiment:
    return Experiment(
        name="hybrid_340m",
        model=hybrid("hgrn2", "6-1"),
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
            eps=1e-8,
            weight_decay=0.1,
            decay_all=True,
            clip_norm=1.0,
            accumulation_steps=16,  # 8 rows at a time on one device; fewer with a larger mesh
        ),
        training=TrainingConfig(
            steps=38_147, eval_every_steps=1024, checkpoint_every_steps=512, log_every_steps=16
        ),
    )
