"""The backend `xgboost`, and Triton's `fil`: trees in JSON and UBJSON, beside XGBoost's own answers."""

import asyncio
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import Array
from tests.support.loaded import Loaded, infer, refused

xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed")
from millrace.model_repository.backends import framework_backend  # noqa: E402
from millrace.model_repository.backends import xgboost as backend  # noqa: E402
from millrace.model_repository.backends.xgboost_file_check import check_model  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.standard_normal((200, 5)).astype(np.float32)
CLASSES = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)
FIL = """backend: "fil" max_batch_size: 64
input { name: "input__0" data_type: TYPE_FP32 dims: [ 5 ] }
output { name: "output__0" data_type: TYPE_FP32 dims: [ %s ] }
dynamic_batching { max_queue_delay_microseconds: 200000 }
"""


def parameters(**said: str) -> str:
    return "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}\n' for k, v in said.items())


def trained(objective: str, y: Array, **said: Any) -> Any:
    asked = {"objective": objective, "max_depth": 3, "nthread": 1, **said}
    return xgboost.train(asked, xgboost.DMatrix(X, y), num_boost_round=4)


def write(root: Path, name: str, booster: Any, config: str = "", file: str = "xgboost.ubj") -> Path:
    (root / name / "1").mkdir(parents=True)
    booster.save_model(root / name / "1" / file)
    (root / name / "config.pbtxt").write_text(config)
    return root


def test_batches_of_several_requests(tmp_path: Path) -> None:
    """Each gets what it gets alone, features that are missing among them; in both formats, by either backend."""
    booster = trained("reg:squarederror", X[:, 0] * X[:, 2])
    write(tmp_path, "json", booster, FIL % 1 + parameters(model_type="xgboost_json"), "xgboost.json")
    write(tmp_path, "ubj", booster, FIL % 1)
    xs = [X[i * 10 : i * 10 + 1 + i].copy() for i in range(4)]
    xs[2][0, 1] = np.nan

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for model in ("json", "ubj"):
                found = await asyncio.gather(*(infer(repository, model, input__0=x) for x in xs))
                for x, one in zip(xs, found, strict=True):
                    assert np.array_equal(one["output__0"], booster.predict(xgboost.DMatrix(x)).reshape(-1, 1))
                assert repository.get(model).statistics_dict()["execution_count"] == 1

    asyncio.run(run())


def test_what_fil_may_be_asked_for(tmp_path: Path) -> None:
    two, many = trained("binary:logistic", CLASSES > 1), trained("multi:softprob", CLASSES, num_class=3)
    soft = trained("multi:softmax", CLASSES, num_class=3)
    write(tmp_path, "two", two, FIL % 1 + parameters(output_class="true", threshold="0.7"))
    write(tmp_path, "both", two, FIL % 2 + parameters(is_classifier="true", predict_proba="true"))
    write(tmp_path, "raw", two, FIL % 1)
    write(tmp_path, "class", many, FIL % 1 + parameters(is_classifier="true"))
    write(tmp_path, "all", many, FIL % 3 + parameters(predict_proba="true"))
    write(tmp_path, "soft", soft, FIL % 3 + parameters(predict_proba="true"))
    write(tmp_path, "itself", soft, FIL % 1)
    data = xgboost.DMatrix(X)
    p, q, s = two.predict(data), many.predict(data), np.exp(soft.predict(data, output_margin=True).astype(np.float64))
    expected = {
        "two": (p > 0.7).astype(np.float32)[:, None], "both": np.stack([1 - p, p], axis=1), "raw": p[:, None],
        "class": q.argmax(axis=1)[:, None].astype(np.float32), "all": q, "soft": s / s.sum(axis=1, keepdims=True),
        "itself": soft.predict(data)[:, None],
    }  # fmt: skip
    assert 0 < expected["two"].mean() < (p > 0.5).mean(), "the threshold changes an answer"

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for model, exact in expected.items():
                found = (await infer(repository, model, input__0=X[:64]))["output__0"]
                assert found.dtype == np.float32
                np.testing.assert_allclose(found, exact[:64], rtol=1e-6, err_msg=model)

    asyncio.run(run())


