"""A GenRM's second opinion on the completions that a run has recorded."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from yatt.adapters.files.lines import Record
from yatt.adapters.inputs.dataset import Row, RowFiles, prompt_text, truth_text
from yatt.config.schema import RunConfig
from yatt.config.sections.algorithm import GAE, Estimator
from yatt.core.figures.evaluation import NOT_APPLICABLE, EvaluatedSample, GivenTexts
from yatt.core.samples.rewards import EQUAL_REWARDS, Shaping, shaped_reward
from yatt.errors import ConfigError, WorkerFailed
from yatt.evaluation.labels import GivenRow
from yatt.judging.again import AskedAgain, again_figures
from yatt.judging.bootstrap import Figure
from yatt.obs.rollouts import iterations_of, read_iteration, whole_samples
from yatt.obs.samples import COMPLETION, spoken_turns
from yatt.paths import RunPaths
from yatt.printable import printable

CHILD = "yatt.evaluation.given_advantages"
LIMIT_S = 600.0
MOST_CHANGES = 10
COUNTS = ("index", "row", "sample", "num_tokens", "num_response_tokens")
"""Fields of a recorded sample that are whole numbers."""

AGAIN_MEANINGS = {
    "changed": "scores that differ",
    "kendall": "rank correlation within groups, of those whose scores differ",
    "advantages": "correlation of advantages then and now",
    "signs": "advantages whose sign changes",
    "flat_before": "groups with equal rewards, then",
    "flat_now": "groups with equal rewards, now",
    "dropped_before": "groups without rewards, then",
    "dropped_now": "groups without rewards, now",
}
"""Figures in the order in which they are shown."""


class AdvantageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one iteration: reward, prompt group and completion tokens of each."""

    rewards: list[float]
    groups: list[int]
    lengths: list[int]


class AdvantageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Batches whose advantages are wanted."""

    estimator: Estimator
    gamma: float
    batches: list[AdvantageBatch]


class ChangedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, and what was said about it then and now."""

    iteration: int
    sample: int
    prompt: str
    completion: str
    scores: tuple[float | None, float | None]
    advantages: tuple[float | None, float | None]
    answers: tuple[str, str]


class AgainResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a second opinion differs.

    Attributes:
        judge: the GenRM of the run; `by`: the one that was asked now.
        groups, samples: that were asked about; `left_out`: samples of other groups.
        changes: the largest ones, the largest first.
        no_advantages: why advantages are missing, if computing them failed.
    """

    run: str
    judge: str
    by: str
    settings: dict[str, Any]
    iterations: tuple[int, int]
    groups: int
    samples: int
    left_out: int
    figures: dict[str, Figure]
    changes: list[ChangedSample]
    no_advantages: str = ""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A prompt group that is recorded whole: its samples in their order."""

    iteration: int
    number: int
    samples: tuple[Record, ...]

    @property
    def row(self) -> int:
        """Number of its data row."""
        return int(self.samples[0]["row"])


@dataclass(frozen=True, slots=True)
class RecordedGroups:
    """The prompt groups of some iterations. `left_out`: samples of others, as of groups that lack some."""

    groups: tuple[RecordedGroup, ...]
    left_out: int

    def judged_by(self, name: str) -> "RecordedGroups":
        """Returns those that a GenRM has judged: one with `share` looks at some only."""
        others = [one for one in self.groups if all(_is_passed_over(each, name) for each in one.samples)]
        judged = tuple(one for one in self.groups if one not in others)
        return RecordedGroups(judged, self.left_out + sum(len(one.samples) for one in others))


def recorded_groups(paths: RunPaths, first: int, last: int) -> RecordedGroups:
    """Reads the groups that a run has recorded.

    Args:
        first: of the iterations; `last` is the last one, 0 the newest.

    Raises:
        ConfigError: nothing is recorded of them.
    """
    wanted, groups, left_out = _wanted(paths, first, last), list[RecordedGroup](), 0
    for iteration in wanted:
        whole, others = _of_iteration(paths, iteration)
        groups, left_out = groups + whole, left_out + others
    if not groups:
        raise ConfigError(
            f"{paths.root}: no prompt group of iterations {wanted[0]} to {wanted[-1]} is whole."
        )
    return RecordedGroups(tuple(groups), left_out)


def _wanted(paths: RunPaths, first: int, last: int) -> list[int]:
    known = list(iterations_of(paths.rollouts))
    if not known:
        raise ConfigError(
            f"{paths.root}: no rollouts are recorded, so there is nothing to ask about. Write "
            "logging.rollouts: all (`yatt resume RUN logging.rollouts=all`): later iterations are recorded "
            "whole."
        )
    wanted = [each for each in known if first <= each and (not last or each <= last)]
    if not wanted:
        raise ConfigError(
            f"--iterations {first}..{last or ''}: nothing is recorded of these; {len(known)} iterations from "
            f"{known[0]} to {known[-1]} are: write --iterations {known[0]}..{known[-1]}."
        )
    return wanted


