"""Pictures that are lost between the rollout and the update cost their groups, and a store that is away costs
time. The room for prepared files is so small that the update has to read each picture again."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.faults.test_resume_exact import metrics
from tests.faults.test_resume_pictures import with_pictures
from tests.runs import RunFile, living, rows, start, wait_for, yatt
from yatt.obs.rollouts import read_iteration
from yatt.paths import RunPaths

pytestmark = pytest.mark.faults
N, GROUPS, ITERATIONS = 4, 8, 5
REWARD = """
import os

FATES = {fates!r}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    index = extra_info["index"]
    for number, (indexes, path, fate) in enumerate(FATES):
        if index in indexes:
            with open(os.path.join({folder!r}, f"scored-{{number}}"), "a") as file:
                file.write("x")
                file.flush()
                if file.tell() == {n} * len(indexes):  # no engine needs their pictures any more
                    change(path, fate)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8

def change(path, fate):
    if fate == "vanishes":
        os.remove(path)
    elif fate == "is damaged":
        with open(path, "r+b") as picture:
            picture.seek(-20, 2)
            picture.write(b"x")
    else:
        os.rename(path, path + ".away")
"""


def run_with(folder: Path, *fates: tuple[list[int], str, str]) -> RunFile:
    """A scripted run on two nodes, in which each row has a picture of its own; one has room on a node.

    Args:
        fates: numbers of rows, a path in the folder, and what happens to it when their samples are scored.
    """
    run = with_pictures(
        folder, model={"trainer": "scripted"}, media={"cache_bytes": 13_000},
        data={"media_root": str(folder / "pictures"), "max_prompt_tokens": 64, "shuffle": False},
        trainer={"total_iterations": ITERATIONS, "train_batch_size": GROUPS, "mini_batch_size": 4},
        logging={"rollouts": "all"},
    )  # fmt: skip
    (folder / "policy" / "scripted.json").write_text("{}")
    lines = []
    for number, line in enumerate((folder / "train.jsonl").read_text().splitlines()):
        picture = folder / "pictures" / f"{number}.png"
        Image.frombytes("RGB", (64, 64), random.Random(number).randbytes(3 * 64 * 64)).save(picture)
        row: dict[str, Any] = json.loads(line) | {"prompt": f"<image>{number} is", "images": [picture.name]}
        lines.append(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    full = [(indexes, str(folder / path), fate) for indexes, path, fate in fates]
    (folder / "reward.py").write_text(REWARD.format(fates=full, folder=str(folder), n=N))
    return run


def drops_of(run: RunFile) -> dict[int, str]:
    """Why groups were dropped, by number."""
    events = rows(run.run_dir / "events.jsonl")
    return {each["number"]: each["reason"] for each in events if each["kind"] == "rollout.group.drop"}


def trained_groups(run: RunFile, iteration: int) -> list[int]:
    found = read_iteration(RunPaths(run.run_dir), iteration)
    assert found is not None and found.is_whole and not found.num_unreadable
    trained = [each["group"] for each in found.samples if not each["dropped"]]
    assert len(trained) == N * len(set(trained))
    return sorted(set(trained))


def counts(row: Mapping[str, Any]) -> tuple[int, ...]:
    names = ("groups", "failed_groups", "media_faults")
    return tuple(int(row.get(f"rollout/{name}", 0)) for name in names)


def test_a_lost_picture_costs_its_group_and_a_store_that_is_away_nothing(tmp_path: Path) -> None:
    """A whole run: the fault lies between the work of engines, media processes, two nodes and their ranks."""
    third = [*range(2 * GROUPS, 3 * GROUPS)]
    run = run_with(
        tmp_path, ([15], "pictures/15.png", "vanishes"), (third, "pictures", "is away"),
        ([31], "pictures/31.png", "is damaged"),
    )  # fmt: skip
    process = start("run", str(run.write()))

    def trains() -> bool:
        return process.poll() is not None or any(
            (each["kind"], each.get("phase"), each.get("iteration")) == ("phase.begin", "train", 3)
            for each in rows(run.run_dir / "events.jsonl")
        )

    wait_for(trains, timeout_s=120, what="the third update")
    (tmp_path / "pictures.away").rename(tmp_path / "pictures")
    output, _ = process.communicate(timeout=360)
    assert process.returncode == 0, output
    assert [counts(row) for row in metrics(run)] == [(8, 0, 0), (7, 1, 4), (8, 0, 0), (7, 1, 4), (8, 0, 0)]
    for iteration in range(1, ITERATIONS + 1):
        batch = {*range(GROUPS * (iteration - 1), GROUPS * iteration)}
        assert trained_groups(run, iteration) == sorted(batch - {15, 31})
    vanished, damaged = (drops_of(run)[number] for number in (15, 31))
    assert "row 16 of all (prompt 15): 15.png cannot be read: No such file or directory." in vanished
    assert "row 32 of all (prompt 31): 31.png is not the file that it was" in damaged
    assert list(drops_of(run)) == [15, 31]
    assert {each["attempt"] for each in rows(run.run_dir / "events.jsonl")} == {1}
    logs = "".join(path.read_text() for path in RunPaths(run.run_dir).attempt(1).rglob("*.log"))
    assert f"a prompt group is left out of update 2: {vanished}" in logs
    assert "a prepared picture cannot be read" not in logs, "none is evicted before its engine has opened it"
    assert living(run.run_dir) == {} and run.leftovers() == []


def test_many_lost_pictures_end_the_run_with_the_first_places(tmp_path: Path) -> None:
    """A whole run, as above: a node's error becomes the exit code of the command."""
    run = run_with(tmp_path, *[([number], f"pictures/{number}.png", "vanishes") for number in (8, 10)])
    done = yatt("run", str(run.write()))
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "2 of about 4 groups have pictures that cannot be used. At most 5% may" in said
    for number in (8, 10):
        assert f"row {number + 1} of all (prompt {number}): {number}.png cannot be read" in said
    assert [row["training/global_step"] for row in metrics(run)] == [1]
    assert sorted(drops_of(run)) == [8, 10]
