"""The pages on families: the matrix is up to date, and the made-up family of the other page works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import make_engine
from safetensors.torch import save_file

from hybridtrt.converters import families
from hybridtrt.converters.families import family
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import load_runner
from hybridtrt.runtime.request import Request, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/adding-a-family.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


@pytest.fixture
def tidal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The family of the page in the registry, and its config."""
    (tmp_path / "tidal.py").write_text(block("python"))
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    families.families.cache_clear()
    yield {"model_type": "tidal"} | json.loads(block("json"))["tidal"]
    families.families.cache_clear()


def test_matrix_is_up_to_date() -> None:
    script = ROOT / "scripts/family_matrix.py"
    done = subprocess.run([sys.executable, "-P", str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_family_is_one_file(tidal: dict[str, object], tmp_path: Path) -> None:
    config = family("tidal").config(HFConfig(tidal))
    assert [layer.mixer_names() for layer in config.layers] == ["mamba2", "mamba2", "attention"]
    with pytest.raises(ValueError, match=r"model_type='ebb' is not supported; .*tidal"):
        family("ebb")

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tidal))
    rules, random = family("tidal").sources(config), torch.Generator().manual_seed(0)
    tensors = {
        tensor: 0.3 * torch.randn(shape, generator=random)
        for name, spec in config.weight_table().items()
        for tensor, shape in rules[name].tensors(spec.shape)  # type: ignore[union-attr]
    }
    assert "model.layers.2.attn.q_proj.weight" in tensors
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    runner = load_runner(make_engine(model))
    ids = list(range(40))
    whole = full_logits(runner, ids)
    assert np.isfinite(whole).all()
    for chunk in (1, 7):
        np.testing.assert_allclose(full_logits(runner, ids, chunk), whole, atol=1e-3)
    (result,) = Engine(runner).generate([Request("a", tuple(ids), SamplingParams(max_tokens=8))])
    assert result.error is None
    assert result.token_ids[0] == whole[-1].argmax()
