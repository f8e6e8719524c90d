"""The section about slabs in the report, and its lines in `yatt status`."""

import json

import pytest

from tests.obs_runs import event, logged, make_run
from tests.slab_runs import JUDGE, MOVING, batch, choice, moved, roles, split_move, tail_move, unfit
from yatt.cli.commands.look import status
from yatt.obs.page.report import write_report
from yatt.obs.page.slabs_part import MOST_ROWS, batch_sentences, slabs_part
from yatt.obs.page.timeline import MAX_SLABS, draw_timeline
from yatt.obs.story.history import attempts_of, read_events
from yatt.obs.story.slab_history import SlabHistory, slab_history
from yatt.obs.story.view import RunView


def slab_history_of(events) -> SlabHistory:
    return slab_history(logged(*events))


def said(*events) -> list[str]:
    found = slab_history_of(events)
    return batch_sentences(found, found.newest())


def rows_of(html: str) -> list[str]:
    return html.partition('class="moves"')[2].split("<tr>")[2:]


def test_a_run_without_a_batch_says_so(tmp_path):
    page = write_report(make_run(tmp_path), None).read_text()
    assert "<h2>GPU sets</h2>" in page and "No batch was measured yet." in page


def test_the_sentences_compare_with_no_idle_engine_and_with_the_prediction():
    found = said(*MOVING)
    bound_s = (10 * 2.5 / 4 + 8 * 3.5 / 4 + 7 * 3 / 4) / 3
    assert f"took {25 / 3:.1f} s on average" in found[0] and f"have taken {bound_s:.1f} s" in found[0]
    assert found[1].startswith("These batches took 2% less than predicted (median of 2)")
    assert found[2] == (
        "Changes of the split: 1. Moves of a GPU set: 2 near the end of a batch, 1 to another split while a "
        "batch was sampled, 0 for a role below its floor; 1 were not carried out."
    )


def test_a_fixed_split_has_curves_and_no_moves():
    html = slabs_part(slab_history_of([batch(1, 1, 10.0, roles(3, 1)), batch(12, 2, 9.0, roles(3, 1, 9.0))]))
    assert "Idle share of each role" in html and "GPU sets of each role" in html
    assert "Moves" not in html and "end of the batch" not in html


def test_each_move_says_what_it_was_worth_and_what_happened():
    rows = rows_of(slabs_part(slab_history_of(MOVING)))
    assert len(rows) == 3, "the slabs of another split are in one row"
    unfit_row, tail_row, split_row = rows
    assert "n1s0" in split_row and "rollout 3 to 2, genrm:judge 1 to 2" in split_row
    assert "1.5 s per batch" in split_row
    assert "batch 2 took 8.0 s, predicted 7.5 s; batch 1 took 10.0 s; moved in 1.2 s" in split_row
    assert "n1s1" in tail_row and "4.5 s" in tail_row and "it ran 2 requests, backlog 12.0 s" in tail_row
    assert "moved in 1.2 s, expected 1.5 s; the batch took 8.0 s, predicted 7.5 s" in tail_row
    assert "the engine could not be built" in unfit_row and "rollout&lt;b&gt; to genrm:judge" in unfit_row


def test_a_split_that_barriers_carry_out_has_a_row():
    (row,) = rows_of(
        slabs_part(slab_history_of([batch(1, 1, 10.0, roles(3, 1)), choice(2, (3, 1), (2, 2), 9.0, 7.5)]))
    )
    assert "those at the next barriers" in row and "batch 2 is not measured" in row


def test_of_very_many_moves_the_newest_are_shown():
    events = [batch(1, 1, 10.0, roles(3, 1))]
    for number in range(MOST_ROWS + 5):
        events += [tail_move(2 + number, f"n1s{number}"), moved(2.5 + number, f"n1s{number}")]
    html = slabs_part(slab_history_of(events))
    assert len(rows_of(html)) == MOST_ROWS and "5 older ones are not shown" in html
    assert ">n1s104<" in html and ">n1s4<" not in html


def test_engines_that_could_not_be_built_are_a_warning_with_what_they_need():
    html = slabs_part(slab_history_of(MOVING))
    assert "No engine of genrm:judge could be built on n1s2" in html
    assert "CUDA &lt;out&gt; of memory" in html and "host memory" in html


def test_the_timeline_shows_the_roles_of_a_slab_that_changes_and_the_engine_that_could_not(tmp_path):
    (attempt,) = attempts_of(read_events(make_run(tmp_path, events=MOVING).events)[0])
    svg = draw_timeline(attempt, begin_s=attempt.span.begin_s, end_s=attempt.span.end_s)
    assert "n1s0: rollout for" in svg and "n1s0: genrm:judge for" in svg
    assert "no engine of genrm:judge can be built on n1s2" in svg


