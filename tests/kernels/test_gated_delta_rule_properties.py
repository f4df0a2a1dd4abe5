"""Laws of the gated delta rule, over drawn gates, masks, documents and cuts of one shape."""

import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import gated_delta_rule
from pallas_kernels.gated_delta_rule import xla
from tests.closeness import assert_close
from tests.quick_compile import QUICK_COMPILE

B, T, Hk, H, K, V, C = 1, 48, 1, 2, 8, 8, 8
MULTIPLE_OF_CHUNK = st.integers(1, T // C - 1).map(lambda chunks: C * chunks)
DECAYS = st.sampled_from([0.0, -1e-3, -0.1, -1.0, -5.0, -60.0])
STATE_AND_MASK = ("initial_state", "write_mask")
SEEDS = st.integers(0, 2**31 - 1)


@functools.partial(
    jax.jit, static_argnames=("chunk_size", "tiling"), compiler_options=QUICK_COMPILE
)
def op(arguments, chunk_size=C, tiling=None):
    with pytest.MonkeyPatch.context() as patch:
        if tiling is not None:
            patch.setattr(xla, "choose_tiling", lambda *_: xla.Tiling(*tiling))
        return gated_delta_rule(**arguments, chunk_size=chunk_size, implementation="xla")


def drawn(seed: int, decay: float | None = None) -> dict[str, np.ndarray]:
    """All floating arguments; log decays of every size when `decay` is None."""
    rng = np.random.default_rng(seed)

    def unit(*shape):
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    g = rng.choice([0.0, -1e-3, -0.1, -1.0, -5.0, -60.0], size=(B, T, H))
    arguments = {
        "q": unit(B, T, Hk, K),
        "k": unit(B, T, Hk, K),
        "v": rng.normal(size=(B, T, H, V)),
        "g": g if decay is None else np.full_like(g, decay),
        "beta": 2 * rng.random((B, T, H)),
        "initial_state": rng.normal(size=(B, H, K, V)),
        "write_mask": rng.random((B, T // C, H)) * rng.integers(0, 2, (B, T // C, H)),
    }
    return {name: x.astype(np.float32) for name, x in arguments.items()}


def piece(arguments, start: int, stop: int, initial_state):
    """The tokens from `start` to `stop`, both multiples of C, from `initial_state`."""
    cut = {n: x[:, start:stop] for n, x in arguments.items() if n not in STATE_AND_MASK}
    mask = arguments["write_mask"][:, start // C : stop // C]
    return cut | {"write_mask": mask, "initial_state": initial_state}


def padded(arguments, tokens: int):
    """Appends tokens with g = 0 and beta = 0, whose q, k and v are large, up to `tokens`."""
    missing = tokens - arguments["q"].shape[1]

    def pad(name, x):
        if name in STATE_AND_MASK:
            size = missing // C if name == "write_mask" else 0
            return np.pad(x, [(0, 0), (0, size), (0, 0)]) if size else x
        widths = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
        return np.pad(x, widths, constant_values=0.0 if name in ("g", "beta") else 7.0)

    return {name: pad(name, np.asarray(x)) for name, x in arguments.items()}


@hypothesis.given(SEEDS, MULTIPLE_OF_CHUNK)
def test_split_anywhere_and_carry_the_state(seed, cut):
    arguments = drawn(seed)
    o, final = op(arguments)
    # Padding to one shape compiles once, and is itself a law: such tokens change nothing.
    o1, state = op(padded(piece(arguments, 0, cut, arguments["initial_state"]), T))
    o2, end = op(padded(piece(arguments, cut, T, state), T))
    pieces = np.concatenate([o1[:, :cut], o2[:, : T - cut]], axis=1)
    assert_close(pieces, o, 2e-6, "o")
    assert_close(end, final, 2e-6, "final_state")


@hypothesis.given(SEEDS, MULTIPLE_OF_CHUNK)
def test_packed_documents_are_separate_documents(seed, cut):
    arguments = drawn(seed)
    segments = np.where(np.arange(T) < cut, 4, 9)[None]
    o, final = op(arguments | {"segment_ids": segments})
    o1, _ = op(padded(piece(arguments, 0, cut, arguments["initial_state"]), T))
    nothing = np.zeros_like(arguments["initial_state"])
    o2, end = op(padded(piece(arguments, cut, T, nothing), T))
    assert_close(o, np.concatenate([o1[:, :cut], o2[:, : T - cut]], axis=1), 2e-6, "o")
    assert_close(final, end, 2e-6, "final_state")


@hypothesis.given(SEEDS, st.integers(1, T - 1))
def test_the_first_document_does_not_reach_the_second_wherever_it_ends(seed, cut):
    arguments = drawn(seed) | {"segment_ids": np.where(np.arange(T) < cut, 1, 0)[None]}
    other = drawn(seed + 1)
    changed = dict(arguments, initial_state=other["initial_state"])
    for name in ("q", "k", "v", "g", "beta"):
        changed[name] = np.concatenate([other[name][:, :cut], arguments[name][:, cut:]], axis=1)
    o, final = op(arguments)
    o_changed, final_changed = op(changed)
    np.testing.assert_array_equal(o[:, cut:], o_changed[:, cut:])
    np.testing.assert_array_equal(final, final_changed)


@hypothesis.given(SEEDS, st.integers(1, T - 1))
def test_no_token_sees_a_later_one(seed, cut):
    arguments, other = drawn(seed), drawn(seed + 1)
    changed = dict(arguments)
    for name in ("q", "k", "v", "g", "beta"):
        changed[name] = np.concatenate([arguments[name][:, :cut], other[name][:, cut:]], axis=1)
    np.testing.assert_array_equal(op(arguments)[0][:, :cut], op(changed)[0][:, :cut])


@hypothesis.given(SEEDS)
def test_without_writes_the_state_only_decays(seed):
    arguments = drawn(seed) | {"beta": np.zeros((B, T, H), np.float32)}
    o, final = op(arguments)
    decay = np.exp(np.cumsum(arguments["g"].astype(np.float64), axis=1))
    read = np.einsum("btk,bhkv->bthv", arguments["q"][:, :, 0], arguments["initial_state"])
    assert_close(o, K**-0.5 * decay[..., None] * read, 2e-6, "o")
    expected = decay[:, -1, :, None, None] * arguments["initial_state"]
    assert_close(final, expected, 2e-6, "final_state", floor=1e-37)


@hypothesis.given(SEEDS, DECAYS)
def test_a_mask_of_zeros_keeps_only_the_decayed_initial_state(seed, decay):
    arguments = drawn(seed, decay)
    arguments["write_mask"] = np.zeros_like(arguments["write_mask"])
    total = np.exp(arguments["g"].astype(np.float64).sum(1))
    expected = total[..., None, None] * arguments["initial_state"]
    assert_close(op(arguments)[1], expected, 2e-6, "final_state", floor=1e-37)


@hypothesis.given(SEEDS)
def test_a_chunk_does_not_see_its_own_weight(seed):
    arguments = drawn(seed)
    chunk = seed % (T // C)
    flipped = arguments["write_mask"].copy()
    flipped[:, chunk] += 1.0
    seen = slice(0, (chunk + 1) * C)
    o, final = op(arguments)
    o_flipped, final_flipped = op(arguments | {"write_mask": flipped})
    np.testing.assert_array_equal(o[:, seen], o_flipped[:, seen])
    if arguments["g"][:, seen.stop :].sum() > -5:
        assert np.abs(final - final_flipped).max() > 0


@hypothesis.given(SEEDS, DECAYS)
def test_without_a_mask_chunks_and_tiles_do_not_matter(seed, decay):
    arguments = drawn(seed, decay)
    del arguments["write_mask"]
    expected = op(arguments)
    for chunk_size, tiling in ((1, None), (7, (11, 1)), (64, (16, 3)), (C, (48, 1))):
        o, final = op(arguments, chunk_size=chunk_size, tiling=tiling)
        assert_close(o, expected[0], 3e-6, f"o, {tiling}")
        assert_close(final, expected[1], 3e-6, f"final_state, {tiling}", floor=1e-37)


def test_orthonormal_keys_recall_their_values_exactly():
    arguments = drawn(0, 0.0)
    keys = np.zeros((B, T, Hk, K), np.float32)
    keys[:, np.arange(T), :, np.arange(T) % K] = 1.0
    arguments |= {"q": keys, "k": keys, "beta": np.ones((B, T, H), np.float32)}
    del arguments["write_mask"]
    o, _ = jax.jit(functools.partial(gated_delta_rule, scale=1.0, implementation="xla"))(
        **arguments
    )
    assert_close(o, arguments["v"], 1e-6, "recalled values")


def test_identical_keys_stay_finite_and_exact_at_full_strength():
    """Powers of the triangular tiles reach 1e18 here, while their inverse holds -1, 0, 1 or 2."""
    key = np.zeros((1, 256, 1, 4), np.float32)
    key[..., 0] = 1.0
    values = np.random.default_rng(0).normal(size=(1, 256, 1, 4)).astype(np.float32)
    gates = np.zeros((1, 256, 1), np.float32)
    recall = jax.jit(
        functools.partial(gated_delta_rule, scale=1.0, implementation="xla"),
        compiler_options=QUICK_COMPILE,
    )
    for strength, expected in ((1.0, values), (2.0, None)):
        o, _ = recall(key, key, values, gates, gates + strength)
        if expected is not None:
            assert_close(o, expected, 1e-6, "the last value written")
        else:
            alternating = 2 * (-1.0) ** np.arange(256)[:, None]
            running = np.cumsum(alternating * values[0, :, 0], axis=0) * (alternating / 2)
            assert_close(o[0, :, 0], running, 1e-5, "reflected sums")
