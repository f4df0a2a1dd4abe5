"""The language model: embedding, a stack of blocks as data, final norm, tied or untied head.

Equal repeats of the layer pattern share one traced body (`jax.lax.scan` over stacked parameters);
`scan_blocks=False` unrolls the same parameters to the same results. With a state blocks always run
one by one, because a scan would copy every block's cache for every token. Everything that changes
from call to call, recurrent state and random keys included, is an argument and a result.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jhybrid.block_groups import Group, find_groups
from jhybrid.config import (
    BlockConfig,
    ChunkRoutedConfig,
    HeadRoutedConfig,
    ModelConfig,
    SwiGLUConfig,
)
from jhybrid.layers import LayerNorm, RMSNorm, SwiGLU, normal
from jhybrid.mixers import Context, Report, State, build_mixer
from jhybrid.parameters import flatten, matrix_paths
from jhybrid.sharding import constrain
from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.dispatch import KEPT

NORMS = {"rms": RMSNorm, "layer": LayerNorm}
CHANNEL_MIXERS = {SwiGLUConfig: SwiGLU}

# What the backward pass keeps of a block; the rest is computed again. None: no remat at all.
_PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_OPS = jax.checkpoint_policies.save_only_these_names(KEPT)
REMAT: Mapping[str, Callable | None] = {
    "none": None,
    # the block's input only
    "block": jax.checkpoint_policies.nothing_saveable,
    # and the results of the projections (matrix products without a batch dimension)
    "dots": _PRODUCTS,
    # and what the mixers' ops returned and keep for themselves (attention, delta rules)
    "mixer_outputs": _OPS,
    # and both: no matrix product runs twice, all that lies between them does
    "dots_and_mixer_outputs": jax.checkpoint_policies.save_from_both_policies(_PRODUCTS, _OPS),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """hidden: after the final norm. state: by block; None if none was given. reports: by
    `blocks.{index}`, of the mixers that report anything."""

    hidden: Float[Array, "B T D"]
    state: State
    reports: dict[str, Report]


class Block(nnx.Module):
    """x += mixer(norm(x)); then, if there is one, x += channel_mixer(norm(x))."""

    def __init__(self, config: BlockConfig, model: ModelConfig, *, rngs: nnx.Rngs):
        self.mixer_norm = _norm(config.norm, model)
        self.mixer = build_mixer(config.mixer, model, rngs=rngs)
        channels = config.channel_mixer
        dtypes = {"dtype": model.compute_dtype, "param_dtype": model.param_dtype}
        self.channel_norm = None if channels is None else _norm(config.norm, model)
        self.channel_mixer = (
            None
            if channels is None
            else CHANNEL_MIXERS[type(channels)](channels, model.dim, rngs=rngs, **dtypes)
        )

    def __call__(
        self, x: Float[Array, "B T D"], state: State, context: Context
    ) -> tuple[Float[Array, "B T D"], State, Report]:
        y, state, report = self.mixer(self.mixer_norm(x), state, context)
        x = constrain(x + y, "batch", "time", None)
        if self.channel_norm is not None and self.channel_mixer is not None:
            x = constrain(x + self.channel_mixer(self.channel_norm(x)), "batch", "time", None)
        return x, state, report


class HybridLM(nnx.Module):
    """A decoder-only language model whose token mixers differ from block to block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stacked = True  # False: every block is a group of its own
        shape, dtype = (config.vocab_size, config.dim), config.param_dtype
        self.embed = nnx.Param(normal(rngs, shape, dtype), axes=("vocab", "embed"))
        self.embed_norm = _norm(config.blocks[0].norm, config) if config.embed_norm else None
        self.groups = nnx.List(
            nnx.List(_stacked(block, config, group.repeats, rngs) for block in group.pattern)
            for group in find_groups(config.blocks)
        )
        self.norm = _norm(config.blocks[-1].norm, config)
        # Logits of the rising lower bounds of forget gates; every block has a row.
        width = config.gate_width
        self.lower_bounds = (
            None
            if width is None
            else nnx.Param(jnp.zeros((len(config.blocks), width), dtype), axes=("layers", "heads"))
        )
        self.head = (
            None
            if config.tied_head
            else nnx.Param(normal(rngs, shape[::-1], dtype), axes=("embed", "vocab"))
        )

    @property
    def layout(self) -> tuple[Group, ...]:
        """Which blocks each entry of `groups` holds."""
        if self.stacked:
            return find_groups(self.config.blocks)
        return tuple(Group((block,), 1, i) for i, block in enumerate(self.config.blocks))

    def unstacked(self) -> "HybridLM":
        """The same model with every block's parameters in arrays of their own.

        For loops over tokens: what a step would cut out of the stacks is cut out once.
        """
        blocks = []
        for group, stacks in zip(self.layout, self.groups, strict=True):
            split = [_split_stack(stack, group.repeats) for stack in stacks]
            blocks += [nnx.List([block]) for repeat in zip(*split, strict=True) for block in repeat]
        model = nnx.merge(*nnx.split(self))
        model.stacked, model.groups = False, nnx.List(blocks)
        return model

    def initial_state(self, batch: int, max_length: int) -> tuple[State, ...]:
        """The state of each block before the first token of `batch` rows of `max_length` tokens."""
        mixers = [
            block.mixer
            for group, blocks in zip(self.layout, self.groups, strict=True)
            for _ in range(group.repeats)
            for block in blocks
        ]

        def room(block: BlockConfig) -> dict[str, float]:
            """The block's own: blocks of one stack share all other settings."""
            if not isinstance(block.mixer, ChunkRoutedConfig | HeadRoutedConfig):
                return {}
            return {"kv_capacity": block.mixer.kv_capacity}

        return tuple(
            mixer.initial_state(batch, max_length, **room(block))
            for mixer, block in zip(mixers, self.config.blocks, strict=True)
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        context: Context,
        state: tuple[State, ...] | None = None,
    ) -> Output:
        """Without `state` a full sequence; with it a prefill or, for T = 1, a decoding step."""
        x = self.embed[...][tokens].astype(self.config.compute_dtype)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        x = constrain(x, "batch", "time", None)
        bounds = None if self.lower_bounds is None else rising_bounds(self.lower_bounds[...])
        after, reports = [], {}
        for group, blocks in zip(self.layout, self.groups, strict=True):
            before = None if state is None else state[group.start : group.stop]
            x, states, group_reports = self._run(group, blocks, x, before, context, bounds)
            after += states
            for block, report in enumerate(group_reports, group.start):
                if report:
                    reports[f"blocks.{block}"] = report
        return Output(self.norm(x), None if state is None else tuple(after), reports)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... vocab"]:
        """fp32 logits; the product is taken in the compute dtype and accumulated in fp32."""
        dtype = jnp.dtype(self.config.compute_dtype)
        return logits_of(hidden.astype(dtype), self.head_weight.astype(dtype))

    @property
    def head_weight(self) -> Float[Array, "D vocab"]:
        """The head's matrix, or the embedding's transpose, in `param_dtype`."""
        return self.embed[...].T if self.head is None else self.head[...]

    def _run(
        self,
        group: Group,
        blocks: nnx.List,
        x: Float[Array, "B T D"],
        states: tuple[State, ...] | None,
        context: Context,
        bounds: Float[Array, "L F"] | None,
    ) -> tuple[Float[Array, "B T D"], list[State], list[Report]]:
        """All repeats of one group; states and reports by block."""
        graphdefs, params = zip(*(nnx.split(block) for block in blocks), strict=True)
        scan = self.config.scan_blocks and group.repeats > 1 and states is None
        policy = REMAT[self.config.remat] if states is None else None

        def run_block(position: int):
            def run(params, x, state, context):
                return nnx.merge(graphdefs[position], params)(x, state, context)

            if policy is None:
                return run
            # inside a scan nothing can be merged with the forward pass, outside it must not be
            return jax.checkpoint(run, policy=policy, prevent_cse=not scan)

        def run_repeat(x, params, states, repeat):
            results = []
            for position in range(len(blocks)):
                index = group.block(repeat, position)
                own = dataclasses.replace(
                    context,
                    rng=None if context.rng is None else jax.random.fold_in(context.rng, index),
                    routes=_routes_of(context, index),
                    depth=jnp.asarray(index / len(self.config.blocks), jnp.float32),
                    lower_bound=None if bounds is None else bounds[index],
                )
                x, *rest = run_block(position)(params[position], x, states[position], own)
                results.append(rest)
            states, reports = zip(*results, strict=True)
            return x, states, reports

        nothing = (None,) * len(blocks)
        if scan:

            def body(x, slices):
                params, repeat = slices
                x, _, reports = run_repeat(x, params, nothing, repeat)
                return x, reports

            x, stacked = jax.lax.scan(body, x, (params, jnp.arange(group.repeats)))
            by_repeat = [jax.tree.map(lambda v, r=r: v[r], stacked) for r in range(group.repeats)]
            return x, [], [report for reports in by_repeat for report in reports]
        after, reports = [], []
        for repeat, own_params in enumerate(_unstacked(params, group.repeats)):
            first = repeat * len(blocks)
            before = nothing if states is None else states[first : first + len(blocks)]
            x, new_states, new_reports = run_repeat(x, own_params, before, repeat)
            after += new_states
            reports += new_reports
        return x, after, reports


