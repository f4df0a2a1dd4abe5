"""The acceptance tests of chunk routing on every implementation, at shapes that the kernels take.

`reference`, which tests/test_chunk_routed.py holds to the definition together with `xla`, is the
truth; what must not change at all is compared within one implementation. Kernels are interpreted,
or run on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from mixer_cases import Case, by_name, positions

from jhybrid.config import BlockConfig, ChunkRoutedConfig, ModelConfig
from jhybrid.mixers import Context, build_mixer
from pallas_kernels.block_sparse_attention import api as attention_api
from pallas_kernels.block_sparse_attention import pallas_gpu as attention_gpu
from pallas_kernels.block_sparse_attention import pallas_tpu as attention_tpu
from pallas_kernels.decode_attention import api as decode_api
from pallas_kernels.decode_attention import pallas_gpu as decode_gpu
from pallas_kernels.decode_attention import pallas_tpu as decode_tpu
from pallas_kernels.dispatch import Candidate
from pallas_kernels.gated_delta_rule import api as rule_api
from pallas_kernels.gated_delta_rule import pallas_gpu as rule_gpu
from pallas_kernels.gated_delta_rule import pallas_tpu as rule_tpu
from pallas_kernels.gated_delta_step import api as step_api
from pallas_kernels.gated_delta_step import pallas_gpu as step_gpu
from pallas_kernels.gated_delta_step import pallas_tpu as step_tpu

CHUNK, LENGTH, N, DIM = 64, 200, 4, 32
CONFIG = ChunkRoutedConfig(num_heads=1, key_dim=128, value_dim=128, num_softmax_heads=2)
ROUTES = {
    "all to the memory": np.zeros((N, 1), bool),
    "all to softmax": np.ones((N, 1), bool),
    "mixed": np.array([[1], [0], [1], [0]], bool),
}
# compute dtype, largest rms ratio of outputs, of gradients
IMPLEMENTATIONS = {
    "xla": ("float32", 1e-5, 1e-4),
    "pallas_tpu": ("float32", 1e-4, 1e-3),
    "pallas_gpu": ("bfloat16", 1e-2, 3e-2),
}
pytestmark = pytest.mark.usefixtures("quick_compile")
written_for = pytest.mark.skipif(
    jax.__version__ != attention_gpu.JAX_VERSION,
    reason=f"the kernels are written for JAX {attention_gpu.JAX_VERSION}",
)
on_every_implementation = pytest.mark.parametrize(
    "layer",
    [
        pytest.param("xla", marks=pytest.mark.slow),
        pytest.param("pallas_tpu", marks=pytest.mark.slow),
        pytest.param("pallas_gpu", marks=(pytest.mark.slow, written_for)),
        pytest.param("pallas_gpu on a GPU", marks=(pytest.mark.gpu, written_for)),
    ],
    indirect=True,
)


@pytest.fixture
def layer(request, monkeypatch):
    """(case, its dtype, tolerances), of the implementation that the test asks for."""
    name = request.param.split(" ")[0]
    dtype, *tolerances = IMPLEMENTATIONS[name]
    made = (build(request.param, name, dtype), dtype, tolerances)
    if name == "pallas_tpu":
        from jax.experimental.pallas import tpu as pltpu

        for api, run in (
            (attention_api, attention_tpu.block_sparse_attention),
            (rule_api, rule_tpu.gated_delta_rule),
            (step_api, step_tpu.step),
            (decode_api, decode_tpu.attend),
        ):
            monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas_tpu", Candidate(run))
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            yield made
        return
    if request.param == "pallas_gpu":
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = {"interpret": plgpu.InterpretGPUParams()}
        for name in ("forward", "backward"):
            run = functools.partial(getattr(rule_gpu, name), **interpret)
            monkeypatch.setattr(rule_gpu, name, run)
        for api, run in (
            (attention_api, functools.partial(attention_gpu.block_sparse_attention, **interpret)),
            (rule_api, rule_gpu.gated_delta_rule),
            (step_api, functools.partial(step_gpu.step, **interpret)),
            (decode_api, functools.partial(decode_gpu.attend, **interpret)),
        ):
            monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas_gpu", Candidate(run))
    yield made


@functools.cache
def build(compiled_as: str, implementation: str, dtype: str) -> Case:
    """The layer with weights large enough for routing and attention to have something to say.

    One for each `compiled_as`, because it keeps what it compiled.
    """
    model = ModelConfig(
        vocab_size=1,
        dim=DIM,
        blocks=(BlockConfig(mixer=CONFIG, channel_mixer=None),),
        compute_dtype=dtype,
        implementation=implementation,
    )
    mixer = nnx.eval_shape(lambda: build_mixer(CONFIG, model, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(mixer)
    random = np.random.default_rng(0)

    def draw(path, leaf):
        shape = leaf.get_value().shape
        value = random.normal(size=shape) * (0.3 if len(shape) > 1 else 0.2)
        value += {"A_log": 0.5, "dt_bias": -3.0}.get(path[-1], float(len(shape) == 1))
        return nnx.Param(jnp.asarray(value, "float32"))

    flat = [(path, draw(path, leaf)) for path, leaf in nnx.to_flat_state(params)]
    return Case(graphdef, nnx.from_flat_state(flat))


def inputs(seed: int = 7):
    """Values that bfloat16 can hold, so that rounding them moves no decision."""
    x = jax.random.normal(jax.random.key(seed), (1, LENGTH, DIM))
    return x.astype("bfloat16").astype("float32")


def forced(x, routes):
    return positions(x, routes=None if routes is None else jnp.asarray(routes)[None])


@functools.cache
def gradients(case: Case):
    def loss(params, x, context):
        y, _, report = case.apply(params, x, None, context)
        return (y * inputs(seed=8)).sum(), (y, report["decisions"])

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def results(case: Case, x, context):
    """Outputs and every gradient of one weighted sum of them, by name."""
    (_, (y, decisions)), (grads, dx) = gradients(case)(case.params, x, context)
    return y, decisions, by_name(grads) | {"x": dx}


@on_every_implementation
@pytest.mark.parametrize("routes", [None, *ROUTES.values()], ids=["its own", *ROUTES])
def test_outputs_and_gradients_are_the_references(layer, routes):
    case, dtype, (of_outputs, of_gradients) = layer
    x = inputs()
    y, decisions, grads = results(case, x.astype(dtype), forced(x, routes))
    expected, expected_decisions, expected_grads = results(
        build(f"reference {dtype}", "reference", dtype), x.astype(dtype), forced(x, routes)
    )
    np.testing.assert_array_equal(decisions, expected_decisions)
    assert_close(y, expected, of_outputs, "y")
    for name, gradient in expected_grads.items():
        if routes is not None and name == "score_weight":
            np.testing.assert_array_equal(grads[name], 0)
        else:
            assert_close(grads[name], gradient, of_gradients, name, floor=1e-6)
    if routes is None:
        assert 0 < np.mean(decisions) < 1, "the test needs both kinds of chunk"


@on_every_implementation
def test_a_chunks_route_changes_nothing_up_to_its_end(layer):
    case, dtype, _ = layer
    x, routes = inputs().astype(dtype), ROUTES["mixed"]
    before, _, _ = case(x, None, forced(x, routes))
    for n in range(N):
        flipped = routes.copy()
        flipped[n] ^= True
        after, _, _ = case(x, None, forced(x, flipped))
        end = (n + 1) * CHUNK
        np.testing.assert_array_equal(before[:, :end], after[:, :end])
        assert n == N - 1 or not np.array_equal(before[:, end:], after[:, end:])


@on_every_implementation
def test_no_token_sees_a_later_one_nor_the_routes_it_makes(layer):
    case, dtype, _ = layer
    x = inputs().astype(dtype)
    before = case.row(x)
    for t in (30, CHUNK - 1, CHUNK, 150):
        after = case.row(x.at[:, t].add(3.0))
        np.testing.assert_array_equal(before[:, :t], after[:, :t])
        assert not np.array_equal(before[:, t], after[:, t])


@on_every_implementation
def test_prefill_and_decoding_continue_the_row(layer):
    case, dtype, (tolerance, _) = layer
    x = inputs().astype(dtype)
    full, cut = case.row(x), 2 * CHUNK - 2  # decoding completes a chunk
    state = case.mixer.initial_state(1, LENGTH)
    place = jnp.arange(LENGTH)[None]
    y, state, _ = case(x[:, :cut], state, Context(positions=place[:, :cut]))
    found = [y]
    for t in range(cut, cut + 4):
        y, state, _ = case(x[:, t : t + 1], state, Context(positions=place[:, t : t + 1]))
        found.append(y)
    rest = slice(cut + 4, LENGTH)
    found.append(case(x[:, rest], state, Context(positions=place[:, rest]))[0])
    assert_close(jnp.concatenate(found, 1), full, tolerance, "y")
