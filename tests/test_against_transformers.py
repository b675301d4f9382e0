"""The whole way from a checkpoint to tokens, against transformers' full forward."""

from __future__ import annotations

import random

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from engines import make_engine, oracle_logits, relative_error, tiny_engine

from hybridtrt.plugins.registry import WALKERS
from hybridtrt.runtime.engine import Engine, EngineOptions, Result
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import Output, Request, SamplingParams
from hybridtrt.runtime.verify import agreeing_tokens

LOGIT_ERROR = 1e-4  # of the logits' standard deviation
CHUNKS = (1, 2, 3, 7, 64)
NEW = 64
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)


def prompts(vocab: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def run(engine: Engine, requests: list[list[int]], params: SamplingParams = GREEDY) -> list[Result]:
    results = engine.generate([Request(str(i), tuple(ids), params) for i, ids in enumerate(requests)])
    engine.check_integrity()
    return results


def assert_oracle_agrees(model: transformers.PreTrainedModel, prompt: list[int], result: Result) -> None:
    """Every token is the oracle's greedy choice, or ties with it."""
    assert result.error is None
    assert len(result.token_ids) == NEW
    expected = oracle_logits(model, [*prompt, *result.token_ids])
    assert agreeing_tokens(expected[len(prompt) - 1 : -1], result.token_ids) == NEW


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_logits_at_every_chunking(family: str, walker: str) -> None:
    """At lengths around every chunk border, prefilled in one piece or in many."""
    runner = load_runner(tiny_engine(family), RuntimeOptions(walker=walker))
    runner.poison({group: range(pages) for group, pages in runner.info.num_pages.items()}, range(9))
    for prompt in prompts(96, (1, 2, 3, 31, 32, 33, 63, 64, 65, 133)):
        expected = oracle_logits(checkpoints.tiny_model(family), prompt)
        for chunk in (*CHUNKS, None) if walker == "cpu" else (7, None):
            assert relative_error(full_logits(runner, prompt, chunk), expected) < LOGIT_ERROR


@pytest.mark.parametrize("chunk", [*CHUNKS, None])
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_greedy_tokens_in_any_batch(family: str, chunk: int | None) -> None:
    """Eight requests of different lengths together, in steps that mix prefill and decode, and each alone."""
    model = checkpoints.tiny_model(family)
    requests = prompts(96, (1, 2, 3, 5, 17, 64, 65, 120))
    engine = Engine(load_runner(tiny_engine(family)), options=EngineOptions(max_chunk=chunk, poison=True))
    together = run(engine, requests)
    for prompt, result in zip(requests, together, strict=True):
        assert_oracle_agrees(model, prompt, result)
    if chunk == 7:
        for prompt in requests:
            assert_oracle_agrees(model, prompt, run(engine, [prompt])[0])


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_hundred_requests_come_and_go(family: str) -> None:
    """Random arrivals, lengths, chunk budgets and aborts in a small pool of pages: each gets what it gets alone."""
    choose = random.Random(family)
    options = EngineOptions(max_num_tokens=40, poison=True)
    engine = Engine(load_runner(tiny_engine(family), RuntimeOptions(kv_cache_tokens=400)), options=options)
    requests = {}
    for i in range(100):
        ids = tuple(choose.randrange(96) for _ in range(choose.choice([1, 2, 3, 15, 16, 17, 70])))
        requests[str(i)] = Request(str(i), ids, SamplingParams(max_tokens=choose.randint(1, 24), ignore_eos=True))
    aborted = set(choose.sample(sorted(requests), 25))
    waiting, outputs = list(requests.values()), {name: [] for name in requests}
    ended: dict[str, str | None] = {}

    def take(output: Output) -> None:
        assert output.request_id not in ended
        assert output.error is None
        outputs[output.request_id].extend(output.token_ids)
        if output.finish_reason:
            ended[output.request_id] = output.finish_reason

    while waiting or engine.has_work:
        for request in waiting[: choose.choice([0, 0, 1, 2, 5])]:
            engine.submit(waiting.pop(0))
            if request.id in aborted and choose.random() < 0.3:
                engine.cancel(request.id)
        for name in aborted - set(ended):
            if choose.random() < 0.1:
                engine.cancel(name)
        for output in engine.step():
            take(output)
        engine.check_integrity()
    assert set(ended) == set(requests)

    usage = engine.statistics()
    assert usage["running"] == usage["waiting"] == usage["slots"]["used"] == 0
    assert all(pages["used"] == pages["promised"] == 0 for pages in usage["pages"].values())
    model = checkpoints.tiny_model(family)
    for name, request in requests.items():
        tokens = outputs[name]
        assert len(tokens) == request.params.max_tokens if name not in aborted else True
        if tokens:
            expected = oracle_logits(model, [*request.prompt_ids, *tokens])
            assert agreeing_tokens(expected[len(request.prompt_ids) - 1 : -1], tokens) == len(tokens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_matrices_stored_in_half(family: str, dtype: str) -> None:
    """Stored in half precision and computed in float32: equal to the model with its matrices rounded the same way."""
    engine = make_engine(checkpoints.tiny_checkpoint(family), dtype=dtype)
    model = checkpoints.random_model(family, checkpoints.TINY[family])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            precise = weight.ndim == 1 or any(part in name for part in ("conv1d", "router", "mlp.gate.", "A_log"))
            if not precise and not name.endswith("shared_expert_gate.weight"):
                weight.copy_(weight.to(getattr(torch, dtype)).float())
    (prompt,) = prompts(96, (70,))
    assert relative_error(full_logits(load_runner(engine), prompt), oracle_logits(model, prompt)) < LOGIT_ERROR


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_small_models(family: str) -> None:
    """The same at 200 million parameters: logits at every chunking, greedy tokens alone and together."""
    folder = checkpoints.small_checkpoint(family)
    engine_dir = make_engine(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    runner = load_runner(engine_dir)
    (prompt,) = prompts(32000, (67,))
    expected = oracle_logits(model, prompt)
    for chunk in (*CHUNKS, None):
        assert relative_error(full_logits(runner, prompt, chunk), expected) < LOGIT_ERROR
    engine = Engine(runner, options=EngineOptions(max_chunk=64, poison=True))
    requests = prompts(32000, (1, 2, 3, 7, 30, 64, 65, 100), seed=1)
    for prompt, result in zip(requests, run(engine, requests), strict=True):
        assert_oracle_agrees(model, prompt, result)
    assert_oracle_agrees(model, requests[4], run(engine, [requests[4]])[0])
