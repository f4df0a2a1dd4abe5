"""Which layers of a hybrid are softmax attention, by the name of its layout. Imports no JAX."""

import re

from jhybrid.config_fields import require


def full_layers(layout: str, depth: int) -> tuple[int, ...]:
    """Indices of the full-attention layers among `depth`.

    "pure"  none
    "full"  all
    "N-1"   every N-th: layer i if (i + 1) % N == 0. One of N: 3-1 of 24 layers is 8 full and 16
            linear, as the checkpoints of arXiv 2507.06457 are named
    "N:1"   one after every N linear ones: layer i if (i + 1) % (N + 1) == 0

    Raises UserError for another name, or when the depth is no multiple of the period.
    """
    if layout == "pure":
        return ()
    if layout == "full":
        return tuple(range(depth))
    found = re.fullmatch(r"([1-9]\d*)([-:])1", layout)
    require(found is not None, f"layout={layout!r}: choose pure, full, N-1 or N:1, as in 6-1")
    assert found is not None
    period = int(found[1]) + (found[2] == ":")
    require(
        depth % period == 0,
        f"layout={layout!r} repeats every {period} layers; depth={depth} must be a multiple of it",
    )
    return tuple(range(period - 1, depth, period))
