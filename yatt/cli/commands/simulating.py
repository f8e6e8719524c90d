"""`yatt simulate`: simulates a config and its alternatives, prints a table and a recommendation."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from yatt.adapters.run_folder.run_config import load_run
from yatt.config.check import block_nodes, broken_relations
from yatt.config.load import load_command, load_over
from yatt.config.schema import RunConfig
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT, genrm_of_role, genrm_role
from yatt.errors import ConfigError
from yatt.forecast.measured import measured_figures
from yatt.forecast.simulated_page import simulated_page
from yatt.forecast.time.alternatives import num_gpus, resized_config, with_noun
from yatt.forecast.time.comparing import WARM_UP, SettingsComparison, SimulatedResult, SimulatedSetup
from yatt.forecast.time.figures import RunFigures, log_normal, mean_length, missing_figures, train_gpu_s
from yatt.forecast.time.picture import picture_of
from yatt.forecast.time.recommending import ALIKE, Recommendation, recommended_setting, setup_of
from yatt.obs.page.page_file import write_page
from yatt.paths import RunPaths
from yatt.printable import printable, printable_lines

MOST_ITERATIONS = 1000
LEFT_OUT = (
    "The model leaves out: time to read prompts beyond what the speeds contain, limits of the KV cache, "
    "whether the policy fits into the memory of the trainer nodes, validation, restarts, calls of reward "
    "functions, of judges behind a URL and of the policy as its own judge, differences between data shards, "
    "and learning from older tokens.",
    "All verdicts of a GenRM are equally long and begin when their completion is complete. Training takes "
    "time in proportion to completions and in inverse proportion to GPUs. A switch takes the same time "
    "everywhere. Tokens per second are those of completions that are trained on. An idle share is the part "
    "of the engine seconds that a role held in which no sequence ran; of the trainer, the part of the time "
    "in which nodes that only train do not.",
)

MOST = 1e9
MOST_SIGMA = 4.0


def simulated_config(arguments: argparse.Namespace) -> RunConfig:
    """Returns the config of the run file or run folder on the command line.

    Raises:
        ConfigError: it is neither, or has mistakes.
    """
    config = _read_config(arguments)
    if config.is_given:
        says = f"{config.run.kind} has no engines, so there is nothing to place; see yatt plan."
        raise ConfigError(says, key="run.kind")
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
    return load_over(load_run(paths), arguments.more, broken_relations)


def figures_of(arguments: argparse.Namespace, config: RunConfig) -> tuple[RunFigures, str]:
    """Returns the figures, given before measured ones, and a sentence about their origin.

    Raises:
        ConfigError: one is wrong, or missing; names every missing one.
    """
    run = arguments.run or (arguments.config if arguments.config.is_dir() else None)
    given = given_figures(arguments, config)
    figures, origin = given, "given on the command line"
    if run is not None and (missing_figures(given, config) or given.kept is None):
        measured, where = measured_figures(RunPaths(run))
        figures, origin = given.over(measured), where
        if given != RunFigures():
            origin += "; what the command line gives replaces it"
    if faults := missing_figures(figures, config):
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


def simulate(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        ConfigError: an argument is wrong, a figure is missing, or the page cannot be written.
    """
    least = WARM_UP + 1
    if arguments.iterations and not least <= arguments.iterations <= MOST_ITERATIONS:
        raise ConfigError(
            f"--iterations {arguments.iterations}: write {least} to {MOST_ITERATIONS}; the first {WARM_UP} "
            "do not count."
        )
    config = simulated_config(arguments)
    figures, origin = figures_of(arguments, config)
    if arguments.gpus:
        config = resized_config(config, arguments.gpus)
    num_iterations = arguments.iterations or None
    setup = setup_of(config, figures, num_iterations=num_iterations, seed=arguments.seed)
    comparison = SettingsComparison(setup)
    found = recommended_setting(comparison)
    about = about_share(comparison, found)
    if arguments.json:
        head = {"config": str(arguments.config), "figures": origin, "share": setup.share}
        print(json.dumps({**head, **results_as_json(found, config)}, allow_nan=False))
    else:
        _say(f"{arguments.config}: {size_in_words(setup)}")
        _say(f"  figures     {origin}; {figures_in_words(setup)}")
        _say(f"  simulated   {about}\n")
        for line in (*comparison_table(found), "", *recommendation_in_words(found, config), LEFT_OUT[0]):
            _say(line)
    if arguments.html:
        _write_page(arguments, comparison, found, about)
        if not arguments.json:
            _say(str(arguments.html))
    return 0


