"""Ragged batches: what is computed of a batch, of every kind, and how outputs are taken apart, beside plain loops."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.config.pbtxt_binder import read_config
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import Array
from millrace.model_repository.scheduling.ragged_batch import RaggedBatch

SIDES = """max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] allow_ragged_batch: true }
input { name: "plain" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 3 ] } output { name: "z" data_type: TYPE_FP32 dims: [ 1 ] }
"""


def ragged(more: str = "", sides: str = SIDES) -> RaggedBatch:
    return RaggedBatch(read_config((sides + more).encode(), Path("config.pbtxt")).config)


def request(batch: int, n: int, **more: Array) -> InferRequest:
    x = np.arange(batch * n * 2, dtype=np.float32).reshape(batch, n, 2) + 100 * n
    made = InferRequest({"x": x, **more})
    made.batch_size = batch
    return made


REQUESTS = [request(1, 3), request(2, 1), request(1, 0)]
COUNTS = [6, 4, 0]


@pytest.mark.parametrize("data_type", ["INT32", "FP32"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", COUNTS),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 10, 10]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 10, 10]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 6),
        ("BATCH_ITEM_SHAPE", [[3, 2], [1, 2], [1, 2], [0, 2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 2, 1, 2, 1, 2, 0, 2]),
    ],
)
def test_what_is_computed_of_a_batch(kind: str, expected: list[Any], data_type: str) -> None:
    said = f'batch_input {{ kind: {kind} target_name: [ "a", "b" ] data_type: TYPE_{data_type} source_input: "x" }}'
    found = ragged(said).gather(REQUESTS)
    assert found["a"].tolist() == found["b"].tolist() == expected
    assert found["a"].dtype == {"INT32": np.int32, "FP32": np.float32}[data_type]
    assert found["x"].tolist() == [v for r in REQUESTS for v in r.inputs["x"].reshape(-1).tolist()]


def test_inputs_that_are_not_ragged_are_put_together_as_ever() -> None:
    both = [request(2, 1, plain=np.array([[1], [2]])), request(1, 5, plain=np.array([[3]]))]
    assert ragged().gather(both)["plain"].tolist() == [[1], [2], [3]]
    assert not ragged(sides=SIDES.replace("allow_ragged_batch: true", "")) and ragged()


def test_outputs_are_taken_apart() -> None:
    said = ragged('batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }')
    whole = np.arange((3 + 2 + 0) * 3, dtype=np.float32)
    parts = said.scatter("y", whole, REQUESTS)
    assert [part.shape for part in parts] == [(1, 3, 3), (2, 1, 3), (1, 0, 3)]
    assert np.array_equal(np.concatenate([part.reshape(-1) for part in parts]), whole)
    assert [part.tolist() for part in said.scatter("z", np.arange(4).reshape(4, 1), REQUESTS)] == [
        [[0]],
        [[1], [2]],
        [[3]],
    ]
    for name, array, words in (
        ("y", whole[1:], "output 'y' has 14 elements, expected 15 by the shapes of 'x'"),
        ("z", np.zeros((3, 1)), "output 'z' has shape [3, 1] for a batch of 4"),
    ):
        with pytest.raises(StatusError) as failed:
            said.scatter(name, array, REQUESTS)
        assert str(failed.value) == words


def test_what_others_follow_from_must_be_there() -> None:
    said = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "a" data_type: TYPE_INT32 source_input: "plain" }'
    with pytest.raises(StatusError, match="input 'plain' is needed, as other inputs of a batch follow from it"):
        ragged(said).gather(REQUESTS)
