"""Grids and scratch shapes are computed from symbols, as TensorRT has them, as they are from whole numbers."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_calls import CALLS

from hybridtrt.plugins.gpu.plan import Sizes, plan, smaller


class Symbol:
    """A number with the operations of a symbolic dimension: it stands on the left, and has no truth."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __add__(self, other: Any) -> Symbol:
        return Symbol(self.value + number(other))

    def __sub__(self, other: Any) -> Symbol:
        return Symbol(self.value - number(other))

    def __mul__(self, other: Any) -> Symbol:
        return Symbol(self.value * number(other))

    def __floordiv__(self, other: Any) -> Symbol:
        return Symbol(self.value // number(other))

    def __lt__(self, other: Any) -> Symbol:
        return Symbol(int(self.value < number(other)))

    def __bool__(self) -> bool:
        raise AssertionError("a symbol has no truth")


def number(value: Any) -> int:
    return value.value if isinstance(value, Symbol) else value


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("sizes", [Sizes(1, 1, 1), Sizes(300, 3, 7), Sizes(8192, 4096, 20)])
def test_symbols_do_as_numbers(name: str, sizes: Sizes) -> None:
    planned = plan(CALLS[name])
    symbols = Sizes(*map(Symbol, sizes))
    for launch in planned.launches:
        grid = launch.grid(sizes)
        assert [number(programs) for programs in launch.grid(symbols)] == list(grid)
        assert len(grid) <= 3
        assert all(programs >= 1 for programs in grid)
        assert all(programs <= 65535 for programs in grid[1:])
    for scratch in planned.scratch.values():
        assert [number(dim) for dim in scratch.shape(symbols)] == list(scratch.shape(sizes))


@pytest.mark.parametrize("a", [1, 5, 6, 7])
def test_the_lesser_of_two_sizes(a: int) -> None:
    assert smaller(a, 6) == number(smaller(Symbol(a), 6)) == number(smaller(Symbol(a), Symbol(6))) == min(a, 6)
