"""`yatt show`: recorded samples, on a terminal and as JSON."""

import contextlib
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.obs_runs import make_run
from yatt.cli.commands.showing import show
from yatt.errors import ConfigError
from yatt.obs.metrics import STEP
from yatt.obs.rollouts import read_iteration
from yatt.paths import RunPaths

HOSTILE = "\x1b[2J\x1b]0;title\x07 <script> \x9b31m \u202e {prompt} \ud800 \x00 end\r\nsecond line"


def sample(number: int, **values: Any) -> dict[str, Any]:
    return {
        "kind": "sample", STEP: 3, "attempt": 1, "sample": number, "group": number // 2, "row": 7,
        "data_source": "sum", "num_tokens": 12, "num_prompt_tokens": 5, "finish_reason": "stop",
        "policy_versions": [[1, 4], [2, 8]], "scores": {"exact": 0.5}, "extras": {"exact/length": 3.0},
        "verdicts": {}, "reward": 0.5, "advantage": -1.25, "is_carried": True, "dropped": "", "failed": "",
        "prompt": "What is 1 + 1?", "completion": "It is 2.", "ground_truth": "2", **values,
    }  # fmt: skip


def write(
    paths: RunPaths, node: int, *records: Any, attempt: int = 1, cut: int = 0, num_nodes: int = 1
) -> None:
    head = {
        "kind": "iteration",
        "format": 1,
        STEP: 3,
        "attempt": attempt,
        "node": node,
        "num_nodes": num_nodes,
    }
    text = "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in (head, *records))
    paths.rollouts.mkdir(exist_ok=True)
    data = gzip.compress(text.encode(errors="surrogatepass"))
    paths.rollout_file(3, node).write_bytes(data[: len(data) - cut])


def shown(
    capsys: pytest.CaptureFixture[str], paths: RunPaths, iteration: int, number: int | None = None,
    *, as_json: bool = False,
) -> str:  # fmt: skip
    assert show(paths.root, iteration, number, as_json=as_json) == 0
    return capsys.readouterr().out


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setenv("COLUMNS", "80")
    return make_run(tmp_path)


def test_the_table_has_a_line_for_each_sample_of_all_nodes(paths, capsys) -> None:
    write(paths, 0, sample(0), sample(1, is_masked=True, is_carried=False))
    write(paths, 1, sample(3, dropped="all its rewards are equal", advantage=None), sample(2))
    lines = shown(capsys, paths, 3).splitlines()
    assert lines[0] == "iteration 3, attempt 1: 4 samples"
    assert lines[1].split() == ["sample", "group", "tokens", "finish", "exact", "reward", "advantage"]
    assert [line for line in lines[2:] if "What" in line] == ["prompt: What is 1 + 1?"] * 2, "one a group"
    assert lines.count("    completion: It is 2.") == 4
    rows = [line.split() for line in lines[2:] if "prompt:" not in line and "completion:" not in line]
    assert rows[0] == ["0", "0", "12", "stop", "0.5", "0.5", "-1.25", "reused"]
    assert rows[1][-1] == "masked"
    assert rows[3] == ["3", "1", "12", "stop", "0.5", "0.5", "-", "dropped", "reused"]


def test_a_long_text_is_shown_by_its_ends_in_one_line(paths, capsys) -> None:
    text = "begins here\n" + "word " * 300 + "\x1b[2Jends here"
    write(paths, 0, sample(0, completion=text, group=None), sample(1, prompt=None))
    out = shown(capsys, paths, 3)
    assert max(map(len, out.splitlines())) <= 80
    (line,) = [each for each in out.splitlines() if "begins" in each]
    assert line.startswith("    completion: begins here word") and line.endswith("ends here")
    assert "\x1b" not in out
    assert out.count("prompt: ") == 1


def test_one_sample_is_shown_in_full_within_the_terminal(paths, capsys) -> None:
    judged = {
        "kind": "judged", "samples": [4], "genrm": "judge", "tries": 2, "prompt": "Rate: " + "word " * 60,
        "answer": "I give it score: 7", "is_readable": True, "score": 0.7, "ranking": None,
        "values": {"confidence": 0.9}, "thought": "It is\nnearly right.", "is_thought_cut": True,
    }  # fmt: skip
    write(paths, 0, sample(4, completion="x" * 300 + "\n    indented"), judged, {**judged, "samples": [5]})
    out = shown(capsys, paths, 3, 4)
    assert max(map(len, out.splitlines())) <= 80
    for part in (
        "iteration 3, attempt 1, sample 4", "trained on; it has tokens of an earlier iteration",
        "version 1: 4 tokens, version 2: 8 tokens", "-1.25", "exact/length", "What is 1 + 1?",
        "      indented",
        "thought of GenRM judge before its answer (cut):\n  It is\n  nearly right.",
        "prompt of GenRM judge:", "answer 2 of GenRM judge: score 0.7, confidence 0.9:", "I give it score: 7",
    ):  # fmt: skip
        assert part in out, part
    assert out.count("prompt of GenRM") == 1


@pytest.mark.parametrize(
    "key", ["prompt", "completion", "dropped", "failed", "ground_truth", "finish_reason"]
)
def test_hostile_text_in_a_sample_cannot_reach_the_terminal(paths, capsys, key) -> None:
    hostile = sample(4, **{key: HOSTILE}, data_source=HOSTILE, scores={HOSTILE: 1.0}, verdicts={"j": HOSTILE})
    judged = {"kind": "judged", "samples": [4], "genrm": HOSTILE, "prompt": HOSTILE, "answer": HOSTILE}
    write(paths, 0, hostile, judged, sample(5))
    for arguments in ((3,), (3, 4)):
        out = shown(capsys, paths, *arguments)
        assert all(char.isprintable() or char == "\n" for char in out)
        assert "<script>" in out if arguments == (3, 4) else "sample" in out


