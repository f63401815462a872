"""The backend `tensorflow`: SavedModels, beside the functions they were saved from and NumPy's arithmetic."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import DTYPES, Array, objects
from tests.support.batched import RAGGED, SEQUENCES, SIDES, ragged_of, sums_of
from tests.support.loaded import Loaded, infer, refused

pytestmark = pytest.mark.filterwarnings("ignore")  # TensorFlow's own, of NumPy and of its older half
tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
from millrace.model_repository.backends import framework_backend  # noqa: E402
from millrace.model_repository.backends import tensorflow as backend  # noqa: E402

W = np.random.default_rng(0).standard_normal((16, 10)).astype(np.float32)
DENSE = """platform: "tensorflow_savedmodel" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 10 ] }
"""
BATCHES = "dynamic_batching { max_queue_delay_microseconds: 200000 }"


def parameters(**said: str) -> str:
    return "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}\n' for k, v in said.items())


class Dense(tf.Module):  # type: ignore[misc, name-defined]
    """y = relu(x W), and its negative by a signature of its own"""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(W)

    @tf.function(input_signature=[tf.TensorSpec([None, 16], tf.float32, name="x")])  # type: ignore[untyped-decorator]
    def score(self, x: Any) -> Any:
        return {"y": tf.nn.relu(x @ self.w)}

    @tf.function(input_signature=[tf.TensorSpec([None, 16], tf.float32, name="x")])  # type: ignore[untyped-decorator]
    def negative(self, x: Any) -> Any:
        return {"y": -tf.nn.relu(x @ self.w)}


def write(root: Path, name: str, module: Any, signatures: Any, config: str = DENSE) -> Path:
    (root / name / "1").mkdir(parents=True)
    tf.saved_model.save(module, str(root / name / "1" / "model.savedmodel"), signatures=signatures)
    (root / name / "config.pbtxt").write_text(config)
    return root


def dense(root: Path, name: str, config: str = DENSE) -> Path:
    made = Dense()
    return write(root, name, made, {"serving_default": made.score, "negative": made.negative}, config)


def of(function: Callable[..., Any], *specs: Any) -> tuple[Any, Any]:
    """A module with one function, and its signature."""
    module = tf.Module()
    module.run = tf.function(function, input_signature=list(specs))
    return module, module.run


def exact(x: Array) -> Array:
    found: Array = np.maximum(x.astype(np.float64) @ W, 0)
    return found


def test_batches_of_several_requests(tmp_path: Path) -> None:
    """Each gets what it gets alone, and they are computed together."""
    dense(tmp_path, "dense", DENSE + BATCHES + " instance_group { count: 1 kind: KIND_CPU }")
    made, xs = Dense(), [np.random.default_rng(i).standard_normal((1 + i % 3, 16)).astype(np.float32) for i in range(5)]

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            found = await asyncio.gather(*(infer(repository, "dense", x=x) for x in xs[:4]))
            for x, one in zip(xs, found, strict=False):
                np.testing.assert_allclose(one["y"], exact(x), rtol=1e-5, atol=1e-5)
            assert repository.get("dense").statistics_dict()["execution_count"] == 1
            alone = (await infer(repository, "dense", x=xs[4]))["y"]
            np.testing.assert_allclose(alone, made.score(xs[4])["y"].numpy(), rtol=1e-6)

    asyncio.run(run())


def test_what_the_signature_knows_is_not_asked_for(tmp_path: Path) -> None:
    dense(tmp_path, "dense", "")
    dense(tmp_path, "negative", parameters(TF_SIGNATURE_DEF="negative"))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            said = config_json(repository.get("dense").config)
            assert said["platform"] == "tensorflow_savedmodel" and said["max_batch_size"] == 4
            assert said["input"][0]["dims"] == [16] and said["output"][0]["dims"] == [10]
            x = np.ones((2, 16), np.float32)
            np.testing.assert_allclose((await infer(repository, "negative", x=x))["y"], -exact(x), rtol=1e-5, atol=1e-5)

    asyncio.run(run())


KINDS = ("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES")


def test_every_type_comes_back_as_it_was(tmp_path: Path) -> None:
    values: dict[str, Array] = {}
    for kind in KINDS:
        dtype = tf.string if kind == "BYTES" else tf.as_dtype(np.dtype(DTYPES[kind]))
        write(
            tmp_path, kind.lower(), *of(lambda x: {"y": tf.identity(x)}, tf.TensorSpec([None, 2], dtype, name="x")), ""
        )
        numbers = np.array([[0, 1], [2, 100]])
        strings = objects([b"", "\u00e4".encode(), b"\xff\0", b"x" * 300]).reshape(2, 2)
        values[kind] = strings if kind == "BYTES" else numbers.astype(DTYPES[kind])

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for kind, x in values.items():
                found = (await infer(repository, kind.lower(), x=x))["y"]
                assert found.dtype == x.dtype and found.tolist() == x.tolist(), kind

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda c: c.replace('"x"', '"z"'), "unexpected inference input 'z', allowed inputs are: x"),
        (lambda c: c.replace('"y"', '"z"'), "unexpected inference output 'z', allowed outputs are: y"),
        (lambda c: c.replace("FP32 dims: [ 16 ]", "INT32 dims: [ 16 ]"), "expects data-type FP32 but the model config"),
        (lambda c: c.replace("[ 16 ]", "[ 17 ]"), r"expects 2 dimensions \(shape \[-1, 16\]\) but"),
        (lambda c: c + parameters(TF_NUM_INTRA_THREADS="many"), "'many', a number from 0 to 4096 is expected"),
        (lambda c: c + parameters(TF_USE_PER_SESSION_THREADS="0"), "is not supported as false: each session has"),
        (lambda c: c + parameters(TF_SIGNATURE_DEF="x"), "it has no signature 'x', there are negative, serving_de"),
        (lambda c: c + parameters(TF_GRAPH_TAG="x"), "no graph has the tag 'x', there are serve"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit(tmp_path: Path, change: Callable[[str], str], what: str) -> None:
    dense(tmp_path, "dense", change(DENSE))
    (failed,) = refused(tmp_path)
    assert re.search(what, failed), failed


def test_operators_that_are_about_more_than_tensors(tmp_path: Path) -> None:
    spec = tf.TensorSpec([None, 1], tf.float32, name="x")

    def python(x: Any) -> Any:
        return {"y": tf.py_function(lambda v: v, [x], tf.float32)}

    def writes(x: Any) -> Any:
        tf.io.write_file(str(tmp_path / "never"), tf.io.serialize_tensor(x))
        return {"y": x}

    write(tmp_path, "python", *of(python, spec), "")
    write(tmp_path, "writes", *of(writes, spec), "")
    python_, writes_ = refused(tmp_path)
    assert "it has the operator EagerPyFunc, which is about more than tensors" in python_
    assert "it has the operator WriteFile" in writes_ and not (tmp_path / "never").exists()


def test_damaged_files_and_failing_runs(tmp_path: Path) -> None:
    def product(a: Any, b: Any) -> Any:
        return {"y": a @ b}

    specs = [tf.TensorSpec([None, None], tf.float32, name=n) for n in "ab"]
    sides = '{ name: "%s" data_type: TYPE_FP32 dims: [ -1, -1 ] }'
    config = f'backend: "tensorflow" input [ {sides % "a"}, {sides % "b"} ] output {sides % "y"}'
    write(tmp_path / "good", "fails", *of(product, *specs), config)
    bad = tmp_path / "bad"
    for name in ("empty", "broken", "cut", "linked"):
        dense(bad, name)
    folder = {name: bad / name / "1" / "model.savedmodel" for name in ("empty", "broken", "cut", "linked")}
    (folder["empty"] / "saved_model.pb").unlink()
    (folder["broken"] / "saved_model.pb").write_bytes(b"\x12\xff\xff\xff")
    for file in (folder["cut"] / "variables").glob("*.data-*"):
        file.write_bytes(file.read_bytes()[:100])
    (folder["linked"] / "assets" / "secret").symlink_to("/etc/hostname")
    failed = {re.findall("load failed for model '(\\w+)'", one)[0]: one for one in refused(bad)}
    assert "it is no folder with a saved_model.pb" in failed.pop("empty")
    assert "a link that leads out of the model's folder" in failed.pop("linked")
    assert failed.keys() == {"broken", "cut"} and all("tensorflow error" in one for one in failed.values())

    async def run() -> None:
        async with Loaded(tmp_path / "good") as repository:
            one, two = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
            for _ in range(2):  # it goes on
                with pytest.raises(StatusError, match="tensorflow error"):
                    await infer(repository, "fails", a=one, b=one)
                assert (await infer(repository, "fails", a=one, b=two))["y"].tolist() == [[3, 3], [3, 3]]

    asyncio.run(run())


def test_instances_share_the_cores_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session for each, with threads of its own, of which there are as many as it was given."""
    monkeypatch.setattr(framework_backend, "usable_cores", lambda: 6)
    found: list[tuple[int, bool]] = []
    compute = backend._TensorFlowModel.compute

    def counted(self: Any, inputs: Any) -> Any:
        asked = self._session._config
        found.append((asked.intra_op_parallelism_threads, asked.use_per_session_threads))
        return compute(self, inputs)

    monkeypatch.setattr(backend._TensorFlowModel, "compute", counted)
    dense(tmp_path, "shared")  # two of them, as Triton has it
    dense(tmp_path, "told", DENSE + parameters(TF_NUM_INTRA_THREADS="5"))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for model in ("shared", "told"):
                xs = [np.full((1, 16), i, np.float32) for i in range(2)]
                both = await asyncio.gather(*(infer(repository, model, x=x) for x in xs))
                for x, one in zip(xs, both, strict=True):
                    np.testing.assert_allclose(one["y"], exact(x), rtol=1e-5, atol=1e-5)

    asyncio.run(run())
    assert found == [(3, True)] * 2 + [(5, True)] * 2


