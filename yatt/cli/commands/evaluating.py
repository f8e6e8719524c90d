"""`yatt eval`: finds the model, checks everything, samples and scores, prints the result."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from yatt import clock
from yatt.adapters.files.files import make_private
from yatt.adapters.machine.nvml import visible_count
from yatt.adapters.run_folder.run_config import load_run
from yatt.checkpoint.convert.export import export_as_hf, weight_bytes
from yatt.checkpoint.convert.hf_folder import check_target
from yatt.cli.finding import run_folder
from yatt.cli.progress import ByteProgress
from yatt.cli.sources import chosen_manifest, manifest_of, model_folder, run_source
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.config.site import load_site
from yatt.config.sizes import engine_node_gpus
from yatt.core.attempts.checkpoint_names import named_commit
from yatt.core.figures.evaluation import EvalResult, EvaluatedSample, encoded_result
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, ConfigError
from yatt.evaluation.evaluate import ended_by_signals, evaluate_here, private_folder
from yatt.evaluation.request import BareModel, EvalOptions, EvalSettings, bare_config, evaluation_settings
from yatt.evaluation.result import copy_result, read_result, read_samples, result_table
from yatt.evaluation.submitting import submit_evaluation, with_run_folder
from yatt.launch.checks.preflight import check_evaluation
from yatt.launch.folder.folder import refuse_strangers_run
from yatt.launch.node.device import device_of
from yatt.launch.resolve.data_files import made_folder, with_made_data
from yatt.launch.resolve.site_defaults import are_engines_here
from yatt.models.folder import CONFIG
from yatt.paths import RunPaths
from yatt.printable import printable, printable_lines

SHOWN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSource:
    """What is evaluated.

    Attributes:
        model: Hugging Face folder; of a checkpoint, that of the policy at the start of the run.
        shown: the folder that was named.
        run: run folder of the checkpoint to export; None: `model` itself is sampled.
        iteration: of the run whose policy `model` is.
        is_bare: there is no run file.
    """

    config: RunConfig
    model: Path
    shown: str
    run: Path | None = None
    iteration: int | None = None
    is_bare: bool = False


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluates, and prints the result.

    Raises:
        ConfigError: an argument, the model, the data or a function cannot be used; nothing was sampled.
        WorkerFailed: an engine ends again and again.
    """
    if arguments.out is not None:
        arguments.out = arguments.out.absolute()
        check_out(arguments.out)
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise ConfigError("--max-tokens: write 1 or more.")
    words = [word for word in arguments.more if "=" in word]
    options = _options(arguments, tuple(word for word in arguments.more if "=" not in word))
    source = _source(arguments, options)
    if arguments.submit is not None:
        return _submitted(arguments, source, options, words)
    device = device_of(source.config.launch.device if options.device == "auto" else options.device)
    gpus = visible_count(os.environ.get("CUDA_VISIBLE_DEVICES")) if device == "cuda" else 0
    if device == "cuda" and not gpus:
        raise ConfigError("CUDA_VISIBLE_DEVICES is empty: no GPU may be used; set it, or write --device cpu.")
    if 0 < gpus < options.nodes:
        raise ConfigError(f"--nodes {options.nodes}: this machine gives {gpus} GPUs; write fewer.")
    gpus //= max(1, options.nodes)
    settings = evaluation_settings(source.config, options, words, source.model, gpus)
    shown = Shower(is_quiet=arguments.json)
    with ended_by_signals(), private_folder(settings.config) as folder:
        config = with_made_data(settings.config, folder / "made", _earlier(source))
        check_evaluation(config, has_weights=source.run is None)
        out = folder / "result"
        with _model_of(source, arguments.iteration, folder) as (model, iteration):
            config = replace(
                config,
                run=replace(config.run, dir=str(folder / "run")),
                model=replace(config.model, path=str(model)),
                launch=replace(config.launch, device="cuda" if device == "cuda" else "cpu"),
            )
            evaluate_here(config, settings.request(source.shown, iteration, out), device, shown)
        shown.clear()
        return _told(arguments, settings, out)


def check_out(out: Path, says: str = "", cure: str = "write another folder") -> None:
    """Refuses a folder or file that cannot be made at the end, when it would cost all samples.

    Args:
        says: that nothing can be written there; default: of the argument --out.

    Raises:
        ConfigError: it exists and is not empty, or the folder that it would be in cannot be written.
    """
    check_target(out)
    try:
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent).cleanup()
    except OSError as error:
        says = says or f"--out {out}: nothing can be written in {out.parent}"
        raise ConfigError(f"{says} ({error.strerror}); {cure}.") from error


