"""Charts as SVG text that needs nothing else: lines or points, with intervals, and a legend."""

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 720, 360  # the height grows with the legend
LEGEND_LINE = 16
LEFT, RIGHT, TOP, BOTTOM = 64, 200, 36, 48  # margins; the legend stands in the right one
COLOURS = (  # Okabe and Ito's, which stay apart for colour-blind readers
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#000000",
    "#999933",
    "#882255",
    "#666666",
)


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None  # of the interval around y
    high: float | None = None
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    line: bool = True


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_ticks: Mapping[float, str] | None = None,
    log_x: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    """One <svg> element. Without `x_ticks` the axis has round numbers, or powers of two."""
    points = [point for one in series for point in one.points]
    scale = math.log2 if log_x else float
    xs = [scale(p.x) for p in points] + [scale(x) for x in x_ticks or ()]
    ys = [y for p in points for y in (p.y, p.low, p.high) if y is not None]
    height = max(HEIGHT, TOP + BOTTOM + LEGEND_LINE * len(series))
    x_low, x_high = _padded(min(xs), max(xs))
    y_low, y_high = y_range or _padded(min(ys), max(ys))

    def across(x: float) -> float:
        return LEFT + (scale(x) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        share = (min(max(y, y_low), y_high) - y_low) / (y_high - y_low)
        return height - BOTTOM - share * (height - TOP - BOTTOM)

    if x_ticks is None:
        x_ticks = _powers(x_low, x_high) if log_x else _round_numbers(x_low, x_high)
    parts = [_axes(title, x_label, y_label, height)]
    for x, text in x_ticks.items():
        parts.append(_text(across(x), height - BOTTOM + 16, text, "middle"))
    for y, text in _round_numbers(y_low, y_high).items():
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(y):.1f}" y2="{down(y):.1f}" '
            f'stroke="#ddd"/>' + _text(LEFT - 6, down(y) + 4, text, "end")
        )
    for i, one in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        places = [(across(p.x), down(p.y)) for p in one.points]
        if one.line and len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"'
                f"{_dashes(i)}/>"
            )
        for point, (x, y) in zip(one.points, places, strict=True):
            parts.append(_mark(point, x, y, colour, down))
        parts.append(_legend_line(i, one.name, colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11" role="img">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>'
    )


def _axes(title: str, x_label: str, y_label: str, height: int) -> str:
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + height - BOTTOM) / 2
    return (
        f'<text x="{LEFT}" y="20" font-size="13" font-weight="bold">{html.escape(title)}</text>'
        + _text(middle, height - 10, x_label, "middle")
        + f'<text transform="translate(14,{centre}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(y_label)}</text>"
        f'<path d="M{LEFT},{TOP}V{height - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>'
    )


def _mark(point: Point, x: float, y: float, colour: str, down) -> str:
    tip = f"<title>{html.escape(point.label)}</title>" if point.label else ""
    mark = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}">{tip}</circle>'
    if point.low is None or point.high is None:
        return mark
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{down(point.low):.1f}" y2="{down(point.high):.1f}" '
        f'stroke="{colour}" stroke-opacity="0.5"/>' + mark
    )


def _legend_line(index: int, name: str, colour: str) -> str:
    x, y = WIDTH - RIGHT + 14, TOP + 8 + LEGEND_LINE * index
    return (
        f'<line x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}" stroke="{colour}" '
        f'stroke-width="2"{_dashes(index)}/>' + _text(x + 24, y + 4, name, "start")
    )


def _dashes(index: int) -> str:
    pattern = ("", "5 3", "1 3", "8 3 1 3")[min(index // len(COLOURS), 3)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.05 or 0.5
    return low - room, high + room


def _round_numbers(low: float, high: float) -> dict[float, str]:
    """About five multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return {tick: f"{tick:,.{digits}f}" for tick in ticks}


def _powers(low: float, high: float) -> dict[float, str]:
    """Powers of two between two logarithms."""
    return {2.0**i: f"{2**i:,}" for i in range(max(0, math.ceil(low)), math.floor(high) + 1)}
