"""Training: AdamW with warm-up and a cosine, windows in a seeded order, and a state from which a run goes on."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demo.gated_delta import fast_gated_delta
from demo.models import CONTEXT, Recipe

WARM_UP = 100
LAST_RATE = 0.02  # of the peak
LOG_EVERY, TEST_EVERY, SAVE_EVERY = 20, 500, 100
TEST_WINDOWS = 32  # of the held-out windows, those that are tested along the way
SEED = 0


@dataclass(frozen=True)
class Limits:
    """`seconds` None: until all steps are done."""

    threads: int = 1
    seconds: float | None = None


def train(model: Any, recipe: Recipe, tokens: Tensor, held_out: Tensor, state: Path, limits: Limits) -> bool:
    """Train in place, from `state` if that file exists. False if time ran out; `state` then has the steps done.

    `tokens` and `held_out` are the ids of the two texts. The same arguments give the same weights, on one machine.
    """
    torch.set_num_threads(limits.threads)
    decayed = [value for value in model.parameters() if value.ndim > 1]
    plain = [value for value in model.parameters() if value.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=True)
    first = 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        _log(f"going on after step {first} ({state})")
    per_step = recipe.batch * CONTEXT
    started, losses = time.monotonic(), []
    model.train()
    for step in range(first, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_rate * rate(step, recipe.steps)
        ids = batch(tokens, step, recipe.batch)
        with fast_gated_delta():
            output = model(input_ids=ids[:, :-1], use_cache=False, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss + model.config.router_aux_loss_coef * output.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        done, elapsed = step + 1, time.monotonic() - started
        if done % LOG_EVERY == 0 or done == recipe.steps:
            speed = (done - first) * per_step / elapsed
            left = (recipe.steps - done) * per_step / speed / 60
            mean = sum(losses) / len(losses)
            _log(f"step {done} of {recipe.steps}, loss {mean:.3f}, {speed:.0f} tokens/s, {left:.0f} min left")
            losses.clear()
        if done % TEST_EVERY == 0:
            _log(f"step {done}: held-out perplexity {perplexity(model, held_out, TEST_WINDOWS):.2f}")
        over = limits.seconds is not None and elapsed > limits.seconds
        if done % SAVE_EVERY == 0 or done == recipe.steps or over:
            _save(state, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done})
        if over and done < recipe.steps:
            return False
    return True


def rate(step: int, steps: int) -> float:
    """The learning rate over its peak."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    part = (step - WARM_UP) / max(steps - WARM_UP, 1)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * part))


def batch(tokens: Tensor, step: int, size: int) -> Tensor:
    """The windows `[size, CONTEXT + 1]` of a step; each pass over the text cuts it elsewhere and shuffles it anew."""
    windows = (len(tokens) - CONTEXT - 1) // CONTEXT  # whatever the offset
    rows = []
    for index in range(step * size, (step + 1) * size):
        generator = torch.Generator().manual_seed(SEED + 1000 * (index // windows))
        offset = int(torch.randint(CONTEXT, (1,), generator=generator))
        window = int(torch.randperm(windows, generator=generator)[index % windows])
        start = offset + window * CONTEXT
        rows.append(tokens[start : start + CONTEXT + 1])
    return torch.stack(rows)


@torch.inference_mode()
def perplexity(model: Any, tokens: Tensor, windows: int | None = None) -> float:
    """Of windows of `CONTEXT` tokens, each by itself, every token after the first of a window scored."""
    model.eval()
    total, count = 0.0, 0
    for ids in list(tokens.split(CONTEXT))[:windows]:
        if len(ids) > 1:
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
            total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
            count += len(ids) - 1
    model.train()
    return math.exp(total / count)


def _save(path: Path, saved: dict[str, Any]) -> None:
    """Never leaves half a file."""
    new = path.with_suffix(".new")
    torch.save(saved, new)
    new.replace(path)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
