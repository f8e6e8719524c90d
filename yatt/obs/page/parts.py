"""The parts of a report's page, as functions of values. All text from data is escaped."""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from yatt.core.figures.goodput import CATEGORIES, goodput_share
from yatt.core.figures.save_interval import Suggestion
from yatt.core.samples.lengths import FATES, by_bucket
from yatt.obs.metrics import STEP, amount_in
from yatt.obs.page.timeline import draw_timeline, hidden_slabs, last_iterations
from yatt.obs.samples import spoken_turns
from yatt.obs.story.account import saves_in_words
from yatt.obs.story.history import AttemptView
from yatt.obs.story.view import ActiveAlarm
from yatt.obs.story.words import duration_in_words, fine_duration, short_number

MAX_TEXT = 3000
MAX_SAMPLED_ITERATIONS = 24
MAX_TIMELINES = 6
MAX_NEWS = 200
ZOOM_ITERATIONS = 3
CATEGORY_COLOURS = {
    "rollout": "p-rollout", "score": "p-genrm", "train": "p-trainer", "switch": "p-switch",
    "weight update": "p-weights", "saving": "p-save", "validation": "p-validate", "export": "p-save",
    "wasted": "p-bad", "start-up": "p-start", "restore": "p-restore", "queue": "p-queue",
    "not running": "p-idle", "other": "p-idle",
}  # fmt: skip
CATEGORY_SOURCES = {
    "rollout": "sampling, and scoring beside it", "score": "scoring after sampling", "train": "the update",
    "switch": "GPUs change their role before a phase: sleep, memory check, wake",
    "weight update": "engines load the trained weights, and these are compared",
    "saving": "training waits for a checkpoint",
    "validation": "held-out prompts", "export": "the exported model",
    "wasted": "iterations that were lost, because they were not committed when their attempt ended",
    "start-up": "of every start and attempt, before its first rollout",
    "restore": "a checkpoint was loaded", "queue": "a job of the run waited in Slurm's queue",
    "not running": "between two starts", "other": "in an attempt, outside of all phases",
}  # fmt: skip
LEGEND = (
    ("p-rollout", "rollout"), ("p-genrm", "GenRM, scoring"), ("p-trainer", "trainer, training"),
    ("p-weights", "weight update"), ("p-save", "saving"), ("p-validate", "validation"),
    ("p-start", "starting"), ("p-bad", "quarantined; triangle: failure"),
)  # fmt: skip


def as_html(value: Any) -> str:
    """Returns any value as HTML text: escaped, with visible control characters, truncated if very long."""
    text = str(value)
    cut = f" ... ({len(text) - MAX_TEXT} more characters)" if len(text) > MAX_TEXT else ""
    return escape("".join(map(_visible, text[:MAX_TEXT])) + cut)


def fact_boxes(named: Iterable[tuple[str, str]]) -> str:
    """Draws small boxes, each with a value and its name."""
    boxes = (f"<div><b>{as_html(value)}</b><span>{as_html(name)}</span></div>" for name, value in named)
    return f'<div class="facts">{"".join(boxes)}</div>'


def unreadable_part(count: int) -> str:
    """Returns a note about skipped lines; empty if there are none."""
    if not count:
        return ""
    return (
        f'<p class="say warn">{count} damaged line{"s" if count > 1 else ""} of events, metrics and '
        "samples were skipped.</p>"
    )


def alarms_part(alarms: Iterable[ActiveAlarm]) -> str:
    """Returns the active alarms; empty if there are none."""
    return "".join(
        f'<p class="say warn"><b>Alarm {as_html(alarm.name)}</b>: {as_html(alarm.message)}</p>'
        for alarm in alarms
    )


def counted_part(sentences: Iterable[str]) -> str:
    """Returns sentences about counted events; empty if there are none."""
    return "".join(f'<p class="say">{as_html(sentence)}.</p>' for sentence in sentences)


