"""`yatt report RUN`: one self-contained HTML page about a run, from its folder alone.

The page is self-contained: no script, font or other file. It can be written while the run is active, after it
failed, or before it has any metrics.
"""

import contextlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from yatt.adapters.files.lines import make_ready, read_records
from yatt.adapters.run_folder import ledger
from yatt.adapters.run_folder.ledger import Attempt, run_is_finished
from yatt.adapters.run_folder.run_config import Changed, changes_of, load_run
from yatt.config.check import node_gpus
from yatt.config.load import config_hash, load_attempt, without_secrets
from yatt.config.origin import annotated_yaml, origins_of_run
from yatt.config.schema import RunConfig
from yatt.core.figures.goodput import Now, attempt_gpu_seconds, goodput_share, running_share
from yatt.core.figures.limiting import limit_of
from yatt.errors import EXIT_FINISHED, EXIT_WILL_CONTINUE, ConfigError
from yatt.obs.metrics import STEP, amount_in, as_row
from yatt.obs.page import parts
from yatt.obs.page.curves import LOSS, REWARD, reward_chart, small_charts, verdict_on_curves
from yatt.obs.page.page_file import render_page, render_part, write_page
from yatt.obs.page.slabs_part import slabs_part
from yatt.obs.page.thumbnails import MakeThumbnails, Thumbnails
from yatt.obs.samples import as_sample
from yatt.obs.story.account import account_of, facts_of
from yatt.obs.story.history import AttemptView, attempts_of, folded_events, read_events
from yatt.obs.story.slab_history import slab_history
from yatt.obs.story.view import counter_lines
from yatt.obs.story.words import duration_in_words
from yatt.paths import RunPaths

RUNNING = "running, or cut off"
CUT_OFF = "cut off"
NODE_LEFT = "continued without a node"
"""Not a failure of the run: a node was lost or found unfit."""


NARROW = (400, 260)
"""Pixels of the large chart on a narrow screen."""

MAX_CONFIG = 60_000
PIECE = 2000
"""Characters of the config that are shown as one value."""


def settings_part(config: RunConfig, attempts: Sequence[Attempt]) -> Markup:
    """Returns the keys that differ from their defaults, and software and hardware of the newest attempt."""
    config = without_secrets(config)
    text = annotated_yaml(config, origins_of_run(config), only_written=True)
    lines = "\n".join(line.partition("  # ")[0].rstrip() for line in text.splitlines())[:MAX_CONFIG]
    pieces = [lines[at : at + PIECE] for at in range(0, len(lines), PIECE)]  # each is not truncated
    about = next((a.started["surroundings"] for a in reversed(attempts) if "surroundings" in a.started), None)
    return render_part("settings", pieces, _machine(about) if isinstance(about, dict) else [])


def _machine(about: Mapping[str, Any]) -> list[tuple[str, Any]]:
    versions = about.get("versions")
    named = versions.items() if isinstance(versions, dict) else ()
    gpus = about.get("gpus")
    cards = [f"{count} x {name}" for name, count in gpus.items()] if isinstance(gpus, dict) else []
    machine = [
        ("processor", about.get("processor", "")),
        ("cores", about.get("cores", "")),
        ("memory (GiB)", about.get("memory_gib", "")),
        ("GPUs", ", ".join(cards) or "none"),
    ]
    return [*named, *machine]


def write_report(
    paths: RunPaths,
    out: Path | None,
    charged_s: float | None = None,
    now: Now | None = None,
    make_thumbnails: MakeThumbnails | None = None,
) -> Path:
    """Writes the page; returns its path.

    Args:
        out: the file; ``report.html`` in the run folder if None.
        charged_s: GPU seconds of the run's jobs in Slurm's accounting; None if there is none.
        now: what the run does now; None if it is over.
        make_thumbnails: makes small pictures; without it their names are shown.

    Raises:
        ConfigError: it is not a run folder, or the page cannot be written.
    """
    paths.check_is_run()
    target = out or paths.report
    if out is None:
        make_ready(target)
    page = report_page(paths, load_run(paths), charged_s, now, make_thumbnails)
    write_page(target, page, "--out")
    return target


