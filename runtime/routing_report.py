"""The routing of a text as a table of text, and as an HTML page with a heat map."""

from __future__ import annotations

from hybridtrt.runtime.html_page import page, table
from hybridtrt.runtime.routing import FACTORS, UNBALANCED, LayerRouting, Routing

WIDTH, LEFT, CELL_HEIGHT = 880, 56, 16
BRIGHTEST = 3.0  # times the mean load: from here on a cell has the full colour


def render_routing(routing: Routing) -> str:
    """A row a layer: the part of all choices that fell on the hottest and the coldest expert, and what overflows."""
    rows = [_head(routing), *(_row(routing, layer) for layer in routing.layers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, _footer(routing)])


def render_routing_html(routing: Routing, title: str) -> str:
    """The whole page."""
    warnings = "".join(f'<p class="bad">{line}</p>\n' for line in routing.warnings)
    rows = [_row(routing, layer) for layer in routing.layers]
    return page(
        title,
        f"<p>{_footer(routing)}</p>\n{warnings}<h2>Load by layer and expert</h2>\n{_heat_map(routing)}\n"
        f"<h2>Layers</h2>\n{table(_head(routing), rows)}\n",
    )


def _footer(routing: Routing) -> str:
    return (
        f"{routing.tokens} tokens in windows of {routing.context} and steps of at most {routing.step_tokens}; overflow "
        "is the part of the choices that finds no place in a step where experts take that many times the mean"
    )


def _bounded(routing: Routing) -> bool:
    return any(layer.refused is not None for layer in routing.layers)


def _head(routing: Routing) -> tuple[str, ...]:
    own = ("refused",) if _bounded(routing) else ()
    overflow = (f"overflow at {FACTORS[0]:g}", *(f"{factor:g}" for factor in FACTORS[1:]))
    return ("layer", "experts", "top k", "hottest", "coldest", "ratio", *overflow, *own)


def _row(routing: Routing, layer: LayerRouting) -> tuple[str, ...]:
    own = ("-" if layer.refused is None else _percent(layer.refused),) if _bounded(routing) else ()
    ends = (f"{_percent(layer.share(expert))} (no. {expert})" for expert in (layer.hottest, layer.coldest))
    counts = (str(layer.layer), str(len(layer.load)), str(layer.top_k))
    return (*counts, *ends, f"{layer.ratio:.1f}", *(_percent(rate) for rate in layer.overflow), *own)


def _percent(part: float) -> str:
    return f"{part:.1%}"


def _heat_map(routing: Routing) -> str:
    """A row a layer, a column an expert; the more tokens, the stronger the colour."""
    widest = max(len(layer.load) for layer in routing.layers)
    step, height = (WIDTH - LEFT) / widest, CELL_HEIGHT * len(routing.layers) + 40
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Load by layer and expert">']
    for row, layer in enumerate(routing.layers):
        y = row * CELL_HEIGHT
        kind = ' class="bad"' if layer.unbalanced else ""
        parts.append(f'<text{kind} x="{LEFT - 6}" y="{y + 12}" text-anchor="end">{layer.layer}</text>')
        for expert in range(len(layer.load)):
            share = layer.share(expert)
            strength = min(share * len(layer.load) / BRIGHTEST, 1.0)
            parts.append(
                f'<rect class="good" x="{LEFT + expert * step:.2f}" y="{y}" width="{step * 0.95:.2f}" '
                f'height="{CELL_HEIGHT - 1}" fill-opacity="{strength:.3f}"><title>layer {layer.layer}, '
                f"expert {expert}: {layer.load[expert]} tokens, {share:.2%}</title></rect>"
            )
    foot = CELL_HEIGHT * len(routing.layers) + 20
    parts.append(
        f'<text x="{LEFT}" y="{foot}">expert 0 to {widest - 1}, a row a layer; full colour from {BRIGHTEST:g} times '
        f"the mean on; red layers are out of balance ({UNBALANCED:g}:1)</text></svg>"
    )
    return "\n".join(parts)
