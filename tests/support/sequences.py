"""Models of sequences, and what they are asked: a sum that goes on, as Triton's sequence example has it."""

from typing import Any

import numpy as np

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput

CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
"""
CORRID = 'control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }'


def accumulator(
    strategy: str = "", corrid: str = "UINT64", size: int = 4, more: str = "", idle_us: int = 5_000_000
) -> str:
    return f"""backend: "python" max_batch_size: {size} {more}
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
sequence_batching {{
  max_sequence_idle_microseconds: {idle_us} {strategy} {CONTROLS} {CORRID % corrid}
}}"""


# The sum of a sequence's inputs, by its id. What is not ready is not looked at, and told in the log of batches.
SUMS = """
import json
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums, self.log = {}, Path(args["model_repository"]) / (args["model_instance_name"] + ".log")

    def execute(self, requests):
        answers, told = [], []
        for request in requests:
            value, start, end, ready, corrid = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]
                for name in ("INPUT", "START", "END", "READY", "CORRID")
            )
            corrid = corrid.decode() if isinstance(corrid, bytes) else int(corrid)
            told.append([corrid, int(value), int(start), int(end), bool(ready)])
            if not ready:
                answers.append(pb_utils.InferenceResponse([]))
                continue
            self.sums[corrid] = (0 if start else self.sums[corrid]) + int(value)
            if value < 0:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("less than nothing")))
                continue
            out = pb_utils.Tensor("OUTPUT", np.array([[self.sums[corrid]]], np.int32))
            answers.append(pb_utils.InferenceResponse([out]))
            if end:
                del self.sums[corrid]
        with self.log.open("a") as log:
            log.write(json.dumps(told) + "\\n")
        return answers
"""


def part(model: Model, id_: int | str, value: int, flags: int = 0, **more: Any) -> InferRequest:
    """Of a sequence."""
    request = InferRequest({})
    request.correlation_id, request.flags = id_, flags
    for name, what in more.items():
        setattr(request, name, what)
    data = np.array([[value]] if model.config.max_batch_size else [value], np.int32)
    model.checker.attach_inputs(request, [RawInput("INPUT", "INT32", data.shape, data)])
    return request


# The same sum, kept by the server; OUTPUT_STATE is told where a client asks for it.
HELD_SUMS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            value, state = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "INPUT_STATE")
            )
            if value.item() == -1:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("less than nothing")))
                continue
            total = state + value
            state = total if value.item() != -2 else total.astype(np.int64)
            out = [pb_utils.Tensor("OUTPUT", total), pb_utils.Tensor("OUTPUT_STATE", state)]
            answers.append(pb_utils.InferenceResponse(out[: 1 if value.item() == -3 else 2]))
        return answers
"""


def holder(strategy: str = "", initial: str = "", told: bool = False, dims: str = "1") -> str:
    state = f"dims: [ {dims} ] data_type: TYPE_INT32"
    output = f'output {{ name: "OUTPUT_STATE" {state} }}' if told else ""
    return f"""backend: "python" max_batch_size: 4 {output}
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
sequence_batching {{ {strategy} state {{ input_name: "INPUT_STATE" output_name: "OUTPUT_STATE" {state} {initial} }} }}
"""
