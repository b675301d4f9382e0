#!/usr/bin/env python3
"""Peak anonymous memory and speed of a conversion of about 2 GB, against the bound: the largest layer and 1 GB.

The checkpoint has random bytes as weights; the conversion runs in a child process, whose anonymous memory (`RssAnon` of
Linux: without the mapped files) is sampled every few milliseconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hybridtrt.converters.checkpoint import weight_layouts
from hybridtrt.converters.config import ModelConfig
from hybridtrt.converters.families import family
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.safetensors_file import Layout
from hybridtrt.converters.safetensors_writer import write_safetensors
from hybridtrt.converters.sources import FirstOf, Source

CONFIG = {  # Jamba's shape: a layer with experts is by far the largest
    "model_type": "jamba",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "vocab_size": 65536,
    "dtype": "bfloat16",
}
SECONDS = 0.005


def main() -> int:
    """Print one line of figures, or with --json one object. Status 1 if the bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", help="what to convert to")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hybridtrt-convert-") as folder:
        size = make_checkpoint(Path(folder) / "model")
        figures = convert(Path(folder), args.dtype) | {"checkpoint_bytes": size, "largest_layer_bytes": largest_layer()}
    figures["bound_bytes"] = figures["largest_layer_bytes"] + 10**9
    figures["gb_per_s"] = size / 1e9 / figures["seconds"]
    if args.json:
        print(json.dumps(figures))
    else:
        peak, idle, layer, bound = (
            f"{figures[name] / 1e6:.0f} MB"
            for name in ("peak_bytes", "idle_bytes", "largest_layer_bytes", "bound_bytes")
        )
        print(f"{size / 1e9:.2f} GB in {figures['seconds']:.1f} s, {figures['gb_per_s']:.2f} GB/s")
        print(
            f"peak anonymous memory {peak} (before the conversion {idle}); bound {bound} (largest layer {layer}, 1 GB)"
        )
    return 0 if figures["peak_bytes"] <= figures["bound_bytes"] else 1


def make_checkpoint(folder: Path) -> int:
    """Write the model and return the bytes of its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    config, rules = _model(), family("jamba").sources(_model())
    layouts: dict[str, Layout] = {}
    for name, spec in config.weight_table().items():
        for tensor, shape in _one_by_one(rules[name]).tensors(spec.shape):
            layouts[tensor] = Layout(shape, "bfloat16")
    generator = torch.Generator().manual_seed(0)
    write_safetensors(
        folder / "model.safetensors",
        layouts,
        lambda name: [torch.randn(layouts[name].shape, generator=generator, dtype=torch.bfloat16)],
    )
    return sum(layout.num_bytes for layout in layouts.values())


def _model() -> ModelConfig:
    return family("jamba").config(HFConfig(CONFIG))


def _one_by_one(rule: Source | FirstOf) -> Source:
    """The spelling with one tensor an expert."""
    return rule.alternatives[-1] if isinstance(rule, FirstOf) else rule


def largest_layer() -> int:
    """Bytes of the largest layer as it is stored."""
    sizes: dict[str, int] = {}
    for name, layout in weight_layouts(_model()).items():
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        sizes[layer] = sizes.get(layer, 0) + layout.num_bytes
    return max(sizes.values())


def convert(folder: Path, dtype: str) -> dict[str, float]:
    """Seconds and peak anonymous bytes of a conversion in a process of its own, and those of the libraries alone."""
    code = (
        "import sys, hybridtrt.converters.convert as module; print(flush=True); sys.stdin.readline();"
        "module.convert(*sys.argv[1:4])"
    )
    command = [sys.executable, "-P", "-c", code, str(folder / "model"), str(folder / "out"), dtype]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()  # everything is imported
    idle = anonymous_bytes(child.pid)
    started = time.monotonic()
    child.stdin.write("\n")
    child.stdin.close()
    peak = 0
    while child.poll() is None:
        peak = max(peak, anonymous_bytes(child.pid))
        time.sleep(SECONDS)
    if child.returncode != 0:
        raise SystemExit(f"the conversion failed with status {child.returncode}")
    return {"seconds": time.monotonic() - started, "peak_bytes": peak, "idle_bytes": idle}


def anonymous_bytes(pid: int) -> int:
    """`RssAnon` of a process, 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == "RssAnon:"), 0)


if __name__ == "__main__":
    sys.exit(main())
