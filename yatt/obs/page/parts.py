"""The parts of a report's page, as functions of values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from yatt.core.figures.alarms import FLAT_GROUPS
from yatt.core.figures.goodput import CATEGORIES, goodput_share
from yatt.core.figures.save_interval import Suggestion
from yatt.core.samples.lengths import FATES, by_bucket
from yatt.obs.metrics import STEP, amount_in
from yatt.obs.page.page_file import render_part
from yatt.obs.page.timeline import draw_timeline, hidden_slabs, last_iterations
from yatt.obs.samples import judge_said, spoken_turns
from yatt.obs.story.account import saves_in_words
from yatt.obs.story.history import AttemptView
from yatt.obs.story.words import duration_in_words, fine_duration, short_number
from yatt.records.events.log import LoggedEvent

MAX_SAMPLED_ITERATIONS = 24
MAX_TIMELINES = 6
MAX_NEWS = 200
ZOOM_ITERATIONS = 3
FLAT_ITERATIONS = 10
MANY_FLAT = 0.5
"""Share of flat groups from which the report explains them as a problem."""

CATEGORY_COLOURS = {
    "rollout": "p-rollout",
    "score": "p-genrm",
    "train": "p-trainer",
    "switch": "p-switch",
    "weight update": "p-weights",
    "saving": "p-save",
    "validation": "p-validate",
    "export": "p-save",
    "wasted": "p-bad",
    "start-up": "p-start",
    "restore": "p-restore",
    "queue": "p-queue",
    "not running": "p-idle",
    "other": "p-idle",
}
CATEGORY_SOURCES = {
    "rollout": "sampling, and scoring beside it; or opening rows that have completions",
    "score": "scoring after sampling",
    "train": "the update",
    "switch": "GPUs change their role before a phase: sleep, memory check, wake",
    "weight update": "engines load the trained weights, and these are compared",
    "saving": "training waits for a checkpoint",
    "validation": "held-out prompts",
    "export": "the exported model",
    "wasted": "iterations that were lost, because they were not committed when their attempt ended",
    "start-up": "of every start and attempt, before its first rollout",
    "restore": "a checkpoint was loaded",
    "queue": "a job of the run waited in Slurm's queue",
    "not running": "between two starts",
    "other": "in an attempt, outside of all phases",
}
LEGEND = (
    ("p-rollout", "rollout"),
    ("p-genrm", "GenRM, scoring"),
    ("p-trainer", "trainer, training"),
    ("p-weights", "weight update"),
    ("p-save", "saving"),
    ("p-validate", "validation"),
    ("p-start", "starting"),
    ("p-bad", "quarantined; triangle: failure"),
)


def attempts_part(
    attempts: Sequence[AttemptView], ends: dict[int, tuple[str, str]], starts: dict[int, str]
) -> Markup:
    """Returns a table with one row per attempt.

    Args:
        ends: maps each attempt to how and why it ended.
        starts: maps each attempt to its job, start number and nodes; empty for a run without jobs.
    """
    rows = [
        {
            "number": attempt.number,
            "how": ends[attempt.number][0],
            "why": ends[attempt.number][1],
            "lasted": duration_in_words(attempt.span.end_s - attempt.span.begin_s),
            "resumed": "" if attempt.span.resumed is None else attempt.span.resumed,
            "reached": max((span.iteration for span in attempt.span.phases), default=0),
            "job": starts.get(attempt.number, ""),
        }
        for attempt in attempts
    ]
    return render_part("attempts", rows, bool(starts))


def goodput_part(seconds: dict[str, float], saves: Suggestion | None) -> Markup:
    """Returns the stacked bar of wall time and its table; the suggested interval of saves, once there is
    something to conclude from, as a warning if the present one is far from it."""
    total_s = sum(seconds.values())
    spent = [
        {
            "name": name,
            "colour": CATEGORY_COLOURS[name],
            "source": CATEGORY_SOURCES[name],
            "seconds": f"{seconds[name]:.1f}",
            "width": f"{100 * seconds[name] / total_s:.2f}",
            "share": f"{100 * seconds[name] / total_s:.1f}%",
            "duration": fine_duration(seconds[name]),
        }
        for name in CATEGORIES
        if seconds[name] > 0
    ]
    share = f"{100 * goodput_share(seconds):.0f}%"
    is_founded = saves is not None and saves.is_founded
    said = saves_in_words(saves) if saves is not None and is_founded else ""
    is_far = saves is not None and saves.is_far
    return render_part("goodput", share, duration_in_words(total_s), spent, said, is_far)


def timelines_part(attempts: Sequence[AttemptView]) -> Markup:
    """Returns each attempt's timeline, newest first, with a zoom on the last iterations."""
    drawn = []
    for attempt in reversed(attempts[-MAX_TIMELINES:]):
        span, hidden = attempt.span, hidden_slabs(attempt)
        more = f" {hidden} more GPU sets are not shown." if hidden else ""
        title = f"Attempt {attempt.number}: {duration_in_words(span.end_s - span.begin_s)}.{more}"
        drawn.append((title, draw_timeline(attempt, begin_s=span.begin_s, end_s=span.end_s)))
        window = last_iterations(attempt, ZOOM_ITERATIONS) if attempt is attempts[-1] else None
        if window is not None and window[1] - window[0] < 0.8 * (span.end_s - span.begin_s):
            zoomed = draw_timeline(attempt, begin_s=window[0], end_s=window[1])
            drawn.append((f"Its last {ZOOM_ITERATIONS} iterations", zoomed))
    return render_part("timelines", drawn, LEGEND, len(attempts) - MAX_TIMELINES)


