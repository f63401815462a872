"""Models that people run in a repository, and a FastAPI and a grpcio service of each with the same function.

    python -m benchmarks.tensors.backend_models FUNCTION [FILE]

FUNCTION: `sum` (two vectors, by NumPy), `twice` (two steps of it), `onnxruntime` or `openvino` (FILE is the network, on
one thread), `llm` (the bundled model, by `millrace.LLM`). The process prints the ports of HTTP and gRPC once it
listens; gRPC's is 0 for `llm`.
"""

import asyncio
import importlib.util
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

N = 16  # elements of a vector
TEXT, TOKENS = "Once upon a time", 8
_TENSORS = f"""
input [ {{ name: "A" data_type: TYPE_FP32 dims: [ {N} ] }}, {{ name: "B" data_type: TYPE_FP32 dims: [ {N} ] }} ]
output [ {{ name: "C" data_type: TYPE_FP32 dims: [ {N} ] }} ]
"""
_OWN = 'parameters { key: "MILLRACE_PROCESS" value { string_value: "own" } }'
_STEP = """{ model_name: "python" model_version: -1
  input_map { key: "A" value: "%s" } input_map { key: "B" value: "B" } output_map { key: "C" value: "%s" } }"""
_STEPS = f'platform: "ensemble" ensemble_scheduling {{ step [ {_STEP % ("A", "D")}, {_STEP % ("D", "C")} ] }}'
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("C", a + b)]))
        return responses
"""
# The function of the peer that each model stands beside.
MODELS = {"python": "sum", "python-own-process": "sum", "ensemble": "twice", "onnxruntime": "onnxruntime",
          "openvino": "openvino", "llm": "llm"}  # fmt: skip


def there(function: str) -> bool:
    """Whether what it needs is installed."""
    needed = {"onnxruntime": ("onnx", "onnxruntime"), "openvino": ("onnx", "openvino")}.get(function, ())
    return all(importlib.util.find_spec(name) for name in needed)


def write_network(path: Path) -> Path:
    """A + B, as a network of ONNX."""
    import onnx
    from onnx import TensorProto, helper

    a, b, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [N]) for name in "ABC")
    graph = helper.make_graph([helper.make_node("Add", ["A", "B"], ["C"])], "sum", [a, b], [c])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def write_repository(root: Path, network: Path) -> list[str]:
    """The names of its models: those whose packages are installed. network: written if one of them needs it"""
    names = [name for name, function in MODELS.items() if there(function)]
    configs = {
        "python": f'backend: "python" {_TENSORS}', "python-own-process": f'backend: "python" {_OWN} {_TENSORS}',
        "ensemble": f"{_STEPS} {_TENSORS}", "onnxruntime": f'backend: "onnxruntime" {_TENSORS}',
        "openvino": f'backend: "openvino" default_model_filename: "model.onnx" {_TENSORS}',
        "llm": 'backend: "millrace" parameters { key: "model" value { string_value: "tiny" } }',
    }  # fmt: skip
    for name in names:
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(configs[name])
        if name.startswith("python"):
            (root / name / "1" / "model.py").write_text(MODEL)
        elif name.startswith("o"):
            (root / name / "1" / "model.onnx").write_bytes(write_network(network).read_bytes())
    return names


# ---------------------------------------------------------------------- the peers

Function = Callable[[Any, Any], Any]  # two vectors of float32, and their sum


def function_of(name: str, file: str) -> Function:
    if name == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
        return lambda a, b: session.run(None, {"A": a, "B": b})[0]
    if name == "openvino":
        import openvino

        compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_NUM_THREADS": 1})
        request = compiled.create_infer_request()
        return lambda a, b: request.infer({"A": a, "B": b})[0]
    return (lambda a, b: a + b + b) if name == "twice" else (lambda a, b: a + b)


def application(name: str, file: str) -> Any:
    """FastAPI, with `def` and `async def` routes of the same function."""
    from fastapi import FastAPI
    from pydantic import BaseModel

    app = FastAPI()
    if name == "llm":
        from millrace import LLM, SamplingParams

        llm = LLM("tiny")

        class Prompt(BaseModel):
            text_input: str
            max_tokens: int

        def generated(asked: Prompt) -> Any:
            (found,) = llm.generate([asked.text_input], SamplingParams(max_tokens=asked.max_tokens, temperature=0))
            return {"text_output": found.outputs[0].text}

        app.post("/def")(with_types(generated, Prompt))
        return app

    class Vectors(BaseModel):
        a: list[float]
        b: list[float]

    function = function_of(name, file)

    def computed(asked: Vectors) -> Any:
        return {"c": function(np.array(asked.a, np.float32), np.array(asked.b, np.float32)).tolist()}

    async def in_loop(asked: Vectors) -> Any:
        return computed(asked)

    app.post("/def")(with_types(computed, Vectors))
    app.post("/async")(with_types(in_loop, Vectors))
    return app


def with_types(route: Callable[..., Any], body: type) -> Callable[..., Any]:
    """As if it was written at the top of a module: FastAPI reads the annotation."""
    route.__annotations__["asked"] = body
    return route


async def grpc_server(function: Function) -> int:
    """grpcio's server for asyncio, with KServe's messages as protobuf's classes. Its port"""
    import grpc

    from benchmarks.tensors.request import GRPC_METHOD, GRPC_SERVICE, message_classes

    asked, answered = message_classes()

    async def infer(request: Any, context: Any) -> Any:
        a, b = (np.frombuffer(raw, "<f4") for raw in request.raw_input_contents)
        reply = answered(model_name=request.model_name, model_version="1", id=request.id)
        reply.outputs.add(name="C", datatype="FP32", shape=[N])
        reply.raw_output_contents.append(function(a, b).tobytes())
        return reply

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(infer, asked.FromString, answered.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GRPC_SERVICE, {GRPC_METHOD: handler}),))
    port = int(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    _KEPT.append(server)
    return port


_KEPT: list[Any] = []  # a server ends with its object


async def serve(name: str, file: str) -> None:
    import uvicorn

    grpc_port = 0 if name == "llm" else await grpc_server(function_of(name, file))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        app = application(name, file)
        config = uvicorn.Config(app, loop="uvloop", http="httptools", ws="none", lifespan="off", access_log=False,
                                log_level="warning")  # fmt: skip
        print(sock.getsockname()[1], grpc_port, flush=True)
        await uvicorn.Server(config).serve(sockets=[sock])


if __name__ == "__main__":
    import uvloop

    uvloop.install()
    asyncio.run(serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
