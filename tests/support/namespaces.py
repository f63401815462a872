"""Repositories with models of the same names, as `--model-namespacing` takes them."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.ensembles import ensemble
from tests.support.python_models import write

_CODE = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() + %d for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""
CONFIG = """backend: "python" %s
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 4 ] } output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 4 ] }
"""
AMBIGUOUS = (
    "There are 2 identifiers of model '%s' in global map, model namespace must be provided to resolve ambiguity."
)


def plus(root: Path, name: str, n: int, more: str = "") -> None:
    """A model that adds `n`."""
    write(root, name, _CODE % n, CONFIG % more)


def pipe(root: Path, name: str, member: str = "m") -> None:
    """An ensemble of that one model."""
    (root / name / "1").mkdir(parents=True)
    steps = [(member, {"INPUT0": "INPUT0"}, {"OUTPUT0": "OUTPUT0"})]
    (root / name / "config.pbtxt").write_text(ensemble(["INPUT0"], ["OUTPUT0"], steps, max_batch=0))


def roots_of(folder: Path, numbers: Sequence[int]) -> list[Path]:
    """`a`, `b`, ...: each with a model `m` that adds another number, and an ensemble of it, `pipe_a`, `pipe_b`, ..."""
    found = [folder / chr(ord("a") + i) for i in range(len(numbers))]
    for root, n in zip(found, numbers, strict=True):
        plus(root, "m", n)
        pipe(root, f"pipe_{root.name}")
    return found
