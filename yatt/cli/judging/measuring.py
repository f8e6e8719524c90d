"""`yatt judge`: has a GenRM judge given completions, and says how good it is."""

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from yatt.cli.commands.evaluating import Shower, check_out
from yatt.cli.judging.parts import (
    PAGE,
    RESULT,
    asked_with,
    config_of,
    device_here,
    place_of_genrm,
    policy_note,
    result_bytes,
    result_line,
    write_result_folder,
)
from yatt.config.schema import RunConfig
from yatt.errors import EXIT_BELOW, EXIT_FAILED, EXIT_FINISHED, ConfigError
from yatt.evaluation.evaluate import ended_by_signals, private_folder
from yatt.evaluation.judge_result import (
    MEANINGS,
    JudgedExample,
    JudgeResult,
    judge_result,
    order_advice,
    quality_table,
)
from yatt.evaluation.judging import JudgeOptions, asked_alone, judge_settings, judged_samples, named_judge
from yatt.evaluation.labels import asked_twice, read_labelled
from yatt.launch.resolve.data_files import made_folder, with_made_data
from yatt.obs.page.page_file import render_page
from yatt.printable import all_digits, printable

OVERLAYS = (".yaml", ".yml")


def measure_judge(arguments: argparse.Namespace) -> int:
    """Asks a GenRM about labelled rows, and prints how good it is.

    Raises:
        ConfigError: an argument, the run file or a row cannot be used; nothing was asked.
        WorkerFailed: an engine ends again and again.
    """
    words = [word for word in arguments.more if "=" in word or word.endswith(OVERLAYS)]
    data = tuple(word for word in arguments.more if word not in words)
    if not data:
        raise ConfigError("name a data file after the GenRM.")
    if (least := arguments.min_agreement) is not None and not 0 <= least <= 1:
        raise ConfigError("--min-agreement: write a share from 0 to 1.")
    if arguments.limit < 0:
        raise ConfigError("--limit: write 1 or more, or 0 for all rows.")
    out = out_folder(arguments, f"{arguments.judge}-on-{Path(data[0]).stem}")
    base = config_of(arguments.config, words)
    genrm = asked_alone(named_judge(base, arguments.judge))
    device, gpus = device_here(base, arguments.device)
    options = JudgeOptions(data=data, seed=arguments.seed, device=arguments.device)
    settings = judge_settings(base, genrm, options, gpus)
    shown = Shower(is_quiet=arguments.json)
    with ended_by_signals(), private_folder(settings.config) as folder:
        config = with_made_data(settings.config, folder / "made", [made_folder(base.run.dir)])
        names = settings.config.data.val_files  # as the user knows them: made files are gone at the end
        labelled = read_labelled(config.data.val_files, config.data, genrm, names)
        labelled = replace(labelled, rows=labelled.rows[: arguments.limit or None])
        settings = replace(settings, config=config)
        index = place_of_genrm(base, genrm)
        samples = judged_samples(settings, asked_twice(labelled), folder, device, shown, index)
    shown.clear()
    result = judge_result(labelled, samples, genrm, data, asked_with(genrm, settings.config))
    try:
        _show_measured(arguments, result, base)
    finally:
        write_result_folder(
            out, {RESULT: result_bytes(result)} | ({PAGE: quality_page(result)} if arguments.html else {})
        )
    sys.stderr.write(printable(f"yatt: {out} has the result") + "\n")
    if (main := result.figures.get(result.main)) is None:
        return EXIT_FAILED
    return EXIT_BELOW if least is not None and main.value < least else EXIT_FINISHED


def out_folder(arguments: argparse.Namespace, name: str) -> Path:
    """Returns the new folder of the result.

    Raises:
        ConfigError: it exists and is not empty, or the folder that it would be in cannot be written.
    """
    out: Path = (arguments.out or Path(name)).absolute()
    check_out(out)
    return out


def _show_measured(arguments: argparse.Namespace, result: JudgeResult, base: RunConfig) -> None:
    if arguments.json:
        sys.stdout.write(result_line(result) + "\n")
    else:
        said = ", ".join(f"{name}={value}" for name, value in result.settings.items() if name != "model")
        sys.stdout.write(printable(f"{result.judge}: {result.rows} {result.form}, {said}") + "\n\n")
        sys.stdout.writelines(f"{printable(line)}\n" for line in quality_table(result.figures))
        if result.seconds_a_verdict is not None:
            sys.stdout.write(f"\n{result.seconds_a_verdict:.3g} s a verdict\n")
    sys.stdout.flush()
    for note in measured_notes(result, base):
        sys.stderr.write(f"yatt: note: {printable(note)}\n")


def measured_notes(result: JudgeResult, base: RunConfig) -> list[str]:
    """Returns what is to be said about a result.

    Args:
        base: the config of the run, whose own keys are advised about.
    """
    notes = [order_advice(result, named_judge(base, result.judge)), policy_note(base, result.judge)]
    if result.form == "texts" and not result.values:
        notes.append("labels are no verdicts of this GenRM: only their order was compared (auc).")
    if result.too_long:
        notes.append(f"{result.too_long} rows are longer than data.max_prompt_tokens: not asked.")
    if result.without > result.too_long:
        missing = result.without - result.too_long
        first = f"; the first: {result.reasons[0]}" if result.reasons else ""
        notes.append(f"{missing} of {result.rows} rows have no verdict{first}")
    return [note for note in notes if note]


def quality_page(result: JudgeResult) -> bytes:
    """Returns the page of a result."""
    figures = [(name, each, MEANINGS[name]) for name, each in result.figures.items()]
    page = render_page(
        "judge.html.j2",
        f"{result.judge}: yatt judge eval",
        result=result,
        figures=figures,
        errors=list(map(_shown, result.errors)),
        cells=[(cell, _shown(cell.example)) for cell in result.confusion],
    )
    return page.encode(errors="replace")


def _shown(example: JudgedExample) -> dict[str, Any]:
    names = ("chosen", "rejected") if len(example.texts) > 1 else ("completion",)
    return {
        "place": example.place,
        "prompt": example.prompt,
        "texts": list(zip(names, example.texts, strict=True)),
        "label": all_digits(example.label),
        "said": "none" if example.said is None else f"{example.said:.3g}",
        "answers": list(itertools.zip_longest(example.answers, example.thoughts, fillvalue="")),
    }