def chosen_samples(samples: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Returns those that a page shows, by iteration, the newest first; an even selection if there are many
    iterations."""
    by_iteration: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        by_iteration.setdefault(sample[STEP], []).append(sample)
    chosen = _evenly(sorted(by_iteration), MAX_SAMPLED_ITERATIONS)
    return {iteration: by_iteration[iteration] for iteration in reversed(chosen)}


def samples_part(
    chosen: Mapping[int, Sequence[dict[str, Any]]],
    left_out: int,
    pictures_of: Callable[[dict[str, Any]], Markup],
) -> Markup:
    """Returns completions by iteration, the first one open.

    Args:
        chosen: from `chosen_samples`.
        left_out: number of iterations that are not among them.
        pictures_of: gives the pictures of a sample as HTML.
    """
    shown = [
        (iteration, [_sample(sample, pictures_of(sample)) for sample in found])
        for iteration, found in chosen.items()
    ]
    return render_part("completions", shown, left_out)


def groups_part(rows: Sequence[dict[str, Any]]) -> Markup:
    """Returns what became of prompt groups: identical rewards, counters in total and in the last iteration,
    completions by length for a run with oversampling."""
    lengths = [
        (f"{limit // 2 + 1} to {limit}", [f"{counts[fate]:,}" for fate in FATES])
        for limit, counts in by_bucket(rows).items()
    ]
    keys = sorted({key for row in rows for key in row if _is_counter(key)})
    return render_part("groups", _flat(rows), [_counter(rows, key) for key in keys], lengths, FATES)


def _flat(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Groups whose rewards are all equal, of the newest iterations; empty if there are none."""
    newest = [amount_in(row, FLAT_GROUPS) for row in rows if row[STEP]][-FLAT_ITERATIONS:]
    share = sum(newest) / max(1, len(newest))
    found = {"share": f"{100 * share:.0f}%", "newest": len(newest), "is_many": share >= MANY_FLAT}
    return found if share else {}


def _counter(rows: Sequence[dict[str, Any]], key: str) -> dict[str, str]:
    total = sum(amount_in(row, key) for row in rows)
    asked = sum(amount_in(row, f"{key.rsplit('/', 1)[0]}/asked") for row in rows)
    is_share = key.endswith("/unparsable") and asked
    share = f"{100 * total / asked:.1f}% of {asked:g} requests" if is_share else ""
    return {"key": key, "total": f"{total:g}", "last": f"{rows[-1].get(key) or 0:g}", "share": share}


def news_part(news: Sequence[tuple[LoggedEvent, str]]) -> Markup:
    """Returns the table of notable events, newest first."""
    rows = [
        {"wall": logged.wall[:19].replace("T", " "), "attempt": logged.attempt, "sentence": sentence}
        for logged, sentence in reversed(news[-MAX_NEWS:])
    ]
    return render_part("news", rows)


def _sample(sample: dict[str, Any], pictures: Markup) -> dict[str, Any]:
    return {
        "reward": _told(sample.get("reward")),
        "prompt": sample.get("prompt", ""),
        "pictures": pictures,
        "scores": [(name, _told(score)) for name, score in (sample.get("scores") or {}).items()],
        "turns": spoken_turns(sample),
        "truth": sample.get("ground_truth", ""),
        "verdicts": [(judge_said(name), text) for name, text in (sample.get("verdicts") or {}).items()],
    }


def _told(score: float | None) -> str:
    return "none" if score is None else short_number(float(score))


def _is_counter(key: str) -> bool:
    counted = key.startswith(("reward/", "genrm/", "retry/")) or key in (
        "rollout/dropped_groups",
        "rollout/failed_groups",
        "rollout/flat_groups",
        "rollout/too_long",
        "rollout/equal_pairs",
        "rollout/refused_rows",
    )
    return counted and not key.endswith("/asked")


def _evenly(values: Sequence[int], count: int) -> list[int]:
    """Returns at most `count` of the values, including the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[index * (len(values) - 1) // (count - 1)] for index in range(count)]
