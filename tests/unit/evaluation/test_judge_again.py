"""`yatt judge again`: which completions are asked about, with which rows, and what has changed."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.unit.evaluation.test_judge_eval import ALONE
from yatt.adapters.inputs.dataset import RowFiles
from yatt.cli.judging.parts import result_bytes
from yatt.cli.judging.repeating import again_page, check_repeatable, judge_again, settings_again, target_again
from yatt.config.load import load_run_config, resolved_text
from yatt.config.schema import RunConfig
from yatt.core.figures.evaluation import NOT_APPLICABLE, EvaluatedSample
from yatt.errors import ConfigError, WorkerFailed
from yatt.evaluation import again
from yatt.evaluation.again import (
    AdvantageOrder,
    Opinion,
    again_result,
    computed_advantages,
    given_again,
    recorded_groups,
)
from yatt.evaluation.judging import JudgeOptions, judge_settings
from yatt.evaluation.labels import of_given
from yatt.obs.rollouts import HEAD, SAMPLE, compressed_file
from yatt.paths import RunPaths

GROUPS, SIZE = 3, 2


def run_of(folder: Path, **more: Any) -> RunConfig:
    """A run whose folder has the config and recorded rollouts of iterations 4 and 5."""
    data = folder / "train.jsonl"
    data.write_text(
        "".join(f'{{"prompt": "p{i}", "answer": {i}, "extra_info": {{"i": {i}}}}}\n' for i in range(9))
    )
    config = {
        "run": {"dir": str(folder / "run"), "seed": 5}, "model": {"path": str(folder / "policy")},
        "data": {"train_files": [str(data)], "ground_truth_key": "answer"},
        "rollout": {"n": SIZE}, "genrms": [{"name": "judge", "model": str(folder / "judge"), **ALONE}],
        "rewards": [{"name": "exact", "path": "builtin:exact", "weight": 0.5}],
        "algorithm": {"adv_estimator": "gae"}, "optimizer": {"lr": 1e-6},
        "trainer": {"total_iterations": 10, "train_batch_size": 4, "mini_batch_size": 4,
                    "max_tokens_per_micro_batch": 8192}, **more,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    found = load_run_config([path], [])
    paths = RunPaths(folder / "run")
    paths.rollouts.mkdir(parents=True)
    paths.config.write_text(resolved_text(found))
    for iteration in (4, 5):
        lines = [{"kind": HEAD, "attempt": 1, "num_nodes": 1}]
        lines += [sample(iteration, group, index) for group in range(GROUPS) for index in range(SIZE)]
        paths.rollout_file(iteration, 0).write_bytes(b"".join(compressed_file(lines)))
    return found


def sample(iteration: int, group: int, index: int) -> dict[str, Any]:
    number = 10 * iteration + group
    return {
        "kind": SAMPLE, "training/global_step": iteration, "sample": number * SIZE + index, "group": number,
        "index": index, "row": group, "prompt": f"p{group}", "ground_truth": group,
        "completion": f"c{number}.{index}", "num_tokens": 3, "num_response_tokens": 3,
        "finish_reason": "stop" if (group, index) != (2, 1) or iteration == 5 else "",
        "scores": {"judge": float(index), "exact": 1.0}, "reward": index + 0.5, "advantage": 0.0,
        "verdicts": {"judge": "YES"}, "unmeasured": {}, "dropped": "",
    }  # fmt: skip


def now(recorded: Any, judged: Any) -> list[EvaluatedSample]:
    """What an evaluation would give, with these scores by group and index."""
    return [
        EvaluatedSample(
            prompt_number=group.number, sample_number=index, data_source="d", prompt="", ground_truth="",
            completion="", finish_reason="stop", num_tokens=3, no_score={}, extras={}, verdicts={},
            scores={} if (score := judged(group.number, index)) is None else {"judge": score},
        )
        for group in recorded.groups for index in range(SIZE)
    ]  # fmt: skip


def test_whole_groups_are_asked_about_with_their_own_rows_and_numbers(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    recorded = recorded_groups(RunPaths(tmp_path / "run"), 4, 5)
    assert [(g.iteration, g.number) for g in recorded.groups] == [(4, 40), (4, 41), (5, 50), (5, 51), (5, 52)]
    assert recorded.left_out == 2, "one has no completion yet"
    files = config.data.train_files
    given = list(given_again(recorded, RowFiles(files, config.data, tmp_path / "rows"), files))
    assert [each.given.number for each in given] == [40, 41, 50, 51, 52]
    assert given[1].given.texts == ("c41.0", "c41.1") and given[1].raw["extra_info"] == {"i": 1}
    assert [g.number for g in recorded_groups(RunPaths(tmp_path / "run"), 5, 0).groups] == [50, 51, 52]


def test_groups_that_an_audit_did_not_look_at_are_not_asked_about(tmp_path: Path) -> None:
    run_of(tmp_path)
    recorded = recorded_groups(RunPaths(tmp_path / "run"), 5, 0)
    for each in recorded.groups[1].samples:
        each["unmeasured"], each["scores"] = {"judge": NOT_APPLICABLE}, {"exact": 1.0}
    recorded.groups[2].samples[0]["unmeasured"] = {"judge": NOT_APPLICABLE}
    judged = recorded.judged_by("judge")
    assert [g.number for g in judged.groups] == [50, 52]
    assert judged.left_out == recorded.left_out + SIZE
    assert recorded.judged_by("exact") == recorded


def test_the_run_s_pictures_are_those_of_the_rows_that_are_asked_about_again(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    config = run_of(tmp_path, genrms=[{"name": "judge", "model": "/m", **ALONE, "sees": "prompt"}])
    config = replace(config, data=replace(config.data, media_store=store))
    recorded = recorded_groups(RunPaths(tmp_path / "run"), 0, 0)
    found = settings_again(config, config.genrms[0], recorded, "cpu", 0)
    assert found.config.data.media_store == store and found.config.rollout.n == SIZE
    assert of_given(found.config.data, tmp_path / "given.jsonl").media_store == store
    other = JudgeOptions(data=("/d.jsonl",))
    assert judge_settings(config, config.genrms[0], other, 0).config.data.media_store == ""


def test_changed_data_files_are_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    recorded = recorded_groups(RunPaths(tmp_path / "run"), 0, 0)
    (tmp_path / "train.jsonl").write_text('{"prompt": "p0", "answer": 0}\n{"prompt": "p1", "answer": 7}\n')
    files = config.data.train_files
    with pytest.raises(ConfigError, match=r"row 2 of .* the data files have changed"):
        list(given_again(recorded, RowFiles(files, config.data, tmp_path / "rows"), files))


def test_the_same_verdicts_are_no_change_and_others_are_found(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    recorded = recorded_groups(RunPaths(tmp_path / "run"), 0, 0)
    opinion = Opinion(name="judge", config=config)
    same = again_result(
        recorded, now(recorded, lambda _, index: float(index)), opinion, opinion, tmp_path, {}
    )
    values = {name: each.value for name, each in same.figures.items()}
    assert values["changed"] == 0.0 and values["kendall"] == 1.0 and same.changes == []
    assert values["flat_before"] == values["flat_now"] == values["dropped_before"] == 0.0
    other = again_result(
        recorded, now(recorded, lambda g, i: None if g == 52 else 0.75 if g == 41 else float(i)),
        opinion, opinion, tmp_path, {},
    )  # fmt: skip
    values = {name: each.value for name, each in other.figures.items()}
    assert values["changed"] == pytest.approx(4 / 10) and values["dropped_now"] == pytest.approx(1 / 5)
    assert values["flat_now"] == pytest.approx(1 / 4) and other.figures["flat_now"].items == 4
    assert [each.sample for each in other.changes] == [82, 83], "0 to 0.75, then 1 to 0.75"
    assert other.changes[0].completion == "c41.0" and other.changes[0].scores == (0.0, 0.75)
    page = again_page(msgspec.structs.replace(other, by="<b>new</b>")).decode()
    assert "c41.0" in page and "<b>new" not in page and page.count("<details>") == 2


def test_a_reward_is_the_weighted_sum_of_all_scores(tmp_path: Path) -> None:
    opinion = Opinion(name="judge", config=run_of(tmp_path))
    record = sample(4, 0, 1)
    assert opinion.reward(record, {"judge": 1.0, "exact": 1.0}) == 1.5
    assert opinion.reward(record, {"judge": 1.0}) is None, "one is missing"
    assert opinion.reward({**record, "unmeasured": {"exact": "why"}}, {"judge": 1.0}) == 1.0


MISTAKES = {
    "no iterations": (
        ["--iterations", "7..9"],
        "--iterations 7..9: nothing is recorded of these.*write --iterations 4..5",
    ),
    "iteration 0": (["--iterations", "0"], "--iterations 0: the first iteration is 1"),
    "from iteration 0": (["--iterations", "0.."], "--iterations 0..: the first iteration is 1"),
    "a long name": (["--name", "ä" * 101], "write a name of at most 200 bytes"),
    "a link": (["--name", "link"], "link exists already; write --name, or remove it"),
    "no range": (["--iterations", "x"], "--iterations x: write A..B"),
    "a range turned round": (["--iterations", "5..4"], "write the smaller number first"),
    "a share": (["--exit-above", "2"], "--exit-above: write a share from 0 to 1"),
    "no such judge": (["--judge", "x"], "'x' is no GenRM of the run file; genrms are: judge"),
    "a name that leads elsewhere": (["--name", "../x"], "write a name without /"),
    "a folder that is there": (["--name", "old"], "old exists already; write --name, or remove it"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_arguments_is_told_before_anything_starts(tmp_path: Path, mistake: str) -> None:
    run_of(tmp_path)
    (tmp_path / "run/again/old").mkdir(parents=True)
    (tmp_path / "run/again/old/result.json").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/again/link").symlink_to(tmp_path / "elsewhere")
    words, says = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=says):
        judge_again(arguments_of(tmp_path / "run", *words))


def test_the_folder_of_the_result_is_tried_before_anything_is_asked(tmp_path: Path) -> None:
    run_of(tmp_path)
    paths = RunPaths(tmp_path / "run")
    assert target_again(paths, "ä" * 100).parent.is_dir() and not any((paths.root / "again").iterdir())
    (paths.root / "again").rmdir()
    (paths.root / "again").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="again is a link; remove it"):
        target_again(paths, "x")
    (paths.root / "again").unlink()
    (paths.root / "again").touch()
    with pytest.raises(ConfigError, match="again: cannot be created"):
        target_again(paths, "x")


def test_a_judge_that_was_given_an_environment_s_turns_is_refused(tmp_path: Path) -> None:
    genrms = [
        {"name": "head", "model": "/m", "kind": "scalar", "chat": True},
        {"name": "function", "model": "/m", "path": "/code/judge.py"},
        {"name": "text", "model": "/m", **ALONE},
        {"name": "number", "model": "/m", "kind": "scalar", "template": "{completion}"},
    ]
    own = run_of(tmp_path, genrms=genrms)
    other = replace(own, environment=replace(own.environment, path="/code/env.py"))
    for genrm in own.genrms:
        check_repeatable(own, genrm)
    for name, says in (("head", "is shown conversations"), ("function", "is a function")):
        with pytest.raises(ConfigError, match=rf"genrms\[{name}\] {says}.*has an environment"):
            check_repeatable(other, next(each for each in other.genrms if each.name == name))
    for genrm in other.genrms[2:]:
        check_repeatable(other, genrm)


DAMAGED = {
    "no group": {"group": None}, "a group as text": {"group": "x"}, "an index as text": {"index": "x"},
    "no tokens": {"num_tokens": None}, "no row": {"row": None}, "a row before the first": {"row": -1},
    "no prompt": {"prompt": 3}, "reasons that are none": {"unmeasured": [1]}, "no sample": {"sample": "x"},
    "a digit too many": {"num_response_tokens": 1.5}, "scores as a list": {"scores": [1]},
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_costs_its_group_and_is_counted(tmp_path: Path, damage: str) -> None:
    run_of(tmp_path)
    paths = RunPaths(tmp_path / "run")
    lines = [{"kind": HEAD, "attempt": 1, "num_nodes": 1}]
    lines += [sample(5, group, index) for group in range(GROUPS) for index in range(SIZE)]
    lines[-1].update(DAMAGED[damage])
    paths.rollout_file(5, 0).write_bytes(b"".join(compressed_file(lines)))
    found = recorded_groups(paths, 5, 5)
    assert [each.number for each in found.groups] == [50, 51] and found.left_out == 2


def test_names_that_are_not_utf8_are_written(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    opinion, recorded = (
        Opinion(name="judge", config=config),
        recorded_groups(RunPaths(tmp_path / "run"), 0, 0),
    )
    run = Path(os.fsdecode(b"/runs/\xff"))
    found = again_result(recorded, now(recorded, lambda _, i: 1.0 - i), opinion, opinion, run, {})
    assert found.run == "/runs/\\udcff"
    change = msgspec.structs.replace(found.changes[0], prompt="line\n\ud800 ä")
    written = json.loads(result_bytes(msgspec.structs.replace(found, changes=[change])))
    assert written["run"] == found.run and written["changes"][0]["prompt"] == "line\n\\ud800 ä"
    assert written["figures"]["changed"]["low"] is None, "of few groups there is no interval"


def test_advantages_have_a_time_limit() -> None:
    order = AdvantageOrder(estimator="grpo", gamma=1.0, batches=[])
    with pytest.raises(WorkerFailed, match="could not be computed within"):
        computed_advantages(order, limit_s=0.01)


def arguments_of(run: Path, *words: str) -> argparse.Namespace:
    from yatt.cli.main import command_parser

    return command_parser()[0].parse_args(["judge", "again", str(run), "--device", "cpu", *words])


def test_a_run_without_recorded_rollouts_is_told_the_key(tmp_path: Path) -> None:
    run_of(tmp_path)
    for path in (tmp_path / "run/rollouts").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match=r"no rollouts are recorded.*logging.rollouts: all"):
        judge_again(arguments_of(tmp_path / "run"))


def test_advantages_that_cannot_be_computed_cost_only_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All questions were asked: the other figures stay, with the reason."""
    config = run_of(tmp_path, algorithm={"adv_estimator": "grpo"})
    monkeypatch.setattr(again, "CHILD", "yatt.no_such_module")
    opinion, recorded = (
        Opinion(name="judge", config=config),
        recorded_groups(RunPaths(tmp_path / "run"), 0, 0),
    )
    samples = now(recorded, lambda _, i: 1.0 - i)
    found = again_result(recorded, samples, opinion, opinion, tmp_path, {})
    assert "no_such_module" in found.no_advantages and "advantages" not in found.figures
    assert found.figures["changed"].value > 0 and found.changes
