"""Times torch's FlexAttention, compiled, on masks like the `blocks` cases; needs torch on a GPU.

    python -m pallas_kernels.block_sparse_attention.gpu_flex_attention 1:32768:0.1 8:4096:0.25

B:T:p are 16 heads of 128, key blocks of 128 kept with probability p, and the diagonal. It gets
what suits it: diagonal blocks are marked as masked inside, all others as full. A process of its
own, because torch and JAX would compete for memory. TFLOP/s count kept blocks, as ours do.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch  # pyright: ignore[reportMissingImports]
from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
    BlockMask,
    flex_attention,
)

H, D, BLOCK = 16, 128, 128


class Problem(NamedTuple):
    """q, k, v and do [B, T, H, D], and the kept pairs of blocks [B, H, N, N]."""

    q: Any
    k: Any
    v: Any
    do: Any
    full: Any  # below the diagonal
    diagonal: Any

    @property
    def flops(self) -> float:
        return 4.0 * int(self.full.sum() + self.diagonal.sum()) * BLOCK * BLOCK * D


def draw(B: int, T: int, p: float) -> Problem:
    blocks = T // BLOCK
    generator = torch.Generator(device="cuda").manual_seed(0)
    keep = torch.rand(B, H, blocks, blocks, device="cuda", generator=generator) < p
    full = torch.tril(keep, -1)
    diagonal = torch.eye(blocks, dtype=torch.bool, device="cuda").expand(full.shape)

    def normal():
        shape = (B, T, H, D)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v = (normal().requires_grad_() for _ in range(3))
    return Problem(q, k, v, normal(), full, diagonal)


def flex(problem: Problem) -> tuple[Callable, Problem]:
    """(attend(q, k, v) -> o, the problem as it takes it: [B, H, T, D])."""

    def counts_and_ids(chosen):
        order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
        return chosen.sum(-1).to(torch.int32), order.to(torch.int32)

    mask = BlockMask.from_kv_blocks(
        *counts_and_ids(problem.diagonal),
        *counts_and_ids(problem.full),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: query >= key,
    )
    attend = torch.compile(flex_attention, dynamic=False)
    arrays = (x.detach().transpose(1, 2).contiguous() for x in problem[:4])
    q, k, v, do = (x if n == 3 else x.requires_grad_() for n, x in enumerate(arrays))
    taken = problem._replace(q=q, k=k, v=v, do=do)
    return lambda q, k, v: attend(q, k, v, block_mask=mask), taken


def calls(attend: Callable, problem: Problem) -> Iterator[tuple[str, Callable[[], Any], float]]:
    """(direction, call, floating-point operations)."""
    q, k, v, do = problem[:4]

    def forward():
        with torch.no_grad():
            return attend(q, k, v)

    def forward_backward():
        return torch.autograd.grad(attend(q, k, v), (q, k, v), do)

    yield "forward", forward, problem.flops
    yield "forward+backward", forward_backward, 3.5 * problem.flops


def median_ms(call: Callable[[], Any], batches: int = 7, repeats: int = 20) -> float:
    """Median over batches of the mean time of one call, as `pallas_kernels.benchmark` has it."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return 1e3 * statistics.median(times)


def report(prepare: Callable[[Problem], tuple[Callable, Problem]], problems: list[str]) -> None:
    """A line for each problem B:T:p and direction."""
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for name in problems:
        B, T, p = name.split(":")
        for direction, call, flops in calls(*prepare(draw(int(B), int(T), float(p)))):
            ms = median_ms(call)
            print(f"{name:16} {direction:18} {ms:9.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s")


if __name__ == "__main__":
    report(flex, sys.argv[1:])
