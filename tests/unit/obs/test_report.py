"""The report: whole, honest about what is missing, and safe to open."""

import json
import re

import pytest

from tests.obs_runs import event, make_run, metrics
from yatt.adapters.run_folder.ledger import STARTED, write_record
from yatt.cli.commands.look import status
from yatt.errors import ConfigError
from yatt.obs.metrics import STEP
from yatt.obs.page.curves import reward_chart, trend_of, verdict_on_curves
from yatt.obs.page.report import write_report
from yatt.obs.page.timeline import draw_timeline
from yatt.obs.story.history import attempts_of, read_events
from yatt.obs.story.view import RunView

TWO_ATTEMPTS = (
    event(0, "attempt.start", nodes=1),
    event(0, "phase.begin", phase="join", iteration=0),
    event(10, "phase.end", phase="join", iteration=0),
    event(10, "phase.begin", phase="rollout", iteration=1),
    event(11, "lease.grant", slab="n0s0", holder="rollout", token=1),
    event(20, "lease.expire", slab="n0s0", holder="rollout", token=1, cause="rollout was not heard of"),
    event(21, "worker.end", worker="rollout-n0s0.1", pid=5, how="killed by SIGKILL"),
    event(30, "attempt.end", exit_code=1, reason="it broke <b>badly</b>"),
    event(40, "attempt.start", attempt=2, nodes=1),
    event(41, "attempt.resume", attempt=2, iteration=0),
    event(41, "phase.begin", attempt=2, phase="rollout", iteration=1),
    event(50, "phase.end", attempt=2, phase="rollout", iteration=1),
)


def page_of(paths) -> str:
    return write_report(paths, None).read_text()


def test_a_run_that_has_not_begun_gives_a_page(tmp_path):
    page = page_of(make_run(tmp_path))
    assert ">starting<" in page
    assert "No attempt has started yet." in page and "No iteration is complete yet." in page


def test_a_run_in_its_first_phase_gives_a_page(tmp_path):
    page = page_of(make_run(tmp_path, events=TWO_ATTEMPTS[:2]))
    assert ">running<" in page


def test_a_failed_attempt_is_told_with_its_reason_escaped(tmp_path):
    page = page_of(make_run(tmp_path, events=TWO_ATTEMPTS))
    assert "failed (exit code 1)" in page
    assert "it broke &lt;b&gt;badly&lt;/b&gt;" in page and "<b>badly" not in page
    assert "lease of GPU set n0s0 expired: rollout was not heard of" in page


def test_attempts_are_folded_with_what_was_open_closed_at_their_last_event(tmp_path):
    first, second = attempts_of(read_events(make_run(tmp_path, events=TWO_ATTEMPTS).events)[0])
    assert (first.exit_code, second.exit_code) == (1, None)
    assert [(p.phase, p.end_s - p.begin_s) for p in first.span.phases] == [("join", 10), ("rollout", 20)]
    assert [(span.holder, span.end_s - span.begin_s) for span in first.leases] == [("rollout", 9)]
    assert [mark.text for mark in first.marks] == [
        "n0s0 lease expired: rollout was not heard of", "rollout-n0s0.1 ended: killed by SIGKILL"
    ]  # fmt: skip
    assert second.span.resumed == 0


def test_a_lost_node_gives_up_its_slabs_and_is_told_of(tmp_path):
    paths = make_run(tmp_path, events=(
        event(0, "attempt.start", nodes=4), event(1, "phase.begin", phase="rollout", iteration=1),
        event(2, "lease.grant", node=2, slab="n2s0", holder="rollout", token=1),
        event(2, "lease.grant", node=3, slab="n3s0", holder="rollout", token=1),
        *(event(2, "worker.start", node=n, worker=f"rollout-n{n}s0.1", pid=n) for n in (2, 3)),
        event(9, "node.lost", node=3, silence_s=10.2, goes_on=True, why="was not heard of for 10.2 s"),
        event(20, "phase.end", phase="rollout", iteration=1, seconds=19.0),
    ), launch={"nodes": 4, "gpus_per_node": 2, "engine_gpus_per_node": 1},
       placement={"mode": "disaggregated", "trainer_nodes": 1})  # fmt: skip
    (attempt,) = attempts_of(read_events(paths.events)[0])
    ends = {span.slab: span.end_s - attempt.span.begin_s for span in attempt.leases}
    assert ends == {"n3s0": 9, "n2s0": 20}
    assert [mark.text for mark in attempt.marks] == ["node3 is lost"]
    page = write_report(paths, None).read_text()
    assert "node3 was not heard of for 10.2 s: the run continues without it" in page
    assert "1 x 2 + 3 x 1 GPUs or slots, disaggregated" in page
    view = RunView(paths, 24)
    view.refresh()
    assert view.story.slabs.holders == {"n2s0": "rollout"}
    assert list(view.story.processes.states) == ["rollout-n2s0"]


