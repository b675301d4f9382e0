"""Ctrl-C while TensorRT builds: an exception in one of its callbacks would be lost in C++."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """What is given says whether SIGINT or SIGTERM came; their handlers are called where the block ends.

    Signals that Python does not handle, and other threads, which get none, are left as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in ours:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        if came:
            ours[signal.Signals(came[0])](came[0], None)
