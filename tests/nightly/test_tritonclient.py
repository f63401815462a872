"""Triton's own client on the null server, over HTTP and gRPC: what the load generator is tested with speaks KServe."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess
from millrace.model_repository.request.tensors import DTYPES

pytestmark = pytest.mark.nightly
INSTANCES = 3
PROTOCOLS = ("http", "grpc")


@pytest.fixture(scope="module")
def server() -> Iterator[NullProcess]:
    pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    with NullProcess(NullTiming(ttft_ms="5", itl_ms="1", instances=INSTANCES), over_grpc=True) as null:
        yield null


@pytest.fixture(params=PROTOCOLS)
def triton(request: pytest.FixtureRequest, server: NullProcess) -> Iterator[tuple[Any, Any]]:
    """The module of a protocol, and a client."""
    if request.param == "http":
        import tritonclient.http as module

        url = server.url.removeprefix("http://")
    else:
        import tritonclient.grpc as module

        url = server.grpc_url
    client = module.InferenceServerClient(url)
    yield module, client
    client.close()


def plain(told: Any) -> dict[str, Any]:
    """What either client gives, as JSON has it."""
    if isinstance(told, dict):
        return told
    from google.protobuf.json_format import MessageToDict

    found: dict[str, Any] = MessageToDict(told, preserving_proto_field_name=True)
    return found


def test_health_metadata_and_configuration(triton: tuple[Any, Any]) -> None:
    _, client = triton
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("null", "1")
    assert not client.is_model_ready("gone")
    assert "binary_tensor_data" in plain(client.get_server_metadata())["extensions"]
    metadata = plain(client.get_model_metadata("null"))
    assert [t["name"] for t in metadata["inputs"]] == ["INPUT0", "INPUT1"] and metadata["versions"] == ["1"]
    assert [int(d) for d in metadata["inputs"][0]["shape"]] == [-1, 16]
    config = plain(client.get_model_config("null"))
    config = config.get("config", config)
    assert config["max_batch_size"] == 128 and config["backend"] == "null"
    (group,) = config["instance_group"]
    assert group["count"] == INSTANCES and group["kind"] == "KIND_CPU"
    assert [t["data_type"] for t in config["input"]] == ["TYPE_FP32", "TYPE_INT32"]


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_comes_back_as_it_was_sent(triton: tuple[Any, Any], datatype: str) -> None:
    module, client = triton
    rng = np.random.default_rng(0)
    values: Any = rng.integers(0, 2, (3, 7)).astype(DTYPES[datatype])
    if datatype == "BYTES":
        values = np.array([b"x" * i for i in range(21)], dtype=np.object_).reshape(3, 7)
    for binary in (True, False):
        if not binary and (datatype in ("FP16", "BF16") or module.__name__.endswith("grpc")):
            continue
        given = module.InferInput("INPUT0", values.shape, datatype)
        options = {} if module.__name__.endswith("grpc") else {"binary_data": binary}
        given.set_data_from_numpy(values, **options)
        wanted = [module.InferRequestedOutput("OUTPUT0", **options)]
        found = client.infer(f"null_{datatype}", [given], outputs=wanted, request_id="mine")
        back = found.as_numpy("OUTPUT0").reshape(3, 7)
        if datatype == "BYTES" and not binary:  # JSON's strings are text
            back = np.vectorize(str.encode, otypes=[np.object_])(back)
        assert back.dtype == values.dtype and np.array_equal(back, values)
        response = found.get_response()
        assert (response["id"] if isinstance(response, dict) else response.id) == "mine"


def test_two_inputs_times_and_statistics(triton: tuple[Any, Any], server: NullProcess) -> None:
    module, client = triton
    first, second = np.random.default_rng(1).random((4, 16)).astype(np.float32), np.arange(64, dtype=np.int32)
    inputs = [module.InferInput("INPUT0", (4, 16), "FP32"), module.InferInput("INPUT1", (4, 16), "INT32")]
    inputs[0].set_data_from_numpy(first)
    inputs[1].set_data_from_numpy(second.reshape(4, 16))

    def told() -> tuple[int, int, int]:
        (one,) = plain(client.get_inference_statistics("null"))["model_stats"]
        stages = one.get("inference_stats", {})
        success = stages.get("success", {})
        return int(one.get("inference_count", 0)), int(success.get("count", 0)), int(success.get("ns", 0))

    before = told()
    found = client.infer("null", inputs)
    items, count, ns = (b - a for a, b in zip(before, told(), strict=True))
    assert np.array_equal(found.as_numpy("OUTPUT0"), first)
    assert np.array_equal(found.as_numpy("OUTPUT1").reshape(-1), second)
    assert (items, count) == (4, 1) and 8e6 <= ns < 100e6, "5 ms and three of 1 ms"
    assert server.truth_list[-1].n_tokens == [4]


def test_what_is_refused_is_its_error(triton: tuple[Any, Any]) -> None:
    from tritonclient.utils import InferenceServerException

    module, client = triton
    given = module.InferInput("INPUT0", (1, 4), "FP32")
    given.set_data_from_numpy(np.zeros((1, 4), np.float32))
    for model, says in (
        ("gone", "Request for unknown model: 'gone' is not found"),
        ("null", "expected number of inputs between 2 and 2 but got 1"),
        ("null_single", "unexpected shape for input 'INPUT0' for model 'null_single'"),
        ("null_FP64", "data-type is 'FP32'"),
    ):
        with pytest.raises(InferenceServerException, match=says):
            client.infer(model, [given])
