"""What the tests of Triton users' pains ask for, and the processes that must not stay behind."""

import contextlib
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]

from tests.support.kserve import binary, infer, parts
from tests.support.python_models import ANY, HEAD

FLOATS = ANY.replace("STRING", "FP32")
SAME = HEAD + """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""  # fmt: skip


def words(url: str, model: str, *values: str) -> httpx.Response:
    return infer(url, model, {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [len(values)], "data": values}]})


def floats(url: str, model: str, array: Any) -> Any:
    """As binary, there and back."""
    raw = array.astype(np.float32).tobytes()
    one = {"name": "IN", "datatype": "FP32", "shape": list(array.shape), "parameters": {"binary_data_size": len(raw)}}
    body, headers = binary([one], raw, outputs=[{"name": "OUT", "parameters": {"binary_data": True}}])
    return np.frombuffer(parts(infer(url, model, body, headers))[1], np.float32)


class Unix(HTTPConnection):
    """Over a socket of this machine."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


def becomes(is_so: Callable[[], bool], within_s: float = 15) -> None:
    until_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def children() -> set[psutil.Process]:
    """Processes of models."""
    found = set()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it is gone meanwhile
            if any("python_backend/stub" in word for word in process.cmdline()):
                found.add(process)
    return found
