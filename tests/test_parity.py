"""Every family against transformers' full forward: logits, greedy tokens, chunks, stored forms and dtypes.

A family is in the matrix when it is in the registry; its tiny configs are in `tiny_configs.json`, one or more a
`model_type` (`model_type.variant`).
"""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
import torch
from engines import make_engine, oracle_logits, relative_error, tiny_engine, typical_error

from hybridtrt.converters.families import families
from hybridtrt.plugins.registry import WALKERS
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.verify import agreeing_tokens

VARIANTS = sorted(name for name in checkpoints.TINY if checkpoints.model_type(name) in families())
LOGIT_ERROR = 1e-4  # of the logits' standard deviation
CHUNK = 16  # of the recurrent layers of the tiny configs
LENGTHS = (1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 70)  # the longest is beyond every window
NEW = 32


def prompt(variant: str, length: int) -> list[int]:
    vocab = checkpoints.TINY[variant]["vocab_size"]
    return np.random.default_rng(length).integers(0, vocab, length).tolist()


def test_every_family_is_in_the_matrix() -> None:
    assert {checkpoints.model_type(name) for name in VARIANTS} == set(families())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_one_piece_and_in_chunks(variant: str) -> None:
    model = checkpoints.tiny_model(variant)
    runners = {name: load_runner(tiny_engine(variant), RuntimeOptions(walker=name)) for name in WALKERS}
    for length in LENGTHS:
        ids = prompt(variant, length)
        expected = oracle_logits(model, ids)
        for walker, chunks in (("cpu", (None, 1, 3, 7, 16)), ("torch", (None, 7))):
            for chunk in chunks:
                assert relative_error(full_logits(runners[walker], ids, chunk), expected) < LOGIT_ERROR, walker
    assert relative_error(full_logits(runners["reference"], ids, 33), expected) < LOGIT_ERROR


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_by_single_steps(variant: str) -> None:
    """Requests of different lengths in one batch, over poisoned memory."""
    engine = Engine(load_runner(tiny_engine(variant)), options=EngineOptions(max_chunk=7, poison=True))
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    requests = [Request(str(length), tuple(prompt(variant, length)), params) for length in (1, 2, CHUNK, 40)]
    for _ in range(2):  # the second time in slots and pages that have been used
        results = engine.generate(requests)
        engine.check_integrity()
    for request, result in zip(requests, results, strict=True):
        assert result.error is None
        expected = oracle_logits(checkpoints.tiny_model(variant), [*request.prompt_ids, *result.token_ids])
        assert agreeing_tokens(expected[len(request.prompt_ids) - 1 : -1], result.token_ids) == NEW


@pytest.mark.parametrize("variant", VARIANTS)
def test_stored_in_bfloat16(variant: str) -> None:
    """Within the error of transformers' own bfloat16."""
    model = checkpoints.tiny_model(variant)
    ids = prompt(variant, LENGTHS[-1])
    expected = oracle_logits(model, ids)
    low = checkpoints.random_model(variant, checkpoints.TINY[variant]).to(torch.bfloat16)
    engine = make_engine(checkpoints.tiny_checkpoint(variant), dtype="bfloat16")
    ours = full_logits(load_runner(engine), ids)
    assert typical_error(ours, expected) < typical_error(oracle_logits(low, ids), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_stored_form_is_the_same_engine(variant: str) -> None:
    first, *others = (make_engine(checkpoints.tiny_checkpoint(variant, form)) for form in checkpoints.FORMS)
    for other in others:
        assert (other / "rank0.engine").read_bytes() == (first / "rank0.engine").read_bytes()
