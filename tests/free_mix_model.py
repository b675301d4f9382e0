"""`hybridtrt_free_mix` by the plain definitions of `plain_layers.py`, registered with transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from plain_layers import Attention, GatedDelta, LengthRouted, LowRank, Mamba1, Mamba2, Mlp, Moe, Norm, linear
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput


class FreeMixConfig(transformers.PreTrainedConfig):
    model_type = "hybridtrt_free_mix"


MIXERS: dict[str, Any] = {"gated_delta": GatedDelta, "mamba1": Mamba1, "mamba2": Mamba2}
HEADS: dict[str, Any] = {"attention": Attention, "length_routed": LengthRouted}
FFNS: dict[str, Any] = {"mlp": Mlp, "moe": Moe}


class Layer(nn.Module):
    """Branches by their kind; the first of a block holds the block's norm. From `[1, T, hidden]` to the same."""

    def __init__(self, config: FreeMixConfig, entry: dict[str, Any]) -> None:
        super().__init__()
        self.blocks: list[list[str]] = []
        ropes = getattr(config, "ropes", [])
        for options in (entry.get("mixer"), entry.get("ffn")):
            if options is None:
                continue
            kind = options["kind"]
            if kind in HEADS:
                branch = HEADS[kind](config.hidden_size, options, ropes)
            elif kind == "low_rank":
                branch = LowRank(config.hidden_size, options, ropes, config.max_position_embeddings)
            else:
                branch = (MIXERS | FFNS)[kind](config.hidden_size, options)
            self.add_module(kind, branch)
            if self.blocks and entry.get("parallel"):
                self.blocks[0].append(kind)
            else:
                self.blocks.append([kind])
                branch.pre_norm = Norm(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x.squeeze(0)
        for kinds in self.blocks:
            normed = self.get_submodule(kinds[0]).pre_norm(x)
            x = x + sum(self.get_submodule(kind)(normed) for kind in kinds)
        return x.unsqueeze(0)


def written_out(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The list of layers without groups and repeats."""
    return [
        layer
        for entry in entries
        for _ in range(entry.get("repeat", 1))
        for layer in (written_out(entry["layers"]) if "layers" in entry else [entry])
    ]


class FreeMixModel(transformers.PreTrainedModel):
    config_class = FreeMixConfig
    _tied_weights_keys = {"lm_head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self, config: FreeMixConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, entry) for entry in written_out(config.layers))
        self.final_norm = Norm(config.hidden_size)
        self.lm_head = linear(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutput:
        rows = []
        for ids in input_ids.split(1):
            x = self.embedding(ids) * getattr(self.config, "embedding_multiplier", 1.0)
            for layer in self.layers:
                x = layer(x)
            rows.append(self.lm_head(self.final_norm(x)))
        return CausalLMOutput(logits=torch.cat(rows))


transformers.AutoConfig.register("hybridtrt_free_mix", FreeMixConfig)
transformers.AutoModelForCausalLM.register(FreeMixConfig, FreeMixModel)
