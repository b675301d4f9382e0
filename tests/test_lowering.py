"""The lowered program of every family: nothing that is still read is written over, and every weight is packed once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import checkpoints
import pytest
from engines import LIMITS, tiny_engine

from hybridtrt.build.engine import EngineConfig, read_engine_config
from hybridtrt.build.lowering import LoweredNode, LoweredProgram
from hybridtrt.converters.model_reader import read_model_config
from hybridtrt.plugins.registry import op_spec

VARIANTS = sorted(checkpoints.TINY)
STEP_ARRAYS = {"input_ids", "positions"}


def config_of(variant: str, **build: object) -> EngineConfig:
    model = read_model_config(checkpoints.tiny_checkpoint(variant))
    return EngineConfig(model, replace(LIMITS, **build))  # type: ignore[arg-type]


def lives(lowered: LoweredProgram) -> dict[str, tuple[int, int]]:
    """The first and last node that touches each buffer."""
    found: dict[str, list[int]] = defaultdict(list)
    for i, node in enumerate(lowered.nodes):
        for window in (*node.inputs, *node.outputs):
            if window.buffer not in STEP_ARRAYS:
                found[window.buffer].append(i)
    kept = {window.buffer for window in lowered.windows.values()}
    end = len(lowered.nodes)
    return {name: (at[0], end if name in kept else at[-1]) for name, at in found.items()}


def overwrites(node: LoweredNode) -> bool:
    """Whether a node writes where one of its inputs lies."""
    return bool({window.buffer for window in node.inputs} & {window.buffer for window in node.outputs})


@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_buffers_that_live_together_lie_apart(variant: str, factor: float | None) -> None:
    config = config_of(variant, moe_capacity_factor=factor)
    program = config.program()
    stream = [node.outputs[0] for node in program.nodes if node.name.endswith("residual")]
    counts = [output for node in program.nodes if node.op == "capacity" for output in node.outputs[2:]]
    for keep in ([], stream, counts):
        lowered = config.lowered(keep)
        alive = lives(lowered)
        assert lowered.windows.keys() == set(keep)
        for a, b in combinations(alive, 2):
            one, other = lowered.buffers[a], lowered.buffers[b]
            if one.rows != other.rows or lowered.output in (a, b):
                continue
            together = alive[a][0] <= alive[b][1] and alive[b][0] <= alive[a][1]
            apart = one.offset + one.row_stride <= other.offset or other.offset + other.row_stride <= one.offset
            assert apart or not together, f"{a} and {b}"
        for name, buffer in lowered.buffers.items():
            if name in alive and name != lowered.output:
                widths = {"T": lowered.token_width, "R": lowered.logits_width, "1": lowered.step_width}
                assert 0 <= buffer.offset <= widths[buffer.rows] - buffer.row_stride


@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_value_is_there_when_it_is_read(variant: str, factor: float | None) -> None:
    """Each buffer column by column: who wrote it last is who wrote it in the program."""
    config = config_of(variant, moe_capacity_factor=factor)
    lowered, program = config.lowered(), config.program()
    written: dict[str, set[int]] = defaultdict(set)
    for node in lowered.nodes:
        for window in node.inputs:
            if window.buffer not in STEP_ARRAYS:
                columns = set(range(window.column, window.column + window.width))
                assert columns <= written[window.buffer], f"{node.name} reads {window}"
        if overwrites(node):
            allowed = {source for _, source in op_spec(node.op).aliases}
            assert all(node.inputs[source].buffer == node.outputs[0].buffer for source in allowed)
        for window in node.outputs:
            written[window.buffer] |= set(range(window.column, window.column + window.width))
    computing = [node.name for node in program.nodes if node.op not in ("split", "flatten")]
    assert {node.name for node in lowered.nodes} <= set(computing)
    packed = lowered.packed_weights().values()
    assert {part for weight in packed for part in weight.parts} == set(program.weights)
    assert all(sum(weight.rows) == weight.shape[0] for weight in packed)


@pytest.mark.parametrize("variant", ["qwen3_next", "granitemoehybrid", "zamba2"])
def test_precise_weights_stay_precise(variant: str) -> None:
    """Norms, routers, convolutions, A, dt and the embeddings, whatever matrices are stored in; and what is excluded."""
    config = config_of(variant, weights="int4", exclude=("layers.0.*",))
    table = config.model.weight_table()
    for weight in config.lowered().packed_weights().values():
        coarse = weight.stored.format == "panel_int4"
        for part in weight.parts:
            if table[part].full_precision or part.startswith("layers.0."):
                assert not coarse
        if coarse:
            assert weight.stored.group == 32
    assert any(weight.stored.format == "panel_int4" for weight in config.lowered().packed_weights().values())
    embeddings = [w for node in config.lowered().nodes if node.op == "embedding" for w in node.weights]
    assert [weight.stored.format for weight in embeddings if weight is not None] == [config.model.dtype]  # type: ignore[union-attr]


def test_projections_of_one_input_are_one() -> None:
    """The router, the shared expert and its gate read the same normed stream; those of one format are one product."""
    config = read_engine_config(tiny_engine("qwen3_next"))
    merged = [node for node in config.lowered().nodes if node.op == "linear" and len(node.outputs) > 1]
    assert merged
    for node in merged:
        (weight,) = [weight for weight in node.weights if weight is not None]
        assert [window.width for window in node.outputs] == list(weight.rows)  # type: ignore[union-attr]
