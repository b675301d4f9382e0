"""Kernels of others on the operands of a call, where their packages are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import util
from typing import Any

import torch
from gpu_operands import Rows

from hybridtrt.plugins.call import Call

Memory = Mapping[str, Any]
Run = Callable[[], Any]


def flash_linear_attention(call: Call, rows: Rows, memory: Memory) -> Run | None:
    """Gated delta with a decay a head: `fla.ops.gated_delta_rule`, gates computed before, states passed as a batch."""
    attributes = call.attributes
    if call.op != "linear_attention" or attributes["rule"] != "gated_delta" or memory["gate_1"].dim() != 2:
        return None
    if not util.find_spec("fla"):
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    heads = memory["v"].shape[1]
    repeats = heads // memory["q"].shape[1]
    q, k = (memory[name].repeat_interleave(repeats, 1)[None] for name in ("q", "k"))
    a, b = memory["gate_1"].float(), memory["gate_2"].float()
    g = (-memory["A_log"].exp() * torch.nn.functional.softplus(a + memory["dt_bias"]))[None]
    state = memory["state"][memory["state_src"].long()].contiguous()
    single = all(n == 1 for n in rows.lengths)
    function = fused_recurrent_gated_delta_rule if single else chunk_gated_delta_rule
    options = {
        "g": g,
        "beta": b.sigmoid().to(q.dtype)[None],
        "scale": attributes["scale"],
        "initial_state": state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": bool(attributes.get("l2_norm")),
        "cu_seqlens": memory["cu_seqlens"].long(),
    }
    return lambda: function(q, k, memory["v"][None], **options)


def flashinfer_decode(call: Call, rows: Rows, memory: Memory) -> Run | None:
    """Paged attention of a decode step without sinks, without writing the new tokens."""
    attributes = call.attributes
    if (
        call.op != "attention"
        or call.has("sinks")
        or any(n != 1 for n in rows.lengths)
        or not util.find_spec("flashinfer")
    ):
        return None
    import flashinfer

    heads, kv_heads, head_dim = memory["q"].shape[1], memory["k"].shape[1], memory["q"].shape[2]
    page_size = memory["kv"].shape[1]
    ends = torch.tensor(rows.contexts, dtype=torch.int32) + 1
    pages = (ends + page_size - 1) // page_size
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), pages.cumsum(0).int()])
    table = memory["block_tables"]
    indices = torch.cat([table[row, :count] for row, count in enumerate(pages.tolist())])
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=table.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_cuda_graph=False)
    wrapper.plan(
        indptr,
        indices,
        (ends - 1) % page_size + 1,
        heads,
        kv_heads,
        head_dim,
        page_size,
        q_data_type=memory["q"].dtype,
        kv_data_type=memory["kv"].dtype,
        sm_scale=attributes["scale"],
        window_left=-1 if attributes.get("window") is None else attributes["window"] - 1,
        logits_soft_cap=attributes.get("softcap") or 0.0,
    )
    return lambda: wrapper.run(memory["q"], memory["kv"])


PEERS: Mapping[str, Callable[[Call, Rows, Memory], Run | None]] = {
    "flash-linear-attention": flash_linear_attention,
    "FlashInfer": flashinfer_decode,
}
