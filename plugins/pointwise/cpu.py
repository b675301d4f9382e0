"""The definitions are already vectorised."""

from hybridtrt.plugins.pointwise.reference import (
    activation,
    add,
    flatten,
    gated_activation,
    gather_rows,
    multiply,
    scale,
    split,
)

__all__ = ["activation", "add", "flatten", "gated_activation", "gather_rows", "multiply", "scale", "split"]
