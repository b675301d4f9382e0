"""Panels: what is packed comes back, and formats of few bits err no more than they must."""

from __future__ import annotations

import pytest
import torch

from hybridtrt.plugins.linear.packing import pack, unpack
from hybridtrt.plugins.linear.panel_layout import GROUPS, packed_bytes

FORMATS = [(form, group) for form, groups in GROUPS.items() for group in groups]


@pytest.mark.parametrize(("form", "group"), FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (45, 129), (3, 20, 70)])
def test_packed_matrices_come_back(form: str, group: int, shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = pack(matrix, form, group)
    assert packed.nbytes == packed_bytes(shape, form, group)
    found = unpack(packed, form, shape, group)
    assert found.dtype == torch.float32
    if form == "panel_float32":
        assert torch.equal(found, matrix)
    elif form.startswith("panel_bfloat16"):
        assert torch.equal(found, matrix.bfloat16().float())
    else:
        most_error = 0.76 / 127 if form == "panel_int8" else 0.19  # of the largest number: what a clip cuts off
        size = group or shape[-1]
        for columns in range(0, shape[-1], size):
            exact, near = matrix[..., columns : columns + size], found[..., columns : columns + size]
            most = exact.abs().amax(-1, keepdim=True)
            assert (exact - near).abs().le(most * most_error).all()
        assert torch.equal(unpack(pack(found, form, group), form, shape, group), found) or form == "panel_int4"


def test_four_bits_err_less_than_the_largest_number_alone_would_have_it() -> None:
    matrix = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    found = unpack(pack(matrix, "panel_int4", 32), "panel_int4", (64, 512), 32)
    groups = matrix.unflatten(1, (-1, 32))
    scales = groups.abs().amax(2, keepdim=True) / 7
    plain = (groups / scales).round() * scales
    assert (found - matrix).square().sum() < 0.85 * (plain - groups).square().sum()


def test_a_matrix_is_packed_as_its_slices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(2, 100, 64, generator=torch.Generator().manual_seed(0))
    at_once = pack(matrix, "panel_int4", 32)
    monkeypatch.setattr("hybridtrt.plugins.linear.packing.SLICE", 2 * 16 * 64)
    assert (pack(matrix, "panel_int4", 32) == at_once).all()
    second = unpack(at_once[len(at_once) // 2 :], "panel_int4", (100, 64), 32)
    assert torch.equal(unpack(at_once, "panel_int4", (2, 100, 64), 32)[1], second)


@pytest.mark.parametrize(
    ("form", "group", "message"),
    [
        ("panel_int2", 32, "panel_int2 is not a panel format"),
        ("panel_int4", 0, "group=0 is not one of"),
        ("panel_int8", 48, "group=48 is not one of"),
        ("panel_float32", 32, "group=32 is not one of"),
    ],
)
def test_formats_that_do_not_exist_are_refused(form: str, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(torch.zeros(16, 64), form, group)
