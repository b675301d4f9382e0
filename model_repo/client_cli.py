"""Command lines of the two clients."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hybridtrt.model_repo.clients import (
    DEFAULT_GRPC_URL,
    DEFAULT_HTTP_URL,
    ClientError,
    GrpcClient,
    http_generate,
    http_stream,
)

TEXT, TOKENS = "ensemble", "tensorrt_llm"
Run = Callable[[argparse.Namespace, str, dict[str, Any]], Iterator[dict[str, Any]]]


def http_main(argv: list[str] | None = None) -> int:
    """`client_http.py`"""
    parser = _parser("Ask a served engine over HTTP.", DEFAULT_HTTP_URL)
    return _main(parser.parse_args(argv), _run_http)


def grpc_main(argv: list[str] | None = None) -> int:
    """`client_grpc.py`"""
    parser = _parser("Ask a served engine over gRPC.", DEFAULT_GRPC_URL)
    return _main(parser.parse_args(argv), _run_grpc)


def _parser(description: str, url: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--messages", help='JSON for the chat template: [{"role": "user", "content": "..."}]')
    prompt.add_argument("--input-ids", type=_ids, help="token ids to continue, 1,2,3; the answer is token ids too")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens to generate at most")
    parser.add_argument("--stream", action="store_true", help="print the answer as it comes")
    parser.add_argument("--temperature", type=float, help="greedy if neither this nor top-k nor top-p is given")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop-word", action="append", default=[], help="end before this text; may be repeated")
    parser.add_argument("--return-log-probs", action="store_true", help="with --json: the tokens' log-probabilities")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--url", default=url)
    return parser


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _request(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The model and its inputs."""
    if args.input_ids is not None:
        if args.stop_word:
            raise ClientError("--stop-word needs text: give --prompt or --messages")
        model, fields = TOKENS, {"input_ids": args.input_ids, "request_output_len": args.max_tokens}
        names = {"stream": "streaming", "top_k": "runtime_top_k", "top_p": "runtime_top_p"}
    else:
        prompt = {"text_input": args.prompt} if args.messages is None else {"messages": args.messages}
        model, fields = TEXT, {**prompt, "max_tokens": args.max_tokens, "stop_words": args.stop_word or None}
        names = {}
    for name in ("stream", "temperature", "top_k", "top_p", "seed", "return_log_probs"):
        fields[names.get(name, name)] = getattr(args, name)
    return model, {name: value for name, value in fields.items() if value is not None and value is not False}


def _run_http(args: argparse.Namespace, model: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if args.stream:
        yield from http_stream(args.url, model, fields)
    else:
        yield http_generate(args.url, model, fields)


def _run_grpc(args: argparse.Namespace, model: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with GrpcClient(args.url) as client:
        for outputs in client.stream(model, fields):
            yield {name: value.reshape(-1).tolist() for name, value in outputs.items()}


def _main(args: argparse.Namespace, run: Run) -> int:
    answer = Answer()
    try:
        for response in run(args, *_request(args)):
            piece = answer.add(response)
            if not args.json:
                print(piece, end="", flush=True)
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer.as_json(), ensure_ascii=False) if args.json else "")
    return 0


class Answer:
    """What the responses add up to."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._text: list[str] = []
        self._ids: list[int] = []
        self._log_probs: list[float] = []
        self._finish_reason: str | None = None

    def add(self, response: dict[str, Any]) -> str:
        """What to print of a response."""
        self._first = self._first or time.perf_counter() - self._start
        ids = _as_list(response.get("output_ids"))
        text = "".join(_text(value) for value in _as_list(response.get("text_output")))
        self._text.append(text)
        self._ids += ids
        self._log_probs += _as_list(response.get("output_log_probs"))
        for reason in _as_list(response.get("finish_reason")):
            self._finish_reason = _text(reason)
        return text or "".join(f"{token} " for token in ids)

    def as_json(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"output_ids": self._ids} if self._ids else {"text": "".join(self._text)}
        if self._log_probs:
            answer["log_probs"] = self._log_probs
        answer["finish_reason"] = self._finish_reason
        answer["first_response_s"] = self._first
        answer["total_s"] = time.perf_counter() - self._start
        return answer


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
