"""Two-layer models agree with flash-linear-attention 0.6.0: logits, mixers, states, gradients.

Lightning attention, of which it has no layer, agrees as an op.

The recordings come from golden/make_fla_goldens.py; both sides compute in fp32.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx

from jhybrid.block_groups import by_block, from_blocks
from jhybrid.config import BlockConfig, GatedDeltaNetConfig, ModelConfig, SwiGLUConfig
from jhybrid.convert.fla import sources
from jhybrid.mixers import Context
from jhybrid.mixers.lightning import log_decays
from jhybrid.model import HybridLM, rising_bounds
from jhybrid.recurrent_config import (
    DeltaNetConfig,
    GLAConfig,
    HGRN2Config,
    HGRNConfig,
    KDAConfig,
    Mamba2Config,
    RetNetConfig,
    RWKV6ChannelConfig,
    RWKV6Config,
)
from pallas_kernels import simple_linear_attention

pytestmark = pytest.mark.usefixtures("quick_compile")

SWIGLU = SwiGLUConfig(width=32)


def blocks(mixer, channel_mixer=SWIGLU):
    return (BlockConfig(mixer=mixer, channel_mixer=channel_mixer),) * 2


RWKV6 = tuple(
    BlockConfig(mixer=mixer, channel_mixer=None, norm="layer")
    for mixer in (
        RWKV6Config(num_heads=2, key_dim=4, value_dim=8, shift_rank=4, decay_rank=6),
        RWKV6ChannelConfig(width=32),
    )
)
FAMILIES = {
    "delta_net": blocks(DeltaNetConfig(num_heads=2, key_dim=8, value_dim=8)),
    "gated_delta_net": blocks(
        GatedDeltaNetConfig(num_heads=2, key_dim=8, value_dim=12, num_value_heads=4)
    ),
    "kda": blocks(KDAConfig(num_heads=2, key_dim=8, value_dim=12)),
    "gla": blocks(GLAConfig(num_heads=2, key_dim=4, value_dim=8)),
    "retnet": blocks(RetNetConfig(num_heads=2, key_dim=8, value_dim=16)),
    "hgrn": blocks(HGRNConfig(width=16)),
    "hgrn2": blocks(HGRN2Config(num_heads=2, key_dim=8, value_dim=8)),
    "mamba2": blocks(Mamba2Config(num_heads=4, key_dim=12, value_dim=8), None),
    "mamba2_groups": blocks(Mamba2Config(num_heads=4, key_dim=12, value_dim=8, num_groups=2), None),
    "rwkv6": RWKV6 * 2,
}
every_family = pytest.mark.parametrize("family", FAMILIES)


class Recording:
    """One recorded model, and ours with its parameters."""

    def __init__(self, family: str):
        self.arrays = dict(np.load(Path(__file__).parent / "golden" / f"fla_{family}.npz"))
        self.config = ModelConfig(
            vocab_size=16,
            dim=16,
            blocks=FAMILIES[family],
            embed_norm=family == "rwkv6",
            norm_eps=1e-5 if family in ("rwkv6", "mamba2", "mamba2_groups") else 1e-6,
            compute_dtype="float32",
            remat="none",
        )
        model = nnx.eval_shape(lambda: HybridLM(self.config, rngs=nnx.Rngs(0)))
        self.graphdef, template = nnx.split(model)
        self.params = from_blocks(self.values("p"), template, self.config.blocks)
        tokens = self.arrays["tokens"]
        self.context = Context(positions=jnp.arange(tokens.shape[1])[None])

    def values(self, kind: str) -> dict[str, jax.Array]:
        """Recorded parameters (p) or gradients (g) by our paths."""
        return {
            path: jnp.asarray(source.convert(self.arrays[f"{kind}.{source.name}"]))
            for path, source in sources(self.config).items()
        }


recording = functools.cache(Recording)


@every_family
def test_every_recorded_tensor_has_a_place(family):
    recorded = recording(family)
    used = {source.name for source in sources(recorded.config).values()}
    assert used == {name[2:] for name in recorded.arrays if name.startswith("p.")}


@every_family
def test_logits_and_gradients(family):
    recorded = recording(family)

    @functools.partial(jax.grad, has_aux=True)
    def run(params):
        model = nnx.merge(recorded.graphdef, params)
        logits = model.logits(model(recorded.arrays["tokens"], recorded.context).hidden)
        return (logits * recorded.arrays["cotangent"]).sum(), logits

    grads, logits = jax.jit(run)(recorded.params)
    assert_close(logits, recorded.arrays["logits"], 1e-5, "logits")
    expected = recorded.values("g")
    for path, gradient in by_block(grads, recorded.config.blocks).items():
        assert_close(gradient, expected[path], 1e-4, path, floor=1e-6)


@every_family
def test_mixers_and_their_final_states(family):
    recorded = recording(family)
    config = recorded.config

    @jax.jit
    def run(params):
        model = nnx.merge(recorded.graphdef, params)
        tokens = recorded.arrays["tokens"]
        state = model(tokens, recorded.context, model.initial_state(1, tokens.shape[1])).state
        x = model.embed[...][tokens]
        x = x if model.embed_norm is None else model.embed_norm(x)
        bounds = None if model.lower_bounds is None else rising_bounds(model.lower_bounds[...])
        outputs = []
        for i, stack in enumerate(block for group in model.unstacked().groups for block in group):
            graphdef, own = nnx.split(stack)
            block = nnx.merge(graphdef, jax.tree.map(lambda x: x[0], own))
            context = Context(
                positions=recorded.context.positions,
                lower_bound=None if bounds is None else bounds[i],
            )
            outputs.append(block.mixer(block.mixer_norm(x), None, context)[0])
            x, _, _ = block(x, None, context)
        return outputs, [s.memory for s in state]

    outputs, states = run(recorded.params)
    mixing = [i for i, b in enumerate(config.blocks) if not isinstance(b.mixer, RWKV6ChannelConfig)]
    for layer, block in enumerate(mixing):
        assert_close(outputs[block], recorded.arrays[f"o.{layer}"], 1e-5, f"mixer {layer}")
        assert_close(states[block], recorded.arrays[f"s.{layer}"], 1e-5, f"state {layer}")


def test_lightning_attention_as_an_op():
    path = Path(__file__).parent / "golden" / "fla_lightning.npz"
    recorded = {name: jnp.asarray(value) for name, value in np.load(path).items()}
    g = log_decays(4, jnp.float32(2 / 5))

    @jax.jit
    def run(q, k, v):
        decays = jnp.broadcast_to(g, q.shape[:3])
        return simple_linear_attention(q, k, v, decays, implementation="xla")

    inputs = [recorded[name] for name in "qkv"]
    (o, state), pull = jax.vjp(run, *inputs)
    assert_close(o, recorded["o"], 1e-5, "o")
    assert_close(state, recorded["s"], 1e-5, "state")
    for name, gradient in zip("qkv", pull((recorded["do"], recorded["ds"])), strict=True):
        assert_close(gradient, recorded[f"g.{name}"], 1e-4, f"d{name}")
