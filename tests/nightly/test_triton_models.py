"""Triton's own clients on models that ask models, send requests back and count; in processes of their own, too."""

import queue
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.serve.support import until
from tests.support.python_models import HEAD, OWN, write
from tests.support.repository import in_process
from tests.support.server import Threaded
from tests.support.triton_models import (
    ADD_SUB_CONFIG,
    BLS_ASYNC,
    BLS_CONFIG,
    BLS_DECOUPLED_ASYNC,
    BLS_DECOUPLED_SYNC,
    BLS_SYNC,
    CUSTOM_METRICS,
    DECOUPLED,
    GENERATES,
    ITERATIVE,
    RESCHEDULED,
    SQUARE,
    SQUARE_CONFIG,
)

pytestmark = pytest.mark.nightly
ITSELF = """
    def execute(self, requests):
        asking = pb_utils.InferenceRequest(model_name="ring", requested_output_names=["OUT"],
                                           inputs=requests[0].inputs(), timeout=300_000)
        response = asking.exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return [pb_utils.InferenceResponse(response.output_tensors())]
"""


@pytest.fixture(scope="module", params=["", OWN], ids=["here", "own"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    root, own = tmp_path_factory.mktemp("models"), request.param
    write(root, "add_sub", "", ADD_SUB_CONFIG % 'backend: "add_sub"')
    write(root, "bls_sync", BLS_SYNC, BLS_CONFIG % own)
    write(root, "bls_async", BLS_ASYNC, BLS_CONFIG % own)
    write(root, "square_int32", SQUARE, SQUARE_CONFIG % (DECOUPLED + own))
    write(root, "bls_decoupled_sync", BLS_DECOUPLED_SYNC, SQUARE_CONFIG % own)
    write(root, "bls_decoupled_async", BLS_DECOUPLED_ASYNC, SQUARE_CONFIG % own)
    write(root, "rescheduled", RESCHEDULED, SQUARE_CONFIG % (own + ITERATIVE % ""))
    write(root, "generates", GENERATES, SQUARE_CONFIG % (DECOUPLED + own + ITERATIVE % ""))
    write(root, "custom_metrics", CUSTOM_METRICS, SQUARE_CONFIG % own)
    write(root, "ring", HEAD + ITSELF, SQUARE_CONFIG % own)
    with in_process(root, model_control_mode="explicit", load_model=("*",), grpc_port=0) as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, served: Threaded) -> Iterator[Any]:
    import tritonclient.grpc
    import tritonclient.http

    library = tritonclient.http if request.param == "http" else tritonclient.grpc
    url = served.url.removeprefix("http://") if request.param == "http" else served.grpc_url
    with library.InferenceServerClient(url) as found:
        found.library = library
        yield found


def tensors(client: Any, **arrays: Any) -> list[Any]:
    from tritonclient.utils import np_to_triton_dtype

    found = []
    for name, array in arrays.items():
        found.append(client.library.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        found[-1].set_data_from_numpy(array)
    return found


@pytest.mark.parametrize("name", ["bls_sync", "bls_async"])
def test_a_model_asks_another(client: Any, name: str) -> None:
    """As examples/bls/client.py: add_sub is asked, and a model that is not there is an error."""
    left, right = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    asked = {"MODEL_NAME": np.array([b"add_sub"], dtype=object), "INPUT0": left, "INPUT1": right}
    result = client.infer(name, tensors(client, **asked))
    assert np.array_equal(result.as_numpy("OUTPUT0"), left + right)
    assert np.array_equal(result.as_numpy("OUTPUT1"), left - right)
    from tritonclient.utils import InferenceServerException

    asked["MODEL_NAME"] = np.array([b"undefined_model"], dtype=object)
    with pytest.raises(InferenceServerException) as failed:
        client.infer(name, tensors(client, **asked))
    says = "Failed for execute the inference request. Model 'undefined_model' is not ready."
    assert says in failed.value.message()


@pytest.mark.parametrize(("name", "expected"), [("bls_decoupled_sync", 16), ("bls_decoupled_async", 32)])
def test_a_model_asks_a_decoupled_one(client: Any, name: str, expected: int) -> None:
    result = client.infer(name, tensors(client, IN=np.array([4], np.int32)))
    assert result.as_numpy("OUT").tolist() == [expected]


def test_a_model_that_waits_for_itself_times_out(client: Any) -> None:
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match=r"model 'ring' gave no response for 0.3 s \(ring -> ring\)"):
        client.infer("ring", tensors(client, IN=np.array([4], np.int32)))


def test_requests_are_executed_again(client: Any) -> None:
    result = client.infer("rescheduled", tensors(client, IN=np.array([2], np.int32)))
    assert result.as_numpy("OUT").tolist() == [3010], "three times, of which the first has the flag START"


@pytest.mark.parametrize(("name", "expected"), [("square_int32", [3, 3, 3]), ("generates", [1, 2, 3])])
def test_streams(served: Threaded, name: str, expected: list[int]) -> None:
    import tritonclient.grpc

    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(served.grpc_url) as client:
        client.library = tritonclient.grpc
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            name, tensors(client, IN=np.array([3], np.int32)), enable_empty_final_response=True
        )  # fmt: skip
        found = []
        while True:
            result, error = answers.get(timeout=20)
            assert error is None, error
            if len(result.get_response().outputs):
                found += result.as_numpy("OUT").tolist()
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    assert found == expected


def test_metrics_of_models_are_shown(client: Any, served: Threaded) -> None:
    def read() -> dict[str, float]:
        with urllib.request.urlopen(f"{served.url}/metrics", timeout=20) as reply:
            lines = reply.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    before = read()['requests_process_latency_ns{model="custom_metrics",version="1"}']
    client.infer("custom_metrics", tensors(client, IN=np.array([1], np.int32)))
    after = read()
    assert after['requests_process_latency_ns{model="custom_metrics",version="1"}'] == before + 3.5
    assert after['sizes_bucket{le="+Inf"}'] == after["sizes_count"] >= 1


def test_a_model_is_unloaded_with_what_it_counts(client: Any, served: Threaded) -> None:
    client.unload_model("custom_metrics")

    def is_gone() -> bool:
        with urllib.request.urlopen(f"{served.url}/metrics", timeout=20) as reply:
            return b"requests_process_latency_ns" not in reply.read()

    until(is_gone)
    client.load_model("custom_metrics")
    assert client.is_model_ready("custom_metrics")
