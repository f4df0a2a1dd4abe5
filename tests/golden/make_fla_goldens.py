"""Records two-layer models of flash-linear-attention for tests/test_fla_parity.py. By hand:

    pip install torch==2.13.0 einops "transformers>=5.6.2,<6"
    pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0
    python tests/golden/make_fla_goldens.py tests/golden

One fp32 forward and backward pass on a CPU. Its layers and models run as released; where they call
Triton kernels they get the package's own naive recurrences, and plain torch for norms, convolutions
and activations. Triton itself is replaced by an empty module, so that it need not be installed.

A file fla_FAMILY.npz holds `tokens`, `cotangent` and `logits` [1, T, vocab], `p.NAME` parameters
and `g.NAME` gradients of sum(logits * cotangent) by state_dict name, `o.LAYER` outputs of the token
mixers and `s.LAYER` their final states, key dim first. fla_lightning.npz is of an op, not a model:
`q`, `k`, `v`, the cotangents `do` and `ds` of outputs `o` and final state `s`, and gradients `g.q`,
`g.k`, `g.v`.

Where Mamba-2 has several groups, its plain path gives head h group h % groups, its kernels and its
decoding step group h // (heads / groups). The recording has the latter.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.flop_counter
import transformers  # noqa: F401  # both before Triton is replaced, for they look for the real one

D, T, VOCAB = 16, 70, 16  # T crosses the kernels' chunks of 64
SIZES = {"hidden_size": D, "num_hidden_layers": 2, "vocab_size": VOCAB, "intermediate_size": 32}
PLAIN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True}
FAMILIES = {  # model class prefix, config
    "delta_net": ("DeltaNet", {"num_heads": 2}),
    "gated_delta_net": (
        "GatedDeltaNet",
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5},
    ),
    "kda": ("KDA", {"num_heads": 2, "head_dim": 8, "expand_v": 1.5}),
    "gla": ("GLA", {"num_heads": 2, "expand_k": 0.5}),
    "retnet": ("RetNet", {"num_heads": 2}),
    "hgrn": ("HGRN", {}),
    "hgrn2": ("HGRN2", {"expand_ratio": 8, "num_heads": None}),
    "mamba2": ("Mamba2", {"head_dim": 8, "state_size": 12, "num_heads": 4, "norm_eps": 1e-5}),
    "mamba2_groups": (
        "Mamba2",
        {"head_dim": 8, "state_size": 12, "num_heads": 4, "norm_eps": 1e-5, "n_groups": 2},
    ),
    "rwkv6": ("RWKV6", {"num_heads": 2, "proj_low_rank_dim": 4, "gate_low_rank_dim": 6}),
}


class Anything:
    """An object of Triton: whatever is done with it, nothing happens."""

    def __init__(self, *args, **kwargs):
        self.__name__ = "kernel"

    def __getattr__(self, name):
        if name.startswith("__") or name == "get_current_target":  # there is no device
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args, **kwargs):
        return Anything()

    def __getitem__(self, index):
        return Anything()

    def __or__(self, other):
        return Anything()

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return (Anything,)


class NoTriton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module in the place of each of Triton's."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__version__ = "3.7.1"
        module.__getattr__ = Anything().__getattr__
        return module

    def exec_module(self, module):
        pass


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@functools.cache  # the second family must not find the first one's replacements
def replace_modules():
    """Plain torch in the forward passes of the modules that call kernels."""
    from fla.modules import norm, rotary
    from fla.modules.activations import ACT2FN
    from fla.modules.causal_conv1d.ops import ShortConvolution
    from fla.modules.norm import layernorm
    from fla.modules.rotary.ops import rotary_embedding_ref

    def with_residual(normalise):
        def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
            x = x if residual is None else x + residual
            y = normalise(self, x)
            return (y, x) if prenorm else y

        return forward

    norm.RMSNorm.forward = with_residual(lambda self, x: rms(x, self.weight, self.eps))
    norm.LayerNorm.forward = with_residual(
        lambda self, x: F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
    )

    def group_norm(self, x):
        rows = F.group_norm(x.flatten(0, -2), self.num_groups, self.weight, self.bias, self.eps)
        return rows.view_as(x)

    norm.GroupNorm.forward = with_residual(group_norm)
    gates = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}
    norm.FusedRMSNormGated.forward = lambda self, x, g: (
        rms(x, self.weight, self.eps) * gates[self.activation](g)
    )

    def gate_then_norm(self, x, z):
        assert not self.norm_before_gate
        groups = (-1, self.group_size or x.shape[-1])
        gated = (x * F.silu(z)).unflatten(-1, groups)
        return rms(gated, self.weight.unflatten(0, groups), self.eps).flatten(-2)

    norm.RMSNormGated.forward = gate_then_norm

    def convolve(self, x, cache=None, output_final_state=False, **_):
        assert cache is None
        y = F.conv1d(
            F.pad(x.mT, (self.kernel_size[0] - 1, 0)), self.weight, self.bias, groups=x.shape[-1]
        ).mT
        assert self.activation in ("silu", "swish")
        return F.silu(y), x.mT[..., -self.kernel_size[0] :]

    ShortConvolution.forward = convolve
    rotary.ops.rotary_embedding = lambda x, cos, sin, interleaved, **_: rotary_embedding_ref(
        x, cos[: x.shape[1]], sin[: x.shape[1]], interleaved
    )
    ACT2FN.update(swish=F.silu, silu=F.silu, sqrelu=lambda x: F.relu(x).square())

    # the layer leaves eps to this default
    eps = inspect.signature(layernorm.rms_norm_linear).parameters["eps"].default
    return {
        "swish": F.silu,
        "swiglu": lambda x, y: F.silu(x) * y,
        "swiglu_linear": lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias),
        "rms_norm_linear": lambda x, norm_weight, _, weight, bias: F.linear(
            rms(x, norm_weight, eps), weight, bias
        ),
        "token_shift": importlib.import_module("fla.modules.token_shift").token_shift_ref,
    }


def naive_ops():
    """The package's naive recurrences behind the signatures of its kernels."""
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.hgrn.naive import naive_recurrent_hgrn
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    def unit(x):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    def head_first(*arrays):
        return [x.transpose(1, 2) for x in arrays]

    def gla(q, k, v, g=None, gk=None, **_):
        return naive_recurrent_gla(q, k, v, g if gk is None else gk, output_final_state=True)

    def hgrn(x, g, **_):
        return naive_recurrent_hgrn(x, g, output_final_state=True)

    def retention(q, k, v, **_):
        heads = torch.arange(q.shape[2], dtype=torch.float32)
        g = torch.log(1 - 2.0 ** (-5 - heads)).expand(q.shape[:3])
        return naive_recurrent_simple_gla(q, k, v, g)

    def rwkv6(r, k, v, w, u, scale, **_):
        o, state = naive_recurrent_rwkv6(*head_first(r, k, v, w), u, scale, None, True)
        return o.transpose(1, 2), state

    def delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel, **_):
        assert use_qk_l2norm_in_kernel
        o, state = delta_rule_recurrence(*head_first(unit(q), unit(k), v, beta))
        return o.transpose(1, 2), state

    def gates(g, beta, A_log, dt_bias, options):
        assert options["use_qk_l2norm_in_kernel"] and options["use_gate_in_kernel"]
        assert options["use_beta_sigmoid_in_kernel"] and not options.get("allow_neg_eigval")
        rate = A_log.exp()
        rate = rate if g.ndim == 3 else rate[:, None]
        return -rate * F.softplus(g + dt_bias.view(g.shape[2:])), beta.sigmoid()

    def gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, **options):
        g, beta = gates(g, beta, A_log, dt_bias, options)
        q, k = (unit(x).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return naive_recurrent_gated_delta_rule(q, k, v, beta, g, output_final_state=True)

    def kda(q, k, v, g, beta, A_log, dt_bias, **options):
        g, beta = gates(g, beta, A_log, dt_bias, options)
        return naive_recurrent_kda(unit(q), unit(k), v, g, beta, output_final_state=True)

    kernels = {
        "gla": gla,
        "hgrn": hgrn,
        "retention": retention,
        "rwkv6": rwkv6,
        "delta_rule": delta_rule,
        "gated_delta_rule": gated_delta_rule,
        "kda": kda,
    }
    return {f"{how}_{op}": f for op, f in kernels.items() for how in ("chunk", "fused_recurrent")}


def substitute(functions):
    """Puts `functions` where the loaded modules of the package look for those names."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for function in functions.keys() & vars(module).keys():
                setattr(module, function, functions[function])


def draw(name, parameter, random):
    """Values that make every parameter matter."""
    value = random.standard_normal(parameter.shape)
    if name.endswith("dt_bias"):
        value -= 2
    elif "norm" in name and name.endswith("weight"):
        value = 1 + 0.2 * value
    elif "conv1d.weight" in name:
        value *= 0.5
    elif parameter.ndim == 2 and "lower_bounds" not in name:
        value *= 0.3
    elif not name.endswith("A_log") and "lower_bounds" not in name:
        value *= 0.4
    return torch.tensor(value, dtype=torch.float32)


def repeat(x, *counts):
    """`torch.Tensor.repeat` in Mamba-2's plain path: groups in the order of its kernels."""
    if x.ndim == 4 and counts[:2] == (1, 1) and counts[3:] == (1,):
        return x.repeat_interleave(counts[2], 2)
    return torch.tile(x, counts)


def record_lightning():
    """The third of five layers; silu and norms are around the op, not in it."""
    from fla.ops.lightning_attn import chunk
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    def simple_gla(q, k, v, scale, g_gamma, initial_state, output_final_state, **_):
        g = g_gamma.expand(q.shape[:3])
        return naive_recurrent_simple_gla(q, k, v, g, scale, initial_state, output_final_state)

    chunk.chunk_simple_gla = simple_gla
    random = np.random.default_rng(0)
    shapes = {"q": (1, T, 4, 8), "k": (1, T, 4, 8), "v": (1, T, 4, 12)}
    shapes |= {"do": (1, T, 4, 12), "ds": (1, 4, 8, 12)}
    drawn = {
        name: torch.tensor(random.standard_normal(shape), dtype=torch.float32)
        for name, shape in shapes.items()
    }
    inputs = [drawn[name].requires_grad_() for name in "qkv"]
    o, state = chunk.chunk_lightning_attn(
        *inputs, layer_idx=2, num_layers=5, output_final_state=True
    )
    grads = torch.autograd.grad((o * drawn["do"]).sum() + (state * drawn["ds"]).sum(), inputs)
    recorded = {**drawn, "o": o, "s": state} | dict(zip(("g.q", "g.k", "g.v"), grads, strict=True))
    return {name: value.detach().numpy() for name, value in recorded.items()}


def record(family):
    prefix, fields = FAMILIES[family]
    models = importlib.import_module("fla.models")
    config = getattr(models, f"{prefix}Config")(**SIZES, **PLAIN, **fields)
    substitute(replace_modules() | naive_ops())
    model = getattr(models, f"{prefix}ForCausalLM")(config).float().eval()
    random = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter, random))
    mamba = prefix == "Mamba2"
    backbone = model.backbone if mamba else model.model
    recorded = {}

    def keep(layer):
        def hook(module, inputs, outputs):
            recorded[f"o.{layer}"] = outputs[0]

        return hook

    for i, layer in enumerate(backbone.layers):
        (layer.mixer if mamba else layer.attn).register_forward_hook(keep(i))
    tokens = torch.tensor(random.integers(0, VOCAB, (1, T)))
    cotangent = torch.tensor(random.standard_normal((1, T, VOCAB)), dtype=torch.float32)
    whole, torch.Tensor.repeat = torch.Tensor.repeat, repeat if mamba else torch.Tensor.repeat
    output = model(input_ids=tokens, use_cache=True)
    torch.Tensor.repeat = whole
    (output.logits * cotangent).sum().backward()
    recorded |= {"tokens": tokens.int(), "cotangent": cotangent, "logits": output.logits}
    for i in range(len(backbone.layers)):
        state = output.past_key_values[i]["recurrent_state"]
        recorded[f"s.{i}"] = state.mT if mamba else state
    for name, parameter in model.named_parameters():
        recorded[f"p.{name}"], recorded[f"g.{name}"] = parameter, parameter.grad
    return {name: value.detach().numpy() for name, value in recorded.items()}


if __name__ == "__main__":
    sys.meta_path.insert(0, NoTriton())
    torch.compile = lambda function=None, **_: function or (lambda f: f)
    for family in sys.argv[2:] or (*FAMILIES, "lightning"):
        arrays = record_lightning() if family == "lightning" else record(family)
        np.savez_compressed(f"{sys.argv[1]}/fla_{family}.npz", **arrays)
        print(family, {n: x.shape for n, x in arrays.items() if n[0] in "sol"})
