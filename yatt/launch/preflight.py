"""Checks that run before anything starts: models, data, templates, functions, folders.

Every check raises ConfigError; the errors are collected, so that one attempt shows all mistakes.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from yatt.adapters.dataset import check_rows
from yatt.adapters.descriptors import hard_limit
from yatt.adapters.judge_api import check_api
from yatt.adapters.ledger import known_commit
from yatt.adapters.patience import is_passing
from yatt.adapters.tokenizer import Tokenizer
from yatt.checkpoint.access import check_access, check_parent, cure_of
from yatt.checkpoint.manifest import Checkpoints
from yatt.checkpoint.ownership import check_owner
from yatt.checkpoint.store import is_folder, open_store
from yatt.config.doubts import doubts
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.gpus.open_files import descriptors_of
from yatt.control.node import Node
from yatt.core.placement import place
from yatt.core.verdict import check_template, check_verdict
from yatt.errors import ConfigError, StoreUnreachable
from yatt.launch.planned_memory import memory_doubts
from yatt.launch.policy_check import check_policy
from yatt.launch.user_code import check_algorithm, check_environment, check_function
from yatt.paths import RunPaths


def preflight(config: RunConfig, *, runs_here: bool = True, engines_are_here: bool = True) -> None:
    """Checks the files, functions and stores that the config names.

    Args:
        runs_here: the run's processes start on this machine, so its limits apply.
        engines_are_here: they use this interpreter's libraries, not those of a container.

    Raises:
        ConfigError: all mistakes, one per line; its cause is a transient error if all of them are transient.
    """
    checks = list(_checks(config))
    if engines_are_here:
        checks.append(partial(_engines_installed, config))
    if runs_here:
        checks.append(partial(check_descriptors, config, hard_limit()))
    faults = [fault for check in checks if (fault := _fault(check)) is not None]
    if faults:
        listed = "\n".join(f"  {line}" for fault in faults for line in str(fault).splitlines())
        passing = faults[0].__cause__ if all(map(is_passing, faults)) else None
        raise ConfigError(f"nothing was started:\n{listed}") from passing


def show_doubts(config: RunConfig) -> None:
    """Prints notes about settings that are allowed but rarely intended, once, when a run is started."""
    for key, says in (*doubts(config), *memory_doubts(config)):
        sys.stderr.write(f"yatt: note: {key} {says}\n")


def _fault(check: Callable[[], object]) -> ConfigError | None:
    try:
        check()
    except ConfigError as error:
        return error
    return None


def _checks(config: RunConfig) -> Iterator[Callable[[], object]]:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    yield partial(check_model, config.model.path, "model.path")
    yield partial(check_policy, config)
    yield partial(
        check_length, config.model.path, "data.max_prompt_tokens + rollout.max_response_tokens", longest
    )
    yield partial(_check_data, config, config.data.train_files)
    if config.data.val_files:
        yield partial(_check_data, config, config.data.val_files)
    yield from _judges_and_user_code(config)
    if config.checkpoint.url:
        yield partial(check_store, config)
    if config.run.from_checkpoint.url and known_commit(RunPaths(Path(config.run.dir))) == (0, 0):
        yield partial(check_origin, config)


def _judges_and_user_code(config: RunConfig) -> Iterator[Callable[[], object]]:
    for index, genrm in enumerate(config.genrms):
        key = f"genrms[{index}]"
        if genrm.has_engine:
            yield partial(check_model, genrm.model, f"{key}.model")
            yield partial(check_length, genrm.model, f"{key}.max_model_tokens", genrm.max_model_tokens)
            yield partial(Tokenizer, genrm.model)
        else:
            yield partial(check_api, genrm, f"{key}.api")
        if genrm.template:
            yield partial(check_template, genrm.template, f"{key}.template", genrm.judging)
            yield partial(check_verdict, genrm.verdict, f"{key}.verdict", genrm.judging)
            yield partial(check_structured, genrm, key)
        else:
            yield partial(check_function, config, genrm)
    for reward in config.rewards:
        yield partial(check_function, config, reward)
    if config.environment.path:
        yield partial(check_environment, config)
    if config.algorithm.path:
        yield partial(check_algorithm, config.algorithm)


def _check_data(config: RunConfig, files: tuple[str, ...]) -> None:
    """Checks that every row can be used, and has a ground truth if something needs one."""
    counts, data = check_rows(files, config.data), config.data
    if not data.ground_truth_key or not counts.without_truth or not _needs_truth(config):
        return
    if counts.without_truth == counts.rows:
        raise ConfigError(
            f"data.ground_truth_key: no row of {', '.join(files)} has a column '{data.ground_truth_key}', "
            "which reward functions and templates get as ground_truth; name the right column, or write "
            "ground_truth_key: '' if there is none."
        )
    sys.stderr.write(
        f"yatt: note: {counts.without_truth} of {counts.rows} rows of {', '.join(files)} have no "
        f"'{data.ground_truth_key}': their ground_truth is None.\n"
    )


def _needs_truth(config: RunConfig) -> bool:
    return (
        any(reward.style == "verl" for reward in config.rewards)
        or any(genrm.pairs == "ground_truth" and genrm.judging == "pairwise" for genrm in config.genrms)
        or any(genrm.path for genrm in config.genrms)
        or any("{ground_truth}" in genrm.template for genrm in config.genrms)
    )


def check_structured(genrm: GenRMSection, key: str) -> None:
    """Checks that the engine can keep to `verdict.choices` or `verdict.json_schema`.

    Raises:
        ConfigError: it cannot.
    """
    is_structured = bool(genrm.verdict.choices or genrm.verdict.json_schema)
    if genrm.has_engine and is_structured and genrm.engine not in ("auto", "vllm"):
        raise ConfigError(
            f"{key}.verdict: choices and json_schema need engine vllm, not {genrm.engine}; write a pattern."
        )


def check_model(folder: str, key: str) -> dict[str, object]:
    """Returns the folder's config.json.

    Raises:
        ConfigError: the folder is not a Hugging Face model.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            f"{key}: there is no folder {folder}. Write the path of a Hugging Face model on this machine."
        )
    found = _config_json(folder)
    if found is None:
        raise ConfigError(
            f"{key}: {root / 'config.json'} is not a readable JSON object; save the model again."
        )
    if not any(root.glob("*.safetensors")):
        raise ConfigError(f"{key}: {folder} has no *.safetensors; save the model with save_pretrained.")
    return found


