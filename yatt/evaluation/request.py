"""The options of an evaluation, and its config: a run's, without what only trains."""

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
    PlacementSection,
    RewardSection,
    RolloutSection,
    RunConfig,
    RunSection,
    TrainerSection,
    ValidationSection,
)
from yatt.config.sections.ranges import MOST
from yatt.config.sizes import engine_sizes, slab_gpus
from yatt.core.figures.evaluation import EvalRequest
from yatt.errors import ConfigError
from yatt.launch.resolve.completed import completed_config

BUILTIN = "builtin:"
NOWHERE = "-"
"""Run folder of a config before its processes have one."""

WITHOUT_EFFECT = (
    "run.",
    "model.path",
    "data.train_files",
    "data.weights",
    "data.shuffle",
    "rollout.ahead",
    "rollout.oversample",
    "launch.nodes",
    "launch.engine_gpus_per_node",
    "optimizer.",
    "trainer.",
    "placement.split",
    "placement.min_gpu_sets",
    "placement.max_gpu_sets",
    "placement.send_",
    "algorithm.",
    "critic.",
    "preference.",
    "vision.",
    "checkpoint.",
    "validation.",
    "sync.",
    "logging.",
    "profile.",
)
"""Beginnings of keys that an evaluation does not use."""

WITH_EFFECT = ("run.deterministic", "run.seed")

