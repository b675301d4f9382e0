"""What transformers makes of a row of logits: the processors of its `generate`, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig

from hybridtrt.runtime.request import Request


class _Model(GenerationMixin):
    config = PretrainedConfig()


def transformers_logits(
    request: Request, stop_ids: frozenset[int], output: Sequence[int], logits: NDArray[np.float32], sampled: bool
) -> NDArray[np.float32]:
    """The row after the request's processors, and after temperature, top-k, top-p and min-p when it is `sampled`."""
    params = request.params
    options: dict[str, Any] = {
        "repetition_penalty": float(params.repetition_penalty),
        "sequence_bias": [[[token], float(bias)] for token, bias in params.logit_bias] or None,
        "bad_words_ids": [list(word) for word in params.bad_token_ids] or None,
        "min_new_tokens": params.min_tokens,
    }
    if sampled:
        names = ("temperature", "top_k", "top_p", "min_p")
        options |= {"do_sample": True, "top_k": 0}
        options |= {name: getattr(params, name) for name in names if getattr(params, name) is not None}
    config = GenerationConfig(**options)
    config._eos_token_tensor = torch.tensor(sorted(stop_ids)) if stop_ids else None
    processors = _Model()._get_logits_processor(config, input_ids_seq_length=len(request.prompt_ids), device="cpu")
    history = torch.tensor([[*request.prompt_ids, *output]])
    return np.asarray(processors(history, torch.from_numpy(logits.copy())[None])[0].numpy())
