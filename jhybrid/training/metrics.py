"""Where the numbers of a run go: metrics.jsonl always, TensorBoard when it is installed."""

import importlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Dense bf16 FLOP/s of one JAX device, by the start of its device_kind, from the vendors' data
# sheets without sparsity. The first match counts.
PEAK_FLOPS: Mapping[str, float] = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "TPU7x": 2307e12 / 2,  # two devices per chip
}


def peak_flops(device: jax.Device) -> float | None:
    """Dense bf16 FLOP/s of a device; None when unknown (a CPU)."""
    kinds = (flops for kind, flops in PEAK_FLOPS.items() if device.device_kind.startswith(kind))
    return next(kinds, None)


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, devices: list[jax.Device]
) -> float | None:
    """MFU = tokens/s * model FLOPs per trained token / (devices * peak dense bf16 FLOP/s)."""
    peak = peak_flops(devices[0])
    return None if peak is None else tokens_per_second * flops_per_token / (len(devices) * peak)


def collapsed_routing(routing: Mapping[str, Mapping[str, np.ndarray]]) -> str | None:
    """What to warn of when every head of every routed block always chooses the same."""
    fractions = [np.ravel(found["softmax_fraction"]) for found in routing.values()]
    if not fractions:
        return None
    fractions = np.concatenate(fractions)
    if np.all(fractions == 0.0):
        return "routing has collapsed: every head is always linear (or sparse)"
    if np.all(fractions == 1.0):
        return "routing has collapsed: every head is always softmax attention (or full)"
    return None


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (np.ndarray, jax.Array)):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Numbers of a record by slash-separated name; lists give one name per item."""
    found: dict[str, float] = {}
    for key, value in record.items():
        name = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            found |= _scalars(value, name)
        elif isinstance(value, list):
            found |= _scalars({str(i): item for i, item in enumerate(value)}, name)
        elif isinstance(value, (int, float)):
            found[name] = float(value)
    return found


class MetricsWriter:
    """Appends one JSON object per line to workdir/metrics.jsonl.

    Each has "event" (start, train, validation, evaluation, checkpoint, warning), "step" and "time"
    (seconds since the epoch). A resumed run appends; steps that a killed run took after its last
    checkpoint therefore appear twice, and the later line is the one that counts.
    """

    def __init__(self, workdir: Path):
        path = workdir / "metrics.jsonl"
        _drop_partial_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = _tensorboard_writer(workdir)

    def write(self, event: str, step: int, **values: Any) -> None:
        record = _plain({"event": event, "step": step, "time": round(time.time(), 3), **values})
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in _scalars(_plain(values), event).items():
                self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _drop_partial_line(path: Path) -> None:
    """A process killed while writing leaves half a line; the next one would join it."""
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            with path.open("r+b") as file:
                file.truncate(whole)


def _tensorboard_writer(workdir: Path) -> Any:
    """A SummaryWriter of tensorboardX or of torch, whichever is installed; else None."""
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            return importlib.import_module(module).SummaryWriter(str(workdir / "tensorboard"))
        except ImportError:
            continue
    return None
