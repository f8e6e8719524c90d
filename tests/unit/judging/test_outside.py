"""A user's way of judging: what it may give, how it is asked, and what its mistakes cost."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.runs import ROOT
from tests.unit.control.test_group_scoring import ONLY_JUDGE, GroupBench
from yatt.adapters.inputs.dataset import Row
from yatt.errors import ConfigError, words_of
from yatt.judging.outside import (
    ask_way,
    checked_questions,
    checked_scores,
    packed_group,
    unpacked_scores,
)
from yatt.judging.protocol import Answer, GroupScores, JudgedGroup, Question
from yatt.records import message as m
from yatt.reward.functions import call_function
from yatt.reward.ways import load_ways, try_way

PAGE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLE = next(
    block
    for block in re.findall(r"^ *```python\n(.*?)^ *```", PAGE, re.S | re.M)
    if "# my_judging.py" in block
)
OWN: dict[str, Any] = {
    "function": "make_judging", "template": "{mine} or {rival}?", "judging": {"by": "own"},
    "verdict": {"pattern": "([AB])", "scores": {"A": 1.0, "B": 0.0}},
}  # fmt: skip
GROUP = JudgedGroup(
    prompt="p", ground_truth="", data_source="", completions=("a", "bb"), indexes=(0, 1), row={"x": 1}
)


def written(folder: Path, text: str = EXAMPLE) -> str:
    folder.mkdir(exist_ok=True)
    lines = [line.removeprefix("   ") for line in text.splitlines()]
    (folder / "my_judging.py").write_text("\n".join(lines) + "\n")
    return str(folder / "my_judging.py")


class OwnBench(GroupBench):
    """Whose reward process is here: it calls the user's way on the row of the order."""

    async def _call(self, order: m.Score | m.ScoreMany | m.JudgeGroup) -> m.Message:
        if not isinstance(order, m.JudgeGroup):
            return await super()._call(order)
        function = load_ways(self.config)[order.reward]
        row = Row(prompt="", data_source="", ground_truth=None, raw={"x": 1})
        try:
            found = await call_function(function, {"payload": order.payload, "row": row.raw}, None)
        except ValueError as error:
            return m.Failed(error=words_of(error), exit_code=2)
        return m.GroupJudged(payload=found)


def longer(text: str) -> str:
    """An honest judge."""
    mine, _, rival = text.rstrip("?").partition(" or ")
    return "A" if len(mine) > len(rival) else "B"


def test_the_pages_way_judges_a_group(tmp_path: Path) -> None:
    """bb, aaaa, c and ddd: the one of middle length is ddd."""
    bench = OwnBench(tmp_path, longer, settings=ONLY_JUDGE, path=written(tmp_path / "mine"), **OWN)
    assert bench.judged() == [0.0, 1.0, 0.0, 0.5]
    assert sorted(bench.prompts) == ["aaaa or ddd?", "bb or ddd?", "c or ddd?"]
    again = OwnBench(tmp_path / "again", longer, settings=ONLY_JUDGE, path=written(tmp_path / "mine"), **OWN)
    assert again.judged() == bench.judged() and sorted(again.seeds) == sorted(bench.seeds)


def test_what_its_process_sends_is_checked_too_and_its_counters_are_bounded(tmp_path: Path) -> None:
    """The user's code runs there, and may do what it likes."""
    path = written(
        tmp_path / "mine",
        EXAMPLE.replace("tuple(scores))", "tuple(scores), counts=COUNTS)").replace(
            "def make_judging", "COUNTS = {f'n{i}': 1 for i in range(200)}\n\n\n   def make_judging"
        ),
    )
    bench = OwnBench(tmp_path, longer, settings=ONLY_JUDGE, path=path, **OWN)
    assert bench.judged() == [0.0, 1.0, 0.0, 0.5]
    assert sum("/n" in key for key in bench.counters) == 64

    class Lying(OwnBench):
        payload = b""

        async def _call(self, order: m.Score | m.ScoreMany | m.JudgeGroup) -> m.Message:
            if isinstance(order, m.JudgeGroup):
                return m.GroupJudged(payload=self.payload)
            return await super()._call(order)

    far = Question(key="a", fields={"mine": "x", "rival": "y"}, about=(9,))
    for payload, says in (
        (b"\xff", "its way of judging failed"),
        (msgspec.msgpack.encode([far]), "not there"),
    ):
        lying = Lying(tmp_path / says, longer, settings=ONLY_JUDGE, path=path, **OWN)
        lying.payload = payload
        assert lying.judged() == [-1.0] * 4
        failed = lying.group.failure()
        assert failed is not None and says in failed.failed


