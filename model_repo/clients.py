"""Clients of a served engine over HTTP and gRPC: a request is a mapping from input names to values."""

from __future__ import annotations

import http.client
import json
import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc as triton_grpc
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

DEFAULT_HTTP_URL = "http://127.0.0.1:8000"
DEFAULT_GRPC_URL = "127.0.0.1:8001"

Fields = Mapping[str, Any]


class ClientError(RuntimeError):
    """The server refused or broke off a request; the text is the server's."""


def http_generate(url: str, model: str, fields: Fields, timeout: float = 600.0) -> dict[str, Any]:
    """The one response of `/v2/models/<model>/generate`.

    Raises:
        ClientError: the server answers with an error, or not at all.
    """
    with closing(_connect(url, timeout)) as connection:
        answer = _decode(_post(connection, model, "generate", fields).read())
        if "error" in answer:  # Triton sends some errors with status 200
            raise ClientError(answer["error"])
        return answer


def http_stream(url: str, model: str, fields: Fields, timeout: float = 600.0) -> Iterator[dict[str, Any]]:
    """The responses of `/v2/models/<model>/generate_stream` as they come; leaving early cancels the request.

    Raises:
        ClientError: the server answers with an error, not at all, or breaks off.
    """
    with closing(_connect(url, timeout)) as connection:
        finished = False
        try:
            for line in _post(connection, model, "generate_stream", fields):
                if line.startswith(b"data: "):
                    event = _decode(line[6:])
                    if "error" in event:
                        raise ClientError(event["error"])
                    finished = "finish_reason" in event
                    yield event
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"the stream broke off: {error}") from None
        if not finished:
            raise ClientError("the stream broke off")


class GrpcClient:
    """Streaming requests over one gRPC channel, each on a stream of its own, so that an error finds its request."""

    def __init__(self, url: str = DEFAULT_GRPC_URL) -> None:
        self._url = url
        self._metadata = triton_grpc.InferenceServerClient(url)
        self._types: dict[str, dict[str, str]] = {}

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._metadata.close()

    def stream(
        self, model: str, fields: Fields, request_id: str = "", timeout: float = 600.0
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """The outputs of each response as they come; leaving early cancels the request.

        Raises:
            ClientError: the server answers with an error, or sends nothing for `timeout` seconds.
        """
        inputs = self._inputs(model, fields)
        responses: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        client = triton_grpc.InferenceServerClient(self._url)
        client.start_stream(lambda result, error: responses.put((result, error)))
        finished = False
        try:
            client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)
            while not finished:
                result, error = responses.get(timeout=timeout)
                if error is not None:
                    raise ClientError(error.message())
                message = result.get_response()
                finished = message.parameters["triton_final_response"].bool_param
                if message.outputs:
                    yield {output.name: result.as_numpy(output.name) for output in message.outputs}
        except queue.Empty:
            raise ClientError(f"no response for {timeout:g} s") from None
        finally:
            client.stop_stream(cancel_requests=not finished)
            client.close()

    def _inputs(self, model: str, fields: Fields) -> list[Any]:
        if model not in self._types:
            try:
                metadata = self._metadata.get_model_metadata(model)
            except InferenceServerException as error:
                raise ClientError(error.message()) from None
            self._types[model] = {entry.name: entry.datatype for entry in metadata.inputs}
        inputs = []
        for name, value in fields.items():
            datatype = self._types[model].get(name)
            if datatype is None:
                raise ClientError(f"model '{model}' has no input '{name}'")
            inputs.append(_tensor(name, datatype, value))
        return inputs


def _tensor(name: str, datatype: str, value: Any) -> Any:
    """A value, or a list of values, as an input `[batch 1, n]`."""
    values = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    if datatype == "BYTES":
        values = [text.encode() if isinstance(text, str) else text for text in values]
    data = np.array([values], triton_to_np_dtype(datatype))
    tensor = triton_grpc.InferInput(name, list(data.shape), datatype)
    tensor.set_data_from_numpy(data)
    return tensor


def _connect(url: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ClientError(f"'{url}' is not a URL such as {DEFAULT_HTTP_URL}")
    return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)


def _post(connection: http.client.HTTPConnection, model: str, verb: str, fields: Fields) -> http.client.HTTPResponse:
    try:
        connection.request("POST", f"/v2/models/{model}/{verb}", json.dumps(fields))
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        raise ClientError(f"no answer from {connection.host}:{connection.port}: {error}") from None
    if response.status != 200:
        raise ClientError(_decode(response.read().removeprefix(b"data: ")).get("error", f"status {response.status}"))
    return response


def _decode(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        raise ClientError(f"the server's answer is not JSON: {body[:80]!r}") from None
    return answer if isinstance(answer, dict) else {}