def _of_iteration(paths: RunPaths, iteration: int) -> tuple[list[RecordedGroup], int]:
    """Returns the whole groups of an iteration, and the number of the other samples and unreadable lines."""
    found: dict[int, list[Record]] = {}
    left_out = _unreadable(paths, iteration)
    for sample in whole_samples(paths, iteration):
        if type(sample.get("group")) is int:
            found.setdefault(sample["group"], []).append(sample)
        else:
            left_out += 1
    groups, size = list[RecordedGroup](), max(map(len, found.values()), default=0)
    for number, samples in sorted(found.items()):
        is_sound = all(map(_is_sound, samples))
        ordered = sorted(samples, key=lambda each: int(each["index"])) if is_sound else []
        if ordered and [each["index"] for each in ordered] == list(range(size)):
            groups.append(RecordedGroup(iteration, number, tuple(ordered)))
        else:
            left_out += len(samples)
    return groups, left_out


def _unreadable(paths: RunPaths, iteration: int) -> int:
    """Lines that cannot be read, or are no samples."""
    found = read_iteration(paths, iteration, -1)
    return found.num_unreadable if found is not None else 0


def _is_sound(sample: Record) -> bool:
    """Whether a recorded sample has all that is asked about and compared: a file may be damaged."""
    counts = [sample.get(key) for key in COUNTS]
    texts = [sample.get(key) for key in ("prompt", "completion", "finish_reason")]
    return (
        all(type(each) is int and each >= 0 for each in counts)
        and all(isinstance(each, str) for each in texts)
        and bool(texts[-1])
        and isinstance(sample.get("unmeasured") or {}, dict)
    )


def _is_passed_over(sample: Record, name: str) -> bool:
    return (sample.get("unmeasured") or {}).get(name) == NOT_APPLICABLE


def given_again(recorded: RecordedGroups, rows: RowFiles, files: Sequence[str]) -> Iterator[GivenRow]:
    """Yields the recorded groups with their data rows, under their own numbers, so with the same seeds.

    Args:
        files: names of the data files, for messages.

    Raises:
        ConfigError: the data files are not those of the run.
    """
    for group in recorded.groups:
        row = rows.row(group.row) if group.row < len(rows) else None
        if row is None or not _is_same(row, group.samples[0]):
            raise ConfigError(
                f"row {group.row + 1} of {', '.join(files)} is not the one that iteration "
                f"{group.iteration} has sampled: the data files have changed. Name those of the run: "
                "data.train_files=[...].",
                key="data.train_files",
            )
        given = GivenTexts(
            number=group.number,
            texts=tuple(_said(sample) for sample in group.samples),
            finish_reasons=tuple(str(sample["finish_reason"]) for sample in group.samples),
        )
        yield GivenRow(raw=row.raw, prompt=row.prompt, given=given)


def _is_same(row: Row, sample: Record) -> bool:
    truth = sample.get("ground_truth")
    return prompt_text(row.prompt) == sample["prompt"] and truth_text(truth) == truth_text(row.ground_truth)


