"""The tactics that products with an engine's matrices go by, and the machine on which they were the fastest."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridtrt.build.lowering import PackedWeight
from hybridtrt.plugins.native.library import TACTIC_RANGES, chosen_isa
from hybridtrt.plugins.native.tactics import DEFAULT, known_tactics

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """What decides how fast a kernel is: the processor's name, the instruction set and the number of threads."""

    cpu: str
    isa: str
    threads: int

    @classmethod
    def here(cls, threads: int, isa: str | None = None) -> Machine:
        """This machine; `isa` None is its widest. Raises `ValueError` where the kernels were not compiled."""
        return cls(_cpu(), chosen_isa(isa), threads)

    def __str__(self) -> str:
        return f"{self.cpu} ({self.isa}, threads {self.threads})"


@dataclass(frozen=True)
class Product:
    """A product with a matrix `[n, k]` in panels; those of experts are products of their own."""

    format: str
    group: int
    n: int
    k: int

    @classmethod
    def of(cls, weight: PackedWeight) -> Product:
        return cls(weight.stored.format, weight.stored.group, *weight.shape[-2:])

    def __str__(self) -> str:
        return f"{self.format}{f'_g{self.group}' if self.group else ''} {self.n}x{self.k}"


@dataclass(frozen=True)
class Tuned:
    """For products by their names: a tactic for each range of rows (`plugins/native/tactics.h`)."""

    machine: Machine
    products: Mapping[str, tuple[str, ...]]

    def indices(self, weight: PackedWeight) -> tuple[int, ...]:
        """The tactics of a weight as the library counts them; () where it has none, and 0 for one that is unknown."""
        if not weight.stored.format.startswith("panel_"):
            return ()
        names = known_tactics().names
        chosen = self.products.get(str(Product.of(weight)), ())
        return tuple(names.index(name) if name in names else 0 for name in chosen)

    def render(self) -> str:
        """One line."""
        chosen = [name for names in self.products.values() for name in names]
        return f"{sum(name != DEFAULT for name in chosen)} of {len(chosen)} not the default, measured on {self.machine}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.machine), "products": {name: list(chosen) for name, chosen in self.products.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tuned:
        """Raises `ValueError` for damaged data."""
        try:
            machine = Machine(str(data["cpu"]), str(data["isa"]), int(data["threads"]))
            products = {name: tuple(map(str, chosen)) for name, chosen in data["products"].items()}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            raise ValueError("the tactics are damaged") from None
        for name, chosen in products.items():
            if len(chosen) != TACTIC_RANGES:
                raise ValueError(f"{name} has {len(chosen)} tactics, expected {TACTIC_RANGES}")
        return cls(machine, products)


def _cpu() -> str:
    """The processor's name with its family and model, as virtual machines call many by one name."""
    try:
        lines = [line.partition(":") for line in CPU_INFO.read_text(encoding="utf-8").splitlines()]
    except OSError:
        lines = []
    found = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']} family {found.get('cpu family')} model {found.get('model')}"
