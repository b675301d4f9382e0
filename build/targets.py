"""What an engine can be built for, and what each target can do."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtrt.converters.config import DTYPES

CPU = "cpu"
GPU_TARGETS = ("tensorrt", "tensorrt-rtx")
TARGETS = (CPU, *GPU_TARGETS)
ACTIVATIONS = {  # the first is the default
    CPU: ("float32", "bfloat16"),
    **dict.fromkeys(GPU_TARGETS, ("bfloat16", "float16")),
}
GROUP_SIZES = {"int8": (0, 32, 64, 128), "int4": (32, 64, 128)}  # the first is the default; 0: a scale an output
WEIGHTS = {
    CPU: ("float32", "bfloat16", *GROUP_SIZES),
    **dict.fromkeys(GPU_TARGETS, ("bfloat16", "float16", *GROUP_SIZES, "fp8")),
}
COMPUTE_CAPABILITIES = (80, 86, 89, 120)  # that TensorRT-RTX builds for; full TensorRT takes the GPU of the machine
FP8_COMPUTE_CAPABILITY = 89  # the first that has FP8


def check_weights(target: str, weights: str | None, activations: str | None) -> None:
    """Raise `ValueError` for a format of matrices, or a dtype of activations, that the target does not have."""
    dtypes = ACTIVATIONS[target]
    if activations not in dtypes and (activations, target) != (None, CPU):
        raise ValueError(f"activations={activations!r} with target={target}: expected one of {', '.join(dtypes)}")
    if weights is None:
        return
    known = WEIGHTS[target]
    if weights not in known:
        raise ValueError(f"weights={weights!r} with target={target}: expected one of {', '.join(known)}")
    if target in GPU_TARGETS and weights in DTYPES and weights != activations:
        raise ValueError(f"weights={weights!r} with activations={activations!r}: on a GPU they are of one dtype")
    if target == CPU and activations == "bfloat16" and weights != "bfloat16":
        raise ValueError(f"activations='bfloat16' with weights={weights!r}: expected bfloat16 weights")


def check_gpu_options(
    target: str,
    compute_capabilities: Sequence[int],
    weights: str | None,
    weights_as_inputs: bool,
) -> None:
    """Raise `ValueError` for options of a GPU target that do not fit it, and for any with the target cpu."""
    if target == CPU:
        for name, value in (
            ("compute_capabilities", list(compute_capabilities)),
            ("weights_as_inputs", weights_as_inputs),
        ):
            if value:
                raise ValueError(f"{name}={value} with target=cpu: expected target {' or '.join(GPU_TARGETS)}")
        return
    if target == "tensorrt" and compute_capabilities:
        raise ValueError(
            f"compute_capabilities={list(compute_capabilities)} with target=tensorrt, which builds for the GPU of the "
            "machine: tensorrt-rtx builds for others"
        )
    known = ", ".join(map(str, COMPUTE_CAPABILITIES))
    if target != "tensorrt" and not compute_capabilities:
        raise ValueError(f"compute_capabilities is empty with target={target}: expected some of {known}")
    for capability in compute_capabilities:
        if capability not in COMPUTE_CAPABILITIES:
            raise ValueError(f"compute_capability={capability} with target={target}: expected one of {known}")
        if weights == "fp8" and capability < FP8_COMPUTE_CAPABILITY:
            raise ValueError(
                f"weights='fp8' with compute_capability={capability}: GPUs have FP8 from {FP8_COMPUTE_CAPABILITY} on"
            )
