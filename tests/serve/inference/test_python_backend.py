"""model.py files as Triton's users write them, unchanged: what they may use, and what they do that goes wrong."""

import asyncio
import gc
import json
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.serve.inference.check import Given
from millrace.serve.inference.lifecycle import ModelRepository, RepositoryFlags
from millrace.serve.inference.model import Model
from millrace.serve.inference.request import InferRequest, InferResponse
from millrace.serve.inference.status import Code, StatusError
from millrace.serve.kserve.tensors import Array, objects

# As Triton's example: https://github.com/triton-inference-server/python_backend, examples/add_sub, in words of our own.
ADD_SUB = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        told = pb_utils.get_output_config_by_name(config, "OUTPUT0")
        self.kind = pb_utils.triton_string_to_numpy(told["data_type"])
        self.args = args

    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            left += 1  # a model may write into what it is given
            outputs = [pb_utils.Tensor("OUTPUT0", (left + right).astype(self.kind)),
                       pb_utils.Tensor("OUTPUT1", (left - right).astype(self.kind))]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
"""
ADD_SUB_CONFIG = """backend: "python" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
ANY = """backend: "python" %s
input { name: "IN" data_type: TYPE_STRING dims: [ -1 ] } output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""
HEAD = """
import asyncio, json, threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
"""
SAY = """
def said(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([text], dtype=object))])
"""


def write(root: Path, name: str, code: str, config: str | None = None, **others: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.py").write_text(code)
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    for other, text in others.items():
        (root / name / "1" / f"{other}.py").write_text(text)


@asynccontextmanager
async def loaded(root: Path) -> AsyncIterator[ModelRepository]:
    repository = ModelRepository(RepositoryFlags(model_repository=(str(root),), model_control_mode="explicit"))
    try:
        yield repository
    finally:
        await repository.close(5.0)


def asked(model: Model, parameters: dict[str, Any] | None = None, **arrays: Array) -> InferRequest:
    names = {"f": "FP32", "O": "BYTES", "i": "INT32"}
    request = InferRequest({}, request_id="r")
    request.parameters = parameters or {}
    model.checker.take(request, [Given(n, names[a.dtype.kind], a.shape, a) for n, a in arrays.items()])
    return request


def text(*values: str) -> Array:
    return objects([v.encode() for v in values])


async def one(repository: ModelRepository, name: str, array: Array, **parameters: Any) -> Any:
    """OUT of model `name`, which is loaded."""
    await repository.load(name)
    model = repository.get(name)
    return (await model.infer(asked(model, parameters, IN=array))).outputs["OUT"]


def test_tritons_example(tmp_path: Path) -> None:
    write(tmp_path, "add_sub", ADD_SUB, ADD_SUB_CONFIG + "dynamic_batching { preferred_batch_size: [ 3 ] }")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("add_sub")
            model = repository.get("add_sub")
            left, right = np.full((1, 2), 3, np.float32), np.full((1, 2), 1, np.float32)
            left.flags.writeable = False  # as what comes from a socket is
            requests = [asked(model, INPUT0=left, INPUT1=right) for _ in range(3)]
            for request in requests[:1]:
                request.outputs = ("OUTPUT1",)
            first, *others = await asyncio.gather(*(model.infer(r) for r in requests))
            assert {n: a.tolist() for n, a in first.outputs.items()} == {"OUTPUT1": [[3, 3]]}, "only what is asked for"
            for response in others:
                assert (
                    response.outputs["OUTPUT0"].tolist() == [[5, 5]] and response.outputs["OUTPUT0"].dtype == np.float32
                )
            assert left.tolist() == [[3, 3]], "the model wrote into a copy"
            assert (
                sum(d["compute_infer"].count for d in model.statistics.by_size.values())
                == model.statistics.n_executions
            )

    asyncio.run(run())


def test_what_a_model_is_told(tmp_path: Path) -> None:
    code = HEAD + """
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        (request,) = requests
        told = {**self.args, "id": request.request_id(), "parameters": json.loads(request.parameters()),
                "outputs": request.requested_output_names(), "timeout": request.timeout(), "flags": request.flags(),
                "cancelled": request.is_cancelled(), "in": [v.decode() for v in request.inputs()[0].as_numpy()],
                "type": request.inputs()[0].triton_dtype(), "shape": request.inputs()[0].shape()}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps(told)], dtype=object))])]
