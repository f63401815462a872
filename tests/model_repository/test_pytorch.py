"""The backend `pytorch`: TorchScript and programs of torch.export, beside their modules called as Python, and NumPy."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from millrace.model_repository.backends import framework_backend, pytorch
from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import objects
from tests.support.loaded import Loaded, infer, refused
from tests.support.torch_models import CONFIG, Dense, exact, exported, exported_dense, scripted, write

BATCHES = "dynamic_batching { max_queue_delay_microseconds: 200000 }"
PAIR = """max_batch_size: 8
input [ { name: "%s" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "%s" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "%s" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "%s" data_type: TYPE_FP32 dims: [ 2 ] } ]"""


class Pair(torch.nn.Module):  # type: ignore[misc]
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


@pytest.mark.parametrize("how", ["script", "export"])
def test_batches_of_several_requests(tmp_path: Path, how: str) -> None:
    """Each gets what it gets alone, and they are computed together; by either kind of file, of either name."""
    save = scripted(Dense()) if how == "script" else exported_dense
    write(tmp_path, "dense", save, CONFIG + BATCHES)
    xs = [np.random.default_rng(i).standard_normal((1 + i % 3, 16)).astype(np.float32) for i in range(5)]

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            found = await asyncio.gather(*(infer(repository, "dense", INPUT__0=x) for x in xs[:4]))  # 1 + 2 + 3 + 1
            for x, one in zip(xs, found, strict=False):
                np.testing.assert_allclose(one["OUTPUT__0"], exact(x), rtol=1e-5, atol=1e-5)
            assert repository.get("dense").statistics_dict()["execution_count"] == 1
            xs[4].flags.writeable = False  # as a request's bytes are
            alone = await infer(repository, "dense", INPUT__0=xs[4])
            assert np.array_equal(alone["OUTPUT__0"], Dense()(torch.from_numpy(xs[4].copy())).detach().numpy())

    asyncio.run(run())


NAMES = [
    ("INPUT__0", "INPUT__1", "OUTPUT__0", "OUTPUT__1"), ("b", "a", "SUM__0", "DIFFERENCE__1"),
    ("in__1", "in__0", "out__1", "out__0"), ("first", "second", "sum", "difference"),
]  # fmt: skip


@pytest.mark.parametrize("names", NAMES)
def test_names_are_places(tmp_path: Path, names: tuple[str, str, str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Triton's rules: by argument, by index, and otherwise by the configuration's order, which is told."""
    write(tmp_path, "pair", scripted(Pair()), 'backend: "pytorch" ' + PAIR % names)
    write(
        tmp_path, "program", exported(Pair(), torch.ones(3, 2), torch.ones(3, 2)), 'backend: "pytorch" ' + PAIR % names
    )
    one, other = np.array([[1, 2]], np.float32), np.array([[10, 20]], np.float32)
    is_swapped = names[:2] in (("b", "a"), ("in__1", "in__0"))
    a, b = (other, one) if is_swapped else (one, other)
    sums, differences = (names[3], names[2]) if names[2] == "out__1" else names[2:]

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for model in ("pair", "program"):
                found = await infer(repository, model, **{names[0]: one, names[1]: other})
                assert np.array_equal(found[sums], a + b) and np.array_equal(found[differences], a - b), model

    asyncio.run(run())
    assert ("input 'first' is neither an argument of forward nor" in caplog.text) == (names[0] == "first")


class Keyed(torch.nn.Module):  # type: ignore[misc]
    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"twice": given["x"] * 2, "both": given["x"] + given["y"]}