def logits_of(
    hidden: Float[Array, "... D"], head: Float[Array, "D vocab"]
) -> Float[Array, "... vocab"]:
    """The product of both, in fp32 or wider."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.matmul(hidden, head, preferred_element_type=wide)


def _routes_of(context: Context, block: int | Int[Array, ""]) -> Bool[Array, "B N H"] | None:
    """One block's decisions, where they are given by block; those of all blocks otherwise."""
    routes = context.routes
    return routes if routes is None or routes.ndim == 3 else routes[block]


def rising_bounds(logits: Float[Array, "L F"]) -> Float[Array, "L F"]:
    """Lower bounds of each block's forget gates: 0 in the first, rising by a softmax over blocks.

    HGRN, arXiv 2311.04823, equation 4; fp32.
    """
    shares = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=0)
    return jnp.cumsum(shares, axis=0) - shares[0]


def training_context(batch: Mapping[str, Int[Array, "B T"]]) -> Context:
    """The context of a batch of packed documents: `positions`, `segment_ids`, perhaps `prompt`."""
    return Context(
        positions=batch["positions"],
        segment_ids=batch["segment_ids"],
        prompt=batch["prompt"] > 0 if "prompt" in batch else None,
    )


def parameter_count(config: ModelConfig) -> int:
    """Exact number of parameters, without allocating any."""
    model = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def flops_per_token(
    config: ModelConfig, sequence_length: int, *, softmax_fraction: float = 0.5
) -> float:
    """Floating-point operations of training on one token: forward, and twice that backward.

        3 * (2 * P + sum over blocks of M)

    P: parameters of every matrix and convolution, each used once per token: all parameters of two
    or more dimensions, the embedding only as a tied head. M, the mixer without its projections, for
    T = sequence_length tokens from the start of one document, averaged over them: each config's
    `mixing_flops`.

    What remat computes again, and what an implementation adds (chunked forms, masked blocks), is
    work but not counted. `softmax_fraction` is the share of (chunk, head) pairs sent to softmax.
    """
    params = nnx.state(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))), nnx.Param)
    sizes = {path: leaf.size for path, leaf in flatten(params).items()}
    used = matrix_paths(params) - (set() if config.tied_head else {"embed"})
    matrices = sum(sizes[path] for path in used)
    mixing = sum(
        block.mixer.mixing_flops(sequence_length, softmax_fraction) for block in config.blocks
    )
    return 3 * (2 * matrices + mixing)


