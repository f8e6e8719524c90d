"""The timeline of one attempt as SVG: phases, batches, lease holders per slab, failures, over wall time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from yatt.obs.page.charts import Axis
from yatt.obs.page.page_file import as_html
from yatt.obs.story.history import AttemptView
from yatt.obs.story.words import duration_in_words, phase_in_words

MAX_SLABS = 32
MAX_BARS = 600
WIDTH, LEFT, RIGHT = 1180, 96, 12
LANE, GAP, TOP = 20, 5, 8
TICKS_S = (
    0.01,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    14400,
    28800,
    86400,
    604800,
)
PHASE_COLOURS = {
    "join": "p-start",
    "build": "p-start",
    "rollout": "p-rollout",
    "score": "p-genrm",
    "train": "p-trainer",
    "publish": "p-weights",
    "sync": "p-weights",
    "save": "p-save",
    "commit": "p-save",
    "export": "p-save",
    "validate": "p-validate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    begin_s: float
    end_s: float
    colour: str
    text: str
    title: str


def draw_timeline(attempt: AttemptView, *, begin_s: float, end_s: float) -> Markup:
    """Draws one attempt, or the part between two wall times."""
    lanes = _lanes(attempt)
    scale = Axis(low=begin_s, high=max(end_s, begin_s + 0.001), from_px=LEFT, to_px=WIDTH - RIGHT)
    bottom = TOP + len(lanes) * (LANE + GAP)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {bottom + 22}" role="img" '
        f'aria-label="timeline of attempt {attempt.number}">'
    ]
    parts.append(time_ticks(attempt.span.begin_s, scale, bottom))
    for number, (name, bars) in enumerate(lanes):
        y = TOP + number * (LANE + GAP)
        parts.append(
            f'<text class="key" x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{as_html(name)}</text>'
        )
        parts.append(
            f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}"/>'
        )
        parts += [_bar(bar, scale, y) for bar in _visible(bars, begin_s, end_s)]
    names = [name for name, _ in lanes]
    for mark in attempt.marks:
        if begin_s <= mark.at_s <= end_s:
            y = TOP + (names.index(mark.slab) if mark.slab in names else 0) * (LANE + GAP)
            x = scale.at(mark.at_s)
            parts.append(
                f'<path class="mark" d="M{x:.1f},{y + LANE - 4} l-5,-10 h10 z">'
                f"<title>{as_html(mark.text)}</title></path>"
            )
    return Markup("".join([*parts, "</svg>"]))


def last_iterations(attempt: AttemptView, count: int) -> tuple[float, float] | None:
    """Returns begin and end of the last `count` complete iterations; None if a zoom would show nothing
    new."""
    begins = [span.begin_s for span in attempt.span.phases if span.phase == "rollout"]
    if len(begins) <= count:
        return (begins[0], attempt.span.end_s) if begins else None
    ended = [span.end_s for span in attempt.span.phases]
    return begins[-count], max(ended)


def hidden_slabs(attempt: AttemptView) -> int:
    """Returns the number of slabs that the timeline leaves out."""
    return max(0, len({span.slab for span in attempt.leases}) - MAX_SLABS)


def role_colour(holder: str) -> str:
    """Returns the CSS class of a holder's bars."""
    if holder == "quarantined":
        return "p-bad"
    return "p-genrm" if holder.startswith("genrm:") else f"p-{holder}"


