#!/usr/bin/env python3
"""The whole way in one go, in `quickstart-out/`; every step is printed as the command that does the same."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import torch
import transformers
from make_checkpoint import FAMILIES, make_checkpoint
from safetensors.torch import load_file

from hybridtrt import cli
from hybridtrt.model_repo.clients import GrpcClient, http_generate
from hybridtrt.model_repo.supervisor import ServeOptions, Server
from hybridtrt.runtime.verify import agreeing_tokens

DEMO = Path(__file__).resolve().parent.parent / "models/demo-gated-delta"  # docs/demo-models.md
PROMPT = "She was not at all surprised to hear"
NEW = 48
STREAMS = 8


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def command(*args: str | Path) -> None:
    """Run one command of the command line, shown as it would be typed."""
    words = [str(arg) for arg in args]
    print("$ hybridtrt", " ".join(words), flush=True)
    if cli.main(words) != 0:
        raise SystemExit(f"quickstart: hybridtrt {words[0]} failed")


@torch.inference_mode()
def check_tokens(model_dir: Path, tokens: list[int]) -> None:
    """End unless the tokens are transformers' greedy tokens after the prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompt = transformers.AutoTokenizer.from_pretrained(model_dir)(PROMPT)["input_ids"]
    expected = list(prompt)
    for _ in tokens:
        expected.append(int(model(input_ids=torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
    print("transformers:", expected[len(prompt) :])
    print("served:      ", tokens)
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].numpy()
    if agreeing_tokens(logits[len(prompt) - 1 : -1], tokens) != len(tokens):
        raise SystemExit("quickstart: the tokens differ")
    print(f"equal: {len(tokens)} greedy tokens")


def ask(server: Server, model_dir: Path) -> None:
    """One request over HTTP, one stream over gRPC, then several streams at once."""
    fields = {"text_input": PROMPT, "max_tokens": NEW}
    say("HTTP: POST /v2/models/ensemble/generate")
    answer = http_generate(server.http_url, "ensemble", fields)["text_output"]
    print(repr(answer))
    with GrpcClient(server.grpc_url) as client:
        say("gRPC: a stream of the model ensemble")
        pieces = []
        for response in client.stream("ensemble", {**fields, "stream": True}):
            pieces.append(response["text_output"].flatten()[0].decode())
            print(pieces[-1], end="", flush=True)
        print()
        if "".join(pieces) != answer:
            raise SystemExit("quickstart: the streamed text differs from the text over HTTP")
        say("gRPC: a stream of token ids from the model tensorrt_llm, against transformers")
        prompt = transformers.AutoTokenizer.from_pretrained(model_dir)(PROMPT)["input_ids"]
        token_fields = {"input_ids": prompt, "request_output_len": NEW, "streaming": True}
        tokens = [
            int(token)
            for response in client.stream("tensorrt_llm", token_fields)
            for token in response["output_ids"].flatten()
        ]
        check_tokens(model_dir, tokens)
    say(f"throughput of {STREAMS} gRPC streams at once")

    def stream(_: int) -> int:
        with GrpcClient(server.grpc_url) as client:
            return sum(response["output_ids"].size for response in client.stream("tensorrt_llm", token_fields))

    started = perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        total = sum(pool.map(stream, range(STREAMS)))
    print(f"{total} tokens, {total / (perf_counter() - started):.0f} tokens/s over the network")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=sorted(FAMILIES), help="random weights of this family, not the demo model")
    parser.add_argument("--output", type=Path, default=Path("quickstart-out"), help="folder for everything it makes")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, checkpoint, engine = (args.output / name for name in ("model", "checkpoint", "engine"))

    if args.family is None:
        model = DEMO
        say("a hybrid model that writes English: gated delta rule, attention and experts")
        parameters = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
        print(f"{model}: {parameters:,} parameters")
    else:
        say(f"a hybrid checkpoint with random weights ({args.family})")
        print(f"{model}: {make_checkpoint(model, args.family):,} parameters")
    say("convert, build, measure")
    command("convert", model, "-o", checkpoint)
    command("build", checkpoint, "-o", engine)
    command("bench", engine, "--batch", "1,8", "--prompt", "64", "--new", "32")
    say("serve (on free ports; hybridtrt serve takes 8000, 8001 and 8002)")
    options = ServeOptions(engine, http_port=0, grpc_port=0, metrics_port=0)
    with Server(options, lambda line: print(line, flush=True)) as server:
        ask(server, model)
        say("stopping the server")
    say(f"done; serve it yourself: .venv/bin/hybridtrt serve {engine}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
