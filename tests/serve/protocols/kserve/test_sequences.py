"""Sequences through both protocols: a sum that goes on, with its id, its beginning and its end in the requests."""

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.support import until
from tests.support.kserve_grpc import Client, connected, one, refusal, request
from tests.support.python_models import write
from tests.support.repository import in_process
from tests.support.sequences import SUMS, accumulator
from tests.support.server import Threaded

NO_START = "must specify the START flag on the first request of the sequence"
PARTS = (1, 20, 300)
OLDEST = "oldest { max_candidate_sequences: 4 max_queue_delay_microseconds: 2000 }"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    root: Path = tmp_path_factory.mktemp("models")
    write(root, "direct", SUMS, accumulator("direct {}"))
    write(root, "oldest", SUMS, accumulator(OLDEST, "STRING"))
    with in_process(root, grpc_port=0) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Threaded) -> Iterator[Client]:
    with connected(served.grpc_url) as found:
        yield found


def posted(url: str, model: str, id_: int | str, value: int, **said: bool) -> httpx.Response:
    inputs = [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [value]}]
    parameters = {"sequence_id": id_, **{f"sequence_{key}": is_so for key, is_so in said.items()}}
    return httpx.post(f"{url}/v2/models/{model}/infer", json={"inputs": inputs, "parameters": parameters}, timeout=20)


@pytest.mark.parametrize(("model", "ids"), [("direct", range(1, 7)), ("oldest", list("uvwxyz"))])
def test_over_http(served: Threaded, model: str, ids: list[int | str]) -> None:
    def all_of(id_: int | str) -> list[int]:
        replies = [
            posted(served.url, model, id_, value, start=i == 0, end=i == 2) for i, value in enumerate(PARTS)
        ]  # fmt: skip
        return [reply.json()["outputs"][0]["data"][0] for reply in replies]

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(all_of, ids)) == [[1, 21, 321]] * 6
    (stats,) = httpx.get(f"{served.url}/v2/models/{model}/stats").json()["model_stats"]
    assert stats["inference_count"] == 18 and stats["inference_stats"]["success"]["count"] == 18
    assert sum(stats["batch_closed"].values()) == stats["execution_count"]
    late = posted(served.url, model, ids[0], 1, end=True)
    what = f"inference request for sequence {ids[0]} to model '{model}' {NO_START}"
    assert (late.status_code, late.json()) == (400, {"error": what})


def test_what_http_refuses(served: Threaded) -> None:
    nameless = httpx.post(
        f"{served.url}/v2/models/direct/infer",
        json={"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [1]}]},
    )
    what = "inference request to model 'direct' must specify a non-zero or non-empty correlation ID"
    assert (nameless.status_code, nameless.json()["error"]) == (400, what)
    extensions = httpx.get(f"{served.url}/v2").json()["extensions"]
    assert extensions[1:3] == ["sequence", "sequence(string_id)"]


def part(model: str, id_: int | str, value: int, flags: str = "", name: str = "") -> Any:
    """flags: of "se", start and end"""
    kind = "string_param" if isinstance(id_, str) else "int64_param"
    parameters = {"sequence_id": {kind: id_}}
    parameters |= {f"sequence_{key}": {"bool_param": key[0] in flags} for key in ("start", "end")}
    raw = [struct.pack("<i", value)]
    return request(model, [one("INT32", [1, 1], "INPUT")], raw, id=name, parameters=parameters)


def test_a_grpc_stream_of_several_sequences(client: Client) -> None:
    """As Triton's own example sends them: all at once, answered in their order, each sequence its own sum."""
    cases: dict[str, tuple[int | str, ...]] = {"direct": (11, 12, 13), "oldest": ("a", "b", "c")}
    for model, ids in cases.items():
        asked = [
            part(model, id_, value * (i + 1), "s" * (value == 1) + "e" * (value == 300), f"{id_}/{value}")
            for value in PARTS
            for i, id_ in enumerate(ids)
        ]
        answers = [response.infer_response for response in client.stream(iter(asked))]
        found = {a.id: struct.unpack("<i", a.raw_output_contents[0])[0] for a in answers}
        assert found == {f"{id_}/{v}": total * (i + 1) for v, total in zip(PARTS, (1, 21, 321), strict=True)
                         for i, id_ in enumerate(ids)}  # fmt: skip


def test_errors_of_sequences_over_grpc(client: Client) -> None:
    told = [r.error_message for r in client.stream(iter([part("direct", 99, 1), part("direct", 0, 1, "se")]))]
    nameless = "inference request to model 'direct' must specify a non-zero or non-empty correlation ID"
    assert told == [f"inference request for sequence 99 to model 'direct' {NO_START}", nameless]
    two = [one("INT32", [2, 1], "INPUT")]
    words = "inference request to model 'direct' must specify batch-size 1 due to requirements of sequence batcher"
    assert refusal(lambda: client.infer("direct", two, [bytes(8)])) == ("INVALID_ARGUMENT", words)


def n_pending(url: str) -> float:
    """Requests to `direct` that no instance has."""
    sign = 'nv_inference_pending_request_count{model="direct",version="1"} '
    lines = httpx.get(url + "/metrics").text.splitlines()
    return next(float(line.removeprefix(sign)) for line in lines if line.startswith(sign))


def test_a_client_that_leaves_ends_its_sequence(client: Client, served: Threaded) -> None:
    """The slots are all taken for as long as nobody ends them, so that what it asked waits."""
    for id_ in range(1, 5):
        assert posted(served.url, "direct", id_, 1, start=True).status_code == 200
    waiting = client.future("ModelInfer", part("direct", 50, 1, "s"))
    until(lambda: n_pending(served.url) == 1)
    behind = client.future("ModelInfer", part("direct", 51, 7, "se"))
    until(lambda: n_pending(served.url) == 2)
    waiting.cancel()
    until(lambda: n_pending(served.url) == 1)
    assert posted(served.url, "direct", 1, 1, end=True).json()["outputs"][0]["data"] == [2]
    assert behind.result(), "and the other has the slot that was free"
    assert NO_START in posted(served.url, "direct", 50, 1).json()["error"]
    for id_ in range(2, 5):
        assert posted(served.url, "direct", id_, 1, end=True).json()["outputs"][0]["data"] == [2]
