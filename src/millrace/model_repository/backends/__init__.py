"""Registry of backends by their name in `backend:`."""

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
from millrace.model_repository.config.problems import ConfigProblem, Level
from millrace.model_repository.repository.repository_reader import ModelFolder
from millrace.model_repository.request.status_code import Code, StatusError

GROUP = "millrace.backends"  # entry point group of third-party backends
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


def create_backend(name: str) -> ModelBackend:
    """Create the backend of that name. raises StatusError if there is none"""
    if name in BACKENDS:
        return BACKENDS[name]()
    matches = entry_points(group=GROUP, name=name)
    if matches:
        backend: ModelBackend = next(iter(matches)).load()()
        return backend
    raise StatusError(Code.INVALID_ARG, f"{_nowhere(name)}; {nearest(name, _backend_names())}")


def missing_backend_problems(model: ModelFolder) -> list[ConfigProblem]:
    """Return a problem, with its place in the configuration, if `create_backend` would fail."""
    name = model.config.backend
    if not name or name in BACKENDS or not model.is_servable or entry_points(group=GROUP, name=name):
        return []
    fix = "correct it, or install the package that has it"
    file, place = model.file or model.folder, place_of(model.places, ("backend",))
    return [ConfigProblem(Level.ERROR, file, place, _nowhere(name), nearest(name, _backend_names()), fix)]


def _backend_names() -> list[str]:
    return [*BACKENDS, *(e.name for e in entry_points(group=GROUP))]


def _nowhere(name: str) -> str:
    return f"unable to find backend '{name}'"
