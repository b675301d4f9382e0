#!/usr/bin/env python3
"""Trains a demo model that writes English: `train_demo.py [NAME]`. Goes on where an earlier run stopped.

Needs `apt-get` and `dpkg-deb` for the text, and the packages that hybridtrt itself needs. docs/demo-models.md has more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import transformers
from demo.models import recipes, train_tokenizer
from demo.page import write_model
from demo.text import fetch, novels, split
from demo.training import SEED, Limits, train

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Fetch, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("name", nargs="?", default=next(iter(recipes())), choices=recipes(), help="which model")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "models", help="folder of the models")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache/demo", help="folder of downloads and states")
    parser.add_argument("--threads", type=int, default=1, help="another number rounds differently")
    parser.add_argument("--minutes", type=float, help="stop after this time; the next run goes on")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    recipe = recipes()[args.name]
    try:
        texts = novels(fetch(args.work), args.work / "package")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text, held_out = split(texts)
    tokenizer = train_tokenizer(text)
    tokens, tested = (torch.tensor(tokenizer.encode(part)) for part in (text, held_out))
    print(f"{len(tokens)} tokens to train on, {len(tested)} held out", file=sys.stderr)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(recipe.config, dtype=torch.float32)
    limits = Limits(args.threads, None if args.minutes is None else 60 * args.minutes)
    if not train(model, recipe, tokens, tested, args.work / f"{args.name}.pt", limits):
        print("out of time; run again to go on", file=sys.stderr)
        return 2
    write_model(args.output / args.name, model, recipe, tokenizer, held_out)
    print(args.output / args.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