def attempts_table(
    attempts: Sequence[AttemptView], ends: dict[int, tuple[str, str]], starts: dict[int, str]
) -> str:
    """Returns a table with one row per attempt.

    Args:
        ends: maps each attempt to how and why it ended.
        starts: maps each attempt to its job, start number and nodes; empty for a run without jobs.
    """
    rows = []
    for attempt in attempts:
        how, why = ends[attempt.number]
        resumed = "" if attempt.span.resumed is None else str(attempt.span.resumed)
        lasted = duration_in_words(attempt.span.end_s - attempt.span.begin_s)
        reached = max((span.iteration for span in attempt.span.phases), default=0)
        cells = f'<td class="n">{attempt.number}</td><td class="n">{lasted}</td><td class="n">{resumed}</td>'
        cells += f'<td class="n">{reached}</td><td>{as_html(how)}</td><td class="wrap">{as_html(why)}</td>'
        cells += f'<td class="wrap">{as_html(starts.get(attempt.number, ""))}</td>' if starts else ""
        rows.append(f"<tr>{cells}</tr>")
    names = (
        "attempt",
        "duration",
        "resumed from",
        "reached",
        "end",
        "why",
        *(("Slurm job",) if starts else ()),
    )
    head = "".join(f"<th{' class=n' if index < 4 else ''}>{name}</th>" for index, name in enumerate(names))
    return f'<table class="attempts"><tr>{head}</tr>{"".join(rows)}</table>'


def goodput_part(seconds: dict[str, float]) -> str:
    """Returns the stacked bar of wall time and its table."""
    total_s = sum(seconds.values())
    if total_s <= 0:
        return '<p class="none">No wall time has passed yet.</p>'
    spent = [name for name in CATEGORIES if seconds[name] > 0]
    bar = "".join(
        f'<div class="{CATEGORY_COLOURS[name]}" style="width:{100 * seconds[name] / total_s:.2f}%" '
        f'title="{name}: {seconds[name]:.1f} s"></div>'
        for name in spent
    )
    rows = "".join(
        f'<tr><td><span class="swatch {CATEGORY_COLOURS[name]}"></span>{name}</td>'
        f'<td class="n">{100 * seconds[name] / total_s:.1f}%</td>'
        f'<td class="n">{fine_duration(seconds[name])}</td>'
        f'<td class="soft">{CATEGORY_SOURCES[name]}</td></tr>'
        for name in spent
    )
    return (
        f"<p><b>{100 * goodput_share(seconds):.0f}%</b> of {duration_in_words(total_s)} wall time went into "
        "rollout, score and train that was kept (effective training time ratio).</p>"
        f'<div class="bar">{bar}</div>'
        f"<table>{rows}</table>"
    )


def saves_part(saves: Suggestion | None) -> str:
    """Returns the suggested interval of saves, once there is something to conclude from; a warning if the
    present one is far from it."""
    if saves is None or not saves.is_founded:
        return ""
    warn = " warn" if saves.is_far else ""
    return f'<p class="say{warn}">Saves: {as_html(saves_in_words(saves))}.</p>'


def timelines_part(attempts: Sequence[AttemptView]) -> str:
    """Returns each attempt's timeline, newest first, with a zoom on the last iterations."""
    if not attempts:
        return '<p class="none">No attempt has started yet.</p>'
    keys = "".join(f'<span><i class="swatch {colour}"></i>{name}</span>' for colour, name in LEGEND)
    parts = [f'<div class="legend">{keys}</div>']
    for attempt in reversed(attempts[-MAX_TIMELINES:]):
        span, hidden = attempt.span, hidden_slabs(attempt)
        more = f" {hidden} more GPU sets are not shown." if hidden else ""
        parts.append(
            f"<h3>Attempt {attempt.number}: {duration_in_words(span.end_s - span.begin_s)}.{more}</h3>"
        )
        parts.append(draw_timeline(attempt, begin_s=span.begin_s, end_s=span.end_s))
        window = last_iterations(attempt, ZOOM_ITERATIONS) if attempt is attempts[-1] else None
        if window is not None and window[1] - window[0] < 0.8 * (span.end_s - span.begin_s):
            parts.append(f"<h3>Its last {ZOOM_ITERATIONS} iterations</h3>")
            parts.append(draw_timeline(attempt, begin_s=window[0], end_s=window[1]))
    if len(attempts) > MAX_TIMELINES:
        parts.append(f'<p class="none">{len(attempts) - MAX_TIMELINES} older attempts are not shown.</p>')
    return "".join(parts)


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
    pictures_of: Callable[[dict[str, Any]], str],
) -> str:
    """Returns completions by iteration, the first one open.

    Args:
        chosen: from `chosen_samples`.
        left_out: number of iterations that are not among them.
        pictures_of: gives the pictures of a sample as HTML.
    """
    if not chosen:
        return '<p class="none">No samples were recorded yet (logging.samples_per_iteration).</p>'
    note = f'<p class="none">{left_out} iterations in between are not shown.</p>' if left_out else ""
    blocks = []
    for number, (iteration, found) in enumerate(chosen.items()):
        cards = "".join(_sample(sample, pictures_of(sample)) for sample in found)
        is_open = "" if number else " open"
        blocks.append(
            f"<details{is_open}><summary>Iteration {iteration}</summary>"
            f'<div class="samples">{cards}</div></details>'
        )
    return note + "".join(blocks)


