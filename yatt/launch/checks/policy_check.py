"""Checks that the policy can be trained in the run's layout.

A family of the user is loaded in a process of its own.
"""

from pathlib import Path

from yatt.adapters.inputs.model_family import model_of_run, own_family
from yatt.adapters.processes.trial import answer_trial, run_trial
from yatt.config.load import parse_resolved, resolved_text, without_secrets
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.forecast.memory.advice import check_possible
from yatt.launch.checks.judge_check import refuse_some_windows
from yatt.launch.checks.model_check import checked_tensors
from yatt.launch.checks.planned_memory import check_planned_memory
from yatt.models.families import FAMILIES, Family
from yatt.models.model import Model, read_config
from yatt.models.quantized import FP8, is_quantised, scale_faults, without_scales
from yatt.models.tensors import tensor_faults

TRAINED_DTYPES = ("F64", "F32", "F16", "BF16")


def check_policy(config: RunConfig) -> None:
    """Checks model and layout before anything is started.

    Raises:
        ConfigError: the architecture is not supported or has a feature that cannot be trained, sizes do not
            divide, or the user's family is wrong.
    """
    if not Path(config.model.path).is_dir():
        return  # told by another check
    if not config.model.family:
        check_architecture(config.model.path)
        check_fits(config)
        return
    path = Path(config.model.family).absolute()
    run_trial(
        "yatt.launch.checks.policy_check", [resolved_text(without_secrets(config))], path=path,
        key="model.family", limit_s=config.launch.start_timeout_s,
    )  # fmt: skip


def check_architecture(folder: str, own: Family | None = None) -> None:
    """Refuses a model whose class is not one of the known families': its model type alone is not enough.

    Args:
        own: a family of the user, known too.

    Raises:
        ConfigError: it is another one.
    """
    architectures = read_config(folder).get("architectures") or ["none named"]
    named = [str(name) for name in architectures] if isinstance(architectures, list) else [str(architectures)]
    families = [*FAMILIES.values(), *([own] if own else [])]
    known = [*dict.fromkeys(family.architecture for family in families)]
    if not set(named) & set(known):
        raise ConfigError(
            f"model.path: {folder}: architecture "
            f"{', '.join(named)} cannot be trained; use {', '.join(known)}, or "
            "write a family of your own (model.family, docs/extending.md)."
        )


def check_fits(config: RunConfig) -> None:
    """Checks that the policy's sizes fit the layout of trainer and engines.

    Raises:
        ConfigError: the model has a feature that cannot be trained, sizes that do not divide, or its files
            have other tensors than its config promises.
        OSError: its files cannot be read now.
    """
    model = model_of_run(config.model)
    shape = model.shape
    _check_tensors(config.model.path, model)
    check_possible(config, model)
    check_planned_memory(config, model)
    if config.rollout.expert_parallel and shape.experts is None:
        raise ConfigError(
            f"rollout.expert_parallel has no effect: {config.model.path} has no experts; remove it."
        )
    if shape.vision is not None and config.rollout.engine == "transformers":
        raise ConfigError(
            f"rollout.engine: transformers cannot run {config.model.path}, which takes pictures; write vllm."
        )
    refuse_some_windows(config.model.path, "rollout", config.rollout.engine, own_family(config.model))
    if config.vision.train != "none" and shape.vision is None:
        raise ConfigError(
            f"vision.train has no effect: {config.model.path} takes no pictures; remove the section."
        )
    if shape.attention.num_heads % config.rollout.tp_size:
        raise ConfigError(
            f"rollout.tp_size {config.rollout.tp_size} does not divide the {shape.attention.num_heads} heads "
            f"of {config.model.path}; write a divisor."
        )


def _check_tensors(folder: str, model: Model) -> None:
    places, faults = checked_tensors(folder, "model.path")
    shapes = {name: place.shape for name, place in places.items()}
    dtypes = {name: place.dtype for name, place in places.items()}
    if not shapes and not faults:
        return  # told by another check
    known = (*TRAINED_DTYPES, FP8) if is_quantised(read_config(folder)) else TRAINED_DTYPES
    other = sorted(f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in known)
    if other:
        faults.append(f"has tensors that cannot be trained: {', '.join(other[:3])}; save them in bfloat16")
    faults += scale_faults(shapes, dtypes)[:1]
    shapes = without_scales(shapes, dtypes)
    if faults := faults or list(tensor_faults(model, shapes)):
        raise ConfigError("\n".join(f"model.path: {folder} {fault}." for fault in faults))


def _check(text: str) -> None:
    config = parse_resolved(text)
    check_architecture(config.model.path, own_family(config.model))
    check_fits(config)


if __name__ == "__main__":
    answer_trial(_check)
