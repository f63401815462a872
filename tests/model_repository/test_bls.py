"""Models that ask models (business logic scripting): what they get, whatever the other does."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import StatusError
from tests.support.python_models import ANY, HEAD, OWN, SAY, asked, loaded, one, text, write
from tests.support.triton_models import (
    ADD_SUB_CONFIG,
    BLS_ASYNC,
    BLS_CONFIG,
    BLS_DECOUPLED_ASYNC,
    BLS_DECOUPLED_SYNC,
    BLS_SYNC,
    DECOUPLED,
    SQUARE,
    SQUARE_CONFIG,
)

A, B = np.array([1, 2, 3, 4], np.float32), np.array([4, 3, 2, 1], np.float32)


def config_only(root: Path, name: str, config: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)


async def load(repository: ModelRepository, *names: str) -> None:
    for name in names:
        await repository.load(name)


@pytest.mark.parametrize("code", [BLS_SYNC, BLS_ASYNC], ids=["sync", "async"])
def test_tritons_examples_of_bls(tmp_path: Path, code: str) -> None:
    config_only(tmp_path, "add_sub", ADD_SUB_CONFIG % 'backend: "add_sub"')
    write(tmp_path, "bls", code, BLS_CONFIG % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "add_sub", "bls")
            model = repository.get("bls")
            for _ in range(2):
                found = await model.infer(asked(model, MODEL_NAME=text("add_sub"), INPUT0=A, INPUT1=B))
                assert {n: a.tolist() for n, a in found.outputs.items()} == {
                    "OUTPUT0": (A + B).tolist(), "OUTPUT1": (A - B).tolist(),
                }  # fmt: skip
            with pytest.raises(StatusError, match=r"Failed for execute the inference request\. Model 'x' is not"):
                await model.infer(asked(model, MODEL_NAME=text("x"), INPUT0=A, INPUT1=B))

    asyncio.run(run())


@pytest.mark.parametrize(("code", "times"), [(BLS_DECOUPLED_SYNC, 1), (BLS_DECOUPLED_ASYNC, 2)], ids=["sync", "async"])
def test_tritons_examples_of_decoupled_bls(tmp_path: Path, code: str, times: int) -> None:
    write(tmp_path, "square_int32", SQUARE, SQUARE_CONFIG % DECOUPLED)
    write(tmp_path, "bls", code, SQUARE_CONFIG % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "square_int32", "bls")
            model = repository.get("bls")
            for n in (0, 1, 7):
                found = await model.infer(asked(model, IN=np.array([n], np.int32)))
                assert found.outputs["OUT"].tolist() == [times * n * n]

    asyncio.run(run())


def test_responses_are_there_for_another_loop(tmp_path: Path) -> None:
    """As Triton's tests have it: after the end a loop begins anew, after a break it goes on."""
    code = """
    def execute(self, requests):
        asking = pb_utils.InferenceRequest(
            model_name="square_int32", inputs=[requests[0].inputs()[0]], requested_output_names=["OUT"])
        found = asking.exec(decoupled=True)
        first = next(found)
        n = [len([r for r in found]), len(list(found)), len(list(found))]
        for i, response in enumerate(found):
            if i == 1:
                break
        third = next(found)
        n += [len(list(found)), next(found, None) is None]
        values = [r.output_tensors()[0].as_numpy()[0] for r in (first, third)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([*n, *values], np.int32))])]
"""
    write(tmp_path, "square_int32", SQUARE, SQUARE_CONFIG % DECOUPLED)
    write(
        tmp_path,
        "bls",
        HEAD + code,
        SQUARE_CONFIG.replace("TYPE_INT32 dims: [ 1 ] }\n", "TYPE_INT32 dims: [ -1 ] }") % "",
    )

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "square_int32", "bls")
            model = repository.get("bls")
            found = await model.infer(asked(model, IN=np.array([4], np.int32)))
            assert found.outputs["OUT"].tolist() == [4, 5, 5, 2, True, 4, 4], "four, and one that only ends"

    asyncio.run(run())


