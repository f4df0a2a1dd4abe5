"""Every setting as frozen data: model, data, optimizer, mesh, training. Imports no JAX.

A config file is a Python file with `def config() -> Experiment`. Variants are made by
`dataclasses.replace` or, on the command line, by `serialization.override`.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal

from jhybrid.attention_config import HeadRoutedConfig, SoftmaxConfig
from jhybrid.attention_config import RopeScaling as RopeScaling
from jhybrid.config_fields import frozen, require_multiple, require_positive
from jhybrid.config_fields import require as require
from jhybrid.recurrent_config import GatedDeltaNetConfig as GatedDeltaNetConfig
from jhybrid.recurrent_config import HGRN2Config, HGRNConfig, RecurrentConfig
from jhybrid.sparsity_config import SparsityConfig
from jhybrid.sparsity_config import SparsityTarget as SparsityTarget
from jhybrid.task_config import GeneratedTask, TaskFiles

# ---- Mixers: how tokens see each other ----
# `mixing_flops(length, softmax_fraction)`: forward operations per token besides the projections,
# averaged over a document of `length` tokens; `softmax_fraction` is the share of (chunk, head)
# pairs that a router sends to softmax.


@frozen
class SoftmaxBudget:
    """The fraction f of chunks that each head sends to softmax in training, held by a bias.

    After every step a head's bias b, part of its softmax scores, becomes b - rate (f - fraction).
    """

    fraction: float
    limit: Literal["at_most", "exactly"] = "at_most"  # at_most: b never rises above 0
    rate: float = 0.3

    def __post_init__(self):
        require(
            0 <= self.fraction <= 1, f"softmax_budget.fraction={self.fraction} must lie in [0, 1]"
        )
        require_positive("softmax_budget", self, "rate")


@frozen
class HeadProbe:
    """Routes heads as well as chunks: each head of a document by its first `chunks` chunks.

    A head whose mean score of softmax less that of the memory is below `margin` in them sends all
    later chunks of the document to the memory.
    """

    chunks: int = 1
    margin: float = 0.0

    def __post_init__(self):
        require_positive("head_probe", self, "chunks")


@frozen
class ChunkRoutedConfig:
    """NAtS-L (arXiv 2602.03681): each chunk of tokens, per head, goes to softmax or to a memory."""

    num_heads: int  # memory heads = routing heads
    key_dim: int  # per memory head
    value_dim: int  # per memory head
    num_softmax_heads: int  # a multiple of num_heads; they re-slice the same q, k, v
    memory: Literal["gated_delta", "delta", "mamba2"] = "gated_delta"
    chunk_size: int = 64
    conv_width: int | None = 4  # None: no convolution, q, k, v = silu(W x)
    softmax_conv: bool = True  # False: the softmax branch reads W x, without convolution and SiLU
    rope_theta: float | None = None  # softmax branch only
    qk_norm: bool = True  # softmax branch; the memory's are always L2-normalised
    fusion_weights: bool = True
    decay_softmax_chunks: bool = True
    sampler: Literal["argmax", "gumbel"] = "argmax"
    gdn_counterfactual_grad: bool = False  # score gradient also where the memory was not chosen
    truncate_intra_softmax_grad: bool = False  # reproduces the authors' released backward
    softmax_bias: float = 0.0  # added to the scores of softmax; the lower, the less is kept
    softmax_budget: SoftmaxBudget | None = None
    head_probe: HeadProbe | None = None  # None: every head stays free to choose
    # With a state only; the fraction of a row's chunks for which each head has room to keep keys
    # and values. A softmax chunk that finds none goes to the memory: "linear" accepts that, "error"
    # makes generation fail.
    kv_capacity: float = 1.0
    kv_overflow: Literal["error", "linear"] = "error"

    def __post_init__(self):
        sizes = ("num_softmax_heads", "key_dim", "value_dim", "chunk_size", "conv_width")
        require_positive("mixer", self, *sizes, "rope_theta")
        require(
            0 <= self.kv_capacity <= 1, f"mixer.kv_capacity={self.kv_capacity} must lie in [0, 1]"
        )
        split = self.num_softmax_heads
        require_multiple("mixer.num_softmax_heads", split, "num_heads", self.num_heads)
        for name in ("key_dim", "value_dim"):
            total = getattr(self, name) * self.num_heads
            require_multiple(f"mixer.{name}*num_heads", total, "num_softmax_heads", split)
        rotary = self.rope_theta is not None
        require(
            not rotary or self.softmax_key_dim % 2 == 0,
            f"mixer.key_dim*num_heads/num_softmax_heads={self.softmax_key_dim} must be even "
            "for rope_theta",
        )

    @property
    def softmax_key_dim(self) -> int:
        return self.num_heads * self.key_dim // self.num_softmax_heads

    @property
    def softmax_value_dim(self) -> int:
        return self.num_heads * self.value_dim // self.num_softmax_heads

    def mixing_flops(self, length: int, softmax_fraction: float) -> float:
        """6 H K V per token for a delta rule (4 without one), and as for softmax attention
        n = (C + 1) / 2 + softmax_fraction (T - C) / 2."""
        chunk = min(self.chunk_size, length)
        seen = (chunk + 1) / 2 + softmax_fraction * (length - chunk) / 2
        softmax_dims = self.softmax_key_dim + self.softmax_value_dim
        products = 4 if self.memory == "mamba2" else 6
        memory = products * self.num_heads * self.key_dim * self.value_dim
        return memory + 2 * self.num_softmax_heads * softmax_dims * seen


MixerConfig = SoftmaxConfig | ChunkRoutedConfig | HeadRoutedConfig | RecurrentConfig


# ---- The model: a stack of blocks ----


@frozen
class SwiGLUConfig:
    width: int

    def __post_init__(self):
        require_positive("channel_mixer", self, "width")


ChannelMixerConfig = SwiGLUConfig | None


@frozen
class BlockConfig:
    """x += mixer(norm(x)); then, if there is one, x += channel_mixer(norm(x))."""

    mixer: MixerConfig
    channel_mixer: ChannelMixerConfig
    norm: Literal["rms", "layer"] = "rms"


@frozen
class ModelConfig:
    vocab_size: int
    dim: int
    blocks: tuple[BlockConfig, ...]
    tied_head: bool = False
    embed_norm: bool = False  # a norm, of the first block's kind, between embedding and blocks
    norm_eps: float = 1e-6
    compute_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"  # float64: for checks
    param_dtype: Literal["bfloat16", "float16", "float32", "float64"] = "float32"
    remat: Literal["none", "block", "dots", "mixer_outputs", "dots_and_mixer_outputs"] = "block"
    scan_blocks: bool = True  # scan over the repeats of the layer pattern; False unrolls
    loss_chunk_tokens: int = 2048  # tokens per device whose logits exist at once in training
    implementation: Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu"] = "auto"

    def __post_init__(self):
        require(len(self.blocks) > 0, "model.blocks must not be empty")
        require_positive("model", self, "vocab_size", "dim", "loss_chunk_tokens", "norm_eps")
        widths = self._bounded_gate_widths()
        require(
            len(widths) <= 1,
            f"model.blocks: mixers with lower_bound have gates of {sorted(widths)} channels; "
            "they share one table, so these must be equal",
        )

    @property
    def gate_width(self) -> int | None:
        """Channels of the forget gates whose lower bounds the model learns, if there are any."""
        return next(iter(self._bounded_gate_widths()), None)

    def _bounded_gate_widths(self) -> set[int]:
        mixers = (block.mixer for block in self.blocks)
        gated = (m for m in mixers if isinstance(m, HGRNConfig | HGRN2Config))
        return {mixer.gate_width for mixer in gated if mixer.lower_bound}


def pattern(blocks: Sequence[BlockConfig], depth: int) -> tuple[BlockConfig, ...]:
    """The first `depth` entries of `blocks` repeated for ever."""
    return tuple(blocks[i % len(blocks)] for i in range(depth))


# ---- Data ----
# `weight` is the source's share of rows, that is of token positions; only ratios matter.


@frozen
class EmbeddedText:
    """The public-domain prose shipped with the package."""

    weight: float = 1.0


@frozen
class TextFiles:
    """Local .txt, .jsonl (field `text`), .gz of either: one document per file or line.

    Read and tokenized at the start and held in memory; prepare larger data as TokenRecords.
    """

    paths: tuple[str, ...]  # files, folders or globs
    weight: float = 1.0
    text_field: str = "text"


@frozen
class TokenRecords:
    """ArrayRecord files written by `python -m jhybrid.data.prepare`."""

    paths: tuple[str, ...]  # the folders it wrote, files in them, or globs
    weight: float = 1.0


@frozen
class AssociativeRecall:
    """Multi-query associative recall (Zoology, arXiv 2312.04927); loss on the answers only."""

    weight: float = 1.0
    num_pairs: int = 16
    num_queries: int = 16
    length: int = 256  # tokens per document
    power: float = 0.01  # gap g between pairs and query has probability ~ g**(power - 1)

    def __post_init__(self):
        require(
            0 < self.num_queries <= self.num_pairs,
            f"AssociativeRecall.num_queries={self.num_queries} must lie between 1 and "
            f"num_pairs={self.num_pairs}",
        )
        require(
            2 * (self.num_pairs + self.num_queries) <= self.length,
            f"AssociativeRecall.length={self.length} must be at least "
            f"2*(num_pairs+num_queries)={2 * (self.num_pairs + self.num_queries)}",
        )
        require(
            -10 <= self.power <= 10, f"AssociativeRecall.power={self.power} must lie in [-10, 10]"
        )


@frozen
class Needle:
    """Synthetic needle-in-a-haystack documents in RULER's phrasing over the embedded prose."""

    weight: float = 1.0
    length: int = 512  # tokens per document
    num_needles: int = 1
    answer_only: bool = False  # loss on the answer only, not on the haystack

    def __post_init__(self):
        require_positive("Needle", self, "num_needles", "length")


