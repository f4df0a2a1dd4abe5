"""Head-routed attention: each key/value head of each sample attends fully or sparsely.

Elastic Attention, arXiv 2601.17367 (released code: LCM-Lab/Elastic-Attention). A small router per
layer reads the sample's pooled keys and decides once; the backbone's own weights stay as they are.
Where paper and code differ, this is what the code was run with, and boundary pooling (the paper's)
in training as in inference.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid import routing
from jhybrid.config import HeadRoutedConfig, ModelConfig
from jhybrid.layers import Linear, upcast
from jhybrid.mixers import head_routed_ops as ops
from jhybrid.mixers.context import Context, Report
from jhybrid.mixers.head_masks import MASKS
from jhybrid.mixers.head_routed_ops import HeadRoutedState
from jhybrid.mixers.softmax import Softmax
from jhybrid.sharding import shard_op
from pallas_kernels.array_types import Array, Bool, Float, Int

WIDENING = 4  # hidden width of the router's perceptrons, in head dims
FULL = 1  # the router's output for full attention; 0 is the sparse mode

HEADS, CACHE, ROWS = ("batch", None, "heads"), ("batch", "heads"), ("batch",)


class HeadRouter(nnx.Module):
    """Two scores (sparse, full) from a pooled key: task perceptron, then routing perceptron.

    One router for all heads of a layer: K -> 4K -> K -> 4K -> K -> 2, SiLU inside each of the two,
    none between them; 263,682 parameters for K = 128. Computed and kept in fp32.
    """

    def __init__(self, head_dim: int, model: ModelConfig, *, rngs: nnx.Rngs):
        wide = str(jnp.promote_types(model.param_dtype, jnp.float32))
        linear = partial(
            Linear, axes=(None, None), dtype=wide, param_dtype=wide, bias=True, rngs=rngs
        )
        self.task_in = linear(head_dim, WIDENING * head_dim)
        self.task_out = linear(WIDENING * head_dim, head_dim)
        self.route_in = linear(head_dim, WIDENING * head_dim)
        self.route_hidden = linear(WIDENING * head_dim, head_dim)
        self.route_out = linear(head_dim, 2)

    def __call__(self, pooled: Float[Array, "*n K"]) -> Float[Array, "*n 2"]:
        # full precision on every backend: a coarser product would flip near-ties
        with jax.default_matmul_precision("highest"):
            task = self.task_out(jax.nn.silu(self.task_in(pooled)))
            hidden = jax.nn.silu(self.route_hidden(jax.nn.silu(self.route_in(task))))
            return self.route_out(hidden)


class HeadRouted(Softmax):
    """Softmax attention whose key/value heads are full or sparse, each sample's by its own keys.

    With a random key in the context (training) the decision is drawn and the router gets a
    gradient: o = o_c + (p - sg(p)) sg(o_full - o_sparse), where o_c is attention by the decision m
    and p the relaxed one. That is m o_full + (1 - m) o_sparse in value and in every gradient, for
    the cost of one forward launch more; no backward runs for what was not chosen.

    Without a router the decision is a setting or a parameter of each head, the same for all
    samples (`head_masks`). In training a parameter's weight w mixes both modes, each launched and
    differentiated: o = w o_full + (1 - w) o_sparse.

    `context.routes` forces decisions, [B, 1, G], or in packed rows [B, N, G] by the block in which
    a document starts. With a state the decision is made when a row's first tokens arrive, which
    must then be its whole prompt, and holds until the state is dropped: through every later turn
    of a conversation as well.
    """

    def __init__(self, config: HeadRoutedConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config.attention, model, rngs=rngs)
        self.routed = config
        heads, width = config.attention.num_kv_heads, config.attention.head_dim
        routes = config.route == "router"
        self.router = HeadRouter(width, model, rngs=rngs) if routes else None
        mask = MASKS.get(config.route)
        self.mask = None if mask is None else mask(heads, model, rngs=rngs)

    def initial_state(
        self, batch: int, max_length: int, kv_capacity: float | None = None
    ) -> HeadRoutedState:
        capacity = self.routed.kv_capacity if kv_capacity is None else kv_capacity
        return ops.initial_state(self.routed, batch, max_length, self.dtype, capacity)

    def __call__(
        self, x: Float[Array, "B T D"], state: HeadRoutedState | None, context: Context
    ) -> tuple[Float[Array, "B T D"], HeadRoutedState | None, Report]:
        q, k, v = self.project(x)
        documents = self._documents(context)
        if state is not None and context.decided:
            decision = routing.fixed(state.full[:, None].astype(jnp.float32), 0.5, mixes=False)
            counted = jnp.ones((x.shape[0], 1), bool)
        else:
            decision, counted = self._decide(k, documents, context)
        q, k = self.rotate(q, context), self.rotate(k, context)
        if state is None:
            o = self._full(q, k, v, decision, documents, context)
        else:
            context.require_one_document()
            o, state, decision = self._continue(q, k, v, decision, state, context)
        report = routing.statistics(decision, counted)
        report["gate"] = routing.gate(decision)
        return self.o_proj(o.reshape(*x.shape[:2], -1)), state, report

    def _documents(self, context: Context) -> Int[Array, "B T"] | None:
        """The block in which each token's document starts; None where rows are documents."""
        if context.segment_ids is None:
            return None
        return ops.document_blocks(context.segment_ids, self.routed.block_size)

    def _decide(
        self, k: Float[Array, "B T G K"], documents: Int[Array, "B T"] | None, context: Context
    ) -> tuple[routing.Decision, Bool[Array, "B N"]]:
        """By document, N = 1 where rows are documents; and which of the N there are."""
        pool = self.routed.pool_tokens
        if documents is None and context.prompt is None:
            pooled, counted = ops.row_means(k, context.counts(), pool_tokens=pool)
        else:
            pooled, counted = ops.boundary_means(
                upcast(k),
                context.router_tokens(),
                documents,
                block_size=self.routed.block_size,
                pool_tokens=pool,
            )
        rng, temperature, told = context.rng, context.temperature, context.softmax_bias
        if self.router is None:
            weight = jnp.broadcast_to(self._weight(rng), pooled.shape[:3])
            weight = weight if told is None else weight + told
            threshold, mixes = self.routed.route_threshold, rng is not None
            decision = routing.fixed(weight, threshold, mixes=mixes, forced=context.routes)
            return decision, counted
        scores = self.router(pooled)[..., ::-1]  # `routing` has the full mode first
        own = self.routed.softmax_bias
        decision = routing.decide(
            scores,
            bias=own if told is None else told,
            rng=rng,
            temperature=temperature,
            forced=context.routes,
        )
        return decision, counted

    def _weight(self, rng: Array | None) -> Float[Array, "G"]:
        """Of the full mode in each head, for every sample."""
        if self.mask is not None:
            return self.mask.weight(rng)
        full = self.routed.route == "retrieval"
        return jnp.full(self.routed.attention.num_kv_heads, full, jnp.float32)

    def _full(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        decision: routing.Decision,
        documents: Int[Array, "B T"] | None,
        context: Context,
    ) -> Float[Array, "B T H K"]:
        route = ops.by_query_block(decision.softmax, documents, self.routed.block_size)
        attend = partial(ops.attend, config=self.routed, implementation=self.implementation)
        axes = (HEADS, HEADS, HEADS, CACHE, ROWS)
        ids = context.segment_ids
        if ids is None and context.lengths is not None:
            ids = ops.hide_padding(context.valid(), self.routed)
        o = shard_op(attend, axes, HEADS)(q, k, v, route, ids)
        if context.rng is None or (self.router is None and self.mask is None):
            return o
        if self.mask is not None:
            other = shard_op(attend, axes, HEADS)(q, k, v, ~route, ids)
            weight = ops.by_token(routing.gate(decision), documents, q.shape[2])[..., None]
            full = ops.by_token(decision.softmax, documents, q.shape[2])[..., None]
            retrieval, sparse = jnp.where(full, o, other), jnp.where(full, other, o)
            return sparse + weight.astype(o.dtype) * (retrieval - sparse)
        fixed = map(jax.lax.stop_gradient, (q, k, v))
        other = shard_op(attend, axes, HEADS)(*fixed, ~route, ids)
        slope = ops.by_token(decision.slope[..., routing.SOFTMAX], documents, q.shape[2])
        full = ops.by_token(decision.softmax, documents, q.shape[2])
        gap = jax.lax.stop_gradient(jnp.where(full[..., None], o - other, other - o))
        return o + slope[..., None].astype(o.dtype) * gap

    def _continue(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        decision: routing.Decision,
        state: HeadRoutedState,
        context: Context,
    ) -> tuple[Float[Array, "B T H K"], HeadRoutedState, routing.Decision]:
        counts = context.counts()
        full, refused = decision.softmax[:, 0], jnp.zeros_like(decision.softmax[:, 0])
        if self.routed.trims:
            room = jnp.cumsum(full, 1) <= state.keys.shape[1]
            full, refused = full & room, full & ~room
        starts = ((state.length == 0) & (counts > 0))[:, None]
        full = jnp.where(starts, full, state.full)
        # one device must see all heads of a row where fewer slots than heads are shared among them
        heads = "heads" if state.keys.shape[1] == k.shape[2] else None
        tokens, cache = ("batch", None, heads), ("batch", heads)
        op = shard_op(
            partial(ops.extend, config=self.routed, implementation=self.implementation),
            (tokens, tokens, tokens, cache, ROWS, ROWS, cache, cache),
            (tokens, cache, cache),
        )
        whole = state.keys, state.values
        o, (keys, values), recent = op(q, k, v, full, state.length, counts, whole, state.recent)
        refused = jnp.where(starts, refused, state.refused)
        state = HeadRoutedState(state.length + counts, full, refused, keys, values, recent)
        return o, state, decision._replace(softmax=full[:, None])
