"""The engine's statistics as samples of metric families, with TensorRT-LLM's names where it has such metrics.

Its Triton backend names the families `nv_trt_llm_…`, its own server the ones `trtllm_…`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridtrt.runtime.protocol import EngineInfo
from hybridtrt.runtime.statistics import BOUNDS

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Family:
    """A metric family: its samples differ in the value of `label`; "": there is one."""

    name: str
    label: str
    description: str
    kind: Kind = "gauge"


REQUESTS = Family("nv_trt_llm_request_metrics", "request_type", "Requests in the engine")
BATCHER = Family("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric", "The last step")
PAGES = Family("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "Pages of the KV caches")
SLOTS = Family("nv_trt_llm_state_slot_metrics", "state_slot_type", "Slots of the recurrent states")
MEMORY = Family("nv_trt_llm_runtime_memory_metrics", "memory_type", "Bytes of caches that were swapped out")
TOKENS = Family("nv_trt_llm_token_metrics", "token_type", "Tokens since the engine started")
PREEMPTIONS = Family("nv_trt_llm_preemption_metrics", "preemption_type", "Preemptions since the engine started")
FINISHED = Family("nv_trt_llm_finished_request_metrics", "finish_reason", "Answers that have ended, by reason")
GENERAL = Family("nv_trt_llm_general_metrics", "general_type", "Steps since the engine started")
HIT_RATE = Family("trtllm_kv_cache_hit_rate", "", "Part of the looked-up prompt tokens that the prefix cache had")
RESPONSES = Family("nv_trt_llm_response_metrics", "response_type", "Requests that this model answered", "counter")
GAUGES = (REQUESTS, BATCHER, PAGES, SLOTS, MEMORY, TOKENS, PREEMPTIONS, FINISHED, GENERAL, HIT_RATE)

HISTOGRAMS = {
    "queue": Family("trtllm_request_queue_time_seconds", "", "From submission to the first step", "histogram"),
    "first_token": Family("trtllm_time_to_first_token_seconds", "", "From submission to the first token", "histogram"),
    "per_output_token": Family("trtllm_time_per_output_token_seconds", "", "Mean of an answer's tokens", "histogram"),
    "end_to_end": Family("trtllm_e2e_request_latency_seconds", "", "From submission to the last token", "histogram"),
}

Sample = tuple[Family, str, float]


def samples(statistics: Mapping[str, Any], info: EngineInfo) -> Iterator[Sample]:
    """Samples of the gauges in one snapshot.

    Pages are those of all groups together, and of each as `used_<group>` and so on; `fraction` is that of the fullest
    group.
    """
    running, waiting = statistics["running"], statistics["waiting"]
    yield REQUESTS, "active", running + waiting
    yield REQUESTS, "scheduled", running
    yield REQUESTS, "waiting", waiting
    yield REQUESTS, "max", info.max_batch_size
    yield BATCHER, "paused_requests", statistics["preempted"]
    yield BATCHER, "total_context_tokens", statistics["last_prefill_tokens"]
    yield BATCHER, "total_generation_tokens", statistics["last_decode_tokens"]
    groups: Mapping[str, Mapping[str, int]] = statistics["pages"]
    for kind in ("used", "cached", "free"):
        yield PAGES, kind, sum(group[kind] for group in groups.values())
        for name, group in groups.items():
            yield PAGES, f"{kind}_{name}", group[kind]
        yield SLOTS, kind, statistics["slots"][kind]
    yield PAGES, "max", sum(map(_total, groups.values()))
    yield PAGES, "fraction", max((group["used"] / max(_total(group), 1) for group in groups.values()), default=0.0)
    yield PAGES, "tokens_per", info.page_size
    yield SLOTS, "max", _total(statistics["slots"])
    yield MEMORY, "swap_used", statistics["swap_used"]
    yield MEMORY, "swap_max", statistics["swap_max"]
    for kind in ("prefill", "decode", "sampled", "draft", "accepted_draft", "lookup", "hit"):
        yield TOKENS, kind, statistics[f"{kind}_tokens"]
    yield PREEMPTIONS, "recompute", statistics["preempted_recompute"]
    yield PREEMPTIONS, "swap", statistics["preempted_swap"]
    yield PREEMPTIONS, "swapped_in", statistics["swapped_in"]
    for reason, count in statistics["finished"].items():
        yield FINISHED, reason, count
    yield GENERAL, "iteration_counter", statistics["steps"]
    yield HIT_RATE, "", statistics["hit_rate"]


def _total(usage: Mapping[str, int]) -> int:
    return usage["used"] + usage["cached"] + usage["free"]


def observations(counts: Sequence[int], total: float) -> list[float]:
    """Values that fall into the buckets of `BOUNDS` as `counts` says, with the sum `total`.

    All stand at the same place of their buckets, which is the one where the sum comes out.
    """
    edges = [0.0, *BOUNDS, max(total, BOUNDS[-1])]
    low = sum(count * edge for count, edge in zip(counts, edges[:-1], strict=True))
    high = sum(count * edge for count, edge in zip(counts, edges[1:], strict=True))
    place = min(max((total - low) / (high - low), 1e-6), 1.0) if high > low else 1.0
    values = []
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        values += [min(left + place * (right - left), right)] * count
    return values
