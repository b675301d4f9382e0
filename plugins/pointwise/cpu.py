"""The definitions are already vectorised."""

from hybridtrt.plugins.pointwise.reference import (
    activation,
    add,
    concat,
    flatten,
    gated_activation,
    gather_rows,
    multiply,
    scale,
    split,
)

__all__ = ["activation", "add", "concat", "flatten", "gated_activation", "gather_rows", "multiply", "scale", "split"]
