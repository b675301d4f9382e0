"""Rotary tables of every rope type, from either spelling of a `config.json` to frequencies.

The definitions are those of transformers' `ROPE_INIT_FUNCTIONS`: position interpolation ("linear", arXiv 2306.15595),
YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), Llama 3's, "proportional" (only the first channel pairs turn).

Keys are cached after they were turned, so a table cannot change as a sequence grows. "dynamic" therefore has its
frequencies up to `max_position_embeddings`, which are the plain ones, and "longrope" its short factors:
`RopeConfig.max_positions` is then the original maximum, and longer sequences are refused when an engine is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.converters.config import RopeConfig
from hybridtrt.converters.hf_config import HFConfig

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class _Rope:
    """What a rope type computes from. `section` holds its parameters; `original` is the length of pretraining."""

    section: HFConfig
    theta: float
    head_dim: int
    rotary_dim: int
    max_positions: int
    original: int

    def frequencies(self, exponents: int, width: int) -> Numbers:
        """theta^(-2 i / width) for i below `exponents`, float64."""
        numbers: Numbers = self.theta ** (-2.0 * np.arange(exponents) / width)
        return numbers

    def plain(self) -> Numbers:
        return self.frequencies(self.rotary_dim // 2, self.rotary_dim)

    def optional(self, name: str) -> float | None:
        """A number > 0; None where it is absent or null."""
        return None if self.section.values.get(name) is None else self.section.number(name, positive=True)

    def factor(self) -> float:
        """How much longer than the original the contexts are; from the two lengths if it is null or absent."""
        factor = self.optional("factor")
        return self.max_positions / self.original if factor is None else factor


def read_rope(
    hf: HFConfig,
    head_dim: int,
    *,
    max_positions: int,
    theta: float = 10000.0,
    partial: float | None = None,
    layer_type: str | None = None,
    absent: Mapping[str, Any] | None = None,
) -> RopeConfig:
    """The rotary table of a model, or of one layer type where `rope_parameters` is nested by layer type.

    Reads `rope_scaling` or `rope_parameters` first, then the same keys at the top. The rest are facts of the class:
    `max_positions` the value of `max_position_embeddings`, `theta` the default base, `partial` the default of
    `partial_rotary_factor` (None: the class does not read it for the type `default`), `absent` the parameters that
    stand for absent ones. Raises `ValueError` for a rope type or value that is not understood.
    """
    section = _section(hf, layer_type, absent)
    name = "type" if "rope_type" not in section.values and "type" in section.values else "rope_type"
    kind = section.choice(name, "default", (*_TYPES, "mrope"))  # text positions of mrope are equal in all its parts
    kind = "default" if kind == "mrope" else kind
    base = (section if "rope_theta" in section.values else hf).number("rope_theta", theta, positive=True)
    portion = 1.0
    if partial is not None or kind != "default":
        keys = section if "partial_rotary_factor" in section.values else hf
        portion = keys.number("partial_rotary_factor", 1.0 if partial is None else partial)
    rotary_dim = int(head_dim * portion) if 0 < portion <= 1 else 0
    if rotary_dim == 0:
        raise ValueError(
            f"partial_rotary_factor={portion}: expected a part of head_dim={head_dim} in (0, 1] ({hf.source})"
        )
    if (head_dim if kind == "proportional" else rotary_dim) % 2:
        raise ValueError(f"{rotary_dim} rotary channels of head_dim={head_dim}: expected an even number ({hf.source})")
    keys = hf if layer_type is None and "original_max_position_embeddings" in hf.values else section
    original = keys.integer("original_max_position_embeddings", max_positions)
    rope = _Rope(section, base, head_dim, rotary_dim, max_positions, original)
    with np.errstate(all="ignore"):  # what is not finite is refused
        inv_freq, attention_factor, limit = _TYPES[kind](rope)
    if not bool((np.abs(inv_freq) < 1e30).all()) or not math.isfinite(attention_factor):
        raise ValueError(f"{kind} rope with rope_theta={base}: expected frequencies in float32 ({section.source})")
    return RopeConfig(tuple(inv_freq.tolist()), attention_factor, limit)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention scale for contexts `factor` times as long as the original."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _section(hf: HFConfig, layer_type: str | None, absent: Mapping[str, Any] | None) -> HFConfig:
    section = hf.section("rope_scaling", "rope_parameters")
    if not section.values and absent is not None and hf.values.get("rope_parameters") is None:
        section = HFConfig(absent, hf.source)
    nested = [key for key, value in section.values.items() if isinstance(value, dict)]
    if not nested:
        return section
    if layer_type is None or layer_type not in nested:
        raise ValueError(
            f"rope parameters of {', '.join(nested)}: expected "
            f"{'those of the whole model' if layer_type is None else layer_type} ({section.source})"
        )
    return section.section(layer_type)


_Table = tuple[Numbers, float, int | None]  # frequencies, attention factor, positions for which they hold


def _default(rope: _Rope) -> _Table:
    return rope.plain(), 1.0, None


def _linear(rope: _Rope) -> _Table:
    return rope.plain() / rope.section.number("factor", positive=True), 1.0, None


def _dynamic(rope: _Rope) -> _Table:
    rope.section.number("factor", positive=True)
    return rope.plain(), 1.0, None


def _proportional(rope: _Rope) -> _Table:
    half, turning = rope.head_dim // 2, rope.rotary_dim // 2
    inv_freq = np.zeros(half)
    inv_freq[:turning] = rope.frequencies(turning, rope.head_dim)
    return inv_freq / rope.section.number("factor", 1.0, positive=True), 1.0, None


def _yarn(rope: _Rope) -> _Table:
    if rope.theta <= 1:
        raise ValueError(f"rope_theta={rope.theta}: expected a number > 1 for yarn ({rope.section.source})")
    factor = rope.factor()
    attention_factor = rope.optional("attention_factor")
    if attention_factor is None:
        mscale, all_dim = (
            rope.section.number(name) if rope.section.values.get(name) is not None else 0.0
            for name in ("mscale", "mscale_all_dim")
        )
        attention_factor = yarn_mscale(factor)
        if mscale and all_dim:
            denominator = yarn_mscale(factor, all_dim)
            if denominator == 0:
                raise rope.section.error("mscale_all_dim", "one that gives a scale other than 0")
            attention_factor = yarn_mscale(factor, mscale) / denominator
    # The channel pairs that turn `rotations` times within the original context; between the two a linear ramp.
    low, high = (
        rope.rotary_dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        for rotations in (rope.optional("beta_fast") or 32.0, rope.optional("beta_slow") or 1.0)
    )
    if rope.section.flag("truncate", True) and math.isfinite(low) and math.isfinite(high):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    pairs = np.arange(rope.rotary_dim // 2)
    interpolated = np.clip((pairs - low) / (high - low if high != low else 0.001), 0, 1)
    plain = rope.plain()
    return plain / factor * interpolated + plain * (1 - interpolated), attention_factor, None


def _longrope(rope: _Rope) -> _Table:
    pairs = rope.rotary_dim // 2
    factors = {name: rope.section.numbers(name, pairs) for name in ("short_factor", "long_factor")}
    attention_factor = rope.optional("short_mscale")
    if attention_factor is None:
        attention_factor = rope.optional("attention_factor")
    if attention_factor is None:
        factor = rope.factor()
        if factor > 1 and rope.original < 2:
            raise ValueError(f"original_max_position_embeddings={rope.original}: expected 2 ({rope.section.source})")
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope.original))
    return rope.plain() / np.array(factors["short_factor"], np.float32), attention_factor, rope.original


def _llama3(rope: _Rope) -> _Table:
    factor, low, high = (
        rope.section.number(name, positive=True) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if high <= low:
        raise rope.section.error("high_freq_factor", f"a number above low_freq_factor={low}")
    plain = rope.plain()
    turns = rope.original * plain / (2 * math.pi)  # within the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * plain / factor + kept * plain, 1.0, None


_TYPES: dict[str, Callable[[_Rope], _Table]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
