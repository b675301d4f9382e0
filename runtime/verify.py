"""Compares an engine with transformers' full forward on the same weights: logits, greedy tokens, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridtrt.build.engine import read_engine_config
from hybridtrt.converters.checkpoint_reader import CheckpointReader
from hybridtrt.converters.config import ModelConfig
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.layer_trace import oracle_stream, our_stream
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import TracingRunner

PROMPT_LENGTHS = (1, 2, 7, 64, 65, 200)
NEW_TOKENS = 32
TIE = 1e-3  # of the logits' standard deviation: closer than this, the two best tokens count as equal
# Largest difference over the standard deviation, of logits and of the residual stream. In float32 recurrences over
# hundreds of tokens round to about 1e-4; a mistake is seldom below 1e-2. Stored in less than float32, weights differ
# from the model's by their rounding, and a router near a tie may choose another expert.
THRESHOLDS = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 0.3}


@dataclass(frozen=True)
class PromptReport:
    """One fixed prompt: logits of the prompt, and greedy tokens after it."""

    prompt_tokens: int
    logit_error: float  # largest difference over the standard deviation of transformers' logits; infinite if not finite
    greedy_tokens: int
    greedy_agree: int  # tokens from the start until the first real difference


@dataclass(frozen=True)
class LayerReport:
    """The residual stream after one layer (`embedding`: before the first), for the longest prompt."""

    layer: str
    mixer: str
    ffn: str
    error: float  # largest difference over the standard deviation of transformers' values; infinite if not finite


@dataclass(frozen=True)
class VerifyReport:
    """All prompts, and all layers for one prompt, against a threshold. A walker without a trace has no `layers`."""

    architecture: str
    prompts: tuple[PromptReport, ...]
    threshold: float
    layers: tuple[LayerReport, ...] = ()

    @property
    def first_departure(self) -> LayerReport | None:
        """The first layer whose error exceeds the threshold."""
        return next((layer for layer in self.layers if layer.error > self.threshold), None)

    def departure(self) -> str:
        """One sentence on the layers."""
        first = self.first_departure
        if first is not None:
            kind = f" ({first.mixer}, {first.ffn})" if first.mixer else ""
            place = "The embedding" if first.layer == "embedding" else f"Layer {first.layer}{kind}"
            return f"{place} is the first to depart: {show(first.error)}."
        if not self.layers:
            return "Layers were not compared."
        most = f"No layer departs: {show(max(layer.error for layer in self.layers))} at most"
        return f"{most}, but the logits do." if self.logit_error > self.threshold else f"{most}."

    @property
    def logit_error(self) -> float:
        return max(report.logit_error for report in self.prompts)

    @property
    def greedy_tokens(self) -> int:
        return sum(report.greedy_tokens for report in self.prompts)

    @property
    def greedy_agree(self) -> int:
        return sum(report.greedy_agree for report in self.prompts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; an error that is not finite is None."""
        first = self.first_departure
        data = {
            "passed": self.passed,
            "logit_error": self.logit_error,
            "threshold": self.threshold,
            "greedy_tokens": self.greedy_tokens,
            "greedy_agree": self.greedy_agree,
            "first_departure": None if first is None else first.layer,
        }
        parts = {name: [asdict(item) for item in getattr(self, name)] for name in ("prompts", "layers")}
        for values in (data, *parts["prompts"], *parts["layers"]):
            values |= {name: None for name, value in values.items() if value == float("inf")}
        return data | parts

    @property
    def passed(self) -> bool:
        """Logits within the threshold and, where that is tight, every greedy token equal."""
        exact = self.threshold <= THRESHOLDS["float32"]
        return self.logit_error <= self.threshold and (not exact or self.greedy_agree == self.greedy_tokens)


def verify(
    model_dir: str | Path,
    engine_dir: str | Path,
    threshold: float | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> VerifyReport:
    """Run fixed prompts of random tokens through both.

    The default threshold is that of the engine's dtype, or of float32 if the engine stores the model's own dtype.
    `progress` is told each stage. Raises `ValueError` if the two do not belong together or the model cannot be loaded.
    """
    engine_dir = Path(engine_dir)
    config = read_engine_config(engine_dir).model
    progress("loading the engine")  # first: whether it runs here is known at once
    with closing(load_runner(engine_dir, RuntimeOptions())) as runner:
        progress("loading transformers' model")
        oracle, stored = _load_oracle(Path(model_dir))
        vocab_size = oracle.config.get_text_config().vocab_size
        if vocab_size != config.vocab_size:
            raise ValueError(f"{model_dir} has {vocab_size} tokens, {engine_dir} has {config.vocab_size}")
        if threshold is None:
            threshold = THRESHOLDS["float32" if stored == config.dtype else config.dtype]
        rng, longest = np.random.default_rng(0), runner.info.max_seq_len
        prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in PROMPT_LENGTHS if n < longest]
        if not prompts:
            raise ValueError(f"{engine_dir}: max_seq_len={longest} leaves no room for a prompt and a token")
        reports: list[PromptReport] = []
        for prompt in prompts:
            progress(f"prompt of {len(prompt)} tokens, {len(reports) + 1} of {len(prompts)}")
            reports.append(_compare(oracle, runner, prompt, min(NEW_TOKENS, longest - len(prompt))))
        layers: tuple[LayerReport, ...] = ()
        if isinstance(runner, TracingRunner):
            progress(f"{len(config.layers)} layers")
            layers = _compare_layers(oracle, runner, config, prompts[-1])
    return VerifyReport(config.architecture, tuple(reports), threshold, layers)


