"""Token caches in pages: writing a step's tokens, and reading back what a row's queries see."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrt.plugins.ragged import Step


def store(step: Step, tokens: Tensor, pool: Tensor, group: str) -> None:
    """Write this step's tokens `[T, ...]` into their pages of `pool` `[pages, page_size, ...]`."""
    page_size = pool.shape[1]
    pages = step.block_tables[group][step.token_rows, step.positions // page_size]
    pool[pages, step.positions % page_size] = tokens.to(pool.dtype)


def gather(
    positions: Tensor, table: Tensor, pool: Tensor, dtype: torch.dtype, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cached tokens `[n, length, ...]` of n rows, padded to the longest, and what `[n, L, length]` each query sees.

    `positions` `[n, L]` are the queries', ascending, and `table` `[n, P]` the rows' pages. Pages that lie wholly before
    every window are not read; tokens that no query of the row sees are zero.
    """
    page_size = pool.shape[1]
    first = positions[:, 0] * 0 if window is None else (positions[:, 0] - window + 1).clamp(min=0) // page_size
    last = positions[:, -1] // page_size
    pages = first[:, None] + torch.arange(int((last - first).max()) + 1)
    held = table.gather(1, pages.clamp(max=table.shape[1] - 1))
    key_positions = (pages[..., None] * page_size + torch.arange(page_size)).flatten(1)  # [n, length]
    cached = pool[held].flatten(1, 2).to(dtype)
    distance = positions[..., None] - key_positions[:, None]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    # What no query of the row sees may hold anything, NaN included: 0 * NaN would poison the sum.
    unseen = ~visible.any(1)
    if unseen.any():
        cached = cached.masked_fill(unseen.reshape(*unseen.shape, *(1,) * (cached.dim() - 2)), 0.0)
    return cached, visible
