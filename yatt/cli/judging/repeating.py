"""`yatt judge again`: a second opinion on what a run has recorded."""

import argparse
import os
import re
import sys
from pathlib import Path

from yatt.adapters.files.files import make_within
from yatt.adapters.inputs.dataset import RowFiles
from yatt.adapters.run_folder.run_config import load_run
from yatt.cli.commands.evaluating import Shower, check_out
from yatt.cli.judging.parts import (
    PAGE,
    RESULT,
    asked_with,
    device_here,
    place_of_genrm,
    policy_note,
    result_bytes,
    result_line,
    write_result_folder,
)
from yatt.config.load import load_command, load_over
from yatt.config.schema import GenRMSection, RunConfig
from yatt.errors import EXIT_BELOW, EXIT_FAILED, EXIT_FINISHED, ConfigError
from yatt.evaluation.again import (
    AGAIN_MEANINGS,
    AgainResult,
    Opinion,
    RecordedGroups,
    again_result,
    given_again,
    recorded_groups,
)
from yatt.evaluation.evaluate import ended_by_signals, private_folder
from yatt.evaluation.judge_result import quality_table
from yatt.evaluation.judging import Device, JudgeOptions, judge_settings, judged_samples, named_judge
from yatt.evaluation.request import EvalSettings
from yatt.obs.page.page_file import render_page
from yatt.paths import RunPaths
from yatt.printable import printable

FOLDER = "again"
MOST_NAME_BYTES = 200
"""A temporary name beside it is longer, and most filesystems have 255."""


def judge_again(arguments: argparse.Namespace) -> int:
    """Asks a GenRM anew, writes RUN/again/NAME and prints what has changed.

    Raises:
        ConfigError: an argument, the run or its recorded rollouts cannot be used; nothing was asked.
        WorkerFailed: an engine ends again and again.
    """
    if (most := arguments.exit_above) is not None and not 0 <= most <= 1:
        raise ConfigError("--exit-above: write a share from 0 to 1.")
    first, last = iteration_range(arguments.iterations)
    paths = RunPaths(arguments.run.absolute())
    paths.check_is_run()
    own = load_run(paths)
    then = Opinion(name=judge_of_run(own, arguments.judge), config=own)
    new = _new_config(paths, own, arguments)
    genrm = _asked_now(new, then.name)
    check_repeatable(own, genrm)
    recorded = recorded_groups(paths, first, last).judged_by(then.name)
    if not recorded.groups:
        raise ConfigError(f"{paths.root}: genrms[{then.name}] judged no group of these iterations.")
    out = target_again(paths, arguments.name or genrm.name)
    device, gpus = device_here(new, arguments.device)
    settings = settings_again(new, genrm, recorded, arguments.device, gpus)
    shown = Shower(is_quiet=arguments.json)
    files = settings.config.data.train_files
    with ended_by_signals(), private_folder(settings.config) as folder:
        rows = RowFiles(files, settings.config.data, folder / "rows")
        given = given_again(recorded, rows, files)
        index = place_of_genrm(new, genrm)
        samples = judged_samples(settings, given, folder, device, shown, index)
        rows.close()
    shown.clear()
    told = asked_with(genrm, settings.config)
    result = again_result(recorded, samples, then, Opinion(name=genrm.name, config=new), paths.root, told)
    try:
        _show(arguments, result, policy_note(new, genrm.name))
    finally:  # also where nobody reads the output any more
        write_result_folder(
            out, {RESULT: result_bytes(result)} | ({PAGE: again_page(result)} if arguments.html else {})
        )
    sys.stderr.write(printable(f"yatt: {out} has the result") + "\n")
    changed = result.figures.get("changed")
    if changed is None or not any(genrm.name in sample.scores for sample in samples):
        return EXIT_FAILED
    return EXIT_BELOW if most is not None and changed.value > most else EXIT_FINISHED


def settings_again(
    new: RunConfig, genrm: GenRMSection, recorded: RecordedGroups, device: Device, gpus: int
) -> EvalSettings:
    """Returns the evaluation of a GenRM about recorded groups, whose data rows have the run's pictures.

    Raises:
        ConfigError: a value is impossible; names it and what to write.
    """
    options = JudgeOptions(
        data=new.data.train_files,
        device=device,
        size=max(len(group.samples) for group in recorded.groups),
        media_store=new.data.media_store,
    )
    return judge_settings(new, genrm, options, gpus)


