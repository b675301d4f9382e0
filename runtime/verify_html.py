"""The report of a verification as one HTML page without outside parts: figures, and a picture of the error by layer."""

from __future__ import annotations

import math
from html import escape

from hybridtrt.runtime.html_page import page, table
from hybridtrt.runtime.verify import LayerReport, VerifyReport, show

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 880, 320, 56, 44, 28
LOWEST = -9  # decade at the foot of the picture


def render_html(report: VerifyReport, title: str) -> str:
    """The whole page; it follows the reader's light or dark scheme."""
    verdict = "passed" if report.passed else "FAILED"
    summary = (
        f'<p><span class="{"good" if report.passed else "bad"}">{verdict}</span>: largest logit error '
        f"{show(report.logit_error)} of the logits' standard deviation against {report.threshold:g}; "
        f"{report.greedy_agree} of {report.greedy_tokens} greedy tokens equal. {escape(report.departure())}</p>"
    )
    prompts = table(
        ("prompt tokens", "logit error / std", "greedy tokens equal"),
        [
            (
                str(prompt.prompt_tokens),
                show(prompt.logit_error),
                f"{prompt.greedy_agree} of {prompt.greedy_tokens}",
            )
            for prompt in report.prompts
        ],
    )
    layers = table(
        ("layer", "mixer", "ffn", "error / std"),
        [(layer.layer, layer.mixer, layer.ffn, show(layer.error)) for layer in report.layers],
        words=(1, 2),
    )
    return page(
        title,
        f"<p>{escape(report.architecture)} against transformers' full forward in float32.</p>\n{summary}\n"
        f"<h2>Error by layer</h2>\n{_picture(report)}\n<h2>Prompts</h2>\n{prompts}\n<h2>Layers</h2>\n{layers}\n",
    )


def _picture(report: VerifyReport) -> str:
    """Bars on a logarithmic scale, the threshold as a dashed line."""
    finite = [layer.error for layer in report.layers if 0 < layer.error < math.inf]
    top = max(0, math.ceil(math.log10(max([*finite, report.threshold]))))
    foot = HEIGHT - BOTTOM

    def height(value: float) -> float:
        decade = top if value == math.inf else math.log10(max(value, 10.0**LOWEST))
        return foot - (foot - TOP) * (min(decade, top) - LOWEST) / (top - LOWEST)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Error after each layer">']
    for decade in range(LOWEST, top + 1):
        y = height(10.0**decade)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{decade}</text>')
    step = (WIDTH - LEFT) / max(len(report.layers), 1)
    every = max(1, round(34 / step))
    first = report.first_departure
    for i, layer in enumerate(report.layers):
        x, y = LEFT + i * step, height(layer.error)
        kind = "bad" if layer.error > report.threshold else "good"
        parts.append(
            f'<rect class="{kind}" x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{min(step * 0.8, 40):.1f}" '
            f'height="{max(foot - y, 1):.1f}"><title>{escape(_label(layer))}</title></rect>'
        )
        if i and (i - 1) % every == 0:
            parts.append(f'<text x="{x + step * 0.1:.1f}" y="{foot + 16}">{escape(layer.layer)}</text>')
        if layer is first:
            anchor = "start" if x < WIDTH / 2 else "end"
            parts.append(f'<text x="{x:.1f}" y="{TOP - 10}" text-anchor="{anchor}">first departs: {layer.layer}</text>')
    y = height(report.threshold)
    parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">dashed: threshold {report.threshold:g}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">layer (the first bar is the embedding)</text></svg>')
    return "\n".join(parts)


def _label(layer: LayerReport) -> str:
    return " · ".join(part for part in (layer.layer, layer.mixer, layer.ffn, show(layer.error)) if part)
