"""Random operands of a call at a load: rows of given lengths behind given contexts, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.gpu.torch_launch import TORCH_DTYPES
from hybridtrt.plugins.registry import op_spec
from hybridtrt.plugins.spec import Load, TensorSpec
from hybridtrt.plugins.step import MOST_TOKEN_SLOTS


@dataclass(frozen=True)
class Rows:
    """Tokens of each row in this step, and tokens that are in the caches already."""

    lengths: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def load(self) -> Load:
        pairs = zip(self.lengths, self.contexts, strict=True)
        attended = sum(n * context + n * (n + 1) // 2 for n, context in pairs)
        return Load(sum(self.lengths), len(self.lengths), 0, attended)

    def asked(self, call: Call) -> int:
        """Tokens that have a slot for the state after them: all of short rows, where the call takes slots."""
        return sum(n for n in self.lengths if n <= MOST_TOKEN_SLOTS) if call.has("token_slots") else 0


def operands(call: Call, rows: Rows, device: str, seed: int) -> dict[str, Tensor | None]:
    """Tensors of all operands by name. States and pages hold what a sequence may have left there; slot 0 and page 0,
    which belong to padding, are not a number."""
    generator = torch.Generator(device).manual_seed(seed)
    page_size = next((int(one.spec.shape[1]) for one in call.of("cache") if one.spec.shape[0] == "pages"), 1)
    ends = [n + context for n, context in zip(rows.lengths, rows.contexts, strict=True)]
    width = max(-(-end // page_size) for end in ends)
    sizes = {
        **{"T": sum(rows.lengths), "B": len(ends), "B+1": len(ends) + 1, "R": len(ends), "P": width},
        **{"slots": len(ends) + 1 + rows.asked(call), "pages": len(ends) * width + 1},
    }

    def shape(spec: TensorSpec) -> tuple[int, ...]:
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)

    def random(spec: TensorSpec, scale: float = 1.0) -> Tensor:
        return torch.randn(shape(spec), generator=generator, device=device).mul_(scale).to(TORCH_DTYPES[spec.dtype])

    step = _step(rows, ends, width, generator)
    found: dict[str, Tensor | None] = {}
    for operand in call.operands:
        spec = operand.spec
        if operand.source == "step":
            tensor = step[operand.name].to(torch.int32)
        elif operand.source == "cache":
            tensor = random(spec, 0.5)
            tensor[0] = torch.nan
        elif spec.dtype in ("int32", "int64"):
            tensor = _experts(call, shape(spec), generator).to(TORCH_DTYPES[spec.dtype])
        elif operand.name.endswith("_scale"):
            matrix = call.operand(operand.name.removesuffix("_scale"))
            unit = (1 if matrix.dtype == "fp8" else 64) * math.sqrt(int(matrix.shape[-1]))
            tensor = torch.rand(shape(spec), generator=generator, device=device).add_(0.5).div_(unit)
            tensor = tensor.to(TORCH_DTYPES[spec.dtype])
        elif spec.dtype == "int8":
            tensor = torch.randint(-128, 128, shape(spec), generator=generator, device=device).to(torch.int8)
        elif spec.dtype == "fp8":
            tensor = random(spec)
        elif operand.name == "A_log":
            tensor = torch.rand(shape(spec), generator=generator, device=device).mul_(2.0)
        elif operand.source == "weight" and len(spec.shape) > 1:
            tensor = random(spec, 1 / math.sqrt(int(spec.shape[-1])))
        else:
            tensor = random(spec)
        found[operand.name] = tensor.to(device).contiguous()
    return found


def _step(rows: Rows, ends: Sequence[int], width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Arrays of the step contract: slots and pages in random order."""
    count = len(ends)
    lengths = torch.tensor(rows.lengths)

    def shuffled(n: int) -> Tensor:
        return torch.randperm(n, generator=generator, device=generator.device) + 1

    slots = shuffled(count)
    short = (lengths <= MOST_TOKEN_SLOTS).repeat_interleave(lengths)
    token_slots = short.long()
    token_slots[short] = count + 1 + torch.arange(int(short.sum())).flip(0)
    return {
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "context_lens": torch.tensor(rows.contexts),
        "positions": torch.cat([torch.arange(end - n, end) for n, end in zip(rows.lengths, ends, strict=True)]),
        "state_src": slots,
        "state_dst": slots,
        "token_slots": token_slots,
        "block_tables": torch.randperm(count * width, generator=generator, device=generator.device).reshape(
            count, width
        )
        + 1,
    }


def _experts(call: Call, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Different experts for each token."""
    count = call.attributes.get("num_experts") or int(call.operand("up").shape[0])
    return torch.rand(shape[0], count, generator=generator, device=generator.device).topk(shape[1], dim=1).indices


def moved_bytes(call: Call, rows: Rows) -> int:
    """Bytes that a step has to read and write: operands and results once, a state once each way, pages as attended.

    Of experts only those that the step can choose are counted.
    """
    load, spec = rows.load, op_spec(call.op)
    inputs = [operand.spec for operand in call.of("input")]
    weights = {operand.name: operand.spec for operand in call.of("weight")}
    read = None if spec.rows_read is None else spec.rows_read(inputs, weights, call.attributes, load)
    total = 0
    for one in (*inputs, *call.results):
        total += load.size(one.shape) * TORCH_DTYPES[one.dtype].itemsize
    for weight in weights.values():
        whole = math.prod(int(dim) for dim in weight.shape) * TORCH_DTYPES[weight.dtype].itemsize
        total += whole if read is None else whole * min(read, int(weight.shape[0])) // int(weight.shape[0])
    for operand in call.of("cache"):
        first, *rest = operand.spec.shape
        size = math.prod(int(dim) for dim in rest) * TORCH_DTYPES[operand.spec.dtype].itemsize
        if first == "pages":
            total += (sum(rows.contexts) + 2 * load.tokens) * size // int(rest[0])
        else:
            total += (2 * load.sequences + rows.asked(call)) * size
    return total


def operations(call: Call, rows: Rows) -> int:
    """Floating point operations of a step."""
    inputs = [operand.spec for operand in call.of("input")]
    weights = {operand.name: operand.spec for operand in call.of("weight")}
    return op_spec(call.op).flops(inputs, weights, call.attributes, rows.load)
