"""Options of a command that generates: how it samples."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from hybridtrt.runtime.request import SamplingParams


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options that are named as the fields of `SamplingParams`."""
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--max-tokens", type=int, default=32, help="tokens to generate at most")
    add("--min-tokens", type=int, help="neither end token nor stop word before so many tokens; a guide may end earlier")
    add("--temperature", type=float, help="sampling temperature; greedy without sampling options")
    add("--top-k", type=int, help="sample from the k best tokens")
    add("--top-p", type=float, help="sample from the smallest set of tokens with this probability")
    add("--min-p", type=float, help="sample from tokens with this part of the best one's probability")
    add("--repetition-penalty", type=float, help="makes tokens that are there already less likely; 1: none")
    add("--presence-penalty", type=float, help="of every generated token, once; 0: none")
    add("--frequency-penalty", type=float, help="of every generated token, for each time; 0: none")
    add("--logit-bias", action="append", type=_bias, metavar="ID:VALUE", help="add to a token's logit; repeatable")
    add("--bad-word", dest="bad_words", action="append", metavar="TEXT", help="never generate this text; repeatable")
    add("--seed", type=int, help="seed of the sampling; random without it")
    add("--n", type=int, help="answers to each prompt (1); without sampling they are equal")
    add("--stop-word", dest="stop_words", action="append", metavar="TEXT", help="end before this text; repeatable")
    add("--stop-token-id", dest="stop_token_ids", action="append", type=int, metavar="ID", help="end at this token")
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    add("--log-probs", dest="return_log_probs", action="store_true", help="of the generated tokens, with --json")
    add("--top-log-probs", type=int, metavar="K", help="of the K best tokens at each place, with --json")
    add("--prompt-log-probs", type=int, metavar="K", help="of the prompt's tokens and the K best ones, with --json")
    guide = partial(parser.add_mutually_exclusive_group().add_argument, default=argparse.SUPPRESS)
    guide("--json-schema", metavar="FILE|TEXT", help="answer with JSON that fits this schema")
    guide("--regex", metavar="TEXT", help="answer with text that matches this expression (Rust syntax, no look-around)")
    guide("--grammar", metavar="FILE|TEXT", help="answer with text of this grammar")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the options ask for. Raises `ValueError` for a file that cannot be read."""
    names = {field.name for field in fields(SamplingParams)}
    given = {name: value for name, value in vars(args).items() if name in names}
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if "regex" in args:
        values |= {"guide_type": "regex", "guide": args.regex}
    for option, guide_type in (("json_schema", "json_schema"), ("grammar", "ebnf_grammar")):
        if option in args:
            values |= {"guide_type": guide_type, "guide": _read(option, getattr(args, option))}
    return SamplingParams(**values)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number with a colon between") from None


def _read(option: str, text: str) -> str:
    """The text itself if it looks like a schema or a grammar, or else the content of the file of this name."""
    if "\n" in text or text.lstrip().startswith("{") or ":" in text:
        return text
    try:
        return Path(text).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}={text!r} is no file that can be read: {error}") from None
