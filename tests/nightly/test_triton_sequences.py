"""Triton's own clients on models of sequences, as its examples use them: one by one over HTTP, on streams over gRPC."""

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.python_models import write
from tests.support.repository import in_process
from tests.support.sequences import SUMS, accumulator
from tests.support.server import Threaded

pytestmark = pytest.mark.nightly
VALUES = [11, 7, 5, 3, 2, 0, 1]
TOTALS = np.cumsum(VALUES).tolist()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    root = tmp_path_factory.mktemp("models")
    write(root, "numbers", SUMS, accumulator("direct {}"))
    write(root, "strings", SUMS, accumulator("oldest { max_candidate_sequences: 2 }", "STRING"))
    with in_process(root, grpc_port=0) as found:
        yield found


def given(module: Any, value: int) -> list[Any]:
    one = module.InferInput("INPUT", [1, 1], "INT32")
    one.set_data_from_numpy(np.array([[value]], np.int32))
    return [one]


def flags(i: int) -> dict[str, bool]:
    return {"sequence_start": i == 0, "sequence_end": i == len(VALUES) - 1}


@pytest.mark.parametrize(("model", "id_"), [("numbers", 1000), ("numbers", 2**63), ("strings", "a-b")])
def test_over_http(served: Threaded, model: str, id_: int | str) -> None:
    import tritonclient.http as module

    with module.InferenceServerClient(served.url.removeprefix("http://")) as client:
        found = [
            client.infer(model, given(module, value), sequence_id=id_, **flags(i)).as_numpy("OUTPUT").item()
            for i, value in enumerate(VALUES)
        ]
        assert found == TOTALS
        with pytest.raises(Exception, match="must specify the START flag on the first request of the sequence"):
            client.infer(model, given(module, 1), sequence_id=id_)


@pytest.mark.parametrize(("model", "ids"), [("numbers", (1007, 1008, 1009, 1010, 1011)), ("strings", ("x", "y", "z"))])
def test_on_a_stream(served: Threaded, model: str, ids: tuple[int | str, ...]) -> None:
    import tritonclient.grpc as module

    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with module.InferenceServerClient(served.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for i, value in enumerate(VALUES):
            for n, id_ in enumerate(ids):
                client.async_stream_infer(
                    model, given(module, value * (n + 1)), request_id=f"{n}/{i}", sequence_id=id_, **flags(i)
                )
        client.stop_stream()
        found: dict[str, int] = {}
        for _ in range(len(VALUES) * len(ids)):
            result, error = answers.get(timeout=20)
            assert error is None
            found[result.get_response().id] = result.as_numpy("OUTPUT").item()
    assert found == {f"{n}/{i}": total * (n + 1) for i, total in enumerate(TOTALS) for n in range(len(ids))}
