"""The one request that is measured: two tensors FP32[1, 16], binary, and what is right to answer."""

import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.model_repository.request.tensors import Array

NAME, DIMS = "add_sub", 16
HTTP_PATH = f"/v2/models/{NAME}/infer"
GRPC_SERVICE, GRPC_METHOD = "inference.GRPCInferenceService", "ModelInfer"
_SIDE = '[ {{ name: "{0}0" data_type: TYPE_FP32 dims: [ 16 ] }}, {{ name: "{0}1" data_type: TYPE_FP32 dims: [ 16 ] }} ]'
CONFIG = f'backend: "add_sub" max_batch_size: 8\ninput {_SIDE.format("INPUT")}\noutput {_SIDE.format("OUTPUT")}\n'


def write_repository(root: Path) -> Path:
    (root / NAME / "1").mkdir(parents=True)
    (root / NAME / "config.pbtxt").write_text(CONFIG)
    return root


def inputs() -> tuple[Array, Array]:
    draw = np.random.default_rng(16)
    left, right = draw.standard_normal((2, 1, DIMS)).astype(np.float32)
    return left, right


def outputs() -> tuple[bytes, bytes]:
    left, right = inputs()
    return (left + right).tobytes(), (left - right).tobytes()


def http_request() -> tuple[dict[str, str], bytes]:
    """Headers and body, as Triton's own client writes them."""
    tensors = [
        {"name": f"INPUT{i}", "shape": [1, DIMS], "datatype": "FP32", "parameters": {"binary_data_size": 4 * DIMS}}
        for i in range(2)
    ]
    head = msgspec.json.encode({"inputs": tensors, "parameters": {"binary_data_output": True}})
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(head))}
    return headers, head + b"".join(array.tobytes() for array in inputs())


def message_classes() -> tuple[Any, Any]:
    """Of protobuf: ModelInferRequest and ModelInferResponse."""
    from millrace.serve.protocols.kserve.grpc.protobuf_messages import message

    return message("ModelInferRequest"), message("ModelInferResponse")


def grpc_request() -> bytes:
    asked, _ = message_classes()
    made = asked(model_name=NAME, raw_input_contents=[array.tobytes() for array in inputs()])
    for i in range(2):
        made.inputs.add(name=f"INPUT{i}", datatype="FP32", shape=[1, DIMS])
    found: bytes = made.SerializeToString()
    return found


def framed(message: bytes) -> bytes:
    """As gRPC writes a message that is not packed: a byte that says so, and its length."""
    return struct.pack(">BI", 0, len(message)) + message
