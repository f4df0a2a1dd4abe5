"""GGUF files of the Llama architecture (also SmolLM2) into exports."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jhybrid.checkpoint import write_export
from jhybrid.config import BlockConfig, ModelConfig, SoftmaxConfig, SwiGLUConfig
from jhybrid.convert.families import GGUF_LLAMA, Fields
from jhybrid.convert.gguf import GGUF
from jhybrid.convert.huggingface import KEPT_CONFIG, experiment_for, with_dtypes
from jhybrid.convert.placement import read_parameters
from jhybrid.errors import UserError, first_line
from jhybrid.sharding import make_mesh

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
# What llama.cpp calls each way of cutting text before the merges.
PRE_TOKENIZERS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
}
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def from_gguf(
    path: Path,
    out: Path,
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    tokenizer: str | None = None,
    assignments: Sequence[str] = (),
) -> Path:
    """Writes the model in a GGUF file as the export `out`, with its tokenizer.

    Weights are dequantised in fp32 and rounded once, to `dtype`.
    """
    file = GGUF(path)
    fields = Fields(file.metadata, str(path))
    model = with_dtypes(read_config(fields, file), dtype)
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is None:
            tokenizer = folder
            _write_tokenizer(fields, Path(folder))
        experiment = experiment_for(path.stem, model, tokenizer, assignments)
        mesh = make_mesh(experiment.mesh)
        params = read_parameters(HalfSplit(file, model), GGUF_LLAMA, experiment.model, mesh)
        files = {KEPT_CONFIG: json.dumps(_kept_config(fields)).encode()}
        template = fields.values.get("tokenizer.chat_template")
        if isinstance(template, str):
            files["chat_template.jinja"] = template.encode()
        return write_export(experiment, params, out, files=files)


def read_config(fields: Fields, file: GGUF) -> ModelConfig:
    architecture = fields.get("general.architecture", str)
    if architecture != "llama":
        raise fields.refuse("general.architecture", "is not supported, only 'llama' is")
    fields.only("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        raise UserError(
            f"{file.where}: scaled rotations (rope_freqs.weight) are not supported in GGUF files; "
            "import the Hugging Face folder of the model"
        )
    dim, heads = fields.size("llama.embedding_length"), fields.size("llama.attention.head_count")
    head_dim = fields.size("llama.attention.key_length", dim // heads)
    for name in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if fields.size(name, head_dim) != head_dim:
            raise fields.refuse(name, f"must be {head_dim}, the size of a head")
    epsilon = fields.get("llama.attention.layer_norm_rms_epsilon", float)
    mixer = SoftmaxConfig(
        num_heads=heads,
        num_kv_heads=fields.size("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=fields.get("llama.rope.freq_base", float, 10_000.0),
    )
    channels = SwiGLUConfig(width=fields.size("llama.feed_forward_length"))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{file.where}: tensor token_embd.weight is missing")
    return ModelConfig(
        vocab_size=embedding.shape[0],
        dim=dim,
        blocks=(BlockConfig(mixer=mixer, channel_mixer=channels),)
        * fields.depth("llama.block_count"),
        tied_head="output.weight" not in file.tensors,
        norm_eps=float(str(np.float32(epsilon))),  # 1e-05, not 9.99999975e-06
    )


def _kept_config(fields: Fields) -> dict[str, Any]:
    """What a `config.json` should say besides what the model decides."""
    sources = {
        "max_position_embeddings": "llama.context_length",
        **{f"{name}_token_id": f"tokenizer.ggml.{key}_token_id" for name, key in SPECIAL.items()},
    }
    return {name: fields.values[key] for name, key in sources.items() if key in fields.values}


class HalfSplit:
    """The tensors of a GGUF file with the rows of q and k in the order `layers.rotate` wants.

    llama.cpp turns neighbouring channels together, 2i with 2i + 1; ours are i with i + K/2.
    """

    def __init__(self, file: GGUF, model: ModelConfig):
        mixer = model.blocks[0].mixer
        assert isinstance(mixer, SoftmaxConfig)
        self.where, self.tensors, self._file = file.where, file.tensors, file
        self._heads = {"attn_q": mixer.num_heads, "attn_k": mixer.num_kv_heads}

    def rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            yield from self._file.rows(name)
            return
        weight = np.concatenate([rows for _, rows in self._file.rows(name)])
        pairs = weight.reshape(heads, -1, 2, weight.shape[1])
        yield 0, pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(fields: Fields, folder: Path) -> None:
    tokens = fields.get("tokenizer.ggml.tokens", list)
    named = {
        name: fields.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL.items()
    }
    for name, index in named.items():
        if index is not None and not (type(index) is int and index < len(tokens)):
            raise fields.refuse(f"tokenizer.ggml.{SPECIAL[name]}_token_id", "is not a token")
    special = {f"{name}_token": tokens[i] for name, i in named.items() if i is not None}
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=2))


def build_tokenizer(fields: Fields) -> Tokenizer:
    """The byte-level BPE that the metadata describes."""
    hint = "; give another with --tokenizer FILE"
    if fields.get("tokenizer.ggml.model", str) != "gpt2":
        raise fields.refuse("tokenizer.ggml.model", f"is not supported, only 'gpt2' is{hint}")
    cut = PRE_TOKENIZERS.get(fields.get("tokenizer.ggml.pre", str))
    if cut is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise fields.refuse("tokenizer.ggml.pre", f"is not supported; known: {known}{hint}")
    tokens, merges, kinds = (
        fields.get(f"tokenizer.ggml.{name}", list) for name in ("tokens", "merges", "token_type")
    )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(kinds) != len(tokens) or len(vocabulary) != len(tokens):
        raise UserError(f"{fields.where}: tokenizer.ggml.tokens and token_type do not match")
    try:
        pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in merges]
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{fields.where}: tokenizer.ggml.merges: {first_line(error)}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    added = {CONTROL: tokenizer.add_special_tokens, USER_DEFINED: tokenizer.add_tokens}
    for kind, add in added.items():
        add(
            [
                AddedToken(token, special=kind == CONTROL, normalized=False)
                for token, k in zip(tokens, kinds, strict=True)
                if k == kind
            ]
        )
    return tokenizer