def _config_json(folder: str) -> dict[str, object] | None:
    """Returns the folder's config.json, None if it cannot be read or is not an object.

    Raises:
        OSError: the error is transient.
    """
    try:
        found = json.loads((Path(folder) / "config.json").read_bytes())
    except OSError as error:
        if is_passing(error):
            raise
        return None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def model_limit(folder: str) -> int:
    """Returns the model's context length by its config.json; 0 if it is not set there."""
    limit = (_config_json(folder) or {}).get("max_position_embeddings", 0)
    return limit if type(limit) is int and limit > 0 else 0  # `check_model` reports a wrong value


def check_length(folder: str, key: str, num_tokens: int) -> None:
    """Checks that the model's context length is at least `num_tokens`.

    Raises:
        ConfigError: it is shorter.
    """
    limit = model_limit(folder)
    if num_tokens == 0:
        raise ConfigError(
            f"{key}: {folder}/config.json has no max_position_embeddings; write the context length here."
        )
    if limit and num_tokens > limit:
        raise ConfigError(f"{key} is {num_tokens}, but {folder} takes {limit} tokens at most.")


def check_store(config: RunConfig) -> None:
    """Checks that the checkpoint store belongs to no other run and allows all that a run does.

    Raises:
        ConfigError: the store cannot be used.
    """
    checkpoint, url = config.checkpoint, config.checkpoint.url
    try:
        store = open_store(url, checkpoint.storage_options, checkpoint.stall_s)
        root = Path(url.removeprefix("file://"))
        if not is_folder(url) or root.is_dir():
            check_access(store, url)
        else:  # a folder that is not mounted must not be made: the launcher waits for it
            check_parent(root)
        check_owner(store, url, config.run.id)
    except (StoreUnreachable, ConfigError) as error:
        if is_passing(error) and RunPaths(Path(config.run.dir)).config.exists():
            return  # the address was right when the run was started: the launcher will wait
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"checkpoint.url: {url} cannot be used from this machine ({error}). {cure_of(error)}"
        ) from error


def check_origin(config: RunConfig) -> None:
    """Checks that the checkpoint to start from exists.

    Raises:
        ConfigError: it does not, or its store does not answer.
    """
    key, origin = "run.from_checkpoint", config.run.from_checkpoint
    try:
        checkpoints = Checkpoints(
            open_store(origin.url, origin.storage_options, config.checkpoint.stall_s), 0
        )
        names = checkpoints.candidates().of_iteration(origin.iteration)
    except StoreUnreachable as error:
        if error.is_passing and RunPaths(Path(config.run.dir)).config.exists():
            return  # as for the run's own store
        raise ConfigError(f"{key}.url: {origin.url} cannot be used from this machine ({error}).") from error
    if not names:
        wanted = f"checkpoint of iteration {origin.iteration}" if origin.iteration else "committed checkpoint"
        raise ConfigError(f"{key}: {origin.url} has no {wanted}; list its folder `manifests`.")


def check_descriptors(config: RunConfig, limit: int) -> None:
    """Checks that every controller may open as many file descriptors as its node needs.

    Args:
        limit: hard limit of file descriptors per process on this machine.

    Raises:
        ConfigError: a controller needs more.
    """
    placement, paths = place(config), RunPaths(Path(config.run.dir))
    kinds = {0, len(placement.trainer_nodes) - 1, config.launch.nodes - 1}  # one node of each kind
    nodes = [
        Node(
            config=config, paths=paths, placement=placement, attempt=0, index=index, host="", device="cpu"
        )
        for index in sorted(kinds)
    ]  # fmt: skip
    needed = max(map(descriptors_of, nodes))
    if needed > limit:
        raise ConfigError(
            f"launch.nodes: with {config.launch.nodes} nodes a controller needs {needed} file descriptors, "
            f"but `ulimit -Hn` is {limit} here. Raise the hard limit (limits.conf), or write fewer nodes."
        )


def _engines_installed(config: RunConfig) -> None:
    wanted = {config.rollout.engine, *(g.engine for g in config.engine_genrms)}
    for engine, module in (("vllm", "vllm"), ("transformers", "transformers"), ("auto", "transformers")):
        if engine in wanted and importlib.util.find_spec(module) is None:
            raise ConfigError(f"rollout.engine: '{engine}' needs {module}; pip install 'yatt[engine]'.")
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("training needs megatron-core; pip install 'yatt[trainer]'.")
