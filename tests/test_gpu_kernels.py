"""Every kernel in the Triton language, run by its interpreter, against the operator's definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from steps import cut, place
from test_ops import PAGE, STATEFUL, run
from test_ops import test_rows_read_one_slot_and_write_another as rows_read_one_slot_and_write_another

from hybridtrt.plugins.attention import gpu as attention_gpu
from hybridtrt.plugins.gpu.plan import PLUGINS
from hybridtrt.plugins.mla import gpu as mla_gpu

CASES = [name for name, case in STATEFUL.items() if case[0] in PLUGINS]
CHUNK = 16
WIDTH = 4


@pytest.fixture(autouse=True)
def _few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes long for programs without keys, too."""
    for module in (attention_gpu, mla_gpu):
        monkeypatch.setattr(module, "PARTS", 2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [
        ([1], 1),
        ([2], 2),
        ([WIDTH - 1], WIDTH),
        ([CHUNK - 1, CHUNK, CHUNK + 1], 2 * CHUNK),
        ([CHUNK + 3, 1, 2], 7),
        ([9], 2),
    ],
)
def test_any_cut_equals_the_definition(name: str, lengths: list[int], chunk: int) -> None:
    """Random rows, pieces, slots and pages in float32; whatever nobody holds is NaN."""
    case = STATEFUL[name]
    rng = np.random.default_rng(len(lengths) + chunk)
    torch.manual_seed(chunk)
    data = [{key: torch.randn(n, *shape) for key, shape in case[1].items()} for n in lengths]
    weights = {key: torch.randn(shape) * 0.5 for key, shape in case[2].items()}
    placement = place(lengths, PAGE, rng)
    whole = [[(s, 0, n)] for s, n in enumerate(lengths)]
    want, want_pools = run(case, "reference", torch.float64, data, weights, whole, placement)
    got, got_pools = run(case, "gpu", torch.float32, data, weights, list(cut(lengths, chunk, rng)), placement)
    for expected, actual in zip(want, got, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    for key, pool in want_pools.items():
        torch.testing.assert_close(got_pools[key].double(), pool, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CASES if "kv" not in STATEFUL[name][3]])
def test_rows_read_one_slot_and_write_another(name: str) -> None:
    """Two rows read one slot, beside a row of padding."""
    rows_read_one_slot_and_write_another.hypothesis.inner_test(name, "gpu", [1, 3, CHUNK + 1, 1], [4, 2, 2, 5], 0)
