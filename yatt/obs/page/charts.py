"""Line charts as SVG text, without a library or script, so that a report is one small file.

Colours are classes of the report's style sheet, which has a light and a dark set.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from yatt.obs.page.page_file import as_html
from yatt.obs.story.words import short_number

MAX_DOTS = 80
SMOOTHED_FROM = 40
"""Points from which a series is drawn faintly, below its moving mean."""

SMOOTHED_SHARE = 20
"""The moving mean is over the points divided by this."""

LARGEST = 1e100


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart. `colour`: a class of the style sheet; `on_right`: uses the right axis."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dashed: bool = False
    on_right: bool = False
    changes: Mapping[float, str] = field(default_factory=dict)
    """Places on the horizontal axis that get a vertical line, and what each means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A linear scale from values to pixels."""

    low: float
    high: float
    from_px: float
    to_px: float

    def at(self, value: float) -> float:
        """Returns the pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.from_px + share * (self.to_px - self.from_px)

    def ticks(self, count: int, *, whole: bool = False) -> list[float]:
        """Returns about `count` round values inside the scale; only integers if `whole`."""
        step = _round_step((self.high - self.low) / count)
        step = max(1.0, math.ceil(step)) if whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def axis_over(values: Iterable[float], *, from_px: float, to_px: float, pad: float = 0.08) -> Axis:
    """Returns a scale over all values with padding; a constant gets padding in proportion to its value."""
    known = list(values)
    low, high = min(known, default=0.0), max(known, default=1.0)
    air = (high - low) * pad or abs(high) * 0.1 or 1.0
    return Axis(low=low - air, high=high + air, from_px=from_px, to_px=to_px)


def finite_points(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns the points that can be drawn: finite, and small enough for finite differences and ratios."""
    drawn = ((x, y) for x, y in points if math.isfinite(x) and abs(y) < LARGEST)
    return tuple((x, y if abs(y) > 1 / LARGEST else 0.0) for x, y in drawn)


def smoothed_points(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns the centred moving mean of a series; near its ends over fewer points. Empty for a short one."""
    if len(points) < SMOOTHED_FROM:
        return ()
    half = max(2, len(points) // SMOOTHED_SHARE) // 2 + 1
    sums = list(itertools.accumulate((y for _, y in points), initial=0.0))
    found = []
    for index, (x, _) in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        low, high = index - reach, index + reach + 1
        found.append((x, (sums[high] - sums[low]) / (high - low)))
    return tuple(found)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    size: tuple[int, int],
    label: str = "",
    has_dots: bool = True,
    x_title: str = "iteration",
) -> Markup:
    """Returns an SVG of all series, with a legend if there are several. A long series that is marked by dots
    is faint, below its moving mean.

    Args:
        size: width and height in pixels, before the page scales it.
        has_dots: marks the points of a short series, each with its iteration.
        label: text for screen readers; the title if empty.
        x_title: title of the horizontal axis.
    """
    width, height = size
    drawn = [line for line in series if line.points]
    if not drawn:
        return Markup(f'<p class="none">{as_html(title)}: no values yet.</p>')
    several = len(drawn) > 1 or drawn[0].on_right
    rows = 0 if not several else math.ceil(len(drawn) / _columns(width))
    top, bottom, left = 12 + 18 * rows, height - 36, 46
    has_right = any(line.on_right for line in drawn)
    right = width - (46 if has_right else 12)
    xs = axis_over((x for line in drawn for x, _ in line.points), from_px=left, to_px=right, pad=0.02)
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{as_html(label or title)}">'
    ]
    for place, text in (change for line in drawn for change in line.changes.items()):
        x = f"{xs.at(place):.1f}"
        line = f'<line class="change" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
        parts.append(f"<g><title>{as_html(text)}</title>{line}</g>")
    for is_right in (False, True):
        lines = [line for line in drawn if line.on_right is is_right]
        if lines:
            ys = axis_over((y for line in lines for _, y in line.points), from_px=bottom, to_px=top)
            parts.append(_grid(ys, left, right, is_right=is_right))
            parts += [_line(line, xs, ys, has_dots=has_dots) for line in lines]
    parts += [_x_axis(xs, bottom, x_title), _legend(drawn, width) if several else "", "</svg>"]
    return Markup("".join(parts))


def _round_step(raw: float) -> float:
    scale = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    return next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * 0.999)


def _grid(ys: Axis, left: float, right: float, *, is_right: bool) -> str:
    parts = []
    for value in ys.ticks(5):
        y = ys.at(value)
        if not is_right:
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        x, anchor = (right + 6, "start") if is_right else (left - 6, "end")
        parts.append(
            f'<text class="tick" x="{x}" y="{y + 3.5:.1f}" text-anchor="{anchor}">'
            f"{short_number(value)}</text>"
        )
    return "".join(parts)


def _x_axis(xs: Axis, bottom: float, title: str) -> str:
    ticks = "".join(
        f'<text class="tick" x="{xs.at(value):.1f}" y="{bottom + 16}" text-anchor="middle">{value:.0f}</text>'
        for value in xs.ticks(8, whole=True)
    )
    middle = (xs.from_px + xs.to_px) / 2
    named = (
        f'<text class="tick" x="{middle:.0f}" y="{bottom + 31}" text-anchor="middle">{as_html(title)}</text>'
    )
    return f'<line class="axis" x1="{xs.from_px}" x2="{xs.to_px}" y1="{bottom}" y2="{bottom}"/>{ticks}{named}'


def _line(line: Series, xs: Axis, ys: Axis, *, has_dots: bool) -> str:
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    mean = smoothed_points(line.points) if has_dots else ()
    faint = " faint" if mean else ""
    path = f'<polyline class="line {line.colour}{faint}" points="{_places(line.points, xs, ys)}"{dash}/>'
    if mean:
        return path + f'<polyline class="line {line.colour}" points="{_places(mean, xs, ys)}"{dash}/>'
    if not has_dots or len(line.points) > MAX_DOTS:
        return path
    dots = (
        f'<circle class="dot {line.colour}" cx="{xs.at(x):.1f}" cy="{ys.at(y):.1f}" r="2.6">'
        f"<title>{as_html(line.name)}, iteration {x:.0f}: {short_number(y)}</title></circle>"
        for x, y in line.points
    )
    return path + "".join(dots)


def _places(points: Iterable[tuple[float, float]], xs: Axis, ys: Axis) -> str:
    return " ".join(f"{xs.at(x):.1f},{ys.at(y):.1f}" for x, y in points)


def _columns(width: int) -> int:
    return 2 if width < 600 else 4


def _legend(lines: Sequence[Series], width: int) -> str:
    columns, step = _columns(width), width / _columns(width)
    parts = []
    for index, line in enumerate(lines):
        x, y = 46 + step * (index % columns), 12 + 18 * (index // columns)
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        side = " (right axis)" if line.on_right else ""
        parts.append(
            f'<line class="line {line.colour}" x1="{x:.0f}" x2="{x + 20:.0f}" y1="{y}" y2="{y}"{dash}/>'
            f'<text class="key" x="{x + 26:.0f}" y="{y + 4}">{as_html(line.name + side)}</text>'
        )
    return "".join(parts)
