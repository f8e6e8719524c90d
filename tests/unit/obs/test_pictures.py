"""The screen of `yatt watch`, smoothed curves, the page about several runs, settings in a report."""

import io
import math
import re
from pathlib import Path

import pytest

from tests.obs_runs import event, make_run, metrics
from yatt.adapters.run_folder.ledger import STARTED, write_record
from yatt.cli.commands.look import compare, open_view
from yatt.errors import ConfigError
from yatt.launch.folder.surroundings import describe_machine
from yatt.obs.metrics import STEP
from yatt.obs.page.charts import Series, line_chart, smoothed_points
from yatt.obs.page.comparison import unique_names, write_comparison
from yatt.obs.page.report import write_report
from yatt.obs.terminal.screen import BARS, Screen, screen_lines, sparkline


def test_the_moving_mean_is_of_the_values_around(tmp_path):
    points = [(float(x), float((x * 7919) % 13)) for x in range(100)]
    found = smoothed_points(points)
    assert [x for x, _ in found] == [x for x, _ in points]
    for index, (_, mean) in enumerate(found):
        reach = min(3, index, 99 - index)
        around = [y for _, y in points[index - reach : index + reach + 1]]
        assert mean == pytest.approx(sum(around) / len(around))
    assert smoothed_points(points[:39]) == ()


def test_a_long_series_is_faint_below_its_mean_and_the_axis_has_a_title():
    def drawn(count, **more):
        line = Series(name="a", points=tuple((float(x), float(x % 7)) for x in range(count)), colour="c1")
        return line_chart([line], title="t", size=(380, 200), **more)

    assert drawn(90).count("<polyline") == 2 and drawn(90).count("faint") == 1
    assert drawn(9).count("<polyline") == 1 and drawn(9).count("<circle") == 9
    assert drawn(90, has_dots=False).count("<polyline") == 1
    assert ">iteration</text>" in drawn(9) and ">seconds</text>" in drawn(9, x_title="seconds")


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 10, 24, 60])
def test_the_screen_fits_and_has_no_control_characters(tmp_path, width, height):
    rows = [row | {"actor/ppo_kl": math.nan, "actor/entropy": 1e200} for row in metrics(30)]
    paths = make_run(tmp_path, rows=rows)
    view = open_view(paths.root)
    view.refresh()
    view.story.slabs.holders = {f"n{i}s0": "trainer\x1b[31m" for i in range(20)}
    view.story.saves.waits = {"node0": "a\nb"}
    lines = screen_lines(view, [f"sentence {i} \x07" for i in range(100)], width, height)
    assert len(lines) <= max(height, 1) and all(len(line) <= width for line in lines)
    assert not any(ord(character) < 32 for line in lines for character in line)
    if width == 80 and height == 60:
        assert re.search(r"█+░* 24|█+ 30/24", lines[1]) and "sentence 99" in lines[-1]
        assert any("and 12 more GPU sets" in line for line in lines)


def test_the_bar_shows_share_phase_and_time_left(tmp_path):
    view = open_view(make_run(tmp_path, rows=metrics(6)).root)
    view.refresh()
    (line,) = [line for line in screen_lines(view, [], 80, 24) if "6/24" in line]
    assert "25%" in line and "left 18s" in line
    bar = line.partition(" ")[0]
    assert bar.count("█") == len(bar) // 4


def test_a_sparkline_has_the_newest_values_between_least_and_most():
    assert sparkline([9.0, 0.0, 7.0], 2) == BARS[0] + BARS[-1]
    assert sparkline([3.0, 3.0], 8) == BARS[0] * 2 and sparkline([], 8) == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_run_folder_that_fails_does_not_end_the_screen(tmp_path):
    paths = make_run(tmp_path, rows=metrics(2))
    paths.finished.mkdir()  # reading this record fails
    screen = Screen(open_view(paths.root), Terminal())
    try:
        screen.update()
        paths.finished.rmdir()
        screen.update()
        screen.say("over")
    finally:
        screen.close()
    assert [line.partition("  ")[0] for line in screen._said] == ["iteration 1/24", "iteration 2/24", "over"]


def test_gpus_are_counted_from_the_drivers_files(tmp_path):
    for number, name in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "Tesla T4")):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 18\n")
    assert describe_machine("auto", tmp_path)["gpus"] == {"NVIDIA H100 80GB HBM3": 2, "Tesla T4": 1}
    assert (
        describe_machine("cpu", tmp_path)["gpus"] == describe_machine("cuda", tmp_path / "none")["gpus"] == {}
    )


