"""Log-likelihoods of continuations: each context is read once, whatever number of them follows it.

A context is read as a prompt is for generation, and its state is copied to every continuation of
it. Heads of routed layers are therefore decided by the context alone. Lengths and rows are rounded
up to powers of two, so that a few programs serve all requests: one for each pair of rounded
lengths of context and continuation.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jhybrid.decoding import PREFILL_TOKENS, prefill, prefill_piece, require_room
from jhybrid.evals.prediction import automatic_batch_size
from jhybrid.losses import likeliest_and_likelihoods
from jhybrid.memory import Usage, usage
from jhybrid.mixers import Context
from jhybrid.model import HybridLM
from pallas_kernels.array_types import Array, Bool, Float, Int

SHORTEST_CONTEXT, SHORTEST_CONTINUATION = 32, 4  # tokens; what is shorter is padded to these

Tokens = tuple[int, ...]


class Request(NamedTuple):
    context: Tokens  # at least one token
    continuation: Tokens


class Score(NamedTuple):
    log_likelihood: float  # of the whole continuation
    greedy: bool  # each of its tokens is the likeliest


class Batch(NamedTuple):
    """Requests by their context, and what the arrays of all batches of their lengths hold."""

    groups: list[tuple[Tokens, list[int]]]  # (context, indices of its requests)
    context_length: int
    continuation_length: int
    contexts: int
    rows: int


def score(
    model: HybridLM,
    requests: Sequence[Request],
    *,
    batch_size: int | None = None,
    done: Callable[[int, Score], None] = lambda index, score: None,
) -> list[Score]:
    """The score of each request, in their order; `done` hears of each as soon as it is there.

    `batch_size` bounds the continuations of one batch. Raises UserError when a routed block has
    less room than its router wants, as generation does.
    """
    graphdef, weights = nnx.split(model)
    scores: dict[int, Score] = {}
    for batch in batches(requests, batch_size):
        contexts = [context for context, _ in batch.groups]
        rows = [(owner, i) for owner, (_, own) in enumerate(batch.groups) for i in own]
        padding = batch.rows - len(rows)
        texts, text_lengths = _padded(contexts, batch.contexts, batch.context_length)
        continuations, lengths = _padded(
            [requests[i].continuation for _, i in rows], batch.rows, batch.continuation_length
        )
        greedy, likelihoods, usages = _score(
            graphdef,
            weights,
            texts,
            np.maximum(text_lengths, 1),
            continuations,
            lengths,
            np.array([owner for owner, _ in rows] + [0] * padding, np.int32),
            piece=prefill_piece(model.config, batch.context_length, PREFILL_TOKENS),
        )
        require_room(model.config, usages)
        greedy, likelihoods = np.asarray(greedy), np.asarray(likelihoods, np.float64)
        for row, (_, i) in enumerate(rows):
            scores[i] = Score(float(likelihoods[row]), bool(greedy[row]))
            done(i, scores[i])
    return [scores[i] for i in range(len(requests))]


def batches(requests: Sequence[Request], batch_size: int | None = None) -> Iterator[Batch]:
    """Long contexts first. Requests of one context share a batch unless they are too many for it.

    A group of more than `batch_size` requests is cut; its context is then read more than once.
    """
    by_context: dict[Tokens, list[int]] = {}
    for i, request in enumerate(requests):
        by_context.setdefault(request.context, []).append(i)
    by_lengths: dict[tuple[int, int], list[tuple[Tokens, list[int]]]] = {}
    for context, indices in by_context.items():
        longest = max(len(requests[i].continuation) for i in indices)
        lengths = (
            rounded(len(context), SHORTEST_CONTEXT),
            rounded(longest, SHORTEST_CONTINUATION),
        )
        by_lengths.setdefault(lengths, []).append((context, indices))
    for lengths in sorted(by_lengths, reverse=True):
        limit = batch_size or automatic_batch_size(sum(lengths))
        found = list(_filled(by_lengths[lengths], limit))
        contexts = rounded(max(len(groups) for groups in found))
        rows = rounded(max(sum(len(own) for _, own in groups) for groups in found))
        for groups in found:
            yield Batch(groups, *lengths, contexts=contexts, rows=rows)


def rounded(length: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << (length - 1).bit_length())


def _filled(
    groups: Iterable[tuple[Tokens, list[int]]], limit: int
) -> Iterator[list[tuple[Tokens, list[int]]]]:
    """Groups in lists of at most `limit` requests."""
    current: list[tuple[Tokens, list[int]]] = []
    room = limit
    for context, indices in groups:
        for start in range(0, len(indices), limit):
            part = indices[start : start + limit]
            if len(part) > room:
                yield current
                current, room = [], limit
            current.append((context, part))
            room -= len(part)
    yield current


def _padded(
    rows: Sequence[Tokens], count: int, length: int
) -> tuple[Int[np.ndarray, "count length"], Int[np.ndarray, "count"]]:
    """Tokens, and how many there are in each row."""
    tokens, lengths = np.zeros((count, length), np.int32), np.zeros(count, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        lengths[i] = len(row)
    return tokens, lengths


@functools.partial(jax.jit, static_argnames=("graphdef", "piece"))
def _score(
    graphdef: nnx.GraphDef,
    weights: Any,
    contexts: Int[Array, "C S"],
    context_lengths: Int[Array, "C"],
    continuations: Int[Array, "R T"],
    lengths: Int[Array, "R"],
    owner: Int[Array, "R"],  # the context of each continuation
    *,
    piece: int,
) -> tuple[Bool[Array, "R"], Float[Array, "R"], tuple[Usage | None, ...]]:
    model = nnx.merge(graphdef, weights).unstacked()
    (C, S), T = contexts.shape, continuations.shape[1]
    state = model.initial_state(C, S + T)
    last, state = prefill(model, contexts, context_lengths, state, piece)
    state = jax.tree.map(lambda of_contexts: of_contexts[owner], state)
    starts = context_lengths[owner][:, None]
    context = Context(positions=starts + jnp.arange(T - 1), lengths=jnp.clip(lengths - 1, 0, T - 1))
    output = model(continuations[:, :-1], context, state)
    hidden = jnp.concatenate([last[owner][:, None], output.hidden], 1)
    targets = jnp.where(jnp.arange(T) < lengths[:, None], continuations, -1)
    greedy, likelihoods = likeliest_and_likelihoods(model, hidden, targets)
    usages = tuple(map(usage, output.state))
    return jnp.all(greedy | (targets < 0), 1), jnp.sum(likelihoods, 1), usages
