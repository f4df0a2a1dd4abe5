"""Records the logits of transformers for the checkpoints of tests/checkpoint_cases.py. By hand:

    PYTHONPATH=tests python tests/golden/record_families.py tests/golden/families.npz

Needs the extra `compare`; the file says which versions wrote it. fp32, CPU, eager attention; every
STRIDE-th position, which still depends on all before it.
"""

import pathlib
import sys
import tempfile

import checkpoint_cases
import numpy as np

STRIDE = 10


def logits(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """fp32 logits [B, T, vocab] of transformers' own model."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


if __name__ == "__main__":
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    found = {"versions": np.array(versions)}
    for name, config in checkpoint_cases.CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = checkpoint_cases.write(
                pathlib.Path(folder), config, checkpoint_cases.weights(config)
            )
            found[name] = logits(path, checkpoint_cases.tokens())[:, STRIDE - 1 :: STRIDE]
    np.savez_compressed(sys.argv[1], **found)
