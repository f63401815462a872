"""What a model.py asks of the server, answered: other models, their loading, the log."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.lifecycle.load_override import PREFIX
from millrace.model_repository.models.bls import BlsExecutor, NestedRequest
from millrace.model_repository.python_backend.stub.errors import CODES, TritonError, TritonModelException
from millrace.model_repository.python_backend.stub.host_interface import (
    Answer,
    BlockingCalls,
    BlsClient,
    BlsRequest,
    Host,
    Incoming,
    Receive,
)
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array, named_type

LOG = logging.getLogger("millrace.serve.models")
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)


class InProcessRequest(Incoming):
    """A request to a model that runs in this process."""

    def __init__(self, request: InferRequest) -> None:
        self.request = request
        self.id, self.inputs, self.outputs = request.id, request.inputs, request.outputs
        self.parameters, self.correlation_id = request.parameters, request.correlation_id
        self.flags, self.timeout_us = request.flags, request.timeout_us
        self.trace_context = request.trace.context if request.trace is not None else None

    @property
    def cancelled(self) -> bool:  # type: ignore[override]
        return self.request.cancelled

    def send(self, answer: Answer | None, final: bool) -> None:
        """Arrays are copied: a model may write into its own again before this one's answer is written."""
        if answer is None:
            self.request.send(None, final)
        elif answer.error is not None:
            self.request.fail(status_of(answer.error), final)
        else:
            copied = {name: array.copy() for name, array in answer.outputs.items()}
            self.request.send(InferResponse(copied, answer.parameters), final)

    def again(self) -> None:
        self.request.again()


def status_of(error: TritonError) -> StatusError:
    code = error.code()
    return StatusError(Code[CODES[code]] if 0 <= code < len(CODES) else Code.UNKNOWN, error.message())


class ServerHost(Host):
    def __init__(self, given: InstanceContext) -> None:
        super().__init__(given.name, given.config.name)
        self._given, self._others = given, given.others
        self._numbers: set[int] = set()  # of its metrics
        self.has_asked = False  # another model, ever

    def ask(self, asked: BlsRequest, receive: Receive) -> BlsClient:
        """Inputs are copied: whoever asks may write into its own while they are computed."""
        behind = [incoming.request for incoming in asked.behind if isinstance(incoming, InProcessRequest)]
        copied = [(name, array.copy()) for name, array in asked.inputs]
        return self.ask_for(replace(asked, inputs=copied), behind, receive)

    def ask_for(self, asked: BlsRequest, behind: Sequence[InferRequest], receive: Receive) -> "InProcessBls":
        """The same, for these requests, with inputs that nobody writes into."""
        self.has_asked = True
        request = InferRequest({}, tuple(asked.outputs), asked.id)
        request.received_ns = time.monotonic_ns()  # its timeout counts from here, not from the event loop's turn
        request.parameters, request.correlation_id = dict(asked.parameters), asked.correlation_id
        request.flags, request.timeout_us = asked.flags, asked.timeout_us
        request.priority = min((outer.priority for outer in behind), default=0)

        def answered(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
            if error is not None:
                receive(Answer(error=TritonError(error.message, CODES.index(error.code.name))), final)
            else:
                receive(Answer(response.outputs, response.parameters) if response is not None else None, final)

        try:
            given = [_given(name, array) for name, array in asked.inputs]
        except StatusError as error:
            raise TritonModelException(str(error)) from None
        waits = self._given.waits if asked.waits is not BlockingCalls.NO else None
        call = NestedRequest(
            self.model, asked.model, asked.version, asked.is_decoupled, request, given, behind, waits,
            asked.waits is BlockingCalls.YES, answered,
        )  # fmt: skip
        if not self._others.post(self._others.begin, call):
            receive(Answer(error=TritonError("Server is stopping", TritonError.UNAVAILABLE)), True)
        return InProcessBls(self._others, call)

    def control(self, what: str, **told: Any) -> Any:
        name = str(told["name"])
        try:
            if what == "load":
                config, files = _config(told["config"]), _files(told["files"])
                by = ModelId(self._given.namespace, self.model)
                work = self._others.load(by, bool(told["is_loading"]), name, config, files)
                return self._others.wait_for(work)
            if what == "unload":
                return self._others.wait_for(self._others.unload(name, told["with_members"]))
            return self._others.wait_for(self._others.is_ready(name, _version(told["version"])))
        except StatusError as error:
            raise TritonModelException(str(error)) from None

    def metric(self, what: str, **told: Any) -> Any:
        custom = self._others.custom
        try:
            if what == "drop":
                self._numbers.discard(told["number"])
                return custom.drop(told["number"])
            if what not in ("family", "metric"):
                return custom.change(what, told["number"], told["value"])
            number = (
                custom.family(told["name"], told["description"], told["kind"])
                if what == "family"
                else custom.metric(told["family"], told["labels"], told["buckets"])
            )
        except StatusError as error:
            raise TritonModelException(str(error)) from None
        self._numbers.add(number)
        return number

    def close(self) -> None:
        """What the instance counted is shown no more."""
        while self._numbers:
            self._others.custom.drop(self._numbers.pop())

    def log(self, message: str, level: int) -> None:
        LOG.log(_LEVELS[level], "%s", message)


class InProcessBls(BlsClient):
    def __init__(self, others: BlsExecutor, call: NestedRequest) -> None:
        self._others, self._call = others, call

    def cancel(self) -> None:
        self._others.post(self._others.cancel, self._call)

    def taken(self) -> None:
        if self._call.is_decoupled:
            self._others.post(self._others.taken, self._call)


def _given(name: str, array: Array) -> RawInput:
    """raises StatusError"""
    return RawInput(name, named_type(name, array), array.shape, array)


def _files(told: Mapping[str, str]) -> dict[str, bytes | str]:
    """raises TritonModelException"""
    if wrong := next((name for name in told if not name.startswith(PREFIX)), None):
        raise TritonModelException(f"'{wrong:.80}' is no file of a load: names are like {PREFIX}1/model.onnx")
    return {name.removeprefix(PREFIX): data for name, data in told.items()}


def _config(text: str) -> dict[str, Any] | None:
    """raises TritonModelException"""
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TritonModelException(f"the configuration to load a model with is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise TritonModelException("the configuration to load a model with is no JSON object")
    return found


def _version(text: str) -> int | None:
    """raises TritonModelException"""
    if text in ("", "-1"):
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise TritonModelException(
            f"failed to get model version from specified version string '{text:.40}', version should be an integral "
            "value > 0"
        )
    return int(text)