"""  # fmt: skip
    write(tmp_path, "m", code, ANY % "")

    async def run() -> dict[str, Any]:
        async with loaded(tmp_path) as repository:
            (out,) = await one(repository, "m", text("a", "ü"), mine=3)
        found: dict[str, Any] = json.loads(out)
        return found

    told = asyncio.run(run())
    config = json.loads(told.pop("model_config"))
    assert config["backend"] == "python" and config["input"][0]["dims"] == [-1]
    assert told == {
        "model_instance_kind": "CPU", "model_instance_name": "m_0", "model_instance_device_id": "0",
        "model_repository": str(tmp_path / "m"), "model_version": "1", "model_name": "m", "id": "r",
        "parameters": {"mine": 3}, "outputs": ["OUT"], "timeout": 0, "flags": 0, "cancelled": False, "in": ["a", "ü"],
        "type": 13, "shape": [2],
    }  # fmt: skip


def test_a_model_completes_its_own_configuration(tmp_path: Path) -> None:
    code = (
        ADD_SUB
        + """
    @staticmethod
    def auto_complete_config(config):
        for name in ("INPUT0", "INPUT1"):
            config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [4], "optional": name == "INPUT1"})
        for name in ("OUTPUT0", "OUTPUT1"):
            config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config
"""
    )
    write(tmp_path, "m", code)
    write(tmp_path, "other", code, 'max_batch_size: 8 input { name: "INPUT0" data_type: TYPE_INT32 dims: 4 }')

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            config = repository.get("m").config
            assert (config.backend, config.max_batch_size) == ("python", 4)
            assert [(t.name, t.data_type.name, t.dims, t.optional) for t in config.input] == [
                ("INPUT0", "TYPE_FP32", (4,), False), ("INPUT1", "TYPE_FP32", (4,), True),
            ]  # fmt: skip
            assert config.dynamic_batching is not None and config.dynamic_batching.preferred_batch_size == (4,)
            with pytest.raises(
                StatusError, match=r"ValueError: input 'INPUT0' in auto-complete-config function for model"
            ):
                await repository.load("other")

    asyncio.run(run())


def test_decoupled_models_answer_from_their_own_threads(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()

    def answer(self, sender):
        for i in range(3):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([str(i)], dtype=object))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )
    write(tmp_path, "m", code, ANY % "model_transaction_policy { decoupled: true }")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model, found, done = repository.get("m"), list[Any](), asyncio.Event()

            def receive(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
                found.append((response.outputs["OUT"].tolist() if response else error, final))
                if final:
                    done.set()

            model.submit(asked(model, IN=text("x")), receive)
            await asyncio.wait_for(done.wait(), 10)
            assert found == [([b"0"], False), ([b"1"], False), ([b"2"], False), (None, True)]

    asyncio.run(run())


def test_async_models_and_one_response_by_a_sender(tmp_path: Path) -> None:
    write(tmp_path, "later", HEAD + """
    async def execute(self, requests):
        await asyncio.sleep(0.001)
        return [said("async") for request in requests]
