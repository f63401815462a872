"""Ensembles and the configurations of their steps, before a load: what does not fit, with its place, and what may."""

from pathlib import Path

import pytest

from millrace.model_repository.repository import multi_repository
from millrace.model_repository.repository.multi_repository import read_repositories
from millrace.settings import read_bounded
from tests.model_repository.config.test_repository_reader import said, write
from tests.support.ensembles import ensemble

# By its lines: 1 the platform, 2 input, 3 output, 4 the first step's model, 5 its input_map, 6 its output_map, ...
ENSEMBLE = """platform: "ensemble" max_batch_size: %(batch)d
input { name: "A" data_type: TYPE_%(kind)s dims: [ %(dims)s ] }
output { name: "C" data_type: TYPE_FP32 dims: [ %(out)s ] }
ensemble_scheduling { step { model_name: "%(first)s"
input_map { key: "%(key)s" value: "A" }
output_map { key: "Y" value: "B" } }
step { model_name: "%(second)s"
input_map { key: "X" value: "B" }
output_map { key: "%(made)s" value: "C" } } }
"""
RIGHT = {
    "batch": 4,
    "kind": "FP32",
    "dims": "-1, 4",
    "out": "1, 4",
    "first": "m",
    "key": "X",
    "second": "m",
    "made": "Y",
}


def model(x: str = "FP32", y: str = "FP32", dims: str = "-1, 4", batch: int = 4, backend: str = "identity") -> str:
    inputs = f'input {{ name: "X" data_type: TYPE_{x} dims: [ {dims} ] }}'
    outputs = f'output {{ name: "Y" data_type: TYPE_{y} dims: [ {dims} ] }}'
    return f'backend: "{backend}" max_batch_size: {batch}\n{inputs}\n{outputs}\n'


MODELS = {
    "m": model(), "halves": model("FP16"), "to_halves": model(y="FP16"), "wide": model(dims="2, 4"),
    "flat": model(dims="4"), "more": model(batch=8), "fewer": model(batch=2), "alone": model(batch=0, dims="-1, 1, 4"),
    "single": model(batch=0), "few": model(batch=0, dims="4"), "three": model(dims="3, 4"),
    "two": model() + 'input { name: "Z" data_type: TYPE_FP32 dims: 1 }',
    "maybe_two": model() + 'input { name: "Z" data_type: TYPE_FP32 dims: 1 optional: true }',
    "own": model(backend="python"), "adds": model(backend="python"), "unsaid": 'backend: "onnxruntime"',
    "other": model(backend="of_a_third_party"),
}  # fmt: skip
FILES = {
    "own/1/model.py": "class TritonPythonModel: pass",
    "adds/1/model.py": "class TritonPythonModel:\n    def auto_complete_config(config): return config",
    "unsaid/1/model.onnx": "",
}
WHERE = "in ensemble e, ensemble tensor"


def found(root: Path, **instead: object) -> list[str]:
    """What is said of the ensemble `e`."""
    files = {f"{name}/1/": "" for name in MODELS} | {f"{name}/config.pbtxt": text for name, text in MODELS.items()}
    write(root, {**files, **FILES, "e/1/": "", "e/config.pbtxt": ENSEMBLE % {**RIGHT, **instead}})
    (repository,) = read_repositories([root])
    return said(next(m for m in repository.models if m.name == "e"), root)


