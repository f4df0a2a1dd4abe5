"""Chunk-routed attention: each chunk of tokens, per head, stays as softmax keys or joins a state.

NAtS-L, arXiv 2602.03681 (released code: automl/NeuralAttentionSearchLinear). Within its own chunk
every token uses both branches; the decision, made from the mean of the chunk's inputs, only says
what later chunks find: the chunk's keys and values, or its write into the delta-rule memory.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid import routing
from jhybrid.config import ChunkRoutedConfig, ModelConfig
from jhybrid.layers import Linear, RMSNorm, l2_normalise, normal, rotate, upcast
from jhybrid.mixers import chunk_ops
from jhybrid.mixers.chunk_memory import Writes, build_memory
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.delta_inputs import Streams
from jhybrid.sharding import shard_op
from pallas_kernels.array_types import Array, Bool, Float, Int

HEADS = ("batch", None, "heads")  # [B, T, H, ...]
STATE = ("batch", "heads")  # [B, H, ...]
ROWS = ("batch",)


class ChunkRoutedState(NamedTuple):
    """Kept chunks, the open chunk and the memory, after `length` tokens of each row.

    Slots 0..kept-1 of `keys` and `values` hold the chunks a head sent to softmax; the open chunk is
    always written at slot `kept`, so a chunk that goes to the memory is simply overwritten. When
    all slots but the open chunk's are kept, chunks go to the memory whatever the router says.
    `memory` has the open chunk's writes in it, `memory_start` is the memory before that chunk.
    """

    length: Int[Array, "B"]
    kept: Int[Array, "B H"]
    refused: Int[Array, "B H"]  # chunks that softmax had no slot for
    keys: Float[Array, "B H R M C K"]
    values: Float[Array, "B H R M C V"]
    memory_start: Float[Array, "B H K V"]
    memory: Float[Array, "B H K V"]
    log_decay: Float[Array, "B H"]  # sum of g over the open chunk
    open_x: Float[Array, "B C D"]  # inputs of the open chunk, which decide its route
    probed: Float[Array, "B H"] | None  # sum of score differences of the chunks that commit heads
    tails_start: Streams  # convolution inputs before the open chunk
    tails: Streams  # convolution inputs before the next token


class Branches(NamedTuple):
    """Everything the two branches read, per token."""

    streams: Streams
    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    writes: Writes
    softmax_q: Float[Array, "B T Ha K"]
    softmax_k: Float[Array, "B T Ha K"]
    softmax_v: Float[Array, "B T Ha V"]
    weights: Float[Array, "B T Ha 2"] | None  # of the memory's output, of softmax's output


class ChunkRouted(nnx.Module):
    """y = W_o [ silu(W_g x) * (w_0 RMSNorm(memory read) + w_1 RMSNorm(softmax read)) ].

    Both branches share q, k, v = silu(conv(W x)): the memory with H heads, softmax with Ha heads
    cut from the same channels; without `softmax_conv` softmax cuts its own from W x. w =
    softmax(W_w q) per softmax head, or 1 and 1 without `fusion_weights`. Norms run over the value
    channels of one softmax head.
    """

    def __init__(self, config: ChunkRoutedConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        def norm(dim: int) -> RMSNorm:
            return RMSNorm(dim, eps=model.norm_eps, param_dtype=model.param_dtype)

        linear = partial(
            Linear, dtype=model.compute_dtype, param_dtype=model.param_dtype, rngs=rngs
        )
        H, Ha = config.num_heads, config.num_softmax_heads
        key_width, value_width = H * config.key_dim, H * config.value_dim
        self.config = config
        self.dim = model.dim
        self.dtype = model.compute_dtype
        self.implementation = model.implementation
        self.norm_eps = model.norm_eps
        self.inputs = build_memory(config, model, rngs=rngs)
        score = normal(rngs, (model.dim, 2 * H), model.param_dtype)  # channel 2h + operation
        self.score_weight = nnx.Param(score, axes=("embed", None))
        self.score_bias = (  # moved by the training step, not by a gradient
            None
            if config.softmax_budget is None
            else nnx.Param(jnp.zeros((H,), model.param_dtype), axes=(None,))
        )
        fusion = config.fusion_weights
        self.fusion_proj = (
            linear(key_width, 2 * Ha, axes=("heads", None), wide=True) if fusion else None
        )
        self.q_norm = norm(config.softmax_key_dim) if config.qk_norm else None
        self.k_norm = norm(config.softmax_key_dim) if config.qk_norm else None
        self.g_proj = linear(model.dim, value_width, axes=("embed", "heads"))
        self.memory_norm = norm(config.softmax_value_dim)
        self.softmax_norm = norm(config.softmax_value_dim)
        self.o_proj = linear(value_width, model.dim, axes=("heads", "embed"))

    def initial_state(
        self, batch: int, max_length: int, kv_capacity: float | None = None
    ) -> ChunkRoutedState:
        config = self.config
        capacity = config.kv_capacity if kv_capacity is None else kv_capacity
        H, C = config.num_heads, config.chunk_size
        R = config.num_softmax_heads // H
        wide = jnp.promote_types(self.dtype, jnp.float32)
        chunks = -(-max_length // C)
        slots = (batch, H, R, math.ceil(capacity * chunks) + 1, C)  # one open chunk
        memory = (batch, H, config.key_dim, config.value_dim)
        return ChunkRoutedState(
            length=jnp.zeros((batch,), jnp.int32),
            kept=jnp.zeros((batch, H), jnp.int32),
            refused=jnp.zeros((batch, H), jnp.int32),
            keys=jnp.zeros((*slots, config.softmax_key_dim), self.dtype),
            values=jnp.zeros((*slots, config.softmax_value_dim), self.dtype),
            memory_start=jnp.zeros(memory, wide),
            memory=jnp.zeros(memory, wide),
            log_decay=jnp.zeros((batch, H), wide),
            open_x=jnp.zeros((batch, C, self.dim), self.dtype),
            probed=None if config.head_probe is None else jnp.zeros((batch, H), wide),
            tails_start=self.inputs.empty_tails(batch),
            tails=self.inputs.empty_tails(batch),
        )

    def __call__(
        self, x: Float[Array, "B T D"], state: ChunkRoutedState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], ChunkRoutedState | None, Report]:
        x = x.astype(self.dtype)
        if state is None:
            return self._full(x, context)
        context.require_one_document()
        return (self._decode if x.shape[1] == 1 else self._prefill)(x, state, context)

    # ---- The three uses ----

    def _full(self, x: Array, context: Context) -> tuple[Array, None, Report]:
        config, ids = self.config, context.segment_ids
        branches = self._branches(x, None, context.positions, ids)
        valid = context.valid()
        decision = self._decide(x, valid, jnp.zeros((x.shape[0],), jnp.int32), context)
        decision, _ = self._commit(decision, None, None, context)
        mask = routing.write_mask(decision, counterfactual=config.gdn_counterfactual_grad)
        read, _ = self._remember(branches, branches.writes, mask, decision.softmax, None, ids)
        attend = partial(
            chunk_ops.attend,
            chunk_size=config.chunk_size,
            truncate_intra_grad=config.truncate_intra_softmax_grad,
            implementation=self.implementation,
        )
        seen = shard_op(attend, (HEADS, HEADS, HEADS, STATE, STATE, ROWS), HEADS)(
            branches.softmax_q,
            branches.softmax_k,
            branches.softmax_v,
            jnp.moveaxis(decision.softmax, 1, 2),
            jnp.moveaxis(routing.block_bias(decision), 1, 2),
            ids,
        )
        counted = routing.count_by_chunk(valid, config.chunk_size) > 0
        report = routing.statistics(decision, counted)
        return self._fuse(x, branches.weights, read, seen), None, report

    def _prefill(
        self, x: Array, state: ChunkRoutedState, context: Context
    ) -> tuple[Array, ChunkRoutedState, Report]:
        """Recomputes the open chunk with the new tokens after it, as a window of whole chunks.

        The window starts where the open chunk does, so that chunks line up for every row, and is
        long enough for the worst case: a row with C - 1 open tokens. The memory runs over the
        chunks this call completes, then over the one it leaves open, because both the memory
        before and inside the open chunk must be kept.
        """
        C, T = self.config.chunk_size, x.shape[1]
        N = -(-(C - 1 + T) // C)
        opened = state.length % C
        counts = context.counts()
        end = opened + counts  # of the valid tokens in the window
        open_chunk = end // C
        index = jnp.arange(N * C)

        window = jnp.pad(state.open_x, ((0, 0), (0, (N - 1) * C), (0, 0)))
        window = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(window, x, opened)
        positions = context.positions[:, :1] - opened[:, None] + index
        branches = self._branches(window, state.tails_start, positions, None)

        completed = jnp.arange(N) < open_chunk[:, None]
        first = state.length // C
        wanted = self._decide(window, index < end[:, None], first, context)
        wanted, probed = self._commit(wanted, state.probed, (first, completed), context)
        decision = routing.within_room(wanted, _room(state))
        softmax = decision.softmax & completed[..., None]
        lost = wanted.softmax & ~decision.softmax & completed[..., None]
        attend = shard_op(
            partial(chunk_ops.attend_window, implementation=self.implementation),
            (HEADS, HEADS, HEADS, STATE, ROWS, STATE, STATE, STATE),
            (HEADS, STATE, STATE, STATE),
        )
        seen, kept, keys, values = attend(
            branches.softmax_q,
            branches.softmax_k,
            branches.softmax_v,
            jnp.moveaxis(softmax, 1, 2),
            open_chunk,
            state.kept,
            state.keys,
            state.values,
        )

        settled = index < (open_chunk * C)[:, None]
        writes, mask = branches.writes.only(settled), routing.write_mask(decision)
        read, memory_start = self._remember(
            branches, writes, mask, decision.softmax, state.memory_start, None
        )

        def of_open_chunk(array: Array) -> Array:
            chunks = array.reshape(array.shape[0], N, C, *array.shape[2:])
            return jax.vmap(lambda row, n: row[jnp.minimum(n, N - 1)])(chunks, open_chunk)

        ahead = jax.tree.map(of_open_chunk, branches)
        live = (open_chunk * C)[:, None] + jnp.arange(C) < end[:, None]
        writes = ahead.writes.only(live)
        open_read, memory = self._remember(ahead, writes, None, None, memory_start, None)
        read = jnp.where(settled[..., None, None], read, jnp.tile(open_read, (1, N, 1, 1)))

        y = self._fuse(window, branches.weights, read, seen)
        y = jax.vmap(partial(jax.lax.dynamic_slice_in_dim, slice_size=T, axis=0))(y, opened)
        tails = partial(self.inputs.tails_after, state.tails_start, branches.streams)
        state = ChunkRoutedState(
            length=state.length + counts,
            kept=kept,
            refused=state.refused + lost.sum(1, dtype=jnp.int32),
            keys=keys,
            values=values,
            memory_start=memory_start,
            memory=memory,
            log_decay=writes.g.sum(1),
            open_x=of_open_chunk(window),
            probed=probed,
            tails_start=tails(open_chunk * C),
            tails=tails(end),
        )
        return y, state, routing.statistics(decision, completed)

    def _decode(
        self, x: Array, state: ChunkRoutedState, context: Context
    ) -> tuple[Array, ChunkRoutedState, Report]:
        """One token per row; the row whose chunk it completes applies that chunk's decision."""
        C = self.config.chunk_size
        offset = state.length % C
        counts = context.counts()
        active = counts > 0
        branches = self._branches(x, state.tails, context.positions, None)
        attend = shard_op(
            partial(chunk_ops.attend_open, implementation=self.implementation),
            (HEADS, HEADS, HEADS, ROWS, ROWS, STATE, STATE, STATE),
            (HEADS, STATE, STATE),
        )
        seen, keys, values = attend(
            branches.softmax_q,
            branches.softmax_k,
            branches.softmax_v,
            offset,
            active,
            state.kept,
            state.keys,
            state.values,
        )
        writes = branches.writes.only(active[:, None])
        remember = shard_op(
            partial(chunk_ops.remember_token, implementation=self.implementation),
            (HEADS, HEADS, HEADS, STATE),
            (HEADS, STATE),
        )
        read, memory = remember(branches.q, branches.k, writes, state.memory)
        log_decay = state.log_decay + writes.g[:, 0]

        write = jax.vmap(lambda rows, at, new: rows.at[at].set(new, mode="drop"))
        open_x = write(state.open_x, jnp.where(active, offset, C), x[:, 0])
        complete = active & (offset == C - 1)
        everything = jnp.ones(open_x.shape[:2], bool)
        first = state.length // C
        wanted = self._decide(open_x, everything, first, context)
        wanted, probed = self._commit(wanted, state.probed, (first, complete[:, None]), context)
        decision = routing.within_room(wanted, _room(state))
        softmax = decision.softmax[:, 0]
        refused = wanted.softmax[:, 0] & ~softmax
        decay = jnp.exp(log_decay)[..., None, None] if self.config.decay_softmax_chunks else 1
        closed = jnp.where(softmax[..., None, None], decay * state.memory_start, memory)

        def on_completion(new: Array, old: Array) -> Array:
            return jnp.where(complete.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        tails = self.inputs.tails_after(state.tails, branches.streams, counts)
        state = ChunkRoutedState(
            length=state.length + counts,
            kept=state.kept + (complete[:, None] & softmax),
            refused=state.refused + (complete[:, None] & refused),
            keys=keys,
            values=values,
            memory_start=on_completion(closed, state.memory_start),
            memory=on_completion(closed, memory),
            log_decay=on_completion(jnp.zeros_like(log_decay), log_decay),
            open_x=open_x,
            probed=probed,
            tails_start=jax.tree.map(on_completion, tails, state.tails_start),
            tails=tails,
        )
        y = self._fuse(x, branches.weights, read, seen)
        return y, state, routing.statistics(decision, complete[:, None])

    # ---- Their parts ----

    def _branches(
        self, x: Array, tails: Streams | None, positions: Array, segment_ids: Array | None
    ) -> Branches:
        config = self.config
        streams = self.inputs.project(x)
        convolved = self.inputs.convolve(streams, tails, segment_ids)
        q, k, v = convolved
        softmax = convolved if config.softmax_conv else streams
        weights = None
        if self.fusion_proj is not None:
            weights = self.fusion_proj(q)
            weights = jax.nn.softmax(weights.reshape(*weights.shape[:2], -1, 2))

        def heads(x: Array, count: int) -> Array:
            return x.reshape(*x.shape[:2], count, -1)

        def softmax_heads(x: Array, norm: RMSNorm | None) -> Array:
            x = heads(x, config.num_softmax_heads)
            x = x if norm is None else norm(x)
            return x if config.rope_theta is None else rotate(x, positions, config.rope_theta)

        return Branches(
            streams=streams,
            q=l2_normalise(heads(q, config.num_heads)),
            k=l2_normalise(heads(k, config.num_heads)),
            writes=self.inputs.writes(x, heads(v, config.num_heads)),
            softmax_q=softmax_heads(softmax.q, self.q_norm),
            softmax_k=softmax_heads(softmax.k, self.k_norm),
            softmax_v=heads(softmax.v, config.num_softmax_heads),
            weights=weights,
        )

    def _decide(
        self,
        x: Float[Array, "B T D"],
        valid: Bool[Array, "B T"],
        first_chunk: Int[Array, "B"],
        context: Context,
    ) -> routing.Decision:
        """Routes the chunks of x, the first of which is chunk `first_chunk` of its row.

        `context.routes` names chunks by their number in the row; chunks it does not reach are
        decided by the router.
        """
        means = routing.chunk_means(x, valid, self.config.chunk_size)
        # Full precision on every backend: a coarser product would flip near-ties between modes.
        scores = jnp.matmul(
            means, upcast(self.score_weight[...]), precision=jax.lax.Precision.HIGHEST
        )
        scores = scores.reshape(*scores.shape[:2], -1, 2)
        chosen: dict[str, Any] = {}
        if context.routes is not None:
            chunk = first_chunk[:, None] + jnp.arange(means.shape[1])
            last = context.routes.shape[1] - 1
            index = jnp.minimum(chunk, last)[..., None]
            chosen["forced"] = jnp.take_along_axis(context.routes, index, 1)
            chosen["is_forced"] = (chunk <= last)[..., None]
        if self.config.sampler == "gumbel":
            chosen["rng"] = context.rng
        bias = self.config.softmax_bias if context.softmax_bias is None else context.softmax_bias
        if self.score_bias is not None:
            bias += jax.lax.stop_gradient(self.score_bias[...])
        return routing.decide(scores, bias=bias, temperature=context.temperature, **chosen)

    def _commit(
        self,
        decision: routing.Decision,
        probed: Float[Array, "B H"] | None,
        window: tuple[Int[Array, "B"], Bool[Array, "B N"]] | None,
        context: Context,
    ) -> tuple[routing.Decision, Float[Array, "B H"] | None]:
        """Lets each document's first chunks decide for the rest; and the sum they do it by.

        With a state, `probed` is that sum over the chunks before, and `window` says which the first
        of these chunks is and which are complete.
        """
        probe = self.config.head_probe
        if probe is None:
            return decision, None
        difference = decision.scores[..., routing.SOFTMAX] - decision.scores[..., routing.RECURRENT]
        if probed is None or window is None:
            number, total = chunk_ops.probe_documents(
                difference, context.segment_ids, self.config.chunk_size, probe.chunks
            )
        else:
            first_chunk, complete = window
            number = first_chunk[:, None] + jnp.arange(difference.shape[1])
            asked = (number < probe.chunks) & complete
            probed = probed + jnp.sum(jnp.where(asked[..., None], difference, 0), 1)
            total = jnp.broadcast_to(probed[:, None], difference.shape)
        free = number < probe.chunks
        if context.routes is not None:
            free |= number < context.routes.shape[1]
        mean = total / probe.chunks
        return routing.commit_heads(decision, mean, probe.margin, free[..., None]), probed

    def _remember(
        self,
        branches: Branches,
        writes: Writes,
        write_mask: Array | None,
        softmax: Array | None,
        memory: Array | None,
        segment_ids: Array | None,
    ) -> tuple[Array, Array]:
        op = partial(
            chunk_ops.remember,
            chunk_size=self.config.chunk_size,
            decay_softmax_chunks=self.config.decay_softmax_chunks,
            implementation=self.implementation,
        )
        axes = (HEADS, HEADS, HEADS, HEADS, HEADS, STATE, ROWS)
        run = shard_op(op, axes, (HEADS, STATE))
        return run(branches.q, branches.k, writes, write_mask, softmax, memory, segment_ids)

    def _fuse(
        self, x: Array, weights: Array | None, read: Array, seen: Array
    ) -> Float[Array, "B T D"]:
        weight = (self.memory_norm.weight[...], self.softmax_norm.weight[...])
        gate = self.g_proj(x)
        y = chunk_ops.fuse(read.reshape(seen.shape), seen, weights, gate, *weight, self.norm_eps)
        return self.o_proj(y)


def _room(state: ChunkRoutedState) -> Int[Array, "B H"]:
    """Chunks that each head may still keep: one slot stays for the open chunk."""
    return state.keys.shape[3] - 1 - state.kept