def a_run(tmp_path: Path, name: str, **sections):
    (tmp_path / name).mkdir()
    return make_run(tmp_path / name, rows=metrics(12), **sections)


def test_a_page_about_runs_has_their_curves_figures_and_differing_keys(tmp_path):
    first = a_run(tmp_path, "a")
    second = a_run(
        tmp_path, "b<script>", optimizer={"lr": 0.5}, logging={"webhook_url": "https://h.example/s3cret"}
    )
    page = write_comparison([first.root, second.root], tmp_path / "page.html").read_text()
    assert "a/run" in page and "b&lt;script&gt;/run" in page and "b<script>" not in page
    assert "<code>optimizer.lr</code>" in page and ">0.001<" in page and ">0.5<" in page
    assert "run.dir" not in page and "s3cret" not in page
    assert page.count('class="chart"') >= 3 and "12 of 24" in page
    mean = sum(step / 10 for step in range(3, 13)) / 10
    assert f">{mean:.4g}<" in page


def test_runs_are_named_by_the_shortest_ends_that_differ(tmp_path):
    names = unique_names([Path("/x/a/run"), Path("/x/b/run")])
    assert names == ["a/run", "b/run"]
    assert unique_names([Path("/x/one"), Path("/y/two")]) == ["one", "two"]
    assert len(set(unique_names([Path("/x/a/run"), Path("/y/a/run")]))) == 2


def test_too_many_runs_or_no_run_are_refused(tmp_path):
    root = a_run(tmp_path, "a").root
    with pytest.raises(ConfigError, match="compares at most 6 runs, not 7"):
        compare([root] * 7, tmp_path / "page.html")
    with pytest.raises(ConfigError, match="is not a run folder"):
        compare([root, tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_report_has_settings_versions_and_machine(tmp_path):
    paths = make_run(
        tmp_path, rows=metrics(3), events=[event(0, "attempt.start", nodes=1)],
        rollout={"n": 7}, logging={"webhook_url": "https://h.example/s3cret"},
    )  # fmt: skip
    write_record(paths, 1, STARTED, {"surroundings": describe_machine("cpu")})
    page = write_report(paths, None).read_text()
    assert "rollout:\n  n: 7" in page and "total_iterations: 24" in page and "s3cret" not in page
    found = describe_machine("cpu")
    assert f"<tr><td>torch</td><td>{found['versions']['torch']}</td></tr>" in page
    assert f"<td>cores</td><td>{found['cores']}</td>" in page and "<td>GPUs</td><td>none</td>" in page


@pytest.mark.parametrize("damage", [{}, {"surroundings": 7}, {"surroundings": {"versions": [], "gpus": "x"}}])
def test_a_record_without_surroundings_costs_only_their_table(tmp_path, damage):
    paths = make_run(tmp_path, rows=metrics(3))
    write_record(paths, 1, STARTED, {"pid": 1, **damage})
    assert "Keys that are not defaults" in write_report(paths, None).read_text()


@pytest.mark.parametrize(
    ("share", "says", "warns"), [(0.0, False, False), (0.25, True, False), (0.75, True, True)]
)
def test_flat_groups_are_explained(tmp_path, share, says, warns):
    rows = [row | {"training/flat_groups": share} for row in metrics(12)]
    page = write_report(make_run(tmp_path, rows=rows), None).read_text()
    assert ("have identical rewards" in page) == says
    assert (f'<p class="say warn">In {100 * share:.0f}% of the prompt groups' in page) == warns


def test_a_report_has_a_chart_for_wide_and_one_for_narrow_screens(tmp_path):
    page = write_report(make_run(tmp_path, rows=metrics(5)), None).read_text()
    assert '<div class="wide"><svg class="chart" viewBox="0 0 1180' in page
    assert '<div class="narrow"><svg class="chart" viewBox="0 0 400' in page


def test_kl_is_named_by_what_it_is_measured_against(tmp_path):
    rows = [row | {"actor/ppo_kl": 0.1 * row[STEP]} for row in metrics(5)]
    assert (
        "<h3>KL: to the sampling policy</h3>" in write_report(make_run(tmp_path, rows=rows), None).read_text()
    )
