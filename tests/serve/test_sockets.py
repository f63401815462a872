"""Where a server listens: TLS over HTTP and gRPC, a Unix socket, a port for metrics alone."""

import socket
import ssl
import stat
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.errors import ConfigError
from millrace.serve.http.sockets import check_tls, unix_socket
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, running, serving_with, until
from tests.support.kserve_grpc import Client, connected
from tests.support.repository import ADD_SUB, in_process, write_models

LOCALHOST = Path(__file__).with_name("localhost.pem")  # a certificate for 127.0.0.1 and its key, of these tests alone


def test_tls() -> None:
    trusted = ssl.create_default_context(cafile=str(LOCALHOST))
    with running(Fake(), ServerSettings(port=0, ssl_certfile=str(LOCALHOST), metrics_port=0)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=trusted, timeout=20) as client:
            body = {"prompt": "a", "max_tokens": 3, "stream": True}
            with client.stream("POST", server.url + "/v1/completions", json=body) as reply:
                assert reply.status_code == 200 and list(reply.iter_lines())[-2] == "data: [DONE]"
            assert client.get(server.url + "/health").status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(server.url + "/health", verify=ssl.create_default_context())
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=20)
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as garbage:
            garbage.sendall(b"\x16\x03\x01" + bytes(200))
            garbage.settimeout(20)
            while garbage.recv(4096):  # an alert at most, then the end
                pass
        until(lambda: httpx.get(server.url + "/health", verify=trusted).status_code == 200)


def test_tls_over_grpc(tmp_path: Path) -> None:
    write_models(tmp_path, {"simple": ADD_SUB})
    with in_process(tmp_path, ServerSettings(port=0, ssl_certfile=str(LOCALHOST)), grpc_port=0) as server:
        with grpc.secure_channel(server.grpc_url, grpc.ssl_channel_credentials(LOCALHOST.read_bytes())) as channel:
            assert Client(channel).call("ServerLive").live and Client(channel).call("ModelReady", name="simple").ready
        with connected(server.grpc_url) as client, pytest.raises(grpc.RpcError):
            client.call("ServerLive")


@pytest.mark.parametrize("kind", ["absent", "no certificate", "another's key", "no key", "not text"])
def test_files_that_are_no_certificate(kind: str, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    certificate = LOCALHOST.read_text().split("-----BEGIN PRIVATE KEY")[0]
    content = {"no certificate": b"hello", "another's key": OTHER_KEY.encode(), "no key": certificate.encode()}
    if kind != "absent":
        other.write_bytes(content.get(kind, bytes(range(256)) * 9))
    key = str(other) if kind == "another's key" else None
    settings = ServerSettings(ssl_certfile=str(LOCALHOST if key else other), ssl_keyfile=key)
    with pytest.raises(ConfigError, match=r"cannot speak TLS with .*other\.pem"):
        check_tls(settings)


def test_a_key_wants_its_certificate() -> None:
    with pytest.raises(ConfigError, match="ssl_keyfile is given, and ssl_certfile is not"):
        ServerSettings(ssl_keyfile="key.pem")


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "millrace.sock"
    with serving_with(Fake(), uds=str(path)) as server:
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, "others may not ask"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=20) as client:
            asked = {"prompt": "a", "max_tokens": 3}
            assert client.post("http://any/v1/completions", json=asked).status_code == 200
        with pytest.raises(ConfigError, match=r"[Aa]ddress already in use"), unix_socket(path):
            pass
    assert not path.exists()


def test_what_stands_at_its_path(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:  # a server that was killed
        left.bind(str(path))
    with unix_socket(path) as sock:
        sock.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"
    for wrong in (path, tmp_path / "no" / "folder", tmp_path / ("x" * 200), Path("a\0b")):
        with pytest.raises(ConfigError, match="cannot listen on the Unix socket"), unix_socket(wrong):
            pass
    assert path.read_text() == "another's"


def test_metrics_have_a_port_of_their_own(tmp_path: Path) -> None:
    write_models(tmp_path, {"simple": ADD_SUB})
    with in_process(tmp_path, ServerSettings(port=0, metrics_port=0, api_keys=("secret",))) as server:
        assert server.metrics_url.startswith("http://127.0.0.1:") and server.metrics_url.endswith("/metrics")
        for url in (server.metrics_url, server.metrics_url + "/"):
            reply = httpx.get(url)
            names = {family.name for family in text_string_to_metric_families(reply.text)}
            assert reply.status_code == 200 and "nv_inference_count" in names
        base = server.metrics_url.removesuffix("/metrics")
        for path in ("/", "/v2/models/simple", "/v1/models", "/metrics/x"):
            assert httpx.get(base + path, headers={"authorization": "Bearer secret"}).status_code == 404
        assert httpx.post(server.metrics_url).status_code == 405
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.metrics_url)


OTHER_KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgkDQZ5Tz+Nz43XGGy
fpObaylpX+cvmvJs5QFB61Wvc/qhRANCAASlKotqz7SON6Mj87+YS7e0tuHSn8TN
1rXKetHpEHY4xYYrdOKQM8MViICxKfOAALcICVUnmxxGrffshge9xi3w
-----END PRIVATE KEY-----
"""
