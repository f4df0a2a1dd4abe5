"""Times Block-Sparse-Attention (github.com/mit-han-lab/Block-Sparse-Attention) on the same masks.

    python -m pallas_kernels.block_sparse_attention.gpu_block_sparse_attention 1:32768:0.1

It needs torch and `block_sparse_attn` on a GPU. Problems and numbers are those of
`gpu_flex_attention`. Its kernels take packed rows, blocks of 128 and a mask of blocks for each
head, which each call converts to lists, as ours builds its schedule. Its output is compared with
dense attention first.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from pallas_kernels.block_sparse_attention.gpu_flex_attention import (
    BLOCK,
    D,
    H,
    Problem,
    draw,
    report,
)

_LARGEST_RATIO = 1e-2  # rms of the difference over the rms of dense attention, in bf16


def block_sparse(problem: Problem) -> tuple[Callable, Problem]:
    """(attend(q, k, v) -> o, the problem), q, k, v and o [B, T, H, D]."""
    library: Any = importlib.import_module("block_sparse_attn")
    B, T = problem.q.shape[:2]
    ends = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device="cuda")
    by_list = torch.ones(H, dtype=torch.int32, device="cuda")
    no_streaming = torch.zeros(2 * H, dtype=torch.int32, device="cuda")
    mask = problem.full | problem.diagonal

    def attend(q, k, v):
        q, k, v = (x.reshape(B * T, H, D) for x in (q, k, v))
        options = {"deterministic": True, "softmax_scale": D**-0.5, "is_causal": True}
        given = ends, ends, by_list, no_streaming, mask, T, T, 0.0
        return library.block_sparse_attn_func(q, k, v, *given, **options).reshape(B, T, H, D)

    return attend, problem


def ratio() -> float:
    """How far its output is from dense attention under the same mask, in fp32."""
    attend, problem = block_sparse(draw(1, 1024, 0.3))
    q, k, v = (x.detach() for x in problem[:3])
    pairs = problem.full | problem.diagonal
    seen = pairs.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3).tril()
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.float().transpose(1, 2) for x in (q, k, v)), attn_mask=seen
    ).transpose(1, 2)
    error = attend(q, k, v).float() - dense
    return float((error.square().mean() / dense.square().mean()).sqrt())


def main(problems: list[str]) -> None:
    if importlib.util.find_spec("block_sparse_attn") is None:
        raise SystemExit("block_sparse_attn is not installed")
    found = ratio()
    print(f"close to dense attention: {found:.1e}")
    if not found <= _LARGEST_RATIO:
        raise SystemExit("not timed: not close to dense attention")
    report(block_sparse, problems)


if __name__ == "__main__":
    main(sys.argv[1:])
