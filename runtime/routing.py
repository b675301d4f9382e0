"""How a text's tokens spread over the experts of an engine, and what bounding the experts would cost."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtrt.plugins.capacity import expert_capacity
from hybridtrt.plugins.program import Program
from hybridtrt.runtime.forward import prefill_steps
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.runner import TracingRunner
from hybridtrt.runtime.text_windows import Progress, cut_windows, read_tokens

FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0)
UNBALANCED = 3.0  # times as many tokens at the hottest expert as at the coldest


@dataclass(frozen=True)
class LayerRouting:
    """The choices of one layer's router: `load[e]` tokens chose expert e, `skipped` times none was chosen.

    `overflow[i]` is the part of the choices that finds no place at `FACTORS[i]`, and `refused` the part that found
    none in this engine; None where it has no capacity.
    """

    layer: int
    top_k: int
    load: tuple[int, ...]
    skipped: int
    overflow: tuple[float, ...]
    refused: float | None

    @property
    def hottest(self) -> int:
        """The expert of the most tokens."""
        return self.load.index(max(self.load))

    @property
    def coldest(self) -> int:
        """The expert of the fewest tokens."""
        return self.load.index(min(self.load))

    def share(self, expert: int) -> float:
        """The part of all choices that is this expert's."""
        return self.load[expert] / max(sum(self.load), 1)

    @property
    def ratio(self) -> float:
        """Tokens of the hottest expert over those of the coldest; infinite where that has none."""
        most, least = max(self.load), min(self.load)
        return most / least if least else math.inf if most else 1.0

    @property
    def unbalanced(self) -> bool:
        return self.ratio > UNBALANCED


@dataclass(frozen=True)
class Routing:
    """All MoE layers over the `tokens` of a text, in windows of `context` and steps of at most `step_tokens` tokens."""

    tokens: int
    context: int
    step_tokens: int
    layers: tuple[LayerRouting, ...]

    @property
    def warnings(self) -> list[str]:
        """One line for all layers that are out of balance."""
        layers = [str(layer.layer) for layer in self.layers if layer.unbalanced]
        if not layers:
            return []
        return [
            f"layers {', '.join(layers)}: the hottest expert has over {UNBALANCED:g} times the coldest one's tokens"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; an infinite ratio is null."""
        layers = [
            asdict(layer)
            | {
                "hottest": layer.hottest,
                "coldest": layer.coldest,
                "ratio": None if math.isinf(layer.ratio) else layer.ratio,
                "overflow": [{"factor": f, "rate": rate} for f, rate in zip(FACTORS, layer.overflow, strict=True)],
            }
            for layer in self.layers
        ]
        return asdict(self) | {"layers": layers, "warnings": self.warnings}


class _Counter:
    """What one MoE layer's router chooses, step after step."""

    def __init__(self, layer: int, top_k: int, num_experts: int, routed: tuple[str, ...], refused: str | None) -> None:
        self.layer, self.top_k = layer, top_k
        self.weights, self.chosen = routed  # the values of the router's weights and order, `[T, ranked]`
        self.refused = refused  # the value of the tokens that found no place, `[experts]`
        self._load = np.zeros(num_experts, np.int64)
        self._overflow = np.zeros(len(FACTORS), np.int64)
        self._skipped = self._refused = 0

    def add(self, values: dict[str, NDArray[np.float32]]) -> None:
        """Count one step. Raises `ValueError` where the router's weights are not finite."""
        if not np.isfinite(values[self.weights][:, : self.top_k]).all():
            raise ValueError(f"the router of layer {self.layer} gives weights that are not finite")
        chosen = values[self.chosen][:, : self.top_k].astype(np.int64)
        experts = len(self._load)
        load = np.bincount(chosen[chosen < experts], minlength=experts)
        self._load += load
        self._skipped += chosen.size - int(load.sum())
        for i, factor in enumerate(FACTORS):
            most = expert_capacity(factor, len(chosen), self.top_k, experts)
            self._overflow[i] += np.maximum(load - most, 0).sum()
        if self.refused is not None:
            self._refused += int(values[self.refused].sum())

    def result(self) -> LayerRouting:
        """The counts, and overflow as a part of all choices of experts."""
        choices = max(int(self._load.sum()), 1)
        return LayerRouting(
            layer=self.layer,
            top_k=self.top_k,
            load=tuple(self._load.tolist()),
            skipped=self._skipped,
            overflow=tuple((self._overflow / choices).tolist()),
            refused=None if self.refused is None else self._refused / choices,
        )


def route_text(
    engine_dir: str | Path,
    text: str | Path,
    context: int | None = None,
    chunk: int | None = None,
    threads: int | None = None,
    progress: Progress = lambda windows: nullcontext(lambda: None),
) -> Routing:
    """Run the text of a file in windows of `context` tokens and count what the routers choose.

    A step takes `chunk` tokens, by default as many as it can; overflow is that of each step by itself. `progress` gets
    the number of windows and gives a function that is called after each.

    Raises:
        ValueError: the file is no text, or too short; the engine is no good, has no tokenizer, or no experts.
    """
    ids, _ = read_tokens(engine_dir, text)
    runner = load_runner(engine_dir, RuntimeOptions(threads=threads, enable_block_reuse=False))
    try:
        if not isinstance(runner, TracingRunner):
            raise ValueError(f"{engine_dir}: its runner does not show what it computes")
        layers = _counters(runner.program)
        if not layers:
            raise ValueError(f"{engine_dir} has no experts")
        context, windows = cut_windows(runner.info, ids, context, chunk)
        names = [name for layer in layers for name in (layer.weights, layer.chosen, layer.refused) if name is not None]
        with progress(len(windows)) as advance:
            for window in windows:
                runner.clear_slots([1])
                for batch in prefill_steps(runner.info, window, chunk):
                    values = runner.trace(replace(batch, logits_indices=batch.logits_indices[-1:]), names)
                    for layer in layers:
                        layer.add(values)
                advance()
        step_tokens = min(context, chunk or runner.info.max_num_tokens)
    finally:
        runner.close()
    tokens = sum(len(window) for window in windows)
    return Routing(tokens, context, step_tokens, tuple(layer.result() for layer in layers))


def _counters(program: Program) -> list[_Counter]:
    """One for each MoE layer of a program, whose nodes are named `layers.{i}.moe...`."""
    nodes = {node.name: node for node in program.nodes}
    found = []
    for node in program.nodes:
        if node.op == "experts":
            place = node.name.removesuffix("experts")
            router, capacity = nodes[f"{place}routing"], nodes.get(f"{place}capacity")
            num_experts = int(program.weights[node.weights["up"]].shape[0])
            refused = None if capacity is None else capacity.outputs[3]
            top_k = router.attributes["top_k"]
            found.append(_Counter(int(node.name.split(".")[1]), top_k, num_experts, router.outputs, refused))
    return found
