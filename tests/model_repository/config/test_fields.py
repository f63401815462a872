"""Every field of a configuration is used, or says why not: none is read and then forgotten."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace import model_repository, serve
from millrace.model_repository.config.message_fields import FieldSpec, specs
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.config.problems import Level
from millrace.model_repository.repository.repository_reader import read_repository

ROOMS = [Path(str(room.__file__)).parent for room in (model_repository, serve)]


def declared(cls: type = ModelConfig) -> Iterator[FieldSpec]:
    """All that must be used: what is ignored or refused says so where a file has it, with all that is below it."""
    for spec in specs(cls).values():
        below: Any = (
            spec.value_type if spec.kind == "message" else spec.value_type.value_type if spec.kind == "map" else None
        )
        is_message = hasattr(below, "__dataclass_fields__")
        inner = list(declared(below)) if is_message else []
        is_refused = is_message and bool(specs(below)) and not inner
        if not spec.ignored and not spec.refused and not is_refused:
            yield from (spec, *inner)


def looked_at() -> set[str]:
    """What of any object the server's code looks at, the declarations left out."""
    files = [path for room in ROOMS for path in room.rglob("*.py") if path.name != "model_config.py"]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_whatever_is_declared_is_looked_at() -> None:
    names = {spec.attribute for spec in declared()}
    assert {"max_inflight_requests", "minimum_slot_utilization", "string_value", "buckets"} <= names
    assert len(names) > 80 and not names - looked_at()


@pytest.mark.parametrize(
    ("backend", "model", "said", "at"),
    [
        ("python", "model.py", 'runtime: "x.so"', "3:1: runtime changes nothing"),
        ("python", "model.py", "instance_group { kind: KIND_CPU passive: true }", "3:33: passive changes nothing"),
        ("python", "model.py", "optimization { graph { level: 1 } }", "3:16: graph changes nothing"),
        ("pytorch", "model.pt", "optimization { graph { level: 1 } }", "3:16: graph changes nothing"),
        ("python", "model.py",
         'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }',
         "3:41: cpu_execution_accelerator changes nothing"),
        ("onnxruntime", "model.onnx", "optimization { graph { level: 1 } }", ""),
        ("somebodys", "model.x", "optimization { graph { level: 1 } }", ""),
    ],
)  # fmt: skip
def test_what_a_backend_has_no_use_for_is_said(tmp_path: Path, backend: str, model: str, said: str, at: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / model).touch()
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "{backend}"\n{tensors}\n{said}\n')
    (found,) = read_repository(tmp_path).models
    ignored = [p for p in found.problems if p.level is Level.IGNORED]
    said_at = [f"{p.place.line}:{p.place.column}: {p.what}" for p in ignored if p.place is not None]
    assert said_at == ([at] if at else []) and len(said_at) == len(ignored)
