"""Main loop of a stub process: serves the server's messages, and sends the model's calls to the server."""

import itertools
import os
import queue
import socket
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import TritonError, TritonModelException
from .host_interface import BlsClient, BlsRequest, Host, Incoming, ModelResponse, Receive
from .ipc import Frames, Named
from .model_runner import (
    ModelDescription,
    PythonModelError,
    PythonModelRunner,
    auto_complete,
    describe_error,
    error_text,
)
from .shared_memory import Arena, Mapped

MAX_SHARED_BYTES = 1 << 30  # of one direction
_QUIET = ("drop",)  # metric operations without a reply


class _Request(Incoming):
    def __init__(self, host: "_Host", header: Mapping[str, Any], tensors: list[Named]) -> None:
        self._host, self.number, self.inputs = host, header["r"], dict(tensors)
        self.id, self.outputs, self.parameters = header["id"], header["outputs"], header["parameters"]
        self.correlation_id, self.flags, self.timeout_us = (
            header["correlation_id"],
            header["flags"],
            header["timeout_us"],
        )
        self.cancelled, self.trace_context = header["cancelled"], header.get("trace_context")

    def send(self, answer: ModelResponse | None, final: bool) -> None:
        if final:
            self._host.requests.pop(self.number, None)
        header = {"t": "answered", "r": self.number, "final": final, **response_fields(answer)}
        self._host.frames.send(header, response_tensors(answer))

    def reschedule(self) -> None:
        self._host.requests.pop(self.number, None)
        self._host.frames.send({"t": "again", "r": self.number})


def response_fields(answer: ModelResponse | None) -> dict[str, Any]:
    if answer is None:
        return {"empty": True}
    error = answer.error
    return {"parameters": answer.parameters, "error": None if error is None else [error.code(), error.message()]}


def response_tensors(answer: ModelResponse | None) -> list[Named]:
    return list(answer.outputs.items()) if answer is not None else []


def read_response(header: Mapping[str, Any], tensors: list[Named]) -> ModelResponse | None:
    """Decode a response encoded by `response_fields` and `response_tensors`."""
    if header.get("empty"):
        return None
    error = header["error"]
    return ModelResponse(
        dict(tensors), header["parameters"], None if error is None else TritonError(error[1], error[0])
    )


class _BlsClient(BlsClient):
    def __init__(self, host: "_Host", number: int, is_decoupled: bool) -> None:
        self._host, self._number, self._is_decoupled = host, number, is_decoupled

    def cancel(self) -> None:
        self._host.frames.send({"t": "stop", "c": self._number})

    def on_response_read(self) -> None:
        if self._is_decoupled:
            self._host.frames.send({"t": "taken", "c": self._number})


class _Host(Host):
    is_alone = True

    def __init__(self, frames: Frames, name: str, model: str) -> None:
        super().__init__(name, model)
        self.frames = frames
        self.requests: dict[int, _Request] = {}  # unanswered requests by number
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Receive, bool]] = {}  # receivers of other models' responses
        self._results: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._dropped: deque[int] = deque()

    def call_model(self, request: BlsRequest, receive: Receive) -> BlsClient:
        number = next(self._numbers)
        self._waiting[number] = receive, request.is_decoupled
        parents = [incoming.number for incoming in request.parents if isinstance(incoming, _Request)]
        self.frames.send(
            {
                "t": "ask", "c": number, "model": request.model, "version": request.version, "id": request.id,
                "correlation_id": request.correlation_id, "flags": request.flags, "timeout_us": request.timeout_us,
                "parameters": request.parameters, "outputs": list(request.outputs), "decoupled": request.is_decoupled,
                "behind": parents,
            },
            request.inputs,
        )  # fmt: skip
        return _BlsClient(self, number, request.is_decoupled)

    def on_response(self, header: Mapping[str, Any], tensors: list[Named]) -> None:
        receive, _ = self._waiting[header["c"]]
        if header["final"]:
            del self._waiting[header["c"]]
        receive(read_response(header, tensors), header["final"])

    def begin_sending(self) -> None:
        self.frames.hold()

    def control(self, operation: str, **arguments: Any) -> Any:
        return self._result({"t": "control", "what": operation, "arguments": arguments})

    def metric(self, operation: str, **arguments: Any) -> Any:
        if operation in _QUIET:
            return self.frames.send({"t": "metric", "n": 0, "what": operation, "arguments": arguments})
        return self._result({"t": "metric", "what": operation, "arguments": arguments})

    def log(self, message: str, level: int) -> None:
        self.frames.send({"t": "log", "message": message, "level": level})

    def _result(self, header: dict[str, Any]) -> Any:
        """Send a message and wait for its result. raises TritonModelException"""
        number, came = next(self._numbers), queue.SimpleQueue[dict[str, Any]]()
        self._results[number] = came
        self.frames.send({**header, "n": number})
        result = came.get()
        if "failed" in result:
            raise TritonModelException(result["failed"])
        return result["value"]

    def result(self, header: dict[str, Any]) -> None:
        self._results.pop(header["n"]).put(header)


