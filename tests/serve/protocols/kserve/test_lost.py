"""A model whose process dies, as clients see it: readiness, the index, errors."""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from millrace.model_repository.execution import instance_worker
from tests.serve.support import until
from tests.support.python_models import ANY, HEAD, OWN, SAY, write
from tests.support.repository import serving

CODE = """
    def execute(self, requests):
        import os
        return [said(str(os.getpid())) for _ in requests]
"""


def ask(url: str, body: object = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=20) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_readiness_tells_of_a_process_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_worker, "RESTARTS_S", (0.3, 0.01))
    write(tmp_path, "m", HEAD + CODE + SAY, ANY % OWN)
    before = frozenset(_models_processes())
    with serving(tmp_path) as url:
        of_model, infer = f"{url}/v2/models/m/ready", f"{url}/v2/models/m/infer"
        question = {"inputs": [{"name": "IN", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}

        def pid() -> int:
            status, told = ask(infer, question)
            assert status == 200, told
            return int(json.loads(told)["outputs"][0]["data"][0])

        def ready() -> tuple[int, int]:
            """Of the server, and of the model. NIM's route says what KServe's does, with its own status."""
            server = ask(f"{url}/v2/health/ready")[0]
            told = {200: 200, 503: 400}[ask(f"{url}/v1/health/ready")[0]]
            return server if told == server else 0, ask(of_model)[0]

        assert ready() == (200, 200)
        os.kill(pid(), signal.SIGKILL)
        until(lambda: ready() == (400, 400))
        assert ask(of_model)[1] == b'{"error":"Model version not ready"}'
        (told,) = json.loads(ask(f"{url}/v2/repository/index", {})[1])
        assert (told["state"], told["reason"]) == ("UNAVAILABLE", "m_0 is being restarted")
        assert b"tensor models are not ready: model 'm' version 1: m_0 is being" in ask(f"{url}/v1/health/ready")[1]
        assert ask(f"{url}/health")[0] == 200, "what else is served is served all the same"
        until(lambda: ready() == (200, 200))
        pid()
        for number in range(3):  # without an answer between them
            os.kill(process(before), signal.SIGKILL)
            until(lambda: ready() == (400, 400))
            if number == 2:
                break
            until(lambda: ready() == (200, 200))
        until(lambda: b"again and again" in ask(f"{url}/v2/repository/index", {})[1])
        status, told_error = ask(infer, question)
        assert status == 503 and b"all instances of model 'm' ended again and again" in told_error
        assert ready() == (400, 400) and ask(f"{url}/v2/health/live")[0] == 200


def process(before: frozenset[int]) -> int:
    """Return the model's process, without asking it. One that was killed may still be ending."""
    found: list[int] = []

    def is_alone() -> bool:
        found[:] = [p for p in _models_processes() if p not in before]
        return len(found) == 1

    until(is_alone)
    return found[0]


def _models_processes() -> list[int]:
    ids = [int(p) for task in Path("/proc/self/task").iterdir() for p in (task / "children").read_text().split()]
    return [p for p in ids if b"python_backend/stub" in _command_line(p)]


def _command_line(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
