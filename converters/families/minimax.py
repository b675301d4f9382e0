"""MiniMax (`minimax`): lightning attention and full attention, mixture of experts in every layer.

Facts from transformers' `MiniMaxConfig` and its modelling code: the residual is taken after the norm, and both parts of
the sum have factors; heads of lightning attention decay at rates that fall with the layer, computed from the number of
heads and layers (the buffers of a checkpoint repeat them); its norm keeps the class's default epsilon;
`rope_theta` is 1e6 where it is absent, and all channels turn.
"""

from __future__ import annotations

import math
from functools import partial

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention, experts
from hybridtrt.converters.mixers import AttentionConfig, LightningConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Concat, Constant, Deinterleave, Named, Sources, either

DECODER = Decoder()
NORM_EPS = 1e-6  # of lightning attention


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layer_types", allowed=("linear_attention", "full_attention"))
    count = hf.layer_count(32, pattern)
    if pattern is None:
        pattern = tuple("linear_attention" if i % 2 else "full_attention" for i in range(count))
    hidden, heads = hf.integer("hidden_size", 4096), hf.integer("num_attention_heads", 32)
    head_dim = hf.head_dim(hidden, heads, nullable=True)
    activation = hf.choice("hidden_act", "silu", ("silu",))
    window = hf.values.get("sliding_window")
    full = AttentionConfig(
        num_heads=heads,
        num_kv_heads=hf.integer("num_key_value_heads", 8),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=0,
        window=None if window is None else hf.integer("sliding_window"),
    )
    linear = LightningConfig(num_heads=heads, head_dim=head_dim, norm_eps=NORM_EPS, activation=activation)
    moe = MoeConfig(
        num_experts=hf.integer("num_local_experts", 8, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", 2),
        intermediate=hf.integer("intermediate_size", 14336),
        router=RouterConfig("softmax", renormalize=True),
        activation=activation,
    )
    layers = {
        "full_attention": LayerConfig((_block(hf, full, "full_attn"), _block(hf, moe, "mlp"))),
        "linear_attention": LayerConfig((_block(hf, linear, "linear_attn"), _block(hf, moe, "mlp"))),
    }
    vocab_size = hf.integer("vocab_size", 32000)
    positions = hf.integer("max_position_embeddings", 131072)
    return ModelConfig(
        architecture="minimax",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=tuple(layers[kind] for kind in pattern),
        ropes=(read_rope(hf, head_dim, max_positions=positions, theta=1e6),),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _block(hf: HFConfig, branch: Mixer | Ffn, name: str) -> Block:
    """alpha * n + beta * branch(n), n being the normed input."""
    return Block(
        (branch,),
        residual_multiplier=hf.number(f"{name}_beta_factor", 1.0),
        skip_multiplier=hf.number(f"{name}_alpha_factor", 1.0),
        residual="normed",
    )


def _branch(layers: int, prefix: str, branch: Mixer | Ffn) -> Sources:
    match branch:
        case AttentionConfig():
            return attention(f"{prefix}.self_attn", branch)
        case LightningConfig():
            decay = _log_slopes(branch.num_heads, int(prefix.rpartition(".")[2]), layers)
            return _lightning(f"{prefix}.self_attn", branch) | {"A_log": Constant(decay)}
        case MoeConfig():
            return either(*(_moe(f"{prefix}.{name}", branch) for name in ("block_sparse_moe", "mlp")))
        case _:
            raise TypeError(branch)


def _moe(prefix: str, config: MoeConfig) -> Sources:
    return {
        "router.weight": Named(f"{prefix}.gate.weight"),
        **experts(f"{prefix}.experts", config, ("w1", "w3", "w2")),
    }


def _lightning(prefix: str, config: LightningConfig) -> Sources:
    qkv = Deinterleave(f"{prefix}.qkv_proj.weight", config.num_heads, (config.head_dim,) * 3)
    gate = Named(f"{prefix}.output_gate.weight")
    return {
        "in_proj.weight": Concat((qkv, gate), rows=(3 * config.inner, config.inner)),
        "norm.weight": Named(f"{prefix}.norm.weight"),
        "out_proj.weight": Named(f"{prefix}.out_proj.weight"),
    }


def _log_slopes(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """Logarithm of each head's decay rate: 2^(-8 h / heads) for h = 1, 2, ..., less in later layers."""
    factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return tuple(math.log(2.0 ** (-8 * (head + 1) / heads) * factor) for head in range(heads))


FAMILY = Family(
    model_types=("minimax",),
    config=_config,
    sources=lambda config: DECODER.sources(config, partial(_branch, len(config.layers))),
    ignored=(
        "*.rotary_emb.inv_freq",
        *(f"*.self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
    ),
)
