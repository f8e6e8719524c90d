"""The goodput ledger and saves by time in real runs that are killed and resumed."""

import json
import math
import re
import time

import pytest

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, held_after, kill, living, rows, start, wait_for, yatt
from yatt.obs.metrics import STEP

pytestmark = pytest.mark.faults

ITERATIONS, SAVE_EVERY, CALLS = 100, 40, 16
SETTINGS = {
    "trainer": {"total_iterations": ITERATIONS}, "launch": {"nodes": 1},
    "checkpoint": {"save_every": SAVE_EVERY, "export_final": False},
}  # fmt: skip


def events(run: RunFile, kind: str) -> list[dict]:
    return [each for each in rows(run.run_dir / "events.jsonl") if each["kind"] == kind]


def has_trained_what_is_not_saved(run: RunFile) -> bool:
    ended = [e["iteration"] for e in events(run, "phase.end") if e["phase"] == "train"]
    written = [row[STEP] for row in rows(run.run_dir / "metrics.jsonl")]
    return (
        bool(events(run, "ckpt.commit")) and min(max(ended, default=0), max(written, default=0)) > SAVE_EVERY
    )


def kill_all(run: RunFile, launcher_pid: int) -> None:
    kill(launcher_pid)
    for pid in living(run.run_dir):
        kill(pid)
    wait_for(lambda: not living(run.run_dir), what="all to be gone")


def told(run: RunFile) -> dict:
    return json.loads(yatt("status", str(run.run_dir), "--json").stdout)


def test_a_run_that_is_killed_and_resumed_accounts_for_all_of_its_time(tmp_path) -> None:
    run, hold = RunFile(tmp_path, SETTINGS), held_after(tmp_path, CALLS * (SAVE_EVERY + 2), pause_s=0)
    began_s = time.time()
    process = start("run", str(run.write()))
    wait_for(lambda: events(run, "phase.begin"), timeout_s=120, what="a phase")
    running = told(run)
    wait_for(lambda: has_trained_what_is_not_saved(run), timeout_s=120, what="an iteration after the commit")
    kill_all(run, process.pid)
    process.communicate(), hold.unlink()
    assert running["state"] == "running" and running["goodput"]["seconds"]["wasted"] == 0
    before = {row[STEP]: row for row in rows(run.run_dir / "metrics.jsonl")}
    cut = told(run)
    assert cut["state"].startswith("cut off") and cut["goodput"]["seconds"]["wasted"] > 0
    idle_s = 3.0
    time.sleep(idle_s)
    done = yatt("resume", str(run.run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    took_s = time.time() - began_s
    check_resumed(run, done.stdout, before)

    seconds, wall_s = (account := told(run)["goodput"])["seconds"], account["wall_s"]
    assert math.isclose(sum(seconds.values()), wall_s, abs_tol=1e-6)
    told_of = [e["t"] / 1e9 for e in rows(run.run_dir / "events.jsonl")]
    assert max(told_of) - min(told_of) - 0.1 < wall_s < took_s, "from the first start to the end"
    for name in ("rollout", "train", "switch", "weight update", "saving", "wasted", "restore", "start-up"):
        assert seconds[name] > 0, (name, seconds)
    assert seconds["not running"] > idle_s and seconds["queue"] == 0
    assert seconds["other"] < 0.1 * wall_s, "nearly all time is accounted for"
    rollouts = [e for e in events(run, "phase.end") if e["phase"] in ("rollout", "train")]
    kept = sum(e["seconds"] for e in rollouts if e["attempt"] == 2 or e["iteration"] <= SAVE_EVERY)
    assert seconds["rollout"] + seconds["train"] < kept, "switches are not work"
    lost = sum(
        e["seconds"] for e in events(run, "phase.end") if e["attempt"] == 1 and e["iteration"] > SAVE_EVERY
    )
    assert seconds["wasted"] > 0.9 * lost > 0, "an event is written a moment after its phase has ended"

    saves = told(run)["save_interval"]
    assert saves["failures"] == 1 and saves["is_assumed"] and saves["saves"] == 3 and saves["stall_s"] > 0
    assert re.search(r"useful time \d+% of .*: wasted \d+%", yatt("status", str(run.run_dir)).stdout)
    yatt("report", str(run.run_dir))
    page = (run.run_dir / "report.html").read_text()
    assert (
        "effective training time ratio" in page
        and 'title="wasted: ' in page
        and "Saves: the best interval is at least" in page
    )
    for row in rows(run.run_dir / "metrics.jsonl"):
        parts = sum(value for name, value in row.items() if re.fullmatch(r"goodput/\w+_s", name))
        assert math.isclose(parts, row["timing_s/step"], abs_tol=1e-6), row
        is_restart = row["training/global_step"] == SAVE_EVERY  # its row is written after the resume
        assert (0 if is_restart else 0.01) <= row["goodput/productive"] < 1


def check_resumed(run: RunFile, said: str, before: dict[int, dict]) -> None:
    """What is trained again is said once; the checkpoint's row is what it was, and nothing is counted into
    the next one that is not its iteration."""
    (resume,) = [e for e in events(run, "attempt.resume") if e["attempt"] == 2]
    first, last = SAVE_EVERY + 1, max(before)
    again = f"iteration {first} is" if first == last else f"iterations {first} to {last} are"
    assert resume["lost"] == last and f"resumed from iteration {SAVE_EVERY}; {again} trained again" in said
    told = [int(number) for number in re.findall(r"iteration (\d+)/", said)]
    assert told and min(told) >= first, "of iterations that end at once only the last is told"
    now = {row[STEP]: row for row in rows(run.run_dir / "metrics.jsonl")}
    assert now[SAVE_EVERY] == before[SAVE_EVERY] and now[first] != before.get(first)
    begun = [e for e in events(run, "phase.begin") if e["attempt"] == 2 and e["phase"] == "rollout"]
    spent_s = (begun[1]["t"] - begun[0]["t"]) / 1e9
    assert now[first]["timing_s/step"] < 2 * spent_s, "starting is no iteration's time"


def test_saves_by_time_do_not_change_the_end_of_a_run_that_is_killed(tmp_path) -> None:
    """Deterministic: other iterations are saved than in the undisturbed run, and all results are the same."""
    timed = {**SETTINGS, "checkpoint": {"save_every_minutes": 0.03, "export_final": False, "keep": 9}}
    quiet = RunFile(tmp_path / "quiet", SETTINGS)
    assert yatt("run", str(quiet.write())).returncode == 0
    run = RunFile(tmp_path / "killed", timed)
    process = start("run", str(run.write()))
    wait_for(lambda: events(run, "ckpt.commit"), timeout_s=120, what="a save by time")
    kill_all(run, process.pid)
    process.communicate()
    done = yatt("run", str(run.folder / "run.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(run, "attempt.resume")[-1]["iteration"] > 0
    assert metrics(run) == metrics(quiet)
    assert final_state(run) == final_state(quiet)
