"""Triton's own gRPC client, with its own messages, on a repository that is served: calls, streams, cancellation."""

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.request.tensors import DTYPES
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message
from tests.serve.support import until
from tests.support.python_models import ANY, HEAD, SAY, write
from tests.support.repository import ADD_SUB, REPEAT, identity, in_process, write_models

pytestmark = pytest.mark.nightly
KINDS = {"BYTES": "STRING"}
DECOUPLED = "model_transaction_policy { decoupled: true }"
# One response for each element, from a thread of its own, and the end without one; "wait" until it is cancelled.
SAYS = f"""{HEAD}
    def initialize(self, args):
        from pathlib import Path
        self.here = Path(args["model_repository"])

    def execute(self, requests):
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)
            threading.Thread(target=self.answer, args=(request.get_response_sender(), texts), daemon=True).start()

    def answer(self, sender, texts):
        import time
        for text in texts:
            sender.send(said(text))
            while text == b"wait" and not sender.is_cancelled():
                time.sleep(0.002)
        if sender.is_cancelled():
            (self.here / "cancelled").touch()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
{SAY}"""
Answers = queue.SimpleQueue[tuple[Any, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    root = tmp_path_factory.mktemp("models")
    same = {f"same_{kind}": identity(KINDS.get(kind, kind), more="max_batch_size: 8") for kind in DTYPES}
    write_models(root, {**same, "simple": ADD_SUB + "dynamic_batching { }", "repeat_int32": REPEAT})
    write(root, "says", SAYS, ANY % DECOUPLED)
    return root


@pytest.fixture(scope="module")
def place(root: Path) -> Iterator[str]:
    with in_process(root, model_control_mode="explicit", load_model=("*",), grpc_port=0) as found:
        yield found.grpc_url


@pytest.fixture
def client(place: str) -> Iterator[Any]:
    import tritonclient.grpc

    with tritonclient.grpc.InferenceServerClient(place) as found:
        yield found


def given(name: str, values: Any, datatype: str) -> Any:
    from tritonclient.grpc import InferInput

    found = InferInput(name, values.shape, datatype)
    found.set_data_from_numpy(values)
    return found


def two(n: int = 1) -> list[Any]:
    left = np.arange(16 * n, dtype=np.int32).reshape(n, 16)
    return [given("INPUT0", left, "INT32"), given("INPUT1", np.ones_like(left), "INT32")]


def check_sums(result: Any, n: int = 1) -> None:
    left = np.arange(16 * n, dtype=np.int32).reshape(n, 16)
    assert np.array_equal(result.as_numpy("OUTPUT0"), left + 1)
    assert np.array_equal(result.as_numpy("OUTPUT1"), left - 1)


def repeat(values: list[int], delays_ms: list[int]) -> list[Any]:
    return [
        given("IN", np.array(values, np.int32), "INT32"),
        given("DELAY", np.array(delays_ms, np.uint32), "UINT32"),
        given("WAIT", np.zeros(1, np.uint32), "UINT32"),
    ]


def texts(*values: bytes) -> Any:
    return given("IN", np.array(values, dtype=np.object_), "BYTES")


def test_messages_have_the_fields_of_triton() -> None:
    """Names, numbers and types of every message, against the descriptors that Triton's client brings."""
    service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2", reason="tritonclient is not installed")
    pending, seen = [f"Model{k}{r}" for k in ("Infer", "Config", "Metadata", "Statistics", "Ready") for r in
                     ("Request", "Response")], set[str]()  # fmt: skip
    pending += [f"Repository{k}{r}" for k in ("Index", "ModelLoad", "ModelUnload") for r in ("Request", "Response")]
    pending += [f"Server{k}{r}" for k in ("Live", "Ready", "Metadata") for r in ("Request", "Response")]
    pairs = [(message(name).DESCRIPTOR, service_pb2.DESCRIPTOR.message_types_by_name[name]) for name in
             [*pending, "ModelStreamInferResponse"]]  # fmt: skip
    while pairs:
        ours, theirs = pairs.pop()
        if theirs.full_name in seen:
            continue
        seen.add(theirs.full_name)
        known = {f.name: f for f in theirs.fields}
        assert {f.name: told(f) for f in ours.fields} == {name: told(f) for name, f in known.items()}, theirs.full_name
        pairs += [(f.message_type, known[f.name].message_type) for f in ours.fields if f.message_type is not None]
    assert len(seen) > 80, "a configuration has many"


def told(field: Any) -> tuple[Any, ...]:
    oneof = field.containing_oneof.name if field.containing_oneof is not None else ""
    return field.number, field.type, field.is_repeated, oneof


def test_health_metadata_and_configuration(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("simple") and client.is_model_ready("simple", "1")
    assert not client.is_model_ready("simple", "2") and not client.is_model_ready("gone")
    assert "binary_tensor_data" in client.get_server_metadata().extensions
    assert client.get_model_metadata("simple", as_json=True)["inputs"][1] == {
        "name": "INPUT1",
        "datatype": "INT32",
        "shape": ["-1", "16"],
    }
    config = client.get_model_config("simple").config
    assert config.max_batch_size == 8 and config.dynamic_batching.preferred_batch_size == [8]
    assert client.get_model_config("says").config.model_transaction_policy.decoupled


def test_sums_with_outputs_and_parameters(client: Any) -> None:
    from tritonclient.grpc import InferRequestedOutput

    outputs = [InferRequestedOutput("OUTPUT1"), InferRequestedOutput("OUTPUT0")]
    result = client.infer("simple", two(3), outputs=outputs, request_id="mine", compression_algorithm="gzip")
    check_sums(result, 3)
    assert result.get_response().id == "mine" and result.get_response().model_version == "1"
    check_sums(client.infer("simple", two(), priority=1, timeout=1000, parameters={"mine": "x"}, client_timeout=20.0))


def test_many_at_a_time_are_batched(client: Any) -> None:
    answers: Answers = queue.SimpleQueue()
    for _ in range(64):
        client.async_infer("simple", two(), partial(put, answers))
    for _ in range(64):
        result, error = answers.get(timeout=20)
        assert error is None
        check_sums(result)
    (stats,) = client.get_inference_statistics("simple", "1").model_stats
    assert stats.inference_count >= 64 and stats.execution_count <= stats.inference_count
    assert sum(b.compute_infer.count for b in stats.batch_stats) == stats.execution_count
    assert len(client.get_inference_statistics().model_stats) == len(DTYPES) + 3


def put(answers: Answers, result: Any, error: Any) -> None:
    answers.put((result, error))


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_comes_back_as_it_was_sent(client: Any, datatype: str) -> None:
    values: Any = np.random.default_rng(0).integers(0, 2, (3, 7)).astype(DTYPES[datatype])
    if datatype == "BYTES":
        values = np.array([b"\xff" * i for i in range(21)], dtype=np.object_).reshape(3, 7)
    back = client.infer(f"same_{datatype}", [given("INPUT0", values, datatype)]).as_numpy("OUTPUT0")
    assert back.dtype == values.dtype and np.array_equal(back, values)


def test_classes(client: Any) -> None:
    from tritonclient.grpc import InferRequestedOutput

    inputs = [given("INPUT0", np.array([[0.5, 4, 3, 2]], np.float32), "FP32")]
    wanted = [InferRequestedOutput("OUTPUT0", class_count=2)]
    found = client.infer("same_FP32", inputs, outputs=wanted).as_numpy("OUTPUT0")
    assert found.tolist() == [[b"4.000000:1", b"3.000000:2"]]


def test_models_are_loaded_and_unloaded(client: Any) -> None:
    client.unload_model("simple")
    assert not client.is_model_ready("simple") and client.is_server_ready()
    client.load_model("simple")
    check_sums(client.infer("simple", two()))
    config = client.get_model_config("simple", as_json=True)["config"]
    client.load_model("simple", config=json.dumps({**config, "max_batch_size": 16}))
    assert client.get_model_config("simple").config.max_batch_size == 16
    client.load_model("simple")
    states = {m.name: m.state for m in client.get_model_repository_index().models}
    assert states["simple"] == "READY" and len(states) == len(DTYPES) + 3


def test_decoupled_models_on_a_stream(client: Any) -> None:
    """As Triton's example simple_grpc_custom_repeat does it, two requests side by side."""
    answers: Answers = queue.SimpleQueue()
    client.start_stream(partial(put, answers))
    more = {"enable_empty_final_response": True}
    client.async_stream_infer("repeat_int32", repeat([1, 2, 3], [0, 50, 50]), request_id="a", **more)
    client.async_stream_infer("says", [texts(b"x", b"y")], request_id="b", **more)
    client.async_stream_infer("simple", two(), request_id="c")
    found: dict[str, list[Any]] = {"a": [], "b": [], "c": []}
    for _ in range(4 + 3 + 1):
        result, error = answers.get(timeout=20)
        assert error is None
        found[result.get_response().id].append(result)
    client.stop_stream()
    assert [r.as_numpy("OUT").tolist() for r in found["a"][:3]] == [[1], [2], [3]]
    assert [r.as_numpy("OUT").tolist() for r in found["b"][:2]] == [[b"x"], [b"y"]]
    check_sums(found["c"][0])
    for results in found.values():
        finals = [r.get_response().parameters["triton_final_response"].bool_param for r in results]
        assert finals == [False] * (len(results) - 1) + [True]


def test_errors_on_a_stream(client: Any) -> None:
    answers: Answers = queue.SimpleQueue()
    client.start_stream(partial(put, answers))
    client.async_stream_infer("gone", two())
    client.async_stream_infer("simple", two())
    assert "Request for unknown model: 'gone' is not found" in str(answers.get(timeout=20)[1])
    check_sums(answers.get(timeout=20)[0])
    client.stop_stream()
    client.start_stream(partial(put, answers), headers={"triton_grpc_error": "true"})
    client.async_stream_infer("gone", two())
    error = answers.get(timeout=20)[1]
    assert error.status() == "StatusCode.NOT_FOUND"
    client.stop_stream()


def test_what_is_cancelled_is_cancelled_in_the_model(client: Any, root: Path) -> None:
    answers: Answers = queue.SimpleQueue()
    client.start_stream(partial(put, answers))
    client.async_stream_infer("says", [texts(b"wait")])
    assert answers.get(timeout=20)[0].as_numpy("OUT").tolist() == [b"wait"]
    client.stop_stream(cancel_requests=True)
    until((root / "says" / "cancelled").exists)


def test_the_client_of_asyncio(place: str) -> None:
    from tritonclient.grpc import aio

    async def asked() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "repeat_int32", "inputs": repeat([7, 8], [0, 1])}
        yield {"model_name": "simple", "inputs": two()}

    async def work() -> list[Any]:
        async with aio.InferenceServerClient(place) as client:
            check_sums(await client.infer("simple", two()))
            return [result async for result, error in client.stream_infer(asked()) if error is None]

    found = asyncio.run(work())
    values = [r.as_numpy("OUT").tolist() for r in found if r.as_numpy("OUT") is not None]
    assert values == [[7], [8]] and len(found) == 3


def test_what_is_refused_is_its_error(client: Any) -> None:
    from tritonclient.utils import InferenceServerException

    inputs = [given("INPUT0", np.zeros((1, 4), np.float32), "FP32")]
    for model, status, says in (
        ("gone", "NOT_FOUND", "Request for unknown model: 'gone' is not found"),
        (
            "simple",
            "INVALID_ARGUMENT",
            r"expected 2 inputs but got 1 inputs for model 'simple'. Got input\(s\) ",
        ),
        ("same_FP64", "INVALID_ARGUMENT", "data-type is 'FP32', but model 'same_FP64' expects 'FP64'"),
        ("repeat_int32", "UNIMPLEMENTED", "ModelInfer RPC doesn't support models with decoupled transaction policy"),
    ):
        with pytest.raises(InferenceServerException, match=says) as failed:
            client.infer(model, inputs)
        assert failed.value.status() == f"StatusCode.{status}"
    calls: list[Callable[[], Any]] = [client.get_system_shared_memory_status, client.get_cuda_shared_memory_status]
    for call in calls:
        with pytest.raises(InferenceServerException, match="Client shared memory is disabled"):
            call()
