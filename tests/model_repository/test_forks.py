"""Processes that a model.py forks: they keep no port of the server, and are told that they cannot ask other models."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from millrace.serve.settings import ServerSettings
from tests.serve.support import until
from tests.support.python_models import ANY, HEAD, SAY, write
from tests.support.repository import in_process

_FORKS = """
    def initialize(self, args):
        import os, time
        self.pid = os.fork()
        if not self.pid:
            time.sleep(600)
            os._exit(0)

    def execute(self, requests):
        return [said(str(self.pid)) for _ in requests]
"""
_FORKS_LATER = _FORKS.replace("initialize(self, args)", "execute(self, requests)").replace(
    "    def execute(self, requests):\n        return", "        return"
)
_ASKS = """
    def execute(self, requests):
        import os
        found, told = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                one = pb_utils.Tensor("IN", np.array(["x"], dtype=object))
                pb_utils.InferenceRequest(model_name="asks", inputs=[one], requested_output_names=["OUT"]).exec()
            except pb_utils.TritonModelException as error:
                os.write(told, str(error).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return [said(os.read(found, 1000).decode()) for _ in requests]
"""


def answer(url: str, model: str) -> str:
    body = {"inputs": [{"name": "IN", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
    found: str = httpx.post(f"{url}/v2/models/{model}/infer", json=body).json()["outputs"][0]["data"][0]
    return found


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("code", [_FORKS, _FORKS_LATER], ids=["as it is loaded", "as it computes"])
def test_a_forked_process_keeps_no_port(tmp_path: Path, code: str) -> None:
    write(tmp_path, "forks", HEAD + code + SAY, ANY % "")
    settings = ServerSettings(host="127.0.0.1", port=0, metrics_port=0)
    with in_process(tmp_path, settings, grpc_port=0) as served:
        urls = served.url, served.grpc_url, served.metrics_url.removesuffix("/metrics")
        ports, pid = [int(url.rpartition(":")[2]) for url in urls], int(answer(served.url, "forks"))
    try:
        os.kill(pid, 0)  # it is there, and the server is not

        def are_free() -> bool:
            with contextlib.ExitStack() as stack:
                probes = [stack.enter_context(socket.socket()) for _ in ports]
                return all(
                    probe.connect_ex(("127.0.0.1", port)) != 0 for probe, port in zip(probes, ports, strict=True)
                )

        until(are_free)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_that_asks_a_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "asks", HEAD + _ASKS + SAY, ANY % "")
    with in_process(tmp_path) as served:
        assert answer(served.url, "asks").startswith("a process that a model has forked cannot ask other models")
