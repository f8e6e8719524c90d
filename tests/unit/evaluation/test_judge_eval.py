"""`yatt judge eval`: the rows that it takes, the config of its evaluation, and what it finds in answers that
the ordinary scorer has got from judges with a known fault."""

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.tiny_models import make_scripted_model
from tests.unit.control.test_group_scoring import LIST, ONLY_JUDGE, PAIR, ROLES, GroupBench, better
from tests.unit.control.test_thinking_judges import SINGLE, THINK, ThinkingBench
from yatt.adapters.inputs.dataset import Row, read_data_rows
from yatt.cli.judging.measuring import measured_notes, quality_page
from yatt.cli.judging.parts import result_bytes
from yatt.config.check import broken_relations
from yatt.config.load import load_run_config, parse_resolved, resolved_text
from yatt.config.schema import RunConfig
from yatt.control.rollouts.evaluator import EvaluatedGroup
from yatt.control.rollouts.groups.groups import new_group
from yatt.control.rollouts.scoring.subject import Judged, Subject
from yatt.core.figures.evaluation import GIVEN, EvaluatedSample, JudgedAnswer
from yatt.core.gpus.placement import placement_of
from yatt.errors import ConfigError
from yatt.evaluation.judge_result import JudgeResult, judge_result, order_advice, quality_table
from yatt.evaluation.judging import JudgeOptions, asked_alone, judge_settings, named_judge
from yatt.evaluation.labels import LabelledRows, asked_twice, of_given, read_labelled, write_given
from yatt.judging.bootstrap import Figure
from yatt.records import message as m

ALONE = {
    "template": "{prompt}: {completion}",
    "verdict": {"pattern": "(YES|NO)", "scores": {"YES": 1.0, "NO": 0.0}},
}  # fmt: skip


