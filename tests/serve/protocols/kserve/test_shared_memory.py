"""Tensors in shared memory that a client registers: over HTTP and gRPC, and what a client may do to it meanwhile."""

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from millrace.model_repository.request.status_code import StatusError
from millrace.serve.protocols.kserve.grpc import infer as grpc_infer
from millrace.serve.protocols.kserve.http import infer_request
from millrace.serve.protocols.kserve.shared_memory import SharedMemoryRegions
from tests.support.kserve_grpc import Client, connected, one, refusal, request
from tests.support.repository import ADD_SUB, identity, in_process, write_models
from tests.support.server import Threaded

X = np.arange(16, dtype=np.float32).reshape(1, 16)
Memory = shared_memory.SharedMemory
BEYOND = "failed to register shared memory region 'n': invalid args: offset "


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    models = {
        "simple": ADD_SUB.replace("INT32", "FP32"),
        "strings": identity("STRING", "-1, -1"),
        "large": identity("FP32", "-1, -1"),
    }
    root = write_models(tmp_path_factory.mktemp("models"), models)
    with in_process(root, allow_client_shm=True, grpc_port=0, http_max_input_size=20_000) as found:
        yield found


@pytest.fixture
def memory(served: Threaded) -> Iterator[Memory]:
    """4 KiB, registered as "r" from byte 64 on."""
    made = Memory(create=True, size=4096)
    body = {"key": f"/{made.name}", "offset": 64, "byte_size": 1024}
    reply = httpx.post(f"{served.url}/v2/systemsharedmemory/region/r/register", json=body)
    assert reply.status_code == 200, reply.text
    yield made
    assert httpx.post(f"{served.url}/v2/systemsharedmemory/unregister").status_code == 200
    made.close()
    made.unlink()


def numbers(memory: Memory, at: int) -> np.ndarray[Any, Any]:
    """16 of the region "r", from byte `at` on."""
    assert memory.buf is not None
    return np.frombuffer(memory.buf, np.float32, 16, 64 + at)


def placed(name: str, offset: int, size: int, region: str = "r") -> dict[str, Any]:
    where = {"shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": size}
    return {"name": name, "parameters": where}


def test_add_sub_over_http(served: Threaded, memory: Memory) -> None:
    numbers(memory, 0)[:] = X[0]
    body = {
        "inputs": [
            {**placed("INPUT0", 0, 64), "shape": [1, 16], "datatype": "FP32"},
            {"name": "INPUT1", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16},
        ],
        "outputs": [placed("OUTPUT0", 128, 64), {"name": "OUTPUT1"}],
    }
    for _ in range(3):  # also where the connection knows the request
        reply = httpx.post(f"{served.url}/v2/models/simple/infer", json=body).json()
        assert "outputs" in reply, reply
        shared, plain = reply["outputs"]
        assert shared == {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 16]}, (
            "as Triton: its place is the client's"
        )
        assert plain["data"] == (X[0] - 1).tolist()
        assert numbers(memory, 128).tolist() == (X[0] + 1).tolist()
        numbers(memory, 128)[:] = 0


def test_add_sub_over_grpc(served: Threaded, memory: Memory) -> None:
    numbers(memory, 64)[:] = X[0]

    def parameters(offset: int) -> dict[str, Any]:
        return {"shared_memory_region": {"string_param": "r"}, "shared_memory_offset": {"int64_param": offset},
                "shared_memory_byte_size": {"int64_param": 64}}  # fmt: skip

    with connected(served.grpc_url) as client:
        found = client.infer(
            "simple", [one("FP32", [1, 16], "INPUT0", parameters=parameters(64)), one("FP32", [1, 16], "INPUT1")],
            [X.tobytes()], outputs=[{"name": "OUTPUT0", "parameters": parameters(256)}, {"name": "OUTPUT1"}],
        )  # fmt: skip
        assert not found.outputs[0].parameters
        assert list(found.raw_output_contents) == [b"", bytes(64)], "one for each output, OUTPUT1 alone has numbers"
        assert numbers(memory, 256).tolist() == (2 * X[0]).tolist()


