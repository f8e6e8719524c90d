"""What can be known to be wrong before anything starts: models, data, templates, functions, folders.

Every check raises ConfigError; they are collected, so that one try shows all mistakes.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from yatt.adapters.dataset import read_rows
from yatt.adapters.tokenizer import Tokenizer
from yatt.checkpoint.manifest import Checkpoints
from yatt.checkpoint.ownership import check_owner
from yatt.checkpoint.store import open_store
from yatt.config.schema import FromCheckpointSection, RunConfig
from yatt.core.verdict import check_template, check_verdict
from yatt.errors import ConfigError, StoreUnreachable
from yatt.reward.functions import load_genrm_function, load_reward

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")


def preflight(config: RunConfig) -> None:
    """Check what the config refers to.

    Raises:
        ConfigError: everything that is wrong, one line each.
    """
    faults = [fault for check in _checks(config) if (fault := _fault(check))]
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise ConfigError(f"nothing was started:\n{listed}")


def _fault(check: Callable[[], object]) -> str:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return ""


def _checks(config: RunConfig) -> Iterator[Callable[[], object]]:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    yield partial(check_policy, config.model.path, "model.path")
    yield partial(
        check_length, config.model.path, "data.max_prompt_tokens + rollout.max_response_tokens", longest
    )
    yield partial(read_rows, config.data.train_files, config.data)
    if config.data.val_files:
        yield partial(read_rows, config.data.val_files, config.data)
    for index, genrm in enumerate(config.genrms):
        key = f"genrms[{index}]"
        yield partial(check_model, genrm.model, f"{key}.model")
        yield partial(check_length, genrm.model, f"{key}.max_model_tokens", genrm.max_model_tokens)
        yield partial(Tokenizer, genrm.model)
        if genrm.template:
            yield partial(check_template, genrm.template, f"{key}.template")
            yield partial(check_verdict, genrm.verdict, f"{key}.verdict")
        else:
            yield partial(load_genrm_function, genrm, config.rollout.request_timeout_s)
    for reward in config.rewards:
        yield partial(load_reward, reward)
    if config.checkpoint.url:
        yield partial(check_store, config)
    if config.run.from_checkpoint.url:
        yield partial(check_origin, config.run.from_checkpoint)
    yield partial(_engines_installed, config)


def check_model(folder: str, key: str) -> dict[str, object]:
    """The folder's config.json.

    Raises:
        ConfigError: the folder is no Hugging Face model.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{key}: there is no folder {folder}. Give a Hugging Face folder on this machine.")
    try:
        found = json.loads((root / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{key}: {root / 'config.json'} cannot be read ({error}).") from error
    if not any(root.glob("*.safetensors")):
        raise ConfigError(f"{key}: {folder} has no *.safetensors; save the model with save_pretrained.")
    assert isinstance(found, dict), "config.json is an object"
    return found


def model_limit(folder: str) -> int:
    """Most tokens the model takes at once, by its config.json; 0 if that does not say."""
    try:
        return int(json.loads((Path(folder) / "config.json").read_text()).get("max_position_embeddings", 0))
    except (OSError, json.JSONDecodeError):
        return 0  # `check_model` says what is wrong


def check_length(folder: str, key: str, num_tokens: int) -> None:
    """The model must take that many tokens.

    Raises:
        ConfigError: it takes fewer.
    """
    limit = model_limit(folder)
    if num_tokens == 0:
        raise ConfigError(f"{key}: {folder}/config.json does not say what the model takes; write it here.")
    if limit and num_tokens > limit:
        raise ConfigError(f"{key} is {num_tokens}, but {folder} takes {limit} tokens at most.")


def check_policy(folder: str, key: str) -> None:
    """The policy must be trainable and have a tokenizer.

    Raises:
        ConfigError: it is of an unknown architecture, or files are missing.
    """
    architectures = check_model(folder, key).get("architectures") or ["none named"]
    assert isinstance(architectures, list), "a list in every config.json"
    if not set(architectures) & set(ARCHITECTURES):
        raise ConfigError(
            f"{key}: architecture {', '.join(architectures)} cannot be trained; known are "
            f"{', '.join(ARCHITECTURES)}."
        )
    Tokenizer(folder)


def check_store(config: RunConfig) -> None:
    """The checkpoint store must answer and must not be another run's.

    Raises:
        ConfigError: it cannot be used.
    """
    url = config.checkpoint.url
    try:
        check_owner(open_store(url, config.checkpoint.storage_options), url, config.run.id)
    except StoreUnreachable as error:
        raise ConfigError(
            f"checkpoint.url: {url} cannot be used from here ({error}). Check the address, "
            "checkpoint.storage_options and your credentials."
        ) from error


def check_origin(origin: FromCheckpointSection) -> None:
    """The checkpoint to start from must be there.

    Raises:
        ConfigError: it is not, or its store does not answer.
    """
    key = "run.from_checkpoint"
    try:
        checkpoints = Checkpoints(open_store(origin.url, origin.storage_options), 0)
        names = checkpoints.candidates().of_iteration(origin.iteration)
    except StoreUnreachable as error:
        raise ConfigError(f"{key}.url: {origin.url} cannot be used from here ({error}).") from error
    if not names:
        wanted = f"checkpoint of iteration {origin.iteration}" if origin.iteration else "committed checkpoint"
        raise ConfigError(f"{key}: {origin.url} has no {wanted}; look into its folder `manifests`.")


def _engines_installed(config: RunConfig) -> None:
    wanted = {config.rollout.engine, *(g.engine for g in config.genrms)}
    for engine, module in (("vllm", "vllm"), ("transformers", "transformers"), ("auto", "transformers")):
        if engine in wanted and importlib.util.find_spec(module) is None:
            raise ConfigError(f"rollout.engine: '{engine}' needs {module}; pip install 'yatt[engine]'.")
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("training needs megatron-core; pip install 'yatt[trainer]'.")
