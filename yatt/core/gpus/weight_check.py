"""How far an engine's log-probs may be from the trainer's after it has loaded the weights. Pure."""

import math
from dataclasses import dataclass

from yatt.config.schema import RunConfig
from yatt.records.message import WeightsLoaded, unpack_floats

QUANTIZATION = "quantization"

LEAST_ALLOWED = {"float32": 1e-4, "bfloat16": 1e-2}
ROUNDINGS_ALLOWED = 3.0
"""Maximum ratio of two differences: engine to trainer, and trainer to itself, rounded once more per layer.

Measured in bfloat16 on random models of 8 and 24 layers, with two engines: ratios of 0.4 to 0.9, whether
rounding moves the log-probs by 0.006 or by 0.1.
"""


QUANTISED_MOST, QUANTISED_RATIO = 0.5, 4.0
"""Maximum mean difference of an engine with quantised weights at its first publication: in nats, or as a
multiple of what is allowed without. Other weights than the published ones differ by more than 1 nat. Measured
in FP8 on a random model of 4 layers: 0.34 to 0.49, where 0.16 was allowed without."""


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


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """Result of a check: the largest mean difference of a sequence, the allowed one, and what is wrong."""

    difference: float
    allowed: float
    fault: str


class WeightCheck:
    """Decides whether an engine has the weights that the trainer has published.

    Weights that an engine quantises cannot be compared bit by bit, only by their log-probs: what the first
    publication shows bounds the later ones, since rounding of weights has about the same effect on each.
    """

    def __init__(self, config: RunConfig) -> None:
        self._dtype, self._sync, self._engine = config.model.dtype, config.sync, config.rollout.engine
        self._options = config.rollout.engine_args
        self._first: float | None = None  # difference at the first publication, of quantised weights

    def checked(self, expected: tuple[bytes, ...], rounding: float, answer: WeightsLoaded) -> CheckedWeights:
        """Compares an engine's answer with the trainer's.

        Args:
            expected: the trainer's log-probs of the probe.
            rounding: their mean change by another rounding (`m.Published`).
        """
        rows = row_differences(expected, answer.probe_logprobs)
        mean = max(rows, default=0.0)
        allowed = self._allowed(mean, rounding)
        fault = self._fault(answer, mean, allowed, rows.index(mean) if rows else 0)
        return CheckedWeights(mean, allowed, fault)

    def _allowed(self, mean: float, rounding: float) -> float:
        plain = allowed_difference(self._dtype, self._sync.tolerance, rounding)
        if QUANTIZATION not in self._options or self._sync.tolerance:
            return plain
        most = max(QUANTISED_MOST, QUANTISED_RATIO * plain)
        if self._first is None:
            self._first = max(mean, plain)
            return most
        return min(most, ROUNDINGS_ALLOWED * self._first)

    def _fault(self, answer: WeightsLoaded, mean: float, allowed: float, worst: int) -> str:
        version = f"policy version {answer.policy_version}"
        if not answer.num_readable and self._engine != "scripted":
            return (
                f"no tensor of {version} can be compared: the engine has none of the published names with "
                "their shapes and dtypes"
            )
        if answer.differing or not mean <= allowed:
            where = (
                "a sequence of text" if worst < self._sync.probe_prompts else "the sequence with a picture"
            )
            return (
                f"after taking {version}, {answer.num_compared} tensors could be compared and these differ: "
                f"{', '.join(answer.differing) or 'none'}; log-probs of the probe differ from the trainer's "
                f"by {mean:.2e} on average in {where}, {allowed:.2e} is allowed"
            )
        if not answer.decoded_difference <= allowed:
            options = ", ".join(self._options)
            cure = f"; it has the options {options} (rollout.engine_args): remove them" if options else ""
            return (
                f"with {version}, log-probs of tokens that it sampled differ from its own scores of these "
                f"tokens by {answer.decoded_difference:.2e} on average, {allowed:.2e} is allowed{cure}"
            )
        return ""
