"""Evaluations of a GenRM: it is asked about given completions exactly as in a run, and no policy samples.

It is an ordinary evaluation (adr/0096, adr/0104) whose rows have whole prompt groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from yatt.config.schema import AlgorithmSection, EnvironmentSection, GenRMSection, RolloutSection, RunConfig
from yatt.config.sections.scoring import OF_ENGINES
from yatt.core.figures.evaluation import EvaluatedSample
from yatt.errors import ConfigError
from yatt.evaluation.evaluate import Reporter, evaluate_here
from yatt.evaluation.labels import GivenRow, of_given, write_given
from yatt.evaluation.request import EvalOptions, EvalSettings, evaluation_settings
from yatt.evaluation.result import read_samples
from yatt.launch.checks.preflight import check_evaluation

Device = Literal["auto", "cpu", "cuda"]
GIVEN_FILE = "given.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """The options of an evaluation of a GenRM.

    Attributes:
        data: the data files; empty: the config's.
        seed: None: the run's.
        size: completions of a prompt at most.
        media_store: where the data files' pictures are already; empty: none are.
    """

    data: tuple[str, ...] = ()
    seed: int | None = None
    device: Device = "auto"
    size: int = 2
    media_store: str = ""


def named_judge(config: RunConfig, name: str) -> GenRMSection:
    """Returns a GenRM of a run file, as it is asked without a policy's engines: one that is the policy has
    an engine of its own, with the weights of `model.path`.

    Raises:
        ConfigError: there is none of that name, or it judges nothing.
    """
    found = next((genrm for genrm in config.genrms if genrm.name == name), None)
    if found is None:
        known = ", ".join(genrm.name for genrm in config.genrms) or "none"
        is_function = any(reward.name == name for reward in config.rewards)
        what = "is a function, not a GenRM" if is_function else "is no GenRM of the run file"
        raise ConfigError(f"'{name}' {what}; genrms are: {known}.")
    if found.kind == "teacher":
        raise ConfigError(
            f"genrms[{name}] is a teacher, which judges nothing: it gives log-probs of the policy's tokens. "
            "Name another GenRM."
        )
    if found.sees == "all":
        raise ConfigError(
            f"genrms[{name}].sees: all shows an environment's pictures, which rows do not have; write "
            "sees: prompt, or none."
        )
    return with_own_engine(config, found) if found.is_policy else found


def with_own_engine(config: RunConfig, genrm: GenRMSection) -> GenRMSection:
    """Returns a GenRM that is the policy, with an engine like the policy's."""
    rollout = config.rollout
    return replace(
        genrm,
        model=config.model.path,
        dtype=config.model.dtype,
        **{name: getattr(rollout, name) for name in OF_ENGINES if name != "dtype"},
    )


def asked_alone(genrm: GenRMSection) -> GenRMSection:
    """Returns the GenRM as it is asked about labelled completions: both orders of each pair, raw numbers of a
    head, and no score where there is no verdict."""
    judging = genrm.judging
    if judging.by == "pairwise":
        judging = replace(judging, pairs="all", matchings=3)
    if judging.by in ("pairwise", "listwise"):
        judging = replace(judging, orders="both")
    transform = "none" if genrm.transform == "standardize" else genrm.transform
    if genrm.kind == "text":
        genrm = replace(genrm, on_unparsable="drop_group")
    return replace(genrm, judging=judging, transform=transform)


def judge_settings(base: RunConfig, genrm: GenRMSection, options: JudgeOptions, gpus: int) -> EvalSettings:
    """Returns the evaluation of one GenRM, before its rows are written.

    Args:
        base: the run file's.
        gpus: of this machine; 0: as its engine needs.

    Raises:
        ConfigError: a value is impossible; names it and what to write.
    """
    rules = {criterion.rule for criterion in genrm.judging.criteria if criterion.rule}
    rollout = RolloutSection(
        n=options.size,
        max_response_tokens=base.rollout.max_response_tokens,
        engine=genrm.engine if genrm.has_engine else "scripted",  # whose library must be there
    )
    lone = replace(
        base,
        run=replace(base.run, kind="rl"),
        data=replace(base.data, map="", form="prompts"),
        model=replace(base.model, trainer="megatron"),
        rollout=rollout,
        genrms=(replace(genrm, weight=1.0, share=1.0),),
        rewards=tuple(reward for reward in base.rewards if reward.name in rules),
        environment=EnvironmentSection(),
        algorithm=AlgorithmSection(adv_estimator="reinforce_plus_plus"),
    )
    wanted = EvalOptions(data=options.data, n=options.size, seed=options.seed, device=options.device)
    found = evaluation_settings(lone, wanted, (), Path(base.model.path), gpus)
    if not options.media_store:
        return found
    data = replace(found.config.data, media_store=options.media_store)
    return replace(found, config=replace(found.config, data=data))


def judged_samples(
    settings: EvalSettings,
    rows: Iterator[GivenRow],
    folder: Path,
    device: str,
    reporter: Reporter,
    index: int = 0,
) -> list[EvaluatedSample]:
    """Has the GenRM judge completions; returns them in the order of the rows, with their texts.

    Args:
        index: of the GenRM in the run file.
        folder: a private one.
        device: cpu or cuda.

    Raises:
        ConfigError: an input cannot be used.
        OSError: the disk is full, or fails.
        KeyboardInterrupt, SystemExit, WorkerFailed: see `evaluate_here`.
    """
    write_given(folder / GIVEN_FILE, rows)
    config = settings.config
    config = replace(
        config,
        run=replace(config.run, dir=str(folder / "run")),
        data=of_given(config.data, folder / GIVEN_FILE),
        launch=replace(config.launch, device="cuda" if device == "cuda" else "cpu"),
    )
    try:
        check_evaluation(config, has_weights=False)
    except ConfigError as error:  # it is the only one here, and may be another one in the run file
        raise error.with_each(
            lambda found: replace(found, key=_own_key(found.key, index))
        ) from error.__cause__
    out = folder / "result"
    evaluate_here(config, replace(settings, config=config).request(str(folder), None, out), device, reporter)
    return list(read_samples(out, with_texts=True))


def _own_key(key: str, index: int) -> str:
    return key.replace("genrms[0]", f"genrms[{index}]", 1)