def test_what_the_file_knows_is_not_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "line", trained("reg:squarederror", X[:, 0]), "", "xgboost.json")
    write(tmp_path, "many", trained("multi:softprob", CLASSES, num_class=3), 'backend: "fil"')

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            said = {name: config_json(repository.get(name).config) for name in ("line", "many")}
            assert said["line"]["backend"] == "xgboost" and said["line"]["max_batch_size"] == 4
            assert [(i["name"], i["data_type"], i["dims"]) for i in said["line"]["input"]] == [
                ("input__0", "TYPE_FP32", [5])
            ]
            assert said["line"]["output"][0]["dims"] == [1] and said["many"]["output"][0]["dims"] == [3]
            assert (await infer(repository, "line", input__0=X[:2]))["output__0"].size == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (FIL.replace("[ 5 ]", "[ 6 ]") % 1, r"tensor 'input__0': the model expects 2 dimensions \(shape \[-1, 5\]\)"),
        (FIL.replace("input__0", "x") % 1, "unexpected inference input 'x', allowed inputs are: input__0"),
        (FIL.replace("TYPE_FP32 dims: [ 5", "TYPE_FP64 dims: [ 5") % 1, "expects data-type FP32 but"),
        (FIL % 2, r"tensor 'output__0': the model expects 1 dimensions \(shape \[-1\]\) but"),
        (FIL % 1 + parameters(output_class="true"), "objective reg:squarederror has no classes; they are asked"),
        (FIL % 1 + parameters(model_type="xgboost"), "is XGBoost's old binary format, which is not read; save it with"),
        (FIL % 1 + parameters(model_type="lightgbm"), "model type 'lightgbm' of model 'm' is not supported"),
        (FIL % 1 + parameters(model_type="jpeg"), "'jpeg', one of XGBOOST_JSON, XGBOOST_UBJ is expected"),
        (FIL % 1 + parameters(threshold="half"), "'half', a number is expected"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit(tmp_path: Path, config: str, what: str) -> None:
    write(tmp_path, "m", trained("reg:squarederror", X[:, 0]), config)
    (failed,) = refused(tmp_path)
    assert re.search(what, failed), failed


def test_files_that_are_not_read(tmp_path: Path) -> None:
    booster = trained("reg:squarederror", X[:, 0])
    for name in ("pickled", "binary", "cut", "cutjson", "deep", "empty"):
        write(tmp_path, name, booster, "", "xgboost.json" if name in ("cutjson", "deep") else "xgboost.ubj")
    at = {path.parent.parent.name: path for path in tmp_path.glob("*/1/*")}
    whole = at["cut"].read_bytes()
    at["pickled"].write_bytes(pickle.dumps(booster))
    at["binary"].write_bytes(b"binf" + bytes(200))
    at["cut"].write_bytes(whole[: len(whole) // 2])
    at["cutjson"].write_bytes(at["cutjson"].read_bytes()[:300])
    at["deep"].write_bytes(b'{"learner": ' + b"[" * 1_000_000)
    at["empty"].write_bytes(b"")
    (tmp_path / "old" / "1").mkdir(parents=True)
    (tmp_path / "old" / "1" / "xgboost.model").write_bytes(b"binf")
    (tmp_path / "old" / "config.pbtxt").write_text('backend: "fil" default_model_filename: "xgboost.model"')
    failed = {re.findall("load failed for model '(\\w+)'", one)[0]: one for one in refused(tmp_path)}
    for name in ("pickled", "binary", "empty"):
        assert "it begins as neither JSON nor UBJSON; an old binary format, or a pickle, is not read" in failed.pop(
            name
        )
    for name in ("cut", "cutjson"):
        assert "it is no whole model of XGBoost: " in failed.pop(name)
    assert "more than 200 brackets in one another" in failed.pop("deep")
    assert "a name in .json or .ubj is expected" in failed.pop("old")
    assert not failed


def test_damaged_trees_are_not_followed(tmp_path: Path) -> None:
    """XGBoost would; a file that ends too early, or has brackets in one another, would take the server with it."""
    file = tmp_path / "xgboost.json"
    trained("reg:squarederror", X[:, 0]).save_model(file)
    whole = file.read_bytes()
    for key, i, value in (("left_children", 0, 1_000_000), ("right_children", 1, 0), ("split_indices", 0, 5),
                          ("left_children", 0, -7), ("split_type", 0, 1)):  # fmt: skip
        model = json.loads(whole)
        model["learner"]["gradient_booster"]["model"]["trees"][2][key][i] = value
        with pytest.raises(StatusError, match=r"no whole model of XGBoost: ValueError: tree 2 "):
            check_model(json.dumps(model).encode(), "it", is_json=True)
    model = json.loads(whole)
    del model["learner"]["gradient_booster"]["model"]["trees"][0]["parents"][0]
    with pytest.raises(StatusError, match=r"tree 0 has .* nodes, and arrays of other sizes"):
        check_model(json.dumps(model).encode(), "it", is_json=True)
    trained("reg:squarederror", X[:, 0]).save_model(tmp_path / "xgboost.ubj")
    data = (tmp_path / "xgboost.ubj").read_bytes()
    check_model(data, "it", is_json=False)
    for n in np.random.default_rng(0).integers(1, len(data), 50):
        with pytest.raises(StatusError, match="it is no whole model of XGBoost"):
            check_model(data[:n], "it", is_json=False)
    asked = {"objective": "reg:squarederror", "booster": "gblinear", "nthread": 1}
    linear = xgboost.train(asked, xgboost.DMatrix(X, X[:, 0]), num_boost_round=1).save_raw("json")
    with pytest.raises(StatusError, match="it has no trees, booster gblinear"):
        check_model(bytes(linear), "it", is_json=True)
    nested = b"{L" + (7).to_bytes(8, "big") + b"learner" + b"[" * 1_000_000
    with pytest.raises(StatusError, match="more than 200 brackets in one another"):
        check_model(nested, "it", is_json=False)


@pytest.mark.parametrize("said", [{"booster": "dart"}, {"tree_method": "hist"}])
def test_other_boosters_and_categories(tmp_path: Path, said: dict[str, str]) -> None:
    """Both formats are read whole, and answered as XGBoost does."""
    kinds = ["c" if said.get("tree_method") and i == 4 else "q" for i in range(5)]
    x = X.copy()
    x[:, 4] = np.random.default_rng(1).integers(0, 7, len(x))
    data = xgboost.DMatrix(x, x[:, 0] + (x[:, 4] == 3), feature_types=kinds, enable_categorical=True)
    asked = {"objective": "reg:squarederror", "nthread": 1, **said}
    booster = xgboost.train(asked, data, num_boost_round=4)
    write(tmp_path, "json", booster, "", "xgboost.json")
    write(tmp_path, "ubj", booster)

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for model in ("json", "ubj"):
                found = (await infer(repository, model, input__0=x[:4]))["output__0"].reshape(-1)
                np.testing.assert_allclose(found, booster.predict(data)[:4], rtol=1e-6)

    asyncio.run(run())


def test_instances_share_the_cores_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework_backend, "usable_cores", lambda: 6)
    found: list[str] = []
    compute = backend._Trees.compute

    def counted(self: Any, inputs: Any) -> Any:
        found.extend(re.findall(r'"nthread":"(\d+)"', self._booster.save_config().replace(" ", "")))
        return compute(self, inputs)

    monkeypatch.setattr(backend._Trees, "compute", counted)
    config = FIL % 1 + "instance_group { count: 2 kind: KIND_CPU }"
    write(tmp_path, "shared", trained("reg:squarederror", X[:, 0]), config)
    write(tmp_path, "told", trained("reg:squarederror", X[:, 0]), config + parameters(intra_op_thread_count="5"))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for model in ("shared", "told"):
                await asyncio.gather(*(infer(repository, model, input__0=X[i : i + 64]) for i in range(2)))

    asyncio.run(run())
    assert set(found[: len(found) // 2]) == {"3"} and set(found[len(found) // 2 :]) == {"5"}
