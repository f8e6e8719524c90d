"""The benchmarks of GPUs run to their end at toy size on this machine, with the real vLLM, and their rows say
what they should. They are made for calls of ten minutes: each row is kept, and what has no time is named."""

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.gpu import bench_engine, bench_trainer, bench_trl, colocated, parity, preflight, trace
from tests.gpu.cases import Figures, Place, run_in_process, words_of
from tests.runs import HANG_S, ROOT, environment, wait_for

pytestmark = pytest.mark.slow

CALL_S = 580
GPU = ROOT / "tests" / "gpu"
PARTS = {
    "preflight": preflight, "parity": parity, "engine": bench_engine, "trainer": bench_trainer,
    "trl": bench_trl, "trace": trace, "kill": colocated, "judge": colocated, "resume": colocated,
}  # fmt: skip


@contextlib.contextmanager
def started(part: str, folder: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """Starts a part as a user does; ends it with all its processes."""
    process = subprocess.Popen(
        ["tools/gpu_bench.sh", str(folder), part, "--toy", *more], cwd=ROOT,
        env={**environment(), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=HANG_S)  # to the end of its last process, which has the pipe


def rows_of(part: str, folder: Path, *more: str, name: str = "", code: int = 0) -> dict[str, dict]:
    """Runs a part to its end; gives the rows of its file by case."""
    with started(part, folder, *more) as process:
        said, _ = process.communicate(timeout=CALL_S)
    assert process.returncode == code, said
    return {row["case"]: row for row in json.loads((folder / f"{name or part}.json").read_text())["rows"]}


def measured(module: ModuleType, folder: Path, part: str, *only: str) -> dict[str, dict]:
    """Measures the cases of a part as the script does, but in forked processes, and those that are whole
    runs from this one; then the script, which has nothing to measure any more, compares the rows."""
    name = "colocated" if module is colocated else part
    figures = Figures(folder / f"{name}.json", is_toy=True)
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        place = Place(Path(work), Path(memory), folder, is_toy=True)
        for case in module.cases(True):
            if only and case.name not in only:
                continue
            log = folder / "logs" / f"{case.name}.log"
            if case.shape and not place.model(case.shape).exists():
                words = [case.shape, str(place.model(case.shape))]
                assert run_in_process("tests.gpu.shapes", words, log, CALL_S) == {}
            if module is colocated or case.name == "yatt":
                row = module.measure(case.settings, place)
            else:
                row = run_in_process(module.__name__, words_of(case.settings, place), log, CALL_S)
            figures.add(case.name, {**case.settings, **row})
    return rows_of(part, folder, name=name)


def test_facts_are_found_by_a_call_that_is_stopped_and_the_next_one_which_continues(tmp_path: Path) -> None:
    """A whole run of the script, by the command that is typed where there is a GPU."""
    file = tmp_path / "preflight.json"
    with started("preflight", tmp_path):
        wait_for(file.exists, timeout_s=60, what="the first row")
    first = json.loads(file.read_text())["rows"]
    assert first[0]["case"] == "machine" and len(first) < 4
    rows = rows_of("preflight", tmp_path)
    assert rows["machine"] == first[0]
    assert rows["machine"]["packages"]["msgspec"] and rows["machine"]["shm_gib"][0] > 0
    assert rows["store"]["sum"] == 1.0
    before, after = rows["store"]["descriptors"]
    assert after == before
    assert rows["host memory"]["allocate_s"] > 0
    assert "window_size" in rows["kernels"]["varlen_signature"]


def test_parity_of_every_family(tmp_path: Path) -> None:
    rows = measured(parity, tmp_path, "parity").values()
    assert {row["kind"] for row in rows} == {"llama", "qwen2", "qwen3"}
    assert all(0 < row["float32_most"] < 1e-5 for row in rows), rows


def test_the_trainers_steps_are_the_same_with_either_head_and_recomputed_or_not(tmp_path: Path) -> None:
    rows = measured(bench_trainer, tmp_path, "trainer")
    steps = [row for row in rows.values() if "grad_norm" in row]
    assert len(steps) == 2 and len({round(row["grad_norm"], 4) for row in steps}) == 1, steps
    assert all(row["tokens_per_s"] > 0 for row in (*steps, rows["toy 4x16 plain"]))
    assert rows["attention 3 from 7"]["by_length_s"] > 0
    assert rows["summary"]["toy 4x16 none chunked over plain"] > 0


def test_vllm_sleeps_wakes_and_takes_weights(tmp_path: Path) -> None:
    rows = measured(bench_engine, tmp_path, "engine")
    assert rows["toy trainer"]["host_gib"] > 0
    row = rows["toy engine"]
    assert row["compared"] > 0 and row["differing"] == []
    assert all(turn["logprob_difference_mean"] < 1e-4 for turn in row["turns"]) and len(row["turns"]) == 3
    assert row["tokens_per_s"] > 0 and row["update_gb_per_s"] > 0
    assert row["aborted"] == ["abort"] and row["sleep_s_after_abort"] > 0
    assert rows["summary"]["toy: engine over plain"] > 0


def test_a_colocated_run_loses_an_engine_and_no_attempt(tmp_path: Path) -> None:
    row = measured(colocated, tmp_path, "kill", "kill")["kill"]
    assert (row["killed"], row["attempts"], row["iterations"]) == (1, 1, 3)
    assert row["restarted"] == ["rollout-n0s0.2"]
    assert row["lease.grant"] >= 6 and row["difference_of_allowed"] < 1
    assert row["median"]["timing_s/step"] > 0
    assert (tmp_path / "kill" / "metrics.jsonl").read_text().count("\n") == 3


def test_a_colocated_run_with_a_genrm_restarts_no_worker(tmp_path: Path) -> None:
    row = measured(colocated, tmp_path, "judge", "judge")["judge"]
    assert (row["iterations"], row["attempts"], row["restarted"]) == (2, 1, [])
    assert row["median"]["perf/throughput/genrm:judge"] > 0


def test_a_run_that_was_killed_is_equal_to_the_bit(tmp_path: Path) -> None:
    row = measured(colocated, tmp_path, "resume", "resume")["resume"]
    assert (row["iterations"], row["attempts"]) == (4, 2) and row["files"] > 0
    assert row["unequal_metrics"] == row["unequal_files"] == []


def test_a_step_is_compared_with_trls(tmp_path: Path) -> None:
    rows = measured(bench_trl, tmp_path, "trl")
    assert rows["trl"]["mean_length"] == 16
    assert rows["summary"]["yatt over trl"] == pytest.approx(
        rows["yatt"]["step_s"] / rows["trl"]["step_s"], abs=1e-3
    )


def test_a_trace_is_written(tmp_path: Path) -> None:
    assert measured(trace, tmp_path, "trace")["step"]["calls"][0]["ms"] > 0
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]


def test_figures_of_another_device_or_size_are_set_aside(tmp_path: Path) -> None:
    """A trial with --toy, or a call on another card, must not cost the figures of a GPU."""
    file, figures = tmp_path / "preflight.json", {"device": "H200", "is_toy": False, "rows": []}
    before = [json.dumps(figures), "cut of"]
    for text in before:
        file.write_text(text)
        assert rows_of("preflight", tmp_path, "--only", "machine").keys() == {"machine"}
    assert [(tmp_path / f"preflight.{number}.json").read_text() for number in (1, 2)] == before


@pytest.mark.parametrize("part", PARTS)
def test_cases_without_time_are_named(tmp_path: Path, part: str) -> None:
    module = PARTS[part]
    name = "colocated" if module is colocated else part
    rows = rows_of(part, tmp_path, "--call-s", "1", name=name, code=1)
    assert {row["left_out"] for row in rows.values()} == {"no time left"}
    assert rows.keys() == ({part} if module is colocated else {case.name for case in module.cases(True)})


def test_a_case_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with started("parity", tmp_path, "--only", "gpt") as process:
        said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 2 and "no case 'gpt'; cases: llama-untied, " in said


SAYS_ITS_ARGUMENTS = """#!/bin/sh
[ "$2" != zipfile ] || exit 0
echo "$PWD" "$@"
"""


def script(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs the script in another folder; in place of Python there is a program that says its arguments."""
    python = tmp_path / "python"
    python.write_text(SAYS_ITS_ARGUMENTS)
    python.chmod(0o755)
    return subprocess.run(
        [ROOT / "tools" / "gpu_bench.sh", *words], cwd=tmp_path,
        env={**os.environ, "PYTHON": str(python), "SECONDS": "100"},  # what bash counts from
        capture_output=True, text=True, check=False, timeout=HANG_S,
    )  # fmt: skip


def test_folders_are_those_of_the_caller_and_the_time_before_the_first_case_counts(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "one.whl").touch()
    said = script(tmp_path, "out", "preflight", "wheels", "--toy").stdout.split()
    assert said[0] == str(ROOT) and said[-1] == "--toy"
    assert said[said.index("--out") + 1] == str(tmp_path / "out")
    assert 430 < int(said[said.index("--call-s") + 1]) <= 440


def test_mistakes_of_the_call_are_refused_before_a_case_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words, says in (
        (("out", "preflight", "no/wheels"), f"no wheels in {tmp_path}/no/wheels"),
        (("file", "preflight"), f"{tmp_path}/file"),
        (("out", "perf"), "parts: "),
    ):
        done = script(tmp_path, *words)
        assert done.returncode == 2 and says in done.stderr and not done.stdout, words


CASE = """
import os, signal, subprocess, sys, tempfile, time
sys.stderr.write("attention runs sequence by sequence: no kernel\\n")
if sys.argv[1] == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in a long call of CUDA
    print(tempfile.mkdtemp(dir=os.environ["CASE_MEMORY"]))
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
print('ROW {"figure": 1}')
sys.exit(sys.argv[1] == "fails")
"""


def test_a_case_that_hangs_is_ended_with_its_children_and_slow_paths_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_case.py").write_text(CASE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "logs" / "case.log"
    row = run_in_process("one_case", ["ends"], log, 60)
    assert row == {"figure": 1, "warned": ["attention runs sequence by sequence: no kernel"]}
    assert run_in_process("one_case", ["fails"], log, 60)["failed"] == "exit code 1"
    monkeypatch.setattr("tests.gpu.cases.END_S", 1.0)
    hung = run_in_process("one_case", ["hangs"], log, 5)
    assert hung["failed"] == "not done after 5 s"
    *_, memory, pid = hung["said"].splitlines()
    assert not Path(memory).exists(), "the next case has this memory"
    child = Path("/proc", pid, "cmdline")
    wait_for(lambda: not child.exists() or b"sleep" not in child.read_bytes(), what="its end")


def test_no_process_that_starts_cases_or_runs_imports_torch() -> None:
    modules = ", ".join({module.__name__ for module in PARTS.values()})
    argv = [sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(argv, cwd=ROOT, env=environment(), check=False).returncode == 0


def test_only_a_process_of_its_own_makes_a_model() -> None:
    for file in GPU.glob("*.py"):
        names = {x.id for x in ast.walk(ast.parse(file.read_text())) if isinstance(x, ast.Name)}
        assert "make_model" not in names or file.name == "shapes.py", (
            f"{file.name} makes a model in its process"
        )
