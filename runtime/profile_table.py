"""A profile as one page of text."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtrt.runtime.profile import Profile, StepProfile


def render_profile(profile: Profile) -> str:
    """A table of the ranges and one of the steps."""
    groups = list(dict.fromkeys(pages.group for part in profile.ranges for pages in part.pages))
    ranges = [
        ("tokens", "requests", *(f"{group} B/token" for group in groups), "state B", "chunk peak B", "first token ms"),
        *(
            (
                f"{part.least}..{2 * part.least - 1}",
                str(part.requests),
                *(_bytes({pages.group: pages.bytes_per_token for pages in part.pages}.get(group)) for group in groups),
                f"{part.state_bytes:,}",
                f"{part.peak_chunk_bytes:,}",
                f"{part.time_to_first_token * 1e3:.1f}",
            )
            for part in profile.ranges
        ),
    ]
    steps = [
        ("step", "tokens", "ms", "tokens/s", "active experts"),
        *(_step("decode", step) for step in profile.decode),
        *(_step("prefill", step) for step in profile.prefill),
    ]
    copies = f"caches are copied at {profile.copy_bytes_per_s / 1e9:.2f} GB/s"
    return "\n".join([*_table(ranges), "", *_table(steps), "", copies])


def _step(kind: str, step: StepProfile) -> tuple[str, ...]:
    experts = "-" if step.active_experts is None else f"{step.active_experts:.1f}"
    return kind, str(step.tokens), f"{step.seconds * 1e3:.2f}", f"{step.tokens / step.seconds:.0f}", experts


def _bytes(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
