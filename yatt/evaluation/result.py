"""The result of an evaluation: estimates per data source and over all, as one object and as a table."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from yatt.checkpoint.convert.hf_folder import whole_folder
from yatt.evaluation.request import EvalSettings
from yatt.evaluation.samples import EvaluatedSample, EvaluatedSamples
from yatt.printable import printable

OVERALL = "overall"
SAMPLES_NAME, RESULT_NAME = "samples.jsonl", "result.json"
WIDTH = 80
LEAST_NAME = 6
"""Characters of a name that are always shown."""

Scores = Sequence[Sequence[float]]
"""Scores of the samples of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its standard error; None: not enough data."""

    mean: float | None
    std_err: float | None
    prompts: int
    """Number of prompts that it is made from."""


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples passes.

    Args:
        n: number of samples, k or more.
        passed: those of them that pass.

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1: 1 - C(n - c, k) / C(n, k).
    """
    assert 1 <= k <= n and 0 <= passed <= n, "the caller has at least k samples"
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def mean_of(scores: Scores) -> Estimate:
    """Mean of all samples. The error counts the samples of one prompt as dependent.

    Source: clustered standard errors as in arXiv:2411.00640, section 2.2, times sqrt(P / (P - 1)) for P
    prompts, so that with one sample per prompt it is the usual error of a mean.
    """
    used = [each for each in scores if each]
    count, prompts = sum(map(len, used)), len(used)
    if not count:
        return Estimate(mean=None, std_err=None, prompts=0)
    mean = math.fsum(value for each in used for value in each) / count
    if prompts < 2:
        return Estimate(mean=mean, std_err=None, prompts=prompts)
    squares = math.fsum(math.fsum(value - mean for value in each) ** 2 for each in used)
    std_err = math.sqrt(squares * prompts / (prompts - 1)) / count
    return Estimate(mean=mean, std_err=std_err, prompts=prompts)


