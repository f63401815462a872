"""What one tensor model, and one body, may take of a server that others use, too."""

import json
import socket
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import numpy as np
import pytest

from millrace.serve.settings import ServerSettings
from tests.support.kserve import binary, infer, one, parts
from tests.support.python_models import HEAD, write
from tests.support.repository import identity, serving, write_models

BLOCKED = 'backend: "python" ' + identity("FP32", "-1").replace('backend: "identity"', "")
WAITS = HEAD + """
    def execute(self, requests):
        import time
        from pathlib import Path
        while not Path({!r}).exists():
            time.sleep(0.005)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""  # fmt: skip
ASKED = json.dumps({"inputs": [one("FP32", [1], [7])]}).encode()


def packed(body: bytes, bits: int = 31) -> bytes:
    writer = zlib.compressobj(9, zlib.DEFLATED, bits)
    return writer.compress(body) + writer.flush()


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def root(tmp_path: Path, mark: Path) -> Path:
    """`blocked` answers when there is the file `mark`."""
    root = tmp_path / "models"
    write(root, "blocked", WAITS.format(str(mark)), BLOCKED)
    return write_models(root, {"same": identity("FP32", "-1")})


@contextmanager
def asking(
    url: str, n: int, body: bytes = ASKED, head: str = "", model: str = "blocked", before: int = 0
) -> Iterator[list[socket.socket]]:
    """So many connections that wait for the model, one after the other. before: others that wait"""
    host, port = url.removeprefix("http://").split(":")
    request = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(body)}\r\n\r\n"
    with ExitStack() as closing:
        sockets = list[socket.socket]()
        for i in range(n):
            sockets.append(closing.enter_context(socket.create_connection((host, int(port)), timeout=20)))
            sockets[-1].sendall(request.encode() + body)
            until_s = monotonic() + 10
            while httpx.get(f"{url}/load").json()["server_load"] < before + i + 1 and monotonic() < until_s:
                sleep(0.002)
        yield sockets


def test_a_model_that_never_answers_takes_so_many_requests_and_no_more(root: Path, mark: Path) -> None:
    with serving(root, max_model_requests=3) as url, asking(url, 3) as sockets:
        refused = infer(url, "blocked", ASKED)
        what = "[request id: <id_unknown>] Exceeds maximum queue size: 3 requests to model 'blocked' wait for answers"
        assert (refused.status_code, refused.json()) == (503, {"error": what})
        assert infer(url, "same", ASKED).status_code == 200
        mark.touch()
        assert [s.recv(100)[:15] for s in sockets] == [b"HTTP/1.1 200 OK"] * 3
        assert infer(url, "blocked", ASKED).status_code == 200


def test_tensor_models_leave_connections_to_others(root: Path, mark: Path) -> None:
    """Each that waits holds one, and where there are none left, a chat would get a 503."""
    write(root, "second", WAITS.format(str(mark)), BLOCKED)
    flags: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}
    with (
        serving(root, ServerSettings(port=0, max_connections=8), **flags) as url,
        asking(url, 4) as sockets,
    ):
        refused = infer(url, "blocked", ASKED)
        assert refused.status_code == 503 and "4 requests to model 'blocked' wait for answers" in refused.text
        assert infer(url, "same", ASKED).status_code == 200, "half of them is for others"
        with asking(url, 2, model="second", before=4) as others:
            refused = infer(url, "same", ASKED)
            what = "Exceeds maximum queue size: 6 requests to tensor models wait for answers"
            assert (refused.status_code, refused.json()) == (503, {"error": what})
            assert httpx.get(f"{url}/v1/models").status_code == 200
            assert httpx.post(f"{url}/v2/repository/models/second/unload").status_code == 200
            mark.touch()
            assert [s.recv(100)[:15] for s in (*sockets, *others)] == [b"HTTP/1.1 200 OK"] * 6
        assert infer(url, "same", ASKED).status_code == 200


def test_what_bodies_become_counts_among_all_that_are_held(root: Path, mark: Path) -> None:
    bomb = packed(ASKED + b" " * 1_000_000)
    assert len(bomb) < 2000
    with (
        serving(root, ServerSettings(port=0, max_receiving_bytes=2_500_000), http_max_input_size=1_200_000) as url,
        asking(url, 2, bomb, "content-encoding: gzip\r\n") as sockets,
    ):
        refused = infer(url, "same", bomb, {"content-encoding": "gzip"})
        assert refused.status_code == 503
        assert refused.json()["error"].startswith("all bodies that are being received take too much memory")
        assert infer(url, "same", packed(ASKED), {"content-encoding": "gzip"}).status_code == 200, "short ones pass"
        mark.touch()
        assert [s.recv(100)[:15] for s in sockets] == [b"HTTP/1.1 200 OK"] * 2
        assert infer(url, "same", bomb, {"content-encoding": "gzip"}).status_code == 200


@pytest.mark.parametrize("bits", [31, 15])
def test_packed_bodies_of_many_pieces(root: Path, mark: Path, bits: int) -> None:
    coding = {"content-encoding": "gzip" if bits == 31 else "deflate"}
    raw = (np.arange(700_000, dtype=np.uint64) * 2654435761 % 2**23).astype("<u4").tobytes()
    body, headers = binary(
        [one("FP32", [700_000], parameters={"binary_data_size": len(raw)})],
        raw,
        parameters={"binary_data_output": True},
    )
    body, headers = packed(body, bits), {**headers, **coding}
    assert len(body) > 1 << 20
    with serving(root) as url, ThreadPoolExecutor(4) as pool:
        for response in pool.map(lambda _: infer(url, "same", body, headers), range(4)):
            assert parts(response)[1] == raw, "beside one another"
        for wrong, says in (
            (packed(ASKED, bits) + b"more", "there are bytes after its end"),
            (packed(ASKED, bits) * 2, "there are bytes after its end"),
            (packed(ASKED + b" " * 200_000, bits) + bytes(100_000), "there are bytes after its end"),
            (body[:-1], "it ends too early"),
            (b"", "it ends too early"),
            (body[:100] + bytes(100) + body[200:], "Error -3"),
        ):
            refused = infer(url, "same", wrong, headers if wrong[:99] == body[:99] else coding)
            what = f"failed to decompress the {coding['content-encoding']} body: {says}"
            assert refused.status_code == 400 and refused.json()["error"].startswith(what), refused.text
