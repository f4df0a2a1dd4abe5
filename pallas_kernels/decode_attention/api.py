"""Public decode attention: the contract, its checks, and the implementation table."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.decode_attention import pallas_gpu, pallas_tpu, reference, xla
from pallas_kernels.decode_attention.parts import Logits
from pallas_kernels.dispatch import Candidate, Implementation, Table, resolve


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What decides which implementation runs: sizes and dtype, never values."""

    B: int
    t: int  # queries of a row
    H: int
    G: int
    K: int
    V: int
    P: int  # pages in the pool
    C: int  # tokens of a page
    N: int  # entries of a list
    dtype: str


def decode_attention(
    q: Float[Array, "B t H K"],
    k_pages: Float[Array, "P C K"],
    v_pages: Float[Array, "P C V"],
    pages: Int[Array, "B G N"],
    starts: Int[Array, "B G N"],
    positions: Int[Array, "B t"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B t H V"], Float[Array, "B H t"]]:
    """Softmax attention of query head h over the pages listed for key/value head h // (H / G).

    Token c of a listed page n stands at position starts[n] + c; a query sees it when that is <= its
    own position. A page id < 0 is no page. The order of a list does not matter, so it may be a
    ring: with pages of the mask's block size, the sink pages and a ring of `local_blocks` pages
    give what `BlockMask.streaming` gives, as long as the queries of a call lie in one block. A page
    that is being written again hides what is left in it, which now stands after the query.

    A query that sees no token gets o = 0, lse = -inf. Accumulation in fp32 (float64 for float64
    inputs); o has the dtype of v. Gradients, of o and of lse, are those of `xla`.

    A list takes the Pallas kernels as long as its last page that a query of the row can see stands
    far from its front: pages belong to the front, what is -1 behind them.

    Args:
      scale: K ** -0.5 by default.
      softcap: logits become softcap tanh(logits / softcap).
      implementation: see `IMPLEMENTATIONS`.

    Raises:
      ValueError, TypeError: for shapes and dtypes that disagree, naming both.
    """
    _check(q, k_pages, v_pages, pages, starts, positions)
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not isinstance(number, int | float):
            raise TypeError(f"{name} must be a Python number, got {type(number).__name__}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} must be > 0")
    (B, t, H, K), (G, N), (P, C, V) = q.shape, pages.shape[1:], v_pages.shape
    problem = Problem(B, t, H, G, K, V, P, C, N, q.dtype.name)
    logits = Logits(K**-0.5 if scale is None else scale, softcap)
    candidate = resolve("decode_attention", IMPLEMENTATIONS, implementation, problem)
    pages, starts, positions = (x.astype(jnp.int32) for x in (pages, starts, positions))
    return candidate.run(logits, q, k_pages, v_pages, pages, starts, positions)


def _check(q, k_pages, v_pages, pages, starts, positions) -> None:
    ranks = {"q": (q, 4), "k_pages": (k_pages, 3), "v_pages": (v_pages, 3), "pages": (pages, 3)}
    for name, (array, rank) in ranks.items():
        if array.ndim != rank:
            raise ValueError(f"{name} must have {rank} dimensions, got {array.shape}")
        if 0 in array.shape:
            raise ValueError(f"{name} is empty: {array.shape}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"q must be floating, got {q.dtype}")
    for name, array in (("k_pages", k_pages), ("v_pages", v_pages)):
        if array.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} but {name} is {array.dtype}")
    for name, array in (("pages", pages), ("starts", starts), ("positions", positions)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} must be integer, got {array.dtype}")
    if k_pages.shape[:2] != v_pages.shape[:2]:
        raise ValueError(
            f"k_pages is {k_pages.shape[:2]} pages of tokens, v_pages {v_pages.shape[:2]}"
        )
    if q.shape[3] != k_pages.shape[2]:
        raise ValueError(f"q has head dim {q.shape[3]}, k_pages has {k_pages.shape[2]}")
    if pages.shape[0] != q.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, pages has batch {pages.shape[0]}")
    if q.shape[2] % pages.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {pages.shape[1]} lists")
    if starts.shape != pages.shape:
        raise ValueError(f"starts has shape {starts.shape}, pages has {pages.shape}")
    if positions.shape != q.shape[:2]:
        raise ValueError(f"positions must be {list(q.shape[:2])}, got {list(positions.shape)}")


def _differentiable(kernel: Callable) -> Callable:
    """`kernel` with the gradients of `xla`."""
    run = jax.custom_vjp(kernel, nondiff_argnums=(0,))

    def backward(logits, arguments, cotangents):
        *floating, pages, starts, positions = arguments

        def attend(q, k_pages, v_pages):
            return xla.attend(logits, q, k_pages, v_pages, pages, starts, positions)

        return *jax.vjp(attend, *floating)[1](cotangents), None, None, None

    run.defvjp(lambda logits, *arguments: (kernel(logits, *arguments), arguments), backward)
    return run


IMPLEMENTATIONS: Table = {
    "reference": Candidate(reference.attend),
    "xla": Candidate(xla.attend),
    "pallas_tpu": Candidate(_differentiable(pallas_tpu.attend), pallas_tpu.unsupported),
    "pallas_gpu": Candidate(_differentiable(pallas_gpu.attend), pallas_gpu.unsupported),
}
