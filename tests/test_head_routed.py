"""Head routing: what decides, what each head then sees, and what the router learns from it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, rms
from flax import nnx
from mixer_cases import build, by_name, inputs, model_with, positions

from jhybrid import mixers, routing
from jhybrid.config import HeadRoutedConfig, MeshConfig, SoftmaxConfig
from jhybrid.errors import UserError
from jhybrid.mixers import Context, head_routed_ops
from jhybrid.mixers.head_routed import HeadRouter
from jhybrid.sharding import make_mesh
from pallas_kernels import BlockMask, block_sparse_attention, xattention_select

BLOCK, LENGTH, G = 4, 27, 2  # six blocks and a part; a query sees 1 + 2 of them when sparse
ATTENTION = SoftmaxConfig(num_heads=4, num_kv_heads=G, head_dim=8, qk_norm=True)
FA_SSA = HeadRoutedConfig(
    attention=ATTENTION, block_size=BLOCK, local_blocks=2, stride=2, threshold=0.6, pool_tokens=3
)
FA_XA = dataclasses.replace(FA_SSA, mode="FA-XA")
XA_SSA = dataclasses.replace(FA_SSA, mode="XA-SSA")
every_mode = pytest.mark.parametrize("config", [FA_SSA, FA_XA, XA_SSA], ids=lambda c: c.mode)
pytestmark = pytest.mark.usefixtures("float64", "quick_compile")


def decided(routes):
    """Routes by row as the context has them."""
    return jnp.asarray(routes, bool)[:, None]


def with_routes(x, routes, **context):
    return positions(x, routes=decided(routes), **context)


ROUTES = np.array([[1, 0], [0, 1], [1, 1], [0, 0]])


# ---- What decides ----


def test_the_router_has_the_published_size():
    model = model_with(FA_SSA, "bfloat16")
    router = HeadRouter(128, model, rngs=nnx.Rngs(0))
    params = by_name(nnx.state(router))
    assert sum(value.size for value in params.values()) == 263_682
    assert {value.dtype.name for value in params.values()} == {"float32"}
    assert router(jnp.zeros((1, 128), "bfloat16")).dtype == jnp.float32
    matrices = [value for value in params.values() if value.ndim == 2]
    assert np.std(np.concatenate([np.ravel(m) for m in matrices])) == pytest.approx(0.02, rel=0.01)
    assert all(not value.any() for name, value in params.items() if name.endswith("bias"))


def test_the_router_is_its_formula():
    router = HeadRouter(8, model_with(FA_SSA, "float64"), rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    for part in ("task_in", "task_out", "route_in", "route_hidden", "route_out"):
        linear = getattr(router, part)
        linear.weight[...] = jnp.asarray(random.normal(size=linear.weight.shape))
        linear.bias[...] = jnp.asarray(random.normal(size=linear.bias.shape))

    def apply(part, x):
        linear = getattr(router, part)
        return x @ np.asarray(linear.weight[...]) + np.asarray(linear.bias[...])

    def silu(x):
        return x / (1 + np.exp(-x))

    x = random.normal(size=(2, 3, 8))
    task = apply("task_out", silu(apply("task_in", x)))
    hidden = silu(apply("route_hidden", silu(apply("route_in", task))))
    assert_close(router(jnp.asarray(x)), apply("route_out", hidden), 1e-12)


def mean_of_ends(vectors, n):
    """The published pooling: the mean of both slices together."""
    return (
        np.concatenate([vectors[:n], vectors[-n:]]).mean(0) if len(vectors) else 0 * vectors.sum(0)
    )


def test_pooling_takes_both_ends_of_what_counts_in_each_document():
    k = np.random.default_rng(1).normal(size=(2, 32, G, 8))
    segment_ids = np.repeat([[0] * 11 + [-1] + [1] * 16 + [2] * 4, [7] * 2 + [-1] * 30], 1, axis=0)
    counted = segment_ids >= 0
    counted[0, 8:11] = False  # an answer
    documents = head_routed_ops.document_blocks(jnp.asarray(segment_ids), BLOCK)
    pooled, some = head_routed_ops.boundary_means(
        jnp.asarray(k), jnp.asarray(counted), documents, block_size=BLOCK, pool_tokens=3
    )
    expected = np.zeros((2, 8, G, 8))
    spans = {(0, 0): (0, 8), (0, 3): (12, 28), (0, 7): (28, 32), (1, 0): (0, 2)}
    for (row, block), (start, stop) in spans.items():
        expected[row, block] = mean_of_ends(k[row, start:stop], 3)
    assert_close(pooled, expected, 1e-12)
    assert {tuple(place) for place in np.argwhere(some)} == set(spans)


def test_pooling_of_rows_leaves_their_padding_out():
    k = inputs(LENGTH, batch=3).reshape(3, LENGTH, 3, 8)
    lengths = np.array([LENGTH, 5, 0])
    counted = np.arange(LENGTH) < lengths[:, None]
    pooled, some = head_routed_ops.boundary_means(
        k, jnp.asarray(counted), None, block_size=BLOCK, pool_tokens=4
    )
    expected = [mean_of_ends(np.asarray(row)[:n], 4) for row, n in zip(k, lengths, strict=True)]
    assert_close(pooled[:, 0], np.stack(expected), 1e-12)
    np.testing.assert_array_equal(some[:, 0], lengths > 0)


@pytest.mark.parametrize("pool", [1, 4, LENGTH, LENGTH + 3])
def test_pooling_reads_only_the_ends_of_rows_that_are_documents(pool):
    lengths = np.array([LENGTH, LENGTH - 1, 5, 1, 0])
    k = inputs(LENGTH, batch=5).reshape(5, LENGTH, 3, 8)
    pooled, some = head_routed_ops.row_means(k, jnp.asarray(lengths), pool_tokens=pool)
    expected = [mean_of_ends(np.asarray(row)[:n], pool) for row, n in zip(k, lengths, strict=True)]
    assert_close(pooled[:, 0], np.stack(expected), 1e-12)
    np.testing.assert_array_equal(some[:, 0], lengths > 0)
    shapes = [
        value.aval.shape
        for equation in jax.make_jaxpr(lambda k, n: head_routed_ops.row_means(k, n, pool_tokens=3))(
            jnp.zeros((1, 1000, 3, 8)), jnp.asarray([900])
        ).eqns
        for value in equation.outvars
    ]
    assert shapes and max(map(math.prod, shapes)) <= 3 * 3 * 8


def test_the_second_output_of_the_router_is_full_attention():
    case = build(FA_SSA)
    x = inputs(LENGTH, batch=4)
    for winner in (0, 1):
        bias = jnp.zeros(2).at[winner].set(1e3)
        sure = case.with_params(lambda n, p, b=bias: b if n == "router.route_out.bias" else p)
        report = sure(x, None, positions(x))[2]
        np.testing.assert_array_equal(report["softmax_fraction"], winner)
        np.testing.assert_array_equal(report["decisions"], np.full((4, 1, G), bool(winner)))


def test_a_bias_moves_heads_whose_scores_are_close_to_the_other_mode():
    x = inputs(LENGTH, batch=4)
    scores = build(FA_SSA)(x, None, positions(x))[2]["scores"]
    margin = np.asarray(scores[..., 0] - scores[..., 1])
    bias = -float(np.median(margin))
    case = build(dataclasses.replace(FA_SSA, softmax_bias=bias))
    decisions = case(x, None, positions(x))[2]["decisions"]
    np.testing.assert_array_equal(decisions, margin + bias >= 0)
    assert 0 < decisions.sum() < decisions.size
    told = case(x, None, positions(x, softmax_bias=jnp.float32(1e3)))[2]
    np.testing.assert_array_equal(told["softmax_fraction"], 1)


def test_tokens_in_the_middle_decide_nothing():
    case, x = build(FA_SSA), inputs(LENGTH)
    changed = x.at[:, 3:-3].add(1.0)
    before, after = (case(rows, None, positions(rows))[2]["scores"] for rows in (x, changed))
    assert_close(after, before, 1e-12)
    ends = case(x.at[:, 2].add(1.0), None, positions(x))[2]["scores"]
    assert rms(ends - before) > 1e-3


def test_the_gate_is_exactly_zero_or_one_and_has_the_slope_of_the_relaxed_decision():
    case, x = build(FA_SSA), inputs(LENGTH, batch=16)
    context = positions(x, rng=jax.random.key(3), temperature=jnp.float64(1.25))
    report = case(x, None, context)[2]
    assert set(np.unique(report["gate"])) == {0.0, 1.0}
    noise = jax.random.gumbel(jax.random.key(3), report["scores"].shape, "float64")

    def gate_sum(scores):
        decision = routing.decide(scores, rng=context.rng, temperature=context.temperature)
        return (decision.softmax + decision.slope[..., routing.SOFTMAX]).sum()

    def relaxed_sum(scores):
        return jax.nn.softmax((scores + noise) / 1.25)[..., 0].sum()

    slope = jax.grad(gate_sum)(report["scores"])
    assert_close(slope, jax.grad(relaxed_sum)(report["scores"]), 1e-12)


# ---- What heads see ----


def plain_attention(config, mixer, x, context, kind):
    """Every head by one kind of mask, from the mixer's own projections."""
    q, k, v = mixer.project(x)
    q, k = mixer.rotate(q, context), mixer.rotate(k, context)
    masks = {
        "FA": lambda: BlockMask.causal(),
        "SSA": lambda: BlockMask.streaming(1, 2, BLOCK),
        "XA": lambda: BlockMask.from_blocks(
            xattention_select(
                q, k, block_size=BLOCK, stride=2, threshold=0.6, segment_ids=context.segment_ids
            ),
            BLOCK,
        ),
    }
    ids = context.segment_ids
    return block_sparse_attention(
        q, k, v, masks[kind](), segment_ids=ids, implementation="reference"
    )[0]