ASK = """
    def execute(self, requests):
        (request,) = requests
        asking = pb_utils.InferenceRequest(%s)
        response = asking.exec()
        error = response.error()
        told = [error.code(), error.message()] if response.has_error() else [
            t.as_numpy().tolist() for t in response.output_tensors()]
        return [said(json.dumps(told))]
"""
IN = "requested_output_names=['OUT'], inputs=[pb_utils.Tensor('IN', np.array(['x'], dtype=object))]"
WRONG = [
    (f"model_name='m', {IN.replace('OUT', 'NO')}", 3, "unexpected inference output 'NO' for model 'm'"),
    (f"model_name='m', {IN.replace('[pb', '2*[pb')}", 3, "input 'IN' already exists in request"),
    ("model_name='m', requested_output_names=['OUT'], inputs=[]", 3, "expected 1 inputs but got 0 inputs"),
    (f"model_name='m', model_version=7, {IN}", 1, "Model 'm' is not ready."),
    (f"model_name='busy', {IN}", 4, "not now"),
    (f"model_name='raises', {IN}", 1, "message: ValueError: of the model"),
    (f"model_name='many', {IN}", 1, "Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
     "decoupled models.'"),
]  # fmt: skip


def others(root: Path) -> None:
    write(root, "m", HEAD + "    def execute(self, requests):\n        return [said('m') for _ in requests]\n" + SAY,
          ANY % "")  # fmt: skip
    error = "pb_utils.InferenceResponse(error=pb_utils.TritonError('not now', pb_utils.TritonError.UNAVAILABLE))"
    write(root, "busy", HEAD + f"    def execute(self, requests):\n        return [{error}]\n", ANY % "")
    write(
        root, "raises", HEAD + "    def execute(self, requests):\n        raise ValueError('of the model')\n", ANY % ""
    )
    write(root, "many", HEAD + "    def execute(self, requests):\n        pass\n", ANY % DECOUPLED)


@pytest.mark.parametrize(("said", "code", "says"), WRONG)
def test_errors_are_responses_with_their_codes(tmp_path: Path, said: str, code: int, says: str) -> None:
    others(tmp_path)
    write(tmp_path, "bls", HEAD + ASK % said + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "m", "busy", "raises", "many")
            (told,) = await one(repository, "bls", text("x"))
        found = json.loads(told)
        assert found[0] == code and says in found[1], found

    asyncio.run(run())


RAISES = [
    ("pb_utils.InferenceRequest(model_name='', inputs=[], requested_output_names=[])", "model_name is missing"),
    ("pb_utils.InferenceRequest(inputs=[], requested_output_names=['OUT'])", "TypeError: InferenceRequest is made with "
     "inputs, requested_output_names, model_name: model_name is missing"),
    ("pb_utils.InferenceRequest(model_name='m', requested_output_names=['OUT'])", ": inputs is missing"),
    ("pb_utils.InferenceRequest(model_name='m', inputs=[])", ": requested_output_names is missing"),
    ("pb_utils.InferenceRequest(model_name='m', inputs=[None], requested_output_names=[])",
     "Input tensor for request with id '' and model name 'm' should not be empty."),
    ("pb_utils.InferenceRequest(model_name='m', inputs=[], requested_output_names=[''])",
     "Requested output name for request with id '' and model name 'm' should not be empty."),
    ("pb_utils.InferenceRequest(model_name='m', inputs=[], requested_output_names=[], parameters={'a': []})",
     "Expect parameters values to have type bool/int/str, found type <class 'list'> for parameter 'a' of a request"),
    ("pb_utils.InferenceRequest(name='m')", "TypeError: got an unexpected keyword argument 'name'"),
    ("pb_utils.InferenceRequest(model_name='m', inputs=[], requested_output_names=[]).get_response_sender()",
     "is answered by the model that it asks"),
    ("pb_utils.load_model('m', config='{')", "the configuration to load a model with is no JSON"),
    ("pb_utils.load_model('m', files={'file:1/model.py': b''})", "override files are given without"),
    ("pb_utils.load_model('m', files={'1/model.py': b''})", "'1/model.py' is no file of a load"),
    ("pb_utils.load_model('none')", "failed to load 'none', failed to poll from model repository"),
    ("pb_utils.is_model_ready('m', '0')", "failed to get model version from specified version string '0'"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "says"), RAISES)
