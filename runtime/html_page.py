"""A report as one HTML page without outside parts. It follows the reader's light or dark scheme."""

from __future__ import annotations

from html import escape

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1f24; --faint: #d5d9e0; --muted: #5b6472; --good: #2a6fbb;
  --bad: #c23b22; }
@media (prefers-color-scheme: dark) { :root { --back: #15181d; --text: #e6e9ee; --faint: #363c47; --muted: #9aa4b2;
  --good: #6fb1f2; --bad: #ff7d63; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; max-width: 900px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--muted); font-size: 11px; }
.good { fill: var(--good); color: var(--good); } .bad { fill: var(--bad); color: var(--bad); font-weight: 600; }
.grid { stroke: var(--faint); } .limit { stroke: var(--text); stroke-dasharray: 5 4; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--faint); }
th { color: var(--muted); font-weight: 500; } td.word, th.word { text-align: left; }
"""


def page(title: str, body: str) -> str:
    """The whole page; `body` is markup, the title text."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], words: tuple[int, ...] = ()) -> str:
    """Cells are text; the columns `words` are set to the left, numbers to the right."""

    def line(tag: str, cells: tuple[str, ...]) -> str:
        classes = [' class="word"' if i in words else "" for i in range(len(cells))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, classes, strict=True))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{line('th', head)}</tr></thead><tbody>\n{body}\n</tbody></table>"
