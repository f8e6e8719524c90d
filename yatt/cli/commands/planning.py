"""`yatt plan`: counts the memory that a run needs, prints it by part, and says whether it fits."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from yatt.adapters.inputs.model_family import trained_model
from yatt.config.check import broken_relations
from yatt.config.load import load_command
from yatt.config.schema import RunConfig
from yatt.config.sizes import num_trainer_nodes
from yatt.core.gpus.placement import ROLLOUT, genrm_role
from yatt.errors import EXIT_USER_MISTAKE, ConfigError, Finding
from yatt.forecast.measured import measured_figures
from yatt.forecast.memory.advice import check_possible, nearest_in_words, plan_faults
from yatt.forecast.memory.fit import GIB, MemoryPlan, memory_plan
from yatt.forecast.memory.ranks import planned_layout
from yatt.forecast.memory.times import HardwareRates, IterationTimes, TimeInputs, iteration_times
from yatt.forecast.memory.trainer import TrainerMemory
from yatt.forecast.time.figures import RunFigures, mean_length
from yatt.launch.checks.planned_memory import models_of
from yatt.models.model import Model
from yatt.paths import RunPaths
from yatt.printable import printable_lines


def plan(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns 0 if the run fits, 2 if it does not.

    Raises:
        ConfigError: the config, or a model's config.json, has a mistake.
    """
    check_numbers(arguments)
    gpu_bytes = int(arguments.gpu_gib * GIB)
    config = planned_config(arguments.config, arguments.more, gpu_bytes)
    models = models_of(config)
    check_possible(config, models[ROLLOUT], gpu_bytes)
    found = memory_plan(config, models, gpu_bytes)
    faults = plan_faults(config, models, found, int(arguments.host_gib * GIB), int(arguments.shm_gib * GIB))
    inputs = time_inputs(arguments, config)
    times = iteration_times(config, models, found, inputs)
    if arguments.json:
        said = plan_as_json(config, found) | {
            "fits": not faults,
            "faults": {each.key: replace(each, key="").in_words() for each in faults},
        }
        print(json.dumps(said | {"seconds": seconds_by_part(times), "total_s": times.total_s}))
    else:
        for line in (
            *plan_in_words(config, models, found),
            "",
            *times_in_words(times, inputs),
            "",
            *fit_in_words(faults),
        ):
            print(printable_lines(line))
    return EXIT_USER_MISTAKE if faults else 0


LEAST_RATE = 1e-3
"""Less than this is no rate; 0 means the usual one."""


def check_numbers(arguments: argparse.Namespace) -> None:
    """Refuses options that are out of range.

    Raises:
        ConfigError: one is.
    """
    for option, least, most in (
        ("gpu_gib", 1.0, 1e6),
        ("host_gib", 0.0, 1e6),
        ("shm_gib", 0.0, 1e6),
        ("tokens", 0.0, 1e9),
        ("mfu", 0.0, 1.0),
        ("peak_tflops", 0.0, 1e6),
        ("memory_tbps", 0.0, 1e6),
    ):
        value = getattr(arguments, option)
        if not (least <= value <= most and (value == 0 or value >= LEAST_RATE)):
            raise ConfigError(
                f"--{option.replace('_', '-')} {getattr(arguments, option):g}: write a number from {least:g} "
                f"to {most:g}."
            )


def time_inputs(arguments: argparse.Namespace, config: RunConfig) -> TimeInputs:
    """The rates of the command line over the defaults, and figures of a run folder.

    Raises:
        ConfigError: the folder has none.
    """
    usual, measured = HardwareRates(), RunFigures()
    if arguments.run is not None:
        measured, _ = measured_figures(RunPaths(arguments.run))
    tokens = mean_length(measured.lengths) if measured.lengths else config.rollout.max_response_tokens / 2
    rates = HardwareRates(
        peak_flops=arguments.peak_tflops * 1e12 or usual.peak_flops,
        utilization=arguments.mfu or usual.utilization,
        memory_bytes_per_s=arguments.memory_tbps * 1e12 or usual.memory_bytes_per_s,
    )
    return TimeInputs(tokens=arguments.tokens or tokens, rates=rates, measured=measured)


def times_in_words(times: IterationTimes, inputs: TimeInputs) -> list[str]:
    """Seconds by part, what they rest on, and the command that simulates placements with them."""
    rates = inputs.rates
    origin = "a run's figures, else " if inputs.measured != RunFigures() else ""
    head = f"seconds per iteration, expected by {origin}rates"
    options = [
        f"--speed {role}={each.step_s:.3g},{each.sequence_s:.3g}" for role, each in times.speeds.items()
    ]
    options += [
        f"--verdict-tokens {role.removeprefix('genrm:')}={tokens:.0f}"
        for role, tokens in times.verdict_tokens.items()
    ]
    compare = (
        f"  compare placements: yatt simulate CONFIG --lengths {inputs.tokens:.0f},0.8 {' '.join(options)} "
        f"--train-s {times.train_s:.0f} --switch-s {times.switch_s:.1f}"
    )
    return [
        f"{head:<56}{'s':>9}",
        *(f"  {name:<54}{value:>9.1f}" for name, value in seconds_by_part(times).items() if value),
        f"  {'sum' if times.is_colocated else 'sum, verdicts beside the rollout':<54}{times.total_s:>9.1f}",
        f"  {inputs.tokens:,.0f} tokens per completion, {rates.utilization:.0%} of "
        f"{rates.peak_flops / 1e12:g} TFLOP/s, {rates.memory_share:.0%} of "
        f"{rates.memory_bytes_per_s / 1e12:g} TB/s; not measured for this run",
        *([compare] if times.speeds else []),
    ]