def test_hours_count_the_gpus_of_each_attempt_and_not_those_of_absent_nodes(tmp_path):
    commit = event(50, "ckpt.commit", attempt=2, iteration=1, size_bytes=1, seconds=0.5)
    paths = make_run(tmp_path, events=[*TWO_ATTEMPTS, commit], launch={"nodes": 3, "gpus_per_node": 8})
    write_record(paths, 1, STARTED, {"absent": []})
    write_record(paths, 2, STARTED, {"absent": [2]})
    assert "0.24, 22% of them useful" in page_of(paths)  # 30 s of 24, 10 s of 16; 9 s sampled
    paths.attempt_config(2).write_text("not: [a config")
    assert "0.24, 22% of them useful" in page_of(paths)


def test_nothing_on_the_page_comes_from_elsewhere_or_runs(tmp_path):
    sample = {
        STEP: 1, "prompt": "<script>alert(1)</script>", "completion": "\ud800\x1b[31m</pre><img src=x>",
        "verdicts": {"judge": "<i>", "judge/thought": "hm"}, "scores": {"judge": 0.5}, "reward": 0.5,
        "ground_truth": "4",
    }  # fmt: skip
    page = page_of(make_run(tmp_path, events=TWO_ATTEMPTS, rows=metrics(6), samples=(sample,)))
    assert not re.search(r"<script|<img|<link|<iframe|https?://|url\(|@import| on[a-z]+=", page)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "answer of GenRM judge<" in page and "thought of GenRM judge<" in page
    assert "default-src 'none'" in page.partition("<title>")[0], "a browser would not run it either"
    assert "\u241b[31m&lt;/pre&gt;" in page and "\ufffd" in page


HOSTILE = '</title></svg><script>alert(1)</script>" onload="alert(1)\x1b\x00\ud800' + "w" * 100_000


def test_no_text_of_an_event_leaves_its_place_on_the_page(tmp_path):
    """Names of slabs, holders, phases and workers are drawn too, where no template escapes them."""
    measured = {"room": 1, "engines": 1, "slabs": 1, "idle": 0.5, "busy_s": 1.0, "held_s": 2.0}
    roles = {"rollout": measured, f"genrm:{HOSTILE}": measured}
    loads = [
        event(9 + each, "batch.load", iteration=each, seconds=9.0, num_samples=2, lengths=[1, 2], verdicts={},
              roles=roles, switch_s=0, train_s=1.0, kept=1)
        for each in (1, 2)
    ]  # fmt: skip
    events = [
        event(0, "attempt.start", nodes=1), event(1, "phase.begin", phase=HOSTILE, iteration=1),
        event(2, "lease.grant", slab=HOSTILE, holder=HOSTILE),
        event(3, "worker.end", worker=HOSTILE, how=HOSTILE),
        event(4, "lease.expire", slab=HOSTILE, cause=HOSTILE),
        event(5, "lease.quarantine", slab="s", cause=HOSTILE),
        event(6, "batch.begin", iteration=1, policy_version=0), *loads,
        event(12, "slab.move", slab=HOSTILE, before=HOSTILE, after=HOSTILE, reason=HOSTILE),
        event(13, "engine.unfit", slab=HOSTILE, holder=HOSTILE, error=HOSTILE),
        event(20, "attempt.end", exit_code=1, reason=HOSTILE),
    ]  # fmt: skip
    page = page_of(make_run(tmp_path, events=events, rows=metrics(3)))
    assert not re.search(r"<script|<img|\" onload|[\x00-\x08\x0b-\x1f\ud800-\udfff]", page)
    assert page.count("\u241b") > 10 and "damaged line" not in page and len(page) < 250_000


