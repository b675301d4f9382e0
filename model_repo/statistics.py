"""The engine's statistics as samples of the metric families of TensorRT-LLM's Triton backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridtrt.runtime.protocol import EngineInfo

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True)
class Family:
    """A metric family: its samples differ in the value of `label`."""

    name: str
    label: str
    description: str
    kind: Kind = "gauge"


REQUESTS = Family("nv_trt_llm_request_metrics", "request_type", "Requests in the engine")
PAGES = Family("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "Pages of the KV caches")
SLOTS = Family("nv_trt_llm_state_slot_metrics", "state_slot_type", "Slots of the recurrent states")
TOKENS = Family("nv_trt_llm_token_metrics", "token_type", "Tokens since the engine started")
FINISHED = Family("nv_trt_llm_finished_request_metrics", "finish_reason", "Requests that have ended, by reason")
GENERAL = Family("nv_trt_llm_general_metrics", "general_type", "Steps since the engine started")
RESPONSES = Family("nv_trt_llm_response_metrics", "response_type", "Requests that this model answered", "counter")
FAMILIES = (REQUESTS, PAGES, SLOTS, TOKENS, FINISHED, GENERAL)

Sample = tuple[Family, str, float]


def samples(statistics: Mapping[str, Any], info: EngineInfo) -> Iterator[Sample]:
    """Samples of one snapshot.

    Pages are those of all groups together, and of each as `used_<group>` and `free_<group>`; `fraction` is that of the
    fullest group.
    """
    running, waiting = statistics["running"], statistics["waiting"]
    yield REQUESTS, "active", running + waiting
    yield REQUESTS, "scheduled", running
    yield REQUESTS, "waiting", waiting
    yield REQUESTS, "max", info.max_batch_size
    pages: Mapping[str, Mapping[str, int]] = statistics["pages"]
    used = sum(group["used"] for group in pages.values())
    free = sum(group["free"] for group in pages.values())
    yield PAGES, "used", used
    yield PAGES, "free", free
    yield PAGES, "max", used + free
    yield PAGES, "fraction", max((g["used"] / max(g["used"] + g["free"], 1) for g in pages.values()), default=0.0)
    yield PAGES, "tokens_per", info.page_size
    for name, group in pages.items():
        yield PAGES, f"used_{name}", group["used"]
        yield PAGES, f"free_{name}", group["free"]
    slots = statistics["slots"]
    yield SLOTS, "used", slots["used"]
    yield SLOTS, "free", slots["free"]
    yield SLOTS, "max", slots["used"] + slots["free"]
    yield TOKENS, "prefill", statistics["prefill_tokens"]
    yield TOKENS, "decode", statistics["decode_tokens"]
    yield TOKENS, "sampled", statistics["sampled_tokens"]
    for reason, count in statistics["finished"].items():
        yield FINISHED, reason, count
    yield GENERAL, "iteration_counter", statistics["steps"]
