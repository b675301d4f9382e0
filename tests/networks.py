"""TensorRT networks of tiny models, what they are called with, and the steps that they are tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from checkpoints import tiny_checkpoint
from network_evaluator import NetworkEvaluator
from numpy.typing import NDArray
from torch import Tensor

from hybridtrt.build.engine import BuildConfig, EngineConfig
from hybridtrt.build.tensorrt.backend import backend
from hybridtrt.build.tensorrt.builder import EngineBuilder, EngineRequest
from hybridtrt.build.tensorrt.dtypes import network_dtypes
from hybridtrt.build.tensorrt.network import BuiltNetwork, Lowering
from hybridtrt.converters.checkpoint import Checkpoint, load_checkpoint
from hybridtrt.converters.convert import convert
from hybridtrt.plugins.caches import PageSpec
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.step import StepBatch
from hybridtrt.runtime.runner import RunnerInfo
from hybridtrt.runtime.torch_runner import TorchRunner

PAGE_SIZE = 4
LENGTHS = (13, 9, 16)
PIECES = (  # rows of each step: sequence, first token, one past the last
    [(0, 0, 5), (1, 0, 1)],
    [(1, 1, 7), (2, 0, 12), (0, 5, 6)],
    [(0, 6, 11), (1, 7, 8), (2, 12, 13)],
    [(2, 13, 14), (0, 11, 12), (1, 8, 9)],
    [(0, 12, 13), (2, 14, 15)],
    [(2, 15, 16)],
)
NUM_SLOTS = 1 + len(LENGTHS) * (1 + len(PIECES))
NUM_PAGES = 1 + len(LENGTHS) * -(-max(LENGTHS) // PAGE_SIZE)  # of each group
LIMITS = BuildConfig(
    target="tensorrt-rtx",
    activations="bfloat16",
    compute_capabilities=(80, 89, 120),
    max_batch_size=4,
    max_num_tokens=32,
    max_seq_len=32,
    tokens_per_block=PAGE_SIZE,
)


@cache
def checkpoint(variant: str) -> Checkpoint:
    """The checkpoint of a tiny model."""
    source = tiny_checkpoint(variant)
    folder = source.with_name(f"{source.name}-converted")
    convert(source, folder, None)
    return load_checkpoint(folder)


def config_of(variant: str, **limits: Any) -> EngineConfig:
    return EngineConfig(checkpoint(variant).config, replace(LIMITS, **limits))


@cache
def builder() -> EngineBuilder:
    return EngineBuilder(backend("tensorrt-rtx"))


def precise(config: EngineConfig) -> frozenset[str]:
    """Weights that are float32 whatever the dtype."""
    return frozenset(name for name, spec in config.model.weight_table().items() if spec.full_precision)


def lowering(config: EngineConfig, activation: str, **others: Any) -> Lowering:
    """Without kernels, for networks that do not run."""
    dtypes = network_dtypes(config.program(), precise(config), activation)
    return Lowering(dtypes, config.build.tokens_per_block, lambda call: 0, **others)


def request(config: EngineConfig, **others: Any) -> EngineRequest:
    """As `engine_request`, without kernels."""
    lowered = lowering(config, config.build.activations or "", **others)
    return EngineRequest(config.program(), lowered, config.build, config.memory(), config.build.compute_capabilities)


def network(config: EngineConfig, activation: str, **others: Any) -> BuiltNetwork:
    return builder().network(config.program(), lowering(config, activation, **others))


def page_groups(program: Program) -> list[str]:
    return sorted({spec.group for spec in program.caches.values() if isinstance(spec, PageSpec)})


def steps(program: Program, vocab_size: int, seed: int = 0) -> Iterator[StepBatch]:
    """Prefill in pieces beside decode, then decode alone, over scattered pages; each step writes slots of its own."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(3, vocab_size, length) for length in LENGTHS]
    groups = page_groups(program)
    pages = {group: rng.permutation(np.arange(1, NUM_PAGES)).reshape(len(LENGTHS), -1) for group in groups}
    slots = rng.permutation(np.arange(1, NUM_SLOTS)).reshape(len(LENGTHS), -1)
    for number, rows in enumerate(PIECES):
        counts = [end - start for _, start, end in rows]
        ends = np.cumsum(counts)
        order = [s for s, _, _ in rows]
        turns = np.array([sum(row[0] == s for one in PIECES[:number] for row in one) for s in order])
        yield StepBatch(
            input_ids=np.concatenate([tokens[s][start:end] for s, start, end in rows]).astype(np.int32),
            positions=np.concatenate([np.arange(start, end) for _, start, end in rows]).astype(np.int32),
            cu_seqlens=np.array([0, *ends], np.int32),
            context_lens=np.array([start for _, start, _ in rows], np.int32),
            state_src=slots[order, turns].astype(np.int32),
            state_dst=slots[order, turns + 1].astype(np.int32),
            logits_indices=np.unique([0, *(ends - 1)]).astype(np.int32),
            block_tables={group: table[order].astype(np.int32) for group, table in pages.items()},
        )


