#!/usr/bin/env python3
"""n-gram speculation where the text repeats and where nothing does, against plain decoding.

A random model does not copy, so this one is made to: the outputs of its mixers and experts are zeros, and its head
answers each token with the next one of a cycle. It computes all that any model of its size does. With cycles of 64
tokens a prompt of one cycle is repeated for ever, as in a copying task; in one cycle of the whole vocabulary nothing
comes twice. The misleading prompt has the answer in it, but with every fourth token wrong: the worst for drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from harness import VOCAB, in_turn, parser, random_engine, report, timer
from numpy.typing import NDArray

from hybridtrt.build.engine import BuildConfig
from hybridtrt.runtime.engine import Engine, EngineOptions
from hybridtrt.runtime.load import RuntimeOptions, load_runner
from hybridtrt.runtime.request import Request, SamplingParams
from hybridtrt.runtime.runner import Runner

LIMITS = BuildConfig(max_batch_size=8, max_num_tokens=512, max_seq_len=512)
COPIED, NEW = 64, 192
OUTPUT_WEIGHTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")  # the last: experts together


@dataclass(frozen=True)
class Task:
    """A text in cycles of some length, with the answer in the prompt, every fourth token of it wrong, if so asked."""

    cycle: int
    misleading: bool = False


TASKS = {"copying": Task(COPIED), "nothing repeats": Task(VOCAB), "misleading": Task(VOCAB, misleading=True)}


def main() -> int:
    """Print steps and speed by task and the ratios that are aimed at."""
    one = parser(__doc__)
    one.add_argument("--drafts", type=int, default=7, help="draft tokens a step at most (7)")
    one.add_argument("--batch", type=int, default=1, help="sequences at once (1)")
    one.set_defaults(repeats=25)
    args = one.parse_args()
    options = RuntimeOptions(threads=args.threads, max_draft_tokens=args.drafts, enable_block_reuse=False)
    figures: dict[str, dict[str, float]] = {}
    for name, task in TASKS.items():
        with random_engine(LIMITS, change=partial(answer_with, following=next_tokens(task.cycle))) as engine_dir:
            runner = load_runner(engine_dir, options)
            run = partial(decode, runner, task, args.batch, timer(args.threads))
            figures |= in_turn(
                {f"{name}, plain": partial(run, drafts=0), f"{name}, drafts": partial(run, drafts=args.drafts)},
                args.repeats,
            )
            runner.close()
    speed = {name: figures[f"{name}, drafts"]["tokens/s"] / figures[f"{name}, plain"]["tokens/s"] for name in TASKS}
    ratios = {
        "steps a token, copying (at most 0.5)": figures["copying, drafts"]["steps a token"],
        "speed, copying, drafts over plain": speed["copying"],
        "speed, nothing repeats, drafts over plain (at least 0.95)": speed["nothing repeats"],
        "speed, misleading, drafts over plain": speed["misleading"],
    }
    report(args, figures, ratios, batch=args.batch, max_draft_tokens=args.drafts)
    return 0


def shuffled() -> NDArray[np.int64]:
    """All tokens in a random order."""
    return np.random.default_rng(0).permutation(VOCAB)


def next_tokens(cycle: int) -> NDArray[np.int64]:
    """The token after each token `[VOCAB]`, in random cycles of this length."""
    cycles = shuffled().reshape(-1, cycle)
    following = np.empty(VOCAB, np.int64)
    following[cycles] = np.roll(cycles, -1, axis=1)
    return following


def walk(following: NDArray[np.int64], token: int, count: int) -> list[int]:
    """A token and those after it."""
    tokens = [token]
    while len(tokens) < count:
        tokens.append(int(following[tokens[-1]]))
    return tokens


def answer_with(model: Any, following: NDArray[np.int64]) -> None:
    """Make the model's best token after `t` be `following[t]`, whatever came before."""
    for name, weight in model.named_parameters():
        if name.endswith(OUTPUT_WEIGHTS):
            weight.data.zero_()
    model.lm_head.weight.data[following] = model.model.embed_tokens.weight.data.normal_()


def decode(runner: Runner, task: Task, batch: int, now: Callable[[], float], drafts: int) -> dict[str, float]:
    """Steps a token of one sequence and tokens a second of all, without prefill.

    Raises `RuntimeError` if an answer is not the one that the model must give.
    """
    engine = Engine(runner, options=EngineOptions(enable_block_reuse=False, max_draft_tokens=drafts))
    following = next_tokens(task.cycle)
    expected: dict[str, list[int]] = {}
    for i, first in enumerate(shuffled()[: batch * (COPIED + NEW) : COPIED + NEW]):  # texts have nothing in common
        text = walk(following, int(first), COPIED + NEW)
        prompt, expected[str(i)] = text[:COPIED], text[COPIED:]
        if task.misleading:
            wrong = [token if place % 4 else prompt[0] for place, token in enumerate(text[COPIED:], start=1)]
            prompt = [*wrong, *prompt]
        engine.submit(Request(str(i), tuple(prompt), SamplingParams(max_tokens=NEW, ignore_eos=True)))
    answers: dict[str, list[int]] = {name: [] for name in expected}
    while not all(answers.values()):
        collect(engine, answers)
    before, steps, started = sum(map(len, answers.values())), 0, now()
    while engine.has_work:
        collect(engine, answers)
        steps += 1
    seconds = now() - started
    if answers != expected:
        raise RuntimeError("an answer is not the one that the model must give")
    tokens = sum(map(len, answers.values())) - before
    return {"steps a token": steps * batch / tokens, "tokens/s": tokens / seconds}


def collect(engine: Engine, answers: dict[str, list[int]]) -> None:
    """One step; its tokens go to their answers."""
    for output in engine.step():
        answers[output.request_id] += output.token_ids


if __name__ == "__main__":
    sys.exit(main())
