"""Processes of models that end: what is lost with them, what is made anew, and that nothing stays behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.model_repository.execution import instance_worker
from millrace.model_repository.request.infer_request import InferResponse
from millrace.model_repository.request.status_code import StatusError
from tests.support.python_children import SLEEPS, child_of, until
from tests.support.python_models import ANY, HEAD, OWN, SAY, asked, loaded, one, text, write

WAITS = """
    def execute(self, requests):
        import os, time
        words = [request.inputs()[0].as_numpy()[0, 0].decode() for request in requests]
        begun = f"{folder}/{os.getpid()}"
        with open(begun + ".part", "w") as file:
            file.write(" ".join(words))
        os.rename(begun + ".part", begun)
        while not os.path.exists("{folder}/go"):
            time.sleep(0.002)
        arrays = [np.array([[word]], dtype=object) for word in words]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
"""


def test_kill_9_under_load_loses_only_the_running_batch(tmp_path: Path) -> None:
    """Both instances compute a batch, and compute until they are let go: one of them is killed in it for certain."""
    folder, config = tmp_path / "begun", "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 100000 }"
    folder.mkdir()
    code = WAITS.replace("{folder}", str(folder))
    more = OWN + config + " instance_group { kind: KIND_CPU count: 2 }"
    write(tmp_path / "models", "m", HEAD + code, ANY % more)

    async def run() -> None:
        async with loaded(tmp_path / "models") as repository:
            await repository.load("m")
            model, words = repository.get("m"), [str(i) for i in range(60)]
            asking = [asyncio.ensure_future(model.infer(asked(model, IN=text(word).reshape(1, 1)))) for word in words]
            pid = child_of(repository, "m")._process.pid
            await until(lambda: len([file for file in folder.iterdir() if file.name.isdigit()]) == 2)
            lost = set((folder / str(pid)).read_text().split())
            assert len(lost) == 4, "a whole batch"
            os.kill(pid, signal.SIGKILL)
            (folder / "go").touch()
            found = dict(zip(words, await asyncio.gather(*asking, return_exceptions=True), strict=True))
            failed = {word: str(one) for word, one in found.items() if not isinstance(one, InferResponse)}
            assert failed.keys() == lost, "each of its batch, and nobody else"
            what = "Stub process 'm_0_0' is not healthy: its process was ended by SIGKILL"
            assert all(what in error for error in failed.values()), failed
            answers = {w: one.outputs["OUT"].tolist() for w, one in found.items() if isinstance(one, InferResponse)}
            assert answers == {word: [[word.encode()]] for word in words if word not in lost}
            await until(repository.is_ready)
            assert child_of(repository, "m")._process.pid != pid

    asyncio.run(run())


def test_what_dies_is_made_anew_and_given_up_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_worker, "RESTARTS_S", (0.02, 0.3))
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
            assert not repository.is_ready() and not model.is_ready and model.unready_reason == "m_0 is being restarted"
            assert (await ask("die")).startswith("INTERNAL"), "the first in a row"
            assert (await ask("die")).startswith("INTERNAL") and time.monotonic() - began_s > 0.3, "with a longer pause"
            await until(lambda: "again and again" in model.unready_reason)
            assert (await ask("x")).startswith("UNAVAILABLE: [request id: r] all instances of model 'm' ended")
            assert not repository.is_ready() and not model.is_ready
            (told,) = await repository.index(False)
            assert told["state"] == "UNAVAILABLE" and "SIGKILL" in told["reason"]
            await repository.load("m")
            model = repository.get("m")
            assert repository.is_ready() and (await ask("x")).isdigit(), "loading it anew helps"

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
        print(model._workers[0]._instance._process.pid, flush=True)
        model.submit(asked(model, IN=text("x")), print)
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), 9)
asyncio.run(run())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, until_s = int(done.stdout), time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and state(pid) != "Z":
        assert time.monotonic() < until_s, "it goes on alone"
        time.sleep(0.01)
