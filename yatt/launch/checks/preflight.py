"""Checks that run before anything starts: models, data, templates, functions, folders.

Every check raises ConfigError; the errors are collected, so that one attempt shows all mistakes.
"""

import ast
import contextlib
import importlib.util
import symtable
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from yatt.adapters.files.patience import is_passing
from yatt.adapters.machine.descriptors import hard_limit
from yatt.adapters.net.judge_api import check_api
from yatt.adapters.run_folder.ledger import known_commit
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import has_value_head, prefix_of
from yatt.checkpoint.commit.ownership import check_owner
from yatt.checkpoint.store.access import check_access, check_parent, cure_of
from yatt.checkpoint.store.store import folder_of, is_folder, open_store
from yatt.config.doubts import doubtful_settings
from yatt.config.engine_keys import PASSED, unknown_option
from yatt.config.schema import AlgorithmSection, GenRMSection, LoggingSection, RewardSection, RunConfig
from yatt.config.sections.operation import TRACKERS
from yatt.config.widths import engine_sections
from yatt.control.gpus.processes.open_files import descriptors_of
from yatt.control.node import Node
from yatt.core.gpus.placement import placement_of
from yatt.errors import CheckpointError, ConfigError, Finding, StoreUnreachable
from yatt.judging.judging import check_asked
from yatt.judging.reading import check_verdict
from yatt.launch.checks.input_trial import check_inputs
from yatt.launch.checks.judge_check import (
    check_engine_model,
    check_judge,
    check_structured,
    check_teacher,
    refuse_turned_experts,
)
from yatt.launch.checks.model_check import check_length, check_model
from yatt.launch.checks.planned_memory import memory_doubts
from yatt.launch.checks.policy_check import check_policy
from yatt.launch.checks.score_trial import TriedFunction, try_scores
from yatt.launch.checks.seeing_check import refuse_blind
from yatt.obs.trackers.tracker import FACTORY
from yatt.paths import RunPaths
from yatt.records.episode import ENVIRONMENT
from yatt.reward.functions import is_builtin, load_reward
from yatt.reward.signature import EPISODE, expected_call
from yatt.reward.trial import try_function
from yatt.reward.ways import try_way

MAX_SHOWN = 4000
"""Characters of a mistake that are shown: a file of a stranger may have names of any length."""


def check_function(config: RunConfig, section: RewardSection | GenRMSection) -> None:
    """Checks a function: a built-in one is looked up here, a user's file is loaded in a separate process."""
    if isinstance(section, RewardSection) and is_builtin(section.path):
        load_reward(section)
        return
    key = "genrms" if isinstance(section, GenRMSection) else "rewards"
    try_function(
        Path(section.path).absolute(), section.function, f"{key}[{section.name}]",
        expected_call(config, section), limit_s=config.launch.start_timeout_s,
    )  # fmt: skip


def check_environment(config: RunConfig) -> None:
    """Loads the environment's function in a separate process."""
    section = config.environment
    try_function(
        Path(section.path).absolute(),
        section.function,
        ENVIRONMENT,
        EPISODE,
        limit_s=config.launch.start_timeout_s,
    )


def check_algorithm(section: AlgorithmSection) -> None:
    """Reads the user's file, but does not import it: torch may be missing where a run is submitted."""
    path = Path(section.path).absolute()
    if section.factory not in _names_of(path, "algorithm.path"):
        raise ConfigError(f"{path} defines no function {section.factory}.", key="algorithm.factory")


def check_trackers(section: LoggingSection) -> None:
    """Reads the files of the user's trackers, but does not import them: only the follower needs libraries."""
    for tracker in section.trackers:
        if tracker not in TRACKERS:
            path = Path(tracker).absolute()
            if FACTORY not in _names_of(path, "logging.trackers"):
                raise ConfigError(f"{path} defines no function {FACTORY}.", key="logging.trackers")


def _names_of(path: Path, key: str) -> set[str]:
    """Returns the names that a user's file binds at its top level."""
    try:
        names = symtable.symtable(path.read_text(), str(path), "exec").get_symbols()
    except OSError as error:
        gone = str(path) if isinstance(error, FileNotFoundError | NotADirectoryError) else ""
        raise ConfigError(f"{path}: {error.strerror}.", key=key, missing=gone) from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path}: {error}.", key=key) from error
    return {name.get_name() for name in names if name.is_assigned() or name.is_imported()}


def check_preflight(
    config: RunConfig, *, runs_here: bool = True, engines_are_here: bool = True
) -> list[TriedFunction]:
    """Checks the files, functions and stores that the config names; then calls the functions on a few rows.

    Args:
        runs_here: the run's processes start on this machine, so its limits apply.
        engines_are_here: they use this interpreter's libraries, not those of a container. Without them the
            functions are not called.

    Returns:
        What the functions have given.

    Raises:
        ConfigError: all mistakes, one per line; its cause is a transient error if all of them are transient.
    """
    if not config.trains:
        raise ConfigError(f"run.kind: evaluation: {config.run.dir} is for `yatt eval`: repeat that command.")
    checks = list(_checks(config))
    if engines_are_here:
        checks += [partial(_engines_installed, config), partial(check_engine_args, config)]
        checks.append(_trainer_installed)
    if runs_here:
        checks.append(partial(check_descriptors, config, hard_limit()))
    _refuse_faults(checks)
    tried: list[TriedFunction] = []
    if engines_are_here:
        _refuse_faults([lambda: tried.extend(try_scores(config))])
    return tried


