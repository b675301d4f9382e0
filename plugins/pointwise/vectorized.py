"""The definitions are already vectorised."""

from hybridtrt.plugins.pointwise.reference import (
    activation,
    add,
    affine,
    concat,
    flatten,
    gated_activation,
    gather_rows,
    mean_heads,
    multiply,
    scale,
    split,
)

__all__ = [
    "activation",
    "add",
    "affine",
    "concat",
    "flatten",
    "gated_activation",
    "gather_rows",
    "mean_heads",
    "multiply",
    "scale",
    "split",
]
