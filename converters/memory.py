"""How much memory a model needs: one formula for inspection, for plans, for the sizes of the pools and for admission.

Activations are not counted; they depend on what runs the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hybridtrt.converters.checkpoint import weight_layouts
from hybridtrt.converters.config import ModelConfig
from hybridtrt.plugins.caches import CacheSpec, PageSpec, pages_held


@dataclass(frozen=True)
class PageGroup:
    """The paged caches that share a block table. `bytes_per_token` is the sum over its layers."""

    name: str
    window: int | None
    bytes_per_token: int
    limit: int | None = None

    def pages(self, length: int, page_size: int, chunk: int) -> int:
        """Most pages that a sequence of `length` tokens holds at once, in steps of up to `chunk` tokens."""
        return pages_held(length, page_size, self.window, self.limit, chunk)


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
class PoolLimits:
    """What pools are sized for: `max_batch_size` sequences of `max_seq_len` tokens at once, in steps of up to
    `max_num_tokens` tokens, and so many slots besides for snapshots of prefixes and for the states of drafts."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    tokens_per_block: int
    spare_slots: int = 0


@dataclass(frozen=True)
class GroupPool:
    """The pages of one group, with the reserved page 0. A sequence holds `pages_per_sequence` of them at most."""

    window: int | None
    limit: int | None
    pages_per_sequence: int
    num_pages: int
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of the pools, and bytes of everything that lives as long as an engine.

    `num_slots` includes the reserved slot 0; a model without states needs no other.
    """

    weight_bytes: int
    groups: dict[str, GroupPool]
    num_slots: int
    state_bytes: int  # all pools of states

    @property
    def num_pages(self) -> dict[str, int]:
        """Pages by group."""
        return {name: pool.num_pages for name, pool in self.groups.items()}

    @property
    def page_bytes(self) -> int:
        """All pools of pages."""
        return sum(pool.num_bytes for pool in self.groups.values())

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.page_bytes + self.state_bytes


def cache_memory(caches: Iterable[CacheSpec]) -> CacheMemory:
    """Add up caches, layer by layer. Raises `ValueError` if layers of one page group keep different tokens."""
    groups: dict[str, PageGroup] = {}
    state_bytes = 0
    for spec in caches:
        if isinstance(spec, PageSpec):
            group = groups.get(spec.group, PageGroup(spec.group, spec.window, 0, spec.limit))
            for key in ("window", "limit"):
                own, common = getattr(spec, key), getattr(group, key)
                if own != common:
                    raise ValueError(f"{spec.name}: {key}={own} in page group {group.name} of {common}")
            groups[spec.group] = replace(group, bytes_per_token=group.bytes_per_token + spec.bytes_per_token)
        else:
            state_bytes += spec.bytes_per_slot
    return CacheMemory(groups, state_bytes)


def stored_as(caches: Iterable[CacheSpec], kv_dtype: str, state_dtype: str) -> list[CacheSpec]:
    """The same caches with other dtypes."""
    return [replace(spec, dtype=kv_dtype if isinstance(spec, PageSpec) else state_dtype) for spec in caches]


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights as they are stored."""
    return sum(layout.num_bytes for layout in weight_layouts(config).values())


def plan_memory(weight_bytes: int, caches: CacheMemory, limits: PoolLimits) -> MemoryPlan:
    """Pools in which a full batch of the longest sequences always fits, beside so many bytes of weights."""
    groups = {}
    for name, group in caches.groups.items():
        each = group.pages(limits.max_seq_len, limits.tokens_per_block, limits.max_num_tokens)
        num_pages = 1 + limits.max_batch_size * each
        num_bytes = num_pages * limits.tokens_per_block * group.bytes_per_token
        groups[name] = GroupPool(group.window, group.limit, each, num_pages, num_bytes)
    num_slots = 1 + (limits.max_batch_size + limits.spare_slots if caches.state_bytes else 0)
    return MemoryPlan(weight_bytes, groups, num_slots, num_slots * caches.state_bytes)