SourceConfig = (
    EmbeddedText | TextFiles | TokenRecords | AssociativeRecall | Needle | TaskFiles | GeneratedTask
)


@frozen
class DataConfig:
    sources: tuple[SourceConfig, ...] = (EmbeddedText(),)
    tasks: tuple[str, ...] = ()  # names of the tasks that sources label their documents with
    tokenizer: str = "bpe4096"  # "bpe4096" | "bytes" | path of a Hugging Face tokenizer.json
    sequence_length: int = 1024
    batch_size: int = 8  # sequences per optimizer step, over all devices and accumulation steps
    document_alignment: int = (
        64  # packed documents start at multiples of this; a multiple of every chunk size
    )
    seed: int = 0
    validation_fraction: float = 0.05  # the tail of each text source
    num_workers: int = 0  # Grain worker processes

    def __post_init__(self):
        require(len(self.sources) > 0, "data.sources must not be empty")
        require(
            all(0 < s.weight < math.inf for s in self.sources),
            "data.sources: every weight must be positive and finite",
        )
        require(len(set(self.tasks)) == len(self.tasks), "data.tasks must be distinct names")
        for i, source in enumerate(self.sources):
            known = not isinstance(source, GeneratedTask) or source.task in self.tasks
            task = source.task if isinstance(source, GeneratedTask) else ""
            require(known, f"data.sources.{i}.task={task!r} is none of data.tasks={self.tasks}")
        require_positive("data", self, "sequence_length", "batch_size", "document_alignment")
        for name in ("sequence_length", "batch_size"):  # positions and rows are int32
            require(getattr(self, name) < 2**31, f"data.{name} must be less than 2**31")
        require(0 <= self.seed < 2**32, f"data.seed={self.seed} must lie in [0, 2**32)")
        require(self.num_workers >= 0, "data.num_workers must not be negative")
        require(0 < self.validation_fraction < 1, "data.validation_fraction must lie in (0, 1)")


