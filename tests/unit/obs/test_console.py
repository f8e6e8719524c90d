"""What a person reads while a run goes on."""

import io
import json

import pytest

from tests.obs_runs import event, make_run, metrics
from yatt.obs.metrics import STEP, RowFile
from yatt.obs.story.view import RunView
from yatt.obs.terminal.console import Console, row_line
from yatt.obs.terminal.printed_samples import PrintedSamples


def test_failed_completions_are_said_where_their_mean_is():
    row = {
        STEP: 0, "val-core/a/b/correct/mean@4": 1.0, "val-aux/a/b/correct/failed": 16,
        "val-aux/a/b/correct/failed_share": 1 / 3, "val-aux/c/correct/failed": 3,
        "val-aux/c/correct/failed_share": 1.0,
    }  # fmt: skip
    said = "validation a/b 1.000 (16 of 48 failed)  validation c unknown (3 of 3 failed)"
    assert row_line(row, 3) == f"iteration 0/3  {said}"


def test_a_data_source_with_a_slash_is_shown_whole():
    row = {STEP: 0, "val-core/openai/gsm8k/correct/mean@1": 0.25}
    assert row_line(row, 3) == "iteration 0/3  validation openai/gsm8k 0.250"


def test_the_line_of_a_validation_has_the_mean_only():
    row = {STEP: 0, "val-core/a/b/correct/mean@4": 0.25, "val-core/a/b/correct/best@4": 0.75}
    assert row_line(row, 10) == "iteration 0/10  validation a/b 0.250"


def test_what_an_earlier_start_has_shown_is_not_shown_again(tmp_path):
    past = (event(0, "attempt.start", nodes=1), event(9, "attempt.end", exit_code=75, reason="stopped"))
    run = make_run(tmp_path, events=past, rows=metrics(3))
    out = io.StringIO()
    console = Console(RunView(run, 9), out)
    console.pass_over()
    console.update()
    assert out.getvalue() == ""
    with run.metrics.open("a") as file:
        file.write(json.dumps({STEP: 4, "critic/rewards/mean": 0.5}) + "\n")
    console.update()
    console.close()
    assert out.getvalue() == "iteration 4/9  reward 0.500\n"


def test_a_killed_reward_call_is_told_once_in_each_attempt(tmp_path):
    kill = {"kind": "reward.kill", "worker": "reward-n0.1", "limit_s": 2.0}
    run = make_run(tmp_path, events=(event(1, **kill),))
    out = io.StringIO()
    view = RunView(run, 9)
    console = Console(view, out)
    console.pass_over()
    with run.events.open("a") as file:
        file.writelines(json.dumps(event(at_s, attempt=2, **kill)) + "\n" for at_s in (5, 6))
    console.update()
    console.close()
    assert out.getvalue().count("reward-n0.1 was killed: a reward call took more than 2 s") == 1
    assert view.story.processes.num_killed == 3


def add_samples(run, *lines):
    with run.samples.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def recorded(iteration, sample, **more):
    return {
        STEP: iteration, "attempt": 1, "sample": sample, "prompt": "3+4=\n", "completion": "7.",
        "reward": 1.0, "scores": {"sums": 1.0}, **more,
    }  # fmt: skip


def test_one_sample_of_every_so_many_iterations_is_printed(tmp_path):
    run = make_run(tmp_path)
    add_samples(run, recorded(2, 16))
    out = io.StringIO()
    console = Console(RunView(run, 9), out, PrintedSamples(run.samples, 2))
    console.pass_over()
    add_samples(run, recorded(3, 24), recorded(4, 30, dropped="all rewards equal"), recorded(4, 32))
    add_samples(run, recorded(4, 34))
    console.update()
    assert out.getvalue().splitlines() == [
        "  iteration 4, sample 32: reward 1.000", "    prompt: 3+4=", "    completion: 7.",
    ]  # fmt: skip
    add_samples(
        run, recorded(4, 32, attempt=2, reward=None, failed="KeyError: 'label'", completion="x" * 999)
    )
    console.update()
    again = out.getvalue().splitlines()[3:]
    assert again[0] == "  iteration 4, sample 32: no reward: KeyError: 'label'"
    assert again[2] == f"    completion: {'x' * 200} ... {'x' * 200}"
    console.close()


def test_samples_are_not_printed_again_when_an_attempt_writes_the_file_anew(tmp_path):
    """As each one does at its start, without the iterations that it trains again."""
    run = make_run(tmp_path)
    add_samples(run, *(recorded(iteration, iteration) for iteration in range(1, 101)))
    printed = PrintedSamples(run.samples, 10)
    assert len(printed.new()) == 10 * 3
    RowFile(run.samples, 95, lambda: None).close()
    add_samples(run, *(recorded(iteration, iteration, attempt=2) for iteration in range(95, 111)))
    heads = [line for line in printed.new() if line.startswith("  iteration")]
    assert heads == ["  iteration 100, sample 100: reward 1.000", "  iteration 110, sample 110: reward 1.000"]
    later = PrintedSamples(run.samples, 10)
    later.pass_over()
    RowFile(run.samples, 105, lambda: None).close()
    assert later.new() == []


def test_a_printed_sample_of_many_turns_is_short(tmp_path):
    run = make_run(tmp_path)
    add_samples(run, recorded(1, 8, turns=[["policy", str(number)] for number in range(50)]))
    assert PrintedSamples(run.samples, 1).new()[2:] == [
        *(f"    policy: {number}" for number in (0, 1, 2)), "    ...: 44 turns",
        *(f"    policy: {number}" for number in (47, 48, 49)),
    ]  # fmt: skip


class Terminal(io.StringIO):
    encoding = "latin-1"

    def isatty(self):
        return self.is_terminal

    is_terminal = False


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_sample_is_printed_letter_for_letter(tmp_path, is_terminal):
    out = Terminal()
    out.is_terminal = is_terminal
    console = Console(RunView(make_run(tmp_path), 9), out)
    console.say("x[1:a:2] ratio 3:100:4 :smile: [b]é中")
    console.close()
    assert "x[1:a:2] ratio 3:100:4 :smile: [b]é\\u4e2d" in out.getvalue()


def test_a_printed_sample_of_several_turns_says_who_spoke(tmp_path):
    run = make_run(tmp_path)
    add_samples(run, recorded(1, 8, turns=[["policy", "6"], ["environment", "no"], ["policy", "7"]]))
    lines = PrintedSamples(run.samples, 1).new()
    assert lines[1:] == ["    prompt: 3+4=", "    policy: 6", "    environment: no", "    policy: 7"]


def test_a_printed_sample_cannot_move_the_cursor(tmp_path):
    run = make_run(tmp_path)
    add_samples(run, recorded(1, 8, completion="a\x1b[2Jb"))
    out = io.StringIO()
    console = Console(RunView(run, 9), out, PrintedSamples(run.samples, 1))
    console.update()
    console.close()
    assert "\x1b" not in out.getvalue() and "a\\x1b[2Jb" in out.getvalue()


def test_without_the_key_no_sample_is_read(tmp_path):
    run = make_run(tmp_path)
    add_samples(run, recorded(1, 8))
    assert PrintedSamples(run.samples, 0).new() == []