def _submitted(
    arguments: argparse.Namespace, source: EvalSource, options: EvalOptions, words: list[str]
) -> int:
    """Submits the evaluation as a job, which writes the result by itself.

    Raises:
        ConfigError: an argument, the model, the data, a function or the cluster does not fit; nothing was
            queued.
    """
    if arguments.out is None:
        raise ConfigError("--submit: write --out FOLDER, in which the result is to appear.")
    gpus = 0 if source.is_bare else engine_node_gpus(source.config)
    settings = evaluation_settings(source.config, options, words, source.model, gpus)
    site, config = load_site(arguments.submit), with_run_folder(settings.config, arguments.out)
    config = with_made_data(config, None, _earlier(source))
    check_evaluation(config, has_weights=source.run is None, engines_are_here=are_engines_here(site))
    if source.run is not None:
        make_private(made_folder(config.run.dir))
    with _model_of(source, arguments.iteration, made_folder(config.run.dir)) as (model, iteration):
        config = replace(config, model=replace(config.model, path=str(model)))
        submit_evaluation(config, site, settings.request(source.shown, iteration, arguments.out))
    return EXIT_FINISHED


def _told(arguments: argparse.Namespace, settings: EvalSettings, found: Path) -> int:
    """Prints the result before it writes files: a full disk must not cost it, nor a closed pipe the files.

    Args:
        found: folder of samples and result.
    """
    result = read_result(found)
    try:
        _show_result(arguments, settings, found, result)
    finally:
        if arguments.out is not None:
            copy_result(found, arguments.out)
    if arguments.out is not None:
        sys.stderr.write(printable(f"yatt: {arguments.out} has the samples and the result") + "\n")
    has_some = any(each.scored for each in result.overall.rewards.values())
    return EXIT_FINISHED if has_some else EXIT_FAILED


def _show_result(
    arguments: argparse.Namespace, settings: EvalSettings, found: Path, result: EvalResult
) -> None:
    if arguments.json:
        sys.stdout.write(encoded_result(result).decode() + "\n")
    else:
        sys.stdout.write(printable(f"{_place(result)}: {_in_words(settings)}") + "\n\n")
        sys.stdout.writelines(f"{printable(line)}\n" for line in result_table(result))
    sys.stdout.flush()
    _show_failures(settings, result.too_long, list(read_samples(found)))


def _earlier(source: EvalSource) -> list[Path]:
    """Returns folders of data that was made for the run, which may have been moved."""
    return [made_folder(run) for run in (source.config.run.dir, source.shown)]


def _place(result: EvalResult) -> str:
    return result.source if result.iteration is None else f"{result.source}, iteration {result.iteration}"


def _in_words(settings: EvalSettings) -> str:
    rollout = settings.config.rollout
    parts = [f"n={rollout.n}", f"temperature={settings.temperature:g}"]
    parts += [f"top_p={rollout.top_p:g}"] if rollout.top_p < 1 else []
    parts += [f"seed={settings.config.run.seed}", f"passed from a score of {settings.pass_at:g}"]
    return ", ".join(parts)


def _show_failures(settings: EvalSettings, too_long: int, samples: Sequence[EvaluatedSample]) -> None:
    """Tells the first reason of each kind of failure."""
    if too_long:
        limit = settings.config.data.max_prompt_tokens
        _say(f"{_counted(too_long, 'prompt')} longer than data.max_prompt_tokens {limit}: not used")
    failed = [sample.failed for sample in samples if sample.failed]
    if failed:
        _say(f"{_counted(len(failed), 'sample')} without a completion; the first: {failed[0]}")
    for name in settings.names:
        lost = [s.no_score[name] for s in samples if s.has_failed_score(name)]
        if lost:
            _say(f"{_counted(len(lost), 'sample')} without a score of '{name}'; the first: {lost[0]}")


