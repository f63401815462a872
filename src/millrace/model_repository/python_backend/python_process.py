"""Python models in a stub process, with the interpreter that their configuration names.

Calls of the model to the server go to the same `ServerHost` as in this process. Requests go over a socket, large
tensors through shared memory: one copy in each direction.
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
from millrace.model_repository.python_backend.python_host import InProcessBls, ServerHost, to_status_error
from millrace.model_repository.python_backend.python_interpreter import Python, StubProcess
from millrace.model_repository.python_backend.stub.errors import TritonModelException
from millrace.model_repository.python_backend.stub.host_interface import BlsRequest, ModelResponse
from millrace.model_repository.python_backend.stub.ipc import FrameError, Named
from millrace.model_repository.python_backend.stub.model_runner import ModelDescription
from millrace.model_repository.python_backend.stub.stub_process import read_response, response_fields, response_tensors
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError

log = logging.getLogger(__name__)
CLOSE_S = 30.0  # for `finalize`


def auto_complete_in_child(python: Python, file: Path, config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Run `auto_complete_config` in a temporary process; None if the model has none. raises StatusError"""
    process = StubProcess(python, name)
    try:
        process.frames.send({"t": "complete", "file": str(file), "config": config})
        frame = process.frames.read()
        if frame is None:
            raise StatusError(Code.INTERNAL, process.exit_reason())
        if "failed" in frame[0]:
            raise StatusError(Code.INTERNAL, frame[0]["failed"])
        completed_config: dict[str, Any] | None = frame[0]["config"]
        return completed_config
    except (FrameError, OSError) as error:
        raise StatusError(Code.INTERNAL, f"{process.exit_reason()}: {error}") from None
    finally:
        process.close()
        process.frames.close()


