"""What a case asks of any implementation, for floors beside measured or estimated times."""

from typing import NamedTuple


class Work(NamedTuple):
    """Of one pass: forward, or forward and backward together."""

    units: float  # the case's size in `unit`
    unit: str  # what costs are divided by, "head and 128 tokens"
    flops: float
    bytes: float  # arguments and results, once for each pass that needs them
