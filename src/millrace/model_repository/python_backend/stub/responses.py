"""`pb_utils.InferenceResponse`, and the sender of a request's answers."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import TritonError, TritonModelException
from .host_interface import Answer, Incoming, Parameter
from .tensors import Tensor, held

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
_MOST_PARAMETERS = 64 << 10  # characters of those of a response
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
        self._parameters = checked(parameters, _RESPONSE)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)


def response_of(answer: Answer | None) -> InferenceResponse:
    """What another model answered; nothing but the end is a response without tensors."""
    if answer is None:
        return InferenceResponse()
    found = InferenceResponse([Tensor(n, a) for n, a in answer.outputs.items()], answer.error)
    found._parameters = dict(answer.parameters)
    return found


def answer_of(response: InferenceResponse, wanted: Sequence[str]) -> Answer:
    """wanted: names that were asked for, others are left out; none: all"""
    arrays = dict(held(response._tensors))
    outputs = {name: arrays[name] for name in wanted if name in arrays} if wanted else arrays
    return Answer(outputs, response._parameters, response._error)


def checked(parameters: str | Mapping[str, Any] | None, of: str) -> dict[str, Parameter]:
    """parameters: an object, or its JSON; a client reads them as they are. raises TritonModelException"""
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
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise TritonModelException(f"the parameters of {of} are no JSON object: {error}") from None
    if len(text) > _MOST_PARAMETERS:
        raise TritonModelException(
            f"the parameters of {of} have {len(text)} characters; at most {_MOST_PARAMETERS} are allowed"
        )
    if not isinstance(found, dict):
        raise TritonModelException(f"the parameters of {of} are a {type(found).__name__}, not an object")
    for key, value in found.items():
        # In Triton a response's dictionary has no floats; the text of a request's parameters, which may, is handed on.
        has_floats = of != _RESPONSE or isinstance(parameters, str)
        if not isinstance(value, bool | int | str) and not (has_floats and isinstance(value, float)):
            what = f"found type {type(value)} for parameter '{key}' of {of}"
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, {what}")
        if isinstance(value, int) and not -_2_63 <= value < _2_64:
            raise TritonModelException(f"parameter '{key}' of {of} is no integer of 64 bits")
        try:
            f"{key}{value}".encode()
        except UnicodeEncodeError as error:
            raise TritonModelException(f"parameter '{key}' of {of} is no text: {error}") from None
    return found


def deliver(request: Incoming, response: InferenceResponse | None, final: bool) -> None:
    request.send(None if response is None else answer_of(response, request.outputs), final)


class InferenceResponseSender:
    """Sends the answers of one request, from any thread.

    A model that is not decoupled sends one response, which is the answer, with FINAL or without it.
    """

    def __init__(self, request: Incoming, is_decoupled: bool) -> None:
        self._request, self._is_decoupled = request, is_decoupled
        self._is_closed = self._may_go = self._is_answered = False
        self._lock = threading.RLock()  # not to be held while a destructor waits for it

    @property
    def is_answered(self) -> bool:
        """Whether the final response was sent, so that nothing can be told to the client any more."""
        return self._is_answered

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """raises TritonModelException"""
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
        """raises TritonModelException"""
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
        """It was answered in another way. Not `close`: as older models call that, and Triton has it no more."""
        self._is_closed = self._is_answered = True

    def _let_go(self) -> None:
        """Others will answer."""
        self._may_go = True

    def __del__(self) -> None:
        if not self._is_answered and not self._may_go:
            self._request.send(Answer(error=TritonError(LOST.format("its response sender"))), True)
