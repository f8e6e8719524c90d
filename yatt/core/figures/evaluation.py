"""Evaluations: what is asked for, the samples, and estimates per data source and over all. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

NOT_APPLICABLE = "the function has no score for it"
TRUNCATED = "length"
"""Finish reason of a completion that was cut by the length limit."""


SAMPLES_NAME, RESULT_NAME = "samples.jsonl", "result.json"
"""Files of a result."""


class EvalRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the result of an evaluation is to be; in its run folder.

    Attributes:
        source: run folder or model folder.
        iteration: of the run whose policy it is; None: no run's.
        data: the data files, as they were named.
        settings: how the samples are made, as the result has it.
        names: the scores, in the order of the config.
        ks: values of k for pass@k.
        pass_at: a sample passes if its score is not below this.
        out: new folder for samples and result.
    """

    source: str
    iteration: int | None
    data: tuple[str, ...]
    settings: dict[str, Any]
    names: tuple[str, ...]
    ks: tuple[int, ...]
    pass_at: float
    out: str


GIVEN = "yatt_given"
"""Column of the completions of a data row that are judged without being sampled (`GivenTexts`)."""


class GivenTexts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Completions of a prompt that are judged.

    Attributes:
        number: of the prompt, from which questions have their seeds.
        finish_reasons: of each one; `length`: it was cut.
    """

    number: int
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]


class JudgedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a GenRM about samples of a prompt.

    Attributes:
        about: numbers of the samples, in the order in which they were shown.
        prompt: what the GenRM was asked.
        tries: number of this answer among those to one question, over its votes and retries.
        score: None: there is a ranking or there are values instead, or it is unreadable.
        num_tokens: that it has written; 0 if a service does not tell.
        span_s: when it was asked and had answered, in monotonic seconds.
        thought: before the answer; `is_thought_cut`: at `think.budget`.
    """

    about: tuple[int, ...]
    prompt: str
    answer: str
    finish_reason: str
    tries: int
    score: float | None
    ranking: tuple[int, ...]
    measures: dict[str, float]
    num_tokens: int
    span_s: tuple[float, float]
    thought: str = ""
    is_thought_cut: bool = False

    @property
    def is_readable(self) -> bool:
        """Whether a verdict was read in it."""
        return self.score is not None or bool(self.ranking or self.measures)


class EvaluatedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample and its scores, as written to ``samples.jsonl``.

    Attributes:
        failed: the reason, if there is no completion.
        no_score: reasons of missing scores, by name.
        extras: other numbers of the functions, by 'name/key'.
        verdicts: the GenRMs' last answers (their ends).
        judged: every answer about the prompt's samples, at its first sample, if completions were given.
    """

    prompt_number: int
    sample_number: int
    data_source: str
    prompt: str
    ground_truth: str
    completion: str
    finish_reason: str
    num_tokens: int
    scores: dict[str, float]
    no_score: dict[str, str]
    extras: dict[str, float]
    verdicts: dict[str, str]
    failed: str = ""
    judged: tuple[JudgedAnswer, ...] = ()

    @property
    def is_truncated(self) -> bool:
        """Whether the length limit has cut it."""
        return self.finish_reason == TRUNCATED

    def has_no_score_for(self, name: str) -> bool:
        """Whether the function has said that it has no score for it."""
        return self.no_score.get(name) == NOT_APPLICABLE

    def has_failed_score(self, name: str) -> bool:
        """Whether a function or GenRM should have given a score, and has failed."""
        return name in self.no_score and not self.has_no_score_for(name)

    def without_texts(self) -> "EvaluatedSample":
        """Returns what a result is made of: of many samples the texts would fill the memory."""
        return msgspec.structs.replace(
            self, prompt="", ground_truth="", completion="", extras={}, verdicts={}, judged=()
        )


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


def result_of(request: EvalRequest, samples: Sequence[EvaluatedSample], too_long: int) -> EvalResult:
    """Returns the estimates.

    Args:
        too_long: number of prompts that were not used.
    """
    by_source: dict[str, list[EvaluatedSample]] = {}
    for sample in samples:
        by_source.setdefault(sample.data_source, []).append(sample)
    return EvalResult(
        source=request.source,
        iteration=request.iteration,
        data=request.data,
        settings=request.settings,
        too_long=too_long,
        overall=_source(request, samples),
        sources={name: _source(request, by_source[name]) for name in sorted(by_source)},
    )


def _source(request: EvalRequest, samples: Sequence[EvaluatedSample]) -> SourceResult:
    complete = [sample for sample in samples if not sample.failed]
    count = len(complete)
    return SourceResult(
        prompts=len({sample.prompt_number for sample in samples}),
        samples=len(samples),
        failed=len(samples) - count,
        truncated=sum(s.is_truncated for s in complete) / count if count else None,
        mean_tokens=sum(s.num_tokens for s in complete) / count if count else None,
        rewards={name: _reward(request, samples, name) for name in request.names},
    )


def _reward(request: EvalRequest, samples: Sequence[EvaluatedSample], name: str) -> RewardResult:
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if name in sample.scores:
            groups.setdefault(sample.prompt_number, []).append(sample.scores[name])
    scores = list(groups.values())
    mean, scored = mean_of(scores), sum(map(len, scores))
    skipped = sum(sample.has_no_score_for(name) for sample in samples)
    return RewardResult(
        mean=mean.mean,
        std_err=mean.std_err,
        scored=scored,
        failed=len(samples) - scored - skipped,
        not_applicable=skipped,
        pass_at={str(k): pass_rate(scores, k, request.pass_at) for k in request.ks},
    )


def encoded_result(result: EvalResult) -> bytes:
    """Returns the result as one line of JSON."""
    return msgspec.json.encode(result)
