"""A damaged file that is for people costs the lines that cannot be read, and nothing else."""

import io
import json
import math
import random

import pytest

from tests.damage import DAMAGES, a_folder, empty, removed, truncated
from tests.obs_runs import event, make_run, metrics
from yatt.adapters.files.lines import Tail, accept_all, make_ready, read_records
from yatt.cli import listing
from yatt.cli.commands import look
from yatt.cli.commands.log_printing import Chosen, print_logs
from yatt.cli.commands.look import status
from yatt.cli.listing import print_runs
from yatt.errors import ConfigError
from yatt.launch.folder.known import known_file, known_runs, remember_run
from yatt.obs.metrics import STEP, RowFile, read_metric_rows
from yatt.obs.page.report import write_report
from yatt.obs.story.events import reason_of_end
from yatt.obs.story.view import RunView
from yatt.obs.story.words import duration_in_words
from yatt.obs.terminal.console import Console
from yatt.obs.trackers.follow import Rows, TrackerState

EVENTS = (
    event(0, "attempt.start", nodes=1),
    event(1, "phase.begin", phase="rollout", iteration=1),
    event(2, "lease.grant", slab="n0s0", holder="rollout", token=1),
    event(3, "ckpt.commit", iteration=1, size_bytes=5),
    event(4, "phase.end", phase="rollout", iteration=1),
    event(9, "attempt.end", exit_code=75, reason="stopped"),
)
SAMPLES = ({STEP: 1, "prompt": "p", "completion": "c", "reward": 0.5, "scores": {"a": 1.0}},)
FILES = ("events", "metrics", "samples", "report", "latest")
SILENT = (empty, removed)


@pytest.fixture
def run(tmp_path):
    paths = make_run(tmp_path, events=EVENTS, rows=metrics(3), samples=SAMPLES)
    paths.attempt(1).mkdir(parents=True)
    paths.latest.symlink_to("attempts/000001")
    write_report(paths, None)
    paths.claims.mkdir()
    return paths


def test_an_undamaged_run_has_no_unreadable_line(run, capsys):
    assert status(run.root, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["unreadable_lines"] == 0
    assert "unreadable" not in write_report(run, None).read_text()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_blocks_no_reader(run, capsys, name, damage):
    path = getattr(run, name)
    damage(path) if name != "latest" or damage in (a_folder, removed) else None
    assert status(run.root, as_json=True) == 0
    unreadable = json.loads(capsys.readouterr().out)["unreadable_lines"]
    assert (unreadable > 0) == (name in ("events", "metrics") and damage not in SILENT)
    assert status(run.root, as_json=False) == 0 and print_runs([run.root]) == 0
    page = write_report(run, None).read_text()
    assert ("damaged line" in page) == (name in ("events", "metrics", "samples") and damage not in SILENT)
    assert isinstance(reason_of_end(run.events, 1), str)
    console = Console(RunView(run, 24), io.StringIO())
    console.update()
    console.close()
    assert "display failed" not in console._out.getvalue()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_metrics_file_is_gone_on_with(run, damage):
    damage(run.metrics)
    make_ready(run.metrics)
    rows = RowFile(run.metrics, 3, lambda: None)
    rows.append({STEP: 3})
    rows.close()
    assert read_metric_rows(run.metrics)[-1] == {STEP: 3}
    records, skipped = read_records(run.metrics)
    assert skipped == 0 and all(record[STEP] < 3 for record in records[:-1])


def test_a_line_after_a_torn_one_is_whole(run):
    truncated(run.events)
    make_ready(run.events)
    with run.events.open("a") as file:
        file.write(json.dumps(EVENTS[0]) + "\n")
    records, skipped = read_records(run.events)
    assert (records, skipped) == ([*EVENTS[:5], EVENTS[0]], 1)


def test_what_is_no_file_is_kept_under_another_name(run):
    a_folder(run.events)
    assert "events.jsonl.aside-1" in make_ready(run.events)
    assert (run.root / "events.jsonl.aside-1" / "inside").exists() and not run.events.exists()


def test_what_a_lost_block_left_of_a_line_is_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"\0" * 100 + b'{"a": 2}\n' + b"\0" * 50)
    assert read_records(path) == ([{"a": 1}, {"a": 2}], 2)


