"""The blocks of docs/judging.md are config that yatt accepts."""

import re
from pathlib import Path

import pytest

from tests.runs import ROOT, RunFile
from yatt.adapters.net.judge_api import check_api
from yatt.config.load import load_run_config
from yatt.judging.judging import judging_of
from yatt.judging.reading import check_verdict, parse_ranking, parse_verdict
from yatt.judging.template import check_template

TEXT = (ROOT / "docs" / "judging.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.S | re.M)
SAID = [
    "NO, it is another one. No: YES",
    "so [[A]] or [[B]]? [[B]]",
    "I like [2].\nRanking: [2] > [3] > [1]",
    "so it is right: YES",
    "NO? YES",
    "YES",
    "NO",
    "YES",
    '{"reason": "x", "score": 7}',
    "fine. score: 6",
    "",
    "",
    "",
    "hm, score: 8",
]
MEANS = [1.0, 0.0, (1, 2, 0), 1.0, 1.0, 1.0, 0.0, 1.0, 7.0, 6.0, None, None, None, 8.0]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_is_accepted_and_reads_what_a_judge_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "block.yaml").write_text(BLOCKS[number])
    run = RunFile(tmp_path, {"run": {"deterministic": False}}).write()
    genrm, *others = load_run_config([run, tmp_path / "block.yaml"], []).genrms
    assert bool(others) == (genrm.kind == "teacher" and not genrm.top_k)
    if genrm.kind != "text":
        assert MEANS[number] is None
        return
    fields = judging_of(genrm).fields
    check_template(genrm.template, "template", fields, sees=genrm.sees != "none")
    check_verdict(genrm.verdict, "verdict")
    monkeypatch.setenv("JUDGE_API_KEY", "x")
    if genrm.api.url:
        check_api(genrm, "api")
    if genrm.judging.by == "listwise":
        assert parse_ranking(SAID[number], genrm.verdict, 3) == MEANS[number]
    else:
        assert parse_verdict(SAID[number], genrm.verdict) == MEANS[number]


def test_every_block_is_tried() -> None:
    assert len(BLOCKS) == len(SAID) == len(MEANS)
