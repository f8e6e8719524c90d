"""The page of `yatt simulate`: table, chart and pictures as one self-contained HTML file, like the report."""

from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from yatt.forecast.time.comparing import SimulatedResult
from yatt.forecast.time.picture import IterationPicture, PictureSpan
from yatt.forecast.time.recommending import Recommendation
from yatt.obs.page.charts import Axis, Series, line_chart
from yatt.obs.page.page_file import as_html, render_page
from yatt.obs.page.timeline import role_colour, time_ticks
from yatt.obs.story.words import duration_in_words

WIDTH, NAMES, RIGHT = 1180, 530, 64
LANE, GAP, TOP = 18, 6, 8
PICTURE_LEFT = 96
LEGEND = (
    ("p-rollout", "rollout"),
    ("p-genrm", "GenRM"),
    ("p-trainer", "trainer"),
    ("p-switch", "switch"),
    ("p-idle", "idle"),
)
BAR_LEGEND = (
    ("p-rollout", "sampling and judging"),
    ("p-switch", "switch"),
    ("p-trainer", "training"),
    ("p-idle", "one of two tracks waits"),
)
CURVES = ("c2", "c3", "c4", "c5", "c6", "c1")


def simulated_page(
    title: str,
    found: Recommendation,
    says: Sequence[str],
    notes: Sequence[str],
    facts: Sequence[tuple[str, str]],
    pictures: Sequence[tuple[SimulatedResult, IterationPicture]],
) -> str:
    """Returns the page's HTML text.

    Args:
        title: name of what was simulated.
        says: the recommendation.
        notes: what the figures mean and leave out.
        facts: (name, value) of the boxes at the top.
        pictures: settings of which one iteration is drawn.
    """
    columns, rows = results_table(found)
    return render_page(
        "simulated.html.j2",
        f"{title}: yatt simulate",
        name=title,
        boxes=facts,
        says=says,
        notes=notes,
        columns=columns,
        rows=rows,
        bar_legend=BAR_LEGEND,
        colours=LEGEND,
        bars=iteration_bars(found),
        pictures=[
            (
                f"{result.alternative.name}: {duration_in_words(picture.seconds)}",
                _picture(picture) + _curves(picture),
            )
            for result, picture in pictures
        ],
    )


