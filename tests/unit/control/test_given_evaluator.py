"""The evaluator of given completions, with real rows, scorer, judge and reading: what it asks and writes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.tiny_models import make_scripted_model
from tests.unit.control.test_group_scoring import ONLY_JUDGE, PAIR, GroupBench, better
from yatt.adapters.files.writer import BackgroundWriter
from yatt.adapters.inputs.dataset import RowFiles
from yatt.config.schema import RunConfig
from yatt.control.node import Node
from yatt.control.rollouts.episodes import Episodes, evaluation_sampling
from yatt.control.rollouts.evaluator import EvaluatedRows, Evaluator
from yatt.control.rollouts.groups.kept import KeptGroups
from yatt.control.rollouts.router import Router
from yatt.core.figures.evaluation import EvaluatedSample, GivenTexts
from yatt.core.gpus.placement import placement_of
from yatt.evaluation.judging import JudgeOptions, asked_alone, judge_settings
from yatt.evaluation.labels import GivenRow, of_given, write_given
from yatt.evaluation.result import read_samples
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths
from yatt.records import cluster as c

ALONE = {
    "template": "{prompt}|{completion}",
    "verdict": {"pattern": "([YN])", "scores": {"Y": 1.0, "N": 0.0}},
}


def bench_of(folder: Path, says: Callable[[str], str], **genrm: Any) -> GroupBench:
    make_scripted_model(folder / "policy")
    return GroupBench(folder, says, settings=ONLY_JUDGE, **genrm)


def given(number: int, *texts: str, prompt: str = "p") -> GivenRow:
    reasons = ("stop",) * (len(texts) - 1) + ("length",)
    return GivenRow(
        raw={}, prompt=prompt, given=GivenTexts(number=number, texts=texts, finish_reasons=reasons)
    )


def config_of(bench: GroupBench, path: Path) -> RunConfig:
    genrm = asked_alone(bench.config.genrms[0])
    settings = judge_settings(bench.config, genrm, JudgeOptions(data=(str(path),)), gpus=0)
    return replace(settings.config, data=of_given(settings.config.data, path))


def evaluated(
    folder: Path, bench: GroupBench, *rows: GivenRow
) -> tuple[c.PromptsDone, list[EvaluatedSample]]:
    """What comes of rows: nothing but the engine is replaced, by a function of the question."""
    path = folder / "given.jsonl"
    write_given(path, iter(rows))
    config = config_of(bench, path)
    paths = RunPaths(folder / "run")
    paths.root.mkdir()
    node = Node(
        config=config, paths=paths, placement=placement_of(config), attempt=1, index=0, host="", device="cpu"
    )
    lines: list[str] = []
    events = EventLog(attempt=1, node=0, role="controller", sink=lines.append)
    files = RowFiles(config.data.val_files, config.data, folder / "rows")
    writer = BackgroundWriter()
    try:
        kept = KeptGroups(node, events, writer, data=files.fingerprint, files="")
        nobody = cast(Router, None)  # no policy: whoever asks one fails
        episodes = Episodes(node, bench.tokenizer, nobody, bench._call, evaluation_sampling(config))
        one = Evaluator(node, EvaluatedRows(files, kept), episodes, bench.scorer, bench.judge, events)

        async def act() -> c.PromptsDone:
            roles = tuple(sorted(set(node.placement.sampling.values())))
            done = await one.orders[c.EvaluatePrompts](c.EvaluatePrompts(roles=roles))
            await one.orders[c.WriteSamples](c.WriteSamples())
            assert isinstance(done, c.PromptsDone)
            return done

        done = asyncio.run(act())
    finally:
        writer.close(10.0)
        files.close()
    assert not paths.kept_groups.exists(), "nothing was sampled, so nothing is kept"
    written = paths.evaluated_samples(1, 0)
    written.rename(written.with_name("samples.jsonl"))
    return done, list(read_samples(written.parent, with_texts=True))


def test_pairs_are_judged_whole_by_the_numbers_of_their_rows(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, better, **PAIR)
    done, samples = evaluated(tmp_path, bench, given(7, "aaaa", "bb"), given(9, "a", "bbb"))
    assert (done.num_prompts, done.too_long) == (2, 0)
    assert [(s.prompt_number, s.sample_number, s.completion) for s in samples] == [
        (7, 0, "aaaa"), (7, 1, "bb"), (9, 0, "a"), (9, 1, "bbb"),
    ]  # fmt: skip
    assert [s.scores["judge"] for s in samples] == [1.0, 0.0, 0.0, 1.0]
    assert [(s.finish_reason, s.num_tokens > 0) for s in samples[:2]] == [("stop", True), ("length", True)]
    first, second = samples[0].judged
    assert (first.about, second.about) == ((0, 1), (1, 0)) and samples[1].judged == ()
    assert first.prompt == "1:aaaa; 2:bb; best:" and (first.answer, first.score) == ("1", 1.0)
    assert first.num_tokens > 0 and 0 < first.span_s[0] <= first.span_s[1]
    assert sorted(bench.prompts) == sorted(
        ["1:aaaa; 2:bb; best:", "1:bb; 2:aaaa; best:", "1:a; 2:bbb; best:", "1:bbb; 2:a; best:"]
    )


def test_the_seed_is_of_the_number_in_the_row(tmp_path: Path) -> None:
    """So a row under another number is asked with other seeds, and one that is asked again with its own."""
    seeds = []
    for place, number in enumerate((3, 3, 4)):
        (tmp_path / str(place)).mkdir()
        bench = bench_of(tmp_path / str(place), better, **PAIR)
        evaluated(tmp_path / str(place), bench, given(number, "aaaa", "bb"))
        seeds.append(sorted(bench.seeds))
    assert seeds[0] == seeds[1] and not set(seeds[0]) & set(seeds[2])


def test_single_completions_are_judged_alone_and_an_unreadable_one_costs_itself(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, lambda text: "?" if "bad" in text else "Y", **ALONE)
    _, samples = evaluated(tmp_path, bench, given(0, "good"), given(1, "bad"), given(2, "fine"))
    assert [s.scores for s in samples] == [{"judge": 1.0}, {}, {"judge": 1.0}]
    assert "no readable verdict" in samples[1].no_score["judge"]
    assert [(a.tries, a.is_readable) for a in samples[1].judged] == [(1, False), (2, False)]


def test_a_prompt_that_is_too_long_is_counted(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, lambda _: "Y", **ALONE)
    done, samples = evaluated(tmp_path, bench, given(0, "a"), given(1, "b", prompt="long " * 99))
    assert (done.num_prompts, done.too_long) == (1, 1) and len(samples) == 1


@pytest.mark.parametrize("mistake", [{"number": "x"}, {"number": 1, "texts": ["a"]}])
def test_a_row_of_another_form_is_no_group(tmp_path: Path, mistake: dict[str, Any]) -> None:
    import msgspec

    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(mistake, GivenTexts)
