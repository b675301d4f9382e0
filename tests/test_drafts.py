"""Drafts: always a continuation of the text, long where it repeats, none where it does not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridtrt.runtime.drafts import NGRAM, NgramDrafter

tokens = st.lists(st.integers(0, 3), max_size=40)


def drafter_of(prompt: Sequence[int], answer: Sequence[int], most: int = 8) -> NgramDrafter:
    drafter = NgramDrafter(prompt, most)
    for token in answer:
        drafter.append(token)
    return drafter


def continuations(text: list[int], length: int) -> list[list[int]]:
    """What followed wherever the last n-gram has occurred, copied token by token, also from the copy itself."""
    found = []
    for source in range(NGRAM, len(text)):
        if text[source - NGRAM : source] == text[-NGRAM:]:
            copy = list(text)
            for i in range(length):
                copy.append(copy[source + i])
            found.append(copy[len(text) :])
    return found


@settings(max_examples=500, deadline=None)
@given(prompt=tokens, answer=tokens, limit=st.integers(0, 10), most=st.integers(0, 8))
@example(prompt=[], answer=[1, 1, 1, 1], limit=8, most=8)
@example(prompt=[0, 0, 0], answer=[0], limit=3, most=3)
@example(prompt=[2], answer=[1, 0, 0, 1], limit=3, most=3)
def test_a_draft_is_a_continuation_that_followed_the_same_tokens_before(
    prompt: list[int], answer: list[int], limit: int, most: int
) -> None:
    draft = drafter_of(prompt, answer, most).propose(limit)
    assert len(draft) <= min(limit, most)
    assert not draft or draft in continuations(prompt + answer, len(draft))


@settings(max_examples=200, deadline=None)
@given(prompt=tokens, answer=st.lists(st.integers(0, 3), min_size=1, max_size=40), limit=st.integers(0, 10))
def test_drafts_depend_on_the_text_alone(prompt: list[int], answer: list[int], limit: int) -> None:
    asked = NgramDrafter(prompt, 8)
    for token in answer:
        asked.propose(limit)
        asked.append(token)
    assert asked.propose(limit) == drafter_of(prompt, answer).propose(limit)


def test_the_last_place_is_copied_from() -> None:
    drafter = drafter_of([1, 2, 3, 7, 7, 1, 2, 3, 8, 8, 9], [1, 2])
    assert drafter.propose(8) == []
    drafter.append(3)
    assert drafter.propose(2) == [8, 8]


def test_a_place_is_followed_while_it_is_right() -> None:
    """Though a part of what has been followed came again later, and went on differently."""
    drafter = drafter_of([1, 2, 3, 4, 5, 6, 0, 8, 3, 4, 5, 7], [1, 2, 3, 4, 5])
    assert drafter.propose(1) == [6]
    drafter.append(7)
    assert drafter.propose(1) == [1]


def test_a_cycle_is_drafted_beyond_its_end() -> None:
    assert drafter_of([], [5, 6] * 20).propose(7) == [5, 6, 5, 6, 5, 6, 5]


def steps_and_drafts(prompt: list[int], answer: list[int], most: int = 7) -> tuple[int, int, int]:
    """Decode as an engine does: steps, steps with drafts, and rows that were computed for nothing or twice.

    After a wrong draft the next step runs the tokens up to it again and drafts nothing.
    """
    drafter = drafter_of(prompt, answer[:1], most)
    done, steps, drafted, extra, again = 1, 0, 0, 0, 0
    while done < len(answer):
        draft = [] if again else drafter.propose(len(answer) - done - 1)
        right = 0
        while right < len(draft) and draft[right] == answer[done + right]:
            right += 1
        for token in answer[done : done + right + 1]:
            drafter.append(token)
        steps, drafted, done = steps + 1, drafted + bool(draft), done + right + 1
        again = right + 1 if right < len(draft) else 0
        extra += len(draft) - right + again
    return steps, drafted, extra


@pytest.mark.parametrize("vocab", [16, 256, 100_000])
def test_a_copy_takes_few_steps(vocab: int) -> None:
    rng = random.Random(vocab)
    for _ in range(20):
        text = rng.choices(range(vocab), k=200)
        assert steps_and_drafts(text, text)[0] <= 0.25 * len(text)
        edited = [rng.randrange(vocab) if rng.random() < 0.04 else token for token in text]
        assert steps_and_drafts(text, edited)[0] <= 0.5 * len(text)


@pytest.mark.parametrize("vocab", [8, 16, 64, 1000, 100_000])
def test_random_text_is_hardly_drafted(vocab: int) -> None:
    for seed in range(10):
        text = random.Random(seed).choices(range(vocab), k=1500)
        steps, drafted, extra = steps_and_drafts(text[:500], text[500:])
        assert drafted < 0.05 * steps
        assert extra < 0.05 * steps


def test_repeats_that_always_end_wrong_are_given_up() -> None:
    rng = random.Random(0)
    phrase = [1, 2, 3]
    answer = [token for _ in range(300) for token in (*phrase, rng.randrange(10, 10_000))]
    _, drafted, extra = steps_and_drafts([], answer)
    assert drafted < 0.05 * len(answer)
    assert extra < 0.05 * len(answer)


def test_repeats_that_begin_late_are_seen_at_once() -> None:
    rng = random.Random(0)
    noise, text = rng.choices(range(8), k=2000), rng.choices(range(1000), k=200)
    for seen, least in ((8, 3), (20, 4), (60, 7)):
        draft = drafter_of([], [*noise, *text, *text[:seen]]).propose(7)
        assert len(draft) >= least
        assert draft == text[seen : seen + len(draft)]


def test_the_work_of_a_token_does_not_grow_with_the_text() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            Counted.reads += 1
            return super().__getitem__(index)

    drafter = NgramDrafter([], 8)
    drafter._tokens = Counted()
    for token in random.Random(0).choices(range(2), k=5000):
        drafter.append(token)
    assert Counted.reads <= 12 * 5000
