"""A chunk-routed layer for one row, written as slowly and literally as its definition.

The memory is a token recurrence that is rolled back at the end of a chunk, attention is a dense
softmax over the visible pairs. A decision enters as a multiplier on a chunk's write and on the exp
of a chunk's logits, so autodiff gives the derivatives the router's gradient is made of.
"""

import jax
import jax.numpy as jnp


def branches(p, config, x):
    """q, k, v after conv and SiLU [T, width], g and beta [T, H], for x [T, D]."""
    T = x.shape[0]

    def stream(name):
        inputs = x @ p[f"inputs.{name}_proj.weight"]
        if config.conv_width is None:
            return jax.nn.silu(inputs)
        taps = p[f"inputs.{name}_conv.weight"]
        width = taps.shape[0]
        padded = jnp.concatenate([jnp.zeros((width - 1, inputs.shape[1])), inputs])
        return jax.nn.silu(sum(taps[j] * padded[j : j + T] for j in range(width)))

    g = jnp.zeros((T, config.num_heads))
    if config.memory != "delta":
        step = jnp.log1p(jnp.exp(x @ p["inputs.a_proj.weight"] + p["inputs.dt_bias"]))
        g = -jnp.exp(p["inputs.A_log"]) * step
    if config.memory == "mamba2":  # the step also weighs what is written
        return stream("q"), stream("k"), stream("v"), g, step
    beta = 1 / (1 + jnp.exp(-x @ p["inputs.b_proj.weight"]))
    return stream("q"), stream("k"), stream("v"), g, beta


def scores(p, config, x):
    """[N, H, 2]: the linear score of each chunk's mean input; 0 is softmax, 1 the memory."""
    C = config.chunk_size
    means = jnp.stack([x[c : c + C].mean(0) for c in range(0, x.shape[0], C)])
    return (means @ p["score_weight"]).reshape(len(means), config.num_heads, 2)


def memory_reads(config, q, k, v, g, beta, write, kept_decay, probe):
    """The delta rule with rollback; write [N, H] weighs each chunk's change of the memory.

    `kept_decay` [N, H] is 1 where the chunk decays the memory, 0 where it leaves it as it was.
    `probe` [N, H, K, V] is added to the memory after each chunk: its gradient is that memory's.
    Returns (reads [T, H, V], changes [N, H, K, V]).
    """
    T, H, C = q.shape[0], config.num_heads, config.chunk_size

    def unit(a):
        a = a.reshape(T, H, -1)
        return a / jnp.sqrt((a * a).sum(-1, keepdims=True) + 1e-6)

    def token(inside, inputs):
        q, k, v, g, beta = inputs
        inside = jnp.exp(g)[:, None, None] * inside
        known = jnp.einsum("hk,hkv->hv", k, inside)
        wrong = v if config.memory == "mamba2" else v - known
        inside = inside + jnp.einsum("hk,hv->hkv", k, beta[:, None] * wrong)
        return inside, jnp.einsum("hk,hkv->hv", q, inside)

    scale = 1 if config.memory == "mamba2" else config.key_dim**-0.5
    tokens = (unit(q) * scale, unit(k), v.reshape(T, H, -1), g, beta)
    start = jnp.zeros((H, config.key_dim, config.value_dim))
    reads, changes = [], []
    for n, first in enumerate(range(0, T, C)):
        chunk = [a[first : first + C] for a in tokens]
        inside, read = jax.lax.scan(token, start, chunk)
        faded = jnp.exp(chunk[3].sum(0))[:, None, None] * start
        change = inside - faded
        base = jnp.where(kept_decay[n][:, None, None] > 0, faded, start)
        start = base + write[n][:, None, None] * change + probe[n]
        reads.append(read)
        changes.append(change)
    return jnp.concatenate(reads), jnp.stack(changes)


def attention(p, config, x, q, k, v, softmax, bias):
    """Own chunk causally, earlier chunks where `softmax`; `bias` on logits between chunks.

    Returns (outputs [T, Ha, V], probabilities [Ha, T, T]).
    """
    T, Ha, C = q.shape[0], config.num_softmax_heads, config.chunk_size
    R = Ha // config.num_heads
    if not config.softmax_conv:
        q, k, v = (x @ p[f"inputs.{name}_proj.weight"] for name in "qkv")

    def heads(a, norm=None):
        a = a.reshape(T, Ha, -1)
        if norm is not None and norm in p:
            a = rms_norm(a, p[norm])
        if norm is not None and config.rope_theta is not None:
            a = turn(a, config.rope_theta)
        return a

    q, k, v = heads(q, "q_norm.weight"), heads(k, "k_norm.weight"), heads(v)
    logits = jnp.einsum("ihd,jhd->hij", q, k) * config.softmax_key_dim**-0.5
    token = jnp.arange(T)
    chunk = token // C
    own = (chunk[:, None] == chunk) & (token[:, None] >= token)
    earlier = chunk[:, None] > chunk

    def by_pair(a):
        return jnp.repeat(a, R, 1)[chunk].T[:, None, :]

    logits = logits + jnp.where(earlier, by_pair(bias), 0)
    visible = own | (earlier & by_pair(softmax))
    probabilities = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), -1)
    return jnp.einsum("hij,jhd->ihd", probabilities, v), probabilities


