"""NVIDIA's builder takes the whole network, plugins included, of every family and for several GPU generations."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import TINY
from networks import builder, checkpoint, config_of, request


@pytest.mark.parametrize("variant", TINY)
def test_every_model_builds_for_three_gpu_generations(variant: str, tmp_path: Path) -> None:
    asked = request(config_of(variant), read=checkpoint(variant).tensor)
    builder().build(asked, tmp_path / "engine")
    assert (tmp_path / "engine").stat().st_size > 10_000
