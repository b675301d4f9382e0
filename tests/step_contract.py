"""What every step batch promises to a runner."""

from __future__ import annotations

import numpy as np

from hybridtrt.plugins.caches import PageSpec, StateSpec
from hybridtrt.plugins.step import Int32, StepBatch
from hybridtrt.runtime.runner import RunnerInfo


def page_specs(info: RunnerInfo) -> list[PageSpec]:
    return [spec for spec in info.caches if isinstance(spec, PageSpec)]


def has_states(info: RunnerInfo) -> bool:
    return any(isinstance(spec, StateSpec) for spec in info.caches)


def check_batch(batch: StepBatch, info: RunnerInfo) -> None:
    """Assert every promise of the step contract."""
    rows, tokens = batch.num_sequences, batch.num_tokens
    given = {name: value for name, value in vars(batch).items() if name != "block_tables" and value is not None}
    arrays = given | dict(batch.block_tables)
    assert all(array.dtype == np.int32 for array in arrays.values()), {k: v.dtype for k, v in arrays.items()}
    assert 0 < rows <= info.max_batch_size
    assert 0 < tokens <= info.max_num_tokens
    assert len(batch.logits_indices) <= info.max_logits_rows
    counts = np.diff(batch.cu_seqlens)
    assert batch.cu_seqlens.shape == (rows + 1,)
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == tokens
    assert (counts > 0).all()
    ends = batch.context_lens + counts
    assert (batch.context_lens >= 0).all()
    assert (ends <= info.max_seq_len).all()
    expected = np.concatenate([np.arange(a, b) for a, b in zip(batch.context_lens, ends, strict=True)])
    assert np.array_equal(batch.positions, expected)
    assert ((batch.input_ids >= 0) & (batch.input_ids < info.vocab_size)).all()
    assert ((batch.logits_indices >= 0) & (batch.logits_indices < tokens)).all()
    assert (np.diff(batch.logits_indices) > 0).all()
    assert batch.state_src.shape == batch.state_dst.shape == (rows,)
    if has_states(info):
        check_slots(batch, info)
    assert set(batch.block_tables) == set(info.num_pages)
    for spec in page_specs(info):
        check_pages(batch.block_tables[spec.group], batch.context_lens, ends, spec, info)


def check_slots(batch: StepBatch, info: RunnerInfo) -> None:
    """Assert that nobody reads or writes a slot that another row writes."""
    for slots in (batch.state_src, batch.state_dst):
        assert ((slots > 0) & (slots < info.num_slots)).all()
    readers = batch.state_src[:, None] == batch.state_dst
    assert len(set(batch.state_dst)) == batch.num_sequences
    assert not (readers & ~np.eye(batch.num_sequences, dtype=bool)).any()


def check_pages(table: Int32, context: Int32, ends: Int32, spec: PageSpec, info: RunnerInfo) -> None:
    """Assert that what is read or written is there, and that rows share only pages that none of them writes."""
    limit, window = spec.limit or info.max_seq_len, spec.window or info.max_seq_len
    column, size = np.arange(table.shape[1]), info.page_size
    used = -(-np.minimum(ends, limit) // size)
    assert table.shape[0] == len(ends)
    assert used.max() <= table.shape[1]
    assert ((table >= 0) & (table < info.num_pages[spec.group])).all()
    seen = column >= (np.maximum(context - window + 1, 0) // size)[:, None]
    assert (table[seen & (column < used[:, None])] > 0).all()
    writable = (context < limit)[:, None] & (column >= context[:, None] // size)
    held = table > 0
    written, read = table[held & writable].tolist(), table[held & ~writable].tolist()
    assert len(set(written)) == len(written)
    assert not set(written) & set(read)
    places = {(page, place) for page, place in zip(table[held], np.nonzero(held)[1], strict=True)}
    assert len(places) == len(set(written)) + len(set(read)), "one page stands at two places"
