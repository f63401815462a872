"""The backend `openvino`: networks as IR and as ONNX, beside NumPy's arithmetic."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.repository import repository_reader
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import DTYPES, Array
from tests.support.batched import RAGGED, SEQUENCES, SIDES, ragged_of, sums_of
from tests.support.loaded import Loaded, infer, refused

ov = pytest.importorskip("openvino", reason="openvino is not installed")
from openvino import opset13 as ops  # noqa: E402

from millrace.model_repository.backends import framework_backend  # noqa: E402
from millrace.model_repository.backends import openvino as backend  # noqa: E402

W = np.random.default_rng(0).standard_normal((16, 10)).astype(np.float32)
DENSE = """backend: "openvino" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 10 ] }
"""
BATCHES = "dynamic_batching { max_queue_delay_microseconds: 200000 }"


def parameters(**said: str) -> str:
    return "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}\n' for k, v in said.items())


def named(node: Any, name: str) -> Any:
    node.output(0).get_tensor().set_names({name})
    return node


def dense(batch: int = -1) -> Any:
    """y = relu(x W), whose output has two names"""
    x = named(ops.parameter([batch, 16], np.float32, name="x"), "x")
    y = ops.relu(ops.matmul(x, ops.constant(W), False, False))
    y.output(0).get_tensor().set_names({"y", "scores"})
    return ov.Model([ops.result(y)], [x], "dense")


def write(root: Path, name: str, made: Any, config: str = DENSE) -> Path:
    (root / name / "1").mkdir(parents=True)
    ov.save_model(made, root / name / "1" / "model.xml", compress_to_fp16=False)
    (root / name / "config.pbtxt").write_text(config)
    return root


def exact(x: Array) -> Array:
    found: Array = np.maximum(x.astype(np.float64) @ W, 0)
    return found


@pytest.mark.parametrize("output", ["y", "scores"])
def test_batches_of_several_requests(tmp_path: Path, output: str) -> None:
    """Each gets what it gets alone, and they are computed together."""
    write(tmp_path, "dense", dense(), DENSE.replace('"y"', f'"{output}"') + BATCHES)
    xs = [np.random.default_rng(i).standard_normal((1 + i % 3, 16)).astype(np.float32) for i in range(5)]

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            found = await asyncio.gather(*(infer(repository, "dense", x=x) for x in xs[:4]))
            for x, one in zip(xs, found, strict=False):
                np.testing.assert_allclose(one[output], exact(x), rtol=1e-5, atol=1e-5)
            assert repository.get("dense").statistics_dict()["execution_count"] == 1
            again = await infer(repository, "dense", x=xs[4])
            kept = again[output].copy()
            await infer(repository, "dense", x=xs[4] * 2)
            assert np.array_equal(again[output], kept), "an answer is its own memory"

    asyncio.run(run())


def test_what_the_file_knows_is_not_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "dense", dense(), "")
    write(tmp_path, "whole", dense(3), "")

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            said = {name: config_json(repository.get(name).config) for name in ("dense", "whole")}
            assert said["dense"]["backend"] == "openvino" and said["dense"]["max_batch_size"] == 4
            assert said["dense"]["input"][0]["dims"] == [16] and said["dense"]["output"][0]["name"] == "scores"
            assert said["whole"]["max_batch_size"] == 0 and said["whole"]["input"][0]["dims"] == [3, 16]
            assert (await infer(repository, "whole", x=np.ones((3, 16), np.float32)))["scores"].shape == (3, 10)

    asyncio.run(run())


def test_onnx(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="openvino is not installed")
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])], "dense",
        [helper.make_tensor_value_info("x", kinds.FLOAT, ["N", 16])],
        [helper.make_tensor_value_info("y", kinds.FLOAT, ["N", 10])], [onnx.numpy_helper.from_array(W, "w")],
    )  # fmt: skip
    (tmp_path / "dense" / "1").mkdir(parents=True)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, tmp_path / "dense" / "1" / "model.onnx")
    (tmp_path / "dense" / "config.pbtxt").write_text('backend: "openvino"')

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            x = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
            np.testing.assert_allclose((await infer(repository, "dense", x=x))["y"], exact(x), rtol=1e-5, atol=1e-5)

    asyncio.run(run())


KINDS = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")


def test_every_type_comes_back_as_it_was(tmp_path: Path) -> None:
    dtypes = {kind: DTYPES[kind] for kind in KINDS}
    for kind, dtype in dtypes.items():
        x = named(ops.parameter([-1], np.dtype(dtype), name="x"), "x")
        same = named(ops.reshape(x, ops.constant(np.array([-1])), False), "y")
        write(tmp_path, kind.lower(), ov.Model([ops.result(same)], [x], "same"), 'backend: "openvino"')

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for kind, dtype in dtypes.items():
                x = np.array([0, 1, 2, 100]).astype(dtype)
                found = (await infer(repository, kind.lower(), x=x.reshape(-1, 1)))["y"]
                assert found.dtype == x.dtype and found.tolist() == x.reshape(-1, 1).tolist(), kind

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda c: c.replace('"x"', '"z"'), "unexpected inference input 'z', allowed inputs are: x"),
        (lambda c: c.replace('"y"', '"z"'), "unexpected inference output 'z', allowed outputs are: scores"),
        (lambda c: c.replace("FP32 dims: [ 16 ]", "INT32 dims: [ 16 ]"), "expects data-type FP32 but the model config"),
        (lambda c: c.replace("[ 16 ]", "[ 17 ]"), r"expects 2 dimensions \(shape \[-1, 16\]\) but"),
        (lambda c: c + parameters(NUM_STREAMS="many"), "'many', a number from 1 to 4096 is expected"),
        (lambda c: c + parameters(HINT_BF16="maybe"), "'maybe', one of YES, NO is expected"),
        (lambda c: c + parameters(TARGET_DEVICE="GPU"), "'GPU', one of CPU is expected"),
        (lambda c: c + parameters(CPU_EXTENSION_PATH="/x.so"), "is not supported: it would load a library into"),
        (lambda c: c + parameters(ENABLE_BATCH_PADDING="YES"), "is not supported: export the network with a first dim"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit(tmp_path: Path, change: Callable[[str], str], what: str) -> None:
    write(tmp_path, "dense", dense(), change(DENSE))
    (failed,) = refused(tmp_path)
    assert re.search(what, failed), failed


def test_a_fixed_first_dimension_is_no_batch(tmp_path: Path) -> None:
    write(tmp_path, "dense", dense(3))
    (failed,) = refused(tmp_path)
    assert "for the model to support batching the shape should have at least 1 dimension and the first" in failed


def test_settings_are_taken(tmp_path: Path) -> None:
    said = {"INFERENCE_NUM_THREADS": "3", "NUM_STREAMS": "AUTO", "HINT_BF16": "yes", "ENABLE_BATCH_PADDING": "NO"}
    write(tmp_path, "dense", dense(), DENSE + parameters(**said))
    read = repository_reader.read_model([tmp_path], "dense", "", None)
    assert read is not None
    found = backend._properties(read.config)
    assert (found["INFERENCE_NUM_THREADS"], found["NUM_STREAMS"], found["INFERENCE_PRECISION_HINT"]) == (
        3,
        "AUTO",
        "bf16",
    )


def test_numbers_are_not_rounded_unasked(tmp_path: Path) -> None:
    """OpenVINO computes in bfloat16 where the processor has it: 1 + 2^-10 would be 1."""
    write(tmp_path, "dense", dense())
    x = np.zeros((1, 16), np.float32)
    x[0, 3] = 1 + 2**-10
    rounded = exact(x.astype(ml_dtypes.bfloat16).astype(np.float32))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            found = (await infer(repository, "dense", x=x))["y"]
            assert np.abs(found - exact(x)).max() < np.abs(rounded - exact(x)).max() / 100

    asyncio.run(run())


def test_damaged_files_and_failing_runs(tmp_path: Path) -> None:
    a, b = (named(ops.parameter([-1, -1], np.float32, name=n), n) for n in "ab")
    made = named(ops.matmul(a, b, False, False), "y")
    sides = '{ name: "%s" data_type: TYPE_FP32 dims: [ -1, -1 ] }'
    config = f'backend: "openvino" input [ {sides % "a"}, {sides % "b"} ] output {sides % "y"}'
    write(tmp_path, "fails", ov.Model([ops.result(made)], [a, b], "product"), config)
    for name in ("broken", "cut", "alone", "linked"):
        write(tmp_path, name, dense())
    (tmp_path / "broken/1/model.xml").write_text("<net name='x'>")
    weights = tmp_path / "cut/1/model.bin"
    weights.write_bytes(weights.read_bytes()[:100])
    (tmp_path / "alone/1/model.bin").unlink()
    (tmp_path / "linked/1/model.bin").unlink()
    (tmp_path / "linked/1/model.bin").symlink_to("/etc/hostname")

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            one, two = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
            for _ in range(2):  # it goes on
                with pytest.raises(StatusError, match="openvino error"):
                    await infer(repository, "fails", a=one, b=one)
                assert (await infer(repository, "fails", a=one, b=two))["y"].tolist() == [[3, 3], [3, 3]]

    failed = {re.findall("load failed for model '(\\w+)'", one)[0]: one for one in refused(tmp_path)}
    assert "a link that leads out of the model's folder" in failed.pop("linked")
    assert failed.keys() == {"broken", "cut", "alone"} and all("openvino error" in one for one in failed.values())
    for name in ("broken", "cut", "alone", "linked"):
        (tmp_path / name / "config.pbtxt").unlink()
        for file in (tmp_path / name / "1").iterdir():
            file.unlink()
        (tmp_path / name / "1").rmdir()
        (tmp_path / name).rmdir()
    asyncio.run(run())


def test_instances_share_the_cores_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework_backend, "usable_cores", lambda: 2)
    found: list[int] = []
    compute = backend._OpenVinoModel.compute

    def counted(self: Any, inputs: Any) -> Any:
        found.append(self._compiled.get_property("INFERENCE_NUM_THREADS"))
        return compute(self, inputs)

    monkeypatch.setattr(backend._OpenVinoModel, "compute", counted)
    config = DENSE + "instance_group { count: 2 kind: KIND_CPU }"
    write(tmp_path, "shared", dense(), config)

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            xs = [np.full((1, 16), i, np.float32) for i in range(2)]
            both = await asyncio.gather(*(infer(repository, "shared", x=x) for x in xs))
            for x, one in zip(xs, both, strict=True):
                np.testing.assert_allclose(one["y"], exact(x), rtol=1e-5, atol=1e-5)

    asyncio.run(run())
    assert found == [1, 1]


# ---------------------------------------------------------------------- sequences, and batches of different shapes

BACKEND = 'backend: "openvino" '


def parameter(name: str, shape: list[int], dtype: Any) -> Any:
    return named(ops.parameter(shape, dtype, name=name), name)


def running_sum() -> Any:
    """after = y = before + ready x; who = id"""
    x, before = parameter("x", [-1, 2], np.float32), parameter("before", [-1, 2], np.float32)
    ready, number = parameter("ready", [-1, 1], np.float32), parameter("id", [-1, 1], np.int64)
    after = named(ops.add(before, ops.multiply(x, ready)), "after")
    same = ops.constant(np.float32(1)), ops.constant(np.int64(1))
    y, who = named(ops.multiply(after, same[0]), "y"), named(ops.multiply(number, same[1]), "who")
    return ov.Model([ops.result(one) for one in (y, who, after)], [x, before, ready, number], "sums")


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_queue_delay_microseconds: 1000 }"])
def test_sequences_whose_state_the_server_holds(tmp_path: Path, strategy: str) -> None:
    write(tmp_path, "sums", running_sum(), BACKEND + SEQUENCES % (SIDES, strategy))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            await asyncio.gather(*(sums_of(repository.get("sums"), id_) for id_ in range(1, 8)))

    asyncio.run(run())


def ragged_sums() -> Any:
    """Of each request the sum of its elements, by where it begins; and each element twice."""
    x, at = parameter("x", [-1], np.float32), parameter("at", [-1], np.int32)
    zero, one = ops.constant(np.array([0])), ops.constant(np.array([1]))
    running = ops.concat([ops.constant(np.zeros(1, np.float32)), ops.cum_sum(x, ops.constant(np.int64(0)))], 0)
    picked = ops.gather(running, at, ops.constant(np.int64(0)))
    high = ops.slice(picked, one, ops.constant(np.array([1 << 40])), one, zero)
    low = ops.slice(picked, zero, ops.constant(np.array([-1])), one, zero)
    total = named(ops.unsqueeze(ops.subtract(high, low), one), "sum")
    return ov.Model([ops.result(total), ops.result(named(ops.add(x, x), "twice"))], [x, at], "ragged")


def test_a_batch_of_requests_of_different_shapes(tmp_path: Path) -> None:
    write(tmp_path, "sums", ragged_sums(), BACKEND + RAGGED)
    asyncio.run(ragged_of(tmp_path))
