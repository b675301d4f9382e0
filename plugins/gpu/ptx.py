"""The parameter list of a PTX entry, rewritten: kernels address their parameters by name, so their order is free."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ENTRY = re.compile(r"(\.visible \.entry (\w+)\()(.*?)(\n\))", re.DOTALL)
_UNUSED = "\t.param .u64 {name}"


def with_parameters(ptx: str, order: Sequence[int | None]) -> str:
    """The kernel with its parameters in this order, by their present numbers; None is a pointer that it does not use.

    Parameters that the order leaves out must not be read. Raises `ValueError` where one is, or the text has no entry.
    """
    found = _ENTRY.search(ptx)
    if found is None:
        raise ValueError("the PTX has no visible entry")
    entry = found[2]
    declared = [line.rstrip(",") for line in found[3].strip("\n").split("\n")]
    for number in set(range(len(declared))) - {number for number in order if number is not None}:
        if f"[{entry}_param_{number}]" in ptx or f"[{entry}_param_{number}+" in ptx:
            raise ValueError(f"{entry} reads its parameter {number}, which the order leaves out")
    lines = [
        _UNUSED.format(name=f"{entry}_unused_{place}") if number is None else declared[number]
        for place, number in enumerate(order)
    ]
    return ptx[: found.start(3)] + "\n" + ",\n".join(lines) + ptx[found.end(3) :]
