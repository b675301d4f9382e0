"""How much of the pools a request is expected to hold, before it runs."""

from __future__ import annotations

import math

from hybridtrt.converters.memory import cache_memory
from hybridtrt.runtime.profile import Profile
from hybridtrt.runtime.runner import RunnerInfo

MARGIN = 0.1  # above what a profile says


class Admission:
    """Expected pages of a request, from a profile where it has the length and by the analytic numbers elsewhere.

    The expectation is the mean over a request's life. Running requests are at different points of their lives, so what
    they hold together is near the sum; where it is more, preemption makes room.
    """

    def __init__(self, info: RunnerInfo, profile: Profile | None = None) -> None:
        self._info = info
        self._groups = cache_memory(info.caches).groups
        self._pages_per_token = {
            (group, bits): (1 + MARGIN) * value / (self._groups[group].bytes_per_token * info.page_size)
            for (group, bits), value in (profile.bytes_per_token() if profile else {}).items()
            if group in self._groups
        }

    def expected_pages(self, group: str, prompt: int, max_tokens: int) -> int:
        """Pages of a page group that a request of `prompt` and at most `max_tokens` tokens holds on average.

        By the analytic numbers those of the prompt and half the output. Never more than it can hold at once; else never
        less than its prompt takes and one page for its output.
        """
        total = prompt + max_tokens
        rate = self._pages_per_token.get((group, total.bit_length()))
        mean = self._pages(group, prompt + (max_tokens + 1) // 2) if rate is None else math.ceil(rate * total)
        return min(max(mean, self._pages(group, prompt) + 1), self._pages(group, total - 1))

    def _pages(self, group: str, tokens: int) -> int:
        return self._groups[group].pages(tokens, self._info.page_size, self._info.max_num_tokens)