def test_what_is_wrong_in_the_model_itself_is_raised(tmp_path: Path, said: str, says: str) -> None:
    write(tmp_path, "bls", HEAD + f"    def execute(self, requests):\n        {said}\n", ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError) as failed:
                await one(repository, "bls", text("x"))
            assert says in str(failed.value)

    asyncio.run(run())


def test_names_may_be_bytes_as_they_come_out_of_tensors(tmp_path: Path) -> None:
    """Triton's strings are C++'s, and its own example asks the model that an element of BYTES names."""
    code = """
    def execute(self, requests):
        asked = requests[0].inputs()[0].as_numpy()
        asking = pb_utils.InferenceRequest(b"mine", 0, [pb_utils.Tensor(b"IN", asked)], [b"OUT"], asked[0])
        assert (asking.request_id(), asking.requested_output_names()) == ("mine", ["OUT"])
        response = asking.exec()
        if response.has_error():
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(response.error().message().encode()))]
        return [pb_utils.InferenceResponse(response.output_tensors())]
"""
    others(tmp_path)
    for name, more in (("here", ""), ("own", OWN)):
        write(tmp_path, name, HEAD + code, ANY % more)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "m", "here", "own")
            for name in ("here", "own"):
                assert (await one(repository, name, text("m"))).tolist() == [b"m"]
                with pytest.raises(StatusError, match=r"Failed for execute the inference request\. Model 'no' is not"):
                    await one(repository, name, text("no"))

    asyncio.run(run())


def test_bls_is_only_for_execute(tmp_path: Path) -> None:
    ask = "pb_utils.InferenceRequest(model_name='m', inputs=[], requested_output_names=[]).exec()"
    write(tmp_path, "bls", HEAD + f"    def initialize(self, args):\n        {ask}\n", ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError, match=r"BLS is only supported during the 'execute' function\."):
                await repository.load("bls")

    asyncio.run(run())


def test_what_is_handed_on(tmp_path: Path) -> None:
    tell = """
    def execute(self, requests):
        return [said(json.dumps([r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters(),
                                 r.requested_output_names()])) for r in requests]
"""
    ask = """
    def execute(self, requests):
        (request,) = requests
        asking = pb_utils.InferenceRequest("mine", 7, [pb_utils.Tensor("IN", np.array([b"x"], dtype=object))], ["OUT"],
            "m", -1, 3, 5000000, pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0), request.trace(),
            {"a": 1, "b": "x", "c": True, "d": 0.5})
        (tensor,) = asking.exec().output_tensors()
        assert asking.timeout() == 5000000 and asking.request_id() == "mine" and not asking.is_cancelled()
        return [pb_utils.InferenceResponse([tensor], parameters=asking.parameters())]
"""
    write(tmp_path, "m", HEAD + tell + SAY, ANY % "")
    write(tmp_path, "bls", HEAD + ask + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "m", "bls")
            model, inner = repository.get("bls"), repository.get("m")
            seen: list[InferRequest] = []
            submit = inner.submit

            def watched(request: InferRequest, receive: Any) -> None:
                seen.append(request)
                submit(request, receive)

            inner.submit = watched  # type: ignore[method-assign]
            outer = asked(model, IN=text("x"))
            outer.priority = 2
            found = await model.infer(outer)
        parameters = {"a": 1, "b": "x", "c": True, "d": 0.5}
        told = json.loads(found.outputs["OUT"][0])
        assert told == ["mine", 7, 3, 5000000, json.dumps(parameters), ["OUT"]]
        assert dict(found.parameters) == parameters and [r.priority for r in seen] == [2]

    asyncio.run(run())