class Optional(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x if y is None else x * y


class Texts(torch.nn.Module):  # type: ignore[misc]
    def forward(self, words: list[str], n: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        return [word.upper() for word in words], n + len(words)


def test_dictionaries_missing_arguments_and_strings(tmp_path: Path) -> None:
    fp32 = '{ name: "%s" data_type: TYPE_FP32 dims: [ 2 ] }'
    x, y = (fp32 % name for name in "xy")
    outputs = f"output [ {fp32 % 'both'}, {fp32 % 'twice'} ]"
    write(tmp_path, "keyed", scripted(Keyed()), f'backend: "pytorch" max_batch_size: 4 input [ {y}, {x} ] {outputs}')
    write(tmp_path, "one", scripted(Optional()), f'backend: "pytorch" max_batch_size: 4 input {x} output {x}')
    write(tmp_path, "texts", scripted(Texts()), """backend: "pytorch"
        input [ { name: "words" data_type: TYPE_STRING dims: [ -1 ] }, { name: "n" data_type: TYPE_INT64 dims: [ 1 ] } ]
        output [ { name: "OUTPUT__0" data_type: TYPE_STRING dims: [ -1 ] },
                 { name: "OUTPUT__1" data_type: TYPE_INT64 dims: [ 1 ] } ]""")  # fmt: skip
    given = {"x": np.array([[1, 2]], np.float32), "y": np.array([[3, 4]], np.float32)}

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            found = await infer(repository, "keyed", **given)
            assert found["twice"].tolist() == [[2, 4]] and found["both"].tolist() == [[4, 6]]
            assert (await infer(repository, "one", x=given["x"]))["x"].tolist() == [[1, 2]]
            words = objects(["grün".encode(), b"", b"abc"])  # TorchScript knows the letters of ASCII
            made = await infer(repository, "texts", words=words, n=np.array([10]))
            assert made["OUTPUT__0"].tolist() == ["GRüN".encode(), b"", b"ABC"] and made["OUTPUT__1"].tolist() == [13]
            with pytest.raises(StatusError, match="input 'words' holds bytes that are no UTF-8"):
                await infer(repository, "texts", words=objects([b"\xff"]), n=np.array([1]))

    asyncio.run(run())


def test_what_a_program_knows_is_not_asked_for(tmp_path: Path) -> None:
    class Sides(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scaled": x * 2, "ids": ids}

    save = exported(Sides(), torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.int32))
    write(tmp_path, "sides", save, "", "model.pt2")
    program = torch.export.export(Dense(), (torch.ones(3, 16),))
    write(tmp_path, "whole", lambda path: torch.export.save(program, path), "", "model.pt2")

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            said = config_json(repository.get("sides").config)
            assert said["backend"] == "pytorch" and said["max_batch_size"] == 4
            sides = [[(t["name"], t["data_type"], t["dims"]) for t in said[side]] for side in ("input", "output")]
            assert sides[0] == [("x", "TYPE_BF16", [4]), ("ids", "TYPE_INT32", [1])]
            assert sides[1] == [("scaled", "TYPE_BF16", [4]), ("ids", "TYPE_INT32", [1])]
            x = np.array([[1, 2, 3, 4]], ml_dtypes.bfloat16)
            found = await infer(repository, "sides", x=x, ids=np.array([[7]], np.int32))
            assert found["scaled"].dtype == ml_dtypes.bfloat16 and found["scaled"].tolist() == [[2, 4, 6, 8]]
            whole = config_json(repository.get("whole").config)
            assert whole["max_batch_size"] == 0 and whole["input"][0]["dims"] == [3, 16]
            assert whole["output"][0]["name"] == "OUTPUT__0"

    asyncio.run(run())


def test_torchscript_has_to_be_told(tmp_path: Path) -> None:
    write(tmp_path, "dense", scripted(Dense()), "")
    (failed,) = refused(tmp_path)
    assert "must say its inputs and outputs in config.pbtxt: TorchScript does not know types and shapes" in failed
    assert "Tensor x) -> Tensor" in failed


KINDS = {"BOOL": np.bool_, "UINT8": np.uint8, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
         "FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BF16": ml_dtypes.bfloat16,
         "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64}  # fmt: skip


def test_every_type_comes_back_as_it_was(tmp_path: Path) -> None:
    class Same(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1)

    for kind in KINDS:
        sides = f'{{ name: "x" data_type: TYPE_{kind} dims: [ -1 ] }}'
        write(tmp_path, kind.lower(), scripted(Same()), f'backend: "pytorch" input {sides} output {sides}')

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for kind, dtype in KINDS.items():
                x = np.array([0, 1, 2, 100]).astype(dtype)
                found = (await infer(repository, kind.lower(), x=x))["x"]
                assert found.dtype == x.dtype and found.tolist() == x.tolist(), kind

    asyncio.run(run())


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (CONFIG.replace('"INPUT__0"', '"INPUT__1"'), "expects 1 inputs, model provides at most 1, and has no"),
        (CONFIG + 'input { name: "INPUT__0x" data_type: TYPE_FP32 dims: [ 1 ] }', "expects 2 inputs, model provides"),
        (PAIR % ("IN__0", "X__0", "o", "p"), "two inputs of model 'dense' have the same index"),
        (CONFIG + 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "0" } }', "'0', a number from 1"),
        (CONFIG + 'parameters { key: "INFERENCE_MODE" value { string_value: "maybe" } }', "'maybe', 0 or 1 is"),
        (CONFIG + 'optimization { execution_accelerators { cpu_execution_accelerator { name: "x" } } }',
         "execution accelerator 'x' of model 'dense' is not supported"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit(tmp_path: Path, config: str, what: str) -> None:
    write(tmp_path, "dense", scripted(Dense()), 'backend: "pytorch" ' * ("platform" not in config) + config)
    (failed,) = refused(tmp_path)
    assert re.search(what, failed), failed


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"INPUT__0" data_type: TYPE_FP32', '"INPUT__0" data_type: TYPE_FP64', "the model expects data-type FP32 but"),
        ("[ 16 ]", "[ 17 ]", r"tensor 'INPUT__0': the model expects 2 dimensions \(shape \[-1, 16\]\) but the"),
        ("[ 10 ]", "[ 10, 1 ]", r"tensor 'OUTPUT__0': the model expects 2 dimensions \(shape \[-1, 10\]\) but the"),
        ('"OUTPUT__0"', '"OUTPUT__1"', r"output index which doesn't exist. This model has 1 outputs"),
    ],
)  # fmt: skip
def test_a_configuration_of_another_program(tmp_path: Path, old: str, new: str, what: str) -> None:
    write(tmp_path, "dense", exported_dense, CONFIG.replace(old, new))
    (failed,) = refused(tmp_path)
    assert re.search(what, failed), failed


class Odd(torch.nn.Module):  # type: ignore[misc]
    """Wrong in ways that only its answers show."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 2))
        self.total: torch.Tensor

    def forward(self, x: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
        if int(way[0, 0]) == 0:
            return x.sum()
        if int(way[0, 0]) == 1:
            return x.to(torch.float64)
        if int(way[0, 0]) == 2:
            return x @ x
        self.total += x
        return self.total


def test_what_only_a_run_can_tell(tmp_path: Path) -> None:
    """Errors are the request's alone, and what the network keeps is not what an answer holds."""
    write(tmp_path, "odd", scripted(Odd()), """backend: "pytorch" max_batch_size: 1
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "way" data_type: TYPE_INT32 dims: [ 1 ] } ]
        output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] }""")  # fmt: skip
    x = np.array([[1, 2]], np.float32)
    words = {0: "output 'OUTPUT__0' is a scalar which is not supported.",
             1: "configuration expects datatype TYPE_FP32 for output 'OUTPUT__0', model provides TYPE_FP64",
             2: "PyTorch error: .*mat1 and mat2 shapes cannot be multiplied"}  # fmt: skip

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for way, what in words.items():
                with pytest.raises(StatusError, match=what):
                    await infer(repository, "odd", x=x, way=np.array([[way]], np.int32))
            sums = [await infer(repository, "odd", x=x, way=np.array([[3]], np.int32)) for _ in range(2)]
            assert [one["OUTPUT__0"].tolist() for one in sums] == [[[1, 2]], [[2, 4]]]

    asyncio.run(run())


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """How many each network had in its own thread, as OpenMP knows it, in the order in which they computed."""
    found: list[int] = []
    compute = pytorch._PyTorchModel.compute
    before = torch.get_num_threads()

    def counted(self: Any, inputs: Any) -> Any:
        (n,) = re.findall(r"omp_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())
        found.append(int(n))
        return compute(self, inputs)

    monkeypatch.setattr(pytorch._PyTorchModel, "compute", counted)
    yield lambda: found
    torch.set_num_threads(before)


def test_instances_share_the_cores_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: Callable[[], list[int]]
) -> None:
    """Side by side, which PyTorch's own default would give all the cores each."""
    monkeypatch.setattr(framework_backend, "usable_cores", lambda: 6)
    both = threading.Barrier(2, timeout=10)
    forward = pytorch._Script.run

    def together(self: Any, given: Any) -> Any:
        both.wait()
        return forward(self, given)

    monkeypatch.setattr(pytorch._Script, "run", together)
    write(tmp_path, "dense", scripted(Dense()), CONFIG + "instance_group { count: 2 kind: KIND_CPU }")
    said = 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "5" } }'
    write(tmp_path, "told", scripted(Dense()), CONFIG + "instance_group { count: 2 kind: KIND_CPU }" + said)

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            for model in ("dense", "told"):
                xs = [np.full((1, 16), i, np.float32) for i in range(2)]
                found = await asyncio.gather(*(infer(repository, model, INPUT__0=x) for x in xs))
                for x, one in zip(xs, found, strict=True):
                    np.testing.assert_allclose(one["OUTPUT__0"], exact(x), rtol=1e-5, atol=1e-5)

    asyncio.run(run())
    assert threads() == [3, 3, 5, 5]


def test_requests_of_different_shapes_in_one_batch(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, at.reshape(-1, 1)

    write(tmp_path, "twice", scripted(Twice()), """backend: "pytorch" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] },
                 { name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ 1 ] } ]
        batch_input { kind: BATCH_ELEMENT_COUNT target_name: "at" data_type: TYPE_FP32 source_input: "x" }
        batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "OUTPUT__0" source_input: "x" }
        """ + BATCHES)  # fmt: skip
    xs = [np.arange(n, dtype=np.float32).reshape(1, n) for n in (1, 4, 3)]

    async def run() -> None:
        async with Loaded(tmp_path) as repository:
            found = await asyncio.gather(*(infer(repository, "twice", x=x) for x in xs))
            for x, one in zip(xs, found, strict=True):
                assert np.array_equal(one["OUTPUT__0"], x * 2) and one["OUTPUT__1"].tolist() == [[x.size]]
            assert repository.get("twice").statistics.by_size.keys() == {3}

    asyncio.run(run())
