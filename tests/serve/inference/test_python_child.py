"""Models in processes of their own: what works in this one works there, and what dies there is lost there alone."""

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.serve.inference import instances
from millrace.serve.inference.backend_model import BackendModel
from millrace.serve.inference.backends.python_child import ChildModel
from millrace.serve.inference.check import Given
from millrace.serve.inference.lifecycle import ModelRepository
from millrace.serve.inference.request import InferRequest, InferResponse
from millrace.serve.inference.status import Code, StatusError
from millrace.serve.inference.tensors import Array, objects
from millrace.serve.repository.config_json import config_json
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


def child_of(repository: ModelRepository, name: str) -> ChildModel:
    model = repository.get(name)
    assert isinstance(model, BackendModel)
    instance = model._workers[0]._instance
    assert isinstance(instance, ChildModel)
    return instance


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.005)


async def load(repository: ModelRepository, *names: str) -> None:
    await asyncio.gather(*(repository.load(name) for name in names))


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
            assert 'sizes_bucket{le="2"} 1\n' in repository.custom.text()
            await repository.unload("counts")
            await model.retire()
            assert repository.custom.text() == ""

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


SAME = """
    def execute(self, requests):
        self.kept = [r.inputs()[0].as_numpy() for r in requests]
        for array in self.kept:
            array += 1  # in place: its memory is its own
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in self.kept]
"""
FLOATS = """backend: "python" max_batch_size: 64 dynamic_batching { } %s
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def test_tensors_of_every_size_and_type_go_there_and_back(tmp_path: Path) -> None:
    kinds = [np.bool_, np.uint8, np.uint64, np.int16, np.float16, np.float64]
    echo = "    def execute(self, requests):\n        return [pb_utils.InferenceResponse(" + (
        "[pb_utils.Tensor('O' + t.name()[1:], t.as_numpy()) for t in r.inputs()]) for r in requests]\n"
    )
    names = ["BOOL", "UINT8", "UINT64", "INT16", "FP16", "FP64"]
    tensors = "".join(
        f'{side} {{ name: "{letter}{i}" data_type: TYPE_{name} dims: [ -1 ] }} '
        for side, letter in (("input", "I"), ("output", "O"))
        for i, name in enumerate(names)
    )
    write(tmp_path, "kinds", HEAD + echo, f'backend: "python" {tensors} {OWN}')
    write(tmp_path, "same", HEAD + SAME, FLOATS % OWN)
    write(tmp_path, "words", HEAD + echo.replace("'O' + t.name()[1:]", "'OUT'"), ANY % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "kinds", "same", "words")
            model = repository.get("same")
            for n in (0, 1, 4095, 4096, 4097, 300_000, 5_000_000):
                sent = np.arange(n, dtype=np.float32)[None]
                sent.flags.writeable = False
                found = await model.infer(asked(model, IN=sent))
                assert np.array_equal(found.outputs["OUT"], sent + 1), n
            several = [np.full((1, 20_000), i, np.float32) for i in range(30)]
            answers = await asyncio.gather(*(model.infer(asked(model, IN=array)) for array in several))
            assert all((a.outputs["OUT"] == i + 1).all() for i, a in enumerate(answers))
            model = repository.get("kinds")
            rng = np.random.default_rng(1)
            arrays: list[Array] = [rng.integers(0, 2, 50_000).astype(kind) for kind in kinds]
            request = InferRequest({})
            given = [Given(f"I{i}", n, a.shape, a) for i, (n, a) in enumerate(zip(names, arrays, strict=True))]
            model.checker.take(request, given)
            outputs = (await model.infer(request)).outputs
            for i, array in enumerate(arrays):
                assert outputs[f"O{i}"].dtype == array.dtype and np.array_equal(outputs[f"O{i}"], array)
            words = [b"", b"x" * 70_000, "ü".encode(), bytes(range(256))]
            assert (await one(repository, "words", objects(words))).tolist() == words

    asyncio.run(run())


def test_memory_comes_back_when_answers_are_let_go(tmp_path: Path) -> None:
    write(tmp_path, "same", HEAD + SAME.replace("self.kept", "kept"), FLOATS % OWN)
    write(tmp_path, "raises", HEAD + "    def execute(self, requests):\n        raise ValueError\n", FLOATS % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await load(repository, "same", "raises")
            for _ in range(20):
                with pytest.raises(StatusError):
                    await repository.get("raises").infer(
                        asked(repository.get("raises"), IN=np.zeros((1, 262_144), np.float32))
                    )
            assert child_of(repository, "raises")._child.frames.arena.used_bytes <= 4 << 20, "of 20 MiB"
            model, child = repository.get("same"), child_of(repository, "same")
            held = []
            for i in range(60):
                found = await model.infer(asked(model, IN=np.full((1, 262_144), i, np.float32)))
                if i % 20 == 0:
                    held.append(found.outputs["OUT"])
            assert child._child.frames.arena.used_bytes <= 4 << 20, "of 60 MiB"
            assert [array[0, 0] for array in held] == [1, 21, 41], "what is held stays what it was"
            n_segments = len(child._child.frames._mapped._segments)
            assert n_segments <= 2, f"{n_segments} segments of 16 MiB for 3 MiB that are held"
            maps = Path(f"/proc/{child._child.pid}/maps").read_text()
            assert "memfd:millrace" in maps and "/dev/shm" not in maps, "no memory of its has a name"

    asyncio.run(run())
    gc.collect()
    assert "memfd:millrace" not in Path("/proc/self/maps").read_text(), "nothing is left"


SLEEPS = """
    def execute(self, requests):
        import os, signal, time
        word = requests[0].inputs()[0].as_numpy()[0].decode()
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return [said(str(os.getpid())) for request in requests]
"""


def test_kill_9_under_load_loses_only_the_running_batch(tmp_path: Path) -> None:
    write(tmp_path, "m", HEAD + SLEEPS + SAY, ANY % (OWN + "instance_group { kind: KIND_CPU count: 2 }"))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            waiting = [asyncio.ensure_future(model.infer(asked(model, IN=text("x")))) for _ in range(60)]
            await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            pid = child_of(repository, "m")._child.pid
            os.kill(pid, signal.SIGKILL)
            found = await asyncio.gather(*waiting, return_exceptions=True)
            errors = [str(e) for e in found if isinstance(e, BaseException)]
            assert len(errors) <= 1, "one request is one batch here"
            assert all("Stub process 'm_0_0' is not healthy: its process was ended by SIGKILL" in e for e in errors)
            assert len({a.outputs["OUT"][0] for a in found if isinstance(a, InferResponse)}) >= 2
            await until(repository.is_ready)
            assert child_of(repository, "m")._child.pid != pid

    asyncio.run(run())


def test_what_dies_is_made_anew_and_given_up_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "RESTARTS_S", (0.02, 0.3))
    write(tmp_path, "m", HEAD + SLEEPS + SAY, ANY % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")

            async def ask(word: str) -> str:
                try:
                    found = await asyncio.wait_for(model.infer(asked(model, IN=text(word))), 10)
                except StatusError as error:
                    return f"{error.code.name}: {error}"
                return str(found.outputs["OUT"][0].decode())

            assert repository.is_ready() and model.is_ready
            dies, waits = await asyncio.gather(ask("die"), ask("x"))
            assert dies.startswith("INTERNAL") and "'m_0' is not healthy: its process was ended by SIGKILL" in dies
            assert waits.isdigit(), "what waited is answered by the next process"
            assert (await ask("die")).startswith("INTERNAL")
            began_s = time.monotonic()
            assert not repository.is_ready() and not model.is_ready and model.troubles == "m_0 is being made anew"
            assert (await ask("die")).startswith("INTERNAL"), "the first in a row"
            assert (await ask("die")).startswith("INTERNAL") and time.monotonic() - began_s > 0.3, "with a longer pause"
            await until(lambda: "again and again" in model.troubles)
            assert (await ask("x")).startswith("UNAVAILABLE: [request id: r] all instances of model 'm' ended")
            assert not repository.is_ready() and not model.is_ready
            (told,) = await repository.index(False)
            assert told["state"] == "UNAVAILABLE" and "SIGKILL" in told["reason"]
            await repository.load("m")
            model = repository.get("m")
            assert repository.is_ready() and (await ask("x")).isdigit(), "loading it anew helps"

    asyncio.run(run())


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


def test_rings_between_processes_are_named(tmp_path: Path) -> None:
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
            assert b"deadlock: model 'b' asks model 'a'" in told and b"(b -> a -> b)" in told

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


def environment(key: str, value: str) -> str:
    return f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


FAILS = [
    (environment("MILLRACE_PROCESS", "mine"), "MILLRACE_PROCESS of model 'm' is 'mine': expected own or server"),
    (environment("EXECUTION_ENV_PATH", "env"), "'env', is a relative path: begin it with / or $$TRITON_MODEL_"),
    (environment("EXECUTION_ENV_PATH", "/none"), "is neither an environment's folder nor an interpreter"),
    (environment("EXECUTION_ENV_PATH", "/etc"), "is a folder without bin/python"),
    (environment("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/../bin"), "has .. in it: name the folder itself"),
    (environment("EXECUTION_ENV_PATH", "/env.tar.gz"), "is an archive: unpack it, and name its folder"),
    (environment("EXECUTION_ENV_PATH", sys.executable) + environment("MILLRACE_PROCESS", "server"), "leave out one"),
    (environment("EXECUTION_ENV_PATH", "/bin/false"), "its process ended with code 1"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "says"), FAILS)
def test_interpreters_that_run_no_model(tmp_path: Path, more: str, says: str) -> None:
    write(tmp_path, "m", HEAD + SLEEPS + SAY, ANY % more)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError) as failed:
                await repository.load("m")
            assert says in str(failed.value)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ImportError('not here')", "ImportError: not here; at model.py(1): <module>"),
        ("import os; print('last words'); os._exit(3)", "its process ended with code 3: last words"),
        (HEAD + "    def initialize(self, args):\n        raise pb_utils.TritonModelException('no disk')\n",
         "TritonModelException: no disk; at model.py(9): initialize"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_loaded_there(tmp_path: Path, code: str, says: str) -> None:
    write(tmp_path, "m", code, ANY % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError) as failed:
                await repository.load("m")
            assert says in str(failed.value)

    asyncio.run(run())


def test_an_environment_is_a_folder_beside_the_model(tmp_path: Path) -> None:
    tell = "    def execute(self, requests):\n        import os\n        return [said(os.environ['MARK'])]\n"
    write(tmp_path, "m", HEAD + tell + SAY, ANY % environment("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/env"))
    (tmp_path / "m" / "env" / "bin").mkdir(parents=True)
    python = tmp_path / "m" / "env" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nMARK=mine exec {sys.executable} "$@"\n')
    python.chmod(0o755)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            assert (await one(repository, "m", text("x"))).tolist() == [b"mine"]

    asyncio.run(run())


def test_an_interpreter_needs_numpy_and_nothing_else(tmp_path: Path) -> None:
    """One that finds NumPy alone, which it takes from a folder of its own: no package of ours, and no ml_dtypes."""
    site = tmp_path / "site"
    site.mkdir()
    for package in ("numpy", "numpy.libs"):
        (site / package).symlink_to(Path(np.__file__).parents[1] / package)
    python = tmp_path / "python"
    (site / "start.py").write_text(
        f"import runpy, sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(site)!r}]\n"
        "sys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -I -S -u {site}/start.py "$@"\n')
    python.chmod(0o755)
    tell = "    def execute(self, requests):\n        import sys\n" + (
        "        names = {m.partition('.')[0] for m in sys.modules} & {'millrace', 'ml_dtypes', 'msgspec', 'numpy'}\n"
        "        return [said(' '.join(sorted(names))) for _ in requests]\n"
    )
    models = tmp_path / "models"
    write(models, "m", HEAD + tell + SAY, ANY % environment("EXECUTION_ENV_PATH", str(python)))
    write(
        models,
        "half",
        HEAD + tell + SAY,
        (ANY % environment("EXECUTION_ENV_PATH", str(python))).replace("STRING", "BF16"),
    )

    async def run() -> None:
        async with loaded(models) as repository:
            assert (await one(repository, "m", text("x"))).tolist() == [b"numpy"]
            with pytest.raises(StatusError, match="model 'half' has tensors of BF16: install ml_dtypes where it runs"):
                await repository.load("half")

    asyncio.run(run())


def test_a_client_that_loads_a_model_chooses_no_interpreter(tmp_path: Path) -> None:
    tell = "    def execute(self, requests):\n        return [said('fine')]\n"
    write(tmp_path, "m", HEAD + tell + SAY, ANY % environment("EXECUTION_ENV_PATH", sys.executable))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            config = config_json(repository.get("m").config)
            await repository.load("m", config=config)
            config["parameters"]["EXECUTION_ENV_PATH"]["string_value"] = "/bin/sh"
            with pytest.raises(StatusError, match="is another one than its"):
                await repository.load("m", config=config)
            model = repository.get("m")
            assert (await model.infer(asked(model, IN=text("x")))).outputs["OUT"].tolist() == [b"fine"]

    asyncio.run(run())


def test_a_tensor_is_copied_once_each_way(tmp_path: Path) -> None:
    """What the model is given, and what the server is answered, is the shared memory itself."""
    code = HEAD + """
    def execute(self, requests):
        given = requests[0].inputs()[0].as_numpy()
        at, lines = given.__array_interface__["data"][0], open("/proc/self/maps").read().splitlines()
        ranges = [[int(n, 16) for n in line.split()[0].split("-")] for line in lines if "memfd:millrace" in line]
        assert any(first <= at < last for first, last in ranges), "a copy"
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)])]
"""  # fmt: skip
    write(tmp_path, "m", code, FLOATS % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            array = np.arange(262_144, dtype=np.float32)[None]
            found = (await model.infer(asked(model, IN=array))).outputs["OUT"]
            (segment,) = child_of(repository, "m")._child.frames._mapped._segments.values()
            assert np.array_equal(found, array) and np.shares_memory(found, np.frombuffer(segment, np.uint8))

    asyncio.run(run())


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    code = HEAD + """
    def execute(self, requests):
        import os, signal, subprocess, sys
        if requests[0].inputs()[0].as_numpy()[0] == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        return [said(str(subprocess.Popen(["sleep", "100"]).pid))]