def report_page(
    paths: RunPaths,
    config: RunConfig,
    charged_s: float | None = None,
    now: Now | None = None,
    make_thumbnails: MakeThumbnails | None = None,
) -> str:
    """Returns the page's HTML text."""
    events, bad_events = read_events(paths.events)
    attempts = attempts_of(events, facts_of(paths))
    ends = {attempt.number: end_of(attempt, paths) for attempt in attempts}
    for attempt in attempts[:-1]:
        how, why = ends[attempt.number]
        ends[attempt.number] = (CUT_OFF if how == RUNNING else how, why)
    rows, bad_rows = read_records(paths.metrics, as_row)
    samples, bad_samples = read_records(paths.samples, as_sample)
    account = account_of([attempt.span for attempt in attempts], config.checkpoint, now)
    story, news = folded_events(events)
    sections = (
        ("Curves", _curves(rows)),
        ("Where the time went", parts.goodput_part(account.seconds, account.saves)),
        ("GPU sets", slabs_part(slab_history(events))),
        ("Timeline", parts.timelines_part(attempts)),
        ("Attempts", parts.attempts_part(attempts, ends, starts_of(paths))),
        ("What happened", parts.news_part(news)),
        ("Prompt groups and lengths", parts.groups_part(rows)),
        ("Completions", _completions(samples, make_thumbnails)),
        ("Config, versions and machine", settings_part(config, ledger.started_attempts(paths))),
    )
    gpus_s = attempt_gpu_seconds([each.span for each in attempts], attempt_gpus(paths, config, attempts))
    hours = _hours(gpus_s, running_share(account.seconds), charged_s)
    root = paths.root.absolute()
    return render_page(
        "report.html.j2",
        f"{root.name}: yatt report",
        root=root,
        state=run_state(paths, attempts, ends),
        config_hash=config_hash(config),
        about=_about(config),
        changed=map(_changed_line, changes_of(paths)),
        boxes=_facts(config, attempts, rows, account.seconds) + hours,
        alarms=story.judging.alarms.values(),
        counted=counter_lines(story.num_late, story.num_lost, story.processes.num_killed),
        unreadable=bad_events + bad_rows + bad_samples,
        sections=sections,
    )


def _completions(samples: Sequence[dict[str, Any]], make: MakeThumbnails | None) -> Markup:
    chosen = parts.chosen_samples(samples)
    left_out = len({sample[STEP] for sample in samples}) - len(chosen)
    thumbnails = Thumbnails([sample for found in chosen.values() for sample in found], make)
    return parts.samples_part(chosen, left_out, thumbnails.drawn)


def end_of(attempt: AttemptView, paths: RunPaths) -> tuple[str, str]:
    """Returns how an attempt ended and why, as recorded by its leader, else by the launcher."""
    record = ledger.record_of_attempt(paths, attempt.number, ledger.ENDED)
    noted = record.get("exit_code")
    code = (noted if type(noted) is int else None) if record else attempt.exit_code
    why = attempt.reason or ("" if code == EXIT_FINISHED else str(record.get("reason", "")))
    if code is None:
        return (NODE_LEFT, why) if record else (RUNNING, "")
    word = {EXIT_FINISHED: "finished", EXIT_WILL_CONTINUE: "stopped, to be continued"}.get(code, "failed")
    return f"{word} (exit code {code})", why


def starts_of(paths: RunPaths) -> dict[int, str]:
    """Maps each attempt to its job, start number and nodes; attempts outside of jobs are missing."""
    found = {}
    for attempt in ledger.started_attempts(paths):
        if job := attempt.started.get("job"):
            restarts = attempt.started.get("restarts", 0)
            again = f"requeued, start {restarts + 1}" if restarts else "first start"
            hosts = attempt.started.get("hosts", {}).items()
            where = "; ".join(f"{part} on {', '.join(names)}" for part, names in hosts)
            found[attempt.number] = f"{job}: {again}. {where}"
    return found