def _norm(kind: str, model: ModelConfig) -> RMSNorm | LayerNorm:
    return NORMS[kind](model.dim, eps=model.norm_eps, param_dtype=model.param_dtype)


def _stacked(config: BlockConfig, model: ModelConfig, repeats: int, rngs: nnx.Rngs) -> Block:
    """A block whose parameters hold `repeats` independent initialisations on a `layers` axis."""

    def init(key: Array) -> nnx.State:
        return nnx.state(Block(config, model, rngs=nnx.Rngs(key)))

    def name_layers(variable: nnx.Variable) -> nnx.Variable:
        variable = variable.replace(variable.get_value())
        variable.set_metadata(axes=("layers", *variable.get_metadata()["axes"]))
        return variable

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Block(config, model, rngs=nnx.Rngs(0))))
    state = jax.vmap(init)(jax.random.split(rngs.params(), repeats))
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    return nnx.merge(graphdef, jax.tree.map(name_layers, state, is_leaf=is_variable))


def _split_stack(stack: Block, repeats: int) -> list[Block]:
    """A stack of blocks as stacks of one."""
    graphdef, params = nnx.split(stack)
    leaves, structure = jax.tree.flatten(params)
    pieces = [jax.lax.split(leaf, (1,) * repeats) for leaf in leaves]
    return [nnx.merge(graphdef, structure.unflatten(one)) for one in zip(*pieces, strict=True)]


def _unstacked(tree: Any, repeats: int) -> list:
    """Slices of every array along axis 0, by one split, whose gradient is one concatenation."""
    leaves, structure = jax.tree.flatten(tree)
    pieces = [jax.lax.split(leaf, (1,) * repeats) for leaf in leaves]
    return [
        structure.unflatten([jax.lax.squeeze(piece[i], (0,)) for piece in pieces])
        for i in range(repeats)
    ]
