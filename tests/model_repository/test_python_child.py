"""Models in processes of their own: what works in this process works there."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.request.infer_request import InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.prometheus import metrics_text
from tests.support.python_children import load, until
from tests.support.python_models import ANY, HEAD, OWN, SAY, asked, loaded, one, text, write
from tests.support.triton_models import (
    ADD_SUB_CONFIG,
    BLS_ASYNC,
    BLS_CONFIG,
    BLS_DECOUPLED_ASYNC,
    BLS_DECOUPLED_SYNC,
    BLS_SYNC,
    CUSTOM_METRICS,
    DECOUPLED,
    GENERATES,
    ITERATIVE,
    RESCHEDULED,
    SQUARE,
    SQUARE_CONFIG,
)

A, B = np.array([1, 2, 3, 4], np.float32), np.array([4, 3, 2, 1], np.float32)


def test_tritons_examples_run_as_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "add_sub" / "1").mkdir(parents=True)
    (tmp_path / "add_sub" / "config.pbtxt").write_text(ADD_SUB_CONFIG % 'backend: "add_sub"')
    write(tmp_path, "sync", BLS_SYNC, BLS_CONFIG % OWN)
    write(tmp_path, "async", BLS_ASYNC, BLS_CONFIG % OWN)
    write(tmp_path, "square_int32", SQUARE, SQUARE_CONFIG % (DECOUPLED + OWN))
    write(tmp_path, "sum", BLS_DECOUPLED_SYNC, SQUARE_CONFIG % OWN)
    write(tmp_path, "sums", BLS_DECOUPLED_ASYNC, SQUARE_CONFIG % OWN)
    write(tmp_path, "again", RESCHEDULED, SQUARE_CONFIG % (OWN + ITERATIVE % ""))
    write(tmp_path, "counts", CUSTOM_METRICS, SQUARE_CONFIG % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "add_sub", "sync", "async", "square_int32", "sum", "sums", "again", "counts")
            for name in ("sync", "async"):
                model = repository.get(name)
                found = await model.infer(asked(model, MODEL_NAME=text("add_sub"), INPUT0=A, INPUT1=B))
                assert {n: a.tolist() for n, a in found.outputs.items()} == {
                    "OUTPUT0": (A + B).tolist(), "OUTPUT1": (A - B).tolist(),
                }  # fmt: skip
                with pytest.raises(StatusError, match="Model 'x' is not ready"):
                    await model.infer(asked(model, MODEL_NAME=text("x"), INPUT0=A, INPUT1=B))
            for name, n, expected in (("sum", 7, 49), ("sums", 7, 98), ("sum", 0, 0), ("again", 3, 4010)):
                model = repository.get(name)
                found = await model.infer(asked(model, IN=np.array([n], np.int32)))
                assert found.outputs["OUT"].tolist() == [expected]
            model = repository.get("counts")
            await model.infer(asked(model, IN=np.array([1], np.int32)))
            assert 'sizes_bucket{le="2"} 1\n' in metrics_text(repository.custom.collect())
            await repository.unload("counts")
            await model.retire()
            assert metrics_text(repository.custom.collect()) == ""

    asyncio.run(run())


def test_what_a_model_says_reaches_the_log_and_its_errors_are_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = HEAD + """
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]})
        return config

    def initialize(self, args):
        print("a line", args["model_name"])
        pb_utils.Logger.log_warn("a warning")

    def execute(self, requests):
        import os, sys
        word = requests[0].inputs()[0].as_numpy()[0].decode()
        if word == "raise":
            raise ValueError("mine")
        if word == "code":
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND))]
        told = [os.getpid(), sorted(m for m in sys.modules if m.startswith("millrace."))]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps(told), "\\u00fc"], object))],
                                           parameters={"a": 1})]

    def finalize(self):
        print("the end")
"""  # fmt: skip
    config = 'backend: "python" input { name: "IN" data_type: TYPE_STRING dims: [ -1 ] }' + OWN
    write(tmp_path, "m", code, config)
    caplog.set_level(logging.INFO, "millrace.serve.models")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            found = await model.infer(asked(model, IN=text("x")))
            told, umlaut = found.outputs["OUT"].tolist()
            pid, modules = json.loads(told)
            assert pid != os.getpid() and modules == [] and umlaut.decode() == "ü", "it imports nothing of ours"
            assert dict(found.parameters) == {"a": 1}
            for word, code, says in (
                ("raise", Code.INTERNAL, "for model instance 'm_0', message: ValueError: mine; at model.py("),
                ("code", Code.NOT_FOUND, "no"),
            ):
                with pytest.raises(StatusError) as failed:
                    await model.infer(asked(model, IN=text(word)))
                assert failed.value.code is code and says in str(failed.value)
            await repository.unload("m")
            await model.retire()
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(run())
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "millrace.serve.models"]
    assert sorted(said, key=lambda s: ["m_0: a line m", "a warning", "m_0: the end"].index(s[1])) == [
        ("INFO", "m_0: a line m"),
        ("WARNING", "a warning"),
        ("INFO", "m_0: the end"),
    ]


def test_cancellation_reaches_the_process(tmp_path: Path) -> None:
    code = HEAD + """
    def execute(self, requests):
        import time
        for request in requests:
            while not request.is_cancelled():
                time.sleep(0.005)
        return [said("cancelled") for request in requests]
""" + SAY  # fmt: skip
    write(tmp_path, "m", code, ANY % OWN)
    ask = """
    async def execute(self, requests):
        asking = pb_utils.InferenceRequest(model_name="m", requested_output_names=["OUT"], inputs=requests[0].inputs())
        response = await asking.async_exec()
        return [said(str(response.error().code()))]
"""
    write(tmp_path, "bls", HEAD + ask + SAY, ANY % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "m", "bls")
            for name in ("m", "bls"):
                model = repository.get(name)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(model.infer(asked(model, IN=text("x"))), 0.2)
                await until(lambda model=model: not model._n_open)  # type: ignore[misc]
            await until(lambda: not repository.get("m")._n_open)

    asyncio.run(run())


@pytest.mark.usefixtures("short_bls_timeout")
def test_models_that_wait_for_each_other_between_processes_time_out(tmp_path: Path) -> None:
    ask = """
    def execute(self, requests):
        asking = pb_utils.InferenceRequest(model_name="%s", requested_output_names=["OUT"], inputs=requests[0].inputs())
        response = asking.exec()
        return [said(response.error().message() if response.has_error() else
                     response.output_tensors()[0].as_numpy()[0].decode())]
"""
    write(tmp_path, "a", HEAD + ask % "b" + SAY, ANY % OWN)
    write(tmp_path, "b", HEAD + ask % "a" + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "a", "b")
            (told,) = await asyncio.wait_for(one(repository, "a", text("x")), 10)
            assert b"model 'b' gave no response for" in told and b"(a -> b)" in told

    asyncio.run(run())


def test_streams_come_from_threads_of_the_process(tmp_path: Path) -> None:
    write(tmp_path, "m", GENERATES, SQUARE_CONFIG % (DECOUPLED + OWN + ITERATIVE % ""))

    async def run() -> list[Any]:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model, found, done = repository.get("m"), list[Any](), asyncio.Event()

            def receive(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
                found.append(response.outputs["OUT"].tolist()[0] if response else error)
                if final:
                    done.set()

            model.submit(asked(model, IN=np.array([4], np.int32)), receive)
            await asyncio.wait_for(done.wait(), 10)
            return found

    assert asyncio.run(run()) == [1, 2, 3, 4]