class StubInstance(Instance):
    responds_async = True

    def __init__(self, python: Python, description: ModelDescription, context: InstanceContext) -> None:
        """raises StatusError"""
        self._name, self._host = context.name, ServerHost(context)
        self._requests: dict[int, InferRequest] = {}  # unanswered requests by number
        self._numbers: dict[InferRequest, int] = {}
        self._next = itertools.count(1)
        self._bls_calls: dict[int, InProcessBls] = {}  # open BLS calls by number
        # Completion callback and requests of the batch in execution.
        self._done: tuple[Callable[[StatusError | None], None], Sequence[InferRequest]] | None = None
        self._loaded: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[str | bool] = queue.SimpleQueue()  # its readiness, or the error
        self._reports_readiness = False
        self._closed: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock, self._lost = threading.Lock(), ""
        self._tell: Callable[[str], None] | None = None
        n_instances = sum(group.count for group in context.config.instance_group)
        self._process = StubProcess(python, context.name, max(1, usable_cores() // max(1, n_instances)))
        self._outgoing: queue.SimpleQueue[tuple[dict[str, Any], Sequence[Named]] | None] = queue.SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"millrace-{context.name}", daemon=True).start()
        self._post(
            {
                "t": "load", "file": str(description.file), "arguments": dict(description.arguments),
                "outputs": list(description.outputs), "decoupled": description.is_decoupled, "instance": context.name,
            }
        )  # fmt: skip
        failed = self._loaded.get()
        if failed is not None:
            self._end()
            raise StatusError(Code.INTERNAL, failed)

    # ------------------------------------------------------------------ of its worker's thread

    def execute(self, requests: Sequence[InferRequest]) -> None:
        """Execute a batch and wait for it."""
        came = queue.SimpleQueue[StatusError | None]()
        self.begin(requests, came.put)
        if (failed := came.get()) is not None:
            raise failed

    def begin(self, requests: Sequence[InferRequest], done: Callable[[StatusError | None], None]) -> None:
        """Send a batch to the process; the reader thread calls `done`, so no thread waits."""
        entries, tensors = [], list[Named]()
        with self._lock:
            if self._lost:
                raise InstanceLostError
            self._done = done, requests
            for request in requests:
                number = self._numbers[request] = next(self._next)
                self._requests[number] = request
        for request in requests:
            number = self._numbers.get(request, 0)
            entries.append(
                {
                    "r": number, "id": request.id, "outputs": list(request.outputs), "n": len(request.inputs),
                    "parameters": request.parameters, "correlation_id": request.correlation_id, "flags": request.flags,
                    "timeout_us": request.timeout_us, "cancelled": request.cancelled,
                    **({"trace_context": request.trace.context} if request.trace is not None else {}),
                }
            )  # fmt: skip
            tensors += request.inputs.items()
        try:
            self._process.frames.send({"t": "execute", "requests": entries}, tensors)
        except OSError as error:
            log.debug("%s: %s", self._name, error)  # the process is gone: the reader thread ends the batch
        except FrameError as error:
            self._finish_batch(StatusError(Code.INTERNAL, f"instance '{self._name}': {error}"))

    def memory_bytes(self) -> int | None:
        try:
            return resident_bytes(self._process.pid)
        except OSError:  # the process has just ended
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
        self._process.close()
        self._host.close()

    def _forget(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            self._requests.pop(self._numbers.pop(request, 0), None)

    # ------------------------------------------------------------------ of the event loop

    def on_cancel(self, request: InferRequest) -> None:
        number = self._numbers.get(request)
        if number is not None:
            self._post({"t": "cancel", "r": number})

    def on_lost(self, tell: Callable[[str], None]) -> None:
        with self._lock:
            self._tell = tell
            lost = self._lost
        if lost:
            tell(lost)

    def readiness_check(self) -> Callable[[], bool] | None:
        return self._is_ready if self._reports_readiness else None

    # ------------------------------------------------------------------ of its own threads

    def _is_ready(self) -> bool:
        """Query readiness, one call at a time. raises StatusError"""
        self._post({"t": "is_ready"})
        answer = self._lost or self._ready.get()  # on loss, an answer is queued after `_lost` is set
        if isinstance(answer, str):
            raise StatusError(Code.INTERNAL, answer)
        return answer

    def _post(self, header: dict[str, Any], tensors: Sequence[Named] = ()) -> None:
        """Queue a frame for the writer thread, for threads that must not block."""
        self._outgoing.put((header, tensors))

    def _write(self) -> None:
        while (frame := self._outgoing.get()) is not None:
            try:
                self._process.frames.send(*frame)
            except OSError:
                return  # the reader thread gets the same error
            except FrameError as error:
                self._process.kill(str(error))  # a response that it waits for exceeds the frame limit
                return
            del frame

    def _read(self) -> None:
        try:
            while (frame := self._process.frames.read()) is not None:
                header, tensors = frame
                getattr(self, f"_on_{header['t']}")(header, tensors)
                del frame, header, tensors  # keep no reference to the arrays
        except OSError as error:
            log.debug("%s: %s", self._name, error)  # treated as the end of the stream
        except Exception as error:  # noqa: BLE001  any malformed message ends the process
            self._process.kill(f"what it says is not understood: {type(error).__name__}: {error}")
        self._process.frames.close()
        self._on_exit()

    def _on_exit(self) -> None:
        """Report the loss first, so that no new batch arrives; then fail all open requests."""
        how = self._process.exit_reason()
        with self._lock:
            self._lost = how
            tell, requests = self._tell, list(self._requests.values())
        if tell is not None and not self._host.is_closing:
            tell(how)
        failed = f"Stub process '{self._name}' is not healthy: {how}"
        for call in list(self._bls_calls.values()):
            call.cancel()
        for request in requests:
            request.fail(StatusError(Code.INTERNAL, request.error_prefix + failed))
        self._requests.clear()
        self._numbers.clear()
        self._finish_batch(StatusError(Code.INTERNAL, failed))
        for waiting in (self._loaded, self._closed, self._ready):
            waiting.put(failed)

    def _on_answered(self, header: dict[str, Any], tensors: list[Named]) -> None:
        request = self._requests.get(header["r"])
        if header["final"] and request is not None:
            self._forget((request,))
        if request is None:
            return
        answer = read_response(header, tensors)
        if answer is None:
            request.send(None, header["final"])
        elif answer.error is not None:
            request.fail(to_status_error(answer.error), header["final"])
        else:
            request.send(InferResponse(answer.outputs, answer.parameters), header["final"])

    def _on_again(self, header: dict[str, Any], tensors: list[Named]) -> None:
        request = self._requests.get(header["r"])
        if request is not None:
            self._forget((request,))
            request.reschedule()

    def _on_done(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._finish_batch(None if header["failed"] is None else StatusError(Code.INTERNAL, header["failed"]))

    def _finish_batch(self, failed: StatusError | None) -> None:
        with self._lock:
            current, self._done = self._done, None
        if current is None:
            return
        done, requests = current
        if failed is not None:
            self._forget(requests)
        done(failed)

    def _on_loaded(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._host.is_executing, self._reports_readiness = True, header["has_say"]
        self._loaded.put(None)

    def _on_ready(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._ready.put(header["ready"] if header["failed"] is None else header["failed"])

    def _on_failed(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._loaded.put(header["failed"])

    def _on_closed(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._closed.put(header["failed"])

    def _on_free(self, header: dict[str, Any], tensors: list[Named]) -> None:
        """Handle a frame that only releases shared memory, which reading it has done."""

    def _on_log(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._host.log(header["message"], header["level"])

    def _on_ask(self, header: dict[str, Any], tensors: list[Named]) -> None:
        number = header["c"]
        parents = [self._requests[r] for r in header["behind"] if r in self._requests]
        bls_request = BlsRequest(
            header["model"], header["version"], header["id"], header["correlation_id"], header["flags"],
            header["timeout_us"], header["parameters"], tensors, header["outputs"], header["decoupled"], (),
        )  # fmt: skip

        def receive(answer: ModelResponse | None, final: bool) -> None:
            if final:
                self._bls_calls.pop(number, None)
            self._post(
                {"t": "answer", "c": number, "final": final, **response_fields(answer)}, response_tensors(answer)
            )

        self._bls_calls[number] = self._host.call_model_for(bls_request, parents, receive)

    def _on_stop(self, header: dict[str, Any], tensors: list[Named]) -> None:
        if (call := self._bls_calls.get(header["c"])) is not None:
            call.cancel()

    def _on_taken(self, header: dict[str, Any], tensors: list[Named]) -> None:
        if (call := self._bls_calls.get(header["c"])) is not None:
            call.on_response_read()

    def _on_control(self, header: dict[str, Any], tensors: list[Named]) -> None:
        """Run model control in a thread, because loading a model takes long."""
        threading.Thread(target=self._answer, args=(self._host.control, header), daemon=True).start()

    def _on_metric(self, header: dict[str, Any], tensors: list[Named]) -> None:
        self._answer(self._host.metric, header)

    def _answer(self, do: Callable[..., Any], header: dict[str, Any]) -> None:
        try:
            value = do(header["what"], **header["arguments"])
        except TritonModelException as error:
            self._post({"t": "result", "n": header["n"], "failed": str(error)})
            return
        if header["n"]:
            self._post({"t": "result", "n": header["n"], "value": value})
