"""The engine process' socket protocol, version 2: length-prefixed JSON frames over a Unix socket.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON, always an object with a `type`.

| from   | type         | fields                                                                                     |
|--------|--------------|--------------------------------------------------------------------------------------------|
| engine | `hello`      | `protocol`, `engine` (an `EngineInfo`); the first frame of a connection                    |
| client | `submit`     | the fields of a `Submission`, those that differ from their defaults                        |
| client | `cancel`     | `id` of a request of this connection                                                       |
| client | `stop`       | `tag`: cancels the requests of all connections that were submitted with it                 |
| client | `statistics` | `id`: any number                                                                           |
| engine | `outputs`    | `outputs`: one `Reply` for each request of the connection that moved in this step          |
| engine | `statistics` | `id`, `statistics`                                                                         |
| engine | `error`      | `error`: what was wrong with the connection's last frame; the engine then hangs up         |

An answer ends with the reply that carries `finish_reason`, a request with the last of its answers: that reply has no
`more`. Hanging up cancels the connection's requests.
"""

from __future__ import annotations

import json
import struct
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hybridtrt.runtime.request import Output, SamplingParams
from hybridtrt.runtime.submission import Submission

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 << 20
_HEADER = struct.Struct(">I")

Message = dict[str, Any]
ErrorCode = Literal["invalid_argument", "unavailable", "internal"]
T = TypeVar("T")


class ProtocolError(ValueError):
    """A frame that breaks the protocol."""


@dataclass(frozen=True)
class EngineInfo:
    """What a client must know of the engine behind the socket."""

    vocab_size: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    page_size: int
    num_slots: int
    num_pages: Mapping[str, int] = field(default_factory=dict)
    has_tokenizer: bool = False


@dataclass
class Reply(Output):
    """An `Output` as it crosses the socket. `code` says whose fault an `error` is; the first reply of a request that
    was accepted carries `num_prompt_tokens`."""

    code: ErrorCode | None = None
    num_prompt_tokens: int | None = None


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame.

    Raises:
        ProtocolError: the frame is larger than `MAX_FRAME_BYTES`.
    """
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(body)} bytes is larger than {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into messages."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add received bytes and yield every message that is complete.

        Raises:
            ProtocolError: a frame is too large, or not a JSON object with a `type`.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > self._max:
                raise ProtocolError(f"frame of {length} bytes is larger than {self._max}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield _parse(body)


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"frame is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("frame is not a JSON object with a 'type'")
    return message


def hello(info: EngineInfo) -> Message:
    return {"type": "hello", "protocol": PROTOCOL_VERSION, "engine": _sparse(info)}


def parse_hello(message: Message) -> EngineInfo:
    """Raises: ProtocolError: not a hello, or one of another protocol version."""
    if message["type"] != "hello" or message.get("protocol") != PROTOCOL_VERSION:
        what = f"{message['type']!r} of protocol {message.get('protocol')!r}"
        raise ProtocolError(f"expected 'hello' of protocol {PROTOCOL_VERSION}, got {what}")
    return from_wire(EngineInfo, message.get("engine"), "hello.engine")


def submit(submission: Submission) -> Message:
    return {"type": "submit", **_sparse(submission), "sampling": _sparse(submission.sampling)}


def parse_submit(message: Message) -> Submission:
    """Raises: ProtocolError: a field that is missing, unknown or of another type."""
    values = {name: value for name, value in message.items() if name not in ("type", "sampling")}
    sampling = from_wire(SamplingParams, message.get("sampling", {}), "submit.sampling")
    submission = from_wire(Submission, values, "submit", sampling=sampling)
    if sum(x is not None for x in (submission.text, submission.messages, submission.input_ids)) != 1:
        raise ProtocolError("submit wants exactly one of 'text', 'messages' and 'input_ids'")
    return submission


def reply(output: Reply) -> Message:
    return _sparse(output)


def parse_reply(values: Message) -> Reply:
    """The inverse of `reply`. It trusts the engine: this runs for every token."""
    values["token_ids"] = tuple(values.get("token_ids", ()))
    values["log_probs"] = tuple(values.get("log_probs", ()))
    if "top_log_probs" in values:
        values["top_log_probs"] = tuple(_pairs(top) for top in values["top_log_probs"])
    if "prompt_log_probs" in values:
        values["prompt_log_probs"] = tuple((chosen, _pairs(top)) for chosen, top in values["prompt_log_probs"])
    return Reply(**values)


def _pairs(top: list[list[Any]]) -> tuple[Any, ...]:
    return tuple(map(tuple, top))


def text_field(message: Message, name: str) -> str:
    """Raises: ProtocolError: the message has no string of this name."""
    value = message.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"{message['type']}.{name} is {_short(value)}, expected a string")
    return value


def _sparse(value: Any) -> Message:
    """The fields of a dataclass that differ from their defaults."""
    cls: Any = type(value)
    defaults = _defaults(cls)
    return {name: x for name, x in vars(value).items() if x != defaults[name]}


@cache
def _defaults(cls: type) -> dict[str, object]:
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}


def from_wire(cls: type[T], values: object, where: str, **known: object) -> T:
    """Build dataclass `cls` from a JSON object, checking every name and type; `known` fields are taken as they are.

    Raises:
        ProtocolError: names the field, its value and the type that was expected.
    """
    if not isinstance(values, dict):
        raise ProtocolError(f"{where} is {_short(values)}, expected an object")
    hints = _hints(cast(Any, cls))
    if unknown := sorted(set(values) - set(hints) | set(values) & set(known)):
        raise ProtocolError(f"{where} has unknown field {unknown[0]!r}")
    checked = {name: _check(value, hints[name], f"{where}.{name}") for name, value in values.items()}
    try:
        return cls(**checked, **known)
    except TypeError as error:
        raise ProtocolError(f"{where}: {error}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _check(value: Any, hint: Any, where: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (x for x in get_args(hint) if x is not type(None))
    if get_origin(hint) is tuple:
        return _check_list(value, get_args(hint), where)
    kind = dict if get_origin(hint) else hint
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ProtocolError(f"{where} is {_short(value)}, expected {kind.__name__}")
    return value


def _check_list(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    """`kinds` are the arguments of `tuple`: one a value, or one for all and an ellipsis."""
    kind, any_length = kinds[0], kinds[-1] is ...
    if not isinstance(value, list) or not (any_length or len(value) == len(kinds)):
        expected = "a list" if any_length else f"a list of {len(kinds)}"
        raise ProtocolError(f"{where} is {_short(value)}, expected {expected}")
    if any_length and isinstance(kind, type):  # a prompt: without a call for each token
        if any(type(x) is not kind for x in value):
            raise ProtocolError(f"{where} is {_short(value)}, expected a list of {kind.__name__}")
        return tuple(value)
    hints = kinds[:1] * len(value) if any_length else kinds
    return tuple(_check(x, hint, f"{where}[{i}]") for i, (x, hint) in enumerate(zip(value, hints, strict=True)))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
