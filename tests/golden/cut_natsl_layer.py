"""Cuts natsl_layer.npz from the full recording of the authors' NAtS-L layer. Run by hand.

    python tests/golden/cut_natsl_layer.py natsl_layer_fp32.npz tests/golden/natsl_layer.npz

The recording is one forward and backward pass of the layer released as
automl/NeuralAttentionSearchLinear (commit 90b4315, BSD-3-Clause) on an NVIDIA H200 with torch 2.11,
Triton 3.6 and flash-linear-attention 0.3.2: fp32 tensors, TF32 matrix products. Numbers only. The
cut rounds everything to float16, as fine as TF32, and keeps every STRIDE-th row of the large
results; what a row of the output or of a gradient contains still depends on everything else.
"""

import sys

import numpy as np

STRIDE = 8
KEEP_WHOLE = 4096  # elements


def cut(recording):
    """Arrays by name: x, do and p.* whole; o, dx and g.* by rows (axis 1 of o and dx)."""
    small = {}
    for name, array in recording.items():
        if array.size > KEEP_WHOLE and name in ("o", "dx"):
            array = array[:, ::STRIDE]
        elif array.size > KEEP_WHOLE and name.startswith("g."):
            array = array[::STRIDE]
        small[name] = array.astype(np.float16)
    return small


if __name__ == "__main__":
    np.savez_compressed(sys.argv[2], **cut(np.load(sys.argv[1])))
