"""MiniMax-M2: attention with norms over whole projections and partial rotary tables; experts by sigmoid scores.

Facts from transformers' `MiniMaxM2Config` and its modelling code. Hub files say `rotary_dim` where transformers 5 says
`partial_rotary_factor`.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention, mixtral_moe
from hybridtrt.converters.mixers import AttentionConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import FirstOf, Named, Sources

DECODER = Decoder()


def _config(hf: HFConfig) -> ModelConfig:
    head_dim = hf.integer("head_dim", 128)
    vocab_size = hf.integer("vocab_size", 200064)
    positions = hf.integer("max_position_embeddings", 196608)
    partial = hf.integer("rotary_dim", head_dim, nullable=True) / head_dim
    mixer = AttentionConfig(
        num_heads=hf.integer("num_attention_heads", 48),
        num_kv_heads=hf.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qk_norm="full",
        rope=0,
    )
    moe = MoeConfig(
        num_experts=hf.integer("num_local_experts", 256, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", 8),
        intermediate=hf.integer("intermediate_size", 1536),
        router=RouterConfig("sigmoid", renormalize=True, selection_bias=True),
        activation=hf.choice("hidden_act", "silu", ("silu",)),
    )
    return ModelConfig(
        architecture="minimax_m2",
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", 3072),
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        layers=(LayerConfig((Block((mixer,)), Block((moe,)))),) * hf.layer_count(62, None),
        ropes=(read_rope(hf, head_dim, max_positions=positions, theta=5e6, partial=partial),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", 200034, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 200020, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case MoeConfig():
            biases = (f"{prefix}.{block}.e_score_correction_bias" for block in ("block_sparse_moe", "mlp"))
            bias: Sources = {"router.selection_bias": FirstOf(tuple(Named(name) for name in biases))}
            return mixtral_moe(prefix, branch) | bias
        case _:
            raise TypeError(branch)


FAMILY = Family(
    model_types=("minimax_m2",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("*.rotary_emb.inv_freq", "model.mtp.*", "mtp.*"),  # mtp: layers for multi-token prediction
)
