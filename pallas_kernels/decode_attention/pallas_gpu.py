"""Decode attention on Hopper GPUs: the keys of all lists as one queue, cut into equal shares.

A step is 64 tokens of one list. The steps of all lists, one after the other, are dealt out in equal
runs to as many workers as fit on the chip (`Shares`), so one row fills it and heads of any mixture
of lengths finish together. A worker, one warpgroup, leaves an output and a log-sum for each list it
had steps of; a second kernel merges those of each list. Results do not vary between runs. The
matrix unit multiplies tiles of 64 queries, most of them padding: it is memory that bounds decoding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.blocks import cdiv
from pallas_kernels.decode_attention.parts import (
    Lists,
    Logits,
    by_head,
    by_list,
)
from pallas_kernels.dispatch import Target

JAX_VERSION = "0.11.2"  # Mosaic GPU changes between versions
_CHIPS = ("H100", "H200")
_MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form
_SHARED_BYTES = 225 * 1024  # of a multiprocessor, besides the system's and barriers
_WIDTHS = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 256))  # (K, V)
ROWS = 64  # queries of a list, padded: what one warpgroup multiplies
STEP = 64  # tokens
_FEWEST_STEPS = 4  # of a share: below, what a share costs beside its steps is more than it saves


def unsupported(problem: Any, target: Target) -> str | None:
    """Why the Hopper kernel cannot take `problem` on `target`, or None."""
    if target.platform != "gpu" or not any(chip in target.device_kind for chip in _CHIPS):
        return f"needs an NVIDIA {' or '.join(_CHIPS)}, not {target.device_kind!r}"
    if jax.__version__ != JAX_VERSION:
        return f"its kernels are written for JAX {JAX_VERSION}, not {jax.__version__}"
    if problem.dtype != "bfloat16":
        return f"q and the pages must be bfloat16, not {problem.dtype}"
    if (problem.K, problem.V) not in _WIDTHS:
        return f"(K, V) must be one of {_WIDTHS}, not {(problem.K, problem.V)}"
    if problem.C not in (8, 16, 32) and problem.C % STEP:
        return f"pages must have 8, 16, 32 or a multiple of {STEP} tokens, not {problem.C}"
    queries = problem.t * problem.H // problem.G
    if queries > ROWS:
        return f"{queries} queries share a list, at most {ROWS} do"
    return None


def stages_and_workers(K: int, V: int) -> tuple[int, int]:
    """Steps in a worker's shared memory, and workers on the chip: two a multiprocessor that hold
    two steps or more each, else one."""
    for workers in (2, 1):
        stages = (_SHARED_BYTES // workers - 2 * ROWS * K) // (2 * STEP * (K + V))
        if stages >= 2:
            return min(stages, 4), workers * _MULTIPROCESSORS
    raise AssertionError(f"two steps of ({K}, {V}) do not fit")


class Shares(NamedTuple):
    """The queue of the steps of L lists in equal runs, one for each of `workers`.

    Worker w writes its part of list n to place n + w. A list without any steps gets one worker,
    who finds nothing. On scalars in the kernels, on arrays elsewhere.
    """

    workers: int
    size: Int[Array, "*_"]  # steps of a worker

    @classmethod
    def of(cls, steps: Int[Array, "*_"], workers: int) -> "Shares":
        """For so many steps in all."""
        each = lax.div(steps + (workers - 1), jnp.int32(workers))
        return cls(workers, jnp.maximum(each, _FEWEST_STEPS))

    def first(self, begin: Int[Array, "*_"]) -> Int[Array, "*_"]:
        """The first worker of a list whose steps start at `begin` in the queue."""
        return jnp.minimum(lax.div(begin, self.size), self.workers - 1)

    def last(self, begin: Int[Array, "*_"], end: Int[Array, "*_"]) -> Int[Array, "*_"]:
        """The last worker of the list of steps `begin` .. `end` - 1."""
        return jnp.maximum(self.first(begin), lax.div(end - 1, self.size))


def attend(
    logits: Logits,
    q: Float[Array, "B t H K"],
    k_pages: Float[Array, "P C K"],
    v_pages: Float[Array, "P C V"],
    pages: Int[Array, "B G N"],
    starts: Int[Array, "B G N"],
    positions: Int[Array, "B t"],
    *,
    workers: int | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B t H V"], Float[Array, "B H t"]]:
    """See `api.decode_attention`; `stages_and_workers` says how many workers, unless given."""
    # Mosaic GPU is experimental: other JAX versions must be able to import this module.
    from pallas_kernels.decode_attention.pallas_gpu_kernels import merged, parts

    (B, t, H, K), G, (C, V) = q.shape, pages.shape[1], v_pages.shape[1:]
    stages, fitting = stages_and_workers(K, V)
    pieces = max(1, STEP // C)
    given = Lists.of(pages, starts, positions, group=H // G, entries=pieces, rows=1)
    ends = jnp.cumsum(cdiv(C, STEP) * ((given.lengths + pieces - 1) // pieces))
    queries = by_list(q, G)
    found = parts(
        logits,
        stages,
        workers or fitting,
        interpret,
        ends,
        given,
        positions,
        queries,
        k_pages,
        v_pages,
    )
    o, lse = merged(ends, *found, workers or fitting, v_pages.dtype, interpret)
    return by_head(o, lse, B, t)