def check_evaluation(config: RunConfig, *, has_weights: bool, engines_are_here: bool = True) -> None:
    """Checks what an evaluation needs: as `check_preflight`, without what only training needs.

    Args:
        has_weights: the folder `model.path` is sampled; else only its tokenizer is used.
        engines_are_here: as there.

    Raises:
        ConfigError: see `check_preflight`.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    keys = "data.max_prompt_tokens + rollout.max_response_tokens"
    engine, tp_size, path = config.rollout.engine, config.rollout.tp_size, config.model.path
    folder: list[Callable[[], object]] = [partial(check_model, path, "model.path")]
    if has_weights:
        turned = partial(refuse_turned_experts, path, "model.path")
        folder = [partial(check_engine_model, path, "model", engine, tp_size), turned]
    libraries: list[Callable[[], object]] = [
        partial(_engines_installed, config),
        partial(check_engine_args, config),
    ]
    _refuse_faults(
        [
            *folder,
            partial(check_length, path, keys, longest),
            partial(check_inputs, replace(config, data=replace(config.data, val_files=()))),
            *_judges_and_user_code(config),
            *(libraries if engines_are_here else ()),
        ]
    )


def _refuse_faults(checks: Iterable[Callable[[], object]]) -> None:
    """Raises ConfigError with the mistakes that the checks find."""
    faults = [fault for check in checks if (fault := _fault(check)) is not None]
    if faults:
        passing = faults[0].__cause__ if all(map(is_passing, faults)) else None
        found = [_cut(each) for fault in faults for each in fault.findings]
        raise ConfigError(heading="nothing was started:", findings=found) from passing


def _cut(found: Finding) -> Finding:
    says, half = found.says, MAX_SHOWN // 2
    return found if len(says) <= MAX_SHOWN else replace(found, says=f"{says[:half]} ... {says[-half:]}")


def show_doubts(config: RunConfig) -> None:
    """Prints notes about settings that are allowed but rarely intended, once, when a run is started."""
    for doubt in (*doubtful_settings(config), *memory_doubts(config)):
        sys.stderr.write(f"yatt: note: {doubt.in_words()}\n")


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
    yield partial(check_inputs, config)
    yield from _judges_and_user_code(config)
    if config.checkpoint.url:
        yield partial(check_store, config)
    if config.run.from_checkpoint.url and known_commit(RunPaths(Path(config.run.dir))) == (0, 0):
        yield partial(check_origin, config)


def _judges_and_user_code(config: RunConfig) -> Iterator[Callable[[], object]]:
    for index, genrm in enumerate(config.genrms):
        key = f"genrms[{index}]"
        yield from _answering_checks(config, genrm, key)
        yield from _question_checks(config, genrm, key)
    for reward in config.rewards:
        yield partial(check_function, config, reward)
    if config.environment.path:
        yield partial(check_environment, config)
    if config.algorithm.path:
        yield partial(check_algorithm, config.algorithm)
    yield partial(check_trackers, config.logging)


def _answering_checks(config: RunConfig, genrm: GenRMSection, key: str) -> Iterator[Callable[[], object]]:
    """Yields the checks of what answers a GenRM's questions: a model, or a service."""
    if genrm.api.url:
        yield partial(check_api, genrm, f"{key}.api")
        if genrm.sees != "none":
            yield partial(refuse_blind, config, genrm, key)
        return
    if genrm.has_engine:
        yield partial(check_judge, config, genrm, key)
    limit = f"{key}.max_model_tokens"
    yield partial(check_length, config.judge_folder(genrm), limit, genrm.max_model_tokens)
    if genrm.kind == "teacher":
        yield partial(check_teacher, config, genrm, key)


def _question_checks(config: RunConfig, genrm: GenRMSection, key: str) -> Iterator[Callable[[], object]]:
    """Yields the checks of what a GenRM is asked, and of how its answer is read."""
    if genrm.asks_by_client:
        yield partial(check_function, config, genrm)
    elif genrm.path:
        yield partial(try_way, config, genrm)
    if genrm.template:
        yield partial(check_asked, genrm, f"{key}.template")
    if genrm.template and genrm.kind == "text" and genrm.judging.asks == "each":
        yield partial(check_verdict, genrm.verdict, f"{key}.verdict", genrm.judging.by)
    if genrm.template and genrm.kind == "text":
        yield partial(check_structured, config, genrm, key)


