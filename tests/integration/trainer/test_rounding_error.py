"""How often the effect of rounding is measured; its measurement is tested with the probe itself."""

import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core, about libraries that are not there
    from yatt.trainer import probe


def test_it_is_measured_at_the_first_publication_and_then_now_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
