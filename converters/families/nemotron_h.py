"""Nemotron-H and Nemotron 3: one mixer or feed-forward a layer, of Mamba-2, attention, MLP and experts.

Facts from transformers' `NemotronHConfig` and its modelling code: no positions, no bias of the attention, feed-forwards
of relu² without a gate; dt is at least `time_step_min`, as in its full forward, while its cached steps forget that;
`tie_word_embeddings` ties nothing. Hub files spell the layers as a string of M, *, -, E.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MlpConfig, MoeConfig, RouterConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, MAX_LAYERS, HFConfig
from hybridtrt.converters.layouts import Decoder, attention, experts, mamba2, plain_mlp
from hybridtrt.converters.mixers import AttentionConfig, Mamba2Config, Mixer
from hybridtrt.converters.sources import Named, Sources

DECODER = Decoder(
    pre_norms=("norm.weight",),
    post_norms=("",),
    final_norm="backbone.norm_f.weight",
    embedding="backbone.embeddings.weight",
    layers="backbone.layers",
)
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
# The names of the keys of Mamba-2 in older files, which take precedence.
OLD_KEYS = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_min": "mamba_dt_min",
    "use_conv_bias": "mamba_conv_bias",
}


def _config(hf: HFConfig) -> ModelConfig:
    pattern = _pattern(hf)
    hf.layer_count(len(pattern), pattern)
    vocab_size = hf.integer("vocab_size", 131072)
    kinds: dict[str, Mixer | Ffn] = {}
    for kind in pattern:
        if kind not in kinds:
            kinds[kind] = _READERS[kind](hf)
    hf.flag("tie_word_embeddings", False)
    return ModelConfig(
        architecture="nemotron_h",
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", 4096),
        max_position_embeddings=hf.integer("max_position_embeddings", 4096),
        norm_eps=hf.number("layer_norm_epsilon", 1e-5, positive=True),
        layers=tuple(LayerConfig((Block((kinds[kind],)),)) for kind in pattern),
        bos_token_id=hf.token_id("bos_token_id", 1, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 2, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _pattern(hf: HFConfig) -> tuple[str, ...]:
    pattern = hf.layer_pattern("layers_block_type", "layer_types", allowed=tuple(LETTERS.values()))
    if pattern is not None:
        return pattern
    letters = hf.values.get("hybrid_override_pattern", "ME*-")
    if not isinstance(letters, str) or not 0 < len(letters) <= MAX_LAYERS or not set(letters) <= set(LETTERS):
        raise hf.error("hybrid_override_pattern", f"a string of {', '.join(LETTERS)}")
    return tuple(LETTERS[letter] for letter in letters)


def _attention(hf: HFConfig) -> AttentionConfig:
    heads, head_dim = hf.integer("num_attention_heads", 32), hf.integer("head_dim", 128)
    return AttentionConfig(heads, hf.integer("num_key_value_heads", 8), head_dim, scale=head_dim**-0.5)


def _mamba(hf: HFConfig) -> Mamba2Config:
    renamed = {key: hf.values[old] for key, old in OLD_KEYS.items() if old in hf.values}
    keys = HFConfig({**hf.values, **renamed}, hf.source)
    groups = keys.integer("n_groups", 8)
    bias = hf.flag("use_bias", False)
    hf.choice("mamba_hidden_act", "silu", ("silu",))
    return Mamba2Config(
        num_heads=hf.integer("mamba_num_heads", 128),
        head_dim=hf.integer("mamba_head_dim", 64),
        d_state=hf.integer("ssm_state_size", 128),
        n_groups=groups,
        conv_width=keys.integer("conv_kernel", 4, minimum=2),
        conv_bias=keys.flag("use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        dt_min=max(keys.number("time_step_min", 0.001), 0.0),
        norm_groups=groups,
    )


def _mlp(hf: HFConfig) -> MlpConfig:
    activation = hf.choice("mlp_hidden_act", "relu2", ("relu2",))
    return MlpConfig(hf.integer("intermediate_size", 21504), activation, gated=False, bias=hf.flag("mlp_bias", False))


def _moe(hf: HFConfig) -> MoeConfig:
    count_key = "num_local_experts" if "num_local_experts" in hf.values else "n_routed_experts"
    return MoeConfig(
        num_experts=hf.integer(count_key, 8, maximum=MAX_EXPERTS),
        top_k=hf.integer("num_experts_per_tok", 2),
        intermediate=hf.integer("moe_intermediate_size", 7688),
        router=RouterConfig(
            "sigmoid",
            renormalize=hf.flag("norm_topk_prob", True),
            renormalize_eps=1e-20,
            scaling=hf.number("routed_scaling_factor", 1.0),
            selection_bias=True,
            num_groups=hf.integer("n_group", 1),
            top_groups=hf.integer("topk_group", 1),
        ),
        activation=hf.choice("mlp_hidden_act", "relu2", ("relu2",)),
        gated=False,
        latent=0 if hf.values.get("moe_latent_size") is None else hf.integer("moe_latent_size"),
        shared_intermediate=hf.integer("moe_shared_expert_intermediate_size", 7688),
        bias=hf.flag("mlp_bias", False),
    )


_READERS: dict[str, Callable[[HFConfig], Mixer | Ffn]] = {
    "linear_attention": _mamba,
    "full_attention": _attention,
    "mlp": _mlp,
    "moe": _moe,
}


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    mixer = f"{prefix}.mixer"
    match branch:
        case AttentionConfig():
            return attention(mixer, branch)
        case Mamba2Config():
            return mamba2(mixer, branch)
        case MoeConfig():
            latent: Sources = {
                f"latent_{to}.{part}": Named(f"{mixer}.{name}_latent_proj.{part}")
                for to, name in (("down", "fc1"), ("up", "fc2"))
                for part in ("weight", "bias")
            }
            return latent | {
                "router.weight": Named(f"{mixer}.gate.weight"),
                "router.selection_bias": Named(f"{mixer}.gate.e_score_correction_bias"),
                **experts(f"{mixer}.experts", branch),
                **plain_mlp(f"{mixer}.shared_experts", "shared."),
            }
        case _:
            return plain_mlp(mixer)


FAMILY = Family(
    model_types=("nemotron_h",),
    config=_config,
    sources=lambda config: DECODER.sources(config, _branch),
    ignored=("mtp.*",),
    nestings=((("backbone.", "model."),),),  # without the renaming of transformers
)