def _said(sample: Record) -> str:
    """What the policy has said, as the GenRM was shown it."""
    return "\n\n".join(text for role, text in spoken_turns(sample) if role in (COMPLETION, "policy"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """A GenRM and the config that it judges by."""

    name: str
    config: RunConfig

    def reward(self, sample: Record, scores: Mapping[str, float]) -> float | None:
        """The reward of a recorded sample by these scores; None: one is missing that has a weight."""
        config, unmeasured = self.config, sample.get("unmeasured") or {}
        weights = {reward.name: reward.weight for reward in config.rewards if reward.weight}
        weights |= {g.name: g.weight for g in config.genrms if g.weight and g.kind != "teacher"}
        missing = weights.keys() - scores.keys() - unmeasured.keys()
        if missing:
            return None
        section = config.algorithm
        shaping = Shaping(
            max_tokens=config.rollout.max_response_tokens,
            buffer_tokens=section.overlong_buffer_tokens,
            factor=section.overlong_penalty_factor,
            masks_truncated=section.mask_truncated,
        )
        total = sum(weight * scores[name] for name, weight in weights.items() if name in scores)
        return shaped_reward(total, int(sample["num_response_tokens"]), shaping)


def again_result(
    recorded: RecordedGroups,
    samples: Sequence[EvaluatedSample],
    then: Opinion,
    now: Opinion,
    run: Path,
    settings: Mapping[str, Any],
) -> AgainResult:
    """Returns how the second opinion differs. Advantages that cannot be computed cost nothing but themselves:
    all questions were asked.

    Args:
        samples: as they were judged now.
    """
    judged = {(each.prompt_number, each.sample_number): each for each in samples}
    told = [(group, each) for group in recorded.groups for each in group.samples]
    found = [judged.get((group.number, int(each["index"]))) for group, each in told]
    items = [
        _item(group.number, each, (then, now), None if one is None else one.scores.get(now.name))
        for (group, each), one in zip(told, found, strict=True)
    ]
    batches = [(group.iteration, int(each["num_tokens"])) for group, each in told]
    why = ""
    try:
        items = with_advantages(items, batches, then.config)
    except WorkerFailed as error:
        why = str(error)
    figures = again_figures(items, EQUAL_REWARDS)
    changed = sorted(zip(items, told, found, strict=True), key=lambda one: -abs(one[0].change))
    return AgainResult(
        run=printable(str(run)),
        judge=then.name,
        by=now.name,
        settings=dict(settings),
        iterations=(recorded.groups[0].iteration, recorded.groups[-1].iteration),
        groups=len(recorded.groups),
        samples=len(items),
        left_out=recorded.left_out,
        figures={name: figures[name] for name in AGAIN_MEANINGS if name in figures},
        changes=[
            ChangedSample(
                iteration=group.iteration,
                sample=int(each["sample"]),
                prompt=str(each["prompt"]),
                completion=_said(each),
                scores=item.scores,
                advantages=item.advantages,
                answers=(_answer(each, then.name), one.verdicts.get(now.name, "") if one else ""),
            )
            for item, (group, each), one in changed[:MOST_CHANGES]
            if item.change
        ],
        no_advantages=why,
    )


def _item(number: int, sample: Record, opinions: tuple[Opinion, Opinion], score: float | None) -> AskedAgain:
    then, now = opinions
    before: dict[str, float] = {k: v for k, v in (sample.get("scores") or {}).items() if v is not None}
    others = {name: value for name, value in before.items() if name != then.name}
    after = others if score is None else {**others, now.name: score}
    return AskedAgain(
        group=number,
        scores=(before.get(then.name), score),
        rewards=(then.reward(sample, before), now.reward(sample, after)),
    )


def _answer(sample: Record, name: str) -> str:
    return str((sample.get("verdicts") or {}).get(name, ""))


def with_advantages(
    items: Sequence[AskedAgain], batches: Sequence[tuple[int, int]], config: RunConfig
) -> list[AskedAgain]:
    """Adds the advantages by the run's estimator, of groups that have all rewards then and now. Those of a
    critic, and of an algorithm of the user's, are not known from rewards.

    Args:
        batches: of each item: its iteration, and its completion tokens.

    Raises:
        WorkerFailed: they could not be computed.
    """
    section, whole = config.algorithm, {each.group for each in items}
    whole -= {each.group for each in items if None in each.rewards}
    if section.path or section.adv_estimator == GAE or not whole:
        return list(items)
    places: dict[int, list[int]] = {}
    for place, (iteration, _) in enumerate(batches):
        if items[place].group in whole:
            places.setdefault(iteration, []).append(place)
    ordered = [place for each in places.values() for place in each]
    order = AdvantageOrder(
        estimator=section.adv_estimator,
        gamma=section.gamma,
        batches=[
            _batch([items[i] for i in each], [batches[i][1] for i in each], when)
            for when in (0, 1)
            for each in places.values()
        ],
    )
    found = computed_advantages(order)
    pairs = zip(found[: len(ordered)], found[len(ordered) :], strict=True)
    both = dict(zip(ordered, pairs, strict=True))
    return [replace(each, advantages=both.get(place, (None, None))) for place, each in enumerate(items)]


def _batch(items: Sequence[AskedAgain], lengths: list[int], when: int) -> AdvantageBatch:
    rewards = [reward for each in items if (reward := each.rewards[when]) is not None]
    return AdvantageBatch(rewards=rewards, groups=[each.group for each in items], lengths=lengths)


def computed_advantages(order: AdvantageOrder, limit_s: float = LIMIT_S) -> list[float]:
    """Has a process with torch compute them.

    Raises:
        WorkerFailed: it has failed, or not ended in time.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", CHILD],
            input=msgspec.json.encode(order),
            capture_output=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerFailed(f"advantages could not be computed within {limit_s:g} s") from error
    if done.returncode:
        raise WorkerFailed(f"advantages could not be computed: {done.stderr.decode(errors='replace')[-800:]}")
    return msgspec.json.decode(done.stdout, type=list[float])
