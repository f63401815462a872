"""A model.py in a process of its own, with the interpreter that its configuration names.

What it asks of the server goes to the same `ServerHost` as in this process. Requests go over a socket, large tensors
through memory that both map: one copy on the way there, one on the way back.
"""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.machine.cpu import usable_cores
from millrace.machine.process_info import resident_bytes
from millrace.model_repository.backends.backend import Instance, InstanceContext, InstanceLostError
from millrace.model_repository.python_backend.python_host import InProcessBls, ServerHost, status_of
from millrace.model_repository.python_backend.python_interpreter import Child, Python
from millrace.model_repository.python_backend.stub.errors import TritonModelException
from millrace.model_repository.python_backend.stub.host_interface import Answer, BlockingCalls, BlsRequest
from millrace.model_repository.python_backend.stub.ipc import FrameError, Named
from millrace.model_repository.python_backend.stub.model_runner import RaisedByModelError
from millrace.model_repository.python_backend.stub.stub_process import answer_fields, answer_read, answer_tensors
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError

log = logging.getLogger(__name__)
CLOSE_S = 30.0  # for `finalize`


def completed_in(python: Python, file: Path, config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What `auto_complete_config` makes of it, in a process for that alone. raises StatusError"""
    child = Child(python, name)
    try:
        child.frames.send({"t": "complete", "file": str(file), "config": config})
        frame = child.frames.read()
        if frame is None:
            raise StatusError(Code.INTERNAL, child.how_it_ended())
        if "failed" in frame[0]:
            raise StatusError(Code.INTERNAL, frame[0]["failed"])
        found: dict[str, Any] | None = frame[0]["config"]
        return found
    except (FrameError, OSError) as error:
        raise StatusError(Code.INTERNAL, f"{child.how_it_ended()}: {error}") from None
    finally:
        child.close()
        child.frames.close()


class ChildModel(Instance):
    answers_later = True

    def __init__(self, python: Python, said: RaisedByModelError, given: InstanceContext) -> None:
        """raises StatusError"""
        self._name, self._host = given.name, ServerHost(given)
        self._requests: dict[int, InferRequest] = {}  # that are not answered, by their numbers
        self._numbers: dict[InferRequest, int] = {}
        self._next = itertools.count(1)
        self._asking: dict[int, InProcessBls] = {}  # of other models
        # The batch that it executes, and what is told when it is done.
        self._done: tuple[Callable[[StatusError | None], None], Sequence[InferRequest]] | None = None
        self._loaded: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[str | bool] = queue.SimpleQueue()  # what it says of itself, or why it does not
        self._has_say = False
        self._closed: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock, self._lost = threading.Lock(), ""
        self._tell: Callable[[str], None] | None = None
        n_instances = sum(group.count for group in given.config.instance_group)
        self._child = Child(python, given.name, max(1, usable_cores() // max(1, n_instances)))
        self._outgoing: queue.SimpleQueue[tuple[dict[str, Any], Sequence[Named]] | None] = queue.SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"millrace-{given.name}", daemon=True).start()
        self._post(
            {
                "t": "load", "file": str(said.file), "arguments": dict(said.arguments), "outputs": list(said.outputs),
                "decoupled": said.is_decoupled, "instance": given.name,
            }
        )  # fmt: skip
        failed = self._loaded.get()
        if failed is not None:
            self._end()
            raise StatusError(Code.INTERNAL, failed)

    # ------------------------------------------------------------------ of its worker's thread

    def execute(self, requests: Sequence[InferRequest]) -> None:
        """As `begin`, and wait."""
        came = queue.SimpleQueue[StatusError | None]()
        self.begin(requests, came.put)
        if (failed := came.get()) is not None:
            raise failed

    def begin(self, requests: Sequence[InferRequest], done: Callable[[StatusError | None], None]) -> None:
        """Whoever reads its answers says that they are all there: no thread waits for that."""
        told, tensors = [], list[Named]()
        with self._lock:
            if self._lost:
                raise InstanceLostError
            self._done = done, requests
            for request in requests:
                number = self._numbers[request] = next(self._next)
                self._requests[number] = request
        for request in requests:
            number = self._numbers.get(request, 0)
            told.append(
                {
                    "r": number, "id": request.id, "outputs": list(request.outputs), "n": len(request.inputs),
                    "parameters": request.parameters, "correlation_id": request.correlation_id, "flags": request.flags,
                    "timeout_us": request.timeout_us, "cancelled": request.cancelled,
                    **({"trace_context": request.trace.context} if request.trace is not None else {}),
                }
            )  # fmt: skip
            tensors += request.inputs.items()
        try:
            self._child.frames.send({"t": "execute", "requests": told}, tensors)
        except OSError as error:
            log.debug("%s: %s", self._name, error)  # it is gone: its reader says so to `_done`
        except FrameError as error:
            self._is_done(StatusError(Code.INTERNAL, f"instance '{self._name}': {error}"))

    def memory_bytes(self) -> int | None:
        try:
            return resident_bytes(self._child.pid)
        except OSError:  # it has just ended
            return None

    def close(self) -> None:
        self._host.is_closing = True
        if not self._lost:
            self._post({"t": "close"})
            try:
                failed = self._closed.get(timeout=CLOSE_S)
            except queue.Empty:
                failed = f"it took longer than {CLOSE_S:g} s, and was killed"
            if failed is not None:
                log.error("%s: finalize failed: %s", self._name, failed)
        self._end()

    def _end(self) -> None:
        self._outgoing.put(None)
        self._child.close()
        self._host.close()

    def _forget(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            self._requests.pop(self._numbers.pop(request, 0), None)

    # ------------------------------------------------------------------ of the event loop

    def cancelled(self, request: InferRequest) -> None:
        number = self._numbers.get(request)
        if number is not None:
            self._post({"t": "cancel", "r": number})

    def when_lost(self, tell: Callable[[str], None]) -> None:
        with self._lock:
            self._tell = tell
            lost = self._lost
        if lost:
            tell(lost)

    def says_ready(self) -> Callable[[], bool] | None:
        return self._is_ready if self._has_say else None

    # ------------------------------------------------------------------ of its own threads

    def _is_ready(self) -> bool:
        """Asked once at a time. raises StatusError"""
        self._post({"t": "is_ready"})
        answer = self._lost or self._ready.get()  # whoever notes that it is lost answers after that
        if isinstance(answer, str):
            raise StatusError(Code.INTERNAL, answer)
        return answer

    def _post(self, header: dict[str, Any], tensors: Sequence[Named] = ()) -> None:
        """From threads that may not wait for it."""
        self._outgoing.put((header, tensors))

    def _write(self) -> None:
        while (frame := self._outgoing.get()) is not None:
            try:
                self._child.frames.send(*frame)
            except OSError:
                return  # the reader sees the same
            except FrameError as error:
                self._child.kill(str(error))  # an answer that it waits for is too large for any frame
                return
            del frame

    def _read(self) -> None:
        try:
            while (frame := self._child.frames.read()) is not None:
                header, tensors = frame
                getattr(self, f"_on_{header['t']}")(header, tensors)
                del frame, header, tensors  # arrays are held by those who got them alone
        except OSError as error:
            log.debug("%s: %s", self._name, error)  # as where nothing more comes
        except Exception as error:  # noqa: BLE001  whatever it is made of, who waits for this process must be told
            self._child.kill(f"what it says is not understood: {type(error).__name__}: {error}")
        self._child.frames.close()
        self._has_ended()

    def _has_ended(self) -> None:
        """First it is known to be lost, so that it is given nothing any more; then what it had is answered."""
        how = self._child.how_it_ended()
        with self._lock:
            self._lost = how
            tell, requests = self._tell, list(self._requests.values())
        if tell is not None and not self._host.is_closing:
            tell(how)
        failed = f"Stub process '{self._name}' is not healthy: {how}"
        for asking in list(self._asking.values()):
            asking.cancel()
        for request in requests:
            request.fail(StatusError(Code.INTERNAL, request.named + failed))
        self._requests.clear()
        self._numbers.clear()
        self._is_done(StatusError(Code.INTERNAL, failed))
        for waiting in (self._loaded, self._closed, self._ready):
            waiting.put(failed)

    def _on_answered(self, header: dict[str, Any], tensors: list[Named]) -> None:
        request = self._requests.get(header["r"])
        if header["final"] and request is not None:
            self._forget((request,))
        if request is None:
            return
        answer = answer_read(header, tensors)
        if answer is None:
            request.send(None, header["final"])
        elif answer.error is not None:
            request.fail(status_of(answer.error), header["final"])
        else:
            request.send(InferResponse(answer.outputs, answer.parameters), header["final"])

    def _on_again(self, header: dict[str, Any], tensors: list[Named]) -> None:
        request = self._requests.get(header["r"])
        if request is not None:
            self._forget((request,))
            request.again()

    def _on_done(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._is_done(None if header["failed"] is None else StatusError(Code.INTERNAL, header["failed"]))

    def _is_done(self, failed: StatusError | None) -> None:
        with self._lock:
            told, self._done = self._done, None
        if told is None:
            return
        done, requests = told
        if failed is not None:
            self._forget(requests)
        done(failed)

    def _on_loaded(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._host.is_executing, self._has_say = True, header["has_say"]
        self._loaded.put(None)

    def _on_ready(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._ready.put(header["ready"] if header["failed"] is None else header["failed"])

    def _on_failed(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._loaded.put(header["failed"])

    def _on_closed(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._closed.put(header["failed"])

    def _on_free(self, header: dict[str, Any], tensors: list[Named]) -> None:
        """Only what every frame may bring."""

    def _on_log(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._host.log(header["message"], header["level"])

    def _on_ask(self, header: dict[str, Any], tensors: list[Named]) -> None:
        number = header["c"]
        behind = [self._requests[r] for r in header["behind"] if r in self._requests]
        asked = BlsRequest(
            header["model"], header["version"], header["id"], header["correlation_id"], header["flags"],
            header["timeout_us"], header["parameters"], tensors, header["outputs"], header["decoupled"], (),
            BlockingCalls(header["waits"]),
        )  # fmt: skip

        def receive(answer: Answer | None, final: bool) -> None:
            if final:
                self._asking.pop(number, None)
            self._post({"t": "answer", "c": number, "final": final, **answer_fields(answer)}, answer_tensors(answer))

        self._asking[number] = self._host.ask_for(asked, behind, receive)

    def _on_stop(self, header: dict[str, Any], tensors: list[Named]) -> None:
        if (asking := self._asking.get(header["c"])) is not None:
            asking.cancel()

    def _on_taken(self, header: dict[str, Any], tensors: list[Named]) -> None:
        if (asking := self._asking.get(header["c"])) is not None:
            asking.taken()

    def _on_control(self, header: dict[str, Any], tensors: list[Named]) -> None:
        """Loading a model takes its time, in which this one goes on."""
        threading.Thread(target=self._answer, args=(self._host.control, header), daemon=True).start()

    def _on_metric(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._answer(self._host.metric, header)

    def _answer(self, do: Callable[..., Any], header: dict[str, Any]) -> None:
        try:
            value = do(header["what"], **header["told"])
        except TritonModelException as error:
            self._post({"t": "result", "n": header["n"], "failed": str(error)})
            return
        if header["n"]:
            self._post({"t": "result", "n": header["n"], "value": value})
