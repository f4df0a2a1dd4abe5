"""Head routers for SmolLM2-135M-Instruct on generated tasks, offline; minutes on two CPU cores.

Run, after `python -m jhybrid.convert from-gguf FILE smollm2`:

    python train.py --config configs/elastic_smollm2_135m.py --workdir runs/elastic_smollm2_135m

Elastic Attention's recipe (arXiv 2601.17367) shrunk from 64K tokens to 1024: a sparse head sees the
first block and the latest seven of 32 tokens, a quarter of a document as the paper's do at 8K.
With fewer steps than the paper's, rates and multipliers are higher. 1,989,180 parameters are
trained, 134,515,008 stay frozen.
"""

from jhybrid.config import (
    BlockConfig,
    DataConfig,
    Experiment,
    GeneratedTask,
    HeadRoutedConfig,
    ModelConfig,
    OptimizerConfig,
    SoftmaxConfig,
    SparsityConfig,
    SparsityTarget,
    SwiGLUConfig,
    TrainingConfig,
)

BACKBONE = "smollm2"  # what `convert from-gguf` wrote
LENGTH = 1024
# Tasks with the share of (layer, head) pairs that should attend sparsely, at least and at most.
TASKS = {
    "needle": (0.5, 0.6),
    "variable_tracking": (0.5, 0.6),
    "continuation": (0.5, 0.6),
    "lead": (1.0, 1.0),
    "copy_code": (1.0, 1.0),
}
PROSE = ("continuation",)  # loss on all tokens: answers alone would say little about prose


def config() -> Experiment:
    attention = SoftmaxConfig(num_heads=9, num_kv_heads=3, head_dim=64, rope_theta=100_000.0)
    mixer = HeadRoutedConfig(attention=attention, block_size=32, sink_blocks=1, local_blocks=7)
    block = BlockConfig(mixer=mixer, channel_mixer=SwiGLUConfig(width=1536))
    return Experiment(
        name="elastic_smollm2_135m",
        model=ModelConfig(
            vocab_size=49_152,
            dim=576,
            blocks=(block,) * 30,
            tied_head=True,
            norm_eps=1e-5,
            compute_dtype="float32",
            param_dtype="bfloat16",
            remat="none",
            loss_chunk_tokens=64,  # most have no target: no logits are made of those
        ),
        data=DataConfig(
            tasks=tuple(TASKS),
            sources=tuple(
                GeneratedTask(
                    generator=task, task=task, length=LENGTH, answer_only=task not in PROSE
                )
                for task in TASKS
            ),
            tokenizer=BACKBONE,
            sequence_length=LENGTH,
            batch_size=len(TASKS),
            document_alignment=32,
        ),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,
            final_fraction=0.1,
            warmup_steps=10,
            weight_decay=0.1,
            decay_all=True,
            clip_norm=5.0,
            accumulation_steps=len(TASKS),  # a document at a time
            trainable="router",
        ),
        training=TrainingConfig(
            steps=120,
            init_from=BACKBONE,
            log_every_steps=1,
            eval_every_steps=0,
            eval_batches=1,
            checkpoint_every_steps=20,
            keep_checkpoints=1,
        ),
        sparsity=SparsityConfig(
            targets=tuple(
                SparsityTarget(task=task, low=low, high=high) for task, (low, high) in TASKS.items()
            ),
            multiplier_start=2.0,
            multiplier_learning_rate=2e-2,
        ),
    )
