"""The inputs of a start, compared with those of the attempt that wrote the newest checkpoint."""

import threading
from pathlib import Path

import pytest

from tests.obs_runs import make_run
from tests.runs import HANG_S
from yatt.adapters.run_folder.ledger import COMMITTED, ENDED, STARTED, write_record
from yatt.config.load import load_resolved
from yatt.errors import ConfigError
from yatt.launch.folder import inputs as inputs_module
from yatt.launch.folder.inputs import changed_inputs, inputs_before, inputs_now
from yatt.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return make_run(tmp_path)


def attempt(
    paths: RunPaths, number: int, tokenizer: str, *, found: int, committed: int | None = None
) -> None:
    """The records of an attempt that found a checkpoint, and perhaps wrote one."""
    write_record(paths, number, STARTED, {"committed": found, "inputs": {"tokenizer": tokenizer}})
    if found or committed:
        write_record(paths, number, COMMITTED, {"iteration": committed or found})
    write_record(paths, number, ENDED, {"exit_code": 1, "committed": committed or found})


def test_it_is_the_writer_of_the_checkpoint_that_counts_not_who_has_restored_it(paths: RunPaths) -> None:
    assert inputs_before(paths) == {}
    attempt(paths, 1, "a", found=0)
    assert inputs_before(paths) == {}, "nothing is saved: everything may be corrected"
    attempt(paths, 2, "b", found=0, committed=10)
    attempt(paths, 3, "c", found=10)
    assert inputs_before(paths) == {"tokenizer": "b"}
    attempt(paths, 4, "d", found=10, committed=12)
    assert inputs_before(paths) == {"tokenizer": "d"}


@pytest.mark.parametrize(
    "record", [{}, {"inputs": 3}, {"inputs": ["tokenizer"]}, {"inputs": {"tokenizer": 3}}]
)
def test_what_an_older_yatt_or_a_stranger_has_recorded_is_unknown(paths: RunPaths, record: dict) -> None:
    write_record(paths, 1, STARTED, {"committed": 0, **record})
    write_record(paths, 1, COMMITTED, {"iteration": 1})
    assert inputs_before(paths) == {}


def test_a_refusal_names_the_command_and_a_change_that_may_be_is_returned(paths: RunPaths) -> None:
    config = load_resolved(paths.config)
    before, now = {"tokenizer": "a", "environment": "a"}, {"tokenizer": "a", "environment": "b"}
    assert changed_inputs(config, paths, before, now) == ("environment",)
    with pytest.raises(ConfigError, match=rf"yatt resume {paths.root} 'run.accept_changed=\[tokenizer\]'"):
        changed_inputs(config, paths, before, {**now, "tokenizer": "b"})


def test_a_warning_ends_the_wait_for_files_that_do_not_answer(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(inputs_module, "add_input_digests", lambda *_: hung.wait(HANG_S))
    said: list[str] = []
    try:
        found = inputs_now(load_resolved(paths.config), is_told=lambda: True, say=said.append)
        assert found == {} and said == []
    finally:
        hung.set()
