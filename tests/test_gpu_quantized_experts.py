"""Experts with quantised matrices: kernels against the definition, which dequantises, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from gpu_calls import experts
from test_experts import step

from hybridtrt.plugins.call import Call
from hybridtrt.plugins.experts import gpu
from hybridtrt.plugins.gpu import dispatch
from hybridtrt.plugins.gpu.plan import plan
from hybridtrt.plugins.registry import kernel, op_spec
from hybridtrt.plugins.spec import Load, TensorSpec

INNER, EXPERTS, TOP_K = 32, 3, 2
FEW_TOKENS = 3
Operands = dict[str, torch.Tensor]


class Form(NamedTuple):
    """As `gpu_calls.experts` takes it."""

    weights: str
    group: int = 0

    @property
    def hidden(self) -> int:
        """Several blocks of inputs, and several groups a block."""
        return max(192, 2 * self.group)


FORMS = [Form("int8"), Form("int8", 32), Form("fp8"), Form("int4", 32), Form("int4", 128)]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FEW", FEW_TOKENS * TOP_K)
    monkeypatch.setattr(dispatch, "BLOCK", 32)  # the interpreter is slow


def quantized(form: Form, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers that use the whole range, and scales that are different everywhere."""
    shape = (EXPERTS, rows, width // 2 if form.weights == "int4" else width)
    numbers = torch.randint(-128, 128, shape).to(torch.int8)
    scales: tuple[int, ...] = (EXPERTS, rows, width // form.group) if form.group else (EXPERTS, rows)
    if form.weights == "fp8":
        numbers, scales = torch.randn(shape).to(torch.float8_e4m3fn), (EXPERTS,)
    size = {"int8": 1 / 64, "int4": 1 / 4, "fp8": 1.0}[form.weights] / width**0.5
    return numbers, (torch.rand(scales) * size).bfloat16()


def random_weights(form: Form, gated: bool = True, bias: bool = False) -> Operands:
    rows = 2 * INNER if gated else INNER
    found = {}
    for role, out, width in (("up", rows, form.hidden), ("down", form.hidden, INNER)):
        if width % (form.group or 1):  # stays whole
            found[role] = torch.randn(EXPERTS, out, width) / 8
        else:
            found[role], found[f"{role}_scale"] = quantized(form, out, width)
        if bias:
            found[f"{role}_bias"] = torch.randn(EXPERTS, out)
    return found


def operands(form: Form, chosen: torch.Tensor) -> list[torch.Tensor]:
    return [torch.randn(len(chosen), form.hidden), torch.rand(chosen.shape), chosen]


def chosen(tokens: int) -> torch.Tensor:
    """Different experts of each token; some are none, as those that had no room."""
    return torch.stack([torch.randperm(EXPERTS + 1)[:TOP_K] for _ in range(tokens)])


def run(walker: str, inputs: list[torch.Tensor], weights: Operands, attributes: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = kernel("experts", walker)(step(len(inputs[0])), *inputs, **weights, **attributes)
    return out


def as_defined(inputs: list[torch.Tensor], weights: Operands, allowed: float = 1e-5, **attributes: Any) -> None:
    attributes = {"activation": "silu"} | attributes
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    wide = {name: x.double() if x.is_floating_point() else x for name, x in weights.items()}
    want = run("reference", exact, wide, attributes)
    torch.testing.assert_close(run("torch", exact, wide, attributes), want)
    got = run("gpu", inputs, weights, attributes)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=allowed * want.abs().max().item())


@pytest.mark.parametrize("tokens", [FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize("form", FORMS)
def test_few_and_many_pairs(form: Form, tokens: int) -> None:
    torch.manual_seed(tokens)
    as_defined(operands(form, chosen(tokens)), random_weights(form, bias=True), clamp=0.5)


@pytest.mark.parametrize("form", [Form("int8"), Form("int4", 32)])
def test_without_gates(form: Form) -> None:
    torch.manual_seed(0)
    as_defined(operands(form, chosen(4)), random_weights(form, gated=False), activation="relu2", gated=False)


@pytest.mark.parametrize("form", [Form("int8", 32), Form("fp8")])
def test_float16(form: Form) -> None:
    torch.manual_seed(1)
    inputs, weights = operands(form, chosen(FEW_TOKENS)), random_weights(form)
    as_defined([inputs[0].half(), *inputs[1:]], weights, 2e-3)


def test_one_expert_for_all_and_none() -> None:
    """The other experts have no pair; then no expert has one."""
    torch.manual_seed(2)
    form = Form("int4", 32)
    for numbers in (torch.full((20, 1), 1), torch.full((3, 2), EXPERTS)):
        as_defined(operands(form, numbers), random_weights(form))


def test_one_of_the_matrices_alone() -> None:
    torch.manual_seed(3)
    form = Form("int8")
    for whole in ("up", "down"):
        weights = random_weights(form)
        weights[whole] = torch.randn(weights[whole].shape) / 8
        del weights[f"{whole}_scale"]
        as_defined(operands(form, chosen(FEW_TOKENS)), weights)


def changed(call: Call, **specs: TensorSpec) -> Call:
    kept = (replace(one, spec=specs.get(one.name, one.spec)) for one in call.operands)
    return replace(call, operands=tuple(kept))


def test_groups_that_kernels_do_not_read_are_refused() -> None:
    call = experts(4, 2, 96, 96, weights="int8", group=48)
    with pytest.raises(
        ValueError, match=r"experts \(experts\): up_scale has a scale for 48 inputs, expected one of 32,"
    ):
        plan(call)


def test_dtypes_that_kernels_do_not_read_are_refused() -> None:
    call = experts(4, 2, 64, 64, weights="int8")
    up = call.operand("up")
    with pytest.raises(ValueError, match="up is bfloat16, not one of int8, fp8"):
        plan(changed(call, up=replace(up, dtype="bfloat16")))
    without = replace(call, operands=tuple(one for one in call.operands if one.name != "up_scale"))
    with pytest.raises(ValueError, match="up is int8, not one of float32, bfloat16, float16"):
        plan(without)


@pytest.mark.parametrize(
    ("scale", "width"), [((4, 127), 64), ((3,), 64), ((4, 128, 3), 64), ((4, 128, 0), 64), ((4, 128), 32), ((4,), 32)]
)
def test_scales_that_do_not_fit_are_refused(scale: tuple[int, ...], width: int) -> None:
    call = experts(4, 2, 64, 64, weights="int8")
    weights = {one.name: one.spec for one in call.of("weight")}
    weights |= {"up": TensorSpec((4, 128, width), "int8"), "up_scale": TensorSpec(scale, "bfloat16")}
    with pytest.raises(ValueError, match=r"up_scale \(.*\) does not fit up \(4, 128, .*\) of 64 inputs"):
        op_spec("experts").infer([one.spec for one in call.of("input")], weights, call.attributes)


def test_operations_do_not_depend_on_the_form() -> None:
    counted = set()
    for form in (Form(""), *FORMS):
        call = experts(8, 2, 256, 128, weights=form.weights or None, group=form.group)
        weights = {one.name: one.spec for one in call.of("weight")}
        inputs = [one.spec for one in call.of("input")]
        counted.add(op_spec("experts").flops(inputs, weights, call.attributes, Load(5, 1, 1)))
    assert counted == {2 * 3 * 256 * 128 * 10}
