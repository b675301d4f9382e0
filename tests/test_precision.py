"""Rounding of whole models, over many prompts: one may be near a router's tie, or hard on float32 in any code."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
from engines import float64_runner, oracle_logits, relative_error, tiny_engine

from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import load_runner

PROMPTS = 16


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_as_near_to_float64_as_transformers(family: str) -> None:
    engine = tiny_engine(family)
    exact, runner, model = float64_runner(engine), load_runner(engine), checkpoints.tiny_model(family)
    ours, theirs = [], []
    for seed in range(PROMPTS):
        prompt = np.random.default_rng(seed).integers(0, 96, 40).tolist()
        expected = full_logits(exact, prompt, chunk=33)
        ours.append(relative_error(full_logits(runner, prompt, chunk=33), expected))
        theirs.append(relative_error(oracle_logits(model, prompt), expected))
    assert 0 < np.median(ours) < 1.5 * np.median(theirs)
