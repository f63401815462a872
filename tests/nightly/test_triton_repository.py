"""Triton's own HTTP client on a repository that is served: health, metadata, every datatype, control, statistics."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace.model_repository.request.tensors import DTYPES
from tests.support.repository import ADD_SUB, REPEAT, identity, serving, write_models

pytestmark = pytest.mark.nightly
KINDS = {"BYTES": "STRING"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    root = tmp_path_factory.mktemp("models")
    same = {f"same_{kind}": identity(KINDS.get(kind, kind), more="max_batch_size: 8") for kind in DTYPES}
    write_models(root, {**same, "simple": ADD_SUB + "dynamic_batching { }", "repeat_int32": REPEAT})
    with serving(root, model_control_mode="explicit", load_model=("*",)) as found:
        yield found.removeprefix("http://")


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    import tritonclient.http

    with tritonclient.http.InferenceServerClient(url, concurrency=8) as found:
        yield found


def added(client: Any, n: int = 1, **more: Any) -> Any:
    """Triton's simple_http_infer_client, with a batch of n."""
    from tritonclient.http import InferInput

    left = np.arange(16 * n, dtype=np.int32).reshape(n, 16)
    inputs = [InferInput("INPUT0", left.shape, "INT32"), InferInput("INPUT1", left.shape, "INT32")]
    inputs[0].set_data_from_numpy(left, binary_data=False)
    inputs[1].set_data_from_numpy(np.ones_like(left), binary_data=True)
    result = client.infer("simple", inputs, **more)
    assert np.array_equal(result.as_numpy("OUTPUT0"), left + 1)
    assert np.array_equal(result.as_numpy("OUTPUT1"), left - 1)
    return result


