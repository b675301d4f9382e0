"""A model of our own (`hybridtrt_free_mix`): any mixer and any ffn in each layer, by a list in `config.json`.

Its keys and weight names are the canonical ones; `docs/own-models.md` describes them. An entry of `layers` is a layer
(`mixer`, `ffn`, `parallel`) or a group of layers (`layers`), either with a `repeat`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args

from hybridtrt.converters.config import Block, LayerConfig, ModelConfig, RopeConfig
from hybridtrt.converters.family import Family
from hybridtrt.converters.ffns import FFNS
from hybridtrt.converters.hf_config import MAX_LAYERS, HFConfig
from hybridtrt.converters.mixers import MIXERS, SharedTransformerConfig
from hybridtrt.converters.plain_data import field_types, from_plain, to_plain
from hybridtrt.converters.rope import read_rope
from hybridtrt.converters.sources import Named, Sources
from hybridtrt.plugins.pointwise import check_activation

MAX_INTEGER = 2**31 - 1
INDICES = ("rope", "previous_layer")
KINDS: dict[str, dict[str, Any]] = {
    "mixer": {kind: cls for kind, cls in MIXERS.items() if cls is not SharedTransformerConfig},  # is of many layers
    "ffn": dict(FFNS),
}
KEYS = (
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "norm_eps",
    "layers",
    "ropes",
    "tie_word_embeddings",
    "embedding_multiplier",
    "logits_multiplier",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
NO_MODEL = (  # keys of any `config.json`, which say nothing about the network
    "_name_or_path",
    "architectures",
    "dtype",
    "model_type",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)


def _config(hf: HFConfig) -> ModelConfig:
    _check_keys(hf, (*KEYS, *NO_MODEL))
    vocab_size = hf.integer("vocab_size")
    positions = hf.integer("max_position_embeddings", 2048)
    ropes = tuple(_rope(entry, positions) for entry in _objects(hf, "ropes")) if hf.values.get("ropes") else ()
    layers = _layers(hf, positions, ropes)
    _check_routers(hf, layers)
    return ModelConfig(
        architecture="hybridtrt_free_mix",
        vocab_size=vocab_size,
        hidden_size=hf.integer("hidden_size"),
        max_position_embeddings=positions,
        norm_eps=hf.number("norm_eps", 1e-6, positive=True),
        layers=layers,
        ropes=ropes,
        tie_word_embeddings=hf.flag("tie_word_embeddings", False),
        embedding_multiplier=hf.number("embedding_multiplier", 1.0),
        logits_multiplier=hf.number("logits_multiplier", 1.0),
        bos_token_id=hf.token_id("bos_token_id", vocab_size=vocab_size),
        eos_token_ids=hf.token_ids("eos_token_id", vocab_size=vocab_size),
        pad_token_id=hf.token_id("pad_token_id", vocab_size=vocab_size),
    )


def _rope(entry: HFConfig, positions: int) -> RopeConfig:
    """A rotary table over `dim` channels, with the rope parameters of transformers beside it."""
    parameters = {key: value for key, value in entry.values.items() if key != "dim"}
    dim = entry.integer("dim", minimum=2)
    return read_rope(HFConfig({"rope_parameters": parameters}, entry.source), dim, max_positions=positions)


def _layers(
    hf: HFConfig, positions: int, ropes: tuple[RopeConfig, ...], *, grouped: bool = True
) -> tuple[LayerConfig, ...]:
    layers: tuple[LayerConfig, ...] = ()
    for entry in _objects(hf, "layers"):
        if grouped and "layers" in entry.values:
            _check_keys(entry, ("layers", "repeat"))
            group = _layers(entry, positions, ropes, grouped=False)
        else:
            _check_keys(entry, ("mixer", "ffn", "parallel", "repeat"))
            group = (_layer(entry, positions, ropes),)
        count = entry.integer("repeat", 1, maximum=MAX_LAYERS)
        if len(layers) + count * len(group) > MAX_LAYERS:
            raise entry.error("repeat", f"at most {MAX_LAYERS} layers in all")
        layers += group * count
    return layers


def _layer(entry: HFConfig, positions: int, ropes: tuple[RopeConfig, ...]) -> LayerConfig:
    mixer, ffn = _branch(entry, "mixer", positions), _branch(entry, "ffn", positions)
    branches = tuple(branch for branch in (mixer, ffn) if branch is not None)
    if not branches:
        raise ValueError(f"mixer and ffn are absent: expected one or both ({entry.source})")
    rope = getattr(mixer, "rope", None)
    if rope is not None and rope < len(ropes):
        turned, name = 2 * len(ropes[rope].inv_freq), "rope_dim" if hasattr(mixer, "rope_dim") else "head_dim"
        if turned > getattr(mixer, name):
            raise ValueError(
                f"mixer.rope={rope} turns {turned} channels of {name}={getattr(mixer, name)} ({entry.source})"
            )
    if entry.flag("parallel", False):
        return LayerConfig((Block(branches),))
    return LayerConfig(tuple(Block((branch,)) for branch in branches))


def _check_routers(hf: HFConfig, layers: tuple[LayerConfig, ...]) -> None:
    """A router takes up the state of one that has run."""
    passed_on: list[int | None] = [None]
    for i, layer in enumerate(layers):
        for branch in layer.branches():
            router = getattr(branch, "router_mlp", None)
            if router is not None and router.previous_layer not in passed_on:
                raise ValueError(
                    f"layer {i}: previous_layer={router.previous_layer}: expected an earlier layer with a router_mlp "
                    f"({hf.source})"
                )
            passed_on += [] if router is None else [i]


def _branch(entry: HFConfig, key: str, positions: int) -> Any:
    """A mixer or ffn from its fields; absent ones take the defaults of its class."""
    value = entry.values.get(key)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise entry.error(key, "an object or null")
    kind = value.get("kind")
    cls = KINDS[key].get(kind) if isinstance(kind, str) else None
    try:
        if cls is None:
            raise ValueError(f"{key} has kind {kind!r}: expected one of {', '.join(KINDS[key])}")
        _check_sizes(cls, value, key)
        branch = from_plain(cls, _filled(cls, value, positions), key)
        if hasattr(branch, "activation"):
            check_activation(branch.activation, getattr(branch, "gated", False))
        if getattr(branch, "positions", positions) < positions:
            raise ValueError(
                f"{key}.positions={branch.positions}: expected max_position_embeddings={positions} or more"
            )
    except ValueError as error:
        raise ValueError(f"{error} ({entry.source})") from None
    return branch


def _check_sizes(cls: type, values: dict[str, Any], name: str) -> None:
    """Integers are sizes and counts: at least 1, or 0 where that means none; or they are indices."""
    hints = field_types(cls)
    for field in fields(cls):
        value = values.get(field.name)
        minimum = 0 if field.default == 0 or field.name in INDICES else 1
        if hints[field.name] in (int, int | None) and type(value) is int and not minimum <= value <= MAX_INTEGER:
            raise ValueError(f"{name}.{field.name}={value}: expected an integer in {minimum}..{MAX_INTEGER}")
        nested = _nested(hints[field.name])
        if nested is not None and isinstance(value, dict):
            _check_sizes(nested, value, f"{name}.{field.name}")


def _filled(cls: type, values: dict[str, Any], positions: int) -> dict[str, Any]:
    """The fields with the defaults of the class: a `scale` by the head size, `positions` those of the model."""
    hints = field_types(cls)
    filled = {field.name: to_plain(field.default) for field in fields(cls) if field.default is not MISSING} | values
    if "positions" in hints:
        filled.setdefault("positions", positions)
    if hints.get("scale") is float and type(values.get("head_dim")) is int:
        filled.setdefault("scale", values["head_dim"] ** -0.5)
    for name, hint in hints.items():
        nested = _nested(hint)
        if nested is not None and isinstance(filled.get(name, {}), dict):
            filled[name] = _filled(nested, filled.get(name, {}), positions)
    return filled


def _nested(hint: Any) -> type | None:
    """The dataclass of a field that holds one, or may hold one."""
    options = (hint, *get_args(hint))
    return next((option for option in options if isinstance(option, type) and is_dataclass(option)), None)


def _objects(hf: HFConfig, name: str) -> list[HFConfig]:
    value = hf.values.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise hf.error(name, "a list of one or more objects")
    return [HFConfig(item, f"{hf.source}, {name}[{i}]") for i, item in enumerate(value)]


def _check_keys(hf: HFConfig, known: Collection[str]) -> None:
    unknown = sorted(set(hf.values) - set(known))
    if unknown:
        raise ValueError(f"{unknown[0]} is not known: expected {', '.join(sorted(known))} ({hf.source})")


def _sources(config: ModelConfig) -> Sources:
    return {name: Named(name) for name in (*config.weight_table(), "lm_head.weight")}


FAMILY = Family(model_types=("hybridtrt_free_mix",), config=_config, sources=_sources)