def _counted(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _say(text: str) -> None:
    sys.stderr.write(f"yatt: note: {printable_lines(text)}\n")


class Shower:
    """Shows progress on a terminal, and sentences everywhere."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_shown = sys.stderr.isatty() and not is_quiet
        self._width, self._shown_s = 0, 0.0

    def progress(self, text: str) -> None:
        """Replaces the line of progress."""
        now_s = clock.monotonic_s()
        if self._is_shown and now_s - self._shown_s > SHOWN_S:
            self._shown_s = now_s
            sys.stderr.write("\r" + printable(text).ljust(self._width))
            sys.stderr.flush()
            self._width = len(text)

    def say(self, text: str) -> None:
        """Prints a sentence."""
        self.clear()
        _say(text)

    def clear(self) -> None:
        """Removes the line of progress."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


def _options(arguments: argparse.Namespace, data: tuple[str, ...]) -> EvalOptions:
    return EvalOptions(
        data=data,
        n=arguments.n,
        temperature=arguments.temperature,
        limit=arguments.limit or 0,
        nodes=arguments.nodes,
        may_span=arguments.nodes > 1 or arguments.submit is not None,
        seed=arguments.seed,
        ks=_ks(arguments.k),
        device=arguments.device,
        pass_at=1.0 if arguments.pass_at is None else arguments.pass_at,
    )


def _ks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise ConfigError(f"--k {text}: write numbers with commas between them, such as 1,4,8.") from error


def _source(arguments: argparse.Namespace, options: EvalOptions) -> EvalSource:
    """Returns what is evaluated, by the first argument.

    Raises:
        ConfigError: it is neither a run nor a model folder, or an option does not fit to it.
    """
    folder: Path = arguments.source
    is_model = (folder / CONFIG).is_file() and not RunPaths(folder).config.is_file()
    if is_model:
        if arguments.iteration:
            raise ConfigError(f"--iteration: {folder} is a model folder and has no checkpoints; remove it.")
        config, is_bare = _config_of_model(arguments, options), arguments.like is None
        return EvalSource(config=config, model=folder, shown=str(folder), is_bare=is_bare)
    found = run_folder(folder).absolute()
    if not found.is_dir():
        raise ConfigError(f"{folder} is neither a run nor a model folder: there is no such folder.")
    if not RunPaths(found).config.is_file():
        raise ConfigError(
            f"{folder} is neither a run folder (it has no config.yaml) nor a Hugging Face folder (it has no "
            f"{CONFIG})."
        )
    return _source_of_run(arguments, found)


def _config_of_model(arguments: argparse.Namespace, options: EvalOptions) -> RunConfig:
    bare = _bare(arguments)
    if arguments.like is None:
        return bare_config(arguments.source, bare, options.data)
    _refuse_bare(bare, "--like takes it from the run file")
    return _with_length(load_run_config([arguments.like], []), arguments)


def _source_of_run(arguments: argparse.Namespace, run: Path) -> EvalSource:
    _refuse_bare(_bare(arguments), "a run has its own; write section.key=value")
    paths = RunPaths(run)
    if not arguments.like:
        refuse_strangers_run(paths)
    own = load_run(paths)
    config = load_run_config([arguments.like], []) if arguments.like else own
    config = _with_length(config, arguments)
    if not arguments.iteration and paths.finished.exists() and (paths.model / CONFIG).is_file():
        total = own.trainer.total_iterations
        return EvalSource(config=config, model=paths.model, shown=str(run), iteration=total)
    return EvalSource(config=config, model=Path(own.model.path), shown=str(run), run=run)


def _bare(arguments: argparse.Namespace) -> BareModel:
    return BareModel(
        rewards=tuple(arguments.reward),
        prompt_key=arguments.prompt_key,
        ground_truth_key=arguments.ground_truth_key,
        max_tokens=arguments.max_tokens or 0,
    )


def _refuse_bare(bare: BareModel, why: str) -> None:
    for option, value in (
        ("--reward", bare.rewards),
        ("--prompt-key", bare.prompt_key),
        ("--ground-truth-key", bare.ground_truth_key),
    ):
        if value:
            raise ConfigError(f"{option} is for a model folder: {why}.")


def _with_length(config: RunConfig, arguments: argparse.Namespace) -> RunConfig:
    if not arguments.max_tokens:
        return config
    return replace(config, rollout=replace(config.rollout, max_response_tokens=arguments.max_tokens))


@contextmanager
def _model_of(source: EvalSource, iteration: int, folder: Path) -> Iterator[tuple[Path, int | None]]:
    """Gives the model folder to sample, and the iteration of its run; exports the checkpoint of a run."""
    if source.run is None:
        yield source.model.absolute(), source.iteration
        return
    where = run_source(source.run)
    name = chosen_manifest(where, iteration)
    target = folder / f"policy-{named_commit(name).iteration}"
    progress = ByteProgress("export", weight_bytes(manifest_of(where, name)))
    try:
        if not target.exists():  # it appears when it is whole
            export_as_hf(where.checkpoints, name, model_folder(where, None, None), target, progress.tick)
    finally:
        progress.clear()
    yield target, named_commit(name).iteration
