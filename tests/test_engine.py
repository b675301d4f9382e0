"""The engine over a runner without a network: every answer is the one that the request would have got alone."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from null_runner import NullRunner, lone_logits, null_info
from tokenizers_for_tests import byte_level, kept

from hybridtrt.build.stored_tokenizer import StoredTokenizer
from hybridtrt.plugins.sample import SampleParams, reference
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.request import Output, Request, SamplingParams
from hybridtrt.runtime.result import Result, join
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.sampler import temperature_of
from hybridtrt.runtime.tokenizer import Tokenizer
from hybridtrt.runtime.validation import stop_ids

TOKENIZER = Tokenizer(kept(byte_level()))
TEXT_INFO = null_info(vocab_size=420, eos_token_ids=(1,))  # as many tokens as the tokenizer has


def ask(name: str, prompt: Iterable[int] = (1, 2, 3), **params: object) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**params))  # type: ignore[arg-type]


def lone_tokens(request: Request, info: RunnerInfo) -> tuple[int, ...]:
    """What the request gets alone, by definition: no caches, no batches, one token after the other."""
    params, history = request.params, list(request.prompt_ids)
    ends = stop_ids(params, info.eos_token_ids)
    while len(history) < len(request.prompt_ids) + params.max_tokens:
        row = SampleParams(
            temperature=np.array([temperature_of(params)], np.float64),
            top_k=np.array([params.top_k or 0]),
            top_p=np.array([1.0 if params.top_p is None else params.top_p]),
            min_p=np.array([params.min_p or 0.0]),
            seeds=np.array([params.seed or 0], np.uint64),
            positions=np.array([len(history)]),
        )
        history.append(int(reference.sample(lone_logits(history, info)[None], row).tokens[0]))
        if history[-1] in ends:
            break
    return tuple(history[len(request.prompt_ids) :])


def random_request(rng: random.Random, name: str, info: RunnerInfo, longest: int) -> Request:
    prompt = [rng.randrange(info.vocab_size) for _ in range(rng.choice([1, 2, 3, rng.randint(1, longest // 2)]))]
    kinds = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 5},
        {"top_p": 0.8},
        {"temperature": 2, "top_p": 0.9},
    ]
    ends = (7,) if rng.random() < 0.3 else ()
    params = {"max_tokens": rng.randint(1, longest // 2), "seed": rng.randrange(2**64), "stop_token_ids": ends}
    return ask(name, prompt, **params, **rng.choice(kinds))


def run_all(engine: Engine, outputs: dict[str, list[Output]] | None = None) -> dict[str, Result]:
    """Step until nothing is left."""
    collected = {} if outputs is None else outputs
    while engine.has_work:
        for output in engine.step():
            collected.setdefault(output.request_id, []).append(output)
    return {name: join(parts) for name, parts in collected.items()}


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([1, 2, 5, 16, 64]),
    chunk=st.sampled_from([None, 1, 2, 3, 7, 64]),
    groups=st.sampled_from([("full", "window"), ("full",), ()]),
    states=st.booleans(),
)
def test_100_requests_that_come_and_go_get_what_they_get_alone(
    seed: int, budget: int, chunk: int | None, groups: tuple[str, ...], states: bool
) -> None:
    rng = random.Random(seed)
    info = null_info(
        vocab_size=20,
        max_batch_size=rng.randint(1, 8),
        max_num_tokens=budget,
        max_seq_len=40,
        num_pages={group: rng.randint(12, 30) for group in groups},
        num_slots=rng.randint(2, 9),
        states=states or not groups,
    )
    engine = Engine(NullRunner(info), options=EngineOptions(max_chunk=chunk, poison=True))
    requests = [random_request(rng, str(i), info, 40) for i in range(100)]
    outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
    waiting, cancelled = list(requests), set()
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 2, 8])):
            if waiting:
                engine.submit(waiting.pop())
        if rng.random() < 0.1:
            name = rng.choice(requests).id
            cancelled.add(name)
            engine.cancel(name)
        for pool in filter(None, (*engine._caches.pools, engine._caches.slots)):
            rng.shuffle(pool.free)
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    for request in requests:
        result, expected = join(outputs[request.id]), lone_tokens(request, info)
        assert result.error is None
        if result.finish_reason == "cancelled":
            assert request.id in cancelled
            assert result.token_ids == expected[: len(result.token_ids)]
        else:
            assert result.token_ids == expected
            assert result.finish_reason == ("stop" if expected[-1] in request.params.stop_token_ids else "length")
    engine.check_integrity()
    statistics = engine.statistics()
    assert statistics["running"] == statistics["waiting"] == statistics["slots"]["used"] == 0
    assert all(usage["used"] == usage["promised"] == 0 for usage in statistics["pages"].values())
    assert sum(statistics["finished"].values()) == 100


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("budget", [1, 3, 32])
def test_chunks_and_budgets_do_not_change_the_answers(chunk: int, budget: int) -> None:
    info = null_info(max_num_tokens=budget)
    requests = [ask(str(n), range(n), max_tokens=9) for n in (1, 2, 3, 4, 5, 8, 17, 30)]
    results = Engine(NullRunner(info), options=EngineOptions(max_chunk=chunk, poison=True)).generate(requests)
    assert [result.token_ids for result in results] == [lone_tokens(request, info) for request in requests]
    assert [result.request_id for result in results] == [request.id for request in requests]


def test_a_step_mixes_prefill_and_decode() -> None:
    runner = NullRunner(null_info())
    engine = Engine(runner)
    engine.submit(ask("a", max_tokens=5))
    engine.step()
    engine.submit(ask("b", range(7), max_tokens=5))
    assert {output.request_id for output in engine.step()} == {"a", "b"}
    assert np.diff(runner.batches[-1].cu_seqlens).tolist() == [1, 7]
    assert runner.batches[-1].logits_indices.tolist() == [0, 7]


def test_a_step_without_a_finished_prefill_has_no_outputs() -> None:
    engine = Engine(NullRunner(null_info()), options=EngineOptions(max_chunk=2))
    engine.submit(ask("a", range(5), max_tokens=1))
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]
    assert not engine.has_work
    assert engine.step() == []


class ForgetsToClear(NullRunner):
    def clear_slots(self, slots: object) -> None:
        pass


class MixesRows(NullRunner):
    def step(self, batch: StepBatch) -> np.ndarray:
        return super().step(batch)[::-1]


class WritesElsewhere(NullRunner):
    def step(self, batch: StepBatch) -> np.ndarray:
        return super().step(dataclasses.replace(batch, state_dst=batch.state_dst[::-1]))


@pytest.mark.parametrize("faulty", [ForgetsToClear, MixesRows, WritesElsewhere])
def test_the_null_runner_notices_faults(faulty: type[NullRunner]) -> None:
    info = null_info()
    requests = [ask(str(n), range(n), max_tokens=5) for n in range(1, 20)]
    answers = [result.token_ids for result in Engine(faulty(info)).generate(requests)]
    assert answers != [lone_tokens(request, info) for request in requests]


def test_the_same_seed_gives_the_same_tokens_in_any_batch() -> None:
    info = null_info()
    request = ask("mine", (5, 6), max_tokens=12, temperature=1.0, seed=42)
    alone = Engine(NullRunner(info)).generate([request])[0]
    others = [ask(str(i), range(i + 1), max_tokens=20, temperature=1.5, top_p=0.9) for i in range(7)]
    for order in ([request, *others], [*others, request]):
        results = {result.request_id: result for result in Engine(NullRunner(info)).generate(order)}
        assert results["mine"].token_ids == alone.token_ids
    other_seed = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=43))
    assert Engine(NullRunner(info)).generate([other_seed])[0].token_ids != alone.token_ids
    unseeded = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=None))
    assert len({Engine(NullRunner(info)).generate([unseeded])[0].token_ids for _ in range(3)}) == 3


def test_log_probs_of_the_chosen_tokens() -> None:
    info = null_info()
    requests = [ask("a", max_tokens=4, return_log_probs=True, temperature=0.5, seed=1), ask("b", max_tokens=4)]
    asked, silent = Engine(NullRunner(info)).generate(requests)
    history = [1, 2, 3]
    for token, log_prob in zip(asked.token_ids, asked.log_probs, strict=True):
        logits = lone_logits(history, info).astype(np.float64)
        assert log_prob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), abs=1e-5)
        history.append(token)
    assert silent.log_probs == ()


def test_end_tokens() -> None:
    info = null_info(max_seq_len=64)
    free = Engine(NullRunner(info)).generate([ask("a", max_tokens=40)])[0].token_ids
    third, fifth = free[2], free[4]
    assert free.index(third) == 2
    assert free.index(fifth) == 4
    info = dataclasses.replace(info, eos_token_ids=(third, 49))
    cases = {
        "model": ({}, 3),
        "ignored": ({"ignore_eos": True}, 40),
        "replaced": ({"end_id": fifth}, 5),
        "never": ({"end_id": -1}, 40),
        "more": ({"end_id": -1, "stop_token_ids": (fifth,)}, 5),
        "ignored but for more": ({"ignore_eos": True, "stop_token_ids": (fifth,)}, 5),
        "both": ({"stop_token_ids": (free[1],)}, 2),
    }
    results = Engine(NullRunner(info)).generate(
        [ask(name, max_tokens=40, **params) for name, (params, _) in cases.items()]
    )
    for result, (_, length) in zip(results, cases.values(), strict=True):
        assert result.token_ids == free[:length], result.request_id
        assert result.finish_reason == ("length" if length == 40 else "stop")


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_cancellation_at_any_point(when: int) -> None:
    engine = Engine(NullRunner(null_info(max_batch_size=2)), options=EngineOptions(max_chunk=4, poison=True))
    for name in ("a", "b", "waits"):
        engine.submit(ask(name, range(6), max_tokens=6))
    outputs = [output for _ in range(when) for output in engine.step()]
    engine.cancel("b")
    engine.cancel("waits")
    engine.cancel("waits")
    engine.cancel("nobody")
    last = engine.step()
    ends = {output.request_id: output.finish_reason for output in last if output.finish_reason}
    assert ends == {"b": "cancelled", "waits": "cancelled"}
    assert engine.statistics()["running"] == 1
    assert engine.statistics()["slots"]["used"] == 1
    engine.check_integrity()
    engine.submit(ask("b", range(6), max_tokens=6))  # the id is free again
    results = run_all(engine, {"a": [output for output in outputs + last if output.request_id == "a"]})
    assert results["a"].token_ids == lone_tokens(ask("a", range(6), max_tokens=6), engine.info)
    assert results["b"].token_ids == lone_tokens(ask("b", range(6), max_tokens=6), engine.info)
    assert engine.statistics()["finished"] == {"stop": 0, "length": 2, "cancelled": 2, "timed_out": 0, "error": 0}
    engine.cancel("a")
    assert not engine.has_work


def test_a_failing_step_ends_its_requests_and_no_others() -> None:
    def fail(batch: StepBatch) -> None:
        if 13 in batch.input_ids:
            raise RuntimeError("cannot run 13\nsecond line")

    info = null_info(max_batch_size=2, vocab_size=60)
    runner = NullRunner(info, on_step=fail)
    engine = Engine(runner, options=EngineOptions(poison=True))
    for request in (ask("bad", (13,)), ask("beside", (1,)), ask("later", (1,), max_tokens=2)):
        engine.submit(request)
    results = run_all(engine)
    assert results["bad"].error == results["beside"].error == "RuntimeError: cannot run 13"
    assert results["bad"].finish_reason == results["beside"].finish_reason == "error"
    assert results["later"].token_ids == lone_tokens(ask("later", (1,), max_tokens=2), info)
    engine.check_integrity()
    assert engine.statistics()["slots"]["used"] == 0


def test_logits_of_a_wrong_shape_end_the_requests() -> None:
    class Short(NullRunner):
        def step(self, batch: StepBatch) -> np.ndarray:
            return super().step(batch)[:, :-1]

    result = Engine(Short(null_info())).generate([ask("a")])[0]
    assert result.error == "RuntimeError: the runner returned logits of shape (1, 49); expected (1, 50)"


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_nan_logits_end_their_request_and_no_others(temperature: float | None) -> None:
    info = null_info()
    engine = Engine(NullRunner(info, nan_token=33))
    bad, good = engine.generate([ask("bad", (33, 1), temperature=temperature), ask("good", (1, 33), max_tokens=5)])
    assert (bad.finish_reason, bad.token_ids) == ("error", ())
    assert bad.error == "FloatingPointError: the logits of this request are not finite, or no token is allowed"
    assert good.token_ids == lone_tokens(ask("good", (1, 33), max_tokens=5), info)
    engine.check_integrity()


def test_a_damaged_slot_record_ends_its_request_before_the_step() -> None:
    engine = Engine(NullRunner(null_info()), options=EngineOptions(max_chunk=2, poison=True))
    requests = [ask(name, range(6), max_tokens=4) for name in ("a", "b")]
    for request in requests:
        engine.submit(request)
    engine.step()
    engine._caches.slots.tokens[engine._scheduler.running["a/0"].source] += 1
    results = run_all(engine)
    assert results["a"].error == (
        "RuntimeError: slot 1 of ['a/0'] (generation 1) holds states after 3 tokens; "
        "expected 'a/0' (generation 1) after 2 tokens"
    )
    assert results["b"].token_ids == lone_tokens(requests[1], engine.info)
    engine.check_integrity()


def test_the_failure_of_all_that_run_does_not_reach_those_that_wait() -> None:
    engine = Engine(NullRunner(null_info(max_batch_size=1, num_pages={"full": 5})))
    engine.submit(ask("damaged", range(8), max_tokens=8))
    engine.step()
    engine.submit(ask("waits", range(8), max_tokens=8))
    engine._caches.slots.generations[1] += 1
    engine._caches.slots.records[1].holders.clear()
    engine._caches.slots.free.append(1)
    results = run_all(engine)
    assert results["damaged"].finish_reason == "error"
    assert results["waits"].token_ids == lone_tokens(ask("waits", range(8), max_tokens=8), engine.info)
    engine.check_integrity()


def test_a_leak_does_not_let_a_request_wait_for_ever() -> None:
    engine = Engine(NullRunner(null_info(num_pages={"full": 5})))
    pool = engine._caches.pools[0]
    pool.take(pool.open("nobody", 1), 1)
    large, small = engine.generate([ask("large", range(14), max_tokens=2), ask("small", max_tokens=2)])
    assert large.error == (
        "RuntimeError: caches are damaged: page 1 of group 'full' is held by 'nobody', which is gone"
    )
    assert small.finish_reason == "length"


INVALID = {
    "empty prompt": (ask("x", ()), "the prompt is empty"),
    "not flat": (Request("x", ((1, 2),)), "the prompt must be a flat list of integer token ids"),  # type: ignore[arg-type]
    "float tokens": (Request("x", (1.5,)), "the prompt must be a flat list of integer token ids"),  # type: ignore[arg-type]
    "nothing": (ask("x", (1, None)), "the prompt must be a flat list of integer token ids"),  # type: ignore[arg-type]
    "truth": (ask("x", (1, True)), "the prompt must be a flat list of integer token ids"),
    "ragged": (ask("x", (1, (2, 3))), "the prompt must be a flat list of integer token ids"),  # type: ignore[arg-type]
    "negative token": (ask("x", (1, -1)), "token id -1 is not in 0..49, the vocabulary"),
    "large token": (ask("x", (50, 1)), "token id 50 is not in 0..49, the vocabulary"),
    "huge token": (ask("x", (2**70, 1)), f"token id {2**70} is not in 0..49, the vocabulary"),
    "no tokens asked": (ask("x", max_tokens=0), "max_tokens=0 must be an integer of at least 1"),
    "negative max_tokens": (ask("x", max_tokens=-3), "max_tokens=-3 must be an integer of at least 1"),
    "fractional max_tokens": (ask("x", max_tokens=1.5), "max_tokens=1.5 must be an integer of at least 1"),
    "too long": (
        ask("x", range(49), max_tokens=16),
        "prompt of 49 tokens and max_tokens=16 exceed max_seq_len=64",
    ),
    "more pages than there are": (
        ask("x", range(30), max_tokens=30),
        "59 tokens need 15 pages of 4 tokens, but page group 'window' has 14",
    ),
    "negative temperature": (ask("x", temperature=-0.1), "temperature=-0.1 must be a finite number of at least 0"),
    "nan temperature": (ask("x", temperature=float("nan")), "temperature=nan must be a finite number of at least 0"),
    "infinite temperature": (ask("x", temperature=float("inf")), "temperature=inf must be a finite number"),
    "negative top_k": (ask("x", top_k=-1), "top_k=-1 must be an integer of at least 0"),
    "top_p above 1": (ask("x", top_p=1.1), "top_p=1.1 must be a number in 0..1"),
    "nan top_p": (ask("x", top_p=float("nan")), "top_p=nan must be a number in 0..1"),
    "negative seed": (ask("x", seed=-1), "seed=-1 must be an integer in 0..18446744073709551615"),
    "seed of 65 bits": (ask("x", seed=2**64), "seed=18446744073709551616 must be an integer in 0.."),
    "stop token": (ask("x", stop_token_ids=("a",)), "stop_token_ids=('a',) must be integers"),
    "end id": (ask("x", end_id="a"), "end_id='a' must be an integer (negative: never end)"),
    "stop words": (ask("x", stop_words=("END",)), "stop_words=('END',) need a tokenizer, and the engine has none"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_requests_are_refused_with_one_clear_line(case: str) -> None:
    request, message = INVALID[case]
    engine = Engine(NullRunner(null_info(num_pages={"full": 65, "window": 15})))
    with pytest.raises(ValueError, match="^" + re.escape(message)) as error:
        engine.submit(request)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="^x: " + re.escape(message)):
        engine.generate([ask("fine"), request])
    assert not engine.has_work
    assert engine.generate([ask("x", max_tokens=3)])[0].finish_reason == "length"


def test_the_longest_request_runs() -> None:
    info = null_info(num_pages={"full": 17})
    request = ask("a", range(40), max_tokens=24)
    assert Engine(NullRunner(info)).generate([request])[0].token_ids == lone_tokens(request, info)


def test_ids_in_use_are_refused() -> None:
    engine = Engine(NullRunner(null_info()))
    engine.submit(ask("a"))
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        engine.submit(ask("a"))
    engine.step()
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        engine.submit(ask("a"))
    with pytest.raises(ValueError, match="different ids"):
        engine.generate([ask("b"), ask("b")])
    run_all(engine)
    engine.submit(ask("a"))


def test_submit_and_cancel_from_many_threads() -> None:
    info = null_info()
    engine = Engine(NullRunner(info), options=EngineOptions(poison=True))

    def client(number: int) -> None:
        for i in range(25):
            name = f"{number}/{i}"
            engine.submit(ask(name, range(1 + i % 5), max_tokens=1 + i % 7))
            if i % 5 == 0:
                engine.cancel(name)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    outputs: dict[str, list[Output]] = {}
    while engine.has_work or any(thread.is_alive() for thread in threads):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    results = {name: join(parts) for name, parts in outputs.items()}
    assert len(results) == 200
    for name, result in results.items():
        i = int(name.split("/")[1])
        expected = lone_tokens(ask(name, range(1 + i % 5), max_tokens=1 + i % 7), info)
        assert result.token_ids == (expected if result.finish_reason == "length" else expected[: len(result.token_ids)])
        assert result.finish_reason == "length" or i % 5 == 0
    engine.check_integrity()


def test_a_closed_engine_refuses_requests() -> None:
    runner = NullRunner(null_info())
    engine = Engine(runner)
    engine.close()
    engine.close()
    assert runner.closed
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit(ask("a"))


def test_options_only_lower_the_limits() -> None:
    runner = NullRunner(null_info())
    with pytest.raises(ValueError, match="max_num_tokens=33 exceeds max_num_tokens=32 of the engine"):
        Engine(runner, options=EngineOptions(max_num_tokens=33))
    engine = Engine(runner, options=EngineOptions(max_num_tokens=3, max_batch_size=2))
    engine.generate([ask(str(i), range(5), max_tokens=3) for i in range(4)])
    assert max(batch.num_tokens for batch in runner.batches) == 3
    assert max(batch.num_sequences for batch in runner.batches) == 2


def test_a_page_group_without_a_size_is_refused() -> None:
    info = dataclasses.replace(null_info(), num_pages={"full": 9})
    with pytest.raises(ValueError, match=r"num_pages=\{'full': 9\} lacks page groups \['window'\]"):
        Engine(NullRunner(info))


def test_statistics_are_plain_data() -> None:
    engine = Engine(NullRunner(null_info(max_batch_size=2)))
    for name in "abc":
        engine.submit(ask(name, (ord(name) % 50, *range(4)), max_tokens=4))
    assert engine.statistics()["waiting"] == 3
    engine.step()
    engine.step()
    values = json.loads(json.dumps(engine.statistics()))
    assert values == engine.statistics()
    assert (
        values.items()
        >= {
            "running": 2,
            "waiting": 1,
            "slots": {"used": 2, "free": 6, "cached": 0, "promised": 0},
            "pages": {group: {"used": 4, "free": 60, "cached": 0, "promised": 0} for group in ("full", "window")},
            "steps": 2,
            "prefill_tokens": 10,
            "decode_tokens": 2,
            "sampled_tokens": 4,
            "finished": {"stop": 0, "length": 0, "cancelled": 0, "timed_out": 0, "error": 0},
        }.items()
    )


def lone_text(request: Request) -> tuple[str, str]:
    """By definition: the decoded whole without prompt and end token, cut at the first stop word; and why it ends."""
    tokens = lone_tokens(request, TEXT_INFO)
    reason = "stop" if tokens[-1] in stop_ids(request.params, TEXT_INFO.eos_token_ids) else "length"
    shown = tokens[:-1] if reason == "stop" else tokens
    prompt = TOKENIZER.decode(request.prompt_ids)
    text = TOKENIZER.decode([*request.prompt_ids, *shown])[len(prompt) :]
    words = [word for word in request.params.stop_words if word and word in text]
    end, start = min(((text.index(word) + len(word), text.index(word)) for word in words), default=(0, 0))
    return (text[:start], "stop") if end else (text, reason)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), words=st.lists(st.text("ae ", min_size=0, max_size=2), max_size=2))
def test_streamed_text_joins_to_the_decoded_whole(seed: int, words: list[str]) -> None:
    rng = random.Random(seed)
    requests = [
        ask(
            str(i),
            TOKENIZER.encode(rng.choice(["the quick", " ", "日本 😀", "a"])),
            max_tokens=rng.randint(1, 40),
            stop_words=tuple(words),
            stop_token_ids=tuple(range(200, 220)) if rng.random() < 0.5 else (),
            temperature=2.0,
            seed=rng.randrange(2**32),
        )
        for i in range(6)
    ]
    engine = Engine(NullRunner(TEXT_INFO), TOKENIZER, EngineOptions(poison=True))
    pieces: dict[str, list[str]] = {request.id: [] for request in requests}
    results = engine.generate(requests, lambda output: pieces[output.request_id].append(output.text))
    for request, result in zip(requests, results, strict=True):
        assert (result.text, result.finish_reason) == lone_text(request)
        assert "".join(pieces[request.id]) == result.text
        assert result.token_ids == lone_tokens(request, TEXT_INFO)[: len(result.token_ids)]
    engine.check_integrity()


def test_a_stop_word_ends_the_request_at_the_token_that_completes_it() -> None:
    free = Engine(NullRunner(TEXT_INFO), TOKENIZER).generate([ask("a", (9,), max_tokens=40, end_id=-1)])[0]
    word = re.findall("[a-z][a-z ]{3}", free.text)[1]
    result = Engine(NullRunner(TEXT_INFO), TOKENIZER).generate(
        [ask("a", (9,), max_tokens=40, end_id=-1, stop_words=("", word))]
    )[0]
    assert result.finish_reason == "stop"
    assert result.text == free.text[: free.text.index(word)]
    assert len(result.token_ids) < len(free.token_ids)
    assert word in TOKENIZER.decode((9, *result.token_ids))
    assert word not in TOKENIZER.decode((9, *result.token_ids[:-1]))


def test_an_engine_without_a_tokenizer_has_no_text() -> None:
    assert Engine(NullRunner(null_info())).generate([ask("a", stop_words=("",))])[0].text == ""


def test_a_broken_tokenizer_ends_one_request() -> None:
    requests = [ask("bad", (5,), max_tokens=8), ask("fine", (6,), max_tokens=8)]
    expected = [lone_tokens(request, TEXT_INFO) for request in requests]
    hard = expected[0][3]
    assert hard not in expected[1]

    class Broken(Tokenizer):
        def __init__(self, stored: StoredTokenizer) -> None:
            super().__init__(stored)
            self.token_bytes = None

        def decode(self, ids: Sequence[int]) -> str:
            if hard in ids:
                raise ValueError(f"cannot decode {hard}")
            return super().decode(ids)

    engine = Engine(NullRunner(TEXT_INFO), Broken(kept(byte_level())))
    bad, fine = engine.generate(requests)
    assert (bad.token_ids, bad.error) == (expected[0][:4], f"ValueError: cannot decode {hard}")
    assert fine.token_ids == expected[1]
    engine.check_integrity()


def test_results_are_joined_only_when_finished() -> None:
    with pytest.raises(ValueError, match="not those of a finished answer"):
        join([Output("a", (1,))])
