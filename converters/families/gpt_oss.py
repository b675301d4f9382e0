"""gpt-oss: attention with sinks, every other layer in a window, and clamped experts with biases.

Facts from transformers' `GptOssConfig` and its modelling code: expert matrices are stored input first, the rows of
gate and up alternate; without rope parameters YaRN is taken.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention
from hybridtrt.converters.mixers import AttentionConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Named, Sources, SplitPairs, Transposed

DECODER = Decoder()
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ALPHA = 1.702  # of the experts' activation


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layer_types", allowed=("sliding_attention", "full_attention"))
    count = hf.layer_count(36, pattern)
    if pattern is None:
        pattern = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(count))
    head_dim = hf.integer("head_dim", 64)
    vocab_size = hf.integer("vocab_size", 201088)
    positions = hf.integer("max_position_embeddings", 131072)
    bias = hf.flag("attention_bias", True)
    windows: dict[str, int | None] = {"full_attention": None}
    if "sliding_attention" in pattern:
        windows["sliding_attention"] = hf.integer("sliding_window", 128)
    mixers = {
        kind: AttentionConfig(
            num_heads=hf.integer("num_attention_heads", 64),
            num_kv_heads=hf.integer("num_key_value_heads", 8),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            bias=bias,
            dense_bias=bias,
            rope=0,
            window=window,
            sinks=True,
        )
        for kind, window in windows.items()
    }
    hf.choice("hidden_act", "silu", ("silu",))
    if hf.number("swiglu_alpha", ALPHA) != ALPHA:
        raise hf.error("swiglu_alpha", str(ALPHA))
    moe = MoeConfig(
        num_experts=hf.integer("num_local_experts", 128, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", 4),
        intermediate=hf.integer("intermediate_size", 2880),
        router=RouterConfig("softmax_topk", bias=True),
        activation="swiglu_oai",
        expert_bias=True,
        clamp=hf.number("swiglu_limit", 7.0, positive=True),
    )
    return ModelConfig(
        architecture="gpt_oss",
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", 2880),
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=tuple(LayerConfig((Block((mixers[kind],)), Block((moe,)))) for kind in pattern),
        ropes=(read_rope(hf, head_dim, max_positions=positions, theta=150000.0, absent=ROPE),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case MoeConfig():
            experts = f"{prefix}.mlp.experts"
            return {
                "router.weight": Named(f"{prefix}.mlp.router.weight"),
                "router.bias": Named(f"{prefix}.mlp.router.bias"),
                "experts.gate_up": SplitPairs(Transposed(f"{experts}.gate_up_proj")),
                "experts.gate_up_bias": SplitPairs(Named(f"{experts}.gate_up_proj_bias")),
                "experts.down": Transposed(f"{experts}.down_proj"),
                "experts.down_bias": Named(f"{experts}.down_proj_bias"),
            }
        case _:
            raise TypeError(branch)


FAMILY = Family(
    model_types=("gpt_oss",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq",),
)
