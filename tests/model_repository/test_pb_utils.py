"""What `pb_utils` refuses to be given, and by which exceptions: those that Triton's own tests ask for."""

from typing import Any

import numpy as np
import pytest

from millrace.model_repository.python_backend.stub.errors import TritonModelException
from millrace.model_repository.python_backend.stub.pb_utils import make_pb_utils

PB = make_pb_utils(None)
TENSOR = PB.Tensor("INPUT0", np.array([1, 2], np.int32))
RIGHT: dict[str, Any] = {"inputs": [TENSOR], "model_name": "m", "requested_output_names": ["OUT"]}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"inputs": [None]}, TritonModelException), ({"inputs": None}, TypeError), ({"model_name": None}, TypeError),
        ({"requested_output_names": [None]}, TypeError), ({"requested_output_names": None}, TypeError),
        ({"correleation_id": None}, TypeError), ({"request_id": None}, TypeError), ({"model_version": None}, TypeError),
        ({"flags": None}, TypeError),
    ],
)  # fmt: skip
def test_requests(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        PB.InferenceRequest(**{**RIGHT, **wrong})
    assert PB.InferenceRequest(requested_output_names=[], inputs=[], model_name="m").inputs() == []


def test_responses() -> None:
    for outputs, error in (([None], TritonModelException), (None, TypeError)):
        with pytest.raises(error):
            PB.InferenceResponse(output_tensors=outputs)
    assert PB.InferenceResponse(output_tensors=[]).output_tensors() == []
    assert PB.InferenceResponse([TENSOR]).output_tensors() == [TENSOR]


def test_tensors() -> None:
    for name, array in ((None, np.zeros(1)), ("OUTPUT0", None), ("", None)):
        with pytest.raises(TypeError):
            PB.Tensor(name, array)
    for name in ("OUTPUT0", ""):
        with pytest.raises(TritonModelException):
            PB.Tensor.from_dlpack(name, None)


def test_messages() -> None:
    logger = PB.Logger
    for level in (None, 1, "INFO"):
        with pytest.raises(TypeError, match="the level of a message is"):
            logger.log("Invalid Level", level)
    for log in (logger.log_info, logger.log_warn, logger.log_error, logger.log_verbose, PB.TritonError):
        with pytest.raises(TypeError, match="a name or a message is str or bytes, and this is NoneType"):
            log(None)
    logger.log("Level unspecified")
    logger.log("at a level", logger.WARNING)
