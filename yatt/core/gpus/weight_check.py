"""How far an engine's log-probs may be from the trainer's after it has loaded the weights. Pure."""

import math

from yatt.records.message import unpack_floats

LEAST_ALLOWED = {"float32": 1e-4, "bfloat16": 1e-2}
ROUNDINGS_ALLOWED = 3.0
"""Maximum ratio of two differences: engine to trainer, and trainer to itself, rounded once more per layer.

Measured in bfloat16 on random models of 8 and 24 layers, with two engines: ratios of 0.4 to 0.9, whether
rounding moves the log-probs by 0.006 or by 0.1.
"""


def row_differences(expected: tuple[bytes, ...], got: tuple[bytes, ...]) -> list[float]:
    """Mean absolute difference of log-probs of each row; infinite if lengths differ or one is not finite."""
    if [len(row) for row in expected] != [len(row) for row in got]:
        return [math.inf] * max(1, len(expected))
    return [_mean_difference(a, b) for a, b in zip(expected, got, strict=True)]


def _mean_difference(expected: bytes, got: bytes) -> float:
    pairs = list(zip(unpack_floats(expected), unpack_floats(got), strict=True))
    mean = sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))
    return mean if math.isfinite(mean) else math.inf


def allowed_difference(dtype: str, configured: float, rounding: float) -> float:
    """Returns the largest mean difference that rounding explains: as configured, or, if 0, as measured."""
    return configured or max(LEAST_ALLOWED[dtype], ROUNDINGS_ALLOWED * rounding)