MOST_TEMPERATURE = 100.0
MOST_KS = 6
"""Most values of k; the table has a column for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The options of one evaluation. A value of None or an empty one is the run's.

    Attributes:
        n: samples per prompt.
        limit: prompts that are used, the first ones; 0: all.
        nodes: number of nodes; 0: as few as one engine needs.
        may_span: an engine may use the GPUs of several nodes.
        ks: values of k for pass@k; empty: 1 and n.
        pass_at: a sample passes if its score is not below this.
    """

    data: tuple[str, ...] = ()
    n: int | None = None
    temperature: float | None = None
    limit: int = 0
    nodes: int = 0
    may_span: bool = False
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

    def request(self, source: str, iteration: int | None, out: Path) -> EvalRequest:
        """Returns what the result is to be; arguments as in `EvalRequest`."""
        config = self.config
        chosen = {
            "n": config.rollout.n,
            "temperature": self.temperature,
            "top_p": config.rollout.top_p,
            "top_k": config.rollout.top_k,
            "max_response_tokens": config.rollout.max_response_tokens,
            "seed": config.run.seed,
            "pass_at": self.pass_at,
            "deterministic": config.run.deterministic,
        }
        return EvalRequest(
            source=source,
            iteration=iteration,
            data=config.data.val_files,
            settings=chosen,
            names=self.names,
            ks=self.ks,
            pass_at=self.pass_at,
            out=str(out),
        )


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
        run=RunSection(dir=NOWHERE),
        data=section,
        model=ModelSection(path=str(model)),
        rollout=rollout,
        rewards=rewards,
        optimizer=OPTIMIZER,
        trainer=TRAINER,
    )


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
)
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
        gpus: GPUs of a node, if `launch.gpus_per_node` is not among the words; 0: as the engines need.

    Raises:
        ConfigError: a value is impossible; names it and what to write.
    """
    keys = [word.partition("=")[0] for word in words]
    if key := next((k for k in keys if k.startswith(WITHOUT_EFFECT) and k not in WITH_EFFECT), ""):
        raise ConfigError(f"{key} has no effect in an evaluation; remove it.")
    base = replace(_of_prompts(base), model=replace(base.model, path=str(model)))
    base = replace(base, placement=PlacementSection())  # a run's is about training
    config = _without_training(load_over(base, list(words), lambda _: ()), options)
    config = _sampled(config, options)
    if not any(word.startswith("launch.gpus_per_node=") for word in words):
        gpus = _whole_slabs(config, gpus, may_span=options.may_span)
        config = replace(config, launch=replace(config.launch, gpus_per_node=gpus))
    _check(config, options)
    config = replace(config, launch=replace(config.launch, nodes=options.nodes or _least_nodes(config)))
    if faults := broken_relations(config):
        raise ConfigError(findings=faults)
    temperature = _temperature(config, options)
    if temperature == 0 and config.rollout.n > 1 and options.n is not None:
        raise ConfigError("--n: at temperature 0 all samples of a prompt are the same; write --n 1.")
    names = (*(r.name for r in config.rewards), *(g.name for g in config.genrms))
    return EvalSettings(
        config=completed_config(config),
        temperature=temperature,
        limit=options.limit,
        ks=_ks(options.ks, config.rollout.n),
        pass_at=options.pass_at,
        names=names,
    )


def _without_training(config: RunConfig, options: EvalOptions) -> RunConfig:
    """Returns the sections that decide about samples and scores; everything else has its defaults."""
    launch = config.launch
    files = options.data or config.data.val_files or ()
    if not files:
        raise ConfigError("data.val_files is empty: write the data files after the run.")
    return RunConfig(
        run=RunSection(
            dir=NOWHERE,
            kind="evaluation",
            deterministic=config.run.deterministic,
            seed=config.run.seed if options.seed is None else options.seed,
        ),
        data=replace(
            config.data,
            train_files=files,
            val_files=files,
            weights={},
            media_store="" if options.data else config.data.media_store,  # other files get one of their own
        ),
        media=config.media,
        model=config.model,
        rollout=replace(config.rollout, ahead=0, oversample=1.0),
        rewards=config.rewards,
        genrms=config.genrms,
        environment=config.environment,
        lease=config.lease,
        placement=PlacementSection(
            mode=config.placement.mode,
            genrm_gpu_sets=config.placement.genrm_gpu_sets,
            trainer_nodes=config.placement.trainer_nodes,
        ),
        validation=ValidationSection(
            temperature=_temperature(config, options), max_prompts=options.limit or MOST
        ),
        algorithm=AlgorithmSection(adv_estimator="reinforce_plus_plus"),
        launch=LaunchSection(
            gpus_per_node=launch.gpus_per_node,
            threads_per_worker=launch.threads_per_worker,
            bind_workers=launch.bind_workers,
            reward_processes=launch.reward_processes,
            scratch_dir=launch.scratch_dir,
            shm_dir=launch.shm_dir,
            start_timeout_s=launch.start_timeout_s,
            phase_timeout_s=launch.phase_timeout_s,
            node_silence_s=launch.node_silence_s,
            nurseries=launch.nurseries,
            device=launch.device if options.device == "auto" else options.device,
        ),
        optimizer=OPTIMIZER,
        trainer=TRAINER,
    )


def _sampled(config: RunConfig, options: EvalOptions) -> RunConfig:
    n = config.rollout.n if options.n is None else options.n
    if options.n is None and options.temperature == 0:
        n = 1
    try:
        return replace(config, rollout=replace(config.rollout, n=n))
    except ValueError as error:
        raise ConfigError(f"--n: {error}") from error


def _whole_slabs(config: RunConfig, gpus: int, *, may_span: bool) -> int:
    """Returns the most GPUs that engines can use: a multiple of the largest `tp_size`.

    Raises:
        ConfigError: an engine needs more than there are.
    """
    largest = max(config.rollout.tp_size, *(g.tp_size for g in config.engine_genrms), 1)
    if gpus and may_span and largest % gpus == 0:
        return gpus
    if gpus and largest > gpus:
        raise ConfigError(
            f"rollout.tp_size or genrms[].tp_size is {largest}, but this machine gives {gpus} GPUs; write "
            f"rollout.tp_size={gpus}, or evaluate on a larger one, or on several (--submit)."
        )
    return gpus - gpus % largest if gpus else largest


def _least_nodes(config: RunConfig) -> int:
    """Returns the number of nodes that the largest engine needs, and of those that have prompts only."""
    widest = max(size for _, size in engine_sizes(config))
    return -(-widest // slab_gpus(config)) + config.placement.trainer_nodes


def _temperature(config: RunConfig, options: EvalOptions) -> float:
    return config.rollout.temperature if options.temperature is None else options.temperature


def _check(config: RunConfig, options: EvalOptions) -> None:
    if not 0 <= _temperature(config, options) <= MOST_TEMPERATURE:
        raise ConfigError(f"--temperature: write a number from 0 to {MOST_TEMPERATURE:g}.")
    if not math.isfinite(options.pass_at):
        raise ConfigError("--pass-at: write a number.")
    if options.nodes < 0:
        raise ConfigError("--nodes: write 1 or more.")
    if options.limit < 0:
        raise ConfigError("--limit: write 1 or more, or 0 for all prompts.")
    if config.rollout.n < 1:
        raise ConfigError(f"--n is {config.rollout.n}; write 1 or more.")
    if not config.rewards and not config.genrms:
        bare = "--reward builtin:NAME or FILE.py[:FUNCTION], or " if config.run.dir == NOWHERE else ""
        raise ConfigError(
            f"there is nothing to score with: write {bare}--like RUN_FILE to take rewards and GenRMs from a "
            "run file."
        )


def _ks(wanted: tuple[int, ...], n: int) -> tuple[int, ...]:
    found = tuple(sorted(set(wanted or (1, n))))
    if found[0] < 1 or found[-1] > n:
        raise ConfigError(f"--k: write numbers from 1 to {n}, the samples per prompt (--n).")
    if len(found) > MOST_KS:
        raise ConfigError(f"--k: write at most {MOST_KS} numbers.")
    return found