def test_strings(served: Threaded, memory: Memory) -> None:
    data = b"\x02\0\0\0ab\0\0\0\0"
    assert memory.buf is not None
    memory.buf[64 : 64 + len(data)] = data
    asked = {"inputs": [{**placed("INPUT0", 0, len(data)), "shape": [1, 2], "datatype": "BYTES"}],
             "outputs": [placed("OUTPUT0", 500, 100)]}  # fmt: skip
    reply = httpx.post(f"{served.url}/v2/models/strings/infer", json=asked).json()
    assert reply["outputs"] == [{"name": "OUTPUT0", "datatype": "BYTES", "shape": [1, 2]}]
    assert bytes(memory.buf[564 : 564 + len(data)]) == data


def test_status_and_names(served: Threaded, memory: Memory) -> None:
    base = f"{served.url}/v2/systemsharedmemory"
    region = {"name": "r", "key": f"/{memory.name}", "offset": 64, "byte_size": 1024}
    assert httpx.get(f"{base}/status").json() == [region] == httpx.get(f"{base}/region/r/status").json()
    assert "system_shared_memory" in httpx.get(f"{served.url}/v2").json()["extensions"]
    with connected(served.grpc_url) as client:
        told = client.call("SystemSharedMemoryStatus", name="r").regions["r"]
        assert (told.name, told.key, told.offset, told.byte_size) == tuple(region.values())
        client.call("SystemSharedMemoryRegister", name="g", key=memory.name, offset=0, byte_size=4096)
        assert set(client.call("SystemSharedMemoryStatus").regions) == {"r", "g"}
        client.call("SystemSharedMemoryUnregister", name="g")
        client.call("SystemSharedMemoryUnregister", name="g")  # gone already
        assert httpx.get(f"{base}/status").json() == [region]
        assert refusal(lambda: client.call("SystemSharedMemoryStatus", name="g")) == (
            "NOT_FOUND", "Unable to find system shared memory region: 'g'",
        )  # fmt: skip


def test_cuda_has_no_regions(served: Threaded) -> None:
    """As in a Triton without GPUs, whose client examples begin with unregistering all regions."""
    base = f"{served.url}/v2/cudasharedmemory"
    told = httpx.get(f"{base}/status")
    assert (told.status_code, told.json()) == (200, [])
    for path in ("unregister", "region/r/unregister"):
        gone = httpx.post(f"{base}/{path}")
        assert (gone.status_code, gone.content) == (200, b"")
    unknown = httpx.get(f"{base}/region/r/status")
    assert (unknown.status_code, unknown.json()["error"]) == (404, "Unable to find cuda shared memory region: 'r'")
    assert httpx.post(f"{base}/region/r/register", json={}).status_code == 501
    with connected(served.grpc_url) as client:
        assert not client.call("CudaSharedMemoryStatus").regions
        for name in ("", "r"):
            client.call("CudaSharedMemoryUnregister", name=name)
        assert refusal(lambda: client.call("CudaSharedMemoryStatus", name="r"))[0] == "NOT_FOUND"
        assert refusal(lambda: client.call("CudaSharedMemoryRegister", name="r"))[0] == "UNIMPLEMENTED"


