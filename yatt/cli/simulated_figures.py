"""Reads what the user gives to `yatt simulate`: the config, and figures that replace measured ones."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from yatt.adapters.run_config import load_run
from yatt.config.check import block_nodes, relations
from yatt.config.load import load_command, load_over
from yatt.config.schema import RunConfig
from yatt.core.engine_model import EngineSpeed
from yatt.core.placement import ROLLOUT, genrm_role
from yatt.errors import ConfigError
from yatt.obs.measured import measured_figures
from yatt.paths import RunPaths
from yatt.printable import printable
from yatt.simulation.figures import RunFigures, log_normal, missing, train_gpu_s

MOST = 1e9
MOST_SIGMA = 4.0


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """Returns the config of the run file or run folder on the command line.

    Raises:
        ConfigError: it is neither, or has mistakes.
    """
    config = _read_config(arguments)
    if block_nodes(config) > 1:
        raise ConfigError(
            "an engine of this config spans nodes (tp_size is above the GPUs of a node), which is not "
            "modelled; simulate it with nodes of more GPUs: launch.gpus_per_node=N."
        )
    return config


def _read_config(arguments: argparse.Namespace) -> RunConfig:
    place: Path = arguments.config
    if not place.is_dir():
        return load_command(place, arguments.more)
    paths = RunPaths(place)
    if not paths.config.exists():
        raise ConfigError(
            f"{place} is not a run folder: it has no config.yaml. Give a run file or run folder."
        )
    if overlays := [each for each in arguments.more if "=" not in each]:
        raise ConfigError(f"{overlays[0]}: with a run folder, only section.key=value can follow.")
    return load_over(load_run(paths), arguments.more, relations)


def figures_of(arguments: argparse.Namespace, config: RunConfig) -> tuple[RunFigures, str]:
    """Returns the figures, given before measured ones, and a sentence about their origin.

    Raises:
        ConfigError: one is wrong, or missing; names every missing one.
    """
    run = arguments.run or (arguments.config if arguments.config.is_dir() else None)
    given = given_figures(arguments, config)
    figures, origin = given, "given on the command line"
    if run is not None and (missing(given, config) or given.kept is None):
        measured, where = measured_figures(RunPaths(run))
        figures, origin = given.over(measured), where
        if given != RunFigures():
            origin += "; what the command line gives replaces it"
    if faults := missing(figures, config):
        also = "" if run is not None else "\n  or give a run folder with measured batches: --run RUN"
        raise ConfigError("\n".join(["not known:", *(f"  {fault}" for fault in faults)]) + also)
    return figures, origin


def given_figures(arguments: argparse.Namespace, config: RunConfig) -> RunFigures:
    """Returns the figures that the command line gives.

    Raises:
        ConfigError: one is wrong.
    """
    judges = [genrm.name for genrm in config.engine_genrms]
    speeds = _named("--speed", arguments.speed, [ROLLOUT, *map(genrm_role, judges)], "ROLE=STEP_S,SEQUENCE_S")
    tokens = _named("--verdict-tokens", arguments.verdict_tokens, judges, "NAME=MEAN")
    train_s = _amount("--train-s", arguments.train_s)
    kept = _amount("--kept", arguments.kept, most=1.0)
    if kept is not None and kept < 0.01:
        raise ConfigError(
            f"--kept {arguments.kept}: write 0.01 to 1, the share of groups that are not dropped."
        )
    return RunFigures(
        lengths=_lengths(arguments.lengths, config.rollout.max_response_tokens),
        verdicts={genrm_role(name): _number("--verdict-tokens", text) for name, text in tokens.items()},
        speeds={role: _speed(text) for role, text in speeds.items()},
        switch_s=_amount("--switch-s", arguments.switch_s),
        train_gpu_s=None if train_s is None else train_gpu_s(train_s, config),
        kept=kept,
    )


def _named(option: str, settings: Sequence[str], known: Sequence[str], form: str) -> Mapping[str, str]:
    found = {}
    for setting in settings:
        name, equals, value = setting.rpartition("=")
        if not equals:
            raise ConfigError(f"{option} {printable(setting)}: write {form}.")
        if name not in known:
            names = ", ".join(known) or "none, because no GenRM has an engine"
            raise ConfigError(f"{option}: the config has no {printable(name)}; there is {names}.")
        found[name] = value
    return found


def _lengths(text: str, most: int) -> tuple[float, ...]:
    if not text:
        return ()
    mean, comma, sigma = text.partition(",")
    if not comma:
        raise ConfigError(f"--lengths {printable(text)}: write MEAN,SIGMA, for example --lengths 1500,0.8.")
    mean_tokens = _number("--lengths", mean)
    if mean_tokens < 1:
        raise ConfigError(f"--lengths {printable(text)}: the mean must be 1 token or more.")
    return log_normal(mean_tokens, _number("--lengths", sigma, most=MOST_SIGMA), most)


def _speed(text: str) -> EngineSpeed:
    step_s, comma, sequence_s = text.partition(",")
    if not comma:
        raise ConfigError(
            f"--speed {printable(text)}: write ROLE=STEP_S,SEQUENCE_S, for example rollout=0.02,3e-4."
        )
    speed = EngineSpeed(_number("--speed", step_s), _number("--speed", sequence_s))
    if speed.step_s + speed.sequence_s <= 0:
        raise ConfigError("--speed: STEP_S and SEQUENCE_S are both 0; at least one must be above 0.")
    return speed


def _amount(option: str, text: str, most: float = MOST) -> float | None:
    return _number(option, text, most=most) if text else None


def _number(option: str, text: str, most: float = MOST) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise ConfigError(f"{option}: {printable(text)!r} is not a number from 0 to {most:g}.")
    return value