def two_branches(config, mixer, x, context, gates):
    """m O_retrieval + (1 - m) O_sparse with both branches differentiated; gates [B, T, G]."""
    retrieval, sparse = (
        plain_attention(config, mixer, x, context, kind) for kind in config.mode.split("-")
    )
    m = jnp.repeat(gates, 2, 2)[..., None]
    return mixer.o_proj((m * retrieval + (1 - m) * sparse).reshape(*x.shape[:2], -1))


def packed():
    """Two rows of 32 tokens with three documents and padding; routes by the block they start in."""
    ids = np.full((2, 32), -1)
    ids[0, :11], ids[0, 12:28], ids[1, :30] = 0, 1, 2
    starts = np.where(ids == 1, 12, 0)
    return positions_of(np.arange(32) - starts, ids)


def positions_of(places, ids):
    return Context(positions=jnp.asarray(places), segment_ids=jnp.asarray(ids))


@pytest.mark.parametrize(
    ("config", "rows"),
    [(FA_SSA, "packed"), (FA_XA, "plain"), (XA_SSA, "packed")],
    ids=lambda value: getattr(value, "mode", value),
)
def test_value_and_all_gradients_equal_the_two_branches(config, rows):
    case = build(config)
    x = inputs(32, batch=2, seed=4)
    context = packed() if rows == "packed" else positions(x)
    context = dataclasses.replace(context, rng=jax.random.key(1), temperature=jnp.float64(1.5))
    cotangent = inputs(32, batch=2, seed=5) * context.valid()[..., None]

    def ours(params, x):
        y, _, report = nnx.merge(case.graphdef, params)(x, None, context)
        return (y * cotangent).sum(), report

    def oracle(params, x):
        mixer = nnx.merge(case.graphdef, params)
        k = mixer.project(x)[1]
        ids = context.segment_ids
        documents = None if ids is None else head_routed_ops.document_blocks(ids, BLOCK)
        pooled, _ = head_routed_ops.boundary_means(
            k, context.valid(), documents, block_size=BLOCK, pool_tokens=3
        )
        scores = mixer.router(pooled)[..., ::-1]
        noisy = (scores + jax.random.gumbel(context.rng, scores.shape, scores.dtype)) / 1.5
        p = jax.nn.softmax(noisy)[..., 0]
        m = (p > 0.5) + (p - jax.lax.stop_gradient(p))
        by_token = (
            jnp.broadcast_to(m, (2, 32, G))
            if ids is None
            else jax.vmap(lambda m, d: m[d])(m, documents)
        )
        return (two_branches(config, mixer, x, context, by_token) * cotangent).sum()

    run = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))
    (value, report), (grads, dx) = run(case.params, x)
    run = jax.jit(jax.value_and_grad(oracle, (0, 1)))
    expected, (theirs, dx_theirs) = run(case.params, x)
    assert 0 < report["decisions"].sum() < report["decisions"].size
    assert float(value) == pytest.approx(float(expected), rel=1e-12)
    assert_close(dx, dx_theirs, 1e-11, "dx")
    theirs = by_name(theirs)
    for name, grad in by_name(grads).items():
        assert_close(grad, theirs[name], 1e-11, name, floor=1e-13)
    assert rms(theirs["router.task_in.weight"]) > 1e-6