def pools(built: BuiltNetwork) -> dict[str, Tensor]:
    """Empty caches in float64; page 0 and slot 0, which nothing may read, are NaN."""
    made = {}
    for name, spec in built.bindings.caches.items():
        rows = NUM_SLOTS if spec.shape[0] == "slots" else NUM_PAGES
        made[name] = torch.zeros(rows, *map(int, spec.shape[1:]), dtype=torch.float64)
        made[name][0] = torch.nan
    return made


class Pages:
    """Moves the pages of each group about, each group by itself, so that a table of another group misses them."""

    def __init__(self, groups: Iterable[str]) -> None:
        self._rng = np.random.default_rng(1)
        self._where = {group: np.arange(NUM_PAGES) for group in groups}

    def table(self, group: str, table: NDArray[np.int32]) -> NDArray[np.int32]:
        """A block table with the pages where they are now."""
        return self._where[group][table].astype(np.int32)

    def move(self, built: BuiltNetwork, caches: Mapping[str, Tensor]) -> None:
        """Put every page but page 0 somewhere else."""
        for group, where in self._where.items():
            new = np.array([0, *self._rng.permutation(np.arange(1, NUM_PAGES))])
            self._where[group] = new[where]
            for name, spec in built.bindings.caches.items():
                if spec.shape[0] == f"pages.{group}":
                    caches[name][torch.from_numpy(new)] = caches[name].clone()


def bound(built: BuiltNetwork, batch: StepBatch, pages: Pages) -> dict[str, Tensor]:
    """The arrays of a step by the network's names."""
    tables = {f"block_tables.{group}": pages.table(group, table) for group, table in batch.block_tables.items()}
    arrays = vars(batch) | tables
    return {name: torch.from_numpy(arrays[name]) for name in built.bindings.step}


def evaluated(
    built: BuiltNetwork, program: Program, vocab_size: int, weights: Mapping[str, Tensor]
) -> list[NDArray[np.float64]]:
    """Logits of each step by the network, with its caches carried from one to the next."""
    evaluate = NetworkEvaluator(builder().backend.trt, built.network)
    given = {name: weights[name] for name in built.bindings.weights}
    caches, pages = pools(built), Pages(page_groups(program))
    logits = []
    for batch in steps(program, vocab_size):
        outputs = evaluate({**bound(built, batch, pages), **caches, **given})
        caches = {name: outputs.get(built.bindings.cache_outputs.get(name, ""), pool) for name, pool in caches.items()}
        logits.append(outputs["logits"].numpy())
        pages.move(built, caches)
    return logits


def expected(config: EngineConfig, read: Callable[[str], Tensor]) -> list[NDArray[np.float32]]:
    """Logits of the same steps by the definitions, in float64."""
    program, vocab_size = config.program(), config.model.vocab_size
    info = RunnerInfo(
        vocab_size=vocab_size,
        max_batch_size=LIMITS.max_batch_size,
        max_num_tokens=LIMITS.max_num_tokens,
        max_logits_rows=LIMITS.max_num_tokens,
        max_seq_len=LIMITS.max_seq_len,
        page_size=PAGE_SIZE,
        num_pages=dict.fromkeys(page_groups(program), NUM_PAGES),
        num_slots=NUM_SLOTS,
        caches=tuple(program.caches.values()),
    )
    weights = {name: read(name) for name in program.weights}
    runner = TorchRunner(program, weights, info, walker="reference", dtype=torch.float64)
    return [runner.step(batch) for batch in steps(program, vocab_size)]


def float64_weights(variant: str) -> dict[str, Tensor]:
    source = checkpoint(variant)
    return {name: source.tensor(name).double() for name in source.config.weight_table()}


def worst_error(found: list[NDArray[np.float64]], wanted: list[NDArray[np.float32]]) -> float:
    """Largest difference of any step by the standard deviation of all logits."""
    assert [one.shape for one in found] == [one.shape for one in wanted]
    deviation = np.concatenate(wanted).std()
    return float(max(np.abs(one - other).max() for one, other in zip(found, wanted, strict=True)) / deviation)