def _lanes(attempt: AttemptView) -> list[tuple[str, list[_Bar]]]:
    phases = [
        _Bar(
            begin_s=span.begin_s,
            end_s=span.end_s,
            colour=PHASE_COLOURS.get(span.phase, "p-start"),
            text=f"{phase} {span.iteration}" if span.iteration else phase,
            title=f"{phase}, iteration {span.iteration}: {span.end_s - span.begin_s:.2f} s",
        )
        for span in attempt.span.phases
        for phase in (phase_in_words(span.phase),)
    ]
    batches = [
        _Bar(
            begin_s=batch.begin_s,
            end_s=batch.end_s,
            colour=PHASE_COLOURS["rollout"],
            text=f"batch {batch.iteration}",
            title=f"batch {batch.iteration}, sampled by policy version {batch.policy_version} "
            f"(age {batch.age}): {batch.end_s - batch.begin_s:.2f} s",
        )
        for batch in attempt.span.batches
    ]
    slabs: dict[str, list[_Bar]] = {}
    for lease in sorted(attempt.leases, key=lambda span: (len(span.slab), span.slab, span.begin_s)):
        held_s = lease.end_s - lease.begin_s
        slabs.setdefault(lease.slab, []).append(
            _Bar(
                begin_s=lease.begin_s,
                end_s=lease.end_s,
                colour=role_colour(lease.holder),
                text=lease.holder,
                title=f"{lease.slab}: {lease.holder} for {held_s:.2f} s",
            )
        )
    tracks = [("training", phases), ("sampling", batches)] if batches else [("phase", phases)]
    shown = _shown_slabs(attempt)
    return [*tracks, *((name, bars) for name, bars in slabs.items() if name in shown)]


def _shown_slabs(attempt: AttemptView) -> set[str]:
    """Returns the slabs that have a lane; of too many, first those with the most roles."""
    roles: dict[str, set[str]] = {}
    for lease in attempt.leases:
        roles.setdefault(lease.slab, set()).add(lease.holder)
    return set(sorted(roles, key=lambda slab: (-len(roles[slab]), len(slab), slab))[:MAX_SLABS])


def _visible(bars: Sequence[_Bar], begin_s: float, end_s: float) -> list[_Bar]:
    """Bars inside the window; of too many, the longest one in each of `MAX_BARS` columns."""
    inside = [bar for bar in bars if bar.end_s >= begin_s and bar.begin_s <= end_s]
    if len(inside) <= MAX_BARS:
        return inside
    width_s = (end_s - begin_s) / MAX_BARS
    columns: dict[int, tuple[float, _Bar]] = {}
    for bar in inside:
        first, last = int((bar.begin_s - begin_s) / width_s), int((bar.end_s - begin_s) / width_s)
        for column in range(max(0, first), min(last, MAX_BARS - 1) + 1):
            left_s = begin_s + column * width_s
            share_s = min(bar.end_s, left_s + width_s) - max(bar.begin_s, left_s)
            if column not in columns or share_s > columns[column][0]:
                columns[column] = (share_s, bar)
    return [
        replace(bar, begin_s=begin_s + column * width_s, end_s=begin_s + (column + 1) * width_s)
        for column, (_, bar) in sorted(columns.items())
    ]


def _bar(bar: _Bar, scale: Axis, y: float) -> str:
    x = scale.at(max(bar.begin_s, scale.low))
    width = max(0.7, scale.at(min(bar.end_s, scale.high)) - x - 0.6)
    rect = (
        f'<rect class="{as_html(bar.colour)}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" rx="2">'
        f"<title>{as_html(bar.title)}</title></rect>"
    )
    if width < 7 * len(bar.text) + 6:
        return rect
    return rect + f'<text class="on" x="{x + 5:.1f}" y="{y + 14}">{as_html(bar.text)}</text>'


def time_ticks(origin_s: float, scale: Axis, bottom: float) -> str:
    """Draws vertical lines at round seconds after `origin_s`, down to `bottom`, with their labels."""
    low_s, high_s = scale.low - origin_s, scale.high - origin_s
    step_s = next((step for step in TICKS_S if (high_s - low_s) / step <= 12), TICKS_S[-1])
    marks = [index * step_s for index in range(math.ceil(low_s / step_s), math.floor(high_s / step_s) + 1)]
    return "".join(
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{x:.1f}" y="{bottom + 12}" text-anchor="middle">'
        f"{f'{s:g}s' if step_s < 1 else duration_in_words(s)}</text>"
        for s, x in ((s, scale.at(s + origin_s)) for s in marks)
    )
