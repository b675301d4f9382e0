"""From an engine folder to a runner."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from hybridtrt.build.engine import ENGINE_FILE, EngineConfig, read_engine_config
from hybridtrt.build.packed_file import PackedFile
from hybridtrt.build.tactics import Machine, Tuned
from hybridtrt.build.targets import CPU
from hybridtrt.converters.memory import cache_memory
from hybridtrt.plugins.native.library import load_library
from hybridtrt.plugins.program import Program
from hybridtrt.plugins.registry import WALKERS
from hybridtrt.plugins.spec import Load
from hybridtrt.runtime.cpu_runner import CpuRunner
from hybridtrt.runtime.resident_memory import available_bytes
from hybridtrt.runtime.runner import Costs, Runner, RunnerInfo

log = logging.getLogger("hybridtrt.load")

FLOPS_PER_THREAD = 20e9  # what a thread computes in a second, as a guess that a profile replaces

MAX_THREADS = 1024


@dataclass(frozen=True)
class RuntimeOptions:
    """Choices of a run, not of an engine.

    `kv_cache_tokens` bounds the tokens that the pages of one group hold; by default the longest sequences of a full
    batch fit at once. `prefix_cache_bytes` of state snapshots let a prompt begin where an earlier one had the same
    tokens; by default there are as many snapshots as sequences in a batch. With drafts every sequence has a second
    slot. `threads` None takes OMP_NUM_THREADS, or all cores of this process. `walker` is "cpu" for the C++ kernels,
    or "torch" or "reference"; where the kernels were not compiled, "cpu" runs on torch with a warning. `isa` names an
    instruction set (`plugins.native.library.ISAS`) instead of the machine's best.
    """

    threads: int | None = None
    kv_cache_tokens: int | None = None
    walker: str = "cpu"
    isa: str | None = None
    enable_block_reuse: bool = True
    prefix_cache_bytes: int | None = None
    max_draft_tokens: int = 0

    def __post_init__(self) -> None:
        if self.walker not in WALKERS:
            raise ValueError(f"walker {self.walker!r} is not known; known: {', '.join(WALKERS)}")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ValueError(f"threads={self.threads} is more than {MAX_THREADS}")
        for name, value, least in (
            ("threads", self.threads, 1),
            ("kv_cache_tokens", self.kv_cache_tokens, 1),
            ("prefix_cache_bytes", self.prefix_cache_bytes, 0),
            ("max_draft_tokens", self.max_draft_tokens, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} is {'negative' if least == 0 else 'not positive'}")

    def spare_slots(self, max_batch_size: int, state_bytes: int) -> int:
        """Slots beside those of the sequences, where a slot takes `state_bytes`: of snapshots and of drafts."""
        snapshots = max_batch_size
        if self.prefix_cache_bytes is not None:
            snapshots = self.prefix_cache_bytes // max(state_bytes, 1)
        return snapshots * self.enable_block_reuse + max_batch_size * (self.max_draft_tokens > 0)


def runner_info(config: EngineConfig, options: RuntimeOptions) -> RunnerInfo:
    """Limits and pool sizes of an engine; page 0 and slot 0 of every pool are reserved."""
    limits, caches = config.build, config.caches()
    plan = config.memory(options.spare_slots(limits.max_batch_size, cache_memory(caches).state_bytes))
    num_pages = plan.num_pages
    if options.kv_cache_tokens is not None:
        asked = 1 - (-options.kv_cache_tokens // limits.tokens_per_block)
        for name, pool in plan.groups.items():
            all_kept = pool.window is None and pool.limit is None
            num_pages[name] = asked if all_kept else min(asked, pool.num_pages)
    return RunnerInfo(
        vocab_size=config.model.vocab_size,
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_logits_rows=limits.max_logits_rows,
        max_seq_len=limits.max_seq_len,
        page_size=limits.tokens_per_block,
        num_pages=num_pages,
        num_slots=plan.num_slots,
        caches=tuple(caches),
        eos_token_ids=config.model.eos_token_ids,
        pad_token_id=config.model.pad_token_id,
        costs=_costs(config.program(), options.threads or default_threads()),
    )


def _costs(program: Program, threads: int) -> Costs:
    """What a token of prefill takes by the operations that its nodes count."""
    load = Load(tokens=1, sequences=1, logits_rows=0, attended=1)
    return Costs(sum(program.flops(node, load) for node in program.nodes) / (FLOPS_PER_THREAD * threads))


def default_threads() -> int:
    """OMP_NUM_THREADS where it is a number, else the cores that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and 1 <= int(asked) <= MAX_THREADS:
        return int(asked)
    return available_cores()


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_runner(engine_dir: str | Path, options: RuntimeOptions | None = None) -> Runner:
    """Open an engine. Raises `ValueError` with one clear line if it is damaged or built by another version."""
    engine_dir, options = Path(engine_dir), options or RuntimeOptions()
    config = read_engine_config(engine_dir)
    info = runner_info(config, options)
    if config.build.target != CPU:
        from hybridtrt.runtime.gpu.load import load_tensorrt_runner  # here: TensorRT is not needed elsewhere

        return load_tensorrt_runner(engine_dir, config, info)
    packed = open_packed(engine_dir, config)
    _check_memory(info)
    return make_runner(config, packed, info, options)


def open_packed(engine_dir: Path, config: EngineConfig) -> PackedFile:
    """Map the weights of an engine. Raises `ValueError` where they are not those of its config."""
    try:
        return PackedFile(engine_dir / ENGINE_FILE, config.lowered().packed_weights())
    except ValueError as error:
        raise ValueError(f"{engine_dir}: {error}; build the engine again") from None


def make_runner(config: EngineConfig, packed: PackedFile, info: RunnerInfo, options: RuntimeOptions) -> Runner:
    """The runner that the options ask for, with pools as `info` says."""
    threads, walker = options.threads or default_threads(), options.walker
    if threads > available_cores():
        log.warning("%d threads on %d cores wait for each other: fewer are faster", threads, available_cores())
    if walker == "cpu":
        try:
            load_library()
        except ValueError as error:
            log.warning("%s: running on torch, which is slower", error)
            walker = "torch"
        else:
            tuned = tuned_for(config, Machine.here(threads, options.isa))
            return CpuRunner(config.program(), config.lowered, packed.data, info, threads, options.isa, tuned)
    from hybridtrt.runtime.load_torch import make_torch_runner  # here, so that the kernels run without torch

    return make_torch_runner(config, packed, info, threads, walker)


def tuned_for(config: EngineConfig, machine: Machine) -> Tuned | None:
    """The engine's tactics, if they are this machine's."""
    if config.tuned is None or config.tuned.machine == machine:
        return config.tuned
    log.debug("tactics measured on %s are not used on %s", config.tuned.machine, machine)
    return None


def _check_memory(info: RunnerInfo) -> None:
    """Raise `ValueError` where the pools do not fit into what the machine has left."""
    caches, left = cache_memory(info.caches), available_bytes()
    pages = sum(info.num_pages[name] * group.bytes_per_token for name, group in caches.groups.items()) * info.page_size
    states = info.num_slots * caches.state_bytes
    if pages + states > left:
        raise ValueError(
            f"pages of {pages:,} bytes and states of {states:,} do not fit into the {left:,} bytes of memory that are "
            "left: lower kv_cache_tokens or prefix_cache_bytes, or build for fewer or shorter sequences"
        )
