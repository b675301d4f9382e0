"""The same requests in any order and batch get the same tokens, greedy and seeded.

Another cut of a prompt into chunks moves logits in their last bits. "The same" is therefore: equal to the token that
the request's logits alone give, or so near to a tie that those bits decide.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from engines import relative_error
from numpy.typing import NDArray
from steps import make_batch, place
from tiny_runners import tiny_runner

from hybridtrt.plugins.sample.philox import uniform
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import Runner
from hybridtrt.runtime.verify import agreeing_tokens

KINDS = ("jamba", "granitemoehybrid", "qwen3_next", "lfm2", "gemma3_text.scaled", "recurrent_gemma", "deepseek_v3")
MOVEMENT = 5e-5  # of the logits' standard deviation; 9e-6 is the most that was seen in these models
TIE = 1e-4  # of probability
LENGTHS = (33, 1, 7, 20, 16, 48, 2, 40)


@cache
def runner(variant: str) -> Runner:
    return tiny_runner(variant, longest=80, spare=12, num_slots=12, max_num_tokens=256)


@pytest.mark.parametrize("variant", KINDS)
def test_logits_hardly_move_with_the_batch(variant: str) -> None:
    """Prefilled together, and then decoded together."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, runner(variant).info.vocab_size, length + 1).tolist() for length in LENGTHS]
    placement = place([len(ids) for ids in tokens], runner(variant).info.page_size, rng)
    groups = list(runner(variant).info.num_pages)
    runner(variant).clear_slots(placement.slots)
    for rows in (
        [(sequence, 0, length) for sequence, length in enumerate(LENGTHS)],
        [(sequence, length, length + 1) for sequence, length in enumerate(LENGTHS)],
    ):
        together = runner(variant).step(make_batch(rows, tokens, placement, groups)).copy()
        bounds = np.cumsum([0, *(stop - start for _, start, stop in rows)])
        for sequence, start, stop in rows:
            alone = full_logits(lone_runner(variant), tokens[sequence])[start:stop]
            assert relative_error(together[bounds[sequence] : bounds[sequence + 1]], alone) < MOVEMENT


@cache
def lone_runner(variant: str) -> Runner:
    return tiny_runner(variant, longest=80, spare=0, num_slots=2, max_num_tokens=256)


def requests(vocab: int) -> list[Request]:
    """Twelve prompts of 1 to 40 tokens, some alike, each greedy and seeded."""
    rng = random.Random(0)
    made = []
    for i in range(12):
        prompt = tuple(rng.choices(range(vocab), k=rng.choice([1, 2, 5, 16, 17, 40])))
        prompt = made[0].prompt_ids + prompt[:5] if i % 4 == 3 else prompt
        greedy = SamplingParams(max_tokens=12, ignore_eos=True)
        seeded = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=rng.randrange(2**64))
        made += [Request(f"greedy {i}", prompt, greedy), Request(f"seeded {i}", prompt, seeded)]
    return made


def seeded_tokens(logits: NDArray[np.float32], token_ids: tuple[int, ...], request: Request) -> int:
    """How many tokens from the start are those that the random numbers hit in the cumulative probability."""
    weights = np.exp((logits - logits.max(-1, keepdims=True)).astype(np.float64) / request.params.temperature)
    ends = np.cumsum(weights / weights.sum(-1, keepdims=True), axis=-1)
    rows = np.arange(len(token_ids))
    numbers = uniform(np.full(len(rows), request.params.seed, np.uint64), len(request.prompt_ids) + rows)
    stop = ends[rows, token_ids]
    start = stop - weights[rows, token_ids] / weights.sum(-1)
    wrong = np.flatnonzero((numbers < start - TIE) | (numbers > stop + TIE))
    return int(wrong[0]) if len(wrong) else len(token_ids)


@pytest.mark.parametrize("variant", ["qwen3_next", "recurrent_gemma"])
def test_any_order_and_batch_gives_the_same_tokens(variant: str) -> None:
    asked = requests(runner(variant).info.vocab_size)
    rng = random.Random(1)
    for batch_size, num_tokens, chunk, drafts in ((1, 256, None, 0), (8, 256, None, 0), (8, 9, 3, 2), (3, 40, 16, 0)):
        options = EngineOptions(batch_size, num_tokens, chunk, poison=True, max_draft_tokens=drafts)
        results = Engine(runner(variant), options=options).generate(rng.sample(asked, len(asked)))
        found = {result.request_id: result.token_ids for result in results}
        for request in asked:
            tokens = found[request.id]
            logits = full_logits(lone_runner(variant), [*request.prompt_ids, *tokens])[len(request.prompt_ids) - 1 : -1]
            greedy = request.params.seed is None
            agreed = agreeing_tokens(logits, tokens) if greedy else seeded_tokens(logits, tokens, request)
            assert agreed == request.params.max_tokens
