#!/usr/bin/env python3
"""llama_convert.py SOURCE MODEL OUT.gguf f32|bf16|q8_0: llama.cpp's own converter, for random models of a small BPE.

SOURCE is llama.cpp's folder. The converter does not know such a tokenizer, so it is told that it is GPT-2's; and
some configurations of transformers are written as the converter knows them.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

ATTENTION = ("attention", "full_attention")
BLOCKS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
GPT2_VOCAB = (("jamba", "JambaModel"), ("llama", "LlamaModel"), ("falcon_h1", "FalconH1Model"))
WITHOUT_DRAFTS = ("qwen", "nemotron")  # models whose converter looks for layers of multi-token prediction


def main() -> int:
    """Convert one model."""
    source, model, out, kind = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as name:
        # the converter finds the kind of some models by their folder's name
        folder = Path(name) / model.name
        folder.mkdir()
        for path in model.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        if config["model_type"] == "minimax":
            config = _minimax(folder, config)
        elif config["model_type"] == "granitemoehybrid":
            kinds = ["attention" if kind in ATTENTION else "mamba" for kind in config["layer_types"]]
            config["layer_types"] = kinds
        elif config["model_type"] == "nemotron_h":
            pattern = "".join(BLOCKS[kind] for kind in config["layers_block_type"])
            config["hybrid_override_pattern"] = pattern
            if "E" not in pattern:
                del config["num_experts_per_tok"], config["n_routed_experts"]
        _write(folder / "config.json", config)
        _pin_vocabulary()
        options = ["--no-mtp"] if config["model_type"].startswith(WITHOUT_DRAFTS) else []
        sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(out), "--outtype", kind, *options]
        runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")
    return 0


def _minimax(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """MiniMax in transformers' form as MiniMax-Text-01, without what follows from the configuration."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.endswith(("decay", "slope_rate"))}
    (folder / "model.safetensors").unlink()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(kept, "model.safetensors")}
    _write(folder / "model.safetensors.index.json", index)
    scales = {
        f"layernorm_{part}_{name}": 1.0
        for part in ("full_attention", "linear_attention", "mlp")
        for name in ("alpha", "beta")
    }
    return {
        **config,
        "architectures": ["MiniMaxText01ForCausalLM"],
        "model_type": "minimax_text_01",
        "rotary_dim": config["head_dim"],
        "rope_theta": 10000.0,
        "attn_type_list": [int(kind == "full_attention") for kind in config["layer_types"]],
        **scales,
    }


def _pin_vocabulary() -> None:
    base = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    for module, name in GPT2_VOCAB:
        found = getattr(importlib.import_module(f"conversion.{module}"), name, None)
        if found is not None:
            found.set_vocab = lambda self: self._set_vocab_gpt2()


def _write(path: Path, data: Any) -> None:
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