def check_store(config: RunConfig) -> None:
    """Checks that the checkpoint store belongs to no other run and allows all that a run does.

    Raises:
        ConfigError: the store cannot be used.
    """
    checkpoint, url = config.checkpoint, config.checkpoint.url
    try:
        store = open_store(url, checkpoint.storage_options, checkpoint.stall_s)
        root = folder_of(url)
        if not is_folder(url) or root.is_dir():
            check_access(store, url)
        else:  # a folder that is not mounted must not be made: the launcher waits for it
            check_parent(root)
        check_owner(store, url, config.run.id)
    except (StoreUnreachable, ConfigError, CheckpointError) as error:
        if is_passing(error) and RunPaths(Path(config.run.dir)).config.exists():
            return  # the address was right when the run was started: the launcher will wait
        if isinstance(error, ConfigError):
            raise
        says = f"{url} cannot be used from this machine ({error}). {cure_of(error)}"
        raise ConfigError(says, key="checkpoint.url") from error


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
        faults = _read_faults(checkpoints, names, is_scored=config.run.kind == "reward_model")
    except (StoreUnreachable, CheckpointError) as error:
        if is_passing(error) and RunPaths(Path(config.run.dir)).config.exists():
            return  # as for the run's own store
        says = f"{origin.url} cannot be used from this machine ({error})."
        raise ConfigError(says, key=f"{key}.url") from error
    if not names:
        wanted = f"checkpoint of iteration {origin.iteration}" if origin.iteration else "committed checkpoint"
        gone = origin.url if is_folder(origin.url) and not folder_of(origin.url).exists() else ""
        says = f"{origin.url} has no {wanted}; list its folder `manifests`."
        raise ConfigError(says, key=key, missing=gone)
    if len(faults) == len(names):
        raise ConfigError(f"no checkpoint in {origin.url} can be used: {'; '.join(faults)}.", key=key)


def _read_faults(checkpoints: Checkpoints, names: tuple[str, ...], *, is_scored: bool) -> list[str]:
    """Returns why the newest checkpoints cannot be used, up to the first that can, by their manifests and the
    names of their files: a request for each file would take minutes in a large one."""
    faults = list[str]()
    for name in names:
        try:
            manifest = checkpoints.read(name)
            there = checkpoints.store.names(prefix_of(manifest)) if manifest.files else ()
        except CheckpointError as error:
            faults.append(str(error))
            continue
        if has_value_head(manifest) is not is_scored:
            cure = "`yatt ckpt export` makes a folder of it, which model.path may name"
            of_other = f"a policy, without a value head; {cure}" if is_scored else "a reward model"
            faults.append(f"{name} is of {of_other}")
            continue
        missing = {file.path.rpartition("/")[2] for file in manifest.files}.difference(there)
        if not missing:
            break
        faults.append(f"{name}: {prefix_of(manifest)}/{min(missing)} is missing")
    return faults


def check_descriptors(config: RunConfig, limit: int) -> None:
    """Checks that every controller may open as many file descriptors as its node needs.

    Args:
        limit: hard limit of file descriptors per process on this machine.

    Raises:
        ConfigError: a controller needs more.
    """
    placement, paths = placement_of(config), RunPaths(Path(config.run.dir))
    kinds = {0, len(placement.trainer_nodes) - 1, config.launch.nodes - 1}  # one node of each kind
    nodes = [
        Node(config=config, paths=paths, placement=placement, attempt=0, index=index, host="", device="cpu")
        for index in sorted(kinds)
    ]
    needed = max(map(descriptors_of, nodes))
    if needed > limit:
        raise ConfigError(
            f"with {config.launch.nodes} nodes a controller needs {needed} file descriptors, but `ulimit "
            f"-Hn` is {limit} here. Raise the hard limit (limits.conf), or write fewer nodes.",
            key="launch.nodes",
        )


def _engines_installed(config: RunConfig) -> None:
    wanted = {config.rollout.engine, *(g.engine for g in config.engine_genrms)}
    for engine, module in (("vllm", "vllm"), ("transformers", "transformers"), ("auto", "transformers")):
        if engine in wanted and importlib.util.find_spec(module) is None:
            raise ConfigError(f"'{engine}' needs {module}; pip install 'yatt[engine]'.", key="rollout.engine")


def check_engine_args(config: RunConfig) -> None:
    """Checks that the vLLM that is installed here has the options of `engine_args`. Its source is read, since
    an import takes seconds and loads torch.

    Raises:
        ConfigError: it lacks one.
    """
    wanted = [
        (f"{section}.engine_args.{name}", name)
        for section, engine in engine_sections(config)
        for name in engine.engine_args
    ]
    known = _vllm_options() if wanted else frozenset()
    for key, name in wanted:
        if known and name not in known:
            raise ConfigError(unknown_option(name, known & PASSED), key=key)


def _vllm_options() -> frozenset[str]:
    """Returns the fields of vLLM's EngineArgs; empty if they cannot be read."""
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or ()) if found else ():
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            tree = ast.parse((Path(folder) / "engine" / "arg_utils.py").read_text())
            classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
            items = [item for node in classes if node.name == "EngineArgs" for item in node.body]
            names = [item.target for item in items if isinstance(item, ast.AnnAssign)]
            return frozenset(name.id for name in names if isinstance(name, ast.Name))
    return frozenset()


def _trainer_installed() -> None:
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("training needs megatron-core; pip install 'yatt[trainer]'.")