def test_a_sample_of_several_turns_shows_who_said_what(tmp_path):
    turns = [["policy", "two"], ["environment", " no: "], ["policy", "<b>four"], "torn", ["policy", 4]]
    sample = {STEP: 1, "prompt": "2+2", "completion": "two<b>four", "turns": turns, "reward": 1.0}
    page = page_of(make_run(tmp_path, events=TWO_ATTEMPTS, rows=metrics(6), samples=(sample,)))
    said = re.findall(r'<div class="label">(policy|environment|completion)</div><pre>(.*?)</pre>', page)
    assert said == [("policy", "two"), ("environment", " no: "), ("policy", "&lt;b&gt;four")]


def test_values_of_storage_options_are_not_on_the_page(tmp_path):
    """A report is what people send around; drivers have credentials under any name."""
    paths = make_run(
        tmp_path, events=TWO_ATTEMPTS, rows=metrics(6),
        checkpoint={"url": "s3://bucket/x", "storage_options": {"endpoint_url": "https://inside.example"}},
    )  # fmt: skip
    page = page_of(paths)
    assert "endpoint_url" in page and "inside.example" not in page


def test_torn_lines_and_metrics_that_are_no_numbers_are_left_out(tmp_path):
    paths = make_run(tmp_path, events=TWO_ATTEMPTS, rows=metrics(5))
    with paths.events.open("a") as file:
        file.write('{"kind": "phase.beg')
    with paths.metrics.open("a") as file:
        file.write(json.dumps({STEP: 6, "critic/rewards/mean": float("nan")}) + '\n{"training/glo')
    page = page_of(paths)
    assert "6 of 24" in page and "nan," not in page


def test_reward_rising_while_validation_falls_is_said_first():
    rows = [
        {STEP: step, "critic/rewards/mean": step / 10, "val-core/math/exact/mean@1": 1 - step / 10}
        for step in range(9)
    ]
    sentence, is_warning = verdict_on_curves(rows)
    assert is_warning and sentence.startswith("Reward rises while validation falls (math/exact/mean@1)")
    rising = [{**row, "val-core/math/exact/mean@1": row[STEP] / 10} for row in rows]
    assert verdict_on_curves(rising) == ("Reward rises; validation: math/exact/mean@1 rises.", False)


def test_losses_of_given_completions_are_compared_and_drawn():
    def rows(held_out):
        falling = [{STEP: step, "train/loss": 9.0 - step} for step in range(1, 9)]
        return [{STEP: 0}, *(row | {"val/loss": held_out(row[STEP])} if held_out else row for row in falling)]

    assert verdict_on_curves(rows(None)) == ("Loss falls; no rows are held out (data.val_files).", False)
    assert verdict_on_curves(rows(lambda step: 9.0 - step)) == ("Loss falls; held-out loss falls.", False)
    sentence, is_warning = verdict_on_curves(rows(lambda step: 1.0 + step))
    assert is_warning and "learns its rows by heart" in sentence
    drawn = reward_chart(rows(lambda step: 9.0 - step))
    assert ">held-out<" in drawn and ">training<" in drawn and "reward" not in drawn


@pytest.mark.parametrize(
    ("values", "way"),
    [
        ([1, 2, 3], 0),
        ([1, 2, 3, 4, 5, 6], 1),
        ([6, 5, 4, 3, 2, 1], -1),
        ([1, 5, 1, 5, 2, 5], 0),
        ([3] * 9, 0),
    ],
)
def test_a_trend_is_a_move_and_not_noise(values, way):
    assert trend_of(list(enumerate(values))) == way


def test_the_timeline_of_a_very_long_attempt_stays_small_and_shows_who_held_most(tmp_path):
    events = [event(0, "attempt.start", nodes=1)]
    for turn in range(3000):
        holder = "trainer" if turn < 1500 else "rollout"
        events.append(event(turn, "lease.grant", slab="n0s0", holder=holder, token=turn))
        events.append(event(turn + 0.9, "lease.release", slab="n0s0", holder=holder, token=turn))
    (attempt,) = attempts_of(read_events(make_run(tmp_path, events=events).events)[0])
    svg = draw_timeline(attempt, begin_s=attempt.span.begin_s, end_s=attempt.span.end_s)
    assert abs(svg.count('class="p-trainer"') - 300) <= 1 and abs(svg.count('class="p-rollout"') - 300) <= 1


