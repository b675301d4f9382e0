"""Real models in pools so small that requests are preempted all the time: every answer is the lone one.

Five kinds of state, poisoned memory, prefix hits and drafts at once; the oracle is transformers' full forward.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import checkpoints
import numpy as np
import pytest
from engine_strategies import optimistic_profile
from engines import oracle_logits
from tiny_runners import tiny_runner

from hybridtrt.runtime import intake
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.verify import agreeing_tokens

KINDS = {
    "mamba1": "jamba",
    "mamba2": "granitemoehybrid",
    "gated delta": "qwen3_next",
    "short conv": "lfm2",
    "sliding window": "gemma3_text.scaled",
}
VOCAB = 96
LONGEST = 48
PREEMPTION = {  # what is preempted comes back by: bytes of swap space, and seconds to compute a token again
    "recompute": (0, 1e-9),
    "swap": (1 << 24, 1.0),
}


def requests() -> list[Request]:
    """Prompts of 1 to 21 tokens, half of them with a common beginning, and answers of 18 to 27 tokens."""
    rng = np.random.default_rng(1)
    common = rng.integers(0, VOCAB, 13).tolist()
    made = []
    for i in range(20):
        own = rng.integers(0, VOCAB, rng.choice([1, 2, 5, 8])).tolist()
        prompt = tuple(common + own if i % 2 else own)
        made.append(Request(str(i), prompt, SamplingParams(max_tokens=int(rng.integers(18, 28)), ignore_eos=True)))
    return made


class Prompter:
    """Drafts what it knows of the answers, with a mistake in every third draft."""

    def __init__(self, answers: Mapping[Sequence[int], Sequence[int]], prompt: Sequence[int]) -> None:
        self._ahead = list(answers[tuple(prompt)])
        self._random = random.Random(len(prompt))

    def append(self, token: int) -> None:
        del self._ahead[:1]

    def propose(self, limit: int) -> list[int]:
        drafts = self._ahead[: self._random.randint(0, limit)]
        if drafts and self._random.random() < 1 / 3:
            drafts[self._random.randrange(len(drafts))] = self._random.randrange(VOCAB)
        return drafts


@pytest.mark.parametrize("how", PREEMPTION)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_constant_preemption_changes_no_answer(
    target: str, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the runner of the CPU, and on that of a GPU over a device of host memory."""
    asked = requests()
    roomy = tiny_runner(KINDS[kind], longest=LONGEST, spare=7, num_slots=9, max_num_tokens=256)
    answers = {result.request_id: result.token_ids for result in Engine(roomy).generate(asked)}
    known = {request.prompt_ids: answers[request.id] for request in asked}
    monkeypatch.setattr(intake, "NgramDrafter", lambda prompt, max_draft_tokens: Prompter(known, prompt))

    swap_bytes, token_seconds = PREEMPTION[how]
    limits = {"longest": LONGEST, "spare": 0, "window_spare": 5, "num_slots": 14, "max_num_tokens": 24}
    runner = tiny_runner(KINDS[kind], target, **limits)
    options = EngineOptions(
        poison=True, policy="max_utilization", swap_bytes=swap_bytes, snapshot_interval=8, max_draft_tokens=3
    )
    engine = Engine(runner, options=options, profile=optimistic_profile(runner.info.num_pages, token_seconds))
    for request, result in zip(asked, engine.generate(asked), strict=True):
        assert result.error is None
        history = [*request.prompt_ids, *result.token_ids]
        expected = oracle_logits(checkpoints.tiny_model(KINDS[kind]), history)[len(request.prompt_ids) - 1 : -1]
        assert agreeing_tokens(expected, result.token_ids) == request.params.max_tokens
    engine.check_integrity()
    statistics = engine.statistics()
    assert statistics[f"preempted_{how}"] >= len(asked) / 2
    assert statistics["hit_tokens"] > 0
    assert 0 < statistics["accepted_draft_tokens"] < statistics["draft_tokens"]
    assert all(usage["used"] == 0 for usage in [statistics["slots"], *statistics["pages"].values()])
