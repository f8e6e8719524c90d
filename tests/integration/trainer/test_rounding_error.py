"""How often the effect of rounding is measured; its measurement is tested with the probe itself."""

from typing import Any

import pytest

from tests.packages import trainer_module


def test_the_rounding_error_is_measured_at_the_first_publication_and_each_sixteenth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = trainer_module("probe")
    measured: list[int] = []
    nothing: Any = None

    def measure(*_: object) -> float:
        measured.append(version)
        return float(version)

    monkeypatch.setattr(probe, "probe_rounding", measure)
    error = probe.MeasuredRounding()
    told = []
    for version in range(5, 40):
        told.append(error.at(version, nothing, [], [], nothing, lambda: None))
    assert measured == [5, 16, 32]
    assert told == [5.0] * 11 + [16.0] * 16 + [32.0] * 8
