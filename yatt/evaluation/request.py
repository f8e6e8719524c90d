"""The options of an evaluation, and the config of its processes: a run's, without what only trains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from yatt.config.check import broken_relations
from yatt.config.load import load_over
from yatt.config.schema import (
    AlgorithmSection,
    DataSection,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    RewardSection,
    RolloutSection,
    RunConfig,
    RunSection,
    TrainerSection,
)
from yatt.errors import ConfigError
from yatt.launch.resolve.completed import completed_config

BUILTIN = "builtin:"
NOWHERE = "-"
"""Run folder of a config before its processes have one."""

WITHOUT_EFFECT = (
    "run.dir", "run.id", "run.from_checkpoint", "model.path", "data.train_files", "data.weights",
    "data.shuffle", "rollout.ahead", "rollout.oversample", "launch.nodes", "optimizer.",
    "trainer.", "placement.", "algorithm.", "critic.", "checkpoint.", "validation.", "sync.", "logging.",
    "profile.",
)  # fmt: skip
"""Beginnings of keys that an evaluation does not use."""

MOST_TEMPERATURE = 100.0
MOST_KS = 6
"""Most values of k; the table has a column for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The options of one evaluation. A value of None or an empty one is the run's.

    Attributes:
        n: samples per prompt.
        limit: prompts that are used, the first ones; 0: all.
        ks: values of k for pass@k; empty: 1 and n.
        pass_at: a sample passes if its score is not below this.
    """

    data: tuple[str, ...] = ()
    n: int | None = None
    temperature: float | None = None
    limit: int = 0
    seed: int | None = None
    ks: tuple[int, ...] = ()
    pass_at: float = 1.0
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class BareModel:
    """How a model folder without a run is sampled and scored. Empty values are the config's defaults.

    Attributes:
        rewards: each ``builtin:NAME`` or ``FILE.py[:FUNCTION]``.
    """

    rewards: tuple[str, ...] = ()
    prompt_key: str = ""
    ground_truth_key: str = ""
    max_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """A complete evaluation.

    Attributes:
        config: of its processes; `data.val_files` are the data, `rollout.n` the samples per prompt.
        temperature: sampling temperature; 0 is greedy.
    """

    config: RunConfig
    temperature: float
    limit: int
    ks: tuple[int, ...]
    pass_at: float
    names: tuple[str, ...]
    """The scores, in the order of the config."""


def bare_config(model: Path, bare: BareModel, data: tuple[str, ...]) -> RunConfig:
    """Returns the config of a model folder, before the words of the command line.

    Raises:
        ConfigError: there is no data or no reward function.
    """
    if not data:
        raise ConfigError(f"{model} is a model folder, not a run: write the data files after it.")
    section = DataSection(train_files=data)
    if bare.prompt_key:
        section = replace(section, prompt_key=bare.prompt_key)
    if bare.ground_truth_key:
        section = replace(section, ground_truth_key=bare.ground_truth_key)
    rollout = RolloutSection(n=1)
    if bare.max_tokens:
        rollout = replace(rollout, max_response_tokens=bare.max_tokens)
    rewards = tuple(map(_reward, bare.rewards))
    names = [reward.name for reward in rewards]
    if len(set(names)) < len(names):
        raise ConfigError("--reward: two functions have the same name; use --like with a run file.")
    return RunConfig(
        run=RunSection(dir=NOWHERE), data=section, model=ModelSection(path=str(model)), rollout=rollout,
        rewards=rewards, optimizer=OPTIMIZER, trainer=TRAINER,
    )  # fmt: skip


def _reward(text: str) -> RewardSection:
    """Returns the reward of ``builtin:NAME`` or ``FILE.py[:FUNCTION]``."""
    if text.startswith(BUILTIN):
        return RewardSection(name=text.removeprefix(BUILTIN), path=text)
    path, _, function = text.partition(".py:")
    if not function:
        return RewardSection(name=Path(text).stem, path=text)
    return RewardSection(name=function, path=f"{path}.py", function=function)


OPTIMIZER = OptimizerSection(lr=0.0)
TRAINER = TrainerSection(
    total_iterations=1, train_batch_size=1, mini_batch_size=1, max_tokens_per_micro_batch=1 << 30
)  # fmt: skip
"""Sections that a config must have, and that nothing here uses."""


def _of_prompts(base: RunConfig) -> RunConfig:
    """The config of a run that samples, for an evaluation of one that had its completions given.

    Raises:
        ConfigError: its model writes no completions.
    """
    if base.run.kind == "reward_model":
        raise ConfigError("run.kind: reward_model: such a model gives numbers and samples nothing.")
    return replace(base, run=replace(base.run, kind="rl"), data=replace(base.data, form="prompts"))


def evaluation_settings(
    base: RunConfig, options: EvalOptions, words: Sequence[str], model: Path, gpus: int
) -> EvalSettings:
    """Returns the complete evaluation.

    Args:
        base: config of a run, of a run file, or from `bare_config`.
        words: ``section.key=value`` each.
        model: Hugging Face folder to sample from.
        gpus: GPUs to use if `launch.gpus_per_node` is not among the words.

    Raises:
        ConfigError: a value is impossible; names it and what to write.
    """
    if unused := next((word for word in words if word.startswith(WITHOUT_EFFECT)), ""):
        key = unused.partition("=")[0]
        raise ConfigError(f"{key} has no effect in an evaluation; remove it.")
    base = replace(_of_prompts(base), model=replace(base.model, path=str(model)))
    config = _without_training(load_over(base, list(words), lambda _: ()), options)
    config = _sampled(config, options)
    if not any(word.startswith("launch.gpus_per_node=") for word in words):
        config = replace(config, launch=replace(config.launch, gpus_per_node=_whole_slabs(config, gpus)))
    _check(config, options)
    if faults := broken_relations(config):
        raise ConfigError("\n".join(f"{key}: {says}" for key, says in faults))
    temperature = _temperature(config, options)
    if temperature == 0 and config.rollout.n > 1 and options.n is not None:
        raise ConfigError("--n: at temperature 0 all samples of a prompt are the same; write --n 1.")
    names = (*(r.name for r in config.rewards), *(g.name for g in config.genrms))
    return EvalSettings(
        config=completed_config(config), temperature=temperature, limit=options.limit,
        ks=_ks(options.ks, config.rollout.n), pass_at=options.pass_at, names=names,
    )  # fmt: skip


def _without_training(config: RunConfig, options: EvalOptions) -> RunConfig:
    """Returns the sections that decide about samples and scores; everything else has its defaults."""
    launch = config.launch
    files = options.data or config.data.val_files or ()
    if not files:
        raise ConfigError("data.val_files is empty: write the data files after the run.")
    return RunConfig(
        run=RunSection(
            dir=NOWHERE, deterministic=config.run.deterministic,
            seed=config.run.seed if options.seed is None else options.seed,
        ),
        data=replace(
            config.data, train_files=files, val_files=files, weights={},
            media_store="" if options.data else config.data.media_store,  # other files get one of their own
        ),
        media=config.media,
        model=config.model, rollout=replace(config.rollout, ahead=0, oversample=1.0),
        rewards=config.rewards, genrms=config.genrms, environment=config.environment, lease=config.lease,
        algorithm=AlgorithmSection(adv_estimator="reinforce_plus_plus"),
        launch=LaunchSection(
            gpus_per_node=launch.gpus_per_node, threads_per_worker=launch.threads_per_worker,
            bind_workers=launch.bind_workers, reward_processes=launch.reward_processes,
            scratch_dir=launch.scratch_dir, shm_dir=launch.shm_dir, start_timeout_s=launch.start_timeout_s,
            phase_timeout_s=launch.phase_timeout_s, nurseries=launch.nurseries,
            device=launch.device if options.device == "auto" else options.device,
        ),
        optimizer=OPTIMIZER, trainer=TRAINER,
    )  # fmt: skip


def _sampled(config: RunConfig, options: EvalOptions) -> RunConfig:
    n = config.rollout.n if options.n is None else options.n
    if options.n is None and options.temperature == 0:
        n = 1
    try:
        return replace(config, rollout=replace(config.rollout, n=n))
    except ValueError as error:
        raise ConfigError(f"--n: {error}") from error


def _whole_slabs(config: RunConfig, gpus: int) -> int:
    """Returns the most GPUs that engines can use: a multiple of the largest `tp_size`.

    Raises:
        ConfigError: an engine needs more than there are.
    """
    largest = max(config.rollout.tp_size, *(g.tp_size for g in config.engine_genrms), 1)
    if gpus and largest > gpus:
        raise ConfigError(
            f"rollout.tp_size or genrms[].tp_size is {largest}, but this machine gives {gpus} GPUs; write "
            f"rollout.tp_size={gpus}, or evaluate on a larger one."
        )
    return gpus - gpus % largest if gpus else largest


def _temperature(config: RunConfig, options: EvalOptions) -> float:
    return config.rollout.temperature if options.temperature is None else options.temperature


def _check(config: RunConfig, options: EvalOptions) -> None:
    if not 0 <= _temperature(config, options) <= MOST_TEMPERATURE:
        raise ConfigError(f"--temperature: write a number from 0 to {MOST_TEMPERATURE:g}.")
    if not math.isfinite(options.pass_at):
        raise ConfigError("--pass-at: write a number.")
    if options.limit < 0:
        raise ConfigError("--limit: write 1 or more, or 0 for all prompts.")
    if config.rollout.n < 1:
        raise ConfigError(f"--n is {config.rollout.n}; write 1 or more.")
    if not config.rewards and not config.genrms:
        raise ConfigError(
            "there is nothing to score with: write --reward builtin:NAME or --reward FILE.py[:FUNCTION], or "
            "--like RUN_FILE to take rewards and GenRMs from a run file."
        )


def _ks(wanted: tuple[int, ...], n: int) -> tuple[int, ...]:
    found = tuple(sorted(set(wanted or (1, n))))
    if found[0] < 1 or found[-1] > n:
        raise ConfigError(f"--k: write numbers from 1 to {n}, the samples per prompt (--n).")
    if len(found) > MOST_KS:
        raise ConfigError(f"--k: write at most {MOST_KS} numbers.")
    return found
