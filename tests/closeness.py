"""The closeness measure of the whole test suite: rms(actual - expected) / rms(expected)."""

import numpy as np


def _float64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rms(x) -> float:
    """Root mean square over all elements; 0 for an empty array."""
    x = _float64(x)
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def rms_ratio(actual, expected) -> float:
    """rms(actual - expected) / rms(expected); 0 if both vanish, inf if only `expected` does."""
    error, size = rms(_float64(actual) - _float64(expected)), rms(expected)
    return error / size if size else (0.0 if error == 0 else float("inf"))


def assert_close(actual, expected, ratio: float, name: str = "value", *, floor: float = 0.0):
    """Fails unless rms(actual - expected) <= ratio * rms(expected).

    A NaN in either array fails first. Infinities must stand in the same places with the same sign
    and are left out of the ratio. `floor` is the rms error accepted whatever `expected` is: for
    quantities whose exact value is 0.
    """
    actual, expected = _float64(actual), _float64(expected)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, not {expected.shape}"
    for label, x in (("actual", actual), ("expected", expected)):
        assert not np.isnan(x).any(), f"{name}: {int(np.isnan(x).sum())} NaN in {label}"
    finite = np.isfinite(expected)
    assert np.array_equal(actual[~finite], expected[~finite]), f"{name}: infinities differ"
    assert np.isfinite(actual[finite]).all(), f"{name}: infinite where a finite value is expected"
    actual, expected = actual[finite], expected[finite]
    error = rms(actual - expected)
    largest = float(np.abs(actual - expected).max(initial=0.0))
    assert error <= max(ratio * rms(expected), floor), (
        f"{name}: rms ratio {rms_ratio(actual, expected):.3e} > {ratio:.1e} "
        f"(max abs error {largest:.3e}, rms expected {rms(expected):.3e})"
    )
