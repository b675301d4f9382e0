"""Experts' matrices in few bits: which numbers a scale belongs to, by the shapes of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridtrt.plugins.spec import TensorSpec, require


@dataclass(frozen=True)
class Form:
    """How matrices `[experts, out, in]` are quantised: int8 or FP8 (E4M3) of that shape, or int4 packed in int8.

    Scales are `[experts]`, `[experts, out]` or `[experts, out, in / group]`, one for each expert, output or group of
    inputs. `packed`: a byte has two numbers of 4 bits, `[experts, out, in / 2]`; byte i of a group has its number i in
    the low half and number group / 2 + i in the high one.
    """

    scales: Literal["expert", "output", "group"]
    group: int = 0  # inputs that share a scale; 0: all
    packed: bool = False


def form_of(role: str, matrix: TensorSpec, scale: TensorSpec, width: int) -> Form:
    """The form of matrices with `width` inputs. Raises `ValueError` for shapes that do not fit."""
    experts, outputs, stored = matrix.shape
    if scale.shape == (experts,) and stored == width:
        return Form("expert")
    if scale.shape == (experts, outputs) and stored == width:
        return Form("output")
    fits = len(scale.shape) == 3 and scale.shape[:2] == (experts, outputs)
    groups = int(scale.shape[2]) if fits else 0
    require(
        groups > 0 and width % groups == 0 and stored in (width, width // 2),
        f"{role}_scale {scale.shape} does not fit {role} {matrix.shape} of {width} inputs",
    )
    return Form("group", width // groups, packed=stored != width)
