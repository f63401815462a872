"""Large messages of gRPC, and large inputs in shared memory: refused before they are decoded, or read."""

import json
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory

import grpc
import httpx
import numpy as np
import pytest

from millrace.model_repository.request import request_validation
from millrace.protobuf import varint
from millrace.serve.protocols.kserve.grpc import message_scan
from millrace.serve.protocols.kserve.grpc.message_scan import LARGE, MAX_OTHER_BYTES, MAX_TYPED_BYTES
from millrace.serve.protocols.kserve.grpc.protobuf_messages import SERVICE, message
from millrace.serve.protocols.kserve.shared_memory import RegionPlace
from tests.support.kserve import one
from tests.support.kserve_grpc import Client, connected, refusal, request
from tests.support.repository import ADD_SUB, identity, in_process, write_models
from tests.support.server import Threaded


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    models = {
        "floats": identity("FP32", "-1"), "strings": identity("STRING", "-1"), "bytes": identity("INT8", "-1"),
        "pair": ADD_SUB,
    }  # fmt: skip
    root = write_models(tmp_path_factory.mktemp("models"), models)
    with in_process(root, allow_client_shm=True, grpc_port=0) as found:
        yield found


@pytest.fixture
def client(served: Threaded) -> Iterator[Client]:
    with connected(served.grpc_url) as found:
        yield found


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def asked(model: str, datatype: str, n: int, contents: bytes | None = None, more: bytes = b"") -> bytes:
    """By hand: protobuf would not make some of them."""
    tensor = field(1, b"INPUT0") + field(2, datatype.encode()) + field(3, varint(n))
    tensor += field(5, contents) if contents is not None else b""
    return field(1, model.encode()) + field(5, tensor) + more


