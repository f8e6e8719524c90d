"""One page that compares several runs: curves in common charts, final figures, keys that differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from yatt.adapters.files.lines import read_records
from yatt.adapters.run_folder.run_config import load_run
from yatt.config.changing import changed_keys
from yatt.config.load import without_secrets
from yatt.config.schema import RunConfig
from yatt.obs.metrics import STEP, as_row
from yatt.obs.page.charts import Series, line_chart
from yatt.obs.page.curves import COLOURS, REWARD, SMALL, VALIDATION, Row, values_of
from yatt.obs.page.page_file import render_page, write_page
from yatt.paths import RunPaths

MOST_RUNS = len(COLOURS)
NO_DIFFERENCE = ("run.dir", "run.id", "data.template_time")
FINAL = 10
"""Iterations of which the final figures are the mean."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run of the page: the shortest end of its path that is unique, its config, and its rows."""

    name: str
    config: RunConfig
    rows: Sequence[Row]


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Writes the page; returns its path.

    Raises:
        ConfigError: a folder is not a run folder, or the page cannot be written.
    """
    runs = []
    names = unique_names([folder.absolute() for folder in folders])
    for folder, name in zip(folders, names, strict=True):
        paths = RunPaths(folder.absolute())
        paths.check_is_run()
        rows, _ = read_records(paths.metrics, as_row)
        runs.append(ComparedRun(name, without_secrets(load_run(paths)), rows))
    write_page(out, comparison_page(runs), "--out")
    return out


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that differ."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]).lstrip("/") for folder in folders]
        if len(set(names)) == len(set(folders)):
            return names
    return list(map(str, folders))


def comparison_page(runs: Sequence[ComparedRun]) -> str:
    """Returns the page's HTML text."""
    validations = sorted(
        {key for run in runs for row in run.rows for key in row if key.startswith(VALIDATION)}
    )
    keys = [REWARD, *validations, "timing_s/step", "perf/throughput"]
    shown = [
        {
            "name": run.name,
            "colour": colour,
            "done": max((int(row[STEP]) for row in run.rows), default=0),
            "total": run.config.trainer.total_iterations,
            "cells": [_final(run.rows, key) for key in keys],
        }
        for run, colour in zip(runs, COLOURS, strict=False)
    ]
    return render_page(
        "comparison.html.j2",
        f"{len(runs)} runs: yatt report",
        runs=shown,
        newest=FINAL,
        figures=[key.removeprefix(VALIDATION) for key in keys],
        charts=_charts(runs, validations),
        differences=_differences(runs),
    )


def _final(rows: Sequence[Row], key: str) -> str:
    values = [y for _, y in values_of([row for row in rows if row[STEP]], key)][-FINAL:]
    return f"{sum(values) / len(values):.4g}" if values else ""


def _charts(runs: Sequence[ComparedRun], validations: Sequence[str]) -> list[tuple[str, Markup]]:
    drawn = [("Reward (training)", REWARD)]
    drawn += [(f"Validation {key.removeprefix(VALIDATION)}", key) for key in validations]
    drawn += [
        (f"{title}: {name}" if len(names) > 1 else title, key)
        for title, names in SMALL
        for name, key in names
    ]
    charts = []
    for title, key in drawn:
        series = [
            Series(
                name=run.name,
                points=values_of([r for r in run.rows if r[STEP] or key in validations], key),
                colour=c,
            )
            for run, c in zip(runs, COLOURS, strict=False)
        ]
        if any(y for line in series for _, y in line.points):
            charts.append((title, line_chart(series, title=title, size=(560, 280))))
    return charts


def _differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[Any]]]:
    first = runs[0].config
    keys = dict.fromkeys(change.key for run in runs[1:] for change in changed_keys(first, run.config))
    return [(key, [_value(run.config, key) for run in runs]) for key in keys if key not in NO_DIFFERENCE]


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if isinstance(value, tuple):
            value = value[int(part)] if int(part) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(part)
        else:
            value = getattr(value, part, None)
    return value
