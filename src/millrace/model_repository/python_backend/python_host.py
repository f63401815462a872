"""Server side of a model.py: BLS requests, model control, metrics and the log."""

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
    BlsClient,
    BlsRequest,
    Host,
    Incoming,
    ModelResponse,
    Receive,
)
from millrace.model_repository.repository.model_names import ModelId
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array, output_datatype

LOG = logging.getLogger("millrace.serve.models")
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)


class InProcessRequest(Incoming):
    """A request to a Python model in this process."""

    def __init__(self, request: InferRequest) -> None:
        self.request = request
        self.id, self.inputs, self.outputs = request.id, request.inputs, request.outputs
        self.parameters, self.correlation_id = request.parameters, request.correlation_id
        self.flags, self.timeout_us = request.flags, request.timeout_us
        self.trace_context = request.trace.context if request.trace is not None else None

    @property
    def cancelled(self) -> bool:  # type: ignore[override]
        return self.request.cancelled

    def send(self, answer: ModelResponse | None, final: bool) -> None:
        """Send a response with copied arrays, because the model may reuse its own before the response is encoded."""
        if answer is None:
            self.request.send(None, final)
        elif answer.error is not None:
            self.request.fail(to_status_error(answer.error), final)
        else:
            copied = {name: array.copy() for name, array in answer.outputs.items()}
            self.request.send(InferResponse(copied, answer.parameters), final)

    def reschedule(self) -> None:
        self.request.reschedule()


def to_status_error(error: TritonError) -> StatusError:
    code = error.code()
    return StatusError(Code[CODES[code]] if 0 <= code < len(CODES) else Code.UNKNOWN, error.message())


class ServerHost(Host):
    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context.name, context.config.name)
        self._context, self._bls = context, context.bls
        self._numbers: set[int] = set()  # of the instance's custom metrics
        self.has_called_models = False  # whether it ever called another model

    def call_model(self, bls_request: BlsRequest, receive: Receive) -> BlsClient:
        """Call a model with copied inputs, because the caller may write into its own meanwhile."""
        parents = [incoming.request for incoming in bls_request.parents if isinstance(incoming, InProcessRequest)]
        copied = [(name, array.copy()) for name, array in bls_request.inputs]
        return self.call_model_for(replace(bls_request, inputs=copied), parents, receive)

    def call_model_for(
        self, bls_request: BlsRequest, parents: Sequence[InferRequest], receive: Receive
    ) -> "InProcessBls":
        """Call a model on behalf of `parents`, with inputs that are not modified meanwhile."""
        self.has_called_models = True
        request = InferRequest({}, tuple(bls_request.outputs), bls_request.id)
        request.received_ns = time.monotonic_ns()  # the timeout starts here, not once the event loop runs
        request.parameters, request.correlation_id = dict(bls_request.parameters), bls_request.correlation_id
        request.flags, request.timeout_us = bls_request.flags, bls_request.timeout_us
        request.callers = (*max((outer.callers for outer in parents), key=len, default=()), self.model)
        request.priority = min((outer.priority for outer in parents), default=0)

        def on_response(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
            if error is not None:
                receive(ModelResponse(error=TritonError(error.message, CODES.index(error.code.name))), final)
            else:
                receive(ModelResponse(response.outputs, response.parameters) if response is not None else None, final)

        try:
            raw_inputs = [_raw_input(name, array) for name, array in bls_request.inputs]
        except StatusError as error:
            raise TritonModelException(str(error)) from None
        call = NestedRequest(
            bls_request.model, bls_request.version, bls_request.is_decoupled, request, raw_inputs, parents, on_response
        )
        if not self._bls.post(self._bls.begin, call):
            receive(ModelResponse(error=TritonError("Server is stopping", TritonError.UNAVAILABLE)), True)
        return InProcessBls(self._bls, call)

    def control(self, operation: str, **arguments: Any) -> Any:
        name = str(arguments["name"])
        try:
            if operation == "load":
                config, files = _config(arguments["config"]), _files(arguments["files"])
                caller = ModelId(self._context.namespace, self.model)
                work = self._bls.load(caller, bool(arguments["is_loading"]), name, config, files)
                return self._bls.wait_for(work)
            if operation == "unload":
                return self._bls.wait_for(self._bls.unload(name, arguments["with_members"]))
            return self._bls.wait_for(self._bls.is_ready(name, _version(arguments["version"])))
        except StatusError as error:
            raise TritonModelException(str(error)) from None

    def metric(self, operation: str, **arguments: Any) -> Any:
        custom = self._bls.custom
        try:
            if operation == "drop":
                self._numbers.discard(arguments["number"])
                return custom.drop(arguments["number"])
            if operation not in ("family", "metric"):
                return custom.change(operation, arguments["number"], arguments["value"])
            number = (
                custom.family(arguments["name"], arguments["description"], arguments["kind"])
                if operation == "family"
                else custom.metric(arguments["family"], arguments["labels"], arguments["buckets"])
            )
        except StatusError as error:
            raise TritonModelException(str(error)) from None
        self._numbers.add(number)
        return number

    def close(self) -> None:
        """Drop the instance's custom metrics."""
        while self._numbers:
            self._bls.custom.drop(self._numbers.pop())

    def log(self, message: str, level: int) -> None:
        LOG.log(_LEVELS[level], "%s", message)


class InProcessBls(BlsClient):
    def __init__(self, bls: BlsExecutor, call: NestedRequest) -> None:
        self._bls, self._call = bls, call

    def cancel(self) -> None:
        self._bls.post(self._bls.cancel, self._call)

    def on_response_read(self) -> None:
        if self._call.is_decoupled:
            self._bls.post(self._bls.on_response_read, self._call)


def _raw_input(name: str, array: Array) -> RawInput:
    """Convert an array to an input. raises StatusError"""
    return RawInput(name, output_datatype(name, array), array.shape, array)


def _files(files: Mapping[str, str]) -> dict[str, bytes | str]:
    """Strip the prefix of file names. raises TritonModelException"""
    if wrong := next((name for name in files if not name.startswith(PREFIX)), None):
        raise TritonModelException(f"'{wrong:.80}' is no file of a load: names are like {PREFIX}1/model.onnx")
    return {name.removeprefix(PREFIX): data for name, data in files.items()}


def _config(text: str) -> dict[str, Any] | None:
    """Parse a JSON configuration; None if empty. raises TritonModelException"""
    if not text:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TritonModelException(f"the configuration to load a model with is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise TritonModelException("the configuration to load a model with is no JSON object")
    return config


def _version(text: str) -> int | None:
    """Parse a version; None is the highest. raises TritonModelException"""
    if text in ("", "-1"):
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise TritonModelException(
            f"failed to get model version from specified version string '{text:.40}', version should be an integral "
            "value > 0"
        )
    return int(text)