def results_table(found: Recommendation) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the columns and rows of all settings, the fastest first."""
    roles = list(dict.fromkeys(role for each in found.results for role in each.idle))
    names = [
        "setting",
        "iteration",
        "sampling",
        "training",
        "tokens/s",
        *(f"idle {r}" for r in roles),
        "moves",
        "oldest token",
    ]
    rows = []
    for result in sorted(found.results, key=lambda each: each.iteration_s):
        cells = [
            f"{result.iteration_s:,.1f} s",
            f"{result.sampling_s:,.1f} s",
            f"{result.train_s:,.1f} s",
            f"{result.tokens_per_s:,.0f}",
            *(f"{result.idle[role]:.0%}" if role in result.idle else "" for role in roles),
            f"{result.moves:,.1f}",
            f"{result.most_age} version{'s' if result.most_age != 1 else ''}",
        ]
        marks = (("as configured", found.own), ("recommended", found.best))
        marked = ", ".join(word for word, each in marks if each is result)
        rows.append({"name": result.alternative.name, "marks": marked, "cells": cells})
    return names, rows


def iteration_bars(found: Recommendation) -> Markup:
    """Returns an SVG with one bar per setting, the shortest first; tracks beside each other in two halves."""
    results = sorted(found.results, key=lambda each: each.iteration_s)
    longest = max(each.iteration_s for each in results)
    scale = Axis(low=0.0, high=longest, from_px=NAMES, to_px=WIDTH - RIGHT)
    drawn = [
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {TOP + len(results) * (LANE + GAP)}" role="img" '
        'aria-label="seconds per iteration of each setting">'
    ]
    for number, result in enumerate(results):
        y = TOP + number * (LANE + GAP)
        drawn.append(
            f'<text class="key" x="{NAMES - 8}" y="{y + 13}" text-anchor="end">'
            f"{as_html(result.alternative.name)}</text>"
        )
        drawn += _bar(result, scale, y)
        end = scale.at(result.iteration_s) + 6
        drawn.append(f'<text class="tick" x="{end:.1f}" y="{y + 13}">{result.iteration_s:,.0f} s</text>')
    return Markup("".join([*drawn, "</svg>"]))


def _bar(result: SimulatedResult, scale: Axis, y: float) -> Iterable[str]:
    rollout = result.alternative.config.rollout
    if rollout.ahead:
        yield _rect("p-idle", 0, result.iteration_s, scale, y)
        yield _rect("p-rollout", 0, min(result.sampling_s, result.iteration_s), scale, y, LANE / 2)
        end_s = min(result.train_s, result.iteration_s)
        yield _rect("p-trainer", 0, end_s, scale, y + LANE / 2, LANE / 2)
        return
    at_s = 0.0
    for colour, seconds in (
        ("p-rollout", result.sampling_s),
        ("p-switch", result.switch_s),
        ("p-trainer", result.train_s),
    ):
        yield _rect(colour, at_s, at_s + seconds, scale, y)
        at_s += seconds


def _rect(colour: str, begin_s: float, end_s: float, scale: Axis, y: float, height: float = LANE) -> str:
    x, width = scale.at(begin_s), max(scale.at(end_s) - scale.at(begin_s), 0.0)
    return (
        f'<rect class="{as_html(colour)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{end_s - begin_s:.1f} s</title></rect>"
    )


def _picture(picture: IterationPicture) -> Markup:
    lane = LANE if len(picture.rows) <= 16 else 8
    scale = Axis(low=0.0, high=picture.seconds, from_px=PICTURE_LEFT, to_px=WIDTH - 12)
    bottom = TOP + len(picture.rows) * (lane + 2)
    drawn = [
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {bottom + 22}" role="img" '
        'aria-label="what each GPU set does in one iteration">',
        time_ticks(0.0, scale, bottom),
    ]
    for number, (name, spans) in enumerate(picture.rows):
        y = TOP + number * (lane + 2)
        if lane == LANE or number % 4 == 0 or not name.startswith("s"):
            drawn.append(
                f'<text class="tick" x="{PICTURE_LEFT - 8}" y="{y + lane / 2 + 4:.1f}" text-anchor="end">'
                f"{as_html(_row_name(name))}</text>"
            )
        drawn += [_rect(colour_of(span), span.begin_s, span.end_s, scale, y, lane) for span in spans]
    hidden = picture.num_slabs - sum(name.startswith("s") for name, _ in picture.rows)
    note = f'<p class="none">{hidden:,} more simulated GPU sets are not shown.</p>' if hidden > 0 else ""
    return Markup("".join([*drawn, "</svg>", note]))


def _row_name(name: str) -> str:
    return f"GPU set {name[1:]}" if name[1:].isdecimal() else name


def colour_of(span: PictureSpan) -> str:
    """Returns the CSS class of what a slab does."""
    return role_colour(span.state)


def _curves(picture: IterationPicture) -> Markup:
    series = []
    for number, curve in enumerate(picture.curves):
        colour = CURVES[number % len(CURVES)]
        running = tuple((second, float(num)) for second, num, _ in curve.points)
        waiting = tuple((second, float(num)) for second, _, num in curve.points)
        series.append(Series(name=f"{curve.role}: running", points=running, colour=colour))
        series.append(Series(name=f"{curve.role}: waiting", points=waiting, colour=colour, dashed=True))
    title = "Requests that run and wait, over the seconds of the iteration"
    return line_chart(series, title=title, size=(WIDTH, 220), has_dots=False, x_title="seconds")
