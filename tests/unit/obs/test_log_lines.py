"""`yatt logs`: the logs of all processes of a run as one."""

import logging
import random
import time
import tracemalloc
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.obs_runs import make_run
from yatt.adapters.processes.log_lines import LineFormatter
from yatt.cli.commands.log_printing import Chosen, print_logs, since_s
from yatt.errors import ConfigError
from yatt.obs.terminal import log_lines
from yatt.obs.terminal.log_lines import LogFile, LogFilter
from yatt.paths import RunPaths

VLLM = "(EngineCore_DP0 pid=17) INFO 11-26 16:40:52 [core.py:93] Initializing"
TRAINER = """\
2026-11-26T16:40:50.100+00:00 INFO megatron.core.ddp Setting up
Params for bucket 1:
	module.weight
2026-11-26T16:40:51.100+00:00 INFO yatt.trainer.main Train took 0.5 s
2026-11-26T16:40:55.000+00:00 ERROR yatt.trainer.main the update failed
Traceback (most recent call last):
  File "x.py", line 1, in f
ValueError: no
Loading:  50%|#####     | 1/2 [00:00<00:00]
"""
ENGINE = f"""\
Writing model shards:   0%|          | 0/1\rWriting model shards: 100%|##| 1/1 [00:00<00:00]
{VLLM}
(EngineCore_DP0 pid=17) WARNING 11-26 16:40:53 [core.py:94] memory is low
Traceback (most recent call last):
  File "engine.py"
RuntimeError: died
"""
NODE = """\
2026-11-26T17:40:52.500+01:00 INFO yatt.control.leader.coordinator iteration 1: train
2026-11-26T16:40:54.000+00:00 WARNING yatt.control.leader iteration 1 is slow
"""


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = make_run(tmp_path)
    for name, text in (("trainer-n0r0.1", TRAINER), ("rollout-n0s0.1", ENGINE), ("node0", NODE)):
        put(paths, name, text)
    paths.latest.symlink_to("attempts/000001")
    return paths


