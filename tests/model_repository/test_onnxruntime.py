"""The backend `onnxruntime`: networks made by onnx's own helpers, beside NumPy's arithmetic and onnx's evaluator."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import Array, objects
from tests.support.batched import RAGGED, SEQUENCES, SIDES, ragged_of, sums_of
from tests.support.loaded import Loaded, infer, refused

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
onnx = pytest.importorskip("onnx", reason="onnxruntime is not installed")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

W = np.random.default_rng(0).standard_normal((16, 10)).astype(np.float32)
PLAIN = 'backend: "onnxruntime"'
DENSE = """platform: "onnxruntime_onnx" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 10 ] }
"""
Shape = Sequence[int | str]
BACKEND = 'backend: "onnxruntime" '


def network(
    nodes: Sequence[Any], inputs: Mapping[str, tuple[int, Shape]], outputs: Mapping[str, tuple[int, Shape]],
    weights: dict[str, Array] | None = None,
) -> Any:  # fmt: skip
    def told(of: Mapping[str, tuple[int, Shape]]) -> list[Any]:
        return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in of.items()]

    constants = [numpy_helper.from_array(w, name) for name, w in (weights or {}).items()]
    graph = helper.make_graph(nodes, "network", told(inputs), told(outputs), constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(made)
    return made


def dense(batch: int | str = "N") -> Any:
    """y = relu(x W)"""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    return network(
        nodes, {"x": (TensorProto.FLOAT, [batch, 16])}, {"y": (TensorProto.FLOAT, [batch, 10])}, {"w": W}
    )  # fmt: skip


def write(root: Path, name: str, made: Any, config: str = PLAIN, version: int = 1) -> Path:
    (root / name / str(version)).mkdir(parents=True)
    onnx.save(made, root / name / str(version) / "model.onnx")
    (root / name / "config.pbtxt").write_text(config)
    return root


def test_batches_of_several_requests(tmp_path: Path) -> None:
    """Each gets what it gets alone, and they are computed together."""
    write(tmp_path, "dense", dense(), DENSE + "dynamic_batching { max_queue_delay_microseconds: 200000 }")
    xs = [np.random.default_rng(i).standard_normal((1 + i % 3, 16)).astype(np.float32) for i in range(6)]

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            found = await asyncio.gather(*(infer(repository, "dense", x=x) for x in xs[:4]))  # 1 + 2 + 3 + 1 rows
            for x, one in zip(xs, found, strict=False):
                np.testing.assert_allclose(one["y"], np.maximum(x.astype(np.float64) @ W, 0), rtol=1e-5, atol=1e-5)
            assert repository.get("dense").statistics_dict()["execution_count"] == 1
            alone = await infer(repository, "dense", x=xs[4])
            np.testing.assert_allclose(alone["y"], ReferenceEvaluator(dense()).run(None, {"x": xs[4]})[0], rtol=1e-5)

    asyncio.run(run())


def test_what_the_file_knows_is_not_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "dense", dense(), "")
    write(tmp_path, "whole", dense(3), "")
    nodes = [helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0)]
    write(tmp_path, "sum", network(nodes, {"x": (TensorProto.INT64, ["a", 2])}, {"s": (TensorProto.INT64, [])}), PLAIN)

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            said = {name: config_json(repository.get(name).config) for name in ("dense", "whole", "sum")}
            assert said["dense"]["max_batch_size"] == 4 and said["dense"]["input"][0]["dims"] == [16]
            assert said["dense"]["dynamic_batching"]["preferred_batch_size"] == [4]
            assert said["whole"]["max_batch_size"] == 0 and said["whole"]["input"][0]["dims"] == [3, 16]
            assert said["sum"]["max_batch_size"] == 0 and said["sum"]["output"][0]["dims"] == [1]
            assert said["sum"]["output"][0]["reshape"] == {"shape": []}
            found = await infer(repository, "sum", x=np.arange(6, dtype=np.int64).reshape(3, 2))
            assert found["s"].tolist() == [15]  # of the shape that it tells
            assert (await infer(repository, "whole", x=np.ones((3, 16), np.float32)))["y"].shape == (3, 10)

    asyncio.run(run())


KINDS = ("FLOAT16", "FLOAT", "DOUBLE", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL",
         "STRING")  # fmt: skip


def test_every_type_comes_back_as_it_was(tmp_path: Path) -> None:
    values: dict[str, Array] = {}
    for kind in KINDS:
        number = getattr(TensorProto, kind)
        same = network([helper.make_node("Identity", ["x"], ["y"])], {"x": (number, ["N"])}, {"y": (number, ["N"])})
        write(tmp_path, kind.lower(), same)
        numbers = np.array([0, 1, 2, 100])
        values[kind] = (
            objects(["", "ä", "\U0001f980", "x" * 300]) if kind == "STRING" else  # type: ignore[list-item]
            numbers.astype(helper.tensor_dtype_to_np_dtype(number))
        )  # fmt: skip
    values["STRING"] = objects([text.encode() for text in values["STRING"].tolist()])

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for kind, x in values.items():
                found = (await infer(repository, kind.lower(), x=x.reshape(-1, 1)))["y"]
                assert found.dtype == x.dtype and found.tolist() == x.reshape(-1, 1).tolist(), kind
            with pytest.raises(StatusError, match="holds bytes that are no UTF-8"):
                await infer(repository, "string", x=objects([b"\xff"]).reshape(1, 1))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (DENSE.replace('"x"', '"z"'), r"unexpected inference input 'z', allowed inputs are: x"),
        (DENSE.replace('"y"', '"z"'), r"unexpected inference output 'z', allowed outputs are: y"),
        (DENSE.replace("FP32 dims: [ 16 ]", "INT32 dims: [ 16 ]"),
         r"tensor 'x': the model expects data-type FP32 but the model configuration specifies data-type INT32"),
        (DENSE.replace("[ 16 ]", "[ 17 ]"), r"tensor 'x': the model expects 2 dimensions \(shape \[-1, 16\]\) but the "
         r"model configuration specifies 2 dimensions \(an initial batch dimension because max_batch_size > 0"),
        (DENSE.replace("max_batch_size: 8", ""), r"tensor 'x': the model expects 2 dimensions \(shape \[-1, 16\]\) but "
         r"the model configuration specifies 1 dimensions \(shape \[16\]\)"),
        (DENSE + 'input { name: "w" data_type: TYPE_FP32 dims: [ 1 ] }',
         r"configuration expects 2 inputs, model provides 1"),
        (DENSE + 'parameters { key: "intra_op_thread_count" value { string_value: "many" } }',
         r"failed to parse parameter 'intra_op_thread_count' of model 'dense': 'many', a number from 0 to 4096"),
        (DENSE + 'parameters { key: "enable_mem_arena" value { string_value: "2" } }', r"'2', 0 or 1 is expected"),
        (DENSE + 'parameters { key: "execution_mode" value { string_value: "2" } }', r"a number from 0 to 1"),
        (DENSE + "optimization { graph { level: 3 } }", r"graph optimization level 3 of model 'dense' is none of"),
        (DENSE + 'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }',
         r"execution accelerator 'openvino' of model 'dense' is not supported"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit(tmp_path: Path, config: str, what: str) -> None:
    write(tmp_path, "dense", dense(), config)
    (failed,) = refused(tmp_path)
    assert re.search(what, failed)


def test_a_fixed_first_dimension_is_no_batch(tmp_path: Path) -> None:
    write(tmp_path, "dense", dense(3), DENSE)
    (failed,) = refused(tmp_path)
    assert "for the model to support batching the shape should have at least 1 dimension and the first" in failed


def test_settings_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from millrace.model_repository.backends import onnxruntime as backend
    from millrace.model_repository.repository import repository_reader

    said = {"intra_op_thread_count": "3", "inter_op_thread_count": "2", "execution_mode": "1", "enable_mem_arena": "0",
            "session.set_denormal_as_zero": "1", "intra_op_threads": "1"}  # fmt: skip
    parameters = "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}\n' for k, v in said.items())
    write(tmp_path, "dense", dense(), DENSE + parameters + "optimization { graph { level: 2 } }")
    read = repository_reader.read_model([tmp_path], "dense", "", None)
    assert read is not None
    options = backend._options(read.config, 1)
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode.name == "ORT_PARALLEL" and not options.enable_cpu_mem_arena
    assert options.graph_optimization_level.name == "ORT_DISABLE_ALL"
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert "parameter 'intra_op_threads' changes nothing" in caplog.text and "intra_op_thread_count" in caplog.text


def test_damaged_files_and_failing_runs(tmp_path: Path) -> None:
    write(tmp_path, "dense", dense(), DENSE)
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no network")
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    shapes = {"x": (TensorProto.FLOAT, ["n"]), "s": (TensorProto.INT64, ["k"])}
    write(tmp_path, "fails", network(nodes, shapes, {"y": (TensorProto.FLOAT, ["a", "b"])}), "max_batch_size: 0 " + """
    input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "s" data_type: TYPE_INT64 dims: [ -1 ] } ]
    output { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] }""")  # fmt: skip

    async def run() -> None:
        repository = ModelRepository(RepositoryFlags(model_repository=(str(tmp_path),)))
        (failed,) = await repository.start()
        assert "load failed for model 'broken'" in failed and "onnx runtime error" in failed
        x = np.ones(6, np.float32)
        for _ in range(2):  # it goes on
            with pytest.raises(StatusError, match="onnx runtime error"):
                await infer(repository, "fails", x=x, s=np.array([4, 4]))
            assert (await infer(repository, "fails", x=x, s=np.array([2, 3])))["y"].shape == (2, 3)
        await repository.close(5)

    asyncio.run(run())


def test_weights_beside_the_network(tmp_path: Path) -> None:
    """A folder named model.onnx, as large networks are exported."""
    folder = tmp_path / "dense" / "1" / "model.onnx"
    folder.mkdir(parents=True)
    onnx.save(dense(), folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "dense" / "config.pbtxt").write_text(DENSE)
    assert (folder / "weights.bin").stat().st_size >= W.nbytes

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            x = np.ones((2, 16), np.float32)
            found = await infer(repository, "dense", x=x)
            np.testing.assert_allclose(found["y"], np.maximum(x @ W, 0), rtol=1e-5, atol=1e-6)

    asyncio.run(run())


def running_sum() -> Any:
    """after = y = before + ready x; who = id"""
    row: tuple[int, Shape] = TensorProto.FLOAT, ["N", 2]
    flag: tuple[int, Shape] = TensorProto.FLOAT, ["N", 1]
    number: tuple[int, Shape] = TensorProto.INT64, ["N", 1]
    nodes = [
        helper.make_node("Mul", ["x", "ready"], ["h"]), helper.make_node("Add", ["before", "h"], ["after"]),
        helper.make_node("Identity", ["after"], ["y"]), helper.make_node("Identity", ["id"], ["who"]),
    ]  # fmt: skip
    return network(
        nodes, {"x": row, "ready": flag, "id": number, "before": row}, {"y": row, "who": number, "after": row}
    )


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_queue_delay_microseconds: 1000 }"])
@pytest.mark.parametrize("sides", [SIDES, ""])
def test_sequences_whose_state_the_server_holds(tmp_path: Path, strategy: str, sides: str) -> None:
    """Also where the network says what its inputs and outputs are: those that clients do not see are not among them."""
    write(tmp_path, "sums", running_sum(), BACKEND + SEQUENCES % (sides, strategy))

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            await asyncio.gather(*(sums_of(repository.get("sums"), id_) for id_ in range(1, 8)))

    asyncio.run(run())


def ragged_sums() -> Any:
    """Of each request the sum of its elements, by where it begins; and each element twice."""
    nodes = [
        helper.make_node("CumSum", ["x", "zero"], ["running"]),
        helper.make_node("Concat", ["none", "running"], ["c"], axis=0),
        helper.make_node("Cast", ["at"], ["at64"], to=TensorProto.INT64),
        helper.make_node("Gather", ["c", "at64"], ["g"]),
        helper.make_node("Slice", ["g", "one", "most"], ["high"]),
        helper.make_node("Slice", ["g", "nul", "last"], ["low"]),
        helper.make_node("Sub", ["high", "low"], ["s"]), helper.make_node("Unsqueeze", ["s", "one"], ["sum"]),
        helper.make_node("Add", ["x", "x"], ["twice"]),
    ]  # fmt: skip
    weights: dict[str, Array] = {
        "zero": np.array(0, np.int64), "none": np.zeros(1, np.float32), "one": np.array([1]), "nul": np.array([0]),
        "most": np.array([1 << 40]), "last": np.array([-1]),
    }  # fmt: skip
    return network(
        nodes, {"x": (TensorProto.FLOAT, ["E"]), "at": (TensorProto.INT32, ["B"])},
        {"sum": (TensorProto.FLOAT, ["N", 1]), "twice": (TensorProto.FLOAT, ["E"])}, weights,
    )  # fmt: skip


def test_a_batch_of_requests_of_different_shapes(tmp_path: Path) -> None:
    write(tmp_path, "sums", ragged_sums(), BACKEND + RAGGED)
    asyncio.run(ragged_of(tmp_path))
