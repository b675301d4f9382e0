"""The commands: each a thin front of a function of the library, from parsed arguments to an exit status."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtrt.build.tuning import Tuner
    from hybridtrt.runtime.limits import Limits


def _print_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, allow_nan=False))


def _generation(output: Any) -> dict[str, Any]:
    """The fields of one answer, without those that nobody asked for."""
    optional = ("error", "log_probs", "top_log_probs", "prompt_log_probs")
    return {name: value for name, value in asdict(output).items() if name not in optional or value}


def convert(args: argparse.Namespace) -> int:
    """Convert a Hugging Face folder to a checkpoint."""
    from hybridtrt.converters.convert import convert, dry_run
    from hybridtrt.converters.describe import describe, render
    from hybridtrt.converters.origins import render_origins
    from hybridtrt.progress import byte_progress

    if args.dry_run:
        config, origins = dry_run(args.model_dir, args.dtype)
        if args.json:
            _print_json(describe(config).to_dict() | {"weights": [origin.to_dict() for origin in origins]})
        else:
            print(render(describe(config)))
            print(f"\n{render_origins(origins)}")
        return 0
    if args.output is None:
        raise ValueError("nowhere to write to: give --output FOLDER, or --dry-run to write nothing")
    with byte_progress("convert") as progress:
        config = convert(args.model_dir, args.output, args.dtype, progress)
    summary = describe(config)
    if args.json:
        _print_json(summary.to_dict())
    else:
        print(render(summary))
        print(f"checkpoint            {args.output}")
    return 0


def plan(args: argparse.Namespace) -> int:
    """Plan the memory of a model on a number of GPUs, for every way to split it."""
    from hybridtrt.converters.model_reader import read_model_config
    from hybridtrt.converters.plan import PlanOptions, plan
    from hybridtrt.converters.plan_page import render_plan

    config = read_model_config(args.model_dir)
    names = ("gpus", "gpu_memory", "dtype", "kv_cache_dtype", "state_dtype", "concurrency", "max_num_tokens")
    asked = {name: getattr(args, name) for name in names}
    length = args.max_seq_len or min(PlanOptions.max_seq_len, config.max_length)
    planned = plan(config, PlanOptions(**asked, max_seq_len=length))
    if args.json:
        _print_json(planned.to_dict())
    else:
        print(render_plan(planned))
    return 0


def build(args: argparse.Namespace) -> int:
    """Build an engine from a checkpoint."""
    from hybridtrt.build.build import build, default_build_config
    from hybridtrt.build.targets import CPU
    from hybridtrt.build.timing_cache import default_cache_file
    from hybridtrt.progress import byte_progress, step_progress

    sizes = ("max_batch_size", "max_num_tokens", "max_seq_len", "tokens_per_block")
    formats = ("state_dtype", "kv_cache_dtype", "weights", "group_size", "exclude")
    gpu = ("activations", "compute_capabilities", "weights_as_inputs")
    names = (*sizes, *formats, *gpu, "moe_capacity_factor", "moe_overflow")
    asked = {name: getattr(args, name) for name in names}
    limits = replace(
        default_build_config(args.checkpoint, args.target, args.activations),
        **{name: value for name, value in asked.items() if value is not None},
    )
    if limits.state_dtype == "float16":
        print("warning: states in float16 overflow beyond 65504; bfloat16 takes as little memory", file=sys.stderr)
    tuner = _tuner(args) if args.tune and limits.target == CPU else None
    stages, cache = step_progress("build"), default_cache_file()
    with byte_progress("build") as progress:
        config = build(args.checkpoint, args.output, limits, progress, tuner, stages, cache and cache.with_name("gpu"))
    if args.json:
        _print_json(asdict(config.build))
    else:
        print(config.build.render())
        print(f"engine {args.output}")
    return 0


def _tuner(args: argparse.Namespace) -> Tuner:
    from hybridtrt.build.timing_cache import TimingCache, default_cache_file
    from hybridtrt.build.tuning import Tuner
    from hybridtrt.progress import stage_progress
    from hybridtrt.runtime.load import default_threads

    cache = TimingCache(args.timing_cache or default_cache_file())
    return Tuner(default_threads(), args.tune_seconds, cache, stage_progress("tune"))


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
    from hybridtrt.runtime.request import Output
    from hybridtrt.runtime.run_options import RunOptions
    from hybridtrt.sampling_options import sampling_params

    if not args.inputs:
        raise ValueError("nothing to generate from: give --prompt TEXT or --input-ids 1,2,3, each as often as needed")
    params = sampling_params(args)
    stream = len(args.inputs) * params.n == 1 and not args.json

    def show(output: Output) -> None:
        print(output.text, end="", flush=True)

    prompts = [value for _, value in args.inputs]
    outputs = generate(args.engine, prompts, params, RunOptions.of(args), show if stream else None)
    if args.json:
        _print_json({"outputs": [_generation(output) for output in outputs]})
    for i, output in enumerate(outputs):
        if output.error:
            print(f"error: prompt {i // params.n}: {output.error}", file=sys.stderr)
        elif args.json:
            continue
        elif output.text is None:
            print(",".join(map(str, output.output_ids)))
        else:
            print("" if stream else f"[{i}] {output.text}")
    return 1 if any(output.error for output in outputs) else 0


def verify(args: argparse.Namespace) -> int:
    """Compare an engine with transformers' full forward, layer by layer."""
    from hybridtrt.build.engine import read_engine_config
    from hybridtrt.progress import stage_progress
    from hybridtrt.runtime.verify import show, verify
    from hybridtrt.runtime.verify_html import render_html

    engine = read_engine_config(args.engine)
    config = engine.build
    if config.capacity is not None:
        print("warning: the engine's experts have a capacity, those of transformers have none", file=sys.stderr)
    weights = None if config.weights == engine.model.dtype else config.weights
    kept = {"weights": weights, "states": config.state_dtype, "KV": config.kv_cache_dtype}
    kept["activations"] = config.activations
    rounded = [f"{what} in {dtype}" for what, dtype in kept.items() if dtype not in (None, "float32")]
    if rounded and args.threshold is None:
        print(
            f"warning: the engine keeps {', '.join(rounded)}: it departs by what that rounds, and the default "
            "threshold allows for the checkpoint's dtype alone; see --threshold",
            file=sys.stderr,
        )
    report = verify(args.model_dir, args.engine, args.threshold, stage_progress("verify"))
    if args.report is not None:
        args.report.write_text(render_html(report, f"{args.engine} against {args.model_dir}"), encoding="utf-8")
    if args.json:
        _print_json(report.to_dict())
    else:
        print("prompt tokens  logit error / std  greedy tokens equal")
        for prompt in report.prompts:
            agree = f"{prompt.greedy_agree} of {prompt.greedy_tokens}"
            print(f"{prompt.prompt_tokens:13}  {show(prompt.logit_error):>17}  {agree:>19}")
        print(report.departure())
        print(f"{'passed' if report.passed else 'FAILED'}: {show(report.logit_error)} against {report.threshold:g}")
    return 0 if report.passed else 1


