"""NVIDIA's builder takes the whole network, plugins included, of every family and for several GPU generations."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import TINY
from networks import builder, checkpoint, config_of, lowering, request
from published import PUBLISHED

from hybridtrt.build.engine import BuildConfig, EngineConfig
from hybridtrt.build.tensorrt.backend import backend
from hybridtrt.build.tensorrt.builder import EngineRequest
from hybridtrt.build.tensorrt.profiles import PHASES, DimRange, dim_ranges, shape_ranges
from hybridtrt.build.tensorrt.quantization import Quantization
from hybridtrt.converters.families import family
from hybridtrt.converters.hf_config import HFConfig

REAL = {"Qwen3-Next-80B-A3B": (2, 3), "Nemotron-3-Nano-30B-A3B": (4, 5, 6)}  # layers with every kind of branch
REAL_LIMITS = BuildConfig(
    target="tensorrt-rtx",
    activations="bfloat16",
    kv_cache_dtype="bfloat16",
    compute_capabilities=(89,),
    max_batch_size=64,
    max_num_tokens=8192,
    max_seq_len=32768,
)


@pytest.mark.parametrize("variant", TINY)
def test_every_model_builds_for_three_gpu_generations(variant: str, tmp_path: Path) -> None:
    asked = request(config_of(variant), read=checkpoint(variant).tensor)
    builder().build(asked, tmp_path / "engine")
    assert (tmp_path / "engine").stat().st_size > 10_000


@pytest.mark.parametrize("variant", ["jamba", "gpt_oss", "kimi_linear", "minimax"])
def test_float16_and_engines_without_weights_build(variant: str, tmp_path: Path) -> None:
    asked = request(config_of(variant, activations="float16", kv_cache_dtype="float16"))
    bindings = builder().build(asked, tmp_path / "engine")
    assert set(bindings.weights) == set(asked.program.weights)


@pytest.mark.parametrize("overflow", ["drop", "next_best"])
def test_bounded_experts_build(overflow: str, tmp_path: Path) -> None:
    config = config_of("qwen3_next", moe_capacity_factor=1.25, moe_overflow=overflow)
    builder().build(request(config), tmp_path / "engine")


def real_config(name: str) -> EngineConfig:
    model = family(PUBLISHED[name]["model_type"]).config(HFConfig(dict(PUBLISHED[name])))
    return EngineConfig(replace(model, layers=tuple(model.layers[i] for i in REAL[name])), REAL_LIMITS)


@pytest.mark.parametrize("name", REAL)
def test_layers_of_published_shapes_build(name: str, tmp_path: Path) -> None:
    """With limits as on a server, scratch memory, and weights as inputs, so that no matrix is ever allocated."""
    config = real_config(name)
    kinds = {branch.kind for layer in config.model.layers for branch in layer.branches()}
    assert kinds == {"attention", "moe", "gated_delta" if "Qwen" in name else "mamba2"}
    lowered = replace(lowering(config, "bfloat16"), scratch_bytes=lambda call: 64 << 20)
    asked = EngineRequest(config.program(), lowered, config.build, config.memory(), (89,))
    bindings = builder().build(asked, tmp_path / "engine")
    experts = {spec.shape[0] for name, spec in bindings.weights.items() if "experts.down" in name}
    assert experts == {PUBLISHED[name].get("num_experts", PUBLISHED[name].get("n_routed_experts"))}
    assert (tmp_path / "engine").stat().st_size < 64 << 20


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    builder().build(request(config_of("mamba")), tmp_path / "engine", lambda *step: told.append(step))
    assert told[0][1] == 0
    assert told[-1][1] == told[-1][2] > 0


def test_what_tensorrt_refuses_is_one_line(tmp_path: Path) -> None:
    """FP8 for a GPU without it, asked for past the checks; what went wrong once is not told again."""
    config = config_of("jamba", compute_capabilities=(80,))
    asked = request(config, quantizations={"layers.0.mamba1.in_proj.weight": Quantization("fp8")})
    with pytest.raises(ValueError, match=r"tensorrt-rtx does not build the network: .*fp8") as error:
        builder().build(asked, tmp_path / "engine")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="does not build for compute capability 90") as error:
        builder().build(replace(asked, compute_capabilities=(90,)), tmp_path / "engine")
    assert "fp8" not in str(error.value)


def test_targets_are_found_by_name() -> None:
    assert backend("tensorrt-rtx").name == "tensorrt-rtx"
    with pytest.raises(ValueError, match="target 'cpu' is not one of tensorrt, tensorrt-rtx"):
        backend("cpu")


def test_profiles_span_what_steps_can_be() -> None:
    config = config_of("gemma3_text", max_batch_size=3, max_num_tokens=20)
    bindings = builder().network(config.program(), lowering(config, "bfloat16")).bindings
    spans = {phase: dim_ranges(config.build, config.memory(), bindings, phase) for phase in PHASES}
    assert spans["prefill"]["T"] == DimRange(1, 20, 20)
    assert spans["prefill"]["R"] == DimRange(1, 3, 20)
    assert spans["decode"]["T"] == spans["decode"]["B"] == spans["decode"]["R"] == DimRange(1, 3, 3)
    assert spans["decode"]["B+1"] == DimRange(2, 4, 4)
    pages = config.memory().num_pages
    for group, number in pages.items():
        span = spans["decode"][f"pages.{group}"]
        assert (span.least, span.usual) == (1, number)
        assert span.most > 1000 * number
    large = dim_ranges(replace(config.build, max_num_tokens=8192), config.memory(), bindings, "prefill")
    assert large["T"] == DimRange(1, 8192, 8192)
    assert large["R"] == DimRange(1, 3, 259)
    shapes = shape_ranges(bindings, spans["decode"])
    assert shapes["cu_seqlens"] == ((2,), (4,), (4,))
    assert set(shapes) == set(bindings.step) | set(bindings.caches)


def test_pools_may_be_larger_than_2_to_the_31() -> None:
    config = real_config("Qwen3-Next-80B-A3B")
    bindings = builder().network(config.program(), lowering(config, "bfloat16")).bindings
    span = dim_ranges(config.build, config.memory(), bindings, "decode")["pages.full_attention"]
    assert span.usual == span.most == 1 + 64 * 1024


def test_ctrl_c_ends_a_build(tmp_path: Path) -> None:
    """TensorRT swallows exceptions of its callbacks; the build would go on."""
    seen: list[str] = []

    def progress(what: str, done: int, steps: int) -> None:
        seen.append(what)
        if done == 0:
            signal.raise_signal(signal.SIGINT)

    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells turn off in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            builder().build(request(config_of("qwen3_next")), tmp_path / "engine", progress)
        assert seen
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_engines_can_be_captured() -> None:
    """TensorRT-RTX allows CUDA graphs where all memory of an engine is given to it."""
    asked = request(config_of("qwen3_next"))
    made = builder()
    built = made.network(asked.program, asked.lowering)
    config = made._config(asked, built.bindings, lambda *step: None, lambda: False)
    assert config.get_flag(made.backend.trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
