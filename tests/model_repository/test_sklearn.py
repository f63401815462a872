"""The backend `sklearn`: estimators and pipelines as skops writes them, beside scikit-learn itself."""

import asyncio
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import objects
from tests.support.loaded import Loaded, infer, refused

pytest.importorskip("sklearn", reason="scikit-learn and skops are not installed")
skops = pytest.importorskip("skops.io", reason="scikit-learn and skops are not installed")
from sklearn.base import BaseEstimator  # noqa: E402
from sklearn.cluster import KMeans  # noqa: E402
from sklearn.datasets import load_iris  # noqa: E402
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestClassifier  # noqa: E402
from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: E402
from sklearn.linear_model import LinearRegression, LogisticRegression  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler  # noqa: E402

from millrace.model_repository.backends import framework_backend, sklearn  # noqa: E402

X, Y = load_iris(return_X_y=True)
SPECIES = np.array(["setosa", "versicolor", "virginica"])
PLAIN = 'backend: "sklearn"'
IRIS = """backend: "sklearn" max_batch_size: 8
input { name: "x" data_type: TYPE_FP64 dims: [ 4 ] }
output [ { name: "predict" data_type: TYPE_INT64 dims: [ 1 ] },
         { name: "predict_proba" data_type: TYPE_FP64 dims: [ 3 ] } ]
"""
TREES = """parameters { key: "trusted_types" value { string_value: "sklearn.tree._tree.Tree,
    sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor" } } """.replace("\n   ", "")
BATCHES = "dynamic_batching { max_queue_delay_microseconds: 200000 }"


def write(root: Path, name: str, estimator: Any, config: str = PLAIN) -> Path:
    (root / name / "1").mkdir(parents=True)
    skops.dump(estimator, root / name / "1" / "model.skops")
    (root / name / "config.pbtxt").write_text(config)
    return root


def iris() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y)


def test_batches_of_several_requests(tmp_path: Path) -> None:
    """Each gets what it gets alone, and they are computed together."""
    write(tmp_path, "iris", iris(), IRIS + BATCHES)
    xs = [X[i * 40 : i * 40 + 1 + i] for i in range(3)]

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            found = await asyncio.gather(*(infer(repository, "iris", x=x) for x in xs))
            for x, one in zip(xs, found, strict=True):
                assert one["predict"].tolist() == iris().predict(x).reshape(-1, 1).tolist()
                np.testing.assert_allclose(one["predict_proba"], iris().predict_proba(x), rtol=1e-12)
            assert repository.get("iris").statistics_dict()["execution_count"] == 1

    asyncio.run(run())


def test_what_the_estimator_knows_is_not_asked_for(tmp_path: Path) -> None:
    """Methods, types and widths by its answer to zeros; labels may be strings, a transformer has but one method."""
    write(tmp_path, "named", RandomForestClassifier(5, random_state=0).fit(X, SPECIES[Y]), TREES)
    write(tmp_path, "line", LinearRegression().fit(X[:, :3], X[:, 3]))
    write(tmp_path, "scale", StandardScaler().fit(X))
    write(tmp_path, "means", KMeans(2, n_init=1, random_state=0).fit(X))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            said = {name: config_json(repository.get(name).config) for name in ("named", "line", "scale", "means")}
            outputs = {n: [(o["name"], o["data_type"], o["dims"]) for o in c["output"]] for n, c in said.items()}
            assert outputs["named"] == [("predict", "TYPE_STRING", [1]), ("predict_proba", "TYPE_FP64", [3])]
            assert outputs["line"] == [("predict", "TYPE_FP64", [1])]
            assert outputs["scale"] == [("transform", "TYPE_FP64", [4])]
            assert outputs["means"] == [("predict", "TYPE_INT32", [1])]
            assert said["line"]["input"][0]["dims"] == [3] and said["line"]["max_batch_size"] == 4
            found = await infer(repository, "named", input=X[:1])
            assert found["predict"].reshape(-1).tolist() == [b"setosa"]
            line = (await infer(repository, "line", input=X[:2, :3]))["predict"]
            np.testing.assert_allclose(line.reshape(-1), LinearRegression().fit(X[:, :3], X[:, 3]).predict(X[:2, :3]))

    asyncio.run(run())


