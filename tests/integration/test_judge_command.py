"""`yatt judge` as a user types it, with the session, reward processes, engines and a real service."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runs import HANG_S, RunFile, command, environment, popen, wait_for, yatt
from tests.tiny_models import make_scripted_model
from tests.unit.adapters.test_judge_api import Service, says
from yatt.adapters.inputs.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

PAIR = {
    "judging": {"by": "pairwise"}, "template": "{prompt} 1:{completion_a}; 2:{completion_b}; best:",
    "verdict": {"pattern": "([12])", "scores": {"1": 1.0, "2": 0.0}},
}  # fmt: skip
SURE = ", as everybody can see and will say"
ROWS = [
    {
        "prompt": f"{i} plus {i % 7} is",
        "chosen": f"{i + i % 7}{SURE if i % 4 == 0 else ''}",
        "rejected": "<b>no</b>" * (i % 3 + 1),
    }
    for i in range(12)
]


def run_of(folder: Path, **genrm: Any) -> RunFile:
    judge = {"name": "judge", "model": "m", **genrm}
    return RunFile(folder, {"genrms": [judge], "launch": {"nodes": 1}, "run": {"deterministic": False}})


def rows_in(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def measured(run: RunFile, data: str, *more: str, judge: str = "judge", code: int = 0) -> str:
    out = run.folder / "out"
    done = yatt("judge", "eval", str(run.write()), judge, data, "--out", str(out), "--device", "cpu", *more)
    assert done.returncode == code, done.stdout + done.stderr
    assert run.leftovers() == []
    return done.stdout + done.stderr


def longer_wins(service: Service, number: int) -> Any:
    """A judge that likes length, and writes what a browser would run."""
    text = service.got[number][1]["messages"][0]["content"]
    first, _, second = text.partition("1:")[2].partition("; 2:")
    word = "1" if len(first) > len(second.removesuffix("; best:")) else "2"
    return says(f"<script>alert(1)</script> {word}")


def test_a_service_that_likes_length_is_told_by_its_figures_and_by_the_exit_code(tmp_path: Path) -> None:
    """whole run: an evaluation with a judge behind a URL, from the command to the page."""
    service = Service(lambda number: longer_wins(service, number))
    try:
        run = run_of(tmp_path, api={"url": service.url}, **PAIR)
        printed = measured(run, rows_in(tmp_path, ROWS), "--html", "--min-agreement", "0.9", "--json", code=3)
    finally:
        service.close()
    result = json.loads((run.folder / "out/result.json").read_text())
    assert json.loads(printed.splitlines()[0]) == result
    figures = {name: each["value"] for name, each in result["figures"].items()}
    assert figures["agreement"] == 0.25 and figures["consistency"] == 1.0 and figures["length"] == 0.5
    assert (figures["place"], figures["flips"], figures["unreadable"]) == (0.0, 0.0, 0.0)
    assert len(service.got) == 4 * len(ROWS), "both orders, and once more"
    asked = [body["messages"][0]["content"] for _, body, _ in service.got]
    assert len(set(asked)) == 2 * len(ROWS) and all(asked.count(each) == 2 for each in asked)
    assert len({body["seed"] for _, body, _ in service.got}) == 4 * len(ROWS)
    page = (run.folder / "out/page.html").read_text()
    assert "&lt;script&gt;" in page and "<script" not in page and "<b>no" not in page
    assert all(f"<td>{name}</td>" in page for name in figures)
    again = yatt(
        "judge",
        "eval",
        str(run.write()),
        "judge",
        str(tmp_path / "rows.jsonl"),
        "--out",
        str(run.folder / "out"),
    )
    assert again.returncode == 2 and "exists already and is not an empty folder" in again.stderr


def scripted_judge(folder: Path, chance: float) -> str:
    """A judge that says Y with about this chance, by its question and seed."""
    make_scripted_model(folder)
    tokenizer = Tokenizer(str(folder))
    ids = {word: [*tokenizer.encode_plain(word), *tokenizer.eos_ids[:1]] for word in "YN"}
    answers = [ids["Y"] if place < 10 * chance else ids["N"] for place in range(10)]
    return make_scripted_model(folder, answers=answers)


def test_a_run_is_judged_again_with_its_own_questions_and_by_another_judge(tmp_path: Path) -> None:
    """whole run: two iterations are recorded; the same judge has changed nothing, another one has."""
    genrm = {
        "name": "judge", "engine": "scripted", "model": scripted_judge(tmp_path / "judge", 0.5),
        "max_model_tokens": 200, "template": "{prompt}|{completion}",
        "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0, "N": 0.0}},
    }  # fmt: skip
    (tmp_path / "judge/model.safetensors").write_bytes(b"")
    run = RunFile(tmp_path / "r", {
        "genrms": [genrm], "launch": {"nodes": 1}, "logging": {"rollouts": "all"},
        "model": {"trainer": "scripted"}, "trainer": {"total_iterations": 2},
    })  # fmt: skip
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    same = yatt("judge", "again", str(run.run_dir), "--device", "cpu", "--exit-above", "0", "--html")
    assert same.returncode == 0, same.stdout + same.stderr
    result = json.loads((run.run_dir / "again/judge/result.json").read_text())
    figures = {name: each["value"] for name, each in result["figures"].items()}
    assert (result["samples"], result["groups"], result["iterations"]) == (32, 8, [1, 2])
    assert figures["changed"] == figures["signs"] == 0.0 and result["changes"] == []
    assert figures["advantages"] == figures["kendall"] == 1.0
    assert (run.run_dir / "again/judge/page.html").is_file()
    repeated = yatt("judge", "again", str(run.run_dir), "--device", "cpu")
    assert repeated.returncode == 2 and "exists already; write --name" in repeated.stderr
    other = scripted_judge(tmp_path / "other", 0.1)
    (tmp_path / "other/model.safetensors").write_bytes(b"")
    (tmp_path / "new.yaml").write_text(json.dumps({"genrms": [{**genrm, "name": "new", "model": other}]}))
    words = ["--genrm", str(tmp_path / "new.yaml"), "--exit-above", "0.1", "--iterations", "2"]
    new = yatt("judge", "again", str(run.run_dir), "--device", "cpu", *words)
    assert new.returncode == 3, new.stdout + new.stderr
    result = json.loads((run.run_dir / "again/new/result.json").read_text())
    assert result["groups"] == 4 and 0.1 < result["figures"]["changed"]["value"] <= 1.0
    turned = [each for each in result["changes"] if each["scores"][0] != each["scores"][1]]
    assert turned and all(each["answers"][0] != each["answers"][1] for each in turned)
    assert run.leftovers() == []


def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    """whole run: cut off while the service keeps it waiting."""
    service = Service(lambda _: (503, {"Retry-After": "60"}, b""))
    try:
        run = run_of(tmp_path, api={"url": service.url}, **PAIR)
        words = [
            "judge",
            "eval",
            str(run.write()),
            "judge",
            rows_in(tmp_path, ROWS),
            "--out",
            f"{tmp_path}/out",
        ]
        process = popen(
            command(*words), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait_for(lambda: service.got or process.poll() is not None, what="a question")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG_S)
    finally:
        service.close()
    assert process.returncode == 130, errors
    assert run.leftovers() == [] and not (tmp_path / "out").exists()
