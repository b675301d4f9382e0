"""The engine's statistics and this model's answers in Triton's metrics endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hybridtrt.model_repo.statistics import GAUGES, HISTOGRAMS, RESPONSES, Family, observations, samples
from hybridtrt.runtime.client import EngineClient, EngineUnavailableError
from hybridtrt.runtime.statistics import BOUNDS


class Metrics:
    """Metric families, brought up to date now and then: a write takes 30 us.

    `make_family` is Triton's `MetricFamily`. Its histograms take observations, not counts, so what the engine has
    observed since the last update is observed again here, in the same buckets and with the same sum.
    """

    def __init__(
        self, make_family: Any, labels: Mapping[str, str], client: EngineClient, answered: Counter[str], engine: bool
    ) -> None:
        self._labels, self._client, self._answered, self._engine = labels, client, answered, engine
        self._families = {
            family: make_family(
                name=family.name, description=family.description, kind=getattr(make_family, family.kind.upper())
            )
            for family in (RESPONSES, *((*GAUGES, *HISTOGRAMS.values()) if engine else ()))
        }
        self._metrics: dict[tuple[Family, str], Any] = {}
        self._values: dict[tuple[Family, str], float] = {}
        self._observed = {name: ([0] * (len(BOUNDS) + 1), 0.0) for name in HISTOGRAMS}

    def update(self) -> None:
        """Write what has changed."""
        for reason, count in list(self._answered.items()):
            self._set(RESPONSES, reason, count)
        if self._engine and (info := self._client.info) is not None:
            try:
                statistics = self._client.statistics()
            except EngineUnavailableError:
                return
            for family, label, value in samples(statistics, info):
                self._set(family, label, value)
            for name, histogram in statistics["histograms"].items():
                self._observe(name, histogram["counts"], histogram["sum"])

    def _set(self, family: Family, label: str, value: float) -> None:
        before = self._values.get((family, label))
        if value == before:
            return
        metric = self._metric(family, label)
        if family.kind == "gauge":
            metric.set(value)
        else:
            metric.increment(value - (before or 0))
        self._values[family, label] = value

    def _observe(self, name: str, counts: list[int], total: float) -> None:
        counts_before, total_before = self._observed[name]
        new = [count - before for count, before in zip(counts, counts_before, strict=True)]
        if min(new) < 0:  # another engine
            new, total_before = counts, 0.0
        metric = self._metric(HISTOGRAMS[name], "", buckets=list(BOUNDS))
        for value in observations(new, total - total_before):
            metric.observe(value)
        self._observed[name] = counts, total

    def _metric(self, family: Family, label: str, **options: Any) -> Any:
        key = (family, label)
        if key not in self._metrics:
            labels = {**self._labels, **({family.label: label} if family.label else {})}
            self._metrics[key] = self._families[family].Metric(labels=labels, **options)
        return self._metrics[key]
