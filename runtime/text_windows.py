"""A text as windows of tokens, each to be run by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.tokenizer import load_tokenizer

Progress = Callable[[int], AbstractContextManager[Callable[[], None]]]  # of the number of windows: called after each


def read_tokens(engine_dir: str | Path, text: str | Path) -> tuple[Sequence[int], int]:
    """The tokens of a file by the tokenizer of an engine, at least two, and the file's bytes.

    Raises `ValueError` where the file is no text or too short, or the engine has no tokenizer.
    """
    tokenizer = load_tokenizer(engine_dir)
    if tokenizer is None:
        raise ValueError(f"{engine_dir} has no tokenizer, which a text needs")
    data = Path(text).read_bytes()
    if not data:
        raise ValueError(f"{text} is empty")
    try:
        ids = tokenizer.encode(data)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None
    if len(ids) < 2:
        raise ValueError(f"{text} has {len(ids)} token, and only those after the first are scored")
    return ids, len(data)


def cut_windows(
    info: RunnerInfo, ids: Sequence[int], context: int | None, chunk: int | None
) -> tuple[int, list[Sequence[int]]]:
    """The length of a window, `context` or by default the engine's longest, and the windows; the last may be shorter.

    Raises `ValueError` where the engine runs no such windows or no steps of `chunk` tokens, or does not know a token.
    """
    longest, most = info.max_seq_len, info.max_num_tokens
    context = longest if context is None else context
    if not 2 <= context <= longest:
        raise ValueError(f"context={context} is not in 2..{longest} (max_seq_len of the engine)")
    if chunk is not None and not 1 <= chunk <= most:
        raise ValueError(f"chunk={chunk} is not in 1..{most} (max_num_tokens of the engine)")
    if max(ids) >= info.vocab_size:
        raise ValueError(f"the tokenizer has token {max(ids)}, the model {info.vocab_size}")
    return context, [ids[start : start + context] for start in range(0, len(ids) - 1, context)]
