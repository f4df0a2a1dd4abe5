"""Line charts as SVG text, for reports and documentation: nothing to install, nothing to load."""

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 34, 34  # margins around the plot
COLOURS = ("#e07018", "#3470be", "#2c9a5f", "#a23b72", "#8a6d3b", "#5b6770", "#c23b3b", "#6a5acd")

Line = Sequence[tuple[float, float]]


def line_chart(title: str, lines: Mapping[str, Line], *, x_label: str = "step") -> str:
    """One curve per entry of `lines`, of (x, y) points with rising x; NaN breaks a curve."""
    points = [p for line in lines.values() for p in line if math.isfinite(p[1])]
    xs, ys = ([p[i] for p in points] or [0.0] for i in (0, 1))
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    rows = -(-len(lines) // 3)
    height = HEIGHT + 16 * rows
    plot = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)

    def x_at(x: float) -> float:
        return LEFT + plot[0] * (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - plot[1] * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 20, title, size=13, weight=600),
    ]
    for y in y_ticks:
        parts.append(_rule(LEFT, y_at(y), WIDTH - RIGHT, y_at(y)))
        parts.append(_text(LEFT - 6, y_at(y) + 4, f"{y:g}", anchor="end"))
    for x in x_ticks:
        parts.append(_text(x_at(x), HEIGHT - BOTTOM + 16, f"{x:g}", anchor="middle"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 4, x_label, anchor="end"))
    for i, (name, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        parts += [
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="'
            + " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in run)
            + '"/>'
            for run in _finite_runs(line)
        ]
        place = (LEFT + 122 * (i % 3), HEIGHT + 8 + 16 * (i // 3))
        parts.append(_rule(place[0], place[1] - 4, place[0] + 14, place[1] - 4, colour, 3))
        parts.append(_text(place[0] + 18, place[1], name))
    return "\n".join([*parts, "</svg>\n"])


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose low..high."""
    span = high - low or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (m * step) <= 5)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _finite_runs(line: Line) -> list[Line]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in line:
        if math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="#3a3732">{html.escape(text)}</text>'
    )


def _rule(
    x: float, y: float, to_x: float, to_y: float, colour: str = "#e6e2da", width: float = 1
) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )
