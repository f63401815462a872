"""What a model.py says of itself by `is_ready`: seen by every route that tells of readiness."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from millrace.model_repository.execution import readiness_probe
from tests.serve.support import until
from tests.support.kserve_grpc import connected
from tests.support.python_models import ANY, HEAD, OWN, SAY, loaded, write
from tests.support.repository import in_process
from tests.support.server import Threaded

EXECUTE = """
    def execute(self, requests):
        return [said("x") for _ in requests]
"""
PLAIN = """
    def initialize(self, args):
        self.flag = args["model_repository"] + "/ready"

    def is_ready(self):
        import os
        return os.path.exists(self.flag)
"""
ASYNC = PLAIN.replace(
    "    def is_ready(self):\n", "    async def is_model_ready(self):\n        await asyncio.sleep(0.01)\n"
)
NO_BOOL = PLAIN.replace("def is_ready", "def is_model_ready").replace("exists(self.flag)", "exists(self.flag) or 'no'")
RAISES = PLAIN.replace("return os.path.exists(self.flag)", "return os.stat(self.flag).st_size >= 0")
HANGS = PLAIN.replace(
    "return os.path.exists(self.flag)", "import time\n        time.sleep(0 if os.path.exists(self.flag) else 0.6)"
    "\n        return True"
)  # fmt: skip
MISSING = "FileNotFoundError: [Errno 2] No such file or directory"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness_probe, "INTERVAL_S", 0.02)
    monkeypatch.setattr(readiness_probe, "READINESS_TIMEOUT_S", 0.3)


def statuses(served: Threaded) -> list[int]:
    paths = ("models/m/ready", "models/pipe/ready", "health/ready", "health/live")
    return [httpx.get(f"{served.url}/v2/{path}").status_code for path in paths]


def why(served: Threaded) -> str:
    told = httpx.post(f"{served.url}/v2/repository/index", json={}).json()
    return "".join(str(one.get("reason", "")) for one in told if one["name"] == "m")


@pytest.mark.parametrize("own", ["", OWN], ids=["here", "own"])
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (PLAIN, "m_0: it says that it is not ready"), (ASYNC, "it says that it is not ready"),
        (RAISES, "m_0: its is_ready failed: "), (HANGS, "its is_ready takes more than 0.3 s"),
        (NO_BOOL, "is_model_ready returned str, where a bool is expected"),
    ],
    ids=["plain", "async", "raises", "hangs", "no bool"],
)  # fmt: skip
def test_what_a_model_says_is_told_everywhere(tmp_path: Path, code: str, says: str, own: str) -> None:
    write(tmp_path, "m", HEAD + code + EXECUTE + SAY, ANY % own)
    step = 'step { model_name: "m" input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }'
    write(
        tmp_path,
        "pipe",
        "",
        (ANY % f"ensemble_scheduling {{ {step} }}").replace('backend: "python"', 'platform: "ensemble"'),
    )
    with in_process(tmp_path, grpc_port=0) as served:
        until(lambda: statuses(served) == [400, 400, 400, 200])
        assert says in why(served), why(served)
        assert (MISSING in why(served)) == (code is RAISES)
        with connected(served.grpc_url) as client:
            assert not client.call("ModelReady", name="m").ready and not client.call("ServerReady").ready
        asked = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
        assert httpx.post(f"{served.url}/v2/models/m/infer", json=asked).status_code == 200, "it is asked all the same"
        (tmp_path / "m" / "ready").touch()
        until(lambda: statuses(served) == [200, 200, 200, 200])
        assert why(served) == ""


def test_who_waited_for_a_load_knows_what_the_model_says(tmp_path: Path) -> None:
    write(tmp_path, "m", HEAD + PLAIN + EXECUTE + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            assert not repository.get("m").is_ready, "before anybody asks again"

    asyncio.run(run())


def test_one_of_two_instances_is_enough_for_a_model_and_not_for_the_server(tmp_path: Path) -> None:
    code = PLAIN.replace(
        'args["model_repository"] + "/ready"', '"/" if args["model_instance_name"] == "m_0_0" else "?"'
    )
    write(tmp_path, "m", HEAD + code + EXECUTE + SAY, ANY % "instance_group { kind: KIND_CPU count: 2 }")
    with in_process(tmp_path) as served:
        until(lambda: bool(why(served)))
        assert why(served) == "m_0_1: it says that it is not ready"
        paths = ("models/m/ready", "health/ready")
        assert [httpx.get(f"{served.url}/v2/{path}").status_code for path in paths] == [200, 400]


def test_whoever_stops_is_told_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    told, answers = list[str](), iter([True, False, False, True, False])
    watch = readiness_probe.ReadinessProbe("m", lambda: next(answers, True), told.append)
    until(lambda: len(told) == 4)
    watch.stop()
    time.sleep(0.1)
    says_no = "it says that it is not ready"
    assert told == [says_no, "", says_no, ""], "only what changes is told"
