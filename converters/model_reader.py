"""The description of a Hugging Face folder, from its `config.json` and `generation_config.json` alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hybridtrt.converters.config import DTYPES, ModelConfig
from hybridtrt.converters.families import family
from hybridtrt.converters.family import Family
from hybridtrt.converters.hf_config import HFConfig
from hybridtrt.converters.quantization import Fp8Config, read_quantization


@dataclass(frozen=True)
class Model:
    """A model as its folder describes it. `dtype` is None where the folder does not say."""

    family: Family
    config: ModelConfig
    dtype: str | None
    source: str  # the file that describes it
    ignored: tuple[str, ...]  # patterns of tensors that are not needed
    fp8: Fp8Config | None = None


def read_model(model_dir: str | Path) -> Model:
    """Read the configuration files of a folder. Raises `ValueError` naming file, key, value and expectation."""
    model_dir = Path(model_dir)
    hf = HFConfig.load(model_dir / "config.json")
    found = family(hf.values.get("model_type"))
    fp8 = read_quantization(hf)
    try:
        config = found.config(hf)
        ignored = found.ignores(hf, config)
    except ValueError as error:
        raise error if hf.source in str(error) else ValueError(f"{error} ({hf.source})") from None
    generation = model_dir / "generation_config.json"
    if generation.exists():
        config = _with_token_ids(config, HFConfig.load(generation))
    dtype_key = "dtype" if hf.values.get("dtype") is not None else "torch_dtype"
    stored = hf.values.get(dtype_key) is not None
    return Model(found, config, hf.choice(dtype_key, None, DTYPES) if stored else None, hf.source, ignored, fp8)


def read_model_config(model_dir: str | Path) -> ModelConfig:
    """The description of a Hugging Face folder. Its weights are not looked at."""
    model = read_model(model_dir)
    return replace(model.config, dtype=model.dtype or model.config.dtype)


def _with_token_ids(config: ModelConfig, generation: HFConfig) -> ModelConfig:
    """Token ids that `generation_config.json` names take precedence, as in transformers' `generate`."""
    vocab = config.vocab_size
    return replace(
        config,
        bos_token_id=generation.token_id("bos_token_id", config.bos_token_id, vocab_size=vocab),
        pad_token_id=generation.token_id("pad_token_id", config.pad_token_id, vocab_size=vocab),
        eos_token_ids=generation.token_ids("eos_token_id", vocab_size=vocab) or config.eos_token_ids,
    )
