"""How a checkpoint's weights are quantised: `quantization_config`, with `quant_method` "fp8" alone (`fp8.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from hybridtrt.converters.hf_config import HFConfig


@dataclass(frozen=True)
class Fp8Config:
    """`block` is rows and columns of a block with one scale; None: one scale for a tensor."""

    block: tuple[int, int] | None


def read_quantization(hf: HFConfig) -> Fp8Config | None:
    """`quantization_config`, None if it is absent or null. Raises `ValueError`, naming it, for any method but FP8."""
    if hf.values.get("quantization_config") is None:
        return None
    section = hf.section("quantization_config")
    method = section.values.get("quant_method")
    if method != "fp8":
        raise ValueError(
            f"quantization_config with quant_method={method!r} is not supported: expected 'fp8' ({hf.source})"
        )
    section.choice("fmt", "e4m3", ("e4m3",))
    if section.values.get("weight_block_size") is None:
        return Fp8Config(None)
    block = section.integers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise section.error("weight_block_size", "two integers > 0, or null")
    return Fp8Config((block[0], block[1]))
