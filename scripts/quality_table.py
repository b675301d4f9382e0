#!/usr/bin/env python3
"""What storing less precisely costs: perplexity of a text for each way to store a model, as a Markdown table."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hybridtrt.build.build import build, default_build_config
from hybridtrt.build.engine import ENGINE_FILE
from hybridtrt.converters.convert import convert
from hybridtrt.progress import stage_progress
from hybridtrt.runtime.evaluate import evaluate

TEXT = "held_out.txt"  # beside a demo model
VARIANTS: dict[str, dict[str, Any]] = {  # the first is what the others are compared with
    "float32 weights": {"weights": "float32"},
    "bfloat16 weights": {"weights": "bfloat16"},
    "bfloat16 weights and activations": {"weights": "bfloat16", "activations": "bfloat16"},
    "int8 weights": {"weights": "int8"},
    "int4 weights, groups of 32": {"weights": "int4", "group_size": 32},
    "bfloat16 states": {"weights": "float32", "state_dtype": "bfloat16"},
    "bfloat16 KV": {"weights": "float32", "kv_cache_dtype": "bfloat16"},
}
CACHES = ("state_dtype", "kv_cache_dtype")  # their variants run a token a step, so that all is read from the caches


@dataclass(frozen=True)
class Row:
    """One model stored one way; `change` is of the perplexity against the first way."""

    model: str
    stored: str
    engine_mb: float
    perplexity: float
    bits_per_byte: float
    change: float


def main() -> int:
    """Convert, build each variant, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders with a tokenizer")
    parser.add_argument("--text", type=Path, help=f"a text in UTF-8; by default {TEXT} in the model's folder")
    parser.add_argument("--context", type=int, default=256, help="tokens of a window")
    parser.add_argument("--threads", type=int, help="compute threads")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        rows = [row for model in args.models for row in measure(model, args.text, args.context, args.threads)]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"context": args.context, "rows": [asdict(row) for row in rows]}) if args.json else render(rows))
    return 0


def measure(model: Path, text: Path | None, context: int, threads: int | None = None) -> list[Row]:
    """A row for each of `VARIANTS`."""
    show, rows = stage_progress(model.name), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "checkpoint")
        convert(model, checkpoint)
        for name, fields in VARIANTS.items():
            show(name)
            engine = Path(folder, name)
            build(checkpoint, engine, replace(default_build_config(checkpoint), **fields))
            chunk = 1 if any(field in CACHES for field in fields) else None
            result = evaluate(engine, text or model / TEXT, context, chunk, threads)
            change = result.perplexity / rows[0].perplexity - 1 if rows else 0.0
            size = (engine / ENGINE_FILE).stat().st_size / 1e6
            rows.append(Row(model.name, name, size, result.perplexity, result.bits_per_byte, change))
    return rows


def render(rows: list[Row]) -> str:
    """The table."""
    lines = ["| model | stored as | engine, MB | perplexity | bits per byte | change |", "|---|---|---|---|---|---|"]
    for row in rows:
        change = "" if row.stored == next(iter(VARIANTS)) else f"{100 * row.change:+.3f} %"
        cells = (row.model, row.stored, f"{row.engine_mb:.2f}", f"{row.perplexity:.3f}", f"{row.bits_per_byte:.4f}")
        lines.append(f"| {' | '.join((*cells, change))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