def test_health_metadata_and_configuration(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("simple") and client.is_model_ready("simple", "1")
    assert not client.is_model_ready("simple", "2") and not client.is_model_ready("gone")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("simple")["inputs"][1] == {
        "name": "INPUT1",
        "datatype": "INT32",
        "shape": [-1, 16],
    }
    config = client.get_model_config("simple")
    assert config["max_batch_size"] == 8 and config["dynamic_batching"]["preferred_batch_size"] == [8]


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_sums_with_outputs_and_codings(client: Any, coding: str | None) -> None:
    from tritonclient.http import InferRequestedOutput

    outputs = [InferRequestedOutput("OUTPUT0", binary_data=True), InferRequestedOutput("OUTPUT1", binary_data=False)]
    codings = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    result = added(client, 3, outputs=outputs, request_id="mine", **codings)
    assert result.get_response()["id"] == "mine" and result.get_response()["model_version"] == "1"
    added(client, priority=1, timeout=1000, parameters={"mine": "x"})


def test_many_at_a_time_are_batched(client: Any) -> None:
    from tritonclient.http import InferInput

    data = np.zeros((1, 16), np.int32)
    inputs = [InferInput(f"INPUT{i}", data.shape, "INT32") for i in range(2)]
    for one in inputs:
        one.set_data_from_numpy(data)
    for waiting in [client.async_infer("simple", inputs) for _ in range(64)]:
        assert not waiting.get_result().as_numpy("OUTPUT0").any()
    (stats,) = client.get_inference_statistics("simple", "1")["model_stats"]
    assert stats["inference_count"] >= 64 and stats["execution_count"] <= stats["inference_count"]
    assert sum(b["compute_infer"]["count"] for b in stats["batch_stats"]) == stats["execution_count"]
    assert len(client.get_inference_statistics()["model_stats"]) == len(DTYPES) + 2


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_comes_back_as_it_was_sent(client: Any, datatype: str) -> None:
    from tritonclient.http import InferInput, InferRequestedOutput

    values: Any = np.random.default_rng(0).integers(0, 2, (3, 7)).astype(DTYPES[datatype])
    if datatype == "BYTES":
        values = np.array([b"\xff" * i for i in range(21)], dtype=np.object_).reshape(3, 7)
    for binary in (True, False) if datatype not in ("FP16", "BF16", "BYTES") else (True,):
        given = InferInput("INPUT0", values.shape, datatype)
        given.set_data_from_numpy(values, binary_data=binary)
        found = client.infer(f"same_{datatype}", [given], outputs=[InferRequestedOutput("OUTPUT0", binary_data=binary)])
        back = found.as_numpy("OUTPUT0")
        assert back.dtype == values.dtype and np.array_equal(back, values)


def test_classes(client: Any) -> None:
    from tritonclient.http import InferInput, InferRequestedOutput

    given = InferInput("INPUT0", (1, 4), "FP32")
    given.set_data_from_numpy(np.array([[0.5, 4, 3, 2]], np.float32))
    wanted = [InferRequestedOutput("OUTPUT0", class_count=2)]
    assert client.infer("same_FP32", [given], outputs=wanted).as_numpy("OUTPUT0").tolist() == [
        [b"4.000000:1", b"3.000000:2"]
    ]


def test_models_are_loaded_and_unloaded(client: Any) -> None:
    client.unload_model("simple")
    assert not client.is_model_ready("simple") and client.is_server_ready()
    client.load_model("simple")
    assert client.is_model_ready("simple")
    added(client)
    config = client.get_model_config("simple")
    client.load_model("simple", config=json.dumps({**config, "max_batch_size": 16}))
    assert client.get_model_config("simple")["max_batch_size"] == 16
    client.load_model("simple")
    states = {m["name"]: m["state"] for m in client.get_model_repository_index()}
    assert states["simple"] == "READY" and len(states) == len(DTYPES) + 2


def test_the_client_of_asyncio(url: str) -> None:
    from tritonclient.http import InferInput, aio
    from tritonclient.utils import InferenceServerException

    left = np.arange(16, dtype=np.int32).reshape(1, 16)

    def two(n: int) -> list[Any]:
        inputs = [InferInput(f"INPUT{i}", left.shape, "INT32") for i in (0, 1)]
        inputs[0].set_data_from_numpy(left, binary_data=n % 2 == 0)
        inputs[1].set_data_from_numpy(np.full_like(left, n))
        return inputs

    async def work() -> None:
        async with aio.InferenceServerClient(url) as client:
            assert await client.is_server_ready() and await client.is_model_ready("simple")
            assert (await client.get_model_metadata("simple"))["inputs"][0]["shape"] == [-1, 16]
            for more in ({}, {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"}):
                found = await asyncio.gather(
                    *(client.infer("simple", two(n), request_id=str(n), **more) for n in range(8))
                )
                for n, result in enumerate(found):
                    assert np.array_equal(result.as_numpy("OUTPUT0"), left + n) and result.get_response()["id"] == str(
                        n
                    )
            with pytest.raises(InferenceServerException, match="Request for unknown model: 'gone' is not found"):
                await client.infer("gone", two(0))
            assert (await client.get_inference_statistics("simple"))["model_stats"][0]["inference_count"] >= 16

    asyncio.run(work())


def test_what_is_refused_is_its_error(client: Any) -> None:
    from tritonclient.http import InferInput
    from tritonclient.utils import InferenceServerException

    given = InferInput("INPUT0", (1, 4), "FP32")
    given.set_data_from_numpy(np.zeros((1, 4), np.float32))
    for model, status, says in (
        ("gone", "404", "Request for unknown model: 'gone' is not found"),
        ("simple", "400", r"expected 2 inputs but got 1 inputs for model 'simple'. Got input\(s\) \['INPUT0'\]"),
        ("same_FP64", "400", "inference input 'INPUT0' data-type is 'FP32', but model 'same_FP64' expects 'FP64'"),
        ("repeat_int32", "501", "doesn't support models with decoupled transaction policy"),
    ):
        with pytest.raises(InferenceServerException, match=says) as failed:
            client.infer(model, [given])
        assert failed.value.status() == status