@every_mode
def test_heads_attend_as_their_own_row_is_routed(config):
    case = build(config)
    x = inputs(LENGTH, batch=4, seed=2)
    context = with_routes(x, ROUTES)
    y, _, report = case(x, None, context)
    gates = jnp.broadcast_to(decided(ROUTES).astype("float64"), (4, LENGTH, G))
    expected = jax.jit(two_branches, static_argnums=0)(config, case.mixer, x, context, gates)
    assert_close(y, expected, 1e-12)
    np.testing.assert_array_equal(report["decisions"][:, 0], ROUTES)


def test_full_heads_are_the_backbone():
    case, x = build(FA_SSA), inputs(LENGTH, batch=2)
    backbone = mixers.build_mixer(ATTENTION, model_with(ATTENTION, "float64"), rngs=nnx.Rngs(0))
    values = by_name(case.params)
    for path, variable in nnx.to_flat_state(nnx.state(backbone)):
        variable.set_value(values[".".join(map(str, path))])
        nnx.update(backbone, nnx.from_flat_state([(path, variable)]))
    y = case(x, None, with_routes(x, [[1, 1]] * 2))[0]
    expected = nnx.jit(lambda mixer, x: mixer(x, None, positions(x))[0])(backbone, x)
    assert_close(y, expected, 1e-14)