""" + SAY  # fmt: skip
    write(tmp_path, "m", code, ANY % OWN)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            (pid,) = await one(repository, "m", text("x"))
            model, began_s = repository.get("m"), time.monotonic()
            with pytest.raises(StatusError, match="SIGKILL"):
                await model.infer(asked(model, IN=text("die")))
            assert time.monotonic() - began_s < 3, "nobody waits for what holds its output open"
            await until(lambda: not Path(f"/proc/{int(pid)}").exists() or "Z" in state(int(pid)))

    asyncio.run(run())


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_ends_with_the_server(tmp_path: Path) -> None:
    """However that ends, and whatever the process computes."""
    code = HEAD + "    def execute(self, requests):\n        import time\n        time.sleep(100)\n"
    write(tmp_path, "m", code, ANY % OWN)
    script = f"""
import asyncio, os
from pathlib import Path
from tests.support.python_models import asked, loaded, text
async def run():
    async with loaded(Path({str(tmp_path)!r})) as repository:
        await repository.load("m")
        model = repository.get("m")
        print(model._workers[0]._instance._child.pid, flush=True)
        model.submit(asked(model, IN=text("x")), print)
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), 9)
asyncio.run(run())
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, until_s = int(done.stdout), time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and state(pid) != "Z":
        assert time.monotonic() < until_s, "it goes on alone"
        time.sleep(0.01)