MANY = 200_000
HOSTILE = {
    "typed numbers": (
        asked("bytes", "INT8", MAX_TYPED_BYTES + 1, field(2, bytes(MAX_TYPED_BYTES + 1))),
        "bytes in 'contents'"),
    "typed strings": (
        asked("strings", "BYTES", MANY, field(8, b"") * (MAX_TYPED_BYTES // 2 + 1)),
        "bytes in 'contents'"),
    "raws": (asked("floats", "FP32", 1, more=field(7, b"") * MANY), "the request has more than 65536 fields"),
    "inputs": (field(1, b"floats") + field(5, b"") * MANY, "the request has more than 65536 fields"),
    "fields of an input": (field(1, b"floats") + field(5, field(3, b"\1") * MANY), "more than 65536 fields"),
    "a shape": (field(1, b"floats") + field(5, field(3, bytes(MAX_OTHER_BYTES + 1))), "bytes beside the data"),
    "parameters": (field(1, b"floats") + field(4, field(1, b"")) * MANY, "the request has more than 65536 fields"),
    "unknown fields": (
        field(1, b"floats") + field(99, bytes(MAX_OTHER_BYTES + 1)),
        "bytes beside the data of its inputs"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_messages_that_would_become_too_much(client: Client, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, words = HOSTILE[what]
    infer = client.channel.unary_unary(f"{SERVICE}ModelInfer")
    code, told = refusal(lambda: infer(data, timeout=20))
    assert code == "INVALID_ARGUMENT" and words in told
    stream = client.channel.stream_stream(f"{SERVICE}ModelStreamInfer")
    (answer,) = stream(iter([data]), timeout=20)
    assert words in message("ModelStreamInferResponse").FromString(answer).error_message


def test_other_messages_are_small(client: Client) -> None:
    for name in ("ModelConfig", "RepositoryIndex", "LogSettings", "SystemSharedMemoryStatus", "RepositoryModelUnload"):
        call = client.channel.unary_unary(SERVICE + name)
        code, told = refusal(lambda: call(field(99, bytes(MAX_OTHER_BYTES)), timeout=20))  # noqa: B023
        assert code == "INVALID_ARGUMENT" and "at most 1048576 are supported" in told
    load = client.channel.unary_unary(f"{SERVICE}RepositoryModelLoad")
    code, told = refusal(lambda: load(field(3, b"") * MANY, timeout=20))
    assert (code, "more than 65536 fields" in told) == ("INVALID_ARGUMENT", True)


def test_large_messages_that_are_right(client: Client) -> None:
    numbers = (np.arange(LARGE * 2) % 100).astype(np.int8)
    contents = {"int_contents": numbers.tolist()}
    told = client.infer(
        "bytes", [{"name": "INPUT0", "datatype": "INT8", "shape": [len(numbers)], "contents": contents}]
    )
    assert told.raw_output_contents[0] == numbers.tobytes()
    texts = [b"%d" % i for i in range(LARGE)]
    contents_of_texts = {"bytes_contents": texts}
    given = {"name": "INPUT0", "datatype": "BYTES", "shape": [len(texts)], "contents": contents_of_texts}
    assert client.infer("strings", [given]).raw_output_contents[0].count(b"\0\0\0") == len(texts)
    raw = np.arange(LARGE, dtype=np.float32).tobytes()
    told = client.infer("floats", [{"name": "INPUT0", "datatype": "FP32", "shape": [LARGE]}], [raw])
    assert told.raw_output_contents[0] == raw


def test_strings_are_counted(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_validation, "MAX_STRINGS", 1000)
    monkeypatch.setattr(message_scan, "MAX_STRINGS", 70_000)
    given = {"name": "INPUT0", "datatype": "BYTES", "shape": [1001]}
    assert "1001 strings, at most 1000" in refusal(lambda: client.infer("strings", [given], [bytes(4004)]))[1]
    infer = client.channel.unary_unary(f"{SERVICE}ModelInfer")
    data = asked("strings", "BYTES", MANY, field(8, b"") * 70_001)
    assert "more than 70000 fields, or strings of one input" in refusal(lambda: infer(data, timeout=20))[1]


def test_garbage_is_left_to_protobuf(client: Client) -> None:
    infer = client.channel.unary_unary(f"{SERVICE}ModelInfer")
    for data in (b"\xff" * (LARGE + 1), field(5, bytes(LARGE))[:-1], b"\x0b" * (LARGE + 1), b"\x29" * (LARGE + 3)):
        with pytest.raises(grpc.RpcError) as caught:
            infer(data, timeout=20)
        assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)


# ---------------------------------------------------------------------- shared memory


@pytest.fixture
def region(served: Threaded) -> Iterator[int]:
    """Bytes of a region `r`."""
    size = 60 << 20
    memory = SharedMemory(create=True, size=size)
    base = f"{served.url}/v2/systemsharedmemory"
    try:
        asked = {"key": f"/{memory.name}", "byte_size": size}
        assert httpx.post(f"{base}/region/r/register", json=asked).status_code == 200
        yield size
    finally:
        httpx.post(f"{base}/region/r/unregister")
        memory.close()
        memory.unlink()


def there(name: str, size: int, datatype: str = "FP32", shape: int = 1) -> dict[str, object]:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": size}
    return {**one(datatype, [shape]), "name": name, "parameters": place}


def test_shared_memory_is_not_read_for_what_does_not_fit(
    served: Threaded, client: Client, region: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = region // 4
    cases = [
        ("floats", [there("OTHER", region, shape=n)], "unexpected inference input 'OTHER'"),
        ("floats", [there("INPUT0", region, shape=n), there("B", region, shape=n)], "expected 1 inputs but got 2"),
        ("floats", [there("INPUT0", region, "INT32", n)], "data-type is 'INT32'"),
        ("floats", [there("INPUT0", region, shape=n - 1)], "input byte size mismatch"),
        ("floats", [there(f"I{i}", region, shape=n) for i in range(100)], "bytes or more in shared memory"),
        ("pair", [there("INPUT0", region, "INT32", n), there("INPUT2", region, "INT32", n)], "batch-size must be"),
        ("strings", [there("INPUT0", region, "BYTES", 2**40)], "strings, at most"),
    ]
    monkeypatch.setattr(RegionPlace, "read", lambda place: pytest.fail("it was read"))
    for model, inputs, words in cases:
        reply = httpx.post(f"{served.url}/v2/models/{model}/infer", content=json.dumps({"inputs": inputs}), timeout=20)
        assert reply.status_code == 400 and words in reply.json()["error"], (words, reply.text)
        given = [{**i, "parameters": {k: {"string_param" if isinstance(v, str) else "int64_param": v}
                                      for k, v in dict(i["parameters"]).items()}} for i in inputs]  # type: ignore[call-overload]  # fmt: skip
        assert words in refusal(lambda: client.infer(model, given))[1], words  # noqa: B023


def test_large_shared_memory_is_read_aside(served: Threaded, region: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names, read = list[str](), RegionPlace.read

    def watched(place: RegionPlace) -> memoryview:
        names.append(threading.current_thread().name)
        return read(place)

    monkeypatch.setattr(RegionPlace, "read", watched)
    wanted = {"outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]}
    body = {"inputs": [there("INPUT0", region, shape=region // 4)], **wanted}
    assert httpx.post(f"{served.url}/v2/models/floats/infer", json=body, timeout=20).status_code == 200
    assert names[0].startswith("millrace-large")


def test_requests_by_the_library_are_as_those_by_hand() -> None:
    contents = {"int_contents": [1, 2]}
    theirs = request("bytes", [{"name": "INPUT0", "datatype": "INT8", "shape": [2], "contents": contents}])
    assert theirs.SerializeToString() == asked("bytes", "INT8", 2, field(2, b"\1\2"))
