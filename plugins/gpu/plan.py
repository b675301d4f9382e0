"""What a GPU runs for one operator call: launches declared as plain data, by a function in the operator's room.

The parameters of a kernel are its declaration. One that is annotated `tl.constexpr` is a constant of the launch; `T`,
`B` and `P` are sizes of the step; every other one is an operand of the call, a result or scratch memory, by its name.
An operand that the call lacks is None.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hybridtrt.plugins.caches import DTYPE_BYTES
from hybridtrt.plugins.call import Call
from hybridtrt.plugins.registry import room_of
from hybridtrt.plugins.spec import TensorSpec

PLUGINS = (  # operators that are plugins on a GPU; TensorRT has the others
    "attention",
    "attention_below",
    "capacity",
    "causal_conv",
    "experts",
    "linear_attention",
    "linear_attention_from",
    "low_rank_attention",
    "mla",
    "rg_lru",
    "router",
    "selective_scan",
    "ssd",
)
SCRATCH_ALIGNMENT = 256
DTYPES = ("float32", "bfloat16", "float16")  # of activations, weights and caches
QUANTIZED = ("int8", "fp8")  # of weights that come with scales, `{name}_scale`


class Sizes(NamedTuple):
    """Sizes of a step: whole numbers, or symbols that can be added, multiplied and divided to a whole number."""

    T: Any  # tokens
    B: Any  # rows
    P: Any  # pages of a row in the block table


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel. It writes what `writes` names and only reads the rest.

    `grid` gives the number of programs along up to three axes. A launch for "longer" rows does nothing to rows of one
    token and is left out of a step in which all rows are such; one for "single" rows does nothing to the others. A
    launch is left out, too, of a step for which `when` is false, and does nothing to it where it is not.
    """

    kernel: Any
    grid: Callable[[Sizes], tuple[Any, ...]]
    writes: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    rows: Literal["all", "single", "longer"] = "all"
    num_warps: int = 4
    num_stages: int = 2
    when: Callable[[Sizes], bool] | None = None

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def runs(self, sizes: Sizes) -> bool:
        """Whether a step of these sizes needs it. Every row has at least one token."""
        return (self.rows != "longer" or sizes.T != sizes.B) and (self.when is None or self.when(sizes))

    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters, in order."""
        return tuple(inspect.signature(self.kernel.fn).parameters)

    def arguments(self) -> tuple[str, ...]:
        """Names of the parameters that are not constants, in order."""
        return tuple(name for name in self.parameters() if name not in self.constants)


@dataclass(frozen=True)
class Scratch:
    """Memory that lives for one call."""

    shape: Callable[[Sizes], tuple[Any, ...]]
    dtype: str = "float32"


@dataclass(frozen=True)
class Plan:
    """The launches of a call, in order, and the scratch memory between them."""

    launches: tuple[Launch, ...]
    scratch: Mapping[str, Scratch] = field(default_factory=dict)

    def scratch_places(self, sizes: Sizes) -> tuple[dict[str, int], int]:
        """Where each scratch operand begins in memory for all of them, in bytes, and how much that is."""
        places, end = {}, 0
        for name, scratch in self.scratch.items():
            places[name] = end
            size = math.prod(scratch.shape(sizes)) * DTYPE_BYTES[scratch.dtype]
            end += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        return places, end


def plan(call: Call) -> Plan:
    """The launches of a call. Raises `ValueError`, naming the node, for sizes and dtypes that no kernel supports."""
    try:
        module = importlib.import_module(f"hybridtrt.plugins.{room_of(call.op)}.gpu")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            "kernels for GPUs need the package triton, which is not installed: ./scripts/install.sh gpu, "
            "or pip install 'hybridtrt[gpu]'"
        ) from None
    try:
        names = {operand.name for operand in call.operands}
        for operand in call.operands:
            known: tuple[str, ...] = DTYPES if operand.source in ("input", "weight", "cache") else ("int32",)
            known = QUANTIZED if f"{operand.name}_scale" in names else known
            if operand.spec.dtype not in (*known, "int32", "int64"):
                raise ValueError(f"{operand.name} is {operand.spec.dtype}, not one of {', '.join(known)}")
        made: Plan = getattr(module, call.op)(call)
        return made
    except ValueError as error:
        raise ValueError(f"{call.name} ({call.op}): {error}") from None


def cdiv(a: Any, b: int) -> Any:
    """a / b, rounded up."""
    return (a + b - 1) // b


def smaller(a: Any, b: Any) -> Any:
    """The lesser of two sizes. Where one is a symbol, which has no truth for `min` to ask for, `a` is."""
    return (a - b) * (a < b) + b


def tiles(sizes: Sizes, size: int) -> Any:
    """Programs that cover all rows of a step in tiles of `size` tokens: see `device.tile`."""
    return sizes.T // size + sizes.B


def power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def elements(spec: TensorSpec) -> int:
    """Elements of a row (token, slot or page) of an operand, or of all of a weight."""
    return math.prod(int(dim) for dim in spec.shape if not isinstance(dim, str))


def block(size: int, most: int) -> int:
    """Elements of a dimension in a block of a product: the power of two that holds it, but from 16 to `most`."""
    return max(16, min(most, power_of_2(size)))
