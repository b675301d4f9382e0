"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

MAX_SIZE = 1 << 62
_BASES = {"": 1000, "i": 1024}
_UNITS: dict[str, int] = {
    f"{prefix}{i}b": base**power for power, prefix in enumerate("kmgt", 1) for i, base in _BASES.items()
}
_UNITS |= {"": 1, "b": 1}


def parse_size(text: str) -> int:
    """Bytes of a size such as "4096", "512MB" (10^6) or "1.5 GiB" (2^30). Raises `ValueError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 4096, 512MB or 1.5GiB")
    size = float(found[1]) * _UNITS[found[2]]
    if size >= MAX_SIZE:
        raise ValueError(f"{text!r} is more than memory can hold")
    return round(size)