def eval(args: argparse.Namespace) -> int:
    """Compute the perplexity of a text under an engine."""
    from hybridtrt.progress import count_progress
    from hybridtrt.runtime.evaluate import evaluate

    sizes = args.context, args.chunk, args.threads
    result = evaluate(args.engine, args.text, *sizes, lambda windows: count_progress("eval", windows, "window"))
    if args.json:
        _print_json(asdict(result))
    else:
        print(
            f"perplexity {result.perplexity:.4f}, {result.bits_per_byte:.4f} bits per byte: "
            f"{result.scored} of {result.tokens} tokens scored, in windows of {result.context}"
        )
    return 0


def routing(args: argparse.Namespace) -> int:
    """Show how the tokens of a text spread over the experts, and what an expert capacity would cost."""
    from hybridtrt.progress import count_progress
    from hybridtrt.runtime.routing import route_text
    from hybridtrt.runtime.routing_report import render_routing, render_routing_html

    sizes = args.context, args.chunk, args.threads
    found = route_text(args.engine, args.text, *sizes, lambda windows: count_progress("routing", windows, "window"))
    if args.html is not None:
        args.html.write_text(render_routing_html(found, f"Routing of {args.text} in {args.engine}"), encoding="utf-8")
    if args.json:
        _print_json(found.to_dict())
    else:
        print(render_routing(found))
    for line in found.warnings:
        print(f"warning: {line}", file=sys.stderr)
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure prefill and decode: tokens a second, latencies, and how near they come to the machine's limits."""
    from hybridtrt.progress import count_progress
    from hybridtrt.runtime.bench import measure, open_bench

    results = []
    with open_bench(args.engine, args.threads, args.profile) as opened:
        opened.check(args.batch, args.prompt, args.new)
        limits = _limits(args.threads)
        if args.profile and not opened.profiles:
            print("no profile: this engine runs on torch, whose kernels are not timed one by one", file=sys.stderr)
        if limits is not None and not args.json:
            print(limits.render(), flush=True)
        with count_progress("bench", sum(args.batch) * args.new, "token") as advance:
            for result in measure(opened, args.batch, args.prompt, args.new, limits, advance):
                results.append(result)
                if not args.json:
                    print(result.render(), flush=True)
    if args.json:
        measured = None if limits is None else asdict(limits)
        _print_json({"results": [asdict(result) for result in results], "limits": measured})
    return 0


def _limits(threads: int | None) -> Limits | None:
    """The machine's limits, or None, with a line on standard error, where they cannot be measured."""
    from hybridtrt.runtime.limits import measure_limits
    from hybridtrt.runtime.load import default_threads

    try:
        return measure_limits(threads or default_threads())
    except (ValueError, MemoryError) as error:
        print(f"no limits: {error}", file=sys.stderr)
        return None


def profile(args: argparse.Namespace) -> int:
    """Run a sample load and write what it shows into the engine folder, for admission and preemption."""
    from hybridtrt.converters.plain_data import to_plain
    from hybridtrt.progress import stage_progress
    from hybridtrt.runtime.profile import write_profile
    from hybridtrt.runtime.profile_table import render_profile
    from hybridtrt.runtime.profiler import SampleLoad, profile_engine

    load = SampleLoad(args.requests, None if args.ranges is None else tuple(args.ranges), args.seed)
    if args.engine.is_dir() and not os.access(args.engine, os.W_OK):
        raise ValueError(f"{args.engine} cannot be written to, and the profile belongs there")
    measured = profile_engine(args.engine, load, args.threads, stage_progress("profile"))
    path = write_profile(args.engine, measured)
    if args.json:
        _print_json(to_plain(measured))
    else:
        print(f"{render_profile(measured)}\nprofile {path}")
    return 0


def serve(args: argparse.Namespace) -> int:
    """Serve an engine with Triton Inference Server on loopback."""
    from hybridtrt.model_repo.supervisor import ServeOptions, run_server
    from hybridtrt.runtime.run_options import RunOptions

    ports = args.http_port, args.grpc_port, args.metrics_port
    run, drain_seconds = RunOptions.of(args), args.drain_seconds
    options = ServeOptions(args.engine, *ports, run, state_dir=args.state_dir, drain_seconds=drain_seconds)
    run_server(options, lambda line: print(line, flush=True))
    return 0
