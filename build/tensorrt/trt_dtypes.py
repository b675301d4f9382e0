"""Dtypes by our names and by TensorRT's."""

from __future__ import annotations

from typing import Any

NAMES = {
    **{"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"},
    **{"int32": "INT32", "int64": "INT64", "int8": "INT8", "int4": "INT4", "fp8": "FP8", "bool": "BOOL"},
}
_OURS = {theirs: ours for ours, theirs in NAMES.items()}


def trt_dtype(trt: Any, name: str) -> Any:
    """`trt.DataType` of a dtype name."""
    return getattr(trt.DataType, NAMES[name])


def dtype_name(trt: Any, dtype: Any) -> str:
    """The name of a `trt.DataType`."""
    return _OURS[dtype.name]
