"""Events: the page about them, their file's form, and what is damaged."""

import json
import math
from typing import Any

import msgspec
import pytest

from tests.obs_runs import event
from tools import document_events
from yatt.obs.story.events import EventLog
from yatt.obs.story.sentences import sentence_of
from yatt.records.events.event import Event
from yatt.records.events.log import KINDS, LoggedEvent, logged_event
from yatt.records.events.saves import CheckpointCommitted, CheckpointFailed, WeightsChecked
from yatt.records.events.slabs import SlabOrdered


def test_the_page_is_that_of_the_classes() -> None:
    page = document_events.FILE.read_text()
    assert page == document_events.page(), "run python tools/document_events.py"
    assert all(f"`{kind}`" in page for kind in KINDS) and len(KINDS) > 60


def test_a_line_has_its_stamps_its_kind_and_its_fields_at_the_top() -> None:
    lines = list[str]()
    log = EventLog(attempt=3, node=2, role="controller", sink=lines.append)
    sent = SlabOrdered(slab="n0s0", before="rollout", after="genrm:judge", reason="split")
    log.emit(sent)
    record = json.loads(lines[0])
    assert record["kind"] == "slab.move" and record["slab"] == "n0s0" and record["attempt"] == 3
    read = logged_event(record)
    assert read is not None and (read.event, read.attempt, read.node) == (sent, 3, 2)
    assert read.ticks_ns == record["t"] > 0 and read.wall == record["wall"]


def test_half_a_character_in_an_error_costs_this_character() -> None:
    lines = list[str]()
    log = EventLog(attempt=1, node=0, role="controller", sink=lines.append)
    log.emit(CheckpointFailed(iteration=2, error="no file '/ckpt/\udcff'"))
    read = logged_event(json.loads(lines[0].encode()))
    assert read is not None and read.event == CheckpointFailed(iteration=2, error="no file '/ckpt/?'")


def test_a_comparison_of_numbers_that_are_not_finite_is_no_damage() -> None:
    lines = list[str]()
    log = EventLog(attempt=1, node=0, role="controller", sink=lines.append)
    log.emit(WeightsChecked(worker="w.1", policy_version=1, difference=math.nan, allowed=1.0, num_compared=3))
    read = logged_event(json.loads(lines[0]))
    assert read is not None and isinstance(read.event, WeightsChecked) and read.event.difference is None


def test_a_clock_of_a_node_that_has_run_for_years_is_read() -> None:
    ten_years_ns = 10 * 365 * 86_400 * 10**9
    read = logged_event({**GOOD, "t": ten_years_ns})
    assert read is not None and read.ticks_ns == ten_years_ns
    assert logged_event({**GOOD, "t": 1 << 63}) is None and logged_event({**GOOD, "t": -1}) is None


GOOD = event(1, "ckpt.commit", iteration=2, size_bytes=10, seconds=0.5)


@pytest.mark.parametrize(
    "damage",
    [
        {"iteration": "2"}, {"iteration": -1}, {"iteration": True}, {"iteration": None},
        {"size_bytes": 1 << 70},
        {"seconds": float("nan")}, {"seconds": float("inf")}, {"attempt": "1"}, {"attempt": "\ud800"},
        {"node": -1}, {"node": 1 << 40}, {"wall": "yesterday"}, {"wall": "0001-01-01T00:00:00"}, {"kind": 5},
        {"t": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_line_is_no_event(damage: dict[str, Any]) -> None:
    assert logged_event(GOOD) == LoggedEvent(
        CheckpointCommitted(iteration=2, size_bytes=10, seconds=0.5), 1, GOOD["wall"], GOOD["t"]
    )
    assert logged_event({**GOOD, **damage}) is None


def test_logs_of_other_versions_are_read() -> None:
    older = logged_event({name: value for name, value in GOOD.items() if name != "seconds"})
    assert older is not None and older.event == CheckpointCommitted(iteration=2, size_bytes=10)
    newer = logged_event({**GOOD, "bytes_per_s": 4})
    assert newer == logged_event(GOOD)
    unknown = logged_event({**GOOD, "kind": "ckpt.new"})
    assert unknown is not None and type(unknown.event) is Event and sentence_of(unknown) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_sentence_or_none_and_comes_back_from_its_line(kind: str) -> None:
    cls = KINDS[kind]
    made = {field.name: _value(field.type) for field in msgspec.structs.fields(cls) if field.required}
    lines = list[str]()
    EventLog(attempt=1, node=0, role="controller", sink=lines.append).emit(msgspec.convert(made, cls))
    read = logged_event(json.loads(lines[0]))
    assert read is not None and type(read.event) is cls
    assert isinstance(sentence_of(read), str)


def _value(kind: Any) -> Any:
    """A value that a field of this type takes."""
    for value in ("x", 1, 0.5, True, {}, [], [0.0, 1.0]):
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            continue
        return value
    raise AssertionError(kind)