def test_strings(tmp_path: Path) -> None:
    """A text for each item, and columns of words."""
    texts = ["good film", "a bad film", "bad, bad", "good"]
    judge = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, [1, 0, 0, 1])
    write(tmp_path, "texts", judge, """backend: "sklearn" max_batch_size: 8
        input { name: "text" data_type: TYPE_STRING dims: [ 1 ] reshape { shape: [ ] } }
        output { name: "predict" data_type: TYPE_INT64 dims: [ 1 ] }""")  # fmt: skip
    colours = np.array([["red", "s"], ["blue", "l"]], np.object_)
    encoder = OneHotEncoder().fit(colours)
    write(tmp_path, "columns", encoder, """backend: "sklearn" max_batch_size: 8
        input { name: "x" data_type: TYPE_STRING dims: [ 2 ] }
        output { name: "transform" data_type: TYPE_FP64 dims: [ 4 ] }""")  # fmt: skip

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            given = objects([b"bad film", b"good one"]).reshape(2, 1)
            assert (await infer(repository, "texts", text=given))["predict"].tolist() == [[0], [1]]
            x = objects([b"blue", b"s"]).reshape(1, 2)
            assert (await infer(repository, "columns", x=x))["transform"].tolist() == [[1, 0, 0, 1]]
            with pytest.raises(StatusError, match="scikit-learn error: Found unknown categories"):
                await infer(repository, "columns", x=objects([b"pink", b"s"]).reshape(1, 2))
            with pytest.raises(StatusError, match="input 'x' holds bytes that are no UTF-8"):
                await infer(repository, "columns", x=objects([b"\xff", b"s"]).reshape(1, 2))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("dims: [ 4 ]", "dims: [ 5 ]", r"tensor 'x': the model expects 2 dimensions \(shape \[-1, 4\]\) but the"),
        ('"predict"', '"predicts"', "unexpected inference output 'predicts', allowed outputs are: predict, "),
        ("INT64", "INT32", "tensor 'predict': the model expects data-type INT64 but the model configuration specifies"),
        ("dims: [ 3 ]", "dims: [ 2 ]", r"tensor 'predict_proba': the model expects 2 dimensions \(shape \[-1, 3\]\)"),
        ("input", 'input { name: "z" data_type: TYPE_FP64 dims: [ 1 ] } input', "expects 2 inputs, model provides 1"),
        ("output", 'parameters { key: "intra_op_thread_count" value { string_value: "0" } } output',
         "'0', a number from 1 to 4096 is expected"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit(tmp_path: Path, old: str, new: str, what: str) -> None:
    write(tmp_path, "iris", iris(), IRIS.replace(old, new, 1))
    (failed,) = refused(tmp_path)
    assert re.search(what, failed), failed


def test_estimators_that_take_no_zeros(tmp_path: Path) -> None:
    """Are compared when they answer."""
    made = make_pipeline(FunctionTransformer(np.log), LinearRegression()).fit(X, Y)
    config = """backend: "sklearn" max_batch_size: 8 input { name: "x" data_type: TYPE_FP64 dims: [ 4 ] }
        output { name: "predict" data_type: TYPE_%s dims: [ 1 ] }"""
    write(tmp_path, "right", made, config % "FP64")
    write(tmp_path, "wrong", made, config % "FP32")

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            np.testing.assert_allclose(
                (await infer(repository, "right", x=X[:2]))["predict"][:, 0], made.predict(X[:2])
            )
            what = "configuration expects datatype TYPE_FP32 for output 'predict', model provides TYPE_FP64"
            with pytest.raises(StatusError, match=what):
                await infer(repository, "wrong", x=X[:2])

    asyncio.run(run())


class Ours(BaseEstimator):  # type: ignore[misc]
    """No type that skops trusts."""

    def predict(self, x: Any) -> Any:
        return x[:, 0]


def test_files_that_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, "ours", make_pipeline(StandardScaler().fit(X), Ours()))
    write(tmp_path, "untold", make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(["ab ba", "cd"], [0, 1]))
    write(tmp_path, "tree", RandomForestClassifier(2, random_state=0).fit(X, Y))
    write(tmp_path, "cut", iris())
    cut = tmp_path / "cut" / "1" / "model.skops"
    cut.write_bytes(cut.read_bytes()[:-30])
    write(tmp_path, "damaged", iris())
    damaged = tmp_path / "damaged" / "1" / "model.skops"
    with zipfile.ZipFile(damaged) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(damaged, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data[: len(data) // 2])
    failed = {re.findall("load failed for model '(\\w+)'", one)[0]: one for one in refused(tmp_path)}
    assert re.search(r"types that are not trusted: \S*test_sklearn.Ours; where you trust the file", failed.pop("ours"))
    assert "not trusted: sklearn.tree._tree.Tree; where you trust the file, parameter 'trusted_ty" in failed.pop("tree")
    assert "LogisticRegression" not in failed["untold"]
    assert "must say its input in config.pbtxt: its estimator, Pipeline, does not know" in failed.pop("untold")
    assert "it is no file of skops" in failed.pop("cut")
    assert "skops error" in failed.pop("damaged")
    assert not failed


def test_a_load_brings_no_trust(tmp_path: Path) -> None:
    """Whoever may load models may not say what their files may do; config.pbtxt may."""
    write(tmp_path, "tree", RandomForestClassifier(2, random_state=0).fit(X, Y), PLAIN)
    write(tmp_path, "told", RandomForestClassifier(2, random_state=0).fit(X, Y), PLAIN + TREES)
    names = "sklearn.tree._tree.Tree, sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"
    given = {"backend": "sklearn", "parameters": {"trusted_types": {"string_value": names}}}

    async def run() -> None:
        async with Loaded(tmp_path, model_control_mode="explicit") as repository:
            with pytest.raises(
                StatusError, match=r"trusted_types of model 'tree' are others than its config.pbtxt has"
            ):
                await repository.load("tree", given)
            await repository.load("told", given)
            assert (await infer(repository, "told", input=X[:1]))["predict"].size == 1

    asyncio.run(run())


def test_instances_share_the_cores_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an estimator begins itself, and what OpenMP does for it, which has a number for each thread."""
    from threadpoolctl import threadpool_info

    monkeypatch.setattr(framework_backend, "usable_cores", lambda: 6)
    found: list[tuple[int, int]] = []
    compute = sklearn._Estimator.compute

    def counted(self: Any, inputs: Any) -> Any:
        openmp = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "openmp"}
        found.extend((getattr(self._estimator, "n_jobs", 0), n) for n in openmp)
        return compute(self, inputs)

    monkeypatch.setattr(sklearn._Estimator, "compute", counted)
    two = " instance_group { count: 2 kind: KIND_CPU }"
    write(tmp_path, "forest", RandomForestClassifier(5, random_state=0, n_jobs=-1).fit(X, Y), PLAIN + TREES + two)
    write(tmp_path, "boosted", HistGradientBoostingRegressor(max_iter=3).fit(X, Y), PLAIN + TREES + two)

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for name in ("forest", "boosted"):
                told = await asyncio.gather(*(infer(repository, name, input=X[i : i + 1]) for i in range(2)))
                assert [one["predict"].size for one in told] == [1, 1]

    asyncio.run(run())
    assert {n for n, _ in found} == {3, 0} and {n for _, n in found} == {3}, found
