"""What is told of a run while it waits."""

import json
import math
import random
from pathlib import Path

from tests.obs_runs import event, logged, make_run, metrics
from yatt.cli.commands.look import _print_failure
from yatt.obs.metrics import STEP, RowFile, completes_draft
from yatt.obs.story.rows_seen import RowsSeen
from yatt.obs.story.view import RunView
from yatt.paths import RunPaths


def told(*events: dict) -> tuple[RunView, list[str]]:
    view = RunView(RunPaths(Path("/nowhere")), 3)
    for each in logged(*(event(1, **one) for one in events)):
        view.news += view.story.take(each)
    return view, view.news


def wait(who: str, error: str) -> dict:
    return {"kind": "store.wait", "who": who, "error": error}


def test_a_wait_for_the_store_is_told_once_and_shown_while_it_lasts(capsys) -> None:
    began = (wait("node0", "EIO"), wait("trainer-n0r0.1", "EIO"))
    view, news = told(*began)
    assert news == ["node0 waits for the checkpoint store: EIO"]
    _print_failure(view.summary())
    assert "node0 and 1 more for the checkpoint store: EIO" in capsys.readouterr().out
    view, news = told(*began, wait("node0", ""), wait("trainer-n0r0.1", ""))
    assert news[1:] == ["no process waits for the checkpoint store now"]
    assert not view.summary()["waits"]


def test_who_ended_waits_no_more() -> None:
    view, _ = told(
        wait("trainer-n0r0.1", "EIO"), {"kind": "worker.end", "worker": "trainer-n0r0.1", "how": "killed"}
    )
    assert not view.story.saves.waits
    view, _ = told(wait("node0", "EIO"), {"kind": "attempt.start", "attempt": 2, "nodes": 1})
    assert not view.story.saves.waits


def test_a_worker_that_cannot_be_started_is_told_of_once() -> None:
    delay = {"kind": "worker.delay", "worker": "rollout-n0s0.2", "error": "no memory"}
    view, news = told(delay, delay)
    assert news == ["rollout-n0s0.2 cannot be started: no memory"]
    assert view.story.processes.states["rollout-n0s0"] == "cannot be started yet"


def test_one_of_several_engines_that_expires_is_named_and_the_slab_keeps_its_holder() -> None:
    view, news = told(
        {"kind": "lease.grant", "slab": "n0s0", "holder": "rollout"},
        {"kind": "engine.expire", "worker": "rollout-n0s0e1.1", "cause": "rollout was not heard of for 10 s"},
    )
    assert news == ["lease of rollout-n0s0e1.1 expired: rollout was not heard of for 10 s"]
    assert view.story.slabs.holders == {"n0s0": "rollout"}


def test_the_engines_of_a_lost_node_are_not_shown_any_more() -> None:
    names = ("rollout-n1s0e0.1", "rollout-n1s0e1.1", "genrm-judge-n1s0.1", "rollout-n11s0e1.1")
    view, _ = told(
        *({"kind": "worker.start", "worker": name, "pid": 5} for name in names),
        {"kind": "node.lost", "node": 1, "why": "is gone", "goes_on": True},
    )
    assert list(view.story.processes.states) == ["rollout-n11s0e1"]


def test_a_row_that_a_resume_writes_once_more_is_shown_once(tmp_path):
    paths = make_run(tmp_path, rows=metrics(7))
    view = RunView(paths, 9)
    assert [row[STEP] for row in view.refresh()] == [1, 2, 3, 4, 5, 6, 7]
    RowFile(paths.metrics, 4, lambda: None).close()
    assert view.refresh() == []
    with paths.metrics.open("a") as file:
        again = [metrics(4)[3], {**metrics(5)[4], "critic/rewards/mean": 0.9}]
        file.writelines(json.dumps(row) + "\n" for row in again)
    assert [row[STEP] for row in view.refresh()] == [5], "it was trained again"


def test_a_row_completes_a_draft_that_it_agrees_with():
    draft = {STEP: 4, "a": 1.0, "nan": math.nan}
    assert completes_draft({**draft, "timing_s/step": 2.0}, draft) and completes_draft(draft, draft)
    assert not completes_draft({**draft, "a": 2.0}, draft) and not completes_draft({STEP: 4, "a": 1.0}, draft)


def test_a_view_that_keeps_few_rows_says_what_one_that_keeps_all_does(tmp_path):
    """Through rewrites of the file at a resume, and repeated iterations."""
    paths = make_run(tmp_path, rows=[{STEP: 0}])
    views = [RunView(paths, 100), RunView(paths, 100, seen=RowsSeen(5))]
    assert [len(view.refresh()) for view in views] == [1, 1]
    draw, lines = random.Random(7), [{STEP: 0}]
    for end in (30, 60, 45, 80):
        begin = min(end - 20, len(lines))
        again, lines = lines[begin : begin + 1], lines[:begin]
        fresh = paths.metrics.with_suffix(".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
        fresh.replace(paths.metrics)
        assert views[0].refresh() == views[1].refresh() == []
        lines += again  # of the checkpoint, which was shown before
        with paths.metrics.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in again))
        assert views[0].refresh() == views[1].refresh() == []
        while len(lines) < end:
            more = [
                {STEP: at, "timing_s/step": draw.random(), "rollout/dropped_groups": float(draw.randrange(3))}
                for at in range(len(lines), min(end, len(lines) + draw.randrange(1, 9)))
            ]
            lines += more
            with paths.metrics.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in more))
            new = [view.refresh() for view in views]
            assert new[0] == new[1]
            few, whole = views[1].summary(), views[0].summary()
            assert {**few, "eta_s": 0} == {**whole, "eta_s": 0}
    assert len(views[1].rows) == 5
    assert views[0].seen.num_dropped == sum(line.get("rollout/dropped_groups", 0.0) for line in lines)
