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
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
    BlockMask,
    flex_attention,
)

H, D, BLOCK = 16, 128, 128


def calls(B: int, T: int, p: float) -> Iterator[tuple[str, Callable[[], Any], float]]:
    """(direction, call, floating-point operations)."""
    blocks = T // BLOCK
    generator = torch.Generator(device="cuda").manual_seed(0)
    keep = torch.rand(B, H, blocks, blocks, device="cuda", generator=generator) < p
    full = torch.tril(keep, -1)
    diagonal = torch.eye(blocks, dtype=torch.bool, device="cuda").expand(full.shape)

    def counts_and_ids(chosen):
        order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
        return chosen.sum(-1).to(torch.int32), order.to(torch.int32)

    mask = BlockMask.from_kv_blocks(
        *counts_and_ids(diagonal),
        *counts_and_ids(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: query >= key,
    )
    attend = torch.compile(flex_attention, dynamic=False)

    def normal():
        shape = (B, H, T, D)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v = (normal().requires_grad_() for _ in range(3))
    do = normal()

    def forward():
        with torch.no_grad():
            return attend(q, k, v, block_mask=mask)

    def forward_backward():
        return torch.autograd.grad(attend(q, k, v, block_mask=mask), (q, k, v), do)

    flops = 4.0 * int(full.sum() + diagonal.sum()) * BLOCK * BLOCK * D
    yield "forward", forward, flops
    yield "forward+backward", forward_backward, 3.5 * flops


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


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for problem in sys.argv[1:]:
        B, T, p = problem.split(":")
        for direction, call, flops in calls(int(B), int(T), float(p)):
            ms = median_ms(call)
            print(f"{problem:16} {direction:18} {ms:9.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s")