def put(paths: RunPaths, name: str, text: str | bytes, attempt: int = 1) -> Path:
    path = paths.log(attempt, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def printed(capsys: pytest.CaptureFixture[str], paths: RunPaths, **chosen) -> list[str]:
    filters = {key: chosen.pop(key) for key in list(chosen) if key in ("level", "text", "since_s", "is_all")}
    assert print_logs(paths.root, Chosen(filter=LogFilter(**filters), **chosen), follow=False) == 0
    return capsys.readouterr().out.splitlines()


def test_lines_of_all_processes_are_in_order_of_time_without_noise(paths, capsys) -> None:
    lines = printed(capsys, paths)
    assert [line.partition(":")[0] for line in lines] == [
        "trainer-n0r0.1", "node0", *["rollout-n0s0.1"] * 4, "node0", *["trainer-n0r0.1"] * 4
    ]  # fmt: skip
    assert "Train took" in lines[0] and "iteration 1: train" in lines[1]
    assert lines[-1] == "trainer-n0r0.1: ValueError: no"
    assert not any("megatron" in line or "Initializing" in line or "%|" in line for line in lines)


def test_all_lines_are_printed_if_that_is_asked_for(paths, capsys) -> None:
    lines = printed(capsys, paths, is_all=True)
    assert len(lines) == (TRAINER + ENGINE + NODE).count("\n")
    assert "rollout-n0s0.1: Writing model shards: 100%|##| 1/1 [00:00<00:00]" in lines


def test_warnings_that_come_in_each_run_are_left_out_and_others_are_not(paths, capsys) -> None:
    head = "(MainProcess pid=7) WARNING 11-26 16:40:53"
    harmless = [f"{head} [cpu_worker.py:180] {part}, ignore it." for part in log_lines.HARMLESS]
    bare = "[W1126 16:40:53.1 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy for memory"
    shown = [
        f"{head} [cpu_worker.py:180] memory is low",
        f"{head.replace('WARNING', 'ERROR')} [x.py:1] RotaryEmbedding: Failed to load weights",
        "2026-11-26T16:40:54+00:00 WARNING yatt.x a sample: RotaryEmbedding: Failed to load weights",
        "Traceback (most recent call last):", '  File "x.py"', "ValueError: Model Runner V2 requires Triton.",
    ]  # fmt: skip
    put(paths, "rollout-n0s0.1", "\n".join([*harmless, *shown[:4], bare, *shown[4:]]) + "\n")
    lines = printed(capsys, paths, role="rollout", level=log_lines.LEVELS["WARNING"])
    assert [line.partition(": ")[2] for line in lines] == shown
    whole = printed(capsys, paths, role="rollout", is_all=True)
    assert len(whole) == len(harmless) + len(shown) + 1


def test_a_traceback_that_nothing_logged_is_shown_whatever_the_level(paths, capsys) -> None:
    put(paths, "rollout-n0s0.1", ENGINE.replace("WARNING", "INFO"))
    lines = printed(capsys, paths, level=log_lines.LEVELS["ERROR"], role="rollout")
    assert [line.partition(": ")[2] for line in lines] == ENGINE.splitlines()[-3:]
    warnings = printed(capsys, paths, level=log_lines.LEVELS["WARNING"], role="node")
    assert len(warnings) == 1 and "is slow" in warnings[0]


def test_a_failure_after_a_librarys_message_of_several_lines_is_shown(paths, capsys) -> None:
    put(
        paths,
        "trainer-n0r0.1",
        TRAINER.splitlines()[0] + "\nParams:\nFatal Python error: Aborted\n  File x\n",
    )
    lines = printed(capsys, paths, role="trainer")
    assert [line.partition(": ")[2] for line in lines] == ["Fatal Python error: Aborted", "  File x"]


def test_text_time_role_and_number_choose_lines(paths, capsys) -> None:
    at_s = datetime.fromisoformat("2026-11-26T16:40:53.500+00:00").timestamp()
    assert len(printed(capsys, paths, text="iteration 1")) == 2
    assert printed(capsys, paths, since_s=at_s)[0].startswith("node0: 2026-11-26T16:40:54")
    assert {line[:4] for line in printed(capsys, paths, role="node")} == {"node"}
    assert printed(capsys, paths, most=2) == printed(capsys, paths)[-2:]
    with pytest.raises(ConfigError, match=r"--role x: .* there are node0, rollout-n0s0, trainer-n0r0"):
        printed(capsys, paths, role="x")


def test_the_logs_of_an_earlier_attempt_are_chosen_by_its_number(paths, capsys) -> None:
    put(paths, "node0", "2026-11-27T10:00:00+00:00 INFO yatt.x second\n", attempt=2)
    paths.latest.unlink()
    paths.latest.symlink_to("attempts/000002")
    assert printed(capsys, paths) == ["node0: 2026-11-27T10:00:00+00:00 INFO yatt.x second"]
    assert len(printed(capsys, paths, attempt=1, role="node")) == 2
    with pytest.raises(ConfigError, match="no logs of attempt 7"):
        printed(capsys, paths, attempt=7)


def test_a_time_without_a_year_is_of_the_year_of_the_lines_before_it(tmp_path) -> None:
    text = "2026-12-31T23:59:58+00:00 INFO yatt.x a\nWARNING 01-01 00:00:01 [a.py:1] b\n"
    path = tmp_path / "log"
    path.write_text(text)
    found = LogFile("x", path, LogFilter()).last(10, is_growing=False)
    assert found[1].at_s - found[0].at_s == 3.0


def test_the_end_of_a_huge_log_is_read_with_little_memory(tmp_path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        for number in range(600_000):
            file.write(f"2026-11-26T16:40:50.100+00:00 INFO yatt.x line {number} {'x' * 40}\n")
    tracemalloc.start()
    log = LogFile("x", path, LogFilter())
    found = log.last(20, is_growing=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [int(line.text.split()[4]) for line in found] == list(range(599_980, 600_000))
    assert peak < 16 << 20 < path.stat().st_size
    assert not log.is_cut


def test_a_search_ends_where_it_has_read_enough_and_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(log_lines, "FIRST_BYTES", 1000)
    monkeypatch.setattr(log_lines, "MOST_BYTES", 5000)
    path = tmp_path / "log"
    path.write_text("".join(f"2026-11-26T16:40:50+00:00 INFO yatt.x line {i:08}\n" for i in range(1000)))
    log = LogFile("x", path, LogFilter(text="00000000"))
    assert log.last(5, is_growing=False) == [] and log.is_cut
    every = LogFile("x", path, LogFilter()).last(1000, is_growing=False)
    assert 50 < len(every) < 1000 and all(line.text.startswith("2026") for line in every), "no half line"


def test_lines_of_one_log_keep_their_order_if_the_clock_is_set_back(paths, capsys) -> None:
    put(paths, "node0", "".join(f"2026-11-26T16:40:5{i}+00:00 INFO yatt.x {i}\n" for i in (1, 4, 2)))
    lines = printed(capsys, paths, is_all=True)
    assert [line[-1] for line in lines if line.startswith("node0")] == ["1", "4", "2"]


def test_a_followed_log_gives_each_complete_line_once(tmp_path) -> None:
    path = tmp_path / "log"
    first, second = (f"2026-11-26T16:40:5{i}+00:00 INFO yatt.x {i}\n" for i in range(2))
    path.write_text(first + second[:20])
    log = LogFile("x", path, LogFilter())
    assert [line.text for line in log.last(10, is_growing=True)] == [first.rstrip()]
    assert log.new() == []
    with path.open("a") as file:
        file.write(second[20:] + "  more\nunfin")
    assert [line.text for line in log.new()] == [second.rstrip(), "  more"]
    path.write_text("2026-11-26T17:00:00+00:00 INFO yatt.x anew\n")
    assert [line.text[-4:] for line in log.new()] == ["anew"]
    path.unlink()
    assert log.new() == []


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_in_logs_are_printed_safely(paths, capsys, seed) -> None:
    draw = random.Random(seed)
    parts = [draw.randbytes(200), b"\0" * 3000, b"\n", TRAINER.encode(), b"\x1b[2J\x9b", b"y" * 100_000]
    parts += [b"2026-13-45T99:99:99 INFO yatt.x no time\n", b"INFO 02-30 00:00:00 [x] none\n", b"\r\r\n"]
    put(paths, "node0", b"".join(draw.choices(parts, k=12)))
    put(paths, "empty", b"")
    out = "\n".join(printed(capsys, paths, is_all=draw.random() < 0.5))
    assert all(char.isprintable() or char == "\n" for char in out)
    assert max(map(len, out.split("\n"))) < 10 * log_lines.MOST_CHARS


def test_an_unfinished_last_line_is_shown_unless_it_may_grow(paths, capsys) -> None:
    put(paths, "node0", "2026-11-26T16:40:54+00:00 ERROR yatt.x died wh")
    assert printed(capsys, paths, role="node") == ["node0: 2026-11-26T16:40:54+00:00 ERROR yatt.x died wh"]


def test_ages_and_times_are_read() -> None:
    now_s = datetime.fromisoformat("2026-11-26T12:00:00").timestamp()
    assert since_s("", now_s) == 0
    assert since_s("10m", now_s) == now_s - 600
    assert since_s("11:59", now_s) == now_s - 60
    assert since_s("12:01:00", now_s) == now_s - 86400 + 60
    assert since_s("2026-11-25T12:00", now_s) == now_s - 86400
    for bad in ("soon", "10x", "25:00", "-5m"):
        with pytest.raises(ConfigError, match="write an age"):
            since_s(bad, now_s)


def test_our_own_lines_can_be_read_again(tmp_path) -> None:
    record = logging.LogRecord("yatt.x", logging.WARNING, __file__, 1, "it %s", ("works",), None)
    path = tmp_path / "log"
    path.write_text(LineFormatter().format(record) + "\n")
    (line,) = LogFile("x", path, LogFilter(level=30)).last(5, is_growing=False)
    assert line.at_s == pytest.approx(record.created, abs=0.002) and line.text.endswith(
        "WARNING yatt.x it works"
    )
    assert LogFile("x", path, LogFilter(level=40)).last(5, is_growing=False) == []
