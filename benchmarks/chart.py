"""Small line charts as SVG, without a library; black on white, so that they can be read anywhere."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, GAP = 420, 280, 24  # of a panel and between panels
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 34, 44  # around the lines of a panel
KEY_ROW = 16
COLOURS = ("#1b6ca8", "#c8553d", "#3b8b5a", "#8a5aa8", "#b5852a", "#4a4a4a", "#d0709f", "#5aa0a8")


@dataclass(frozen=True)
class Panel:
    """Lines over common x values, drawn from 0 up."""

    title: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float]]


def line_chart(panels: Sequence[Panel], x_label: str, y_label: str, columns: int = 2) -> str:
    """An SVG of panels beside and below each other; a name has the same colour in all of them."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    columns = min(columns, len(panels))
    height = HEIGHT + KEY_ROW * max(math.ceil(len(panel.lines) / 3) for panel in panels)
    rows = math.ceil(len(panels) / columns)
    whole = (columns * WIDTH + (columns - 1) * GAP, rows * height + (rows - 1) * GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole[0]}" height="{whole[1]}" '
        f'viewBox="0 0 {whole[0]} {whole[1]}" font-family="sans-serif" font-size="11">',
        f'<rect width="{whole[0]}" height="{whole[1]}" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        at = (i % columns * (WIDTH + GAP), i // columns * (height + GAP))
        parts += [f'<g transform="translate({at[0]},{at[1]})">', *_panel(panel, colours, x_label, y_label), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    size = 10 ** math.floor(math.log10(most / count))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor * count >= most * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _panel(panel: Panel, colours: Mapping[str, str], x_label: str, y_label: str) -> list[str]:
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    x_ticks = ticks(max(panel.x))
    y_ticks = ticks(max(max(line) for line in panel.lines.values()))

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + across * x / x_ticks[-1], TOP + up * (1 - y / y_ticks[-1])

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(words)}</text>'

    parts = [text(LEFT, 18, panel.title, "start", ' font-weight="bold" font-size="13"')]
    for tick in y_ticks:
        y = place(0, tick)[1]
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + across}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        parts.append(text(place(tick, 0)[0], TOP + up + 16, f"{tick:,g}"))
    parts.append(text(LEFT + across / 2, TOP + up + 32, x_label))
    middle = TOP + up / 2
    parts.append(text(14, middle, y_label, more=f' transform="rotate(-90 14 {middle:.1f})"'))
    for i, (name, line) in enumerate(panel.lines.items()):
        points = [place(x, y) for x, y in zip(panel.x, line, strict=True)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colours[name]}"/>' for x, y in points]
        x, y = LEFT + i % 3 * across / 3, HEIGHT + i // 3 * KEY_ROW
        parts.append(f'<rect x="{x:.1f}" y="{y - 8:.1f}" width="9" height="9" fill="{colours[name]}"/>')
        parts.append(text(x + 13, y, name, "start"))
    return parts
