"""Experts' matrices in few bits, as the kernels read them: in the forms of `plugins/experts/quantized.py`.

TensorRT only passes them on to the plugin, so int4 is bytes to it, and scales are bfloat16 whatever the activations.
"""

from __future__ import annotations

import torch

from hybridtrt.build.tensorrt.quantization import Quantization, check_shape, fp8_numbers, scale_name
from hybridtrt.plugins.linear.packing import integers
from hybridtrt.plugins.spec import TensorSpec

SCALES = "bfloat16"


def expert_specs(name: str, shape: tuple[int | str, ...], how: Quantization) -> dict[str, TensorSpec]:
    """What stands for matrices `[experts, out, in]`. Raises `ValueError` as `check_shape`."""
    check_shape(name, shape, how)
    experts, outputs, inputs = map(int, shape)
    numbers = TensorSpec((experts, outputs, inputs // 2 if how.form == "int4" else inputs), "int8")
    scales: tuple[int, ...] = (experts, outputs, *((inputs // how.group_size,) if how.group_size else ()))
    if how.form == "fp8":
        numbers, scales = TensorSpec((experts, outputs, inputs), "fp8"), (experts,)
    return {name: numbers, scale_name(name): TensorSpec(scales, SCALES)}


def quantized_experts(name: str, matrices: torch.Tensor, how: Quantization) -> dict[str, torch.Tensor]:
    """The tensors of `expert_specs`, rounded as matrices of linear layers are."""
    check_shape(name, tuple(matrices.shape), how)
    if how.form == "fp8":
        pairs = [fp8_numbers(matrix, torch.bfloat16) for matrix in matrices]
        numbers, scales = (torch.stack(each) for each in zip(*pairs, strict=True))
        return {name: numbers, scale_name(name): scales}
    numbers, scales = integers(matrices.flatten(0, 1), 8 if how.form == "int8" else 4, how.group_size)
    numbers, scales = (each.unflatten(0, matrices.shape[:2]) for each in (numbers, scales))
    if how.form == "int4":
        low, high = numbers.unflatten(2, (-1, how.group_size)).chunk(2, 3)
        numbers = ((low & 15) | (high << 4)).flatten(2)
    return {name: numbers.contiguous(), scale_name(name): scales[..., 0].contiguous() if how.per_output else scales}