def size_in_words(setup: SimulatedSetup) -> str:
    """Returns GPUs and batch of the config."""
    config = setup.config
    return (
        f"{with_noun(num_gpus(config), 'GPU')} on {with_noun(config.launch.nodes, 'node')}, "
        f"{with_noun(config.trainer.train_batch_size, 'prompt group')} of {config.rollout.n}"
    )


def figures_in_words(setup: SimulatedSetup) -> str:
    """Returns the figures that no row of the table has."""
    figures = setup.figures
    dropped = "no group is dropped" if setup.kept == 1 else f"{1 - setup.kept:.0%} of the groups are dropped"
    asked = "".join(
        f"GenRM '{genrm_of_role(role)}' writes {figures.verdicts[role]:,.0f} tokens in {num:.3g} answers per "
        "completion; "
        for role, num in figures.questions.items()
    )
    return (
        f"{mean_length(figures.lengths):,.0f} tokens per completion, at most {figures.lengths[-1]:,.0f}; "
        f"{asked}a switch takes {figures.switch_s or 0.0:g} s; {dropped}"
    )


def about_share(comparison: SettingsComparison, found: Recommendation) -> str:
    """Returns a sentence on what is exact and what is scaled."""
    setup = comparison.setup
    if setup.share == 1:
        return (
            f"all GPU sets and requests, {setup.num_iterations} iterations, of which {WARM_UP} do not count"
        )
    says = (
        f"1/{setup.share} of the GPU sets with 1/{setup.share} of the batch (more where engines have few "
        f"GPU sets), {setup.num_iterations} iterations, of which {WARM_UP} do not count; seconds and idle "
        "shares are those of this part, tokens/s and moves are scaled, training is computed for all GPUs"
    )
    ordered = sorted(found.results, key=lambda each: each.iteration_s)
    parts = [each.alternative for each in ordered if setup.share_of(each.alternative) > 1]
    both = [each for each in parts if not each.takes_turns]
    checked = comparison.check_of_share(both[0]) if both else None
    if checked is None:
        return f"{says}; the part was not compared with the whole"
    whole_s, part_s = checked
    times = f"{part_s:,.1f} s by this part and {whole_s:,.1f} s if all GPU sets are simulated"
    return f"{says}; one batch ({both[0].name}, nothing moves) takes {times}"