def seconds_by_part(times: IterationTimes) -> dict[str, float]:
    """Seconds by part."""
    return {
        "rollout": times.rollout_s,
        "verdicts": times.verdicts_s,
        "training": times.train_s,
        "offload and onload": times.switch_s,
    }


def planned_config(file: Path, more: Sequence[str], gpu_bytes: int) -> RunConfig:
    """The config of a command line.

    Raises:
        ConfigError: it has mistakes; with the nearest layout that fits if the sizes do not divide.
    """
    try:
        return load_command(file, more)
    except ConfigError as error:
        try:
            config = load_command(file, more, rules=lambda _: ())
            if not any(fault.key.startswith("trainer.") for fault in broken_relations(config)):
                raise error
            advice = nearest_in_words(config, trained_model(config), gpu_bytes)
        except ConfigError:
            raise error from None
        raise ConfigError(heading=error.heading, findings=[*error.findings, Finding(says=advice)]) from error


def plan_in_words(config: RunConfig, models: dict[str, Model], found: MemoryPlan) -> list[str]:
    """The plan for people: GiB by part."""
    t, launch = config.trainer, config.launch
    layout = planned_layout(t, num_trainer_nodes(config) * launch.gpus_per_node)
    lines = [
        f"{Path(config.model.path).name}: {launch.nodes} node(s) of {launch.gpus_per_node} GPU(s) with "
        f"{_gib(found.gpu_bytes)} GiB, {config.placement.mode}",
        f"layout: TP {layout.tp} x PP {layout.pp} x CP {layout.cp} x DP {layout.dp}, EP {layout.ep}, "
        f"recompute {t.recompute}, at most {t.max_tokens_per_micro_batch} tokens per micro-batch",
        "",
    ]
    for title, parts in bytes_by_part(found).items():
        lines.append(f"{title:<56}{'GiB':>9}")
        lines += [f"  {name:<54}{_gib(size):>9}" for name, size in parts.items() if size]
    for engine in found.engines:
        lines.append(
            f"{engine.role}: {engine.num_sequences} sequences of {engine.longest} tokens fit into the KV "
            f"cache at once ({engine.kv.of_tokens(engine.longest) / engine.longest / 1024:.0f} KiB per token)"
        )
    missing = [g.name for g in config.engine_genrms if genrm_role(g.name) not in models]
    lines += [f"genrm:{name}: not counted, its config.json cannot be read here" for name in missing]
    return lines


def bytes_by_part(found: MemoryPlan) -> dict[str, dict[str, int]]:
    """Bytes by part, for each kind of memory."""
    stage = found.worst
    tables = {
        f"GPU that trains, pipeline stage {stage.stage} of {len(found.trainer)}": {
            "weights": stage.weights,
            "gradients (float32)": stage.gradients,
            "optimizer (this rank's part)": 0 if stage.slots else stage.optimizer,
            "reference model": stage.others.reference,
            **_critic_bytes(stage),
            "activations": stage.activations,
            "logits and last norm, at the end of the forward pass": stage.head,
            "one layer's backward pass, later than these": stage.layer,
            "optimizer's temporary tensors, later than these": stage.step,
            "parts of the optimizer, which is on the host, later than these": stage.slots,
            "process, sleeping workers": found.other,
            "peak": found.trainer_peak,
        },
        **{
            f"GPU of {engine.role}": {
                "weights": engine.weights,
                "KV cache": engine.kv_cache,
                "graphs, activations": engine.other - engine.logits,
                "logits": engine.logits,
                "sleeping workers": engine.sleeping,
                "sum": engine.peak,
            }
            for engine in found.engines
        },
        **{
            f"host memory of each {host.kind} node": {
                "weights": host.weights,
                "optimizer": host.optimizer,
                "reference model": host.others.reference,
                "critic and its optimizer": host.others.critic,
                "weights fetched from other nodes": host.fetched,
                "of these, whole because the engine's cut is not known": host.unknown,
                "former version of weights given to other nodes": host.given,
                "sleeping GenRMs": host.genrms,
                "prepared pictures": host.media,
                "processes": host.processes,
                "sum": host.total,
                "of the sum, in the memory filesystem": host.in_shm,
            }
            for host in found.hosts
        },
    }
    return tables


def _critic_bytes(stage: TrainerMemory) -> dict[str, int]:
    others = stage.others
    return {
        "critic: weights": others.critic_weights if others.critic_kept else 0,
        "critic: gradients (float32)": others.critic_gradients if others.critic_kept else 0,
        "critic: optimizer": 0 if stage.slots or others.critic_turn else others.critic_optimizer,
        "all of this without the policy, in the critic's turn": others.critic_turn,
    }


def fit_in_words(faults: list[Finding]) -> list[str]:
    """Whether it fits, and what to change."""
    return [f"does not fit: {fault.in_words()}" for fault in faults] or ["fits"]


def plan_as_json(config: RunConfig, found: MemoryPlan) -> dict[str, Any]:
    """The plan for programs, in bytes."""
    return {"model": config.model.path, "gpu_bytes": found.gpu_bytes, "bytes": bytes_by_part(found)}


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