def test_of_very_many_slabs_those_that_change_their_role_are_drawn(tmp_path):
    last = f"n1s{MAX_SLABS + 7}"
    grants = [
        event(1, "lease.grant", slab=f"n1s{i}", holder="rollout", token=1) for i in range(MAX_SLABS + 8)
    ]
    changed = [
        event(5, "lease.release", slab=last, holder="rollout", token=1),
        event(6, "lease.grant", slab=last, holder=JUDGE, token=2), event(9, "phase.end", phase="x"),
    ]  # fmt: skip
    paths = make_run(tmp_path, events=[event(0, "attempt.start", nodes=1), *grants, *changed])
    (attempt,) = attempts_of(read_events(paths.events)[0])
    svg = draw_timeline(attempt, begin_s=attempt.span.begin_s, end_s=attempt.span.end_s)
    assert f"{last}: genrm:judge for" in svg and ">n1s0<" in svg and f">n1s{MAX_SLABS}<" not in svg


def test_the_status_has_the_split_its_last_change_the_last_moves_and_unfit_engines(tmp_path, capsys):
    paths = make_run(tmp_path, events=MOVING)
    status(paths.root, as_json=False)
    told = capsys.readouterr().out
    assert (
        "split       genrm:judge 2, rollout 2; last change: rollout 3 to 2, genrm:judge 1 to 2 (7.5 s" in told
    )
    assert "moves       last: n1s0 rollout to genrm:judge (split), n1s1 rollout to genrm:judge (tail)" in told
    assert "not built   genrm:judge on n1s2: CUDA <out> of memory" in told
    status(paths.root, as_json=True)
    summary = json.loads(capsys.readouterr().out)
    assert summary["split"] == {JUDGE: 2, "rollout": 2}
    assert summary["unfit_engines"] == {"genrm:judge on n1s2": "CUDA <out> of memory"}
    assert len(summary["last_moves"]) == 2


def view_of(tmp_path, *events) -> RunView:
    view = RunView(make_run(tmp_path, events=[event(0, "attempt.start", nodes=2), *events]), 24)
    view.refresh()
    return view


def grant(at_s: float, slab: str, holder: str, **more):
    return event(at_s, "lease.grant", slab=slab, holder=holder, token=1, **more)


def test_while_the_trainer_has_the_slabs_the_split_is_that_of_the_last_batch(tmp_path):
    grants = [grant(1, "n0s0", "rollout"), grant(1, "n0s1", JUDGE), grant(3, "n0s0", "trainer")]
    view = view_of(tmp_path, *grants, choice(4, (1, 1), (1, 1), 3.0, 3.0))
    assert view.story.slabs.split() == {"rollout": 1, JUDGE: 1} and view.story.slabs.change == ""


def test_slabs_of_a_lost_node_of_quarantine_and_of_an_earlier_attempt_have_no_role(tmp_path):
    lost = event(3, "node.lost", node=1, why="is gone", goes_on=True)
    bad = event(3, "lease.quarantine", slab="n0s1", cause="memory")
    grants = [grant(1, slab, "rollout") for slab in ("n0s0", "n0s1", "n1s0", "n11s0")]
    view = view_of(tmp_path, *grants, split_move(2, "n0s0"), lost, bad, unfit(3, "n0s0"))
    assert view.story.slabs.roles == {"n0s0": "rollout", "n11s0": "rollout"}
    view.story.take(*logged(event(5, "attempt.start", attempt=2, nodes=2)))
    assert view.summary()["split"] == {} and view.summary()["unfit_engines"] == {}


def test_a_run_whose_split_is_fixed_has_no_line_about_it(tmp_path, capsys):
    paths = make_run(tmp_path, events=[event(0, "attempt.start", nodes=1), grant(1, "n0s0", "rollout")])
    status(paths.root, as_json=False)
    assert "split " not in capsys.readouterr().out


def test_errors_of_the_policy_are_counted_and_told_once(tmp_path, capsys):
    failed = [event(at_s, "split.failed", error="KeyError(<'rollout'>)") for at_s in (1, 2, 3)]
    view = view_of(tmp_path, *failed)
    assert len([news for news in view.news if "the policy of the split failed" in news]) == 1
    page = write_report(view.paths, None).read_text()
    assert "The policy of the split failed, 3 times: KeyError(&lt;&#39;rollout&#39;&gt;)" in page
    status(view.paths.root, as_json=False)
    assert "its policy failed, 3 times" in capsys.readouterr().out


@pytest.mark.parametrize("is_change", [True, False])
def test_a_change_of_the_split_is_told_and_a_choice_of_the_same_is_not(tmp_path, is_change):
    view = view_of(tmp_path, choice(4, (3, 1), (2, 2) if is_change else (3, 1), 9.0, 7.5))
    words = "the split changes: rollout 3 to 2, genrm:judge 1 to 2 (7.5 s predicted instead of 9.0 s)"
    assert (words in view.news) is is_change