def test_a_way_that_fails_costs_its_group_and_says_why(tmp_path: Path) -> None:
    path = written(tmp_path / "mine", EXAMPLE.replace("scores=tuple(scores)", "scores=(1.0,)"))
    bench = OwnBench(tmp_path, longer, settings=ONLY_JUDGE, path=path, **OWN)
    assert bench.judged() == [-1.0] * 4
    failed = bench.group.failure()
    assert failed is not None and failed.is_users_failure
    assert "GroupScores with a score for each completion" in failed.failed
    assert bench.counters["reward/judge/failed"] == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("", ""), ""),
        (("def make_judging", "def make"), "has no function 'make_judging'"),
        (("return AgainstTheMiddle()", "return 3"), "gives int, which has no methods questions and read"),
        (("return AgainstTheMiddle()", "return genrm.nothing"), "failed at .*: AttributeError"),
        (('"rival": texts[rival]}', "}"), "question '0' has no field 'rival', which the template shows"),
        (("key=str(place)", "key='x'"), "the key 'x' of a question is empty, too long, or there twice"),
        (("about=(place, rival)", "about=(place, 99)"), r"is about completions \(0, 99\), which are not"),
        (("scores=tuple(scores)", "scores=('x',) * len(scores)"), "could not convert string to float"),
        (("if answer is not None:", "if True:"), "'NoneType' object has no attribute 'value'"),
        (("rival, texts = middle(group)", "rival, texts = exit(3)"), "SystemExit|ended the process"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_before_anything_starts(
    tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    assert change[0] in EXAMPLE
    path = written(tmp_path / "mine", EXAMPLE.replace(*change) if change[0] else EXAMPLE)
    bench = OwnBench(tmp_path, longer, settings=ONLY_JUDGE, path=path, **OWN)
    if not says:
        try_way(bench.config, bench.config.genrms[0])
        return
    with pytest.raises(ConfigError, match=rf"genrms\[judge\]\.(path|function).*({says})"):
        try_way(bench.config, bench.config.genrms[0])


@pytest.mark.parametrize(
    "found",
    [
        None, [1], ["x"], [Question(key="", fields={}, about=(0,))],
        [Question(key="k" * 200, fields={}, about=(0,))], [Question(key="a", fields={}, about=())],
        [Question(key="a", fields={"x": 1}, about=(0,))],  # type: ignore[dict-item]
        [Question(key="a", fields={}, about=(0,), num_ranked=3)],
        [Question(key="a", fields={}, about=(True,))],
        [Question(key=str(i), fields={}, about=(0,)) for i in range(5000)],
    ],
)  # fmt: skip
def test_what_is_no_question_is_refused(found: Any) -> None:
    with pytest.raises(ValueError):
        checked_questions(found, GROUP)


@pytest.mark.parametrize(
    "found",
    [
        None, (1.0, 2.0), GroupScores(scores=(1.0,)), GroupScores(scores=(float("nan"), 1.0)),
        GroupScores(scores=(True, 1.0)), GroupScores(scores=(1.0, 1.0), extras=({},)),
        GroupScores(scores=(1.0, 1.0), extras=({"a": float("inf")}, {})),
    ],
)  # fmt: skip
def test_what_is_no_score_is_refused(found: Any) -> None:
    with pytest.raises(ValueError):
        checked_scores(found, GROUP)


def test_groups_and_answers_travel_whole_but_for_the_row(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Way:
        def questions(self, group: JudgedGroup) -> list[Question]:
            raise AssertionError(group)

        def read(self, group: JudgedGroup, answers: Any) -> GroupScores:
            seen.append((group, answers))
            return GroupScores(scores=(1, None), extras=({"a": 2}, {}), counts={"n": 3})

    answers = {"0": Answer(votes=(0.5, 1.0), measures={"confidence": 0.7}), "1": None,
               "2": Answer(rankings=((1, 0),), values=({"x": 1.0},))}  # fmt: skip
    found = unpacked_scores(ask_way(Way(), packed_group(GROUP, answers), {"x": 1}))
    assert seen == [(GROUP, answers)]
    assert found == GroupScores(scores=(1.0, None), extras=({"a": 2.0}, {}), counts={"n": 3})


def test_a_way_without_path_or_template_is_refused(tmp_path: Path) -> None:
    for lacking in ({"path": ""}, {"template": ""}):
        with pytest.raises(ConfigError, match="own needs path and function"):
            OwnBench(tmp_path, longer, settings=ONLY_JUDGE, **{**OWN, "path": "x.py", **lacking})
