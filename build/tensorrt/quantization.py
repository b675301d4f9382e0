"""Matrices in few bits, whole numbers or FP8, and for linear layers the scales that TensorRT multiplies them by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridtrt.build import targets
from hybridtrt.plugins.linear.packing import integers
from hybridtrt.plugins.spec import TensorSpec

GROUP_SIZES = {**targets.GROUP_SIZES, "fp8": (0,)}
_FP8_MAX = 448.0  # of E4M3


@dataclass(frozen=True)
class Quantization:
    """How a matrix `[out, in]`, or that of each expert, is stored: `form` is int8, int4 or fp8 (E4M3).

    Whole numbers have a scale for every `group_size` numbers of an output, 0 for all of them; FP8 has one scale for the
    matrix. Raises `ValueError` for what is not in `GROUP_SIZES`.
    """

    form: str
    group_size: int = 0

    def __post_init__(self) -> None:
        if self.form not in GROUP_SIZES:
            raise ValueError(f"weights={self.form!r} is not one of {', '.join(GROUP_SIZES)}")
        if self.group_size not in GROUP_SIZES[self.form]:
            known = ", ".join(map(str, GROUP_SIZES[self.form]))
            raise ValueError(f"group_size={self.group_size} with weights={self.form}: expected one of {known}")

    @property
    def per_output(self) -> bool:
        """Whether there is one scale an output."""
        return self.form == "int8" and not self.group_size

    def divides(self, shape: tuple[int | str, ...]) -> bool:
        """Whether rows of `shape` hold a whole number of groups."""
        return not self.group_size or int(shape[-1]) % self.group_size == 0


def scale_name(name: str) -> str:
    """The name of a weight's scales."""
    return f"{name}.scale"


def check_shape(name: str, shape: tuple[int | str, ...], how: Quantization) -> None:
    """Raise `ValueError` for a matrix whose rows do not hold a whole number of groups."""
    if not how.divides(shape):
        raise ValueError(
            f"{name} has rows of {shape[-1]} numbers, which groups of {how.group_size} do not divide: "
            "choose another group_size or exclude it"
        )


def quantized_specs(name: str, shape: tuple[int | str, ...], how: Quantization, dtype: str) -> dict[str, TensorSpec]:
    """What stands for the matrix: numbers under its name, and scales in the dtype that it is multiplied in."""
    check_shape(name, shape, how)
    scales: tuple[int | str, ...] = ()
    if how.form != "fp8":
        scales = (shape[0], int(shape[1]) // how.group_size) if how.group_size else shape[:1]
    return {name: TensorSpec(shape, how.form), scale_name(name): TensorSpec(scales, dtype)}


def quantized(name: str, matrix: torch.Tensor, how: Quantization, dtype: str) -> dict[str, torch.Tensor]:
    """The tensors of `quantized_specs`; int4 as bytes `[out, in / 2]`, the first of two numbers in the low half.

    Scales are positive and, for the numbers that they belong to, rounded to bfloat16 first, as in the cpu engine.
    """
    check_shape(name, tuple(matrix.shape), how)
    if how.form == "fp8":
        numbers, scales = fp8_numbers(matrix, getattr(torch, dtype))
    else:
        numbers, scales = integers(matrix, 8 if how.form == "int8" else 4, how.group_size)
        scales = scales[:, 0] if how.per_output else scales
        if how.form == "int4":
            numbers = (numbers[:, ::2] & 15) | (numbers[:, 1::2] << 4)
    return {name: numbers.contiguous(), scale_name(name): scales.to(getattr(torch, dtype)).contiguous()}


def fp8_numbers(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in FP8, and the scale of the matrix in a dtype."""
    wide = matrix.float()
    scale = (wide.abs().amax() / _FP8_MAX).to(dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide / scale.float()).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scale
