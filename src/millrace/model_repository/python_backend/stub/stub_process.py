"""A model in a process of its own: what the server asks over the socket, and what the model asks back."""

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
from .host_interface import Answer, BlsClient, BlsRequest, Host, Incoming, Receive
from .ipc import Frames, Named
from .model_runner import GuestError, PythonModelRunner, RaisedByModelError, completed_by, said, told
from .shared_memory import Arena, Mapped

MOST_SHARED_BYTES = 1 << 30  # of one direction
_QUIET = ("drop",)  # of metrics: nobody waits for it


class _Request(Incoming):
    def __init__(self, host: "_Host", said: Mapping[str, Any], tensors: list[Named]) -> None:
        self._host, self.number, self.inputs = host, said["r"], dict(tensors)
        self.id, self.outputs, self.parameters = said["id"], said["outputs"], said["parameters"]
        self.correlation_id, self.flags, self.timeout_us = said["correlation_id"], said["flags"], said["timeout_us"]
        self.cancelled, self.trace_context = said["cancelled"], said.get("trace_context")

    def send(self, answer: Answer | None, final: bool) -> None:
        if final:
            self._host.requests.pop(self.number, None)
        header = {"t": "answered", "r": self.number, "final": final, **answer_fields(answer)}
        self._host.frames.send(header, answer_tensors(answer))

    def again(self) -> None:
        self._host.requests.pop(self.number, None)
        self._host.frames.send({"t": "again", "r": self.number})


def answer_fields(answer: Answer | None) -> dict[str, Any]:
    if answer is None:
        return {"empty": True}
    error = answer.error
    return {"parameters": answer.parameters, "error": None if error is None else [error.code(), error.message()]}


def answer_tensors(answer: Answer | None) -> list[Named]:
    return list(answer.outputs.items()) if answer is not None else []


def answer_read(header: Mapping[str, Any], tensors: list[Named]) -> Answer | None:
    """The other way round, as `answer_fields` has it."""
    if header.get("empty"):
        return None
    error = header["error"]
    return Answer(dict(tensors), header["parameters"], None if error is None else TritonError(error[1], error[0]))


class _Asking(BlsClient):
    def __init__(self, host: "_Host", number: int, is_decoupled: bool) -> None:
        self._host, self._number, self._is_decoupled = host, number, is_decoupled

    def cancel(self) -> None:
        self._host.frames.send({"t": "stop", "c": self._number})

    def taken(self) -> None:
        if self._is_decoupled:
            self._host.frames.send({"t": "taken", "c": self._number})


class _Host(Host):
    is_alone = True

    def __init__(self, frames: Frames, name: str, model: str) -> None:
        super().__init__(name, model)
        self.frames = frames
        self.requests: dict[int, _Request] = {}  # that are not answered, by their numbers
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Receive, bool]] = {}  # for answers of other models
        self._results: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._dropped: deque[int] = deque()

    def ask(self, asked: BlsRequest, receive: Receive) -> BlsClient:
        number = next(self._numbers)
        self._waiting[number] = receive, asked.is_decoupled
        behind = [incoming.number for incoming in asked.behind if isinstance(incoming, _Request)]
        self.frames.send(
            {
                "t": "ask", "c": number, "model": asked.model, "version": asked.version, "id": asked.id,
                "correlation_id": asked.correlation_id, "flags": asked.flags, "timeout_us": asked.timeout_us,
                "parameters": asked.parameters, "outputs": list(asked.outputs), "decoupled": asked.is_decoupled,
                "behind": behind, "waits": asked.waits,
            },
            asked.inputs,
        )  # fmt: skip
        return _Asking(self, number, asked.is_decoupled)

    def answered(self, header: Mapping[str, Any], tensors: list[Named]) -> None:
        receive, _ = self._waiting[header["c"]]
        if header["final"]:
            del self._waiting[header["c"]]
        receive(answer_read(header, tensors), header["final"])

    def answering(self) -> None:
        self.frames.hold()

    def control(self, what: str, **told: Any) -> Any:
        return self._result({"t": "control", "what": what, "told": told})

    def metric(self, what: str, **told: Any) -> Any:
        if what in _QUIET:
            return self.frames.send({"t": "metric", "n": 0, "what": what, "told": told})
        return self._result({"t": "metric", "what": what, "told": told})

    def log(self, message: str, level: int) -> None:
        self.frames.send({"t": "log", "message": message, "level": level})

    def _result(self, header: dict[str, Any]) -> Any:
        """raises TritonModelException"""
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
        """In the process's first thread, as some of what models import expects."""
        threading.Thread(target=self._read, name="millrace-reader", daemon=True).start()
        while True:
            header, tensors = self._jobs.get()
            getattr(self, f"_{header['t']}")(header, tensors)
            del header, tensors  # the next may be long in coming
            self._frames.settle()

    def _read(self) -> None:
        """Answers go to those who wait for them, the rest to the first thread; without a server nothing is left."""
        try:
            while (frame := self._frames.read()) is not None:
                header, tensors = frame
                kind, host = header["t"], self._host
                if host is None or kind in ("execute", "close"):
                    self._jobs.put((header, tensors))
                elif kind == "answer":
                    host.answered(header, tensors)
                elif kind == "result":
                    host.result(header)
                elif kind == "is_ready":
                    threading.Thread(target=self._ready, name="millrace-ready", daemon=True).start()
                elif kind == "cancel" and (request := host.requests.get(header["r"])) is not None:
                    request.cancelled = True
                del frame, header, tensors
        except BaseException:  # noqa: BLE001  whatever it is, nobody hears the server any more
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _load(self, header: dict[str, Any], tensors: list[Named]) -> None:
        said = RaisedByModelError(Path(header["file"]), header["arguments"], header["outputs"], header["decoupled"])
        self._host = _Host(self._frames, header["instance"], said.name)
        try:
            self._model = PythonModelRunner(said, self._host)
        except GuestError as error:
            self._frames.send({"t": "failed", "failed": str(error)})
        else:
            self._frames.send({"t": "loaded", "has_say": self._model.has_say})

    def _ready(self) -> None:
        """Beside whatever it executes."""
        assert self._model is not None, "it was loaded"
        failed, is_ready = None, False
        try:
            is_ready = self._model.is_ready()
        except GuestError as error:
            failed = str(error)
        self._frames.send({"t": "ready", "ready": is_ready, "failed": failed})

    def _complete(self, header: dict[str, Any], tensors: list[Named]) -> None:
        file = Path(header["file"])
        try:
            self._frames.send({"t": "completed", "config": completed_by(file, header["config"])})
        except GuestError as error:
            self._frames.send({"t": "failed", "failed": str(error)})
        except (TypeError, ValueError) as error:  # a configuration that is no JSON
            self._frames.send({"t": "failed", "failed": told(error, file)})

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
        except GuestError as error:
            failed = str(error)
            for request in requests:  # which is the answer of all that have none
                self._host.requests.pop(request.number, None)
        self._frames.send({"t": "done", "failed": failed}, last=True)

    def _close(self, header: dict[str, Any], tensors: list[Named]) -> None:
        failed = None
        if self._model is not None:
            try:
                self._model.close()
            except BaseException as error:  # noqa: BLE001  a model may raise anything; the server's log has it
                failed = said(error)
        self._frames.send({"t": "closed", "failed": failed})


def run(fd: int) -> None:
    connection = socket.socket(fileno=fd)
    _Child(Frames(connection, Arena(MOST_SHARED_BYTES), Mapped(writable=True))).run()