# ---- Optimizer, devices, run ----


@frozen
class OptimizerConfig:
    """AdamW with warm-up and decay; see jhybrid/optimizer.py."""

    learning_rate: float = 1e-3
    final_fraction: float = 0.1  # of learning_rate, at the last step
    schedule: Literal["cosine", "warmup_stable_decay"] = "cosine"
    warmup_steps: int = 100
    decay_steps: int = 0  # length of the final decay of warmup_stable_decay
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_all: bool = (
        False  # False: matrices only (no norms, biases, decay rates, embeddings kept in)
    )
    clip_norm: float = 1.0
    accumulation_steps: int = 1
    trainable: str = ".*"  # regular expression found in a parameter's path; the rest is frozen
    frozen_dtype: Literal["bfloat16", "float32"] | None = None  # None: model.param_dtype

    def __post_init__(self):
        require_positive("optimizer", self, "learning_rate", "clip_norm", "eps")
        for name in ("warmup_steps", "decay_steps", "weight_decay"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"optimizer.{name}={value} must be finite, at least 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name} must lie in [0, 1)")
        require(0 <= self.final_fraction <= 1, "optimizer.final_fraction must lie in [0, 1]")
        require(self.accumulation_steps >= 1, "optimizer.accumulation_steps must be >= 1")