# ---------------------------------------------------------------------- sequences, and batches of different shapes

PLATFORM = 'platform: "tensorflow_savedmodel" '


def running_sum(x: Any, before: Any, ready: Any, id: Any) -> Any:
    after = before + ready * x
    return {"y": tf.identity(after), "who": tf.identity(id), "after": after}


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_queue_delay_microseconds: 1000 }"])
def test_sequences_whose_state_the_server_holds(tmp_path: Path, strategy: str) -> None:
    specs = [tf.TensorSpec([None, n], kind, name=name) for name, n, kind in (
        ("x", 2, tf.float32), ("before", 2, tf.float32), ("ready", 1, tf.float32), ("id", 1, tf.int64))]  # fmt: skip
    write(tmp_path, "sums", *of(running_sum, *specs), PLATFORM + SEQUENCES % (SIDES, strategy))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            await asyncio.gather(*(sums_of(repository.get("sums"), id_) for id_ in range(1, 8)))

    asyncio.run(run())


def ragged_sums(x: Any, at: Any) -> Any:
    """Of each request the sum of its elements, by where it begins; and each element twice."""
    running = tf.concat([tf.zeros([1]), tf.cumsum(x)], 0)
    picked = tf.gather(running, at)
    return {"sum": (picked[1:] - picked[:-1])[:, None], "twice": x + x}


def test_a_batch_of_requests_of_different_shapes(tmp_path: Path) -> None:
    specs = tf.TensorSpec([None], tf.float32, name="x"), tf.TensorSpec([None], tf.int32, name="at")
    write(tmp_path, "sums", *of(ragged_sums, *specs), PLATFORM + RAGGED)
    asyncio.run(ragged_of(tmp_path))
