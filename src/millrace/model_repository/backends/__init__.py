"""Which backends there are: one module each, by the name that `backend:` says."""

from importlib.metadata import entry_points

from millrace.errors import nearest
from millrace.model_repository.backends.add_sub import AddSubBackend
from millrace.model_repository.backends.backend import ModelBackend
from millrace.model_repository.backends.identity import IdentityBackend
from millrace.model_repository.backends.millrace import EngineBackend
from millrace.model_repository.backends.onnxruntime import OnnxRuntimeBackend
from millrace.model_repository.backends.openvino import OpenvinoBackend
from millrace.model_repository.backends.python import PythonBackend
from millrace.model_repository.backends.pytorch import PytorchBackend
from millrace.model_repository.backends.repeat import RepeatBackend
from millrace.model_repository.backends.sklearn import SklearnBackend
from millrace.model_repository.backends.tensorflow import TensorflowBackend
from millrace.model_repository.backends.xgboost import XgboostBackend
from millrace.model_repository.config.pbtxt_binder import place_of
from millrace.model_repository.config.problems import Level, Problem
from millrace.model_repository.repository.repository_reader import Model
from millrace.model_repository.request.status_code import Code, StatusError

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
    raise StatusError(Code.INVALID_ARG, f"{_nowhere(name)}; {nearest(name, _known())}")


def without_backend(model: Model) -> list[Problem]:
    """What `backend_named` would raise, where it is in the configuration; empty: there is one."""
    name = model.config.backend
    if not name or name in BACKENDS or not model.is_servable or entry_points(group=GROUP, name=name):
        return []
    mend = "correct it, or install the package that has it"
    file, place = model.file or model.folder, place_of(model.places, ("backend",))
    return [Problem(Level.ERROR, file, place, _nowhere(name), nearest(name, _known()), mend)]


def _known() -> list[str]:
    return [*BACKENDS, *(e.name for e in entry_points(group=GROUP))]


def _nowhere(name: str) -> str:
    return f"unable to find backend '{name}'"