@pytest.mark.parametrize(
    ("instead", "says"),
    [
        ({"kind": "INT32"}, f"5:11 {WHERE} A: inconsistent data type: TYPE_INT32 is inferred from model e while "
         "TYPE_FP32 is inferred from model m"),
        ({"second": "halves"}, f"8:11 {WHERE} B: inconsistent data type: TYPE_FP32 is inferred from model m while "
         "TYPE_FP16 is inferred from model halves"),
        ({"second": "to_halves"}, f"9:12 {WHERE} C: inconsistent data type: TYPE_FP32 is inferred from model e while "
         "TYPE_FP16 is inferred from model to_halves"),
        ({"dims": "-1, 5"}, f"5:11 {WHERE} A: inconsistent shape: [-1,-1,5] is inferred from model e while [-1,-1,4] "
         "is inferred from model m"),
        ({"second": "flat"}, f"8:11 {WHERE} B: inconsistent shape: [-1,-1,4] is inferred from model m while [-1,4] is "
         "inferred from model flat"),
        ({"second": "few"}, f"8:11 {WHERE} B: inconsistent shape: [-1,-1,4] is inferred from model m while [4] is "
         "inferred from model few"),
        ({"first": "wide", "second": "wide"}, f"9:12 {WHERE} C: inconsistent shape: [-1,1,4] is inferred from model e "
         "while [-1,2,4] is inferred from model wide"),
        ({"key": "x"}, f"5:11 {WHERE} A is mapping to non-existing input x in model m"),
        ({"made": "Z"}, f"9:12 {WHERE} C is mapped from non-existing output Z in model m"),
        ({"second": "two"}, "7:6 in ensemble e, input Z in model two is not mapped to any ensemble tensors"),
        ({"second": "fewer"}, "1:22 ensemble e allows maximum batch size 4, but it contains model fewer which only "
         "allows maximum batch size to be 2"),
        ({"second": "own", "made": "Z"}, f"9:12 {WHERE} C is mapped from non-existing output Z in model own"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_where_it_stands(tmp_path: Path, instead: dict[str, object], says: str) -> None:
    first = found(tmp_path, **instead)[0]
    place, _, what = first.removeprefix("e/config.pbtxt:").partition(" ")
    assert f"{place} {what}" == says


@pytest.mark.parametrize(
    "instead",
    [
        {}, {"first": "wide"}, {"second": "more"}, {"second": "alone"}, {"second": "single"},
        {"batch": 0, "dims": "-1, -1, 4", "out": "-1, 1, 4"},
        {"second": "maybe_two"}, {"second": "own"},
        {"second": "adds", "made": "Z"}, {"second": "unsaid", "made": "Z"}, {"second": "other", "made": "Z"},
    ],
)  # fmt: skip
def test_what_fits_or_only_a_load_can_tell(tmp_path: Path, instead: dict[str, object]) -> None:
    """Shapes that vary, a batch dimension that is a shape's; a model.py that completes itself, unsaid tensors."""
    assert found(tmp_path, **instead) == []


def test_a_shape_is_said_of_who_says_it(tmp_path: Path) -> None:
    """Of two steps that take an input of any length, the first has one."""
    links = [("wide", {"X": "A"}, {"Y": "C"}), ("three", {"X": "A"}, {"Y": "D"})]
    write(tmp_path, {f"{name}/1/": "" for name in ("wide", "three", "e")})
    write(tmp_path, {f"{name}/config.pbtxt": MODELS[name] for name in ("wide", "three")})
    write(tmp_path, {"e/config.pbtxt": ensemble(["A"], ["C", "D"], links, kind="FP32", dims="-1, 4", max_batch=4)})
    (repository,) = read_repositories([tmp_path])
    what = "inconsistent shape: [-1,2,4] is inferred from model wide while [-1,3,4] is inferred from model three"
    assert [p.what for p in repository.models[0].problems] == [f"{WHERE} A: {what}"]


def test_all_of_it_is_said(tmp_path: Path) -> None:
    assert len(found(tmp_path, kind="INT32", key="x", second="fewer", made="Z")) == 4


def test_more_misfits_than_are_listed(tmp_path: Path) -> None:
    links = [("m", {"x": f"t{i}"}, {"Y": f"t{i + 1}"}) for i in range(60)]
    write(tmp_path, {"m/1/": "", "m/config.pbtxt": MODELS["m"], "e/1/": ""})
    write(tmp_path, {"e/config.pbtxt": ensemble(["t0"], ["t60"], links, kind="FP32", dims="-1, 4", max_batch=4)})
    (repository,) = read_repositories([tmp_path])
    problems = repository.models[0].problems
    assert len(problems) == 51 and problems[-1].what == "more than 50 such"


def test_a_model_of_many_steps_is_looked_into_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []

    def counted(path: Path, most: int) -> bytes:
        looked.append(path)
        return read_bounded(path, most)

    monkeypatch.setattr(multi_repository, "read_bounded", counted)
    assert found(tmp_path, first="own", second="own") == []
    assert looked == [tmp_path / "own/1/model.py"]


def test_a_namespace_is_none_of_a_configuration(tmp_path: Path) -> None:
    whole = ENSEMBLE % RIGHT
    write(tmp_path, {"e/1/": "", "m/1/": "", "m/config.pbtxt": MODELS["m"]})
    write(tmp_path, {"e/config.pbtxt": whole.replace('model_name: "m"\n', 'model_name: "m" model_namespace: "x"\n', 1)})
    (repository,) = read_repositories([tmp_path])
    (only,) = said(repository.models[0], tmp_path)
    assert only.endswith("'model_namespace' in step 0 of ensemble 'e' is reserved")