def run_file(folder: Path, **more: Any) -> RunConfig:
    """A run with two judges, whose policy no machine could hold."""
    judges = [
        {"name": "judge", "model": "/models/judge", "tp_size": 4, "weight": 0.0, **ALONE},
        {"name": "pairs", "model": "/models/judge", **PAIR},
        {"name": "teacher", "model": "/models/large", "kind": "teacher", "tp_size": 2},
        {"name": "head", "model": "/models/head", "kind": "scalar", "chat": True, "transform": "standardize"},
        {
            "name": "rubric", "model": "/models/judge", "verdict": ALONE["verdict"],
            "template": "{completion}: {criterion}",
            "judging": {
                "by": "rubric", "criteria": [{"name": "x", "text": "x"}, {"name": "e", "rule": "exact"}],
            },
        },
    ]  # fmt: skip
    config = {
        "run": {"dir": "/runs/one", "seed": 5}, "model": {"path": "/models/policy"},
        "data": {"train_files": ["/data/train.jsonl"], "map": "/data/map.py"},
        "launch": {"nodes": 16, "gpus_per_node": 8, "device": "cpu"},
        "rollout": {"n": 8, "tp_size": 8}, "genrms": judges,
        "rewards": [{"name": "exact", "path": "builtin:exact"}, {"name": "gsm", "path": "builtin:gsm8k"}],
        "optimizer": {"lr": 1e-6},
        "trainer": {"total_iterations": 10, "train_batch_size": 64, "mini_batch_size": 64,
                    "max_tokens_per_micro_batch": 8192}, **more,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return load_run_config([path], [])


def file_of(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def labelled(folder: Path, judge: str, rows: list[dict[str, Any]]) -> LabelledRows:
    config = run_file(folder)
    return read_labelled([file_of(folder, rows)], config.data, named_judge(config, judge))


CHAT = [{"role": "user", "content": "why?"}]


def test_rows_have_the_forms_of_given_completions(tmp_path: Path) -> None:
    rows = labelled(tmp_path, "judge", [
        {"prompt": "a", "completion": "b", "label": 1}, {"prompt": CHAT, "completion": "c", "label": "NO"},
        {"messages": [*CHAT, {"role": "assistant", "content": "d"}], "label": True},
    ])  # fmt: skip
    assert rows.form == "texts" and rows.values == (0.0, 1.0)
    assert [(row.texts, row.label) for row in rows.rows] == [(("b",), 1.0), (("c",), 0.0), (("d",), 1.0)]
    assert rows.rows[2].prompt == CHAT
    pairs = labelled(tmp_path, "pairs", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert pairs.form == "pairs" and pairs.rows[0].texts == ("b", "c") and pairs.rows[0].label == 1.0
    order = [{"prompt": "a", "completion": "b", "label": each} for each in (1, 2, 4.5)]
    assert labelled(tmp_path, "judge", order).values == () == labelled(tmp_path, "head", order).values
    assert labelled(tmp_path, "rubric", order[:1]).values == (0.0, 1.0)


MISTAKES = {
    "no rows": ("judge", [], "no rows. Write rows with prompt, completion and label"),
    "no label": ("judge", [{"prompt": "a", "completion": "b"}], "row 1 has no column 'label'; write"),
    "a word of no verdict": (
        "judge", [{"prompt": "a", "completion": "b", "label": "MAYBE"}],
        "'MAYBE' in column 'label'; write a number from -1e9 to 1e9, or one of the verdict's words NO, YES",
    ),
    "no number": ("judge", [{"prompt": "a", "completion": "b", "label": float("nan")}], "write a number"),
    "a number of 400 digits": (
        "judge", [{"prompt": "a", "completion": "b", "label": 10**400}], "row 1 has .* from -1e9 to 1e9",
    ),
    "a huge number": (
        "head", [{"prompt": "a", "completion": "b", "label": -1.1e9}], "row 1 has -1100000000.0 in column",
    ),
    "labels of another scale": (
        "judge", [{"prompt": "a", "completion": "b", "label": each} for each in (0, 5)],
        "row 2: label 5 is none that a verdict of genrms\\[judge\\] can be: 0, 1.",
    ),
    "one label of another scale": (
        "head", [{"prompt": "a", "completion": "b", "label": 1}], "all labels are 1, which says nothing",
    ),
    "completions for a judge of pairs": (
        "pairs", [{"prompt": "a", "completion": "b", "label": 1}], "row 1: genrms\\[pairs\\] compares",
    ),
    "half a pair": ("pairs", [{"prompt": "a", "chosen": "b"}], "needs 'prompt', 'chosen' and 'rejected'"),
    "both forms": (
        "judge", [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "completion": "b"}],
        "row 2 needs 'prompt', 'chosen' and 'rejected'",
    ),
    "an equal pair": ("pairs", [{"prompt": "a", "chosen": "b", "rejected": "b"}], "are the same; leave such"),
    "turns of others": (
        "judge", [{"prompt": CHAT, "label": 1, "completion": [
            {"role": "assistant", "content": "x"}, *CHAT, {"role": "assistant", "content": "y"},
        ]}],
        "turns of others",
    ),
    "a teacher": ("teacher", [], "is a teacher, which judges nothing"),
    "a function": ("gsm", [], "'gsm' is a function, not a GenRM; genrms are: judge, pairs"),
    "an unknown name": ("jugde", [], "is no GenRM of the run file; genrms are: judge, pairs"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_data_or_judge_is_told_by_name(tmp_path: Path, mistake: str) -> None:
    judge, rows, says = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=says):
        labelled(tmp_path, judge, rows)


@pytest.mark.parametrize("judge", ["judge", "pairs", "head", "rubric"])
def test_only_the_judge_has_engines_and_it_is_asked_as_in_the_run(tmp_path: Path, judge: str) -> None:
    base = run_file(tmp_path)
    genrm = asked_alone(named_judge(base, judge))
    settings = judge_settings(base, genrm, JudgeOptions(data=("/data/pairs.jsonl",)), gpus=4)
    config = replace(settings.config, data=of_given(settings.config.data, tmp_path / "given.jsonl"))
    assert broken_relations(config) == [] and parse_resolved(resolved_text(config)) == config
    assert [each.name for each in config.genrms] == [judge] and config.run.seed == 5
    assert [each.name for each in config.rewards] == (["exact"] if judge == "rubric" else [])
    assert config.data.map == "" and config.genrms[0].transform == "none"
    (kept,) = config.genrms
    assert (kept.template, kept.verdict, kept.votes) == (genrm.template, genrm.verdict, genrm.votes)
    placement = placement_of(config)
    assert set(placement.sampling.values()) == {f"genrm:{judge}"} == set(placement.pools)
    assert placement.num_gpus == 4 and placement.trainer_nodes == (0,) and placement.turns == ()


def test_a_judge_behind_a_url_needs_no_gpu(tmp_path: Path) -> None:
    service = {"name": "far", "model": "m", "api": {"url": "http://localhost:1/v1"}, **ALONE}
    base = run_file(tmp_path, genrms=[service])
    settings = judge_settings(base, named_judge(base, "far"), JudgeOptions(data=("/d.jsonl",)), gpus=8)
    placement = placement_of(replace(settings.config, data=of_given(settings.config.data, tmp_path / "g")))
    assert placement.slabs == () and placement.pools == {} and placement.slabs_by_node == {0: ()}


def test_only_an_evaluation_has_rows_with_whole_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind is rl, but data"):
        run_file(tmp_path, data={"train_files": ["/data/train.jsonl"], "form": "groups"})


def test_every_row_is_written_twice_under_other_numbers(tmp_path: Path) -> None:
    rows = labelled(
        tmp_path, "pairs", [{"q": 3, "prompt": f"p{i}", "chosen": "b", "rejected": "c"} for i in (0, 1)]
    )
    write_given(tmp_path / "given.jsonl", asked_twice(rows))
    data = of_given(run_file(tmp_path).data, tmp_path / "given.jsonl")
    found = [row for row, _ in read_data_rows(data.val_files, data)]
    assert [row.raw[GIVEN]["number"] for row in found] == [0, 1, 2, 3]
    assert [row.prompt for row in found] == ["p0", "p1", "p0", "p1"]
    assert found[3].raw[GIVEN]["texts"] == ["b", "c"] and found[3].raw["q"] == 3


def test_half_characters_in_other_columns_are_written(tmp_path: Path) -> None:
    rows = labelled(tmp_path, "judge", [{"q": "\ud800 ä", "prompt": "ä", "completion": "ö", "label": 1}])
    write_given(tmp_path / "given.jsonl", asked_twice(rows))
    data = of_given(run_file(tmp_path).data, tmp_path / "given.jsonl")
    (row, _), *_ = read_data_rows(data.val_files, data)
    assert row.raw["q"] == "\ud800 ä" and row.raw[GIVEN]["texts"] == ["ö"] and row.prompt == "ä"


def test_places_are_those_that_the_user_wrote(tmp_path: Path) -> None:
    file, config = file_of(tmp_path, [{"prompt": "a", "completion": "b", "label": 1}] * 2), run_file(tmp_path)
    name = os.fsdecode(b"hf:\xff:test")
    found = read_labelled([file], config.data, config.genrms[0], [name])
    assert [each.place for each in found.rows] == ["hf:\\udcff:test: row 1", "hf:\\udcff:test: row 2"]
    result = judge_result(found, [], config.genrms[0], (name,), {})
    assert json.loads(result_bytes(result))["data"] == ["hf:\\udcff:test"] == [*result.data]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ConfigError, match=r"^hf:.*: row 1 has no column 'label'"):
        read_labelled([file], config.data, config.genrms[0], [name])


# ---- answers of the ordinary scorer -------------------------------------------------------------


def test_a_verdict_has_a_time_only_if_answers_have(tmp_path: Path) -> None:
    rows = labelled(tmp_path, "judge", [{"prompt": "p", "completion": "x", "label": 1}])
    answer = JudgedAnswer(
        about=(0,), prompt="", answer="YES", finish_reason="stop", tries=1, score=1.0, ranking=(),
        measures={}, num_tokens=0, span_s=(0.0, 0.0),
    )  # fmt: skip
    timed = msgspec.structs.replace(answer, span_s=(5.0, 7.0))
    sample = EvaluatedSample(
        prompt_number=0, sample_number=0, data_source="", prompt="", ground_truth="", completion="x",
        finish_reason="stop", num_tokens=0, scores={}, no_score={}, extras={}, verdicts={}, judged=(answer,),
    )  # fmt: skip
    genrm = run_file(tmp_path).genrms[0]
    assert judge_result(rows, [sample], genrm, ("d",), {}).seconds_a_verdict is None
    both = msgspec.structs.replace(sample, judged=(answer, timed))
    assert judge_result(rows, [both], genrm, ("d",), {}).seconds_a_verdict == 1.0, "of two verdicts"


def judged_by(folder: Path, says: Callable[[str], str], rows: LabelledRows, **genrm: Any) -> JudgeResult:
    """What is found if a real way of judging asks this judge about the rows, and asks again."""
    make_scripted_model(folder / "policy")  # quicker than one with weights
    bench = GroupBench(folder, says, settings=ONLY_JUDGE, **genrm)
    section = bench.config.genrms[0]
    found = asyncio.run(samples_of(bench, rows))
    return judge_result(rows, found, section, ("rows.jsonl",), {"seed": 0})


async def samples_of(bench: GroupBench, rows: LabelledRows) -> list[EvaluatedSample]:
    found: list[EvaluatedSample] = []
    for given in asked_twice(rows):
        judged: list[Judged] = []
        texts, number = given.given.texts, given.given.number
        group = new_group(number, number, "say much", [1, 2], len(texts))
        row = Row(prompt="say much", data_source="talk", ground_truth="", raw={})
        subjects = []
        for sample, text in zip(group.samples, texts, strict=True):
            sample.text, sample.finish_reason = text, "stop"
            ref = m.RowRef(0, 0, 0)
            subjects.append(
                Subject(group=group, sample=sample, row=row, ref=ref, judged=judged, is_held_out=True)
            )
        for each in subjects:
            await bench.scorer.score(each, ROLES)
        await bench.scorer.score_group(subjects, ROLES)
        found += EvaluatedGroup(subjects).records({"judge": bench.config.genrms[0].template})
    return found


def pairs_of_lengths(folder: Path, *lengths: tuple[int, int]) -> LabelledRows:
    rows = [{"prompt": f"p{i}", "chosen": "a" * a, "rejected": "b" * b} for i, (a, b) in enumerate(lengths)]
    return labelled(folder, "pairs", rows)


@pytest.mark.parametrize("way", ["pairwise", "listwise"])
def test_a_judge_of_pairs_is_asked_in_both_orders_and_its_faults_are_seen(tmp_path: Path, way: str) -> None:
    rows = pairs_of_lengths(tmp_path, (5, 2), (2, 5), (7, 1), (1, 9))
    section = PAIR if way == "pairwise" else LIST
    long = better if way == "pairwise" else longest_first
    found = judged_by(tmp_path / "long", long, rows, **section)
    values = {name: each.value for name, each in found.figures.items()}
    assert (values["agreement"], values["consistency"]) == (0.5, 1.0)
    assert (values["place"], values["flips"], values["length"]) == (0.0, 0.0, 0.5), "the longer one wins all"
    assert values["unreadable"] == 0.0 and found.without == 0 and found.seconds_a_verdict is not None
    assert [each.place.rpartition(":")[2] for each in found.errors] == [" row 2", " row 4"]
    first = judged_by(tmp_path / "first", lambda _: "1" if way == "pairwise" else "1 2", rows, **section)
    values = {name: each.value for name, each in first.figures.items()}
    assert (values["agreement"], values["place"], values["flips"], values["length"]) == (0.5, 1.0, 1.0, 0.0)
    own = run_file(tmp_path).genrms[1]
    assert order_advice(found, own) == "", "four pairs are too few"
    place = Figure(value=0.0, low=-0.01, high=0.01, items=100)
    assert "asks half" in order_advice(msgspec.structs.replace(found, figures={"place": place}), own)
    few = msgspec.structs.replace(place, items=99)
    assert order_advice(msgspec.structs.replace(found, figures={"place": few}), own) == ""
    assert " -  " in quality_table(found.figures)[1], "no interval"
    (cell,) = first.confusion
    assert (cell.label, cell.verdict, cell.rows) == ("chosen", "rejected", 4), "a tie is no agreement"


@pytest.mark.parametrize("on_cut", ["ask", "unreadable"])
def test_thoughts_are_shown_with_their_answers_and_the_cut_ones_counted(tmp_path: Path, on_cut: str) -> None:
    rows = labelled(tmp_path, "judge", [
        {"prompt": "p", "completion": text, "label": 0} for text in ("<b>good", "bad")
    ])  # fmt: skip
    make_scripted_model(tmp_path / "j/policy")  # quicker than one with weights

    def thinks(text: str) -> str:
        return "so many words that it is cut" if "bad" in text else "<b>hm"

    section = {**SINGLE, "retries": 0, "think": {**THINK, "on_cut": on_cut}}
    bench = ThinkingBench(tmp_path / "j", thinks, lambda _: "Y", **section)
    found = judge_result(rows, asyncio.run(samples_of(bench, rows)), bench.config.genrms[0], ("d",), {})
    values = {name: each.value for name, each in found.figures.items()}
    assert values["thought_cut"] == 0.5 and values["cut"] == 0.0
    assert values["unreadable"] == (0.5 if on_cut == "unreadable" else 0.0)
    thoughts = {each.texts[0]: each.thoughts for each in found.errors}
    assert thoughts["<b>good"] == ("<b>hm",)
    page = quality_page(found).decode()
    assert "&lt;b&gt;hm" in page and "<b>hm" not in page
    assert on_cut == "unreadable" or ("... (cut)" in thoughts["bad"][0] and "... (cut)" in page)


@pytest.mark.parametrize(("orders", "says"), [("drawn", "judging.orders: both lets"), ("both", "")])
def test_advice_is_about_the_run_s_own_orders(tmp_path: Path, orders: str, says: str) -> None:
    rows = pairs_of_lengths(tmp_path, *[(5, 2), (2, 5)] * 60)
    found = judged_by(tmp_path / "first", lambda _: "1", rows, **PAIR)
    section = {**PAIR, "judging": {"by": "pairwise", "orders": orders}}
    base = run_file(tmp_path, genrms=[{"name": "judge", "model": "/m", **section}])
    (note,) = measured_notes(found, base) or [""]
    assert says in note and bool(note) == bool(says)


def longest_first(text: str) -> str:
    shown = [block.split("]\n")[1].strip() for block in text.partition(";")[0].split("\n\n")]
    return "1 2" if len(shown[0]) > len(shown[1]) else "2 1"


def test_an_unreadable_verdict_is_counted_and_is_none(tmp_path: Path) -> None:
    rows = pairs_of_lengths(tmp_path, (5, 2), (7, 1))
    found = judged_by(tmp_path / "j", lambda text: "?" if ":aaaaa;" in text else better(text), rows, **PAIR)
    assert found.without == 1 and found.rows == 2 and "no readable verdict" in found.reasons[0]
    assert found.figures["agreement"].items == 1 and 0 < found.figures["unreadable"].value < 1


def test_single_completions_are_compared_with_their_labels(tmp_path: Path) -> None:
    rows = labelled(tmp_path, "judge", [
        {"prompt": "p", "completion": text, "label": label}
        for text, label in (("good", 1), ("bad", 0), ("goodish", 0), ("fine", 1))
    ])  # fmt: skip
    found = judged_by(tmp_path / "j", lambda text: "YES" if "good" in text else "NO", rows, **ALONE)
    assert found.figures["agreement"].value == 0.5 and found.main == "agreement"
    assert found.figures["auc"].value == 0.5
    assert {(c.label, c.verdict): c.rows for c in found.confusion} == dict.fromkeys(
        [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")], 1
    )
    assert {each.texts for each in found.errors} == {("goodish",), ("fine",)}
    assert "agreement" in "\n".join(quality_table(found.figures))


def test_a_judge_that_says_another_thing_with_another_seed_is_not_consistent(tmp_path: Path) -> None:
    rows = labelled(tmp_path, "judge", [{"prompt": "p", "completion": "x", "label": 1}] * 4)
    said = iter(["YES"] * 4 + ["NO"] * 3 + ["YES"])
    found = judged_by(tmp_path / "j", lambda _: next(said), rows, **ALONE)
    assert (found.figures["agreement"].value, found.figures["consistency"].value) == (1.0, 0.25)


@pytest.mark.parametrize("orders", ["drawn", "one"])
def test_a_pair_is_shown_in_both_orders_whatever_the_run_does(tmp_path: Path, orders: str) -> None:
    judging = {"by": "pairwise", "pairs": "ground_truth", "orders": orders}
    base = run_file(tmp_path, genrms=[{"name": "judge", "model": "/m", **PAIR, "judging": judging}])
    asked = asked_alone(named_judge(base, "judge"))
    assert (asked.judging.orders, asked.judging.pairs, asked.on_unparsable) == ("both", "all", "drop_group")
    lists = {**LIST, "judging": {"by": "listwise", "orders": orders}}
    base = run_file(tmp_path, genrms=[{"name": "judge", "model": "/m", **lists}])
    assert asked_alone(named_judge(base, "judge")).judging.orders == "both"


def test_a_page_shows_every_figure_and_error_and_runs_nothing_of_a_stranger(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    rows = labelled(tmp_path, "judge", [
        {"prompt": evil, "completion": f"{evil}{label}", "label": label} for label in (0, 1, 1)
    ])  # fmt: skip
    found = judged_by(tmp_path / "j", lambda _: f"YES {evil}", rows, **ALONE)
    page = quality_page(found).decode()
    assert "<script" not in page and page.count("&lt;script&gt;") >= 6
    assert all(f"<td>{name}</td>" in page for name in found.figures)
    assert page.count("<details>") == len(found.errors) + len(found.confusion) == 3


def test_a_judge_of_completions_says_which_one_of_a_pair_it_prefers(tmp_path: Path) -> None:
    rows = pairs_of_lengths(tmp_path, (5, 2), (7, 1), (1, 9))
    found = judged_by(tmp_path / "j", lambda text: "YES" if "aaaa" in text else "NO", rows, **ALONE)
    assert found.figures["agreement"].value == pytest.approx(2.5 / 3) and "place" not in found.figures
    assert [(cell.verdict, cell.rows) for cell in found.confusion] == [("chosen", 2), ("tie", 1)]
