"""model.py files of Triton's Python backend, and a repository of them in an event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.request_validation import RawInput
from millrace.model_repository.request.tensors import Array, objects

ANY = """backend: "python" %s
input { name: "IN" data_type: TYPE_STRING dims: [ -1 ] } output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""
OWN = ' parameters { key: "MILLRACE_PROCESS" value { string_value: "own" } } '  # a process of its own
HEAD = """
import asyncio, json, threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
"""
SAY = """
def said(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([text], dtype=object))])
"""


def write(root: Path, name: str, code: str, config: str | None = None, **others: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.py").write_text(code)
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    for other, text in others.items():
        (root / name / "1" / f"{other}.py").write_text(text)


@asynccontextmanager
async def loaded(root: Path) -> AsyncIterator[ModelRepository]:
    repository = ModelRepository(RepositoryFlags(model_repository=(str(root),), model_control_mode="explicit"))
    try:
        yield repository
    finally:
        await repository.close(5.0)


def asked(model: Model, parameters: dict[str, Any] | None = None, **arrays: Array) -> InferRequest:
    names = {"f": "FP32", "O": "BYTES", "i": "INT32"}
    request = InferRequest({}, request_id="r")
    request.parameters = parameters or {}
    model.checker.attach_inputs(request, [RawInput(n, names[a.dtype.kind], a.shape, a) for n, a in arrays.items()])
    return request


def text(*values: str) -> Array:
    return objects([v.encode() for v in values])


async def one(repository: ModelRepository, name: str, array: Array, **parameters: Any) -> Any:
    """OUT of model `name`, which is loaded."""
    await repository.load(name)
    model = repository.get(name)
    return (await model.infer(asked(model, parameters, IN=array))).outputs["OUT"]
