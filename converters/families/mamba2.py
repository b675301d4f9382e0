"""Mamba-2: state space duality layers and nothing else.

Facts from transformers' `Mamba2Config` and its modelling code. Sequences may have any length.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.families.mamba import DECODER, OLD_NAMES
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import mamba2
from hybridtrt.converters.mamba_keys import ANY_LENGTH, time_step_limit
from hybridtrt.converters.mixers import Mamba2Config, Mixer
from hybridtrt.converters.sources import Sources


def _config(hf: HFConfig) -> ModelConfig:
    hidden = hf.integer("hidden_size", 4096)
    vocab_size = hf.integer("vocab_size", 32768)
    return ModelConfig(
        architecture="mamba2",
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_position_embeddings=ANY_LENGTH,
        norm_eps=hf.number("layer_norm_epsilon", 1e-5, positive=True),
        layers=(LayerConfig((Block((_mixer(hf, hidden),)),)),) * hf.layer_count(64, None),
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        bos_token_id=hf.token_id("bos_token_id", 0, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 1, vocab_size=vocab_size),
    )


def _mixer(hf: HFConfig, hidden: int) -> Mamba2Config:
    heads, head_dim = hf.integer("num_heads", 128), hf.integer("head_dim", 64)
    inner = hf.integer("expand", 2) * hidden
    if heads * head_dim != inner:
        raise ValueError(
            f"num_heads={heads} times head_dim={head_dim} is not expand * hidden_size = {inner} ({hf.source})"
        )
    hf.choice("hidden_act", "silu", ("silu",))
    groups = hf.integer("n_groups", 8)
    bias = hf.flag("use_bias", False)
    dt_min, dt_max = time_step_limit(hf)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        d_state=hf.integer("state_size", 128),
        n_groups=groups,
        conv_width=hf.integer("conv_kernel", 4, minimum=2),
        conv_bias=hf.flag("use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        dt_min=dt_min,
        dt_max=dt_max,
        norm_groups=groups,
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    assert isinstance(branch, Mamba2Config)
    return mamba2(f"{prefix}.mixer", branch)


FAMILY = Family(
    model_types=("mamba2",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    nestings=(OLD_NAMES,),
)
