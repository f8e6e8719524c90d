"""`yatt judge data`: rows to train a judge on, from labelled data or from what a run has recorded."""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from yatt.adapters.files.files import publish_stream
from yatt.adapters.inputs.data_rows import data_row
from yatt.adapters.inputs.dataset import RowFiles
from yatt.cli.commands.evaluating import check_out
from yatt.cli.finding import run_folder
from yatt.cli.judging.parts import config_of, place_of_genrm
from yatt.cli.judging.repeating import iteration_range, judge_of_run
from yatt.config.schema import GenRMSection, RunConfig
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, ConfigError
from yatt.evaluation.again import given_again, recorded_groups
from yatt.evaluation.evaluate import private_folder
from yatt.evaluation.judge_rows import (
    WORD,
    LabelledGroup,
    Skipped,
    balanced_rows,
    check_answers,
    check_taught,
    pair_labels,
    taught_rows,
)
from yatt.evaluation.judging import asked_alone, named_judge
from yatt.evaluation.labels import read_labelled
from yatt.launch.resolve.completed import completed_config
from yatt.paths import RunPaths
from yatt.printable import printable

DATA = (".jsonl", ".parquet")


def write_judge_data(arguments: argparse.Namespace) -> int:
    """Writes labelled questions of a GenRM.

    Raises:
        ConfigError: an argument, the data or the run cannot be used.
        OSError: the disk is full, or fails.
    """
    out: Path = arguments.out
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists already; write another name.")
    check_out(out)
    if WORD not in arguments.answer:
        raise ConfigError(f"--answer {arguments.answer}: write {WORD} where the verdict stands.")
    is_data = arguments.source.suffix in DATA
    skipped = Skipped()
    groups, genrm, config = _of_file(arguments) if is_data else _of_run(arguments, skipped)
    rows = list(taught_rows(groups, genrm, arguments.answer, config.run.seed, skipped))
    if arguments.balanced:
        rows = balanced_rows(rows, config.run.seed)
    check_answers(config, genrm, place_of_genrm(config, genrm), {row.completion: row.label for row in rows})
    if rows:
        publish_stream(out, (msgspec.json.encode(row) + b"\n" for row in rows))
    _tell(out, [row.completion for row in rows], skipped)
    return EXIT_FINISHED if rows else EXIT_FAILED


def _of_file(arguments: argparse.Namespace) -> tuple[Iterator[LabelledGroup], GenRMSection, RunConfig]:
    """Labelled rows, with the GenRM of a run file."""
    if arguments.like is None:
        raise ConfigError(f"{arguments.source}: write --like RUN_FILE, which has the judge's template.")
    config = config_of(arguments.like, [])
    genrm = asked_alone(named_judge(config, judge_of_run(config, arguments.judge)))
    index = place_of_genrm(config, genrm)
    check_taught(genrm, index)
    labelled = read_labelled([str(arguments.source)], config.data, genrm)
    of_pair = pair_labels(genrm, index, labelled.rows[0].place) if labelled.form == "pairs" else ()
    bare = replace(config.data, form="prompts", prompt_key="prompt", media_store="")

    def groups() -> Iterator[LabelledGroup]:
        for number, each in enumerate(labelled.rows):
            row = data_row({**each.raw, "prompt": each.prompt}, each.place, bare)
            labels = of_pair or (each.label,)
            yield LabelledGroup(row=row, number=number, texts=each.texts, labels=labels, place=each.place)

    return groups(), genrm, config


def _of_run(
    arguments: argparse.Namespace, skipped: Skipped
) -> tuple[Iterator[LabelledGroup], GenRMSection, RunConfig]:
    """Recorded completions of a run, labelled by another score of it."""
    paths = RunPaths(run_folder(arguments.source).absolute())
    config = completed_config(config_of(paths.root, []))
    genrm = named_judge(config, judge_of_run(config, arguments.judge))
    check_taught(genrm, place_of_genrm(config, genrm))
    known = [reward.name for reward in config.rewards]
    known += [other.name for other in config.genrms if other.name != genrm.name]
    if arguments.label not in known:
        written = f"--label {arguments.label} is no other score of the run" if arguments.label else ""
        says = written or "write --label SCORE, the score that says what is right"
        raise ConfigError(f"{says}; there are: {', '.join(known) or 'none'}.")
    recorded = recorded_groups(paths, *iteration_range(arguments.iterations))
    skipped.left_out = recorded.left_out

    def groups() -> Iterator[LabelledGroup]:
        files = config.data.train_files
        with private_folder(config) as folder:
            rows = RowFiles(files, config.data, folder / "rows")
            for group, given in zip(recorded.groups, given_again(recorded, rows, files), strict=True):
                scores = [(each.get("scores") or {}).get(arguments.label) for each in group.samples]
                yield LabelledGroup(
                    row=rows.row(group.row),
                    number=group.number,
                    texts=given.given.texts,
                    labels=tuple(None if score is None else float(score) for score in scores),
                    place=f"iteration {group.iteration}, prompt {group.number}",
                )
            rows.close()

    return groups(), genrm, config


def _tell(out: Path, answers: list[str], skipped: Skipped) -> None:
    counts = ", ".join(f"{answers.count(each)} {each!r}" for each in sorted(set(answers))[:8])
    sys.stdout.write(printable(f"{out}: {len(answers)} rows: {counts}" if answers else "no rows") + "\n")
    notes = (
        (skipped.ties, "questions are ties, for which there is no word"),
        (skipped.between, "questions have a label that no verdict is; left out"),
        (skipped.unlabelled, "questions are about completions without this score; left out"),
        (skipped.left_out, "samples are of groups that are not recorded whole; left out"),
    )
    for count, says in notes:
        if count:
            sys.stderr.write(f"yatt: note: {count} {says}\n")
