"""Random Hugging Face checkpoints of every family, made once a test session, and a tokenizer trained on the spot."""

from __future__ import annotations

import atexit
import json
import shutil
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import free_mix_model  # noqa: F401 (registers our own models with transformers)
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

FAMILIES = ("granitemoehybrid", "jamba", "qwen3_next")
FORMS = ("hub", "packed", "sharded")
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT_VOCAB = 384  # 256 bytes, 3 special tokens and some merges

# A tiny config for each `model_type`, or `model_type.variant`.
TINY: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("tiny_configs.json").read_text(encoding="utf-8"))

SMALL: dict[str, dict[str, Any]] = {  # about 200 million parameters
    "qwen3_next": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 384,
        "num_experts_per_tok": 4,
        "num_experts": 16,
    },
    "jamba": {
        "hidden_size": 768,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
    },
    "granitemoehybrid": {
        "hidden_size": 768,
        "intermediate_size": 384,
        "shared_intermediate_size": 768,
        "num_hidden_layers": 12,
        "layer_types": ["full_attention" if i in (5, 11) else "linear_attention" for i in range(12)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 32,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
}


@cache
def workspace() -> Path:
    """A folder that lives as long as the test process."""
    folder = Path(tempfile.mkdtemp(prefix="hybridtrt-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def model_type(variant: str) -> str:
    """`nemotron_h` of `nemotron_h.dense`."""
    return variant.partition(".")[0]


def random_model(family: str, config: dict[str, Any], seed: int = 0) -> transformers.PreTrainedModel:
    """A float32 model whose every weight matters: none is zero, one or so small that a mistake would not show."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        values = SPECIAL_IDS | config
        kind = transformers.AutoModelForCausalLM
        if "text_config" in values:  # of a vision-language model
            kind = transformers.AutoModelForImageTextToText
            inner = {key: values[key] for key in ("vocab_size", *SPECIAL_IDS)}
            values["text_config"] = values["text_config"] | inner
        description = transformers.AutoConfig.for_model(model_type(family), **values)
        model = kind.from_config(description, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _randomize(name, weight)
            for name, buffer in model.named_buffers():
                if name.endswith(("bias", "biases")):  # of the choice of experts
                    _randomize(name, buffer)
    return model.eval()


def _randomize(name: str, weight: torch.Tensor) -> None:
    if name.endswith("A_log"):
        weight.uniform_(0.05, 4.0).log_()
    elif name.endswith(("dt_bias", "dt_proj.bias", "dt_proj_bias")):
        weight.uniform_(-4.0, 1.0)
    elif name.endswith("recurrent_param"):
        weight.uniform_(-6.0, 0.0)
    elif "norm" in name or name.endswith(".D"):
        weight.add_(torch.randn_like(weight), alpha=0.3)
    elif name.endswith(("bias", "biases")):
        weight.normal_(0.0, 0.1)
    elif "conv1d" in name:
        weight.normal_(0.0, 0.5)
    elif "embed_tokens" in name:
        weight.normal_(0.0, 1.0)
    else:
        weight.normal_(0.0, weight.shape[-1] ** -0.5)


def save(model: transformers.PreTrainedModel, folder: Path, form: str = "hub") -> Path:
    """Save in one of `FORMS`: the names of the hub, packed experts, or shards with an index."""
    options: dict[str, dict[str, Any]] = {
        "hub": {},
        "packed": {"save_original_format": False},
        "sharded": {"max_shard_size": "50KB"},
    }
    model.save_pretrained(folder, **options[form])
    return folder


@cache
def tiny_model(family: str, vocab_size: int = 96) -> transformers.PreTrainedModel:
    """The tiny model of a family, shared by all tests: do not change it."""
    return random_model(family, TINY[family] | {"vocab_size": vocab_size})


@cache
def tiny_checkpoint(family: str, form: str = "hub") -> Path:
    """The folder of a tiny model, without a tokenizer, shared by all tests: copy it before changing it."""
    return save(tiny_model(family), workspace() / f"{family}-tiny-{form}", form)


@cache
def tiny_text_checkpoint(family: str) -> Path:
    """The folder of a tiny model with a tokenizer."""
    folder = save(tiny_model(family, TEXT_VOCAB), workspace() / f"{family}-tiny-text")
    text_tokenizer(TEXT_VOCAB).save_pretrained(folder)
    return folder


@cache
def small_checkpoint(family: str, vocab_size: int = 32000) -> Path:
    """The folder of a model of about 200 million parameters with a tokenizer: 0.8 GB in float32."""
    model = random_model(family, SMALL[family] | {"vocab_size": vocab_size})
    folder = save(model, workspace() / f"{family}-small")
    text_tokenizer(vocab_size).save_pretrained(folder)
    return folder


@cache
def text_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, trained on the standard library's sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|bos|>", "<|eos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    size = 40 if vocab_size <= 4096 else len(sources)
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in sources[:size])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([f"<|extra_{i}|>" for i in range(vocab_size - tokenizer.get_vocab_size())])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "
    return fast
