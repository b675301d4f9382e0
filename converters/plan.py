"""A memory plan for GPUs: what each rank of every split of a model holds, by formula, before anything is built.

Weights and caches are those of the rank's own description (`parallel.py`), counted as everywhere else. There
are as many snapshots of prefixes as sequences. Activations and buffers are upper bounds:

* activations: at `max_num_tokens` tokens a step, residual and norm (2 * hidden), and the outputs of all projections of
  the widest branch; a MoE makes up to `top_k` copies of a token on one rank, each with its input, its `gate_up` and
  its output; and one row of float32 logits a sequence;
* buffers: two of `max_num_tokens * hidden` for all-reduce (tp > 1), two for the neighbouring stages (pp > 1), and two
  of `top_k` copies for dispatch and combine of the experts (ep > 1);
* `RUNTIME_BYTES` for the CUDA context and the libraries.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybridtrt.converters.checkpoint import weight_layouts
from hybridtrt.converters.config import DTYPES, ModelConfig
from hybridtrt.converters.describe import describe
from hybridtrt.converters.ffns import MoeConfig
from hybridtrt.converters.memory import CacheMemory, MemoryPlan, PoolLimits, cache_memory, plan_memory, stored_as
from hybridtrt.converters.mixers import SharedTransformerConfig
from hybridtrt.converters.parallel import Split, splits, stages
from hybridtrt.plugins.caches import DTYPE_BYTES

RUNTIME_BYTES = 2_000_000_000
TOKENS_PER_BLOCK = 32


@dataclass(frozen=True)
class PlanOptions:
    """What is planned for. `gpu_memory` is in GB of 10^9 bytes; `dtype` None is the model's own, and that of KV."""

    gpus: int
    gpu_memory: float = 80.0
    dtype: str | None = None
    max_seq_len: int = 8192
    concurrency: int = 16
    max_num_tokens: int = 8192
    state_dtype: str = "float32"
    kv_cache_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, most in (
            ("gpus", 4096),
            ("max_seq_len", 1 << 24),
            ("concurrency", 1 << 16),
            ("max_num_tokens", 1 << 20),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} is not in 1..{most}")
        if not 0 < self.gpu_memory < math.inf:
            raise ValueError(f"gpu_memory={self.gpu_memory} is not a positive number of GB")
        for name in ("dtype", "state_dtype", "kv_cache_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class RankPlan:
    """Bytes of the fullest rank of one split; `stage` is the pipeline stage it is in."""

    split: Split
    stage: int
    weights: int
    kv: dict[str, int]  # by page group, for the whole concurrency
    states: int
    activations: int
    buffers: int
    total: int
    fits: bool
    sequences: int  # of `max_seq_len` tokens that fit on every rank


@dataclass(frozen=True)
class Plan:
    """All splits of a model over a number of GPUs; `impossible` says of a split why."""

    architecture: str
    dtype: str
    parameters: int
    options: PlanOptions
    pages: dict[str, int]  # that a sequence holds at most, by page group
    ranks: list[RankPlan]
    impossible: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def plan(config: ModelConfig, options: PlanOptions) -> Plan:
    """Plan every split of `options.gpus` GPUs.

    Raises `ValueError` if `max_seq_len` exceeds the positions of the model.
    """
    if options.max_seq_len > config.max_length:
        raise ValueError(f"max_seq_len={options.max_seq_len} exceeds the model's {config.max_length} positions")
    config = replace(config, dtype=options.dtype or config.dtype)
    moes = [branch for layer in config.layers for branch in layer.branches() if isinstance(branch, MoeConfig)]
    ranks: list[RankPlan] = []
    impossible: dict[str, str] = {}
    for split in splits(options.gpus, bool(moes)):
        try:
            parts = stages(config, split)
        except ValueError as error:
            impossible[str(split)] = str(error)
            continue
        ranks.append(_fullest([_rank(config, part, i, split, options) for i, part in enumerate(parts)]))
    pools = _memory(0, cache_memory(config.caches()), options, 1).groups
    pages = {name: pool.pages_per_sequence for name, pool in pools.items()}
    return Plan(config.architecture, config.dtype, describe(config).parameters, options, pages, ranks, impossible)


def _fullest(ranks: list[RankPlan]) -> RankPlan:
    worst = max(ranks, key=lambda rank: rank.total)
    return replace(worst, sequences=min(rank.sequences for rank in ranks))


def _rank(config: ModelConfig, part: ModelConfig, stage: int, split: Split, options: PlanOptions) -> RankPlan:
    originals = config.layers[stage * len(part.layers) :][: len(part.layers)]
    moes = [branch for layer in originals for branch in layer.branches() if isinstance(branch, MoeConfig)]
    weights = _weights(config, part, stage, split) + _routers(moes, part)
    caches = cache_memory(stored_as(part.caches(), options.kv_cache_dtype or config.dtype, options.state_dtype))
    full, empty, one = (_memory(weights, caches, options, n) for n in (options.concurrency, 0, 1))
    top_k = max((moe.top_k for moe in moes), default=0)
    activations, buffers = _activations(part, top_k, split, options), _buffers(part, top_k, split, options)
    fixed = activations + buffers + RUNTIME_BYTES
    room = round(options.gpu_memory * 1e9)
    return RankPlan(
        split=split,
        stage=stage,
        weights=weights,
        kv={name: pool.num_bytes for name, pool in full.groups.items()},
        states=full.state_bytes,
        activations=activations,
        buffers=buffers,
        total=full.total_bytes + fixed,
        fits=full.total_bytes + fixed <= room,
        sequences=max(0, (room - fixed - empty.total_bytes) // max(one.total_bytes - empty.total_bytes, 1)),
    )


def _memory(weights: int, caches: CacheMemory, options: PlanOptions, sequences: int) -> MemoryPlan:
    limits = PoolLimits(
        max_batch_size=sequences,
        max_seq_len=options.max_seq_len,
        max_num_tokens=options.max_num_tokens,
        tokens_per_block=TOKENS_PER_BLOCK,
        spare_slots=sequences,
    )
    return plan_memory(weights, caches, limits)


def _weights(config: ModelConfig, part: ModelConfig, stage: int, split: Split) -> int:
    """Without what other stages hold: the first has the embedding, the last final norm and head."""
    first, last = stage == 0, stage == split.pp - 1
    total = 0
    for name, layout in weight_layouts(part).items():
        if name == "embedding.weight":
            held = first or (last and config.tie_word_embeddings)
        elif name.startswith(("final_norm.", "lm_head.")):
            held = last
        else:
            held = True
        total += layout.num_bytes * held
    return total


def _routers(moes: list[MoeConfig], part: ModelConfig) -> int:
    """What the routers of all experts take beyond those of the rank's own experts; routers are float32."""
    own = [branch for layer in part.layers for branch in layer.branches() if isinstance(branch, MoeConfig)]

    def size(moe: MoeConfig) -> int:
        table = moe.weights(part.hidden_size)
        return sum(4 * math.prod(spec.shape) for name, spec in table.items() if name.startswith("router."))

    return sum(map(size, moes)) - sum(map(size, own))


def _activations(part: ModelConfig, top_k: int, split: Split, options: PlanOptions) -> int:
    widest = max(_width(branch, part.hidden_size, top_k) for layer in part.layers for branch in layer.branches())
    tokens = options.max_num_tokens * (2 * part.hidden_size + widest) * DTYPE_BYTES[part.dtype]
    return tokens + options.concurrency * part.vocab_size * 4


def _width(branch: Any, hidden: int, top_k: int) -> int:
    """Elements a token has in a branch at most: outputs of all its projections, copies for the experts."""
    table = branch.weights(hidden)
    if isinstance(branch, SharedTransformerConfig):
        table |= branch.shared_weights(hidden)
    rows = sum(spec.shape[0] for spec in table.values() if len(spec.shape) == 2 and not spec.full_precision)
    if isinstance(branch, MoeConfig):
        copies = min(top_k, branch.num_experts)
        width = branch.latent or hidden
        rows += copies * (2 * width + branch.intermediate * (2 if branch.gated else 1))
    return int(rows)


def _buffers(part: ModelConfig, top_k: int, split: Split, options: PlanOptions) -> int:
    one = options.max_num_tokens * part.hidden_size * DTYPE_BYTES[part.dtype]
    return 2 * one * ((split.tp > 1) + (split.pp > 1) + top_k * (split.ep > 1))