@pytest.mark.parametrize(
    ("name", "body", "status", "what"),
    [
        ("r", {}, 400, "shared memory region 'r' already in manager"),
        ("n", {"key": "/no-such-thing"}, 500, "Unable to open shared memory region: '/no-such-thing'"),
        ("n", {"key": "/../etc/passwd"}, 400, "cannot register shared memory region 'n' - invalid shm key '/../"),
        ("n", {"key": "/.."}, 400, "cannot register shared memory region 'n' - invalid shm key '/..'"),
        ("n", {"key": ""}, 500, "Unable to open shared memory region: ''"),
        ("n", {"key": "/triton_python_backend_shm_region_1"}, 400, "cannot register shared memory region 'n' with "
         "key '/triton_python_backend_shm_region_1' as the key contains the reserved prefix 'triton_python_backend"),
        ("n", {"offset": 4097}, 400, BEYOND),
        ("n", {"offset": 4096}, 400, BEYOND),
        ("n", {"offset": 2**62, "byte_size": 2**62}, 400, BEYOND),
        ("n", {"offset": 2**63}, 400, BEYOND),
        ("n", {"offset": 2**64}, 400, BEYOND),
        ("n", {"byte_size": 2**63}, 400, BEYOND),
        ("n", {"byte_size": 4097}, 400, BEYOND),
        ("n", {"byte_size": -1}, 500, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("n", {"key": 3}, 500, "attempt to access JSON non-string as string"),
        ("n", {"key": None, "byte_size": None}, 400, "Shared memory register request has no 'key' field"),
    ],
)  # fmt: skip
def test_what_is_not_registered(
    served: Threaded, memory: Memory, name: str, body: dict[str, Any], status: int, what: str
) -> None:
    asked = {"key": f"/{memory.name}", "byte_size": 64, **body}
    reply = httpx.post(
        f"{served.url}/v2/systemsharedmemory/region/{name}/register",
        json={k: v for k, v in asked.items() if v is not None},
    )
    assert (reply.status_code, reply.json()["error"][: len(what)]) == (status, what)
    assert [one["name"] for one in httpx.get(f"{served.url}/v2/systemsharedmemory/status").json()] == ["r"]


@pytest.mark.parametrize(
    ("parameters", "status", "what"),
    [
        (placed("", 0, 64, "q"), 404, "Unable to find shared memory region: 'q'"),
        (placed("", 1025, 0), 400, "Invalid offset for shared memory region: 'r'"),
        (placed("", 2**63 - 1, 64), 400, "Invalid offset for shared memory region: 'r'"),
        (placed("", 2**63, 64), 400, "Invalid offset for shared memory region: 'r'"),
        (placed("", 2**64, 64), 400, "Invalid offset for shared memory region: 'r'"),
        (placed("", -1, 64), 400, "Invalid offset for shared memory region: 'r'"),
        (placed("", 0, 2**63), 400, "Invalid offset + byte size for shared memory region: 'r'"),
        (placed("", 0, 10**30), 400, "Invalid offset + byte size for shared memory region: 'r'"),
        (placed("", 32, 2**64 - 32), 400, "Integer overflow detected: byte_size (18446744073709551584) + offset (32) "
         "for region 'r' is 2**64 or more, expected at most the 1024 of the region"),
        (placed("", 0, -1), 400, "Invalid offset + byte size for shared memory region: 'r'"),
        (placed("", 1000, 64), 400, "Invalid offset + byte size for shared memory region: 'r'"),
        ({"parameters": {"shared_memory_region": "r"}}, 500, "Unable to parse 'shared_memory_byte_size': attempt to "
         "access non-existing object member 'shared_memory_byte_size'"),
    ],
)  # fmt: skip
def test_places_that_are_none(
    served: Threaded, memory: Memory, parameters: dict[str, Any], status: int, what: str
) -> None:
    there = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "parameters": parameters["parameters"]}
    reply = httpx.post(f"{served.url}/v2/models/large/infer", json={"inputs": [there]})
    assert (reply.status_code, reply.json()["error"]) == (status, what)


def test_sizes_that_do_not_fit(served: Threaded, memory: Memory) -> None:
    there = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32"}
    short = {"inputs": [{**there, **placed("INPUT0", 0, 60)}]}
    reply = httpx.post(f"{served.url}/v2/models/large/infer", json=short)
    assert reply.status_code == 400 and "60" in reply.json()["error"], reply.text
    little = {"inputs": [{**there, "data": X[0].tolist()}], "outputs": [placed("OUTPUT0", 0, 60)]}
    reply = httpx.post(f"{served.url}/v2/models/large/infer", json=little)
    what = "shared memory size specified with the request for output 'OUTPUT0' (60 bytes) should be at least 64 bytes"
    assert (reply.status_code, reply.json()["error"][: len(what)]) == (500, what)


def test_a_client_that_cuts_its_memory_off(served: Threaded, memory: Memory) -> None:
    """A server that had it mapped would be killed by the next read."""
    there = {**placed("INPUT0", 0, 64), "shape": [1, 16], "datatype": "FP32"}
    os.truncate(f"/dev/shm/{memory.name}", 80)
    reply = httpx.post(f"{served.url}/v2/models/large/infer", json={"inputs": [there]})
    assert (reply.status_code, reply.json()["error"]) == (500, "shared memory region 'r' has been cut off")
    os.truncate(f"/dev/shm/{memory.name}", 4096)
    assert httpx.post(f"{served.url}/v2/models/large/infer", json={"inputs": [there]}).status_code == 200


