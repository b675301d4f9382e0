"""Compares an engine with transformers' full forward on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridtrt.build.engine import read_engine_config
from hybridtrt.runtime.engine import Engine
from hybridtrt.runtime.forward import full_logits
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import Request, SamplingParams

PROMPT_LENGTHS = (1, 2, 7, 64, 65, 200)
NEW_TOKENS = 32
TIE = 1e-3  # of the logits' standard deviation: closer than this, the two best tokens count as equal
# Largest logit difference over the logits' standard deviation. Stored in less than float32, weights differ from the
# model's by their rounding, and a router near a tie may choose another expert.
THRESHOLDS = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 0.3}


@dataclass(frozen=True)
class PromptReport:
    """One fixed prompt: logits of the prompt, and greedy tokens after it."""

    prompt_tokens: int
    logit_error: float  # largest difference over the standard deviation of transformers' logits
    greedy_tokens: int
    greedy_agree: int  # tokens from the start until the first real difference


@dataclass(frozen=True)
class VerifyReport:
    """All prompts against a threshold."""

    prompts: tuple[PromptReport, ...]
    threshold: float

    @property
    def logit_error(self) -> float:
        return max(report.logit_error for report in self.prompts)

    @property
    def greedy_tokens(self) -> int:
        return sum(report.greedy_tokens for report in self.prompts)

    @property
    def greedy_agree(self) -> int:
        return sum(report.greedy_agree for report in self.prompts)

    @property
    def passed(self) -> bool:
        """Logits within the threshold and, where that is tight, every greedy token equal."""
        exact = self.threshold <= THRESHOLDS["float32"]
        return self.logit_error <= self.threshold and (not exact or self.greedy_agree == self.greedy_tokens)


def verify(model_dir: str | Path, engine_dir: str | Path, threshold: float | None = None) -> VerifyReport:
    """Run fixed prompts of random tokens through both.

    The default threshold is that of the engine's dtype, or of float32 if the engine stores the model's own dtype.
    Raises `ValueError` if the two do not belong together or the model cannot be loaded.
    """
    engine_dir = Path(engine_dir)
    config = read_engine_config(engine_dir).model
    oracle, stored = _load_oracle(Path(model_dir))
    if oracle.config.vocab_size != config.vocab_size:
        raise ValueError(f"{model_dir} has {oracle.config.vocab_size} tokens, {engine_dir} has {config.vocab_size}")
    if threshold is None:
        threshold = THRESHOLDS["float32" if stored == config.dtype else config.dtype]
    runner = load_runner(engine_dir, RuntimeOptions())
    rng = np.random.default_rng(0)
    reports = []
    for length in PROMPT_LENGTHS:
        room = runner.info.max_seq_len - length
        if room >= 1:
            prompt = rng.integers(0, config.vocab_size, length).tolist()
            reports.append(_compare(oracle, runner, prompt, min(NEW_TOKENS, room)))
    return VerifyReport(tuple(reports), threshold)


def _load_oracle(model_dir: Path) -> tuple[Any, str]:
    """The model in float32 and the dtype it is stored in."""
    import transformers

    if not (model_dir / "config.json").is_file():
        raise ValueError(f"{model_dir} is not a model folder: there is no config.json in it")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # transformers raises many kinds for one damaged folder
        raise ValueError(f"{model_dir}: transformers cannot load it: {str(error).strip().splitlines()[0]}") from None
    return model.eval(), str(config.dtype or "float32").removeprefix("torch.")


@torch.inference_mode()
def _oracle_logits(oracle: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = oracle(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()
    return logits


def _compare(oracle: Any, runner: Any, prompt: list[int], new_tokens: int) -> PromptReport:
    logits = full_logits(runner, prompt)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    (result,) = Engine(runner).generate([Request("verify", tuple(prompt), params)])
    if result.error:
        raise ValueError(f"the engine failed on a prompt of {len(prompt)} tokens: {result.error}")
    expected = _oracle_logits(oracle, [*prompt, *result.token_ids])
    error = np.abs(logits - expected[: len(prompt)]).max() / expected[: len(prompt)].std()
    agree = agreeing_tokens(expected[len(prompt) - 1 : -1], result.token_ids)
    return PromptReport(len(prompt), float(error), len(result.token_ids), agree)


def agreeing_tokens(expected: NDArray[np.float32], token_ids: Sequence[int]) -> int:
    """How many tokens from the start equal the oracle's greedy choice.

    `expected` `[n, vocab]` are the oracle's logits along the engine's own tokens. A token also counts as equal where
    the oracle's best logit exceeds it by less than `TIE` of the logits' standard deviation.
    """
    chosen = expected[np.arange(len(token_ids)), list(token_ids)]
    wrong = np.flatnonzero(expected.max(-1) - chosen > TIE * expected.std())
    return int(wrong[0]) if len(wrong) else len(token_ids)
