"""Where the time of steps goes: by layer kind, by operator, and outside the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridtrt.runtime.step_log import LoggedStep
from hybridtrt.runtime.work import CountedNode, Work

OUTSIDE = "outside the kernels"  # scheduling, sampling, and entering the executor


@dataclass(frozen=True)
class Line:
    """What some nodes took of a step, and how fast they moved bytes (of weights and caches) and computed."""

    name: str
    milliseconds: float  # a step
    share: float  # of the step
    gb_per_s: float
    gflop_per_s: float


@dataclass(frozen=True)
class PhaseProfile:
    """The mean step of a phase, `prefill` or `decode`; lines from the slowest on."""

    phase: str
    steps: int
    milliseconds: float
    kinds: tuple[Line, ...]
    ops: tuple[Line, ...]

    def render(self) -> str:
        """Both tables as text."""
        head = (f"{self.phase}: {self.milliseconds:.2f} ms a step", "ms", "share", "GB/s", "GFLOP/s")
        tables = [("by layer kind", self.kinds), ("by operator", self.ops)]
        rows: list[tuple[str, ...]] = [head]
        for title, lines in tables:
            rows += [(title, "", "", "", ""), *(_cells(line) for line in lines)]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5))]).rstrip()
            for row in rows
        )


def profile_phase(
    phase: str, nodes: Sequence[CountedNode], steps: Sequence[LoggedStep], seconds: float
) -> PhaseProfile:
    """Add up steps that took so many seconds altogether. Raises `ValueError` where their nodes were not timed."""
    taken, work = [0.0] * len(nodes), [Work()] * len(nodes)
    for step in steps:
        if step.node_seconds is None:
            raise ValueError("nodes were not timed")
        for i, node in enumerate(nodes):
            taken[i] += float(step.node_seconds[i])
            work[i] += node.work(step.shape)

    def lines(key: Callable[[CountedNode], str], more: list[Line]) -> tuple[Line, ...]:
        groups: dict[str, list[int]] = {}
        for i, node in enumerate(nodes):
            groups.setdefault(key(node), []).append(i)
        found = [
            _line(name, sum(taken[i] for i in members), sum((work[i] for i in members), Work()), len(steps), seconds)
            for name, members in groups.items()
        ]
        return tuple(sorted([*found, *more], key=lambda line: -line.milliseconds))

    outside = _line(OUTSIDE, max(seconds - sum(taken), 0.0), Work(), len(steps), seconds)
    kinds, ops = lines(lambda node: node.kind, [outside]), lines(lambda node: node.spec.name, [])
    return PhaseProfile(phase, len(steps), seconds / len(steps) * 1e3, kinds, ops)


def _line(name: str, taken: float, work: Work, steps: int, seconds: float) -> Line:
    return Line(
        name,
        round(taken / steps * 1e3, 4),
        round(taken / seconds, 4),
        round(work.bytes / taken / 1e9, 6) if taken else 0.0,
        round(work.flops / taken / 1e9, 6) if taken else 0.0,
    )


def _cells(line: Line) -> tuple[str, ...]:
    counted = ("", "") if line.name == OUTSIDE else (f"{line.gb_per_s:.1f}", f"{line.gflop_per_s:.1f}")
    return f"  {line.name}", f"{line.milliseconds:.3f}", f"{line.share:.1%}", *counted