def test_more_than_a_body_may_have(served: Threaded) -> None:
    large = Memory(create=True, size=1 << 20)
    try:
        with connected(served.grpc_url) as client:
            client.call("SystemSharedMemoryRegister", name="l", key=large.name, byte_size=1 << 20)
        there = {**placed("INPUT0", 0, 20_004, "l"), "shape": [1, 5001], "datatype": "FP32"}
        reply = httpx.post(f"{served.url}/v2/models/large/infer", json={"inputs": [there]})
        assert reply.status_code == 400 and "--http-max-input-size" in reply.json()["error"]
    finally:
        httpx.post(f"{served.url}/v2/systemsharedmemory/unregister")
        large.close()
        large.unlink()


def test_wrong_kinds_over_grpc(served: Threaded, memory: Memory) -> None:
    with connected(served.grpc_url) as client:
        for key, value in (("region", {"int64_param": 1}), ("offset", {"string_param": "1"})):
            said = {"shared_memory_region": {"string_param": "r"}, f"shared_memory_{key}": value}
            code, what = refusal(partial(infer, client, said))
            assert code == "INVALID_ARGUMENT" and f"invalid value type for 'shared_memory_{key}' parameter" in what


def infer(client: Client, parameters: dict[str, Any]) -> Any:
    return client.infer("large", [one("FP32", [1, 16], parameters=parameters)])


def n_open(name: str) -> int:
    """Descriptors of this process that are of this file; other threads open and close theirs meanwhile."""
    n = 0
    for entry in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):
            n += name in str(entry.readlink())
    return n


def test_no_file_stays_open() -> None:
    made = Memory(create=True, size=64)
    before = n_open(made.name)
    assert before > 0
    regions = SharedMemoryRegions(1 << 20).for_tenant("")
    regions.register("a", made.name, 0, 64)
    regions.register("b", made.name, 0, 64)
    for wrong in (("a", made.name, 0, 1), ("c", made.name, 65, 0), ("d", made.name, 1, 64)):
        with pytest.raises(StatusError):
            regions.register(*wrong)
    regions.unregister("")
    assert n_open(made.name) == before
    made.close()
    made.unlink()


def test_a_region_in_use_goes_with_the_last_request() -> None:
    """Its file stays open until then: its number could be that of another file, which an output would go to."""
    made = Memory(create=True, size=64)
    regions = SharedMemoryRegions(1 << 20).for_tenant("")
    regions.register("a", made.name, 0, 64)
    regions.register("b", made.name, 0, 64)
    first, second = regions.place("a", 0, 64), regions.place("a", 8, 8)
    regions.unregister("")
    assert [one["name"] for one in regions.status("")] == ["a"]
    with pytest.raises(StatusError, match="already in manager"):
        regions.register("a", made.name, 0, 64)
    first.write("x", b"y" * 64)
    third = regions.place("a", 0, 4)  # requests that come meanwhile find it, too
    del first, second
    assert bytes(third.read()) == b"yyyy" and regions.status("a")
    del third
    assert regions.status("") == []
    with pytest.raises(StatusError, match="Unable to find shared memory region"):
        regions.place("a", 0, 4)
    regions.register("a", made.name, 0, 64)
    place = regions.place("a", 0, 64)
    del place
    assert regions.status("a"), "it was not unregistered"
    regions.unregister("")
    made.close()
    made.unlink()


def test_inputs_hold_their_regions_until_the_request_is_over() -> None:
    made = Memory(create=True, size=64)
    regions = SharedMemoryRegions(1 << 20).for_tenant("")
    model: Any = SimpleNamespace(name="m", checker=SimpleNamespace(attach_inputs=lambda request, raw_inputs: None))
    body = {"inputs": [{**placed("INPUT0", 0, 64, "a"), "datatype": "FP32", "shape": [16]}]}
    said = {"region": {"string_param": "a"}, "byte_size": {"int64_param": 64}}
    parameters = {f"shared_memory_{key}": value for key, value in said.items()}
    message = request("m", [one("FP32", [16], parameters=parameters)])
    for read in (
        lambda: infer_request.read_infer(json.dumps(body).encode(), None, "m", model.checker, regions),
        lambda: grpc_infer.read_infer(message, model, regions),
    ):
        regions.register("a", made.name, 0, 64)
        found = read()
        regions.unregister("a")
        assert regions.status("a")
        del found
        assert regions.status("") == []
    made.close()
    made.unlink()
