"""`python -m hybridtrt.runtime.engine_process --engine DIR --socket PATH`: an engine in a process of its own.

It listens once the engine is loaded. SIGTERM refuses new requests, lets running ones finish for a while and exits with
0; a step that raises fails all requests and exits with 1, for whoever watches to start a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridtrt.runtime.engine_thread import EngineThread, LoadedEngine
from hybridtrt.runtime.load_engine import load_engine
from hybridtrt.runtime.protocol import EngineInfo
from hybridtrt.runtime.request import Output
from hybridtrt.runtime.run_options import RunOptions
from hybridtrt.runtime.server import EngineServer, ServerLimits

log = logging.getLogger("hybridtrt.engine")
FLUSH_SECONDS = 1.0
PARENT_CHECK_SECONDS = 0.5
MAX_SOCKET_PATH = 107  # of sockaddr_un, without its final zero


def claim_socket(path: Path) -> socket.socket:
    """Bind the Unix socket, in place of one that a dead process left.

    Raises:
        ValueError: another process listens there, or the path is too long for a socket.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ValueError(f"socket path {path} is longer than {MAX_SOCKET_PATH} bytes: choose a shorter folder")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
            raise ValueError(f"another engine process listens on {path}")
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:
            path.unlink()
    listener.bind(str(path))
    path.chmod(0o600)
    return listener


async def serve(
    open_engine: Callable[[], LoadedEngine], socket_path: Path, limits: ServerLimits, stop: asyncio.Future[str | None]
) -> None:
    """Open the engine and serve it until `stop` is set, which a step that raises does too, with its error.

    Raises:
        Exception: whatever `open_engine` raised; ValueError: the socket cannot be used.
    """
    loop = asyncio.get_running_loop()
    thread = EngineThread(open_engine)
    server = EngineServer(thread, limits)

    def deliver(outputs: Sequence[Output]) -> None:
        loop.call_soon_threadsafe(server.deliver, outputs)

    def failed(error: str) -> None:
        loop.call_soon_threadsafe(finish, stop, error)

    thread.start(deliver, failed)
    loading = asyncio.wrap_future(thread.loaded)
    either: set[asyncio.Future[Any]] = {loading, stop}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        return
    loading.result()
    listener = await loop.create_unix_server(server.connect, sock=claim_socket(socket_path))
    log.info("listening on %s", socket_path)
    error = await stop
    listener.close()
    socket_path.unlink(missing_ok=True)
    if error is None:
        await server.drain()
    server.fail_all(f"the engine failed: {error}" if error else "the server is shutting down", "unavailable")
    await server.close(FLUSH_SECONDS)
    thread.stop(FLUSH_SECONDS)


def finish(stop: asyncio.Future[str | None], error: str | None = None) -> None:
    """Ask `serve` to end, because of `error` if one is given."""
    if not stop.done():
        stop.set_result(error)


async def run(
    open_engine: Callable[[], LoadedEngine], socket_path: Path, limits: ServerLimits, parent: int | None = None
) -> int:
    """Serve until SIGTERM, SIGINT, an error in a step, or the end of process `parent`; returns the exit status."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str | None] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, finish, stop)
    watch = loop.create_task(_watch_parent(parent, stop)) if parent else None
    await serve(open_engine, socket_path, limits, stop)
    if watch is not None:
        watch.cancel()
    return 1 if stop.result() else 0


async def _watch_parent(parent: int, stop: asyncio.Future[str | None]) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_CHECK_SECONDS)
    finish(stop, f"process {parent}, which started the engine, has ended")


def open_engine(engine_dir: Path, options: RunOptions, runner_factory: str | None = None) -> LoadedEngine:
    """The engine in a folder, with its tokenizer.

    `runner_factory`, "module:function", is called with the folder instead of loading the engine's own runner.

    Raises:
        ValueError: the engine or the tokenizer cannot be loaded.
    """
    make_runner = None
    if runner_factory is not None:
        module, _, function = runner_factory.partition(":")
        make_runner = getattr(importlib.import_module(module), function)
    engine = load_engine(engine_dir, options, make_runner)
    info = EngineInfo(
        vocab_size=engine.info.vocab_size,
        max_batch_size=engine.options.max_batch_size or engine.info.max_batch_size,
        max_num_tokens=engine.options.max_num_tokens or engine.info.max_num_tokens,
        max_seq_len=engine.info.max_seq_len,
        page_size=engine.info.page_size,
        num_slots=engine.info.num_slots,
        num_pages=dict(engine.info.num_pages),
        has_tokenizer=engine.tokenizer is not None,
    )
    return LoadedEngine(engine, info, engine.tokenizer)


def main(argv: list[str] | None = None) -> int:
    """The command line; an error is one line on stderr and status 1."""
    parser = argparse.ArgumentParser(prog="python -m hybridtrt.runtime.engine_process", description=__doc__)
    parser.add_argument("--engine", type=Path, required=True, help="engine folder")
    parser.add_argument("--socket", type=Path, required=True, help="path of the Unix socket to listen on")
    RunOptions.add_arguments(parser)
    parser.add_argument("--max-queue-size", type=int, default=ServerLimits.max_queue_size, help="requests held at once")
    parser.add_argument("--drain-seconds", type=float, default=ServerLimits.drain_seconds, help="grace after SIGTERM")
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when the process that started this ends")
    parser.add_argument(
        "--runner-factory",
        metavar="MODULE:FUNCTION",
        help="what makes the runner instead of the engine's target, called with the engine folder (for tests)",
    )
    args = parser.parse_args(argv)
    parent = os.getppid() if args.exit_with_parent else None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(0.001)  # the socket's thread must get its turn between steps
    try:
        limits = ServerLimits(max_queue_size=args.max_queue_size, drain_seconds=args.drain_seconds)
        opening = partial(open_engine, args.engine, RunOptions.of(args), args.runner_factory)
        return asyncio.run(run(opening, args.socket, limits, parent))
    except Exception as error:
        log.debug("could not start", exc_info=True)
        expected = isinstance(error, ValueError | OSError)
        print(f"error: {error}" if expected else f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a step that does not end must not hold up the exit
