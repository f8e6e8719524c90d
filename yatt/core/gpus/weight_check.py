"""How far an engine's log-probs may be from the trainer's after it has loaded the weights. Pure."""

import math

from yatt.records.message import unpack_floats

LEAST_ALLOWED = {"float32": 1e-4, "bfloat16": 1e-2}
ROUNDINGS_ALLOWED = 3.0
"""Maximum ratio of two differences: engine to trainer, and trainer to itself, rounded once more per layer.

Measured in bfloat16 on random models of 8 and 24 layers, with two engines: ratios of 0.4 to 0.9, whether
rounding moves the log-probs by 0.006 or by 0.1.
"""


def mean_difference(expected: tuple[bytes, ...], got: tuple[bytes, ...]) -> float:
    """Mean absolute difference of log-probs, row by row; infinite if lengths differ or one is not finite."""
    left = [value for row in expected for value in unpack_floats(row)]
    right = [value for row in got for value in unpack_floats(row)]
    if [len(row) for row in expected] != [len(row) for row in got]:
        return math.inf
    mean = sum(abs(a - b) for a, b in zip(left, right, strict=True)) / max(1, len(left))
    return mean if math.isfinite(mean) else math.inf


def allowed_difference(dtype: str, configured: float, rounding: float) -> float:
    """Returns the largest mean difference that rounding explains: as configured, or, if 0, as measured."""
    return configured or max(LEAST_ALLOWED[dtype], ROUNDINGS_ALLOWED * rounding)