def test_a_folder_that_is_no_run_and_a_place_that_cannot_be_written_name_the_fix(tmp_path):
    paths = make_run(tmp_path)
    with pytest.raises(ConfigError, match="Name another file with --out"):
        write_report(paths, tmp_path / "missing" / "report.html")
    paths.config.unlink()
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no config.yaml. Give the folder"):
        write_report(paths, None)


def alarm(at_s, kind="alarm.begin", **fields):
    begin = {"since": 2, "message": "the <reward> was 0"} if kind == "alarm.begin" else {}
    return event(at_s, kind, alarm="reward.flat", iteration=6, **begin, **fields)


def test_an_alarm_is_on_the_page_and_in_the_status_while_it_lasts(tmp_path):
    begun = [event(0, "attempt.start", nodes=1), alarm(1)]
    for count, (name, events) in enumerate(
        {
            "lasts": begun,
            "over": [*begun, alarm(2, "alarm.end")],
            "new attempt": [*begun, event(2, "attempt.start", attempt=2, nodes=1)],
        }.items()
    ):
        folder = tmp_path / str(count)
        folder.mkdir()
        paths = make_run(folder, events=events)
        view = RunView(paths, 24)
        view.refresh()
        page = write_report(paths, None).read_text()
        lasts = name == "lasts"
        assert ("<b>Alarm reward.flat</b>: the &lt;reward&gt; was 0" in page) is lasts, name
        expected = [{"name": "reward.flat", "since": 2, "message": "the <reward> was 0"}] if lasts else []
        assert view.summary()["alarms"] == expected
        assert "ALARM reward.flat" in page, "among the news in any case"
        assert "<h3>Attempt 1: " in page


def test_late_writes_and_killed_reward_calls_are_counted_over_all_attempts(tmp_path, capsys):
    late = {"seconds": 12.0, "lost": 3}
    killed = {"worker": "reward-n0.1", "call": "7", "limit_s": 2.0}
    events = [
        event(0, "attempt.start", nodes=1),
        event(1, "telemetry.late", **late), event(2, "reward.kill", **killed),
        event(3, "attempt.start", attempt=2, nodes=1),
        event(4, "telemetry.late", attempt=2, **late), event(5, "reward.kill", attempt=2, **killed),
        event(6, "reward.kill", attempt=2, **killed),
        event(7, "reward.kill", attempt=2, worker=None),
    ]  # fmt: skip
    paths = make_run(tmp_path, events=events, rows=metrics(3))
    page = write_report(paths, None).read_text()
    assert "2 writes of telemetry were late; 6 lines were lost." in page
    assert "3 reward calls were killed." in page
    assert "1 damaged line" in page, "a kill without its fields"
    status(paths.root, as_json=False)
    shown = capsys.readouterr().out
    assert "2 writes of telemetry were late; 6 lines were lost" in shown
    assert "3 reward calls were killed" in shown
    status(paths.root, as_json=True)
    summary = json.loads(capsys.readouterr().out)
    assert (summary["late_writes"], summary["lost_lines"], summary["killed_reward_calls"]) == (2, 6, 3)


def test_dropped_groups_are_in_the_status_with_their_number(tmp_path, capsys):
    drops = {"rollout/dropped_groups": 2.0, "rollout/failed_groups": 1.0}
    told = event(1, "alarm.drops", iteration=1, message="iteration 1: 3 prompt groups were dropped")
    reasons = [f"reward 'x', prompt {n}, sample {n}: reward.py:3: KeyError: 'label'" for n in range(6)]
    reasons += ["all its rewards are equal"] * 3
    first = [f"another {number}" for number in range(150)]  # fills what is counted
    drop = [event(1, "rollout.group.drop", number=n, reason=why) for n, why in enumerate([*first, *reasons])]
    paths = make_run(
        tmp_path, events=[event(0, "attempt.start", nodes=1), *drop, told],
        rows=[{**row, **drops} for row in metrics(3)],
    )  # fmt: skip
    status(paths.root, as_json=False)
    said = "dropped     9 prompt groups; 6 of them: reward 'x', reward.py:3: KeyError: 'label'"
    assert said in capsys.readouterr().out
    assert "iteration 1: 3 prompt groups were dropped" in write_report(paths, None).read_text()
