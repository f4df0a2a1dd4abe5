"""Training batches drawn on the device: a batch is a function of its key, so nothing waits for one.

A cell's seeds train in one program of milliseconds per step; batches put together on the host and
copied would be what it waits for. They are drawn by a program of their own, the same for all cells
of a study, because drawing takes thousands of instructions that a training program of each cell
would compile again. Here text lies on the device once, as one stream of tokens of
which rows are windows; needle documents are a pool, written on the host once; associative recall is
drawn anew for every row. A row of the batch belongs to one source, and each source has its share of
the rows.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jhybrid.config import AssociativeRecall, DataConfig, Needle, require
from jhybrid.data import Tokenizer, load_tokenizer
from jhybrid.data.needle import NeedleTask
from jhybrid.data.recall import TASK_TOKENS, AssociativeRecallTask
from jhybrid.data.rows import SyntheticRows
from jhybrid.data.sources import token_store
from pallas_kernels.array_types import Array, Float, Int

NEEDLE_DOCUMENTS = 2048  # in the pool of a needle source
POOL_SEED = 0

Batch = dict[str, Int[Array, "B T"]]
Draw = Callable[[Array, Any], Batch]  # (key, what lies on the device) -> rows


class Source(NamedTuple):
    """`arrays` are what `draw` is given after its key; the rows it draws are few or many."""

    arrays: Any
    draw: Draw


@functools.lru_cache(maxsize=1)  # cells of one study share its text, its pool and its program
def batches_of(config: DataConfig) -> "Batches":
    """The batches of a config, whatever its seed: a key says which."""
    return Batches(config)


class Batches:
    """All sources of a config.

    Attributes:
        arrays: what lies on the device.
        draw_steps: (seeds [S], arrays, first step, number of steps N, static) -> the batches of N
            consecutive steps of every seed, [N, S, batch_size, sequence_length] int32 each.
    """

    def __init__(self, config: DataConfig):
        tokenizer = load_tokenizer(config.tokenizer)
        weights = np.asarray([source.weight for source in config.sources])
        self._rows = shares(weights, config.batch_size)
        sources = [
            _source(config, index, int(rows), tokenizer) for index, rows in enumerate(self._rows)
        ]
        self.arrays = tuple(source.arrays for source in sources)
        self._draws = tuple(source.draw for source in sources)
        self.draw_steps = jax.jit(self._draw_steps, static_argnums=3)

    def draw(self, key: Array, arrays: Any) -> Batch:
        """The batch of a key: [batch_size, sequence_length] int32 each, as the training step's."""
        parts = [
            draw(jax.random.fold_in(key, index), own)
            for index, (draw, own) in enumerate(zip(self._draws, arrays, strict=True))
            if self._rows[index]
        ]
        return {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _draw_steps(
        self, seeds: Int[Array, "S"], arrays: Any, first: Int[Array, ""], steps: int
    ) -> Mapping[str, Int[Array, "N S B T"]]:
        def of_step(step: Int[Array, ""]) -> Batch:
            def of_seed(seed: Int[Array, ""]) -> Batch:
                return self.draw(jax.random.fold_in(jax.random.key(seed), step), arrays)

            return jax.vmap(of_seed)(seeds)

        return jax.lax.map(of_step, first + jnp.arange(steps))


def shares(weights: Float[np.ndarray, "n"], rows: int) -> Int[np.ndarray, "n"]:
    """`rows` in parts as close to `weights` as whole rows allow: largest remainders."""
    exact = weights / weights.sum() * rows
    whole = np.floor(exact).astype(int)
    left = rows - whole.sum()
    whole[np.argsort(-(exact - whole), kind="stable")[:left]] += 1
    return whole


def _source(config: DataConfig, index: int, rows: int, tokenizer: Tokenizer) -> Source:
    source = config.sources[index]
    length = config.sequence_length
    if isinstance(source, AssociativeRecall):
        require(
            source.length % config.document_alignment == 0,
            f"data.sources.{index}.length={source.length} must be a multiple of "
            f"data.document_alignment={config.document_alignment} where batches are drawn on the "
            "device",
        )
        return recall_source(source, tokenizer, rows, length)
    if isinstance(source, Needle):
        task = NeedleTask(source, tokenizer)
        seed = (POOL_SEED, index)
        pool = SyntheticRows(
            task, length, config.document_alignment, seed=seed, pad=tokenizer.eos, name="needle"
        )
        found: list[Any] = [pool[i] for i in range(NEEDLE_DOCUMENTS)]
        arrays = {name: jnp.asarray(np.stack([row[name] for row in found])) for name in found[0]}

        def from_pool(key: Array, pool: Batch) -> Batch:
            chosen = jax.random.randint(key, (rows,), 0, NEEDLE_DOCUMENTS)
            return {name: values[chosen] for name, values in pool.items()}

        return Source(arrays, from_pool)
    stream = text_stream(config, index, tokenizer)
    require(
        len(stream) > length,
        f"data.sources.{index}: {len(stream)} tokens of training text, need more than {length}",
    )

    def windows(key: Array, stream: Int[Array, "n"]) -> Batch:
        starts = jax.random.randint(key, (rows, 1), 0, len(stream) - length)
        tokens = stream[starts + jnp.arange(length + 1)]
        return one_document(tokens[:, :-1], tokens[:, 1:])

    return Source(jnp.asarray(stream, jnp.int32), windows)


def text_stream(config: DataConfig, index: int, tokenizer: Tokenizer) -> Int[np.ndarray, "n"]:
    """The training text of a source: its documents laid end to end, each ended by end-of-text."""
    field = f"data.sources.{index}"
    store = token_store(config, config.sources[index], "train", tokenizer, field)
    return np.concatenate([store.read(i, 0, int(n)) for i, n in enumerate(store.lengths)])


def one_document(tokens: Int[Array, "B T"], targets: Int[Array, "B T"]) -> Batch:
    """Rows of one document each."""
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": jnp.zeros_like(tokens),
        "positions": jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape),
    }