@frozen
class MeshConfig:
    """Devices per mesh axis; their product is the number of devices used."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self):
        require(
            min(self.data, self.fsdp, self.tensor, self.context) >= 1,
            "mesh: every axis must be >= 1",
        )
        require(
            self.context == 1, "mesh.context must be 1 (context parallelism does not exist yet)"
        )


@frozen
class TrainingConfig:
    steps: int = 1000
    init_from: str | None = None  # an export or a workdir to start from; new routers are drawn
    seed: int = 0
    log_every_steps: int = 10
    eval_every_steps: int = 200  # 0: only after the last step
    eval_batches: int = 8
    checkpoint_every_steps: int = 200
    keep_checkpoints: int = 2
    max_skipped_steps: int = 100  # non-finite steps in a row before giving up

    def __post_init__(self):
        for name in (
            "steps",
            "log_every_steps",
            "eval_batches",
            "checkpoint_every_steps",
            "keep_checkpoints",
            "max_skipped_steps",
        ):
            require(getattr(self, name) >= 1, f"training.{name} must be >= 1")
        require(self.eval_every_steps >= 0, "training.eval_every_steps must not be negative")
        require(0 <= self.seed < 2**32, f"training.seed={self.seed} must lie in [0, 2**32)")


@frozen
class Experiment:
    name: str
    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    training: TrainingConfig = TrainingConfig()
    sparsity: SparsityConfig | None = None  # of heads, by task; for models that route heads

    def __post_init__(self):
        require(
            re.fullmatch(r"\w[\w.-]*", self.name) is not None,
            f"name={self.name!r} must be letters, digits, '_', '.' and '-': it names the workdir",
        )
        rows = self.mesh.data * self.mesh.fsdp * self.optimizer.accumulation_steps
        require(
            self.data.batch_size % rows == 0,
            f"data.batch_size={self.data.batch_size} must be a multiple of mesh.data*mesh.fsdp*"
            f"optimizer.accumulation_steps={rows}",
        )
        for i, block in enumerate(self.model.blocks):
            for name in ("chunk_size", "block_size"):
                size = getattr(block.mixer, name, 1)
                require(
                    self.data.document_alignment % size == 0,
                    f"data.document_alignment={self.data.document_alignment} must be a multiple "
                    f"of model.blocks.{i}.mixer.{name}={size}",
                )
        if self.sparsity is not None:
            self._require_routed_tasks(self.sparsity)

    def _require_routed_tasks(self, sparsity: SparsityConfig) -> None:
        targets = sorted(target.task for target in sparsity.targets)
        require(
            targets == sorted(self.data.tasks),
            f"sparsity.targets: {targets} must be the tasks of data.tasks={self.data.tasks}",
        )
        mixers = (block.mixer for block in self.model.blocks)
        sizes = {m.block_size for m in mixers if isinstance(m, HeadRoutedConfig)}
        require(len(sizes) == 1, "sparsity: needs head-routed blocks, all with one block_size")
