"""A run that trains on nothing says so: on the terminal, in `yatt status`, in the report; and goes on."""

import json
from pathlib import Path
from typing import Any

from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt

ZERO = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
"""


def alarms(run: RunFile) -> list[dict[str, Any]]:
    return [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "alarm.begin"]


def test_a_reward_that_is_always_0_is_told_everywhere_also_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(ZERO)
    run = RunFile(tmp_path, {"launch": {"nodes": 1}, "trainer": {"total_iterations": 16}})
    process = start("run", str(run.write()))
    wait_for(lambda: alarms(run), timeout_s=90, what="the alarm")
    for pid, module in living(run.run_dir).items():
        if module == "yatt.trainer":
            kill(pid)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output

    first, again = alarms(run)
    for event, attempt in ((first, 1), (again, 2)):
        assert (event["alarm"], event["since"], event["attempt"]) == ("reward.flat", 1, attempt)
    assert (first["iteration"], first["message"]) == (5, again["message"]), (
        "the resumed attempt finds the same"
    )
    says = "the reward was 0.000 for every completion in the last 5 iterations, since iteration 1"
    assert f"ALARM reward.flat: {says}" in output
    assert all(row["training/flat_groups"] == 1.0 for row in rows(run.run_dir / "metrics.jsonl"))

    shown = yatt("status", str(run.run_dir)).stdout
    assert ": finished" in shown and f"ALARM       reward.flat: {says}" in shown
    (told,) = json.loads(yatt("status", str(run.run_dir), "--json").stdout)["alarms"]
    assert (told["name"], told["since"]) == ("reward.flat", 1) and says in told["message"]
    assert yatt("report", str(run.run_dir)).returncode == 0
    assert f"<b>Alarm reward.flat</b>: {says}" in (run.run_dir / "report.html").read_text()


def test_without_alarms_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(ZERO)
    settings = {
        "launch": {"nodes": 1},
        "trainer": {"total_iterations": 6},
        "logging": {"alarm_iterations": 0},
    }
    run = RunFile(tmp_path, settings)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ALARM" not in done.stdout and alarms(run) == []
    assert json.loads(yatt("status", str(run.run_dir), "--json").stdout)["alarms"] == []