class _Child:
    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._jobs: queue.SimpleQueue[tuple[dict[str, Any], list[Named]]] = queue.SimpleQueue()
        self._host: _Host | None = None
        self._model: PythonModelRunner | None = None

    def run(self) -> None:
        """Run jobs in the main thread, as some libraries that models import expect."""
        threading.Thread(target=self._read, name="millrace-reader", daemon=True).start()
        while True:
            header, tensors = self._jobs.get()
            getattr(self, f"_{header['t']}")(header, tensors)
            del header, tensors  # the next may be long in coming
            self._frames.settle()

    def _read(self) -> None:
        """Dispatch messages: replies to their waiters, jobs to the main thread. Exit when the server is gone."""
        try:
            while (frame := self._frames.read()) is not None:
                header, tensors = frame
                kind, host = header["t"], self._host
                if host is None or kind in ("execute", "close"):
                    self._jobs.put((header, tensors))
                elif kind == "answer":
                    host.on_response(header, tensors)
                elif kind == "result":
                    host.result(header)
                elif kind == "is_ready":
                    threading.Thread(target=self._ready, name="millrace-ready", daemon=True).start()
                elif kind == "cancel" and (request := host.requests.get(header["r"])) is not None:
                    request.cancelled = True
                del frame, header, tensors
        except BaseException:  # noqa: BLE001  without this thread the process is useless
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _load(self, header: dict[str, Any], tensors: list[Named]) -> None:
        description = ModelDescription(
            Path(header["file"]), header["arguments"], header["outputs"], header["decoupled"]
        )
        self._host = _Host(self._frames, header["instance"], description.name)
        try:
            self._model = PythonModelRunner(description, self._host)
        except PythonModelError as error:
            self._frames.send({"t": "failed", "failed": str(error)})
        else:
            self._frames.send({"t": "loaded", "has_say": self._model.reports_readiness})

    def _ready(self) -> None:
        """Answer a readiness query while the main thread may be executing."""
        assert self._model is not None, "it was loaded"
        failed, is_ready = None, False
        try:
            is_ready = self._model.is_ready()
        except PythonModelError as error:
            failed = str(error)
        self._frames.send({"t": "ready", "ready": is_ready, "failed": failed})

    def _complete(self, header: dict[str, Any], tensors: list[Named]) -> None:
        file = Path(header["file"])
        try:
            self._frames.send({"t": "completed", "config": auto_complete(file, header["config"])})
        except PythonModelError as error:
            self._frames.send({"t": "failed", "failed": str(error)})
        except (TypeError, ValueError) as error:  # a configuration that cannot be encoded as JSON
            self._frames.send({"t": "failed", "failed": describe_error(error, file)})

    def _execute(self, header: dict[str, Any], tensors: list[Named]) -> None:
        assert self._host is not None and self._model is not None, "it was loaded"
        requests, at = [], 0
        for one in header["requests"]:
            request = _Request(self._host, one, tensors[at : at + one["n"]])
            self._host.requests[request.number] = request
            requests.append(request)
            at += one["n"]
        failed = None
        try:
            self._model.execute(requests)
        except PythonModelError as error:
            failed = str(error)
            for request in requests:  # the batch's error answers them
                self._host.requests.pop(request.number, None)
        self._frames.send({"t": "done", "failed": failed}, last=True)

    def _close(self, header: dict[str, Any], tensors: list[Named]) -> None:
        failed = None
        if self._model is not None:
            try:
                self._model.close()
            except BaseException as error:  # noqa: BLE001  a model may raise anything; the server logs it
                failed = error_text(error)
        self._frames.send({"t": "closed", "failed": failed})


def run(fd: int) -> None:
    connection = socket.socket(fileno=fd)
    _Child(Frames(connection, Arena(MAX_SHARED_BYTES), Mapped(writable=True))).run()
