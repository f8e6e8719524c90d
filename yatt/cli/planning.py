"""`yatt plan`: counts the memory that a run needs, prints it by part, and says whether it fits."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yatt.adapters.model_family import model_of_run
from yatt.config.check import relations
from yatt.config.load import load_command
from yatt.config.schema import RunConfig
from yatt.config.sizes import num_trainer_nodes
from yatt.core.placement import ROLLOUT, genrm_role
from yatt.errors import EXIT_USER_MISTAKE, ConfigError
from yatt.launch.planned_memory import models_of
from yatt.models.model import Model
from yatt.planning.advice import check_possible, nearest_in_words, plan_faults
from yatt.planning.fit import GIB, ROOM, MemoryPlan, memory_plan
from yatt.printable import printable_lines


def plan(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns 0 if the run fits, 2 if it does not.

    Raises:
        ConfigError: the config, or a model's config.json, has a mistake.
    """
    for option, value in (("--gpu-gib", arguments.gpu_gib), ("--host-gib", arguments.host_gib)):
        if not 0 <= value <= 1e6 or (option == "--gpu-gib" and value < 1):
            raise ConfigError(f"{option} {value:g}: write a number of GiB.")
    gpu_bytes = int(arguments.gpu_gib * GIB)
    config = config_of(arguments.config, arguments.more, gpu_bytes)
    models = models_of(config)
    check_possible(config, models[ROLLOUT], gpu_bytes)
    found = memory_plan(config, models, gpu_bytes)
    faults = plan_faults(config, models, found, int(arguments.host_gib * GIB))
    if arguments.json:
        print(json.dumps(as_json(config, found) | {"fits": not faults, "faults": dict(faults)}))
    else:
        for line in (*page(config, models, found), "", *verdict(faults)):
            print(printable_lines(line))
    return EXIT_USER_MISTAKE if faults else 0


def config_of(file: Path, more: Sequence[str], gpu_bytes: int) -> RunConfig:
    """The config of a command line.

    Raises:
        ConfigError: it has mistakes; with the nearest layout that fits if the sizes do not divide.
    """
    try:
        return load_command(file, more)
    except ConfigError as error:
        try:
            config = load_command(file, more, rules=lambda _: ())
            if "trainer.tensor_model_parallel_size" not in dict(relations(config)):
                raise error
            advice = nearest_in_words(config, model_of_run(config.model), int(ROOM * gpu_bytes))
        except ConfigError:
            raise error from None
        raise ConfigError(f"{error}\n  {advice}") from error


def page(config: RunConfig, models: dict[str, Model], found: MemoryPlan) -> list[str]:
    """The plan for people: GiB by part."""
    t, launch = config.trainer, config.launch
    dp = (
        num_trainer_nodes(config)
        * launch.gpus_per_node
        // (t.tensor_model_parallel_size * t.pipeline_model_parallel_size * t.context_parallel_size)
    )
    lines = [
        f"{Path(config.model.path).name}: {launch.nodes} node(s) of {launch.gpus_per_node} GPU(s) with "
        f"{_gib(found.gpu_bytes)} GiB, {config.placement.mode}",
        f"layout: TP {t.tensor_model_parallel_size} x PP {t.pipeline_model_parallel_size} x CP "
        f"{t.context_parallel_size} x DP {dp}, EP {t.expert_model_parallel_size}, recompute "
        f"{'on' if t.recompute else 'off'}, at most {t.max_tokens_per_micro_batch} tokens per micro-batch",
        "",
    ]
    for title, parts in sections(found).items():
        lines.append(f"{title:<56}{'GiB':>9}")
        lines += [f"  {name:<54}{_gib(size):>9}" for name, size in parts.items() if size]
    for engine in found.engines:
        lines.append(
            f"{engine.role}: {engine.num_sequences} sequences of {engine.longest} tokens fit into the KV "
            f"cache at once ({engine.kv_token_bytes / 1024:.0f} KiB per token)"
        )
    missing = [g.name for g in config.engine_genrms if genrm_role(g.name) not in models]
    lines += [f"genrm:{name}: not counted, its config.json cannot be read here" for name in missing]
    return lines


def sections(found: MemoryPlan) -> dict[str, dict[str, int]]:
    """Bytes by part, for each kind of memory."""
    stage = found.worst
    tables = {
        f"GPU that trains, pipeline stage {stage.stage} of {len(found.trainer)}": {
            "weights": stage.weights, "gradients (float32)": stage.gradients,
            "optimizer (this rank's part)": stage.optimizer, "reference model": stage.reference,
            "activations": stage.activations,
            "logits and last norm, at the end of the forward pass": stage.head,
            "one layer's backward pass, later than these": stage.layer,
            "optimizer's temporary tensors, later than these": stage.step,
            "process, sleeping workers": found.other, "peak": found.trainer_peak,
        },
        **{
            f"GPU of {engine.role}": {
                "weights": engine.weights, "KV cache": engine.kv_cache, "graphs, activations": engine.other,
                "sleeping workers": engine.sleeping, "sum": engine.peak,
            }
            for engine in found.engines
        },
        **{
            f"host memory of a {host.kind} node": {
                "weights": host.weights, "optimizer": host.optimizer, "reference model": host.reference,
                "weights fetched from other nodes": host.fetched,
                "former version of weights given to other nodes": host.given,
                "sleeping GenRMs": host.genrms, "processes": host.processes, "sum": host.total,
            }
            for host in found.hosts
        },
    }  # fmt: skip
    return tables


def verdict(faults: list[tuple[str, str]]) -> list[str]:
    """Whether it fits, and what to change."""
    return [f"does not fit: {key}: {says}" for key, says in faults] or ["fits"]


def as_json(config: RunConfig, found: MemoryPlan) -> dict[str, Any]:
    """The plan for programs, in bytes."""
    return {"model": config.model.path, "gpu_bytes": found.gpu_bytes, "bytes": sections(found)}


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