def recall_source(
    config: AssociativeRecall, tokenizer: Tokenizer, rows: int, length: int
) -> Source:
    """As many documents per row as fit, packed."""
    per_row = length // config.length
    require(
        per_row * config.length == length,
        f"data.sources AssociativeRecall.length={config.length} must divide "
        f"data.sequence_length={length} where batches are drawn on the device",
    )
    AssociativeRecallTask(config, tokenizer)  # may refuse
    vocabulary = jnp.asarray(tokenizer.ordinary_ids[:TASK_TOKENS], jnp.int32)

    def documents(key: Array, vocabulary: Int[Array, "v"]) -> Batch:
        keys = jax.random.split(key, (rows, per_row))
        draw = jax.vmap(jax.vmap(lambda key: recall_document(key, vocabulary, config)))
        found = draw(keys)
        batch = one_document(*(found[name].reshape(rows, length) for name in ("tokens", "targets")))
        place = jnp.arange(length, dtype=jnp.int32)
        batch["positions"] = jnp.broadcast_to(place % config.length, (rows, length))
        batch["segment_ids"] = jnp.broadcast_to(place // config.length, (rows, length))
        return batch

    return Source(vocabulary, documents)


def recall_document(
    key: Array, vocabulary: Int[Array, "v"], config: AssociativeRecall
) -> Mapping[str, Array]:
    """A document of `jhybrid.data.recall.AssociativeRecallTask`, by its rules.

    tokens, targets [length]; queries [num_queries]: where keys are asked for; distances
    [num_queries]: tokens from the key in its pair to the query.
    """
    pairs, queries = config.num_pairs, config.num_queries
    half = len(vocabulary) // 2
    of_keys, of_values, of_fillers, of_slots, of_queries = jax.random.split(key, 5)
    permuted = jax.random.permutation(of_keys, vocabulary[:half])
    keys, fillers = permuted[:pairs], permuted[pairs:]
    values = jax.random.permutation(of_values, vocabulary[half : 2 * half])[:pairs]

    slots = (config.length - 2 * pairs) // 2
    weights = (config.power - 1.0) * jnp.log(jnp.arange(1, slots + 1))
    # The largest of log p + Gumbel noise: a choice without replacement, as NumPy's.
    chosen = jax.lax.top_k(weights + jax.random.gumbel(of_slots, (slots,)), queries)[1]
    asked = jax.random.permutation(of_queries, pairs)[:queries]

    tokens = jax.random.choice(of_fillers, fillers, (config.length + 1,))
    tokens = tokens.at[: 2 * pairs].set(jnp.stack([keys, values], 1).reshape(-1))
    at = 2 * pairs + 2 * chosen
    tokens = tokens.at[at].set(keys[asked]).at[at + 1].set(values[asked])
    targets = jnp.full(config.length, -1, jnp.int32).at[at].set(values[asked])
    return {
        "tokens": tokens[:-1],
        "targets": targets,
        "queries": at,
        "distances": at - 2 * asked,
    }
