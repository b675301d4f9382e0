"""The lowering's arithmetic: the network of every family, computed layer by layer, gives the program's logits."""

from __future__ import annotations

import pytest
from checkpoints import TINY
from networks import checkpoint, config_of, evaluated, expected, float64_weights, network, worst_error

CLOSE = 1e-4  # of the logits' standard deviation


@pytest.mark.parametrize("variant", TINY)
def test_the_network_computes_the_programs_logits(variant: str) -> None:
    """As it is deployed: bfloat16 activations, weights as inputs; casts do not round in the evaluator."""
    config = config_of(variant)
    built = network(config, "bfloat16")
    found = evaluated(built, config.program(), config.model.vocab_size, float64_weights(variant))
    assert worst_error(found, expected(config, checkpoint(variant).tensor)) < CLOSE


@pytest.mark.parametrize(("factor", "overflow"), [(0.5, "drop"), (0.7, "next_best"), (2.0, "drop")])
def test_bounded_experts(factor: float, overflow: str) -> None:
    config = config_of("qwen3_next", moe_capacity_factor=factor, moe_overflow=overflow)
    built = network(config, "float16")
    found = evaluated(built, config.program(), config.model.vocab_size, float64_weights("qwen3_next"))
    wanted = expected(config, checkpoint("qwen3_next").tensor)
    assert worst_error(found, wanted) < CLOSE
    unbounded = expected(config_of("qwen3_next"), checkpoint("qwen3_next").tensor)
    assert (worst_error(found, unbounded) > CLOSE) == (factor < 1)