def attempt_gpus(paths: RunPaths, config: RunConfig, attempts: tuple[AttemptView, ...]) -> list[int]:
    """Returns the number of GPUs, or slots, of each attempt, without those of nodes that were left out."""
    absent = {a.number: set(a.started.get("absent", ())) for a in ledger.started_attempts(paths)}
    counts = []
    for attempt in attempts:
        with contextlib.suppress(ConfigError, OSError):  # else use the config of the previous attempt
            config = load_attempt(paths, attempt.number)
        gone = absent.get(attempt.number, set())
        counts.append(sum(gpus for node, gpus in enumerate(node_gpus(config)) if node not in gone))
    return counts


def run_state(paths: RunPaths, attempts: tuple[AttemptView, ...], ends: dict[int, tuple[str, str]]) -> str:
    """Returns the run's state: finished, failed, stopped, running or starting."""
    if run_is_finished(paths):
        return "finished"
    if not attempts:
        return "starting"
    return ends[attempts[-1].number][0].partition(" ")[0].rstrip(",")


def _about(config: RunConfig) -> str:
    sizes = [(gpus, len(list(nodes))) for gpus, nodes in groupby(node_gpus(config))]
    where = " + ".join(f"{nodes} x {gpus}" for gpus, nodes in sizes) + " GPUs or slots"
    judges = ", ".join(f"{genrm.name} ({genrm.model})" for genrm in config.genrms)
    judged = f"; GenRM {judges}" if judges else ""
    return f"{where}, {config.placement.mode}; policy {config.model.path}{judged}"


def _changed_line(changed: Changed) -> str:
    """One line per `yatt resume` that changed keys."""
    return f"changed after attempt {changed.after} ({changed.wall}): {'; '.join(changed.words)}"


def _facts(
    config: RunConfig,
    attempts: tuple[AttemptView, ...],
    rows: list[dict[str, Any]],
    seconds: dict[str, float],
) -> list[tuple[str, str]]:
    done = max((int(row[STEP]) for row in rows), default=0)
    what, key = ("loss", LOSS) if config.is_given else ("reward", REWARD)
    newest = [row[key] for row in rows if isinstance(row.get(key), int | float)]
    found = (amount_in(row, "perf/throughput") for row in rows[-10:] if row[STEP])
    paces = [pace for pace in found if pace]
    tokens = sum(amount_in(row, "perf/total_num_tokens") for row in rows)
    return [
        ("iterations trained", f"{done} of {config.trainer.total_iterations}"),
        (f"{what}, last iteration", f"{newest[-1]:.3f}" if newest else "none yet"),
        ("attempts", str(len(attempts))),
        ("wall time", duration_in_words(sum(seconds.values()))),
        ("share of useful time", f"{100 * goodput_share(seconds):.0f}%"),
        ("limited by", limit.by if (limit := limit_of(rows)) else "not known yet"),
        ("tokens per second and GPU", f"{sum(paces) / len(paces):.0f}" if paces else "none yet"),
        ("tokens trained on", f"{tokens / 1e6:,.0f} M" if tokens >= 1e7 else f"{tokens:,}"),
    ]


def _hours(gpus_s: float, share: float, charged_s: float | None) -> list[tuple[str, str]]:
    hours = [("GPU or slot hours", f"{gpus_s / 3600:.2f}, {100 * share:.0f}% of them useful")]
    if charged_s:
        useful = min(1.0, gpus_s * share / charged_s)
        hours.append(
            ("GPU hours in Slurm's accounting", f"{charged_s / 3600:.2f}, {100 * useful:.0f}% useful")
        )
    return hours


def _curves(rows: list[dict[str, Any]]) -> Markup:
    if not rows:
        return render_part("nothing", "No iteration is complete yet.")
    sentence, is_warning = verdict_on_curves(rows)
    wide, narrow = reward_chart(rows), reward_chart(rows, NARROW)
    return render_part("curves", sentence, is_warning, wide, narrow, small_charts(rows))