def test_an_array_that_a_model_uses_again_is_no_input_of_another(tmp_path: Path) -> None:
    code = """
    async def execute(self, requests):
        array, waiting = np.zeros(1, np.int32), []
        for i in range(20):
            array[:] = i
            waiting.append(pb_utils.InferenceRequest(model_name="same", requested_output_names=["OUT"],
                                                     inputs=[pb_utils.Tensor("IN", array)]).async_exec())
        found = await asyncio.gather(*waiting)
        total = [int(r.output_tensors()[0].as_numpy()[0]) for r in found]
        assert total == list(range(20)), total
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
"""
    config_only(tmp_path, "same", SQUARE_CONFIG.replace("python", "identity") % "")
    write(tmp_path, "bls", HEAD + code, SQUARE_CONFIG % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "same", "bls")
            model = repository.get("bls")
            assert (await model.infer(asked(model, IN=np.zeros(1, np.int32)))).outputs["OUT"].tolist() == [19]

    asyncio.run(run())


WAITS = """
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        import time
        while not request.is_cancelled():
            time.sleep(0.005)
        with open(%r, "a") as mark:
            mark.write("cancelled ")
        sender.send(said("late"), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ONE = "        return [said(json.dumps([response.error().code(), response.error().message()]))]\n"
STREAM = """
    def execute(self, requests):
        responses = pb_utils.InferenceRequest(model_name="m", requested_output_names=["OUT"],
            inputs=[requests[0].inputs()[0]]).exec(decoupled=True)
        responses.cancel()
        (response,) = list(responses)
"""


def test_cancelling_the_outer_request_cancels_the_inner(tmp_path: Path) -> None:
    mark, root = tmp_path / "mark", tmp_path / "models"
    write(root, "m", HEAD + WAITS % str(mark) + SAY, ANY % "")
    write(root, "bls", HEAD + ASK % f"model_name='m', {IN}" + SAY, ANY % "")

    async def run() -> None:
        async with loaded(root) as repository:
            await load(repository, "m", "bls")
            model = repository.get("bls")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(model.infer(asked(model, IN=text("x"))), 0.1)
            async with asyncio.timeout(5):
                while not mark.exists() or model._n_open:  # it goes on once its own was cut off
                    await asyncio.sleep(0.01)

    asyncio.run(run())
    assert mark.read_text() == "cancelled "


def test_a_model_cancels_what_it_asked(tmp_path: Path) -> None:
    mark, root = tmp_path / "mark", tmp_path / "models"
    write(root, "m", HEAD + WAITS % str(mark) + SAY, ANY % DECOUPLED)
    write(root, "bls", HEAD + STREAM + ONE + SAY, ANY % "")

    async def run() -> None:
        async with loaded(root) as repository:
            await load(repository, "m", "bls")
            (told,) = await one(repository, "bls", text("x"))
            code, message = json.loads(told)
            assert code == 7 and "request was cancelled" in message
            await asyncio.wait_for(repository.get("m").retire(), 5)

    asyncio.run(run())
    assert mark.read_text() == "cancelled "


def test_async_decoupled_models_have_many_requests_at_a_time(tmp_path: Path) -> None:
    code = """
    def initialize(self, args):
        self.n = 0

    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            self.n += 1
            while self.n < 3:  # none goes on before three have come
                await asyncio.sleep(0.001)
            response = await pb_utils.InferenceRequest(model_name="m", inputs=request.inputs(),
                                                       requested_output_names=["OUT"]).async_exec()
            if request.inputs()[0].as_numpy()[0] == b"raise":
                raise ValueError("mine")
            sender.send(pb_utils.InferenceResponse(response.output_tensors()))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    others(tmp_path)
    write(tmp_path, "bls", HEAD + code, ANY % DECOUPLED)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "m", "bls")
            model = repository.get("bls")
            ends: asyncio.Queue[str] = asyncio.Queue()

            def receive(response: Any, error: StatusError | None, final: bool) -> None:
                if response is not None:
                    ends.put_nowait(response.outputs["OUT"][0].decode())
                elif error is not None:
                    ends.put_nowait(str(error))

            for word in ("a", "b", "raise"):
                model.submit(asked(model, IN=text(word)), receive)
            found = sorted([await asyncio.wait_for(ends.get(), 5) for _ in range(3)])
            assert found[1:] == ["m", "m"] and found[0].startswith("ValueError: mine; at model.py(")

    asyncio.run(run())
