"""The command line: every command is a thin front of a function of the library."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hybridtrt
from hybridtrt.converters.config import DTYPES

Command = Callable[[argparse.Namespace], int]


class _AppendInput(argparse.Action):
    """Collects `--prompt` and `--input-ids` in the order they were given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        namespace.inputs = [*(namespace.inputs or []), (self.dest, values)]


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers separated by commas") from None


def _print_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, allow_nan=False))


def _generation(output: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(output).items() if name != "error" or value}


def convert(args: argparse.Namespace) -> int:
    """Convert a Hugging Face folder to a checkpoint."""
    from hybridtrt.converters.convert import convert
    from hybridtrt.converters.describe import describe, render
    from hybridtrt.progress import byte_progress

    with byte_progress("convert") as progress:
        config = convert(args.model_dir, args.output, args.dtype, progress)
    summary = describe(config)
    if args.json:
        _print_json(summary.to_dict())
    else:
        print(render(summary))
        print(f"checkpoint            {args.output}")
    return 0


def build(args: argparse.Namespace) -> int:
    """Build an engine from a checkpoint."""
    from hybridtrt.build.build import build, default_build_config
    from hybridtrt.progress import byte_progress

    asked = {name: getattr(args, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
    asked |= {"tokens_per_block": args.tokens_per_block, "target": args.target}
    limits = replace(
        default_build_config(args.checkpoint), **{name: value for name, value in asked.items() if value is not None}
    )
    with byte_progress("build") as progress:
        config = build(args.checkpoint, args.output, limits, progress)
    if args.json:
        _print_json(asdict(config.build))
    else:
        print(", ".join(f"{name} {value}" for name, value in asdict(config.build).items()))
        print(f"engine {args.output}")
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Show the layers, weights and caches of a model folder, a checkpoint or an engine."""
    from hybridtrt.build.inspect import inspect

    report = inspect(args.path)
    if args.json:
        _print_json(report.to_dict())
    else:
        print(report.render())
    return 0


def generate(args: argparse.Namespace) -> int:
    """Generate from one or more prompts in one in-flight batch."""
    from hybridtrt.runtime.generate import generate
    from hybridtrt.runtime.load import RuntimeOptions
    from hybridtrt.runtime.request import Output, SamplingParams

    if not args.inputs:
        raise ValueError("nothing to generate from: give --prompt TEXT or --input-ids 1,2,3, each as often as needed")
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop_words=tuple(args.stop_word),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
    )
    stream = len(args.inputs) == 1 and not args.json

    def show(output: Output) -> None:
        print(output.text, end="", flush=True)

    prompts = [value for _, value in args.inputs]
    outputs = generate(args.engine, prompts, params, RuntimeOptions(threads=args.threads), show if stream else None)
    if args.json:
        _print_json({"outputs": [_generation(output) for output in outputs]})
    for i, output in enumerate(outputs):
        if output.error:
            print(f"error: prompt {i}: {output.error}", file=sys.stderr)
        elif args.json:
            continue
        elif output.text is None:
            print(",".join(map(str, output.output_ids)))
        else:
            print("" if stream else f"[{i}] {output.text}")
    return 1 if any(output.error for output in outputs) else 0


def verify(args: argparse.Namespace) -> int:
    """Compare an engine with transformers' full forward."""
    from hybridtrt.runtime.verify import verify

    report = verify(args.model_dir, args.engine, args.threshold)
    totals = {
        "passed": report.passed,
        "logit_error": report.logit_error,
        "threshold": report.threshold,
        "greedy_tokens": report.greedy_tokens,
        "greedy_agree": report.greedy_agree,
    }
    if args.json:
        _print_json({**totals, "prompts": [asdict(prompt) for prompt in report.prompts]})
    else:
        print("prompt tokens  logit error / std  greedy tokens equal")
        for prompt in report.prompts:
            agree = f"{prompt.greedy_agree} of {prompt.greedy_tokens}"
            print(f"{prompt.prompt_tokens:13}  {prompt.logit_error:17.2e}  {agree:>19}")
        print(f"{'passed' if report.passed else 'FAILED'}: {report.logit_error:.2e} against {report.threshold:g}")
    return 0 if report.passed else 1


def bench(args: argparse.Namespace) -> int:
    """Measure prefill and decode throughput."""
    from hybridtrt.progress import count_progress
    from hybridtrt.runtime.bench import bench

    results = []
    with count_progress("bench", sum(args.batch) * args.new, "token") as advance:
        for result in bench(args.engine, args.batch, args.prompt, args.new, args.threads, advance):
            results.append(result)
            if not args.json:
                print(
                    f"batch {result.batch}, prompt {result.prompt}, new {result.new}: "
                    f"prefill {result.prefill_tokens_per_s:.1f} tokens/s, decode {result.decode_tokens_per_s:.1f} "
                    f"tokens/s, peak memory {result.peak_rss_mb:.0f} MB",
                    flush=True,
                )
    if args.json:
        _print_json({"results": [asdict(result) for result in results]})
    return 0


def serve(args: argparse.Namespace) -> int:
    """Serve an engine with Triton Inference Server on loopback."""
    from hybridtrt.model_repo.supervisor import serve

    return serve(
        args.engine,
        args.http_port,
        args.grpc_port,
        args.metrics_port,
        threads=args.threads,
        kv_cache_tokens=args.kv_cache_tokens,
    )


def make_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = argparse.ArgumentParser(prog="hybridtrt", description=hybridtrt.__doc__)
    parser.add_argument("--version", action="version", version=f"hybridtrt {hybridtrt.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(command: Command, help_json: bool = True) -> argparse.ArgumentParser:
        doc = (command.__doc__ or "").rstrip(".")
        name = command.__name__
        added = commands.add_parser(
            name, help=doc[0].lower() + doc[1:], description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        added.set_defaults(command=command)
        if help_json:
            added.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        return added

    one = add(convert)
    one.add_argument("model_dir", type=Path, help="folder with config.json and *.safetensors")
    one.add_argument("-o", "--output", type=Path, required=True, help="checkpoint folder to write")
    one.add_argument("--dtype", choices=DTYPES, help="how matrices are stored; by default as the model stores them")

    one = add(build)
    one.add_argument("checkpoint", type=Path, help="checkpoint folder")
    one.add_argument("-o", "--output", type=Path, required=True, help="engine folder to write")
    one.add_argument("--target", default="cpu", help="what the engine runs on: cpu")
    one.add_argument("--max-batch-size", type=int, help="sequences in one step (8)")
    one.add_argument("--max-num-tokens", type=int, help="tokens in one step, prefill and decode together (512)")
    one.add_argument(
        "--max-seq-len", type=int, help="prompt and output of one sequence (2048, or the model's positions)"
    )
    one.add_argument("--tokens-per-block", type=int, help="tokens in one KV page (32)")

    one = add(inspect)
    one.add_argument("path", type=Path, help="model folder, checkpoint or engine")

    one = add(generate)
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument("--prompt", action=_AppendInput, metavar="TEXT", help="a prompt; may be repeated")
    one.add_argument(
        "--input-ids", action=_AppendInput, type=_integers, metavar="1,2,3", help="a prompt as tokens; may be repeated"
    )
    one.add_argument("--max-tokens", type=int, default=32, help="tokens to generate at most")
    one.add_argument("--temperature", type=float, help="sampling temperature; greedy without sampling options")
    one.add_argument("--top-k", type=int, help="sample from the k best tokens")
    one.add_argument("--top-p", type=float, help="sample from the smallest set of tokens with this probability")
    one.add_argument("--seed", type=int, help="seed of the sampling; random without it")
    one.add_argument(
        "--stop-word", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    one.add_argument("--stop-token-id", action="append", type=int, default=[], metavar="ID", help="end at this token")
    one.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    one.add_argument("--threads", type=int, help="compute threads")
    one.set_defaults(inputs=None)

    one = add(verify)
    one.add_argument("model_dir", type=Path, help="the Hugging Face folder the engine came from")
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument(
        "--threshold", type=float, help="largest logit difference over their standard deviation; by default by dtype"
    )

    one = add(bench)
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument("--batch", type=_integers, default=[1], metavar="1,8", help="batch sizes")
    one.add_argument("--prompt", type=int, default=128, help="prompt tokens of each request")
    one.add_argument("--new", type=int, default=64, help="tokens to generate for each request")
    one.add_argument("--threads", type=int, help="compute threads")

    one = add(serve, help_json=False)
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument("--http-port", type=int, default=8000, help="HTTP port on loopback")
    one.add_argument("--grpc-port", type=int, default=8001, help="gRPC port on loopback")
    one.add_argument("--metrics-port", type=int, default=8002, help="metrics port on loopback")
    one.add_argument("--threads", type=int, help="compute threads")
    one.add_argument("--kv-cache-tokens", type=int, help="tokens in the KV pages; by default a full batch fits")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Bad input is one line on standard error and status 1; bad usage is status 2."""
    args = make_parser().parse_args(argv)
    try:
        status: int = args.command(args)
        return status
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
