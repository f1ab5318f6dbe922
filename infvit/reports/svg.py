"""Line charts as SVG, to stand inside a page."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#e69f00", "#777777", "#005f73", "#9b2226")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 260, 56, 12, 28, 34


@dataclass(frozen=True)
class Series:
    """One line: the key by which the page finds it, its name, its colour and its points."""

    key: str
    name: str
    color: str
    points: Sequence[tuple[float, float]]


def line_chart(title: str, series: Sequence[Series]) -> str:
    """Draws lines over the epochs on common axes; lines of one point are dots."""
    points = [point for line in series for point in line.points if math.isfinite(point[1])]
    xs, ys = ([point[i] for point in points] for i in (0, 1))
    x_ticks, y_ticks = ticks(min(xs), max(xs), whole=True), ticks(min(ys), max(ys))
    low, high = min(*ys, y_ticks[0]), max(*ys, y_ticks[-1])
    first, last = min(xs), max(xs)

    def x(value: float) -> float:
        share = (value - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
             f'<text x="{LEFT}" y="16" class="title">{html.escape(title)}</text>']  # fmt: skip
    for tick in y_ticks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:.6g}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{x(tick)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}" text-anchor="middle">epoch</text>')
    for line in series:
        parts.append(_line(line, [(x(a), y(b)) for a, b in line.points if math.isfinite(b)]))
    return "\n".join([*parts, "</svg>"])


def _line(line: Series, points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return ""
    name = f"<title>{html.escape(line.name)}</title>"
    if len(points) == 1:
        (a, b) = points[0]
        return f'<circle data-run="{line.key}" cx="{a}" cy="{b}" r="3" fill="{line.color}">{name}</circle>'
    path = " ".join(f"{a},{b}" for a, b in points)
    return f'<polyline data-run="{line.key}" points="{path}" stroke="{line.color}">{name}</polyline>'


def ticks(low: float, high: float, whole: bool = False, count: int = 5) -> list[float]:
    """Returns about `count` round numbers that lie in a range and, for numbers that are not whole, cover it.

    Args:
        low: the smallest value.
        high: the largest.
        whole: only whole numbers, inside the range.
        count: how many, about.
    """
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
        return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [round(i * step, 12) for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