def test_short_rows_are_full_attention_and_teach_the_router_nothing():
    case = build(FA_SSA)

    x = inputs(LENGTH, batch=4)

    @jax.jit
    def router_gradient(first_scored):
        def loss(params):
            y = nnx.merge(case.graphdef, params)(x, None, positions(x, rng=jax.random.key(0)))[0]
            scored = jnp.arange(LENGTH) // (3 * BLOCK) == first_scored
            return (y**2 * scored[:, None]).sum()

        return jax.grad(loss)(case.params)["router"]["route_out"]["weight"][...]

    assert rms(router_gradient(0)) < 1e-12  # 1 + 2 blocks: sparse heads see everything
    assert rms(router_gradient(1)) > 1e-3
    sparse, full = (case(x, None, with_routes(x, [[r, r]] * 4))[0] for r in (0, 1))
    assert_close(sparse[:, : 3 * BLOCK], full[:, : 3 * BLOCK], 1e-14)
    assert rms((sparse - full)[:, 3 * BLOCK :]) > 1e-3


def test_xattention_that_keeps_all_mass_is_full_attention():
    case = build(dataclasses.replace(FA_XA, threshold=1.0))
    x = inputs(LENGTH, batch=2)
    sparse, full = (case(x, None, with_routes(x, [[r, r]] * 2))[0] for r in (0, 1))
    assert_close(sparse, full, 1e-12)
    kept = build(FA_XA)
    assert rms(kept(x, None, with_routes(x, [[0, 0]] * 2))[0] - full) > 1e-3


@every_mode
def test_packed_documents_are_routed_each_by_its_own_decision(config):
    case, context = build(config), packed()
    x = inputs(32, batch=2, seed=4)
    y, _, report = case(x, None, context)
    spans = {(0, 0): (0, 11), (0, 3): (12, 28), (1, 0): (0, 30)}
    kinds = set()
    for (row, block), (start, stop) in spans.items():
        alone = jnp.roll(x[row : row + 1], -start, 1)
        context = positions(alone, lengths=jnp.array([stop - start]))
        expected, _, own = case(alone, None, context)
        expected = expected[0, : stop - start]
        assert_close(y[row, start:stop], expected, 1e-12, f"document at {row}, {block}")
        np.testing.assert_array_equal(report["decisions"][row, block], own["decisions"][0, 0])
        kinds |= {tuple(map(bool, own["decisions"][0, 0]))}
    assert len(kinds) > 1
    assert {tuple(place) for place in np.argwhere(report["counted"])} == set(spans)


@pytest.mark.parametrize("train", [False, True])
def test_heads_of_both_kinds_run_in_one_launch(train, monkeypatch):
    launches = []

    def counting(*arguments, **options):
        launches.append(arguments[3])
        return block_sparse_attention(*arguments, **options)

    monkeypatch.setattr(head_routed_ops, "block_sparse_attention", counting)
    mixer, x = build(FA_SSA).mixer, inputs(LENGTH)
    mixer(x, None, positions(x, rng=jax.random.key(0) if train else None))
    assert len(launches) == 1 + train and all(len(mask.leaves()) == 2 for mask in launches)


def test_sharded_over_rows_and_heads_equals_one_device():
    case, x = build(FA_SSA), inputs(LENGTH, batch=2)
    context = positions(x, rng=jax.random.key(1))
    expected = case.apply(case.params, x, None, context)[0]
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2))):
        y = case.apply(case.params, x, None, context)[0]
    assert_close(y, expected, 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 3}, "mixer.block_size=4 must be a multiple of stride=3"),
        ({"kv_capacity": 1.5}, "mixer.kv_capacity=1.5 must lie in"),
        ({"threshold": 0.0}, "mixer.threshold=0.0 must be positive"),
        ({"sink_blocks": -1}, "mixer.sink_blocks=-1 must be"),
        ({"attention": dataclasses.replace(ATTENTION, window=4)}, "mixer.attention.window must be"),
    ],
)
def test_settings_that_cannot_be(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(FA_SSA, **change)
