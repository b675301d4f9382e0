"""The command line: options of every command."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hybridtrt
from hybridtrt import commands
from hybridtrt.converters.config import DTYPES
from hybridtrt.runtime.run_options import RunOptions
from hybridtrt.sampling_options import add_sampling_options

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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def make_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = argparse.ArgumentParser(prog="hybridtrt", description=hybridtrt.__doc__)
    parser.add_argument("--version", action="version", version=f"hybridtrt {hybridtrt.__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(command: Command, help_json: bool = True) -> argparse.ArgumentParser:
        doc = (command.__doc__ or "").rstrip(".")
        name = command.__name__
        added = subparsers.add_parser(
            name, help=doc[0].lower() + doc[1:], description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        added.set_defaults(command=command)
        if help_json:
            added.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        return added

    one = add(commands.convert)
    one.add_argument("model_dir", type=Path, help="folder with config.json and *.safetensors")
    one.add_argument("-o", "--output", type=Path, help="checkpoint folder to write")
    one.add_argument("--dtype", choices=DTYPES, help="how matrices are stored; by default as the model stores them")
    one.add_argument("--dry-run", action="store_true", help="show layers and the source of every weight, write nothing")

    one = add(commands.plan)
    one.add_argument("model_dir", type=Path, help="folder with config.json; the weights are not needed")
    one.add_argument("--gpus", type=int, required=True, help="number of GPUs")
    one.add_argument("--gpu-memory", type=float, default=80.0, help="memory of one GPU in GB (10^9 bytes)")
    one.add_argument("--dtype", choices=DTYPES, help="of matrices and KV; by default as the model stores them")
    one.add_argument("--kv-cache-dtype", choices=DTYPES, help="of KV alone; by default as the matrices")
    one.add_argument("--state-dtype", choices=DTYPES, default="float32", help="of recurrent states")
    one.add_argument("--max-seq-len", type=int, help="tokens of one sequence (8192, or the model's positions)")
    one.add_argument("--concurrency", type=int, default=16, help="sequences at once")
    one.add_argument("--max-num-tokens", type=int, default=8192, help="tokens in one step")

    one = add(commands.build)
    one.add_argument("checkpoint", type=Path, help="checkpoint folder")
    one.add_argument("-o", "--output", type=Path, required=True, help="engine folder to write")
    one.add_argument(
        "--target",
        default="cpu",
        help="what the engine runs on: cpu (default), tensorrt-rtx (is built without a GPU) or tensorrt",
    )
    one.add_argument(
        "--compute-capability",
        dest="compute_capabilities",
        type=int,
        action="append",
        metavar="N",
        help="GPUs that an engine for TensorRT is for, such as 89 for 8.9; may be repeated (all that the target knows)",
    )
    one.add_argument(
        "--activations",
        help="dtype that a GPU computes in: bfloat16 (default) or float16; of what a CPU multiplies bfloat16 matrices "
        "by: float32 (default) or bfloat16",
    )
    one.add_argument(
        "--weights-as-inputs",
        action="store_true",
        default=None,
        help="keep the weights out of an engine for TensorRT; they are read from the checkpoint when it is loaded",
    )
    one.add_argument("--max-batch-size", type=int, help="sequences in one step (8)")
    one.add_argument("--max-num-tokens", type=int, help="tokens in one step, prefill and decode together (512)")
    one.add_argument(
        "--max-seq-len", type=int, help="prompt and output of one sequence (2048, or the model's positions)"
    )
    one.add_argument("--tokens-per-block", type=int, help="tokens in one KV page (32)")
    one.add_argument(
        "--state-dtype", help="of recurrent states: float32 (default), bfloat16, or float16 with a warning"
    )
    one.add_argument(
        "--kv-cache-dtype", help="of KV pages: float32 (default; on a GPU as the activations), bfloat16 or float16"
    )
    one.add_argument(
        "--weights", help="of matrices: float32, bfloat16, int8, int4 or, on a GPU, fp8; by default as the checkpoint's"
    )
    one.add_argument(
        "--group-size",
        type=int,
        help="weights that share a scale: 32 (default), 64 or 128 with int4; 0 "
        "(default: all of an output), 32, 64 or 128 with int8",
    )
    one.add_argument(
        "--exclude",
        action="append",
        metavar="PATTERN",
        help="matrices that stay as the checkpoint has them, such as lm_head.weight or layers.0.*; may be repeated",
    )
    one.add_argument(
        "--moe-capacity-factor",
        type=float,
        help="an expert takes this times tokens * top_k / experts in a step, and results depend on the batch; "
        "by default it takes all",
    )
    one.add_argument(
        "--moe-overflow", help="what becomes of the others: drop (default) or next_best, the next expert with room"
    )
    one.add_argument(
        "--tune",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure on this machine which kernels are the fastest, with as many threads as a run takes",
    )
    one.add_argument("--tune-seconds", type=_seconds, default=10.0, help="time for it, about")
    one.add_argument(
        "--timing-cache", type=Path, metavar="FILE", help="what was measured before (hybridtrt/timing.json of the user)"
    )

    one = add(commands.inspect)
    one.add_argument("path", type=Path, help="model folder, checkpoint or engine")

    one = add(commands.generate)
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument("--prompt", action=_AppendInput, metavar="TEXT", help="a prompt; may be repeated")
    one.add_argument(
        "--input-ids", action=_AppendInput, type=_integers, metavar="1,2,3", help="a prompt as tokens; may be repeated"
    )
    add_sampling_options(one)
    RunOptions.add_arguments(one)
    one.set_defaults(inputs=None)

    one = add(commands.verify)
    one.add_argument("model_dir", type=Path, help="the Hugging Face folder the engine came from")
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument(
        "--threshold", type=float, help="largest logit difference over their standard deviation; by default by dtype"
    )
    one.add_argument("--report", type=Path, metavar="FILE.html", help="page to write, with the error by layer")

    one = add(commands.eval)
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument("--text", type=Path, required=True, metavar="FILE", help="a text in UTF-8")
    one.add_argument("--context", type=int, help="tokens of a window, each scored by itself; by default max_seq_len")
    one.add_argument("--chunk", type=int, help="tokens of a step; 1 reads all from the caches (max_num_tokens)")
    one.add_argument("--threads", type=int, help="compute threads")

    one = add(commands.routing)
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument("--text", type=Path, required=True, metavar="FILE", help="a text in UTF-8")
    one.add_argument("--context", type=int, help="tokens of a window, each run by itself; by default max_seq_len")
    one.add_argument("--chunk", type=int, help="tokens of a step, over which experts may overflow (max_num_tokens)")
    one.add_argument(
        "--html", type=Path, metavar="FILE.html", help="page to write, with a heat map of layers and experts"
    )
    one.add_argument("--threads", type=int, help="compute threads")

    one = add(commands.bench)
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument("--batch", type=_integers, default=[1], metavar="1,8", help="batch sizes")
    one.add_argument("--prompt", type=int, default=128, help="prompt tokens of each request")
    one.add_argument("--new", type=int, default=64, help="tokens to generate for each request")
    one.add_argument("--threads", type=int, help="compute threads")
    one.add_argument("--profile", action="store_true", help="show the time of each layer kind and operator")

    one = add(commands.profile)
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument("--requests", type=int, default=100, help="requests of the sample load")
    one.add_argument(
        "--ranges",
        type=_integers,
        metavar="64,128",
        help="shortest prompt + max_tokens of each range, a power of two; by default all from 32 that fit",
    )
    one.add_argument("--seed", type=int, default=0, help="seed of lengths, tokens and sampling")
    one.add_argument("--threads", type=int, help="compute threads")

    one = add(commands.serve, help_json=False)
    one.add_argument("engine", type=Path, help="engine folder")
    one.add_argument("--http-port", type=int, default=8000, help="HTTP port on loopback")
    one.add_argument("--grpc-port", type=int, default=8001, help="gRPC port on loopback")
    one.add_argument("--metrics-port", type=int, default=8002, help="metrics port on loopback")
    one.add_argument("--state-dir", type=Path, help="folder for socket and logs; by default one a user and HTTP port")
    one.add_argument("--drain-seconds", type=float, default=5.0, help="how long requests may go on after SIGTERM")
    RunOptions.add_arguments(one)
    return parser


@contextmanager
def _cleaning_up_on_sigterm(wanted: bool) -> Iterator[None]:
    """What is half written goes, as with Ctrl-C."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Bad input is one line on standard error and status 1; bad usage is status 2."""
    args = make_parser().parse_args(argv)
    try:
        with _cleaning_up_on_sigterm(args.command in (commands.convert, commands.build)):
            status: int = args.command(args)
            return status
    except BrokenPipeError:
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
