"""Checks that the policy can be trained in the run's layout.

A family of the user is loaded in a process of its own.
"""

from pathlib import Path

from yatt.adapters.inputs.model_family import critic_of_run, model_of_run, own_family, trained_model
from yatt.adapters.processes.trial import answer_trial, run_trial
from yatt.config.load import parse_resolved, resolved_text, without_secrets
from yatt.config.schema import RunConfig
from yatt.config.sizes import num_trainer_nodes
from yatt.errors import ConfigError, mistake_in
from yatt.forecast.memory.advice import check_possible
from yatt.launch.checks.judge_check import refuse_some_windows
from yatt.launch.checks.model_check import check_length, check_model, checked_tensors
from yatt.launch.checks.planned_memory import check_planned_memory
from yatt.models.families import FAMILIES, Family
from yatt.models.model import Model, read_config
from yatt.models.quantized import FP8, PLAIN_CLASS, SCORED_CLASS, is_quantised, scale_faults, without_scales
from yatt.models.rows import OUTPUT, SCORE
from yatt.models.shape import Shape
from yatt.models.tensors import TIED_OUTPUT, tensor_faults
from yatt.trainer.mcore.layout import check_layout, check_spec

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
        check_architecture(config.model.path, may_score=config.run.kind == "reward_model")
        check_fits(config)
        return
    path = Path(config.model.family).absolute()
    run_trial(
        "yatt.launch.checks.policy_check",
        [resolved_text(without_secrets(config))],
        path=path,
        key="model.family",
        limit_s=config.launch.start_timeout_s,
    )


def check_architecture(folder: str, own: Family | None = None, *, may_score: bool = False) -> None:
    """Refuses a model whose class is not one of the known families': its model type alone is not enough.

    Args:
        own: a family of the user, known too.
        may_score: it may be one with a value head.

    Raises:
        ConfigError: it is another one.
    """
    architectures = read_config(folder).get("architectures") or ["none named"]
    named = [str(name) for name in architectures] if isinstance(architectures, list) else [str(architectures)]
    families = [*FAMILIES.values(), *([own] if own else [])]
    known = [*dict.fromkeys(family.architecture for family in families)]
    if may_score:
        named = [name.replace(SCORED_CLASS, PLAIN_CLASS) for name in named]
    if not set(named) & set(known):
        raise ConfigError(
            f"{folder}: architecture {', '.join(named)} cannot be trained; use {', '.join(known)}, or write "
            "a family of your own (model.family, docs/extending.md).",
            key="model.path",
        )


def check_fits(config: RunConfig) -> None:
    """Checks that the policy's sizes fit the layout of trainer and engines.

    Raises:
        ConfigError: the model has a feature that cannot be trained, sizes that do not divide, or its files
            have other tensors than its config promises.
        OSError: its files cannot be read now.
    """
    model = trained_model(config)
    shape = model.shape
    plain = model_of_run(config.model) if model.has_value_head else None
    _check_tensors(config.model.path, model, with_output=plain)
    if plain is not None and shape.vision is not None:
        raise ConfigError(
            f"reward_model: {config.model.path} takes pictures, and a value head reads text only; name a "
            "text model.",
            key="run.kind",
        )
    if config.has_critic:
        _check_critic(config, model)
    check_spec(shape, config.model.spec)
    check_possible(config, model)
    check_planned_memory(config, model)
    if config.vision.train != "none" and shape.vision is None:
        raise ConfigError(
            f"vision.train has no effect: {config.model.path} takes no pictures; remove the section."
        )
    if not config.is_given:
        _check_engines(config, shape)


def _check_engines(config: RunConfig, shape: Shape) -> None:
    """Checks that rollout engines can run the policy."""
    if config.rollout.expert_parallel and shape.experts is None:
        raise ConfigError(
            f"rollout.expert_parallel has no effect: {config.model.path} has no experts; remove it."
        )
    if shape.vision is not None and config.rollout.engine == "transformers":
        says = f"transformers cannot run {config.model.path}, which takes pictures; write vllm."
        raise ConfigError(says, key="rollout.engine")
    refuse_some_windows(config.model.path, "rollout", config.rollout.engine, own_family(config.model))
    _refuse_cpu_engine(config)
    if shape.attention.num_heads % config.rollout.tp_size:
        raise ConfigError(
            f"rollout.tp_size {config.rollout.tp_size} does not divide the {shape.attention.num_heads} heads "
            f"of {config.model.path}; write a divisor."
        )


def _refuse_cpu_engine(config: RunConfig) -> None:
    """Refuses vLLM on CPUs for a model whose router its CPU build does not have."""
    if config.launch.device != "cpu" or config.rollout.engine not in ("auto", "vllm"):
        return
    family = FAMILIES.get(str(read_config(config.model.path).get("model_type")))
    if family is not None and family.lacks_cpu_engine:
        raise ConfigError(
            f"vLLM on CPUs cannot run {config.model.path} ({family.model_type}: its router's scores are "
            "sigmoids without groups); write transformers, or train on GPUs.",
            key="rollout.engine",
        )


def _check_critic(config: RunConfig, policy: Model) -> None:
    """Checks that the critic can be trained beside the policy. It has the policy's layout, because
    megatron-core's process groups are those of the whole process."""
    section, path = config.critic_model, config.critic.path
    if path:
        check_model(path, "critic.path")
    critic = critic_of_run(config)
    assert critic is not None, "the run has one"
    for model, folder in ((policy, config.model.path), (critic, section.path)):
        if model.shape.vision is not None:
            says = f"gae: {folder} takes pictures, and a critic takes none yet; write grpo, or a text model."
            raise ConfigError(says, key="algorithm.adv_estimator")
    if not path:
        return
    check_spec(critic.shape, config.model.spec, f"model.spec: critic.path: {path}")
    if critic.shape.vocab_size < policy.shape.vocab_size:
        raise ConfigError(
            f"{path} has {critic.shape.vocab_size} tokens and the policy {policy.shape.vocab_size}; name a "
            "model with the policy's tokenizer.",
            key="critic.path",
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    check_length(path, "critic.path: data.max_prompt_tokens + rollout.max_response_tokens", longest)
    try:
        check_layout(critic.shape, config.trainer, num_trainer_nodes(config) * config.launch.gpus_per_node)
    except ConfigError as error:
        raise ConfigError(f"{path} does not fit the trainer's layout. {error}", key="critic.path") from error
    _check_tensors(path, critic, "critic.path", with_output=model_of_run(section))


def _with_score(model: Model, plain: Model, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes without the output matrix, which a critic does not use, and with a value head, which is zero
    where a folder has none."""
    unused = {name for row in plain.rows if row.name == OUTPUT for name in row.hf_names} | TIED_OUTPUT
    return {SCORE: (1, model.shape.hidden_size)} | {k: v for k, v in shapes.items() if k not in unused}


def _check_tensors(
    folder: str, model: Model, key: str = "model.path", with_output: Model | None = None
) -> None:
    """Checks a folder's tensors.

    Args:
        with_output: of a critic the model without a value head.
    """
    places, faults = checked_tensors(folder, key)
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
    if with_output is not None:
        shapes = _with_score(model, with_output, shapes)
    if faults := faults or list(tensor_faults(model, shapes)):
        raise ConfigError(findings=[mistake_in(key, f"{folder} {fault}.") for fault in faults])


def _check(text: str) -> None:
    config = parse_resolved(text)
    check_architecture(
        config.model.path, own_family(config.model), may_score=config.run.kind == "reward_model"
    )
    check_fits(config)


if __name__ == "__main__":
    answer_trial(_check)