def comparison_table(found: Recommendation) -> list[str]:
    """Returns the lines of the table: the config's setting, then the best of each kind, the fastest first."""
    best: dict[tuple[Any, ...], SimulatedResult] = {}
    for result in sorted(found.results, key=lambda each: each.iteration_s):
        config = result.alternative.config
        kind = (
            config.placement.mode,
            result.alternative.is_dynamic,
            config.rollout.ahead,
            config.rollout.oversample > 1,
        )
        best.setdefault(kind, result)
    shown = [found.own, *(each for each in best.values() if each is not found.own)]
    roles = list(dict.fromkeys(role for each in shown for role in each.idle))
    head = ["setting", "iteration", "tokens/s", *(f"idle {role}" for role in roles), "moves"]
    rows = [head, *(_row(result, roles, is_own=result is found.own) for result in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    if hidden := len(found.results) - len(shown):
        lines.append(f"{with_noun(hidden, 'more setting')} of these kinds, each slower: see --html or --json")
    return lines


def _row(result: SimulatedResult, roles: Sequence[str], *, is_own: bool) -> list[str]:
    idle = [f"{result.idle[role]:.0%}" if role in result.idle else "-" for role in roles]
    name = ("as configured: " if is_own else "") + result.alternative.name
    return [
        name,
        f"{result.iteration_s:,.1f} s",
        f"{result.tokens_per_s:,.0f}",
        *idle,
        f"{result.moves:,.1f}",
    ]


def recommendation_in_words(found: Recommendation, config: RunConfig) -> list[str]:
    """Returns the recommendation and what to write for it."""
    best, own = found.best, found.own
    if best is own:
        return [
            f"recommended: the config as it is; no other setting takes less than {own.iteration_s:,.1f} s."
        ]
    says = [_saves("recommended", found, best, config)]
    if found.gain(best) < ALIKE:
        says = [
            f"recommended: keep the config. The fastest setting, {best.alternative.name}, saves "
            f"{found.gain(best):.1%}; differences below {ALIKE:.0%} are within what the model can tell."
        ]
    young = found.best_as_young
    if best.most_age > own.most_age and young is not own and found.gain(young) >= ALIKE:
        says.append(_saves("without older tokens", found, young, config))
    return says


def _saves(what: str, found: Recommendation, result: SimulatedResult, config: RunConfig) -> str:
    settings = " ".join(result.alternative.settings(config))
    removed = " and ".join(result.alternative.removed(config))
    older = ""
    if result.most_age > found.own.most_age:
        older = f" It trains on tokens up to {with_noun(result.most_age, 'policy version')} old."
    return (
        f"{what}: {result.alternative.name}. {result.iteration_s:,.1f} s, {found.gain(result):.0%} less than "
        f"the config's {found.own.iteration_s:,.1f} s.{older} Write {settings or 'the same config'}"
        f"{' and remove ' + removed if removed else ''}."
    )


def results_as_json(found: Recommendation, config: RunConfig) -> dict[str, Any]:
    """Returns the results as a JSON object."""
    return {
        "results": [_result_json(each, found, config) for each in found.results],
        "recommended": _result_json(found.best, found, config),
        "recommended_without_older_tokens": _result_json(found.best_as_young, found, config),
    }


def _result_json(result: SimulatedResult, found: Recommendation, config: RunConfig) -> dict[str, Any]:
    return {
        "name": result.alternative.name,
        "is_own": result is found.own,
        "is_dynamic": result.alternative.is_dynamic,
        "settings": result.alternative.settings(config),
        "removed": result.alternative.removed(config),
        "split": dict(result.split),
        "iteration_s": result.iteration_s,
        "sampling_s": result.sampling_s,
        "switch_s": result.switch_s,
        "train_s": result.train_s,
        "tokens_per_s": result.tokens_per_s,
        "idle": dict(result.idle),
        "moves": result.moves,
        "most_age": result.most_age,
        "gain": found.gain(result),
    }


def _write_page(
    arguments: argparse.Namespace, comparison: SettingsComparison, found: Recommendation, about: str
) -> None:
    setup = comparison.setup
    facts = [
        ("GPUs", f"{num_gpus(setup.config):,}"),
        ("completions per iteration", f"{setup.num_samples:,}"),
        ("tokens per completion", f"{mean_length(setup.figures.lengths):,.0f}"),
        ("as configured", f"{found.own.iteration_s:,.1f} s"),
        ("recommended", f"{found.best.iteration_s:,.1f} s"),
    ]
    drawn = [found.own] if found.best is found.own else [found.own, found.best]
    pictures = [(result, picture_of(comparison, result)) for result in drawn]
    says, notes = recommendation_in_words(found, setup.config), [f"Simulated: {about}.", *LEFT_OUT]
    page = simulated_page(str(arguments.config), found, says, notes, facts, pictures)
    write_page(arguments.html, page, "--html")


def _say(text: str) -> None:
    """Prints lines with control characters escaped."""
    print(printable_lines(text))