def iteration_range(text: str) -> tuple[int, int]:
    """Returns the first and the last iteration of A..B; 0: no limit.

    Raises:
        ConfigError: it is none.
    """
    if not text:
        return 0, 0
    match = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9})?)?", text)
    if match is None:
        raise ConfigError(f"--iterations {text}: write A..B, A.. or one iteration.")
    first = int(match[1])
    if not first:
        raise ConfigError(f"--iterations {text}: the first iteration is 1.")
    last = int(match[2]) if match[2] else 0 if ".." in text else first
    if last and last < first:
        raise ConfigError(f"--iterations {text}: write the smaller number first.")
    return first, last


def judge_of_run(own: RunConfig, name: str) -> str:
    """Returns the name of the run's GenRM whose scores are compared.

    Raises:
        ConfigError: it has none, or several.
    """
    if name:
        return named_judge(own, name).name
    known = [genrm.name for genrm in own.genrms if genrm.kind != "teacher"]
    if len(known) != 1:
        has = f"several GenRMs, {', '.join(known)}: write --judge NAME" if known else "no GenRM that judges"
        raise ConfigError(f"{own.run.dir} has {has}.")
    return known[0]


def _new_config(paths: RunPaths, own: RunConfig, arguments: argparse.Namespace) -> RunConfig:
    """Returns the run's config, with the GenRMs of a file and changes."""
    if arguments.genrm is None:
        return load_over(own, arguments.more, lambda _: ())
    return load_command(paths.config, [str(arguments.genrm), *arguments.more], lambda _: ())


def _asked_now(new: RunConfig, name: str) -> GenRMSection:
    """Returns the GenRM that is asked: the one of this name, or the only one.

    Raises:
        ConfigError: there are others only.
    """
    names = [genrm.name for genrm in new.genrms]
    return named_judge(new, names[0] if len(names) == 1 else name)


def check_repeatable(own: RunConfig, genrm: GenRMSection) -> None:
    """Refuses a GenRM that was shown turns of an environment, which rows of completions do not have.

    Raises:
        ConfigError: it is one.
    """
    is_shown = genrm.path or (genrm.kind == "scalar" and genrm.chat)
    if own.environment.path and is_shown:
        what = "is a function" if genrm.path else "is shown conversations (chat: true)"
        raise ConfigError(
            f"genrms[{genrm.name}] {what}, and the run has an environment, whose turns it was given; they "
            "cannot be given again. Name another GenRM."
        )


def target_again(paths: RunPaths, name: str) -> Path:
    """Returns the new folder of the result, and makes the one that it is to be in.

    Raises:
        ConfigError: the name is impossible or taken, or nothing can be written there.
    """
    if "/" in name or name.startswith(".") or not name.isprintable():
        raise ConfigError(f"--name {name}: write a name without / that does not begin with a dot.")
    if len(os.fsencode(name)) > MOST_NAME_BYTES:
        raise ConfigError(f"--name {name}: write a name of at most {MOST_NAME_BYTES} bytes.")
    out = paths.root / FOLDER / name
    if out.parent.is_symlink():
        raise ConfigError(f"{out.parent} is a link; remove it: results are written into the run folder.")
    make_within(paths.root, out.parent)
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; write --name, or remove it.")
    check_out(out, f"{out}: nothing can be written in {out.parent}", "make it writable")
    return out


def _show(arguments: argparse.Namespace, result: AgainResult, note: str) -> None:
    if arguments.json:
        sys.stdout.write(result_line(result) + "\n")
    else:
        first, last = result.iterations
        head = f"{result.by} instead of {result.judge}" if result.by != result.judge else result.judge
        about = f"{head}: {result.samples} samples of {result.groups} groups, iterations {first} to {last}"
        sys.stdout.write(printable(about) + "\n\n")
        sys.stdout.writelines(f"{printable(line)}\n" for line in quality_table(result.figures))
    sys.stdout.flush()
    if note:
        sys.stderr.write(f"yatt: note: {printable(note)}\n")
    if result.left_out:
        which = "groups that it did not judge, or that are not recorded whole"
        sys.stderr.write(f"yatt: note: {result.left_out} samples are of {which}\n")
    if "advantages" not in result.figures:
        why = result.no_advantages or "no advantages: of rewards alone they are not known, or all are equal"
        sys.stderr.write(f"yatt: note: {printable(why)}\n")


def again_page(result: AgainResult) -> bytes:
    """Returns the page of a result."""
    page = render_page(
        "again.html.j2",
        f"{result.judge}: yatt judge again",
        result=result,
        figures=[(name, each, AGAIN_MEANINGS[name]) for name, each in result.figures.items()],
    )
    return page.encode(errors="replace")
