"""Plans on the runner: bytes are moved first, then the step runs, then its tokens are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from hybridtrt.runtime.batch import BatchBuilder
from hybridtrt.runtime.cache_manager import CacheManager
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.sampler import Choice, choose, prompt_log_probs
from hybridtrt.runtime.scheduler import Plan
from hybridtrt.runtime.sequence import Sequence
from hybridtrt.runtime.swap import Swapped

Logits = NDArray[np.float32]


class Executor:
    """Runs plans. `poison`: overwrite what has lost its owner with NaN before anything else is written."""

    def __init__(self, runner: Runner, caches: CacheManager, num_rows: int, poison: bool) -> None:
        self._runner, self._caches, self._poison = runner, caches, poison
        self._builder = BatchBuilder(caches, num_rows, runner.info.max_seq_len)

    def run(self, plan: Plan) -> Logits:
        """Move bytes, run the step and return the logits `[R, vocab_size]` to sample from: `plan.logits` rows each."""
        for sequence in plan.swapped_out:
            if (swapped := sequence.swapped) is not None:
                swapped.data = self._runner.save(swapped.pages, swapped.slots)
        self._poison_lost()
        for sequence, swapped in plan.swapped_in:
            self._restore(sequence, swapped)
        if plan.started and self._caches.states is not None:
            self._runner.clear_slots([sequence.target for sequence in plan.started])
        if not plan.sequences:
            return np.zeros((0, self._runner.info.vocab_size), np.float32)
        for i in (*plan.special, *range(plan.singles, len(plan.sequences))):
            if (guide := plan.sequences[i].guide) is not None:
                plan.guided = True
                if plan.logits[i]:
                    guide.start()
        batch = self._builder.build(plan)
        logits = self._runner.step(batch)
        expected = (len(batch.logits_indices), self._runner.info.vocab_size)
        if logits.shape != expected:
            raise RuntimeError(f"the runner returned logits of shape {logits.shape}; expected {expected}")
        if any(sequence.scores_prompt for sequence in plan.sequences[plan.singles :]):
            logits = _score_prompts(plan, logits)
        return logits

    def sample(self, plan: Plan, logits: Logits) -> Choice:
        """Sample from the logits of a plan: for sequence `i` the next `plan.logits[i]` rows of the result."""
        sequences, ahead, special = plan.sequences, [0] * plan.singles, list(plan.special)
        if plan.singles < len(sequences):
            sequences = sequences[: plan.singles]
        for i in range(plan.singles, len(plan.sequences)):
            if not plan.sequences[i].plain:
                special += range(len(ahead), len(ahead) + plan.logits[i])
            sequences += [plan.sequences[i]] * plan.logits[i]
            ahead += range(plan.logits[i])
        masks = None
        if plan.guided:
            masks = [None if sequence.guide is None else sequence.guide.mask() for sequence in sequences]
        return choose(logits, sequences, ahead, masks, special)

    def sample_first(self, follower: Sequence, logits: Logits) -> Choice:
        """Sample the first token of an answer whose prompt its leader has run: `logits` `[1, vocab_size]`."""
        masks = None
        if follower.guide is not None:
            follower.guide.start()
            masks = [follower.guide.mask()]
        return choose(logits, [follower], [0], masks)

    def copy_pages(self, copies: Mapping[str, Items[tuple[int, int]]]) -> None:
        """Copy pages between two steps."""
        self._poison_lost()
        self._runner.copy_pages(copies)

    def _restore(self, sequence: Sequence, swapped: Swapped) -> None:
        pages = self._caches.pages.computed(sequence)
        self._runner.restore(swapped.data, pages, [sequence.target] if swapped.slots else [])

    def _poison_lost(self) -> None:
        pages, slots = self._caches.take_lost()
        if self._poison and (pages or slots):
            self._runner.poison(pages, slots)


def _score_prompts(plan: Plan, logits: Logits) -> Logits:
    """Hand the log-probabilities of prompts to those who want them; the rest of the logits is left, as `plan` says."""
    kept: list[int] = []
    end = 0
    for i, (sequence, count) in enumerate(zip(plan.sequences, plan.counts, strict=True)):
        rows = range(end, end + plan.logits[i])
        end = rows.stop
        if sequence.scores_prompt:
            first, last = sequence.computed + 1, min(sequence.computed + count + 1, len(sequence.prompt))
            known = sequence.answer.num_prompt_scores + 1  # the first token has no probability
            scored = range(max(first, known), last)
            at = [rows.start + token - first for token in scored]
            k = sequence.request.params.prompt_log_probs or 0
            sequence.answer.push_prompt(
                prompt_log_probs(logits[at], sequence.prompt[scored.start : scored.stop].tolist(), k)
            )
            plan.logits[i] = int(sequence.computed + count == sequence.total)
            rows = rows[len(rows) - plan.logits[i] :]
        kept.extend(rows)
    return logits[kept]
