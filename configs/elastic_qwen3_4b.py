"""Head routers for Qwen3-4B in Elastic Attention's recipe (arXiv 2601.17367, as it was run).

Run, after `python -m jhybrid.convert from-hf Qwen3-4B qwen3-4b`, with task-labelled documents of
1,000 to 65,536 tokens as JSON lines in tasks/ (context, question, answer, task):

    python train.py --config configs/elastic_qwen3_4b.py --workdir runs/elastic_qwen3_4b \
        --set mesh.fsdp=8

9,492,552 parameters are trained, 4,022,468,096 stay frozen. Cost: 300 steps of 24 rows of 65,536
tokens; the authors report at most 12 hours on eight 80 GB A800 for the 8B models.
"""

from jhybrid.config import (
    BlockConfig,
    DataConfig,
    Experiment,
    HeadRoutedConfig,
    ModelConfig,
    OptimizerConfig,
    SoftmaxConfig,
    SparsityConfig,
    SparsityTarget,
    SwiGLUConfig,
    TaskFiles,
    TrainingConfig,
)

ATTENTION = SoftmaxConfig(
    num_heads=32, num_kv_heads=8, head_dim=128, rope_theta=1_000_000.0, qk_norm=True
)
# Targets of what was run: 0.6 for tasks that need distant tokens, though the paper's text says 0.7.
SENSITIVE, ROBUST = 0.6, 1.0
TARGETS = {
    "single_qa": SENSITIVE,
    "multihop_qa": SENSITIVE,
    "summarization": ROBUST,
    "code": ROBUST,
    "in_context_learning": ROBUST,
}


def recipe(
    *,
    name: str,
    backbone: str,
    chat: str,
    attention: SoftmaxConfig,
    depth: int,
    dim: int,
    width: int,
    vocab_size: int,
    norm_eps: float,
    tied_head: bool = False,
) -> Experiment:
    """One recipe for every backbone: 300 steps of 24 packs, full attention and sink + window."""
    mixer = HeadRoutedConfig(attention=attention, block_size=128, sink_blocks=1, local_blocks=16)
    block = BlockConfig(mixer=mixer, channel_mixer=SwiGLUConfig(width=width))
    return Experiment(
        name=name,
        model=ModelConfig(
            vocab_size=vocab_size,
            dim=dim,
            blocks=(block,) * depth,
            tied_head=tied_head,
            norm_eps=norm_eps,
            param_dtype="bfloat16",  # the frozen part; routers are kept in fp32
            remat="block",
        ),
        data=DataConfig(
            tasks=tuple(TARGETS),
            sources=(TaskFiles(paths=("tasks/",), chat=chat, min_tokens=1000),),
            tokenizer=backbone,
            sequence_length=65_536,
            batch_size=24,
            document_alignment=128,
            seed=42,
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-4,
            final_fraction=1e-7,
            warmup_steps=60,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            decay_all=True,
            clip_norm=5.0,
            accumulation_steps=3,
            trainable="router",
        ),
        training=TrainingConfig(
            steps=300,
            init_from=backbone,
            seed=42,
            log_every_steps=1,
            eval_every_steps=0,
            eval_batches=1,
            checkpoint_every_steps=100,
            keep_checkpoints=1,
        ),
        sparsity=SparsityConfig(
            targets=tuple(
                SparsityTarget(task=task, low=target, high=target)
                for task, target in TARGETS.items()
            )
        ),
    )


def config() -> Experiment:
    return recipe(
        name="elastic_qwen3_4b",
        backbone="qwen3-4b",
        chat="qwen3",
        attention=ATTENTION,
        depth=36,
        dim=2560,
        width=9728,
        vocab_size=151_936,
        norm_eps=1e-6,
        tied_head=True,
    )
