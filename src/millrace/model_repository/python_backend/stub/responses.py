"""`pb_utils.InferenceResponse`, and the sender of a request's responses."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import TritonError, TritonModelException
from .host_interface import Incoming, ModelResponse, Parameter
from .tensors import Tensor, named_arrays

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
_MAX_PARAMETERS = 64 << 10  # characters of a response's parameters
_RESPONSE = "a response"
_2_63, _2_64 = 1 << 63, 1 << 64
LOST = "the model let go of {} without TRITONSERVER_RESPONSE_COMPLETE_FINAL, so that nobody can answer any more"


class InferenceResponse:
    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | str | None = None,
        parameters: str | Mapping[str, Any] | None = None,
    ) -> None:
        """raises TritonModelException, and TypeError"""
        self._tensors = list(output_tensors)
        if not all(self._tensors):
            raise TritonModelException("Output tensor for inference response should not be empty.")
        self._error = TritonError(error) if isinstance(error, str) else error
        self._parameters = check_parameters(parameters, _RESPONSE)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)


def to_inference_response(answer: ModelResponse | None) -> InferenceResponse:
    """Convert another model's response; None becomes a response without tensors."""
    if answer is None:
        return InferenceResponse()
    response = InferenceResponse([Tensor(n, a) for n, a in answer.outputs.items()], answer.error)
    response._parameters = dict(answer.parameters)
    return response


def to_model_response(response: InferenceResponse, requested: Sequence[str]) -> ModelResponse:
    """Convert a response. requested: names of outputs to include; empty for all"""
    arrays = dict(named_arrays(response._tensors))
    outputs = {name: arrays[name] for name in requested if name in arrays} if requested else arrays
    return ModelResponse(outputs, response._parameters, response._error)


def check_parameters(parameters: str | Mapping[str, Any] | None, owner: str) -> dict[str, Parameter]:
    """Validate parameters given as a mapping or as JSON. raises TritonModelException"""
    if parameters is not None and not isinstance(parameters, str | Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, got {type(parameters)}")
    if not parameters:
        return {}
    if not isinstance(parameters, str):
        odd = next((key for key in parameters if not isinstance(key, str)), None)
        if odd is not None:
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(odd)}")
    try:
        text = parameters if isinstance(parameters, str) else json.dumps(dict(parameters))
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise TritonModelException(f"the parameters of {owner} are no JSON object: {error}") from None
    if len(text) > _MAX_PARAMETERS:
        raise TritonModelException(
            f"the parameters of {owner} have {len(text)} characters; at most {_MAX_PARAMETERS} are allowed"
        )
    if not isinstance(values, dict):
        raise TritonModelException(f"the parameters of {owner} are a {type(values).__name__}, not an object")
    for key, value in values.items():
        # In Triton a response's mapping may not contain floats, but JSON text passed on from a request may.
        has_floats = owner != _RESPONSE or isinstance(parameters, str)
        if not isinstance(value, bool | int | str) and not (has_floats and isinstance(value, float)):
            message = f"found type {type(value)} for parameter '{key}' of {owner}"
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, {message}")
        if isinstance(value, int) and not -_2_63 <= value < _2_64:
            raise TritonModelException(f"parameter '{key}' of {owner} is no integer of 64 bits")
        try:
            f"{key}{value}".encode()
        except UnicodeEncodeError as error:
            raise TritonModelException(f"parameter '{key}' of {owner} is no text: {error}") from None
    return values


def deliver(request: Incoming, response: InferenceResponse | None, final: bool) -> None:
    request.send(None if response is None else to_model_response(response, request.outputs), final)


class InferenceResponseSender:
    """Sends the responses of one request, from any thread.

    A model that is not decoupled sends exactly one response, with or without FINAL.
    """

    def __init__(self, request: Incoming, is_decoupled: bool) -> None:
        self._request, self._is_decoupled = request, is_decoupled
        self._is_closed = self._may_go = self._is_answered = False
        self._lock = threading.RLock()  # reentrant, because a destructor may need it

    @property
    def is_answered(self) -> bool:
        """Whether the final response was sent."""
        return self._is_answered

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. raises TritonModelException"""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(
                "Unable to send response. Unsupported value for the flags: "
                f"expected 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL, got {flags!r}."
            )
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        with self._lock:
            is_over = self._is_answered
            self._check(response)
            self._is_closed = bool(flags)
            self._is_answered = self._is_closed or not self._is_decoupled
        if self._is_decoupled or not is_over:
            deliver(self._request, response, self._is_answered)

    def _check(self, response: InferenceResponse | None) -> None:
        """Check that a response may be sent. raises TritonModelException"""
        if not self._is_decoupled and self._is_answered and response is not None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if not self._is_decoupled and not self._is_answered and response is None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def _close(self) -> None:
        """Close after the request was answered elsewhere. Not named `close`, which Triton has removed."""
        self._is_closed = self._is_answered = True

    def _detach(self) -> None:
        """Allow dropping the sender without a final response, because the request is executed again."""
        self._may_go = True

    def __del__(self) -> None:
        if not self._is_answered and not self._may_go:
            self._request.send(ModelResponse(error=TritonError(LOST.format("its response sender"))), True)