def rms_norm(a, weight, eps=1e-6):
    return weight * a / jnp.sqrt((a * a).mean(-1, keepdims=True) + eps)


def turn(a, theta):
    """Complex rotation of channel pairs (i, i + K/2) by position * theta^(-2i/K)."""
    half = a.shape[-1] // 2
    angle = jnp.arange(a.shape[0])[:, None] * theta ** (-jnp.arange(half) / half)
    turned = (a[..., :half] + 1j * a[..., half:]) * jnp.exp(1j * angle)[:, None]
    return jnp.concatenate([turned.real, turned.imag], -1)


def fuse(p, config, x, q, read, seen):
    """Norms per softmax head, fusion weights (index 0 the memory, 1 softmax), gate, projection."""
    T, Ha = x.shape[0], config.num_softmax_heads
    read = rms_norm(read.reshape(T, Ha, -1), p["memory_norm.weight"])
    seen = rms_norm(seen, p["softmax_norm.weight"])
    if config.fusion_weights:
        w = jax.nn.softmax((q @ p["fusion_proj.weight"]).reshape(T, Ha, 2), -1)
        read, seen = w[..., :1] * read, w[..., 1:] * seen
    gate = jax.nn.silu(x @ p["g_proj.weight"])
    return (gate * (read + seen).reshape(T, -1)) @ p["o_proj.weight"]


def layer(p, config, x, softmax=None, probes=None):
    """The whole layer for x [T, D]. `softmax` [N, H] forces the decisions.

    `probes` = (zeros on softmax logits [N, H], write multipliers [N, H], zeros on the memory), for
    derivatives; by default the straight-through estimator of the scores takes their place.
    """
    q, k, v, g, beta = branches(p, config, x)
    s = scores(p, config, x)
    chosen = s[..., 0] >= s[..., 1] if softmax is None else softmax
    zeros = jnp.zeros((len(s), config.num_heads, config.key_dim, config.value_dim))
    if probes is None:
        soft = jax.nn.softmax(s, -1)
        slope = soft - jax.lax.stop_gradient(soft)
        slope = slope if softmax is None else 0 * slope
        bias = jnp.where(chosen, slope[..., 0], 0)
        open_to_gradient = ~chosen | config.gdn_counterfactual_grad
        write = ~chosen + jnp.where(open_to_gradient, slope[..., 1], 0)
        probe = zeros
    else:
        bias, write, probe = probes
    decays = ~chosen | config.decay_softmax_chunks
    read, changes = memory_reads(config, q, k, v, g, beta, write, decays, probe)
    seen, probabilities = attention(p, config, x, q, k, v, chosen, bias)
    return fuse(p, config, x, q, read, seen), (read, seen, changes, probabilities)


def score_gradient(p, config, x, cotangent):
    """dL/dscores [N, H, 2] for L = sum(y * cotangent), from its closed form.

    Softmax: d = sum over later queries i and the chunk's keys j of P_ij (dP_ij - delta_i); memory:
    d = <the chunk's change, gradient of the memory after it>; each where that operation was chosen.
    Then ds_a = p_a (d_a - sum_b p_b d_b).
    """
    q, _, v, _, _ = branches(p, config, x)
    s = scores(p, config, x)
    chosen = s[..., 0] >= s[..., 1]
    N, H, C, Ha = len(s), config.num_heads, config.chunk_size, config.num_softmax_heads
    R, T = Ha // H, x.shape[0]
    zeros = jnp.zeros((N, H, config.key_dim, config.value_dim))
    write = (~chosen).astype(x.dtype)

    def loss(probe):
        y, _ = layer(p, config, x, probes=(jnp.zeros((N, H)), write, probe))
        return (y * cotangent).sum()

    memory_gradient = jax.grad(loss)(zeros)
    _, (read, seen, changes, probabilities) = layer(p, config, x)
    seen_gradient = jax.grad(lambda o: (fuse(p, config, x, q, read, o) * cotangent).sum())(seen)
    dP = jnp.einsum("ihd,jhd->hij", seen_gradient, v.reshape(T, Ha, -1))
    delta = (seen * seen_gradient).sum(-1).T
    dlogit = probabilities * (dP - delta[..., None])

    def from_softmax(n, h):
        later, own = slice((n + 1) * C, T), slice(n * C, (n + 1) * C)
        return dlogit[h * R : (h + 1) * R, later, own].sum()

    d_softmax = jnp.array([[from_softmax(n, h) for h in range(H)] for n in range(N)])
    d_memory = (changes * memory_gradient).sum((-1, -2))
    d = jnp.stack([jnp.where(chosen, d_softmax, 0), jnp.where(chosen, 0, d_memory)], -1)
    soft = jax.nn.softmax(s, -1)
    return soft * (d - (soft * d).sum(-1, keepdims=True))