def counters_part(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the counters of failures and dropped groups: in total, and in the last iteration."""
    keys = sorted({key for row in rows for key in row if _is_counter(key)})
    if not keys:
        return '<p class="none">There are no counters yet.</p>'
    body = []
    for key in keys:
        total = sum(amount_in(row, key) for row in rows)
        asked = sum(amount_in(row, f"{key.rsplit('/', 1)[0]}/asked") for row in rows)
        share = (
            f"{100 * total / asked:.1f}% of {asked:g} requests"
            if key.endswith("/unparsable") and asked
            else ""
        )
        last = rows[-1].get(key) or 0
        body.append(
            f'<tr><td><code>{as_html(key)}</code></td><td class="n">{total:g}</td><td class="n">{last:g}</td>'
            f'<td class="soft">{share}</td></tr>'
        )
    head = '<tr><th>counter</th><th class="n">total</th><th class="n">last iteration</th><th></th></tr>'
    return f"<table>{head}{''.join(body)}</table>"


def lengths_part(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of completions by length; empty for a run without oversampling."""
    found = by_bucket(rows)
    if not found:
        return ""
    columns = "".join(f'<th class="n">{fate}</th>' for fate in FATES)
    body = ""
    for limit, counts in found.items():
        numbers = "".join(f'<td class="n">{counts[fate]:,}</td>' for fate in FATES)
        body += f'<tr><td class="n">{limit // 2 + 1} to {limit}</td>{numbers}</tr>'
    return (
        f'<h3>Completions by number of tokens</h3><table><tr><th class="n">tokens</th>{columns}</tr>{body}'
        '</table><p class="soft">A cut completion continues in the next iteration and is counted again when '
        "its group is complete.</p>"
    )


def news_part(news: Sequence[tuple[dict[str, Any], str]]) -> str:
    """Returns the table of notable events, newest first."""
    if not news:
        return '<p class="none">No notable events.</p>'
    rows = "".join(
        f'<tr><td class="when">{as_html(event["wall"][:19].replace("T", " "))}</td>'
        f'<td class="when">attempt {event["attempt"]}</td><td class="wrap">{as_html(sentence)}</td></tr>'
        for event, sentence in reversed(news[-MAX_NEWS:])
    )
    return f"<table>{rows}</table>"


def _sample(sample: dict[str, Any], pictures: str) -> str:
    pills = "".join(
        f'<span class="pill">{as_html(name)} <b>{_told(score)}</b></span>'
        for name, score in (sample.get("scores") or {}).items()
    )
    verdicts = "".join(
        f'<div class="label">verdict of {as_html(name)}</div><pre>{as_html(text)}</pre>'
        for name, text in (sample.get("verdicts") or {}).items()
    )
    said = "".join(
        f'<div class="label">{as_html(who)}</div><pre>{as_html(text)}</pre>'
        for who, text in spoken_turns(sample)
    )
    return (
        f'<div class="card"><span class="pill">reward <b>{_told(sample.get("reward"))}</b></span>{pills}'
        f'<div class="label">prompt</div><pre>{as_html(sample.get("prompt", ""))}</pre>'
        f"{pictures}{said}"
        f'<div class="label">ground truth</div><pre>{as_html(sample.get("ground_truth", ""))}</pre>'
        f"{verdicts}</div>"
    )


def _told(score: float | None) -> str:
    return "none" if score is None else short_number(float(score))


def _is_counter(key: str) -> bool:
    counted = key.startswith(("reward/", "genrm/", "retry/")) or key in (
        "rollout/dropped_groups", "rollout/failed_groups", "rollout/flat_groups", "rollout/too_long",
    )  # fmt: skip
    return counted and not key.endswith("/asked")


def _evenly(values: Sequence[int], count: int) -> list[int]:
    """Returns at most `count` of the values, including the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[index * (len(values) - 1) // (count - 1)] for index in range(count)]


def _visible(character: str) -> str:
    """Replaces control characters and lone surrogates by visible characters that can be encoded."""
    if character in "\n\t":
        return character
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "\ufffd"
    if kind == "Cc":
        return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "\u2421"
    return character