""" + SAY, ANY % "")  # fmt: skip
    write(tmp_path, "sends", HEAD + """
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(said("sent"), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
""" + SAY, ANY % "")  # fmt: skip

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            assert (await one(repository, "later", text("x"))).tolist() == [b"async"]
            assert (await one(repository, "sends", text("x"))).tolist() == [b"sent"]

    asyncio.run(run())


def test_each_model_has_modules_of_its_own(tmp_path: Path) -> None:
    code = "import utils\n" + HEAD + "    def execute(self, requests):\n        return [said(utils.NAME)]\n" + SAY
    for name in ("a", "b"):
        write(tmp_path, name, code, ANY % "", utils=f"NAME = '{name}'")

    async def run() -> None:
        before, path = set(sys.modules), list(sys.path)
        async with loaded(tmp_path) as repository:
            assert (await one(repository, "a", text("x"))).tolist() == [b"a"]
            assert (await one(repository, "b", text("x"))).tolist() == [b"b"]
            assert sys.path == path
        left = {m for m in set(sys.modules) - before if m.startswith(("utils", "millrace_model"))}
        assert not left, "models that are gone leave nothing"

    asyncio.run(run())


WRONG = [
    ("raise ValueError('of the model')", "ValueError: of the model; at model.py(9): execute"),
    (
        "return []",
        "TritonModelException: Number of InferenceResponse objects do not match the number of InferenceRequest "
        "objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0",
    ),
    ("return None", "TritonModelException: Expected a list in the execute return, found type 'NoneType'."),
    (
        "return [3]",
        "TritonModelException: Expected an 'InferenceResponse' object in the execute function return list, "
        "found type 'int'.",
    ),
    (
        "return [None]",
        "TritonModelException: Expected an 'InferenceResponse' object in the execute function return list, "
        "found type 'NoneType'.",
    ),
    ("requests[0].exec()", "TritonModelException: InferenceRequest.exec is not supported yet; at model.py(9): execute"),
    (
        "return [pb_utils.Tensor('x', np.zeros(1, np.complex64))]",
        "TritonModelException: the data type complex64 of tensor 'x' has no name in Triton; at model.py(9): execute",
    ),
]


@pytest.mark.parametrize(("body", "says"), WRONG)
def test_what_goes_wrong_in_a_model_is_the_answer(tmp_path: Path, body: str, says: str) -> None:
    write(tmp_path, "m", HEAD + f"    def execute(self, requests):\n        {body}\n", ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for _ in range(2):  # and it goes on
                with pytest.raises(StatusError) as failed:
                    await one(repository, "m", text("x"))
                assert failed.value.code is Code.INTERNAL
                instance = "Failed to process the request(s) for model instance 'm_0', message: "
                assert str(failed.value).startswith(instance + says)

    asyncio.run(run())


def test_errors_that_a_model_returns_keep_their_code(tmp_path: Path) -> None:
    body = (
        "return [pb_utils.InferenceResponse(error=pb_utils.TritonError('not now', pb_utils.TritonError.UNAVAILABLE))]"
    )
    write(tmp_path, "m", HEAD + f"    def execute(self, requests):\n        {body}\n", ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError) as failed:
                await one(repository, "m", text("x"))
            assert (failed.value.code, str(failed.value)) == (Code.UNAVAILABLE, "not now")

    asyncio.run(run())


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    cases = {
        "syntax": ("def", "SyntaxError"),
        "class": ("x = 1", "model.py has no class TritonPythonModel"),
        "init": (HEAD + "    def initialize(self, args):\n        raise pb_utils.TritonModelException('no disk')\n",
                 "TritonModelException: no disk; at model.py(9): initialize"),
        "none": (HEAD + "    pass\n", "TritonPythonModel of model 'none' has no function execute"),
    }  # fmt: skip
    for name, (code, _) in cases.items():
        write(tmp_path, name, code, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name, (_, says) in cases.items():
                with pytest.raises(StatusError) as failed:
                    await repository.load(name)
                told = f"load failed for model '{name}': version 1 is at UNAVAILABLE state: Internal: {says}"
                assert str(failed.value).startswith(told)

    asyncio.run(run())


def test_finalize_is_called_when_a_model_is_unloaded(tmp_path: Path) -> None:
    mark = tmp_path / "gone"
    code = "from pathlib import Path\n" + HEAD + f"""
    def execute(self, requests):
        return [said("x")]

    def finalize(self):
        Path({str(mark)!r}).touch()
""" + SAY  # fmt: skip
    root = tmp_path / "models"
    write(root, "m", code, ANY % "")

    async def run() -> None:
        async with loaded(root) as repository:
            await one(repository, "m", text("x"))
            await repository.load("m")
            model = repository.get("m")
            await repository.unload("m")
            await model.retire()
            assert mark.exists()

    asyncio.run(run())


@pytest.mark.nightly
def test_a_model_that_raises_ten_thousand_times_leaves_memory_flat(tmp_path: Path) -> None:
    """server#7481: there shared memory grows with every exception."""
    code = HEAD + "    def execute(self, requests):\n        raise ValueError('x' * 1000)\n"
    write(tmp_path, "m", code, ANY % "")

    async def run() -> int:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model, held = repository.get("m"), 0
            for i in range(10_000):
                if i == 1000:
                    tracemalloc.start()
                    held = tracemalloc.get_traced_memory()[0]
                with pytest.raises(StatusError):
                    await model.infer(asked(model, IN=objects([b"y" * 1000])))
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - held

    try:
        assert asyncio.run(run()) < 200_000, "9,000 requests, each of more than 2,000 bytes"
    finally:
        tracemalloc.stop()


def test_an_array_that_a_model_uses_again_is_no_answer_of_another_request(tmp_path: Path) -> None:
    code = HEAD + (
        "    def initialize(self, args):\n        self.array = np.zeros(1, np.float32)\n"
        "    def execute(self, requests):\n        self.array[:] = requests[0].inputs()[0].as_numpy()\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', self.array)])]\n"
    )
    write(tmp_path, "m", code, (ANY % "").replace("STRING", "FP32"))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            answers = await asyncio.gather(
                *(model.infer(asked(model, IN=np.full(1, i, np.float32))) for i in range(50))
            )
            assert [a.outputs["OUT"].tolist() for a in answers] == [[i] for i in range(50)]

    asyncio.run(run())


SILENT = "class Silent(Exception):\n    def __str__(self):\n        raise Silent\n"


@pytest.mark.parametrize("what", ["raise SystemExit(3)", "raise Silent", "raise KeyboardInterrupt"])
def test_a_model_that_ends_the_process_ends_only_its_batch(tmp_path: Path, what: str) -> None:
    name = what.removeprefix("raise ").partition("(")[0]
    code = HEAD + (
        f"    def execute(self, requests):\n        if requests[0].request_id() == 'end': {what}\n"
        "        return [said('fine') for _ in requests]\n"
        f"    def finalize(self):\n        {what}\n"
    )
    write(tmp_path, "m", code + SAY + SILENT, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            wrong = asked(model, IN=text("a"))
            wrong.id = "end"
            with pytest.raises(StatusError, match=name):
                await asyncio.wait_for(model.infer(wrong), 5)
            answer = await asyncio.wait_for(model.infer(asked(model, IN=text("a"))), 5)
            assert answer.outputs["OUT"].tolist() == [b"fine"]
            await asyncio.wait_for(model.retire(), 5)

    asyncio.run(run())


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(2)\n",
        HEAD + "    @staticmethod\n    def auto_complete_config(config):\n        raise SystemExit\n",
        HEAD + "    @staticmethod\n    def auto_complete_config(config):\n        config.as_dict().clear()\n"
        "        return config\n",
    ],
)
def test_a_model_that_ends_the_process_while_it_loads_is_only_not_loaded(tmp_path: Path, code: str) -> None:
    write(tmp_path, "m", code, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError, match="load failed for model 'm'"):
                await repository.load("m")

    asyncio.run(run())


def test_a_load_goes_on_when_its_client_goes_away(tmp_path: Path) -> None:
    """Cut off in the middle, it would leave an instance that nobody can close."""
    code = HEAD + (
        "    def initialize(self, args):\n        import time\n        time.sleep(0.3)\n"
        "    def execute(self, requests):\n        return [said('fine') for _ in requests]\n"
    )
    write(tmp_path, "m", code + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(repository.load("m"), 0.1)
            await asyncio.wait_for(repository.unload("m"), 5)  # after the change that is under way
            assert (await repository.index(False))[0]["version"] == "1", "it was loaded"

    asyncio.run(run())
