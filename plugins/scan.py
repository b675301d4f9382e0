"""The inclusive scan of an elementwise linear recurrence, without a loop over tokens."""

from __future__ import annotations

from torch import Tensor


def inclusive_scan(decay: Tensor, value: Tensor) -> None:
    """value[t] = decay[t] value[t - 1] + value[t] along dimension 1, in place, in log2(length) passes.

    Both arguments are overwritten. All decays are at most 1, so products of them cannot overflow.
    """
    length = value.shape[1]
    offset = 1
    while offset < length:
        value[:, offset:] += decay[:, offset:] * value[:, :-offset]
        decay[:, offset:] = decay[:, offset:] * decay[:, :-offset]
        offset *= 2