def test_a_huge_line_is_skipped_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr("yatt.adapters.files.lines.MAX_LINE_BYTES", 1000)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * 5000 + b'"}\n{"a": 2}\n')
    assert read_records(path) == ([{"a": 1}, {"a": 2}], 1)
    tail = Tail(path, accept_all)
    assert (tail.read()[0], tail.skipped) == ([{"a": 1}, {"a": 2}], 1)


def test_a_file_cut_anywhere_and_read_as_it_grows_gives_the_same_lines(tmp_path):
    path, chance = tmp_path / "x.jsonl", random.Random(0)
    data = b"".join(
        json.dumps({"n": n}).encode() + b"\n"
        if n % 5
        else bytes(chance.randbytes(20)).replace(b"\n", b"?") + b"\n"
        for n in range(200)
    )
    tail, found = Tail(path, accept_all), []
    for end in [*sorted(chance.sample(range(len(data)), 40)), len(data)]:
        with path.open("ab") as file:
            file.write(data[file.tell() : end])
        found += tail.read()[0]
    assert found == read_records(path)[0] == [{"n": n} for n in range(200) if n % 5]
    assert tail.skipped == read_records(path)[1] == 40


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_list_of_runs_blocks_neither_list_nor_submit(run, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remember_run(run.root)
    damage(known_file())
    with open(known_file(), "ab") if known_file().is_file() else io.BytesIO() as file:
        file.write(b"/" + b"x" * 5000 + b"\n/a\0b\n")
    known_runs()
    remember_run(run.root)
    assert run.root in known_runs()


def test_one_unreadable_config_does_not_hide_other_runs(run, tmp_path, capsys):
    other = tmp_path / "other"
    (other / "claims").mkdir(parents=True)
    (other / "config.yaml").write_text("{")
    assert print_runs([tmp_path]) == 0
    said = capsys.readouterr().out
    assert "unreadable config" in said and str(run.root) in said


def test_what_a_tracker_left_is_begun_anew_if_it_cannot_be_read(run):
    kept = TrackerState(run.tracker("wandb"))
    kept.folder.mkdir()
    (kept.folder / "last_step").write_bytes(b"\xff\0")
    (kept.folder / "run_id").write_bytes(b"\0\0\0")
    assert kept.last() == -1
    assert len(kept.run_id()) == 12


class Broken(io.StringIO):
    """A terminal that has gone."""

    def write(self, _text):
        raise BrokenPipeError


def test_a_terminal_that_is_gone_does_not_end_the_run(run):
    console = Console(RunView(run, 24), Broken())
    console.update()
    console.say("x")
    console.close()


def test_escape_sequences_do_not_reach_the_terminal(run):
    out = io.StringIO()
    Console(RunView(run, 24), out).say("a\x1b[2Jb\nc")
    assert out.getvalue() == "a\\x1b[2Jb\nc\n"


def test_escape_sequences_of_a_runs_files_do_not_reach_the_terminal_by_status_or_logs(run, capsys):
    bad = "x\x1b]0;title\x07\x1b[2J"
    with run.events.open("a") as file:
        file.write(json.dumps(event(10, "attempt.start", attempt=2, nodes=1)) + "\n")
        file.write(json.dumps(event(11, "lease.grant", attempt=2, slab=bad, holder=bad)) + "\n")
    (run.attempt(1) / "logs").mkdir()
    (run.attempt(1) / "logs" / "node0.log").write_text(f"a\tb {bad}\n")
    assert status(run.root, as_json=False) == 0
    assert print_logs(run.root, Chosen(), follow=False) == 0
    said = capsys.readouterr().out
    assert all(c.isprintable() for c in said.replace("\n", "")) and "x\\x1b]0;title\\x07" in said


NUMBERS = ("NaN", "1e999", "-1e999", "1.7e308", "-1.7e308", "5e-324", "1e-310", "null")
KEYS = (
    "critic/rewards/mean", "perf/throughput", "perf/total_num_tokens", "timing_s/step", "actor/pg_loss",
    "actor/grad_norm", "rollout/dropped_groups", "rollout/failed_groups", "reward/exact/failed",
    "genrm/judge/asked", "genrm/judge/unparsable", "val-core/sum/reward/mean", "training/anything",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("number", [*NUMBERS, "any"])
def test_any_number_of_any_column_may_be_any_number(run, capsys, number, seed):
    draw = random.Random(f"{number}/{seed}")
    numbers = [*NUMBERS, "0.5", "3"] if number == "any" else [number, number, "0.5", "3"]
    lines = []
    for step in range(1, 9):
        values = ", ".join(f'"{key}": {draw.choice(numbers)}' for key in KEYS if draw.random() < 0.9)
        lines.append(f'{{"{STEP}": {step}{", " if values else ""}{values}}}\n')
    run.metrics.write_text("".join(lines))
    sample = f'{{"{STEP}": 1, "prompt": "p", "reward": {number}, "scores": {{"a": {number}}}}}\n'
    run.samples.write_text(sample.replace(": any", ": 1e-310"))

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    assert status(run.root, as_json=True) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert told["iteration"] == 1 and told["unreadable_lines"] == 0
    assert status(run.root, as_json=False) == 0 and print_runs([run.root]) == 0
    assert "Iteration 1" in write_report(run, None).read_text()
    view = RunView(run, 24)
    console = Console(view, io.StringIO())
    console.update()
    console.close()
    assert "display failed" not in console._out.getvalue() and len(view.rows) == 8
    assert len(list(Rows(run.metrics, -1).until(math.inf))) == 8
    assert math.isfinite(view.eta_s() or 0.0) and duration_in_words(math.inf) == "inf"


def test_a_number_that_is_not_finite_is_named(run, capsys):
    run.metrics.write_text(f'{{"{STEP}": 1, "critic/rewards/mean": NaN, "timing_s/step": 1e999}}\n')
    assert status(run.root, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["reward"], told["step_s"], told["eta_s"]) == ("NaN", "Infinity", None)


def test_watch_waits_for_a_run_that_has_not_started(tmp_path, capsys, monkeypatch):
    """Whoever has just typed `yatt submit`, or opens a second terminal, need not try again."""
    (tmp_path / "elsewhere").mkdir()
    ready = make_run(tmp_path / "elsewhere", rows=metrics(3)).root
    begins = [
        lambda: (tmp_path / "run").mkdir(),
        lambda: [path.rename(tmp_path / "run" / path.name) for path in ready.iterdir()],
    ]
    monkeypatch.setattr(look.time, "sleep", lambda _: begins.pop(0)())
    monkeypatch.setattr(look, "_follow", lambda view: len(view.refresh()))
    assert look.watch(tmp_path / "run") == 3 and not begins
    assert "waiting for the run to start" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="not a run folder"):
        look.watch(tmp_path / "mistyped" / "run")


def test_the_newest_runs_are_listed_and_the_rest_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for number in range(listing.MOST_KNOWN + 3):
        (tmp_path / f"{number:02}").mkdir()
        remember_run(make_run(tmp_path / f"{number:02}", rows=metrics(1)).root)
    assert print_runs([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == listing.MOST_KNOWN + 2 and lines[-1] == "and 3 older runs: yatt list --all"
    assert "/03/" in lines[1] and "/22/" in lines[-2]
    assert print_runs([], is_all=True) == 0
    assert len(capsys.readouterr().out.splitlines()) == listing.MOST_KNOWN + 4
    remember_run(tmp_path / "00" / "run")  # it was started again
    assert print_runs([]) == 0
    assert "/00/" in capsys.readouterr().out.splitlines()[-2]
