"""Zaya (`zaya`): attention behind convolutions (CCA), one expert or none a token, a router that passes its state on.

Facts from transformers' `ZayaConfig` and its modelling code: rotary parameters are nested by layer type; the router is
an MLP whose projection takes up that of the layer before, its last class stands for no expert, and its balancing
biases only choose; both sides of every residual sum, and the embeddings, take a bias and a scale. Zero padding comes
before the depthwise convolution, so its bias is in force before the first token too and is carried into the headwise
one. The first token's delayed value is the bias alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig, RopeConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import Ffn, MoeConfig, RouterConfig, RouterMlpConfig
from hybridtrt.converters.hf_config import MAX_EXPERTS, HFConfig
from hybridtrt.converters.layouts import Decoder, experts
from hybridtrt.converters.mixers import CcaConfig, Mixer
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Concat, Constant, DropAxis, Named, Read, Reshaped, Shape, Sources

if TYPE_CHECKING:
    from torch import Tensor

DECODER = Decoder()
ROPES = {
    "hybrid": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "hybrid_sliding": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class CarriedBias:
    """The bias of a convolution over the output of a depthwise one, whose own bias it takes over, in float32."""

    first: str
    second: str
    group: int
    width: int

    def tensors(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield f"{self.first}.bias", shape
        yield f"{self.second}.bias", shape
        yield f"{self.second}.weight", (shape[0], self.group, self.width)

    def pieces(self, read: Read) -> Iterator[Tensor]:
        before = read(f"{self.first}.bias").float().unflatten(0, (-1, self.group))
        taps = read(f"{self.second}.weight").float().sum(-1).unflatten(0, (-1, self.group))
        yield read(f"{self.second}.bias").float() + (taps @ before.unsqueeze(2)).flatten()


def _config(hf: HFConfig) -> ModelConfig:
    pattern = hf.layer_pattern("layer_types", allowed=tuple(ROPES))
    count = hf.layer_count(40, pattern)
    kinds = pattern or ("hybrid",) * count
    vocab_size = hf.integer("vocab_size", 262272)
    positions = hf.integer("max_position_embeddings", 131072)
    used = [kind for kind in ROPES if kind in kinds]
    mixers = {kind: _mixer(hf, kind, used.index(kind)) for kind in used}
    return ModelConfig(
        architecture="zaya",
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size", 2048),
        max_position_embeddings=positions,
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        layers=tuple(
            LayerConfig((Block((mixers[kind],), affine=True), Block((_moe(hf, i),), affine=True)))
            for i, kind in enumerate(kinds)
        ),
        ropes=tuple(_rope(hf, kind, mixers[kind].head_dim, positions) for kind in used),
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        head_bias=hf.flag("lm_head_bias", False),
        embedding_affine=True,
        bos_token_id=hf.token_id("bos_token_id", 2, vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", 106, vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", 0, vocab_size=vocab_size),
    )


def _rope(hf: HFConfig, kind: str, head_dim: int, positions: int) -> RopeConfig:
    given = hf.values.get("rope_parameters")
    if given and not (isinstance(given, dict) and isinstance(given.get(kind), dict)):
        raise hf.error("rope_parameters", f"an object with an object {kind}")
    return read_rope(hf, head_dim, max_positions=positions, partial=1.0, layer_type=kind, absent=ROPES)


def _mixer(hf: HFConfig, kind: str, rope: int) -> CcaConfig:
    bias = hf.flag("attention_bias", False)
    return CcaConfig(
        num_heads=hf.integer("num_attention_heads", 8),
        num_kv_heads=hf.integer("num_key_value_heads", 2),
        head_dim=hf.integer("head_dim", 128),
        depthwise_width=hf.integer("cca_time0", 2),
        headwise_width=hf.integer("cca_time1", 2),
        bias=bias,
        dense_bias=bias,
        rope=rope,
        window=hf.integer("sliding_window") if kind == "hybrid_sliding" else None,
    )


def _moe(hf: HFConfig, layer: int) -> MoeConfig:
    hf.integer("num_experts_per_tok", 1, maximum=1)
    return MoeConfig(
        num_experts=hf.integer("num_experts", 16, maximum=MAX_EXPERTS),
        top_k=1,
        intermediate=hf.integer("moe_intermediate_size", 2048),
        router=RouterConfig("softmax", selection_bias=True),
        activation=hf.choice("hidden_act", "silu", ("silu",)),
        router_mlp=RouterMlpConfig(hf.integer("router_hidden_size", 256), layer - 1 if layer else None),
        skip=True,
    )


def _branch(prefix: str, branch: Mixer | Ffn) -> Sources:
    if isinstance(branch, CcaConfig):
        return _cca(f"{prefix}.self_attn", branch)
    assert isinstance(branch, MoeConfig)
    gate = f"{prefix}.mlp.gate"
    sources: Sources = {
        f"router.{name}.{part}": Named(f"{gate}.{source}.{part}")
        for name, source in (
            ("down", "down_proj"),
            ("norm", "router_mlp.norm"),
            ("fc1", "router_mlp.fc1"),
            ("fc2", "router_mlp.fc2"),
            ("out", "router_mlp.out_proj"),
        )
        for part in ("weight", "bias")
    }
    return sources | {
        "router.state_scale.weight": Named(f"{gate}.router_states_scale"),
        "router.selection_bias": Named(f"{gate}.balancing_biases"),
        **experts(f"{prefix}.mlp.experts", branch),
    }


def _cca(prefix: str, config: CcaConfig) -> Sources:
    path = f"{prefix}.qkv_proj"
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sources: Sources = {
        "v_delayed.weight": Named(f"{path}.v_proj_delayed.weight"),
        "delay.weight": Constant((1.0, 0.0) * config.half_v_dim),  # the token before, not the current one
        "delay.bias": Named(f"{path}.v_proj_delayed.bias"),
        "depthwise.weight": DropAxis(f"{path}.conv_qk_depthwise.weight"),
        "headwise.weight": Named(f"{path}.conv_qk_grouped.weight"),
        "headwise.bias": CarriedBias(
            f"{path}.conv_qk_depthwise", f"{path}.conv_qk_grouped", config.head_dim, config.headwise_width
        ),
        "k_scale.weight": Reshaped(f"{prefix}.qk_norm.temp", (config.num_kv_heads,)),
    }
    for part in ("weight", "bias"):
        parts = tuple(Named(f"{path}.{name}.{part}") for name in ("q_proj", "k_proj", "v_proj_current"))
        sources[f"qkv.{part}"] = Concat(parts, rows=(q, kv, config.half_v_dim))
        sources[f"dense.{part}"] = Named(f"{prefix}.o_proj.{part}")
    return sources


def _sources(config: ModelConfig) -> Sources:
    sources = DECODER.sources(config, _branch)
    sides = [("embedding_affine", "model.input_hidden_states")]
    for i in range(len(config.layers)):
        for kind, block in (("cca", "attention"), ("moe", "mlp")):
            for name, side in (("sum_affine", "hidden_states"), ("skip_affine", "residual")):
                scaling = f"model.layers.{i}.post_{block}_residual_scale"
                sides.append((f"layers.{i}.{kind}.{name}", f"{scaling}.{side}"))
    for name, side in sides:
        sources |= {f"{name}.weight": Named(f"{side}_scale"), f"{name}.bias": Named(f"{side}_bias")}
    return sources


FAMILY = Family(model_types=("zaya",), config=_config, sources=_sources, ignored=("*.rotary_emb.*",))
