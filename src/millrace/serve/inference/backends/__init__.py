"""Which backends there are: one module each, by the name that `backend:` says."""

from importlib.metadata import entry_points

from millrace.errors import nearest
from millrace.serve.inference.backend import ModelBackend
from millrace.serve.inference.backends.add_sub import AddSubBackend
from millrace.serve.inference.backends.identity import IdentityBackend
from millrace.serve.inference.backends.millrace import EngineBackend
from millrace.serve.inference.backends.onnxruntime import OnnxRuntimeBackend
from millrace.serve.inference.backends.openvino import OpenvinoBackend
from millrace.serve.inference.backends.python import PythonBackend
from millrace.serve.inference.backends.pytorch import PytorchBackend
from millrace.serve.inference.backends.repeat import RepeatBackend
from millrace.serve.inference.backends.sklearn import SklearnBackend
from millrace.serve.inference.backends.tensorflow import TensorflowBackend
from millrace.serve.inference.backends.xgboost import XgboostBackend
from millrace.serve.inference.status import Code, StatusError

GROUP = "millrace.backends"  # of third parties' entry points
BACKENDS: dict[str, type[ModelBackend]] = {
    "add_sub": AddSubBackend,
    "fil": XgboostBackend,
    "identity": IdentityBackend,
    "millrace": EngineBackend,
    "onnxruntime": OnnxRuntimeBackend,
    "openvino": OpenvinoBackend,
    "python": PythonBackend,
    "pytorch": PytorchBackend,
    "repeat": RepeatBackend,
    "sklearn": SklearnBackend,
    "tensorflow": TensorflowBackend,
    "xgboost": XgboostBackend,
}


def backend_named(name: str) -> ModelBackend:
    """raises StatusError where there is none"""
    if name in BACKENDS:
        return BACKENDS[name]()
    found = entry_points(group=GROUP, name=name)
    if found:
        made: ModelBackend = next(iter(found)).load()()
        return made
    known = [*BACKENDS, *(e.name for e in entry_points(group=GROUP))]
    raise StatusError(Code.INVALID_ARG, f"unable to find backend '{name}'; {nearest(name, known)}")