def pass_rate(scores: Scores, k: int, least: float) -> Estimate:
    """Mean of pass@k over the prompts with k or more scores.

    Args:
        least: a sample passes if its score is not below this.
    """
    rates = [
        [pass_at_k(len(each), sum(score >= least for score in each), k)] for each in scores if len(each) >= k
    ]
    return mean_of(rates)


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates of one score.

    Attributes:
        scored: number of samples with a score; `failed`: without one, because something failed.
        not_applicable: samples for which the function has no score.
        pass_at: by k, over the prompts with k or more scores.
    """

    mean: float | None
    std_err: float | None
    scored: int
    failed: int
    not_applicable: int
    pass_at: dict[str, Estimate]


class SourceResult(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates of one data source.

    Attributes:
        failed: samples without a completion.
        truncated: share of the completions that the length limit has cut.
        mean_tokens: mean length of a completion.
    """

    prompts: int
    samples: int
    failed: int
    truncated: float | None
    mean_tokens: float | None
    rewards: dict[str, RewardResult]


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an evaluation.

    Attributes:
        source: run folder or model folder.
        iteration: of the run whose policy it is; None: no run's.
        settings: how the samples were made.
        too_long: number of prompts that were not used.
    """

    source: str
    iteration: int | None
    data: tuple[str, ...]
    settings: dict[str, Any]
    too_long: int
    overall: SourceResult
    sources: dict[str, SourceResult]


def result_of(
    settings: EvalSettings, sampled: EvaluatedSamples, source: str, iteration: int | None = None
) -> EvalResult:
    """Returns the estimates; source and iteration as in `EvalResult`."""
    config = settings.config
    by_source: dict[str, list[EvaluatedSample]] = {}
    for sample in sampled.samples:
        by_source.setdefault(sample.data_source, []).append(sample)
    chosen = {
        "n": config.rollout.n, "temperature": settings.temperature, "top_p": config.rollout.top_p,
        "top_k": config.rollout.top_k, "max_response_tokens": config.rollout.max_response_tokens,
        "seed": config.run.seed, "pass_at": settings.pass_at, "deterministic": config.run.deterministic,
    }  # fmt: skip
    return EvalResult(
        source=source, iteration=iteration, data=config.data.val_files, settings=chosen,
        too_long=sampled.too_long, overall=_source(settings, sampled.samples),
        sources={name: _source(settings, by_source[name]) for name in sorted(by_source)},
    )  # fmt: skip


def _source(settings: EvalSettings, samples: Sequence[EvaluatedSample]) -> SourceResult:
    complete = [sample for sample in samples if not sample.failed]
    count = len(complete)
    return SourceResult(
        prompts=len({sample.prompt_number for sample in samples}), samples=len(samples),
        failed=len(samples) - count,
        truncated=sum(s.is_truncated for s in complete) / count if count else None,
        mean_tokens=sum(s.num_tokens for s in complete) / count if count else None,
        rewards={name: _reward(settings, samples, name) for name in settings.names},
    )  # fmt: skip


def _reward(settings: EvalSettings, samples: Sequence[EvaluatedSample], name: str) -> RewardResult:
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if name in sample.scores:
            groups.setdefault(sample.prompt_number, []).append(sample.scores[name])
    scores = list(groups.values())
    mean, scored = mean_of(scores), sum(map(len, scores))
    skipped = sum(sample.has_no_score_for(name) for sample in samples)
    return RewardResult(
        mean=mean.mean, std_err=mean.std_err, scored=scored, failed=len(samples) - scored - skipped,
        not_applicable=skipped,
        pass_at={str(k): pass_rate(scores, k, settings.pass_at) for k in settings.ks},
    )  # fmt: skip


def encoded_result(result: EvalResult) -> bytes:
    """Returns the result as one line of JSON."""
    return msgspec.json.encode(result)


def write_files(out: Path, result: EvalResult, samples: Sequence[EvaluatedSample]) -> None:
    """Writes samples and result into a new folder, which appears when it is whole.

    Raises:
        ConfigError: the folder exists and is not empty.
        OSError: a disk is full, or fails.
    """
    with whole_folder(out) as folder:
        lines = (msgspec.json.encode(sample) + b"\n" for sample in samples)
        _write(folder / SAMPLES_NAME, lines)
        _write(folder / RESULT_NAME, [msgspec.json.format(encoded_result(result), indent=1) + b"\n"])


def _write(path: Path, parts: "Sequence[bytes] | Any") -> None:
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


# ---- the table ----------------------------------------------------------------------------------


def result_table(result: EvalResult, width: int = WIDTH) -> list[str]:
    """Returns the lines of the table: one row per data source and reward, then lengths per data source."""
    sources = [*((printable(name), one) for name, one in result.sources.items()), (OVERALL, result.overall)]
    if len(result.sources) == 1:
        sources = sources[:1]
    ks = next(iter(result.overall.rewards.values())).pass_at
    head = ["SOURCE", "REWARD", "MEAN", "STD.ERR", "FAILED", *(f"PASS@{k}" for k in ks)]
    rows = [
        [source, name, _number(found.mean), _number(found.std_err), str(found.failed),
         *(_number(each.mean) for each in found.pass_at.values())]
        for source, one in sources
        for name, found in one.rewards.items()
    ]  # fmt: skip
    second_head = ["SOURCE", "PROMPTS", "SAMPLES", "FAILED", "TRUNCATED", "TOKENS"]
    second = [
        [source, str(one.prompts), str(one.samples), str(one.failed), _number(one.truncated),
         "-" if one.mean_tokens is None else f"{one.mean_tokens:.1f}"]
        for source, one in sources
    ]  # fmt: skip
    return [*_aligned([head, *rows], 2, width), "", *_aligned([second_head, *second], 1, width)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) >= 1000 else f"{value:.4f}"


def _aligned(rows: Sequence[Sequence[str]], names: int, width: int) -> list[str]:
    """Aligns columns; the first `names` are cut at the end so that a row fits."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths[:names]) > LEAST_NAME:
        widest = max(range(names), key=lambda column: widths[column])
        widths[widest] -= 1
    return [
        "  ".join(
            _cut(cell, size).ljust(size) if column < names else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}~"
