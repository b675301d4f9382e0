"""Measures which tactic is the fastest on this machine, for each kind of product with a matrix of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hybridtrt.build.engine import EngineConfig
from hybridtrt.build.lowering import PackedWeight
from hybridtrt.build.measuring import Question, Stream, fastest
from hybridtrt.build.packed_file import stored_bytes
from hybridtrt.build.tactics import Machine, Product, Tuned
from hybridtrt.build.timing_cache import TimingCache
from hybridtrt.plugins.linear.panel_layout import PANEL, PANEL_ROLES, packed_bytes
from hybridtrt.plugins.native.library import TACTIC_RANGES
from hybridtrt.plugins.native.tactics import DEFAULT, kernel_digest, known_tactics, range_of

LEAST_BYTES = 1 << 20  # of a matrix, or of all experts': below nothing is measured
SLICE_BYTES = 1 << 20  # of a matrix for each thread: so much of it is measured


class Tuner:
    """Tunes an engine on this machine: `build` calls it with the config and the file of packed weights.

    It measures with `threads` threads for about `seconds` at most, and what `cache` knows not at all. `report` is told
    what is measured and found.
    """

    def __init__(self, threads: int, seconds: float, cache: TimingCache, report: Callable[[str], None]) -> None:
        self._threads, self._seconds, self._cache, self._report = threads, seconds, cache, report

    def __call__(self, config: EngineConfig, file: Path) -> Tuned | None:
        """None where nothing is worth it, or where there are no kernels."""
        products = worth_tuning(config)
        if not products:
            return None
        try:
            machine = Machine.here(self._threads)
        except ValueError:
            return None
        asked = {
            product: [Question(_slice(product, self._threads), rows) for rows in range(range_of(most) + 1)]
            for product, most in products.items()
        }
        answers = self._answers({question for questions in asked.values() for question in questions}, machine, file)
        chosen: dict[str, tuple[str, ...]] = {}
        for product, questions in asked.items():
            beyond = [DEFAULT] * (TACTIC_RANGES - len(questions))
            chosen[str(product)] = (*(answers[question] for question in questions), *beyond)
        return Tuned(machine, chosen)

    def _answers(self, questions: set[Question], machine: Machine, file: Path) -> dict[Question, str]:
        """From the cache or measured; the default where time is over."""
        stream, tactics = Stream(file), known_tactics()
        where = f"{machine}, kernels {kernel_digest()}"
        keys = {
            question: f"{question.product}, rows {tactics.typical_rows[question.rows]}, within {stream.scale} MB"
            for question in questions
        }
        known = self._cache.read(where)
        answers = {question: known[key] for question, key in keys.items() if known.get(key) in tactics.names}
        missing = questions - answers.keys()
        if not missing:
            return answers
        self._report(f"{len(missing)} of {len(questions)} kernel choices are measured, at most {self._seconds:g} s")
        measured = self._measured(missing, stream, machine)
        self._cache.add(where, {keys[question]: tactic for question, tactic in measured.items()})
        late = len(missing) - len(measured)
        self._report(
            f"{sum(tactic != DEFAULT for tactic in measured.values())} of {len(measured)} are not the default"
            + (f", {late} could not be told in this time" if late else "")
        )
        return dict.fromkeys(missing, DEFAULT) | answers | measured

    def _measured(self, questions: set[Question], stream: Stream, machine: Machine) -> dict[Question, str]:
        """Few rows first, each question with an equal share of the time that is left."""
        found: dict[Question, str] = {}
        end = time.monotonic() + self._seconds
        stream.touch()
        for i, question in enumerate(sorted(questions, key=lambda one: (one.rows, str(one.product)))):
            best = fastest(question, stream, machine, (end - time.monotonic()) / (len(questions) - i))
            if best is not None:
                found[question] = best
        return found


def worth_tuning(config: EngineConfig) -> dict[Product, int]:
    """The products with large matrices, and the most rows of each."""
    lowered = config.lowered()
    limits = {"T": config.build.max_num_tokens, "R": config.build.max_batch_size}
    operators = {operator for operator, _ in PANEL_ROLES}
    found: dict[Product, int] = {}
    for node in lowered.nodes:
        if node.op not in operators:
            continue
        rows = limits[lowered.buffers[node.outputs[0].buffer].rows]
        for weight in node.weights:
            if not isinstance(weight, PackedWeight) or not weight.stored.format.startswith("panel_"):
                continue
            if stored_bytes(weight) >= LEAST_BYTES:
                product = Product.of(weight)
                found[product] = max(rows, found.get(product, 0))
    return found


def _slice(product: Product, threads: int) -> Product:
    """As many whole panels as are measured."""
    panels = SLICE_BYTES // packed_bytes((PANEL, product.k), product.format, product.group) + 1
    return replace(product, n=min(product.n, panels * threads * PANEL))