def _load_oracle(model_dir: Path) -> tuple[Any, str]:
    """The model in float32 and the dtype it is stored in."""
    import transformers

    if not (model_dir / "config.json").is_file():
        raise ValueError(f"{model_dir} is not a model folder: there is no config.json in it")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True)
        model, loading = _model_class(config).from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # transformers raises many kinds for one damaged folder
        raise ValueError(f"{model_dir}: transformers cannot load it: {str(error).strip().splitlines()[0]}") from None
    if loading["missing_keys"]:
        raise ValueError(f"{model_dir}: transformers finds no tensor for {sorted(loading['missing_keys'])[0]}")
    _restore_buffers(model, CheckpointReader(model_dir))
    return model.eval(), str(config.dtype or "float32").removeprefix("torch.")


def _model_class(config: Any) -> Any:
    """A vision-language model as a whole: its text model alone does not know whether the head is tied."""
    import transformers

    names = [name for name in config.architectures or [] if name.endswith("ForConditionalGeneration")]
    return getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM


def _restore_buffers(model: Any, reader: CheckpointReader) -> None:
    """Transformers initialises some buffers (Zaya's balancing biases) after it has loaded them."""
    for name, buffer in model.named_buffers():
        if name in reader.names and reader.shape(name) == tuple(buffer.shape):
            buffer.copy_(reader.read(name))


@torch.inference_mode()
def _oracle_logits(oracle: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = oracle(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()
    return logits


def _compare(oracle: Any, runner: Any, prompt: list[int], new_tokens: int) -> PromptReport:
    logits = full_logits(runner, prompt)
    if not np.isfinite(logits).all():
        return PromptReport(len(prompt), float("inf"), new_tokens, 0)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    (result,) = Engine(runner).generate([Request("verify", tuple(prompt), params)])
    if result.error and result.error.startswith(FloatingPointError.__name__):  # of a later token
        return PromptReport(len(prompt), float("inf"), new_tokens, 0)
    if result.error:
        raise ValueError(f"the engine failed on a prompt of {len(prompt)} tokens: {result.error}")
    expected = _oracle_logits(oracle, [*prompt, *result.token_ids])
    agree = agreeing_tokens(expected[len(prompt) - 1 : -1], result.token_ids)
    return PromptReport(len(prompt), relative_error(logits, expected[: len(prompt)]), len(result.token_ids), agree)


def _compare_layers(
    oracle: Any, runner: TracingRunner, config: ModelConfig, prompt: list[int]
) -> tuple[LayerReport, ...]:
    names = [("embedding", "", "")]
    names += [(str(i), layer.mixer_names(), layer.ffn_names()) for i, layer in enumerate(config.layers)]
    ours, theirs = our_stream(runner, prompt), oracle_stream(oracle, prompt, len(config.layers))
    return tuple(
        LayerReport(*name, relative_error(values, expected))
        for name, values, expected in zip(names, ours, theirs, strict=True)
    )


def relative_error(values: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference over the standard deviation of what was expected; infinite if not finite."""
    error = float(np.abs(values - expected).max() / expected.std())
    return error if np.isfinite(error) else float("inf")


def agreeing_tokens(expected: NDArray[np.float32], token_ids: Sequence[int]) -> int:
    """How many tokens from the start equal the oracle's greedy choice.

    `expected` `[n, vocab]` are the oracle's logits along the engine's own tokens. A token also counts as equal where
    the oracle's best logit exceeds it by less than `TIE` of the logits' standard deviation.
    """
    chosen = expected[np.arange(len(token_ids)), list(token_ids)]
    wrong = np.flatnonzero(expected.max(-1) - chosen > TIE * expected.std())
    return int(wrong[0]) if len(wrong) else len(token_ids)


def show(error: float) -> str:
    """An error as text."""
    return f"{error:.2e}" if np.isfinite(error) else "not finite"
