"""Mamba: selective state space layers and nothing else.

Facts from transformers' `MambaConfig` and its modelling code, which Falcon Mamba shares: a stored `intermediate_size`
counts, `expand` only where there is none. Sequences may have any length.
"""

from __future__ import annotations

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.layouts import Decoder, mamba1
from hybridtrt.converters.mamba_keys import ANY_LENGTH, dt_rank
from hybridtrt.converters.mixers import Mamba1Config, Mixer
from hybridtrt.converters.sources import Sources

OLD_NAMES = (("backbone.embeddings.", "backbone.embedding."),)
DECODER = Decoder(
    pre_norms=("norm.weight",),
    post_norms=("",),
    final_norm="backbone.norm_f.weight",
    embedding="backbone.embeddings.weight",
    layers="backbone.layers",
)


def read_mamba(hf: HFConfig, architecture: str, mixer: Mamba1Config) -> ModelConfig:
    """A model whose every layer is the given mixer."""
    vocab_size = hf.integer("vocab_size", 50280)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", 768),
        max_position_embeddings=ANY_LENGTH,
        norm_eps=hf.number("layer_norm_epsilon", 1e-5, positive=True),
        layers=(LayerConfig((Block((mixer,)),)),) * hf.layer_count(32, None),
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        bos_token_id=hf.token_id("bos_token_id", 0, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 0, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def read_mixer(hf: HFConfig) -> Mamba1Config:
    """The mixer of Mamba, without norms of dt, B and C."""
    hidden = hf.integer("hidden_size", 768)
    hf.choice("hidden_act", "silu", ("silu",))
    return Mamba1Config(
        inner=hf.integer("intermediate_size", hf.integer("expand", 2) * hidden),
        d_state=hf.integer("state_size", 16),
        dt_rank=dt_rank(hf, "time_step_rank", hidden),
        conv_width=hf.integer("conv_kernel", 4, minimum=2),
        conv_bias=hf.flag("use_conv_bias", True),
        proj_bias=hf.flag("use_bias", False),
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    return mamba1(f"{prefix}.mixer")


FAMILY = Family(
    model_types=("mamba",),
    config=lambda hf: read_mamba(hf, "mamba", read_mixer(hf)),
    sources=lambda config: DECODER.sources(config, _branch),
    nestings=(OLD_NAMES,),
)
