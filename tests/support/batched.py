"""What every backend of networks must do with sequences, and with requests of different shapes."""

import asyncio
from pathlib import Path

import numpy as np

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput
from tests.support.loaded import Loaded, infer

# Behind a backend's name.
SIDES = """input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "who" data_type: TYPE_INT64 dims: [ 1 ] }"""
SEQUENCES = """max_batch_size: 4 %s
sequence_batching {
  %s
  control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
  control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
  state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ 2 ] }
}
"""
RAGGED = """max_batch_size: 16
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output [ { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "twice" data_type: TYPE_FP32 dims: [ -1 ] } ]
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "at"
              data_type: TYPE_INT32 source_input: "x" }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "twice" source_input: "x" }
dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [ 4 ] }
"""


async def sums_of(model: Model, id_: int) -> None:
    """`model`: y = all x of its sequence so far, [1, 2]; who = the sequence's id. Clients see nothing else of it"""
    assert [i.name for i in model.config.input] == ["x"]
    total = np.zeros((1, 2), np.float32)
    for i in range(4):
        x = np.random.default_rng((id_, i)).integers(0, 9, (1, 2)).astype(np.float32)
        total += x
        request = InferRequest({})
        request.correlation_id, request.flags = id_, (i == 0) | (i == 3) << 1
        model.checker.attach_inputs(request, [RawInput("x", "FP32", x.shape, x)])
        outputs = (await model.infer(request)).outputs
        assert outputs.keys() == {"y", "who"} and outputs["who"].tolist() == [[id_]]
        assert np.array_equal(outputs["y"], total)


async def ragged_of(root: Path) -> None:
    """Model "sums": of each request the sum of its elements, and each element twice; four are one batch."""
    xs = [np.random.default_rng(n).integers(0, 9, (1, n)).astype(np.float32) for n in (1, 7, 3, 4)]
    async with Loaded(root) as repository:
        found = await asyncio.gather(*(infer(repository, "sums", x=x) for x in xs))
        for x, one in zip(xs, found, strict=True):
            assert np.array_equal(one["sum"], [[x.sum()]]) and np.array_equal(one["twice"], x * 2)
        assert repository.get("sums").statistics.by_size.keys() == {4}, "all in one"
        alone = await infer(repository, "sums", x=xs[1])
        assert np.array_equal(alone["sum"], [[xs[1].sum()]]) and np.array_equal(alone["twice"], xs[1] * 2)
