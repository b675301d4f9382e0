"""Jamba: Mamba-1 with norms on dt, B and C, attention without positions, and experts without renormalised weights.

Facts from transformers' `JambaConfig` and its modelling code. A layer with one expert is a plain MLP.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention, experts, gated_mlp, mamba1
from hybridtrt.converters.mamba_keys import dt_rank
from hybridtrt.converters.mixers import AttentionConfig, Mamba1Config, Mixer
from hybridtrt.converters.sources import Named, Sources

DECODER = Decoder(
    pre_norms=("input_layernorm.weight", "pre_ff_layernorm.weight"), final_norm="model.final_layernorm.weight"
)


def _config(hf: HFConfig) -> ModelConfig:
    count = hf.layer_count(32, None)
    hidden = hf.integer("hidden_size", 4096)
    vocab_size = hf.integer("vocab_size", 65536)
    activation = hf.choice("hidden_act", "silu", ("silu",))
    intermediate = hf.integer("intermediate_size", 14336)
    num_experts = hf.integer("num_experts", 16, minimum=0, maximum=MAX_EXPERTS)
    mlp = MlpConfig(intermediate, activation)
    moe: Ffn = mlp
    if num_experts > 1:
        top_k = hf.integer("num_experts_per_tok", 2)
        moe = MoeConfig(num_experts, top_k, intermediate, RouterConfig("softmax"), activation)
    full, linear = _attention(hf, hidden), _mamba(hf, hidden)
    attention_period = hf.integer("attn_layer_period", 8)
    attention_offset = hf.integer("attn_layer_offset", 4, minimum=0, maximum=attention_period - 1)
    expert_period = hf.integer("expert_layer_period", 2)
    expert_offset = hf.integer("expert_layer_offset", 1, minimum=0, maximum=expert_period - 1)

    def layer(i: int) -> LayerConfig:
        mixer: Mixer = full if i % attention_period == attention_offset else linear
        ffn = moe if i % expert_period == expert_offset else mlp
        return LayerConfig((Block((mixer,)), Block((ffn,))))

    return ModelConfig(
        architecture="jamba",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=hf.integer("max_position_embeddings", 262144),
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=tuple(layer(i) for i in range(count)),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _attention(hf: HFConfig, hidden: int) -> AttentionConfig:
    heads = hf.integer("num_attention_heads", 32)
    head_dim = hf.head_dim(hidden, heads)
    kv_heads = hf.integer("num_key_value_heads", 8)
    return AttentionConfig(heads, kv_heads, head_dim, scale=head_dim**-0.5, rope=None)


def _mamba(hf: HFConfig, hidden: int) -> Mamba1Config:
    return Mamba1Config(
        inner=hf.integer("mamba_expand", 2) * hidden,
        d_state=hf.integer("mamba_d_state", 16),
        dt_rank=dt_rank(hf, "mamba_dt_rank", hidden),
        conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=hf.flag("mamba_conv_bias", True),
        proj_bias=hf.flag("mamba_proj_bias", False),
        dt_bc_norm="weighted",
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case Mamba1Config():
            return mamba1(f"{prefix}.mamba")
        case MoeConfig():
            router: Sources = {"router.weight": Named(f"{prefix}.feed_forward.router.weight")}
            return router | experts(f"{prefix}.feed_forward.experts", branch)
        case _:
            return gated_mlp(f"{prefix}.feed_forward")


FAMILY = Family(model_types=("jamba",), config=_config, sources=lambda config: DECODER.sources(config, _branch))