def test_a_samples_pictures_are_named(paths, capsys) -> None:
    write(paths, 0, sample(4, media=["a/b.png", "c\x1b[2J.png", 7]))
    text = shown(capsys, paths, 3, 4)
    assert "a/b.png, c\\x1b[2J.png" in text
    for number, sizes in enumerate(([[640, 480], [8, 8]], [[1]], [["x", 1], 2], "big"), 5):
        write(paths, 0, sample(number, media=["a/b.png", "c.png"], media_sizes=sizes))
        says = "a/b.png (640 x 480), c.png (8 x 8)" if number == 5 else "a/b.png, c.png"
        assert says in shown(capsys, paths, 3, number)


def test_json_has_the_exact_text(paths, capsys) -> None:
    write(paths, 0, sample(4, completion=HOSTILE, advantage=float("nan")), sample(5))
    found = json.loads(shown(capsys, paths, 3, 4, as_json=True))
    assert found["sample"]["completion"] == HOSTILE and found["sample"]["advantage"] is None
    table = json.loads(shown(capsys, paths, 3, as_json=True))
    assert [each["sample"] for each in table["samples"]] == [4, 5] and table["is_whole"]
    assert "completion" not in table["samples"][0]


def test_files_of_an_attempt_whose_work_was_lost_are_left_out(paths, capsys) -> None:
    write(paths, 0, sample(0, reward=0.1), attempt=2)
    write(paths, 1, sample(2), attempt=1)
    found = read_iteration(paths, 3)
    assert found is not None and found.attempt == 2 and found.num_replaced == 1
    assert [each["sample"] for each in found.samples] == [0]
    assert "left out: 1" in shown(capsys, paths, 3)


def test_what_is_damaged_is_skipped_and_counted(paths, capsys) -> None:
    many = [sample(number, completion=f"{number * 977}" * 50) for number in range(400)]
    broken = [
        "{",
        "[1]",
        '{"kind": "sample", "sample": "x", "training/global_step": 3}',
        '{"kind": "judged"}',
    ]
    write(paths, 0, *broken, *many, cut=2000)
    found = read_iteration(paths, 3)
    assert found is not None and 10 < len(found.samples) < 400
    assert found.num_unreadable == 4, "a sample without a number is one"
    paths.rollout_file(3, 1).write_bytes(b"no gzip")
    assert "5 damaged lines" in shown(capsys, paths, 3)


def test_a_node_whose_file_is_missing_is_noticed(paths, capsys) -> None:
    write(paths, 1, sample(0), num_nodes=3)
    assert "Files of 2 trainer nodes are missing" in shown(capsys, paths, 3)
    assert json.loads(shown(capsys, paths, 3, as_json=True))["missing_files"] == 2


ANYTHING: list[Any] = [
    None, True, -1, 10**30, 0.5, float("nan"), "", HOSTILE, [], [[]], [[1]], [1, "x"], {}, {"a": [1]},
    {HOSTILE: None},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(150))
def test_any_value_of_any_key_is_printed_safely_or_counted(paths, capsys, seed) -> None:
    draw = random.Random(seed)

    def changed(record: dict[str, Any]) -> dict[str, Any]:
        keys = [key for key in record if key not in ("kind", "sample", STEP)]
        return {**record, **{key: draw.choice(ANYTHING) for key in draw.sample(keys, draw.randint(1, 6))}}

    judged = {
        "kind": "judged", "samples": [4], "genrm": "judge", "tries": 2, "prompt": "p", "answer": "a",
        "is_readable": True, "score": 0.7, "ranking": None, "values": {"right": 1.0},
    }  # fmt: skip
    write(
        paths, 0, sample(5), *(changed(sample(4, turns=[["policy", "x"]])) for _ in range(3)), changed(judged)
    )
    for number in (None, 4, 5):
        with contextlib.suppress(ConfigError):  # every line of this sample is damaged
            for as_json in (False, True):
                out = shown(capsys, paths, 3, number, as_json=as_json)
                assert all(char.isprintable() or char == "\n" for char in out)


def test_where_not_all_samples_are_recorded_those_of_the_report_are_shown(tmp_path, capsys) -> None:
    old = {STEP: 3, "prompt": "p", "completion": "c", "scores": {"exact": 1.0}, "reward": 1.0}
    lines = [sample(8), sample(9), sample(12, attempt=2), {**sample(1), STEP: 4}, {**old, STEP: 2}]
    paths = make_run(tmp_path, samples=lines)
    out = shown(capsys, paths, 3)
    assert "attempt 2: 1 samples" in out and "rollouts: all" in out
    assert shown(capsys, paths, 2).splitlines()[3].split() == ["0", "-", "-", "-", "1", "1", "-"]
    assert "c" in shown(capsys, paths, 2, 0)


def test_a_sentence_says_what_to_set_where_nothing_is_recorded(paths, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no sample of iteration 5 .* is at iteration 0\. .*rollouts: all"):
        shown(None, paths, 5)  # type: ignore[arg-type]
    write(paths, 0, sample(0))
    with pytest.raises(ConfigError, match="sample 9 of iteration 3 is not recorded"):
        shown(None, paths, 3, 9)  # type: ignore[arg-type]
    (tmp_path / "more").mkdir()
    other = make_run(tmp_path / "more", logging={"rollouts": "all"})
    with pytest.raises(ConfigError, match="rollouts_keep, which is 20"):
        shown(None, other, 5)  # type: ignore[arg-type]
