"""model.py files as Triton's users write them, unchanged: what they may use."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.request.infer_request import InferResponse
from millrace.model_repository.request.status_code import StatusError
from tests.support.python_models import ANY, HEAD, SAY, asked, loaded, one, text, write

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


def test_what_a_model_logs_is_in_the_servers_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it belongs to no instance, and where it imports what it needs within a function, or in a thread."""
    code = HEAD + """
    @staticmethod
    def auto_complete_config(config):
        pb_utils.Logger.log_warn("completes")
        return config

    def execute(self, requests):
        import triton_python_backend_utils as found
        found.Logger.log_error("executes")
        thread = threading.Thread(target=lambda: pb_utils.Logger.log("computes", pb_utils.Logger.WARNING))
        thread.start()
        thread.join()
        assert isinstance(requests[0], pb_utils.InferenceRequest)
        return [said(found.InferenceRequest("", 0, [], [], "m").requested_output_names().__repr__())]
"""  # fmt: skip
    write(tmp_path, "m", code + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            assert (await one(repository, "m", text("x"))).tolist() == [b"[]"]

    asyncio.run(run())
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "millrace.serve.models"]
    assert said == [("WARNING", "completes"), ("ERROR", "executes"), ("WARNING", "computes")]
