"""Writes a trained model in Hugging Face form, with the held-out text and a page about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from demo.models import CONTEXT, Recipe
from demo.text import BLOCK, EVERY, PACKAGE, SHA256, VERSION
from demo.training import perplexity

PROMPT = "She was not at all surprised"
HELD_OUT = "held_out.txt"


def write_model(folder: Path, model: Any, recipe: Recipe, tokenizer: Any, held_out: str) -> None:
    """The weights are stored in bfloat16; the perplexity on the page is that of the stored weights, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / HELD_OUT).write_text(held_out, encoding="utf-8")
    stored = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor(tokenizer.encode(held_out))
    torch.manual_seed(0)
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    sample = stored.generate(prompt, max_new_tokens=120, do_sample=True, temperature=0.7, top_k=40)
    page = render(
        folder.name,
        stored,
        recipe,
        perplexity(stored, tokens),
        len(tokens),
        tokenizer.decode(sample[0], skip_special_tokens=True),
    )
    (folder / "README.md").write_text(page, encoding="utf-8")


def render(name: str, model: Any, recipe: Recipe, held_out: float, tokens: int, sample: str) -> str:
    """The page."""
    parameters = sum(value.numel() for value in model.parameters())
    quoted = "\n".join(f"> {line}  " for line in sample.strip().splitlines())
    return f"""# {name}

A small hybrid language model for trying out and testing hybridtrt: {parameters:,} parameters, {recipe.mixers};
stored in bfloat16, `{model.config.model_type}` of transformers. Written by `./scripts/train_demo.py {name}`:
{recipe.steps} steps of {recipe.batch} windows of {CONTEXT} tokens.

* Text: Jane Austen's six novels, in the public domain, as Debian's package {PACKAGE} {VERSION} ships them; sha256
  of the package: {SHA256}.
* Held out: one block of about {BLOCK} characters in {EVERY}, together `{HELD_OUT}`, {tokens} tokens.
* Held-out perplexity, in windows of {CONTEXT} tokens: {held_out:.2f} a token.
* Licence: weights, tokenizer and this page are Apache-2.0, as the rest of the repository.

It knows nothing but those novels, and writes their English without much sense. At temperature 0.7, top-k 40:

{quoted}
"""
