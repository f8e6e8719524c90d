"""The page of `yatt simulate`: table, chart and pictures as one self-contained HTML file, like the report."""

from collections.abc import Iterable, Sequence
from html import escape

from yatt.forecast.time.comparing import SimulatedResult
from yatt.forecast.time.picture import IterationPicture, PictureSpan
from yatt.forecast.time.recommending import Recommendation
from yatt.obs.page import parts
from yatt.obs.page.charts import Axis, Series, line_chart
from yatt.obs.page.page_file import whole_page
from yatt.obs.page.timeline import role_colour, time_ticks
from yatt.obs.story.words import duration_in_words

WIDTH, NAMES, RIGHT = 1180, 530, 64
LANE, GAP, TOP = 18, 6, 8
PICTURE_LEFT = 96
LEGEND = (
    ("p-rollout", "rollout"), ("p-genrm", "GenRM"), ("p-trainer", "trainer"), ("p-switch", "switch"),
    ("p-idle", "idle"),
)  # fmt: skip
BAR_LEGEND = (
    ("p-rollout", "sampling and judging"), ("p-switch", "switch"), ("p-trainer", "training"),
    ("p-idle", "one of two tracks waits"),
)  # fmt: skip
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
    said = "".join(f'<p class="say">{parts.as_html(sentence)}</p>' for sentence in says)
    noted = "".join(f'<p class="soft">{parts.as_html(sentence)}</p>' for sentence in notes)
    drawn = "".join(
        f"<h3>{parts.as_html(result.alternative.name)}: {duration_in_words(picture.seconds)}</h3>"
        f"{_picture(picture)}{_curves(picture)}"
        for result, picture in pictures
    )
    body = (
        f'<div class="top"><h1>{parts.as_html(title)}</h1></div>'
        '<div class="soft">simulated, not measured</div>'
        f"{parts.fact_boxes(facts)}{said}"
        f'<h2>Settings</h2><div class="card">{results_table(found)}</div>'
        f'<h2>Seconds per iteration</h2><div class="card">{_legend(BAR_LEGEND)}{iteration_bars(found)}</div>'
        f'<h2>One iteration</h2><div class="card">{_legend(LEGEND)}{drawn}</div>'
        f"<h2>What the figures mean</h2>{noted}"
    )
    return whole_page(f"{parts.as_html(title)}: yatt simulate", body)


def results_table(found: Recommendation) -> str:
    """Returns the table of all settings, the fastest first."""
    roles = list(dict.fromkeys(role for each in found.results for role in each.idle))
    names = ("setting", "iteration", "sampling", "training", "tokens/s", *(f"idle {r}" for r in roles),
             "moves", "oldest token")  # fmt: skip
    head = "".join(f"<th{' class=n' if i else ''}>{parts.as_html(n)}</th>" for i, n in enumerate(names))
    rows = []
    for result in sorted(found.results, key=lambda each: each.iteration_s):
        cells = [
            f"{result.iteration_s:,.1f} s", f"{result.sampling_s:,.1f} s", f"{result.train_s:,.1f} s",
            f"{result.tokens_per_s:,.0f}",
            *(f"{result.idle[role]:.0%}" if role in result.idle else "" for role in roles),
            f"{result.moves:,.1f}", f"{result.most_age} version{'s' if result.most_age != 1 else ''}",
        ]  # fmt: skip
        numbers = "".join(f'<td class="n">{parts.as_html(cell)}</td>' for cell in cells)
        rows.append(f"<tr><td>{_marked(result, found)}</td>{numbers}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _marked(result: SimulatedResult, found: Recommendation) -> str:
    name = parts.as_html(result.alternative.name)
    marks = [
        word for word, each in (("as configured", found.own), ("recommended", found.best)) if each is result
    ]
    return f"<b>{name}</b> ({', '.join(marks)})" if marks else name


def iteration_bars(found: Recommendation) -> str:
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
            f"{parts.as_html(result.alternative.name)}</text>"
        )
        drawn += _bar(result, scale, y)
        end = scale.at(result.iteration_s) + 6
        drawn.append(f'<text class="tick" x="{end:.1f}" y="{y + 13}">{result.iteration_s:,.0f} s</text>')
    return "".join([*drawn, "</svg>"])


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
        f'<rect class="{escape(colour)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{end_s - begin_s:.1f} s</title></rect>"
    )


def _picture(picture: IterationPicture) -> str:
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
                f"{parts.as_html(_row_name(name))}</text>"
            )
        drawn += [_rect(colour_of(span), span.begin_s, span.end_s, scale, y, lane) for span in spans]
    hidden = picture.num_slabs - sum(name.startswith("s") for name, _ in picture.rows)
    note = f'<p class="none">{hidden:,} more simulated GPU sets are not shown.</p>' if hidden > 0 else ""
    return "".join([*drawn, "</svg>", note])


def _row_name(name: str) -> str:
    return f"GPU set {name[1:]}" if name[1:].isdecimal() else name


def colour_of(span: PictureSpan) -> str:
    """Returns the CSS class of what a slab does."""
    return role_colour(span.state)


def _curves(picture: IterationPicture) -> str:
    series = []
    for number, curve in enumerate(picture.curves):
        colour = CURVES[number % len(CURVES)]
        running = tuple((second, float(num)) for second, num, _ in curve.points)
        waiting = tuple((second, float(num)) for second, _, num in curve.points)
        series.append(Series(name=f"{curve.role}: running", points=running, colour=colour))
        series.append(Series(name=f"{curve.role}: waiting", points=waiting, colour=colour, dashed=True))
    title = "Requests that run and wait, over the seconds of the iteration"
    return line_chart(series, title=title, size=(WIDTH, 220), has_dots=False, x_title="seconds")


def _legend(named: Iterable[tuple[str, str]]) -> str:
    keys = "".join(f'<span><i class="swatch {colour}"></i>{name}</span>' for colour, name in named)
    return f'<div class="legend">{keys}</div>'
