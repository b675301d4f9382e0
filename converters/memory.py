"""How much memory a model needs: one formula for inspection, for the sizes of the pools and for admission.

Activations are not counted; they depend on what runs the network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridtrt.converters.checkpoint import weight_layouts
from hybridtrt.converters.config import ModelConfig
from hybridtrt.plugins.caches import CacheSpec, PageSpec, StateSpec, pages_held


@dataclass(frozen=True)
class PageGroup:
    """The paged caches that share a block table. `bytes_per_token` is the sum over its layers."""

    name: str
    window: int | None
    bytes_per_token: int
    limit: int | None = None

    def pages(self, length: int, page_size: int) -> int:
        """Pages of a sequence of `length` tokens."""
        return pages_held(length, page_size, limit=self.limit)


@dataclass(frozen=True)
class CacheMemory:
    """What sequences keep between steps: page groups by name, and bytes of state of one sequence."""

    groups: dict[str, PageGroup]
    state_bytes: int

    @property
    def kv_bytes_per_token(self) -> dict[str, int]:
        """Bytes of one token by page group."""
        return {name: group.bytes_per_token for name, group in self.groups.items()}


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of the pools and bytes of everything that lives as long as an engine.

    `num_pages` and `num_slots` include the reserved page 0 and slot 0.
    """

    weight_bytes: int
    num_pages: dict[str, int]
    num_slots: int
    page_bytes: int  # all pools of pages
    state_bytes: int  # all pools of states

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.page_bytes + self.state_bytes


def cache_memory(caches: list[CacheSpec]) -> CacheMemory:
    """Add up caches, layer by layer. Raises `ValueError` if layers of one page group keep different tokens."""
    groups: dict[str, PageGroup] = {}
    for spec in caches:
        if isinstance(spec, PageSpec):
            group = groups.get(spec.group, PageGroup(spec.group, spec.window, 0, spec.limit))
            for key in ("window", "limit"):
                own, common = getattr(spec, key), getattr(group, key)
                if own != common:
                    raise ValueError(f"{spec.name}: {key}={own} in page group {group.name} of {common}")
            groups[spec.group] = replace(group, bytes_per_token=group.bytes_per_token + spec.bytes_per_token)
    return CacheMemory(groups, sum(spec.bytes_per_slot for spec in caches if isinstance(spec, StateSpec)))


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights as they are stored."""
    return sum(layout.num_bytes for layout in weight_layouts(config).values())


def plan_memory(
    config: ModelConfig,
    *,
    max_batch_size: int,
    max_seq_len: int,
    tokens_per_block: int,
) -> MemoryPlan:
    """Pools in which `max_batch_size` sequences of `max_seq_len` tokens always fit, and their bytes."""
    caches = cache_memory(config.caches())
    num_pages = {
        name: 1 + max_batch_size * group.pages(max_seq_len, tokens_per_block) for name, group in caches.groups.items()
    }
    num_slots = 1 + max_batch_size
    return MemoryPlan(
        weight_bytes=weight_bytes(config),
        num_pages=num_pages,
        num_slots=num_slots,
        page_bytes=sum(
            num_pages[name] * tokens_per_block * group.bytes_per_token for name, group in caches.groups.items()
        ),
        state_bytes=num_slots * caches.state_bytes,
    )
