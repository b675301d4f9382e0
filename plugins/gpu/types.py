"""Dtypes by name, as the Triton language has them."""

from __future__ import annotations

from typing import Any

import triton.language as tl

POINTERS = {
    **{"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "fp8": "*fp8e4nv"},
    **{"int8": "*i8", "int32": "*i32", "int64": "*i64"},
}


def triton_dtype(name: str) -> Any:
    """float32, bfloat16 or float16."""
    return {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}[name]
